"""What one pipeline adds to the sums over data ranks in a step. Ranks with other microbatches may add other things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphcomp.capture.joint import Joint, LossSpec, MetricSpec
from graphcomp.errors import AgreementError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.digest import number_of


@dataclass(frozen=True)
class Contribution:
    """losses, metrics: in order of first appearance. floating: the losses whose counts are float weights.

    gradients: the parameters that some microbatch has a gradient for. seeded: some program draws random numbers.
    updated: the buffers that some microbatch changes.
    """

    losses: tuple[LossSpec, ...]
    metrics: tuple[MetricSpec, ...]
    floating: frozenset[str]
    gradients: tuple[str, ...]
    seeded: bool
    updated: tuple[str, ...]

    @cached_property
    def number(self) -> int:
        """The same in every process for equal contributions."""
        parts = (self.losses, self.metrics, sorted(self.floating), self.gradients, self.seeded, self.updated)
        return number_of(repr(parts))


def contribution(joints: Iterable[Joint]) -> Contribution:
    """Of a step whose microbatches have these joint programs."""
    found = list(joints)
    floating = set()
    gradients: dict[str, None] = {}
    for joint in found:
        for what, node in joint.program.output_items():
            if isinstance(what, role.Grad) and node is not None:
                gradients[what.name] = None
            elif isinstance(what, role.Tokens):
                count = meta.tensor(node)
                if count is not None and count.dtype.is_floating_point:
                    floating.add(what.loss)
    return Contribution(
        losses=tuple(dict.fromkeys(spec for joint in found for spec in joint.losses)),
        metrics=tuple(dict.fromkeys(spec for joint in found for spec in joint.metrics)),
        floating=frozenset(floating),
        gradients=tuple(gradients),
        seeded=any(role.Seed() in joint.program.inputs for joint in found),
        updated=tuple(dict.fromkeys(name for joint in found for name in joint.updated)),
    )


def combine(contributions: Sequence[Contribution]) -> Contribution:
    """What all data ranks together report and reduce, in an order that follows from theirs.

    Raises AgreementError if one name means different things to them.
    """
    losses = tuple(dict.fromkeys(spec for one in contributions for spec in one.losses))
    metrics = tuple(dict.fromkeys(spec for one in contributions for spec in one.metrics))
    for kind, specs in (("loss", losses), ("metric", metrics)):
        seen: dict[str, LossSpec | MetricSpec] = {}
        for spec in specs:
            if seen.setdefault(spec.name, spec) != spec:
                raise AgreementError(
                    f"{kind} '{spec.name}' is not the same to all microbatches of the step",
                    expected=str(seen[spec.name]),
                    got=str(spec),
                    do="give it another name where it is something else",
                )
    return Contribution(
        losses,
        metrics,
        frozenset().union(*(one.floating for one in contributions)),
        tuple(dict.fromkeys(name for one in contributions for name in one.gradients)),
        any(one.seeded for one in contributions),
        tuple(dict.fromkeys(name for one in contributions for name in one.updated)),
    )
