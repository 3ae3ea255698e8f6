"""One call of a step: how it is called, what it is bound to, and what it yields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphcomp.capture.facts import Facts
from graphcomp.capture.spelled import PASSING, lines
from graphcomp.dispatch import Bound
from graphcomp.ir import spelling
from graphcomp.ir.digest import number_of
from graphcomp.prepare import Prepared
from graphcomp.runtime.program.fingerprint import checksum
from graphcomp.runtime.ranks.agreement import DataRank
from graphcomp.runtime.results.result import StepResult


@dataclass(frozen=True)
class Options:
    """How a step is called; the same on all ranks."""

    training: bool = True
    outputs: str = "none"
    loss_scale: float = 1.0
    tokens: tuple[str, ...] = ()
    """The losses whose denominators the caller gives."""
    amounts: tuple[float | None, ...] = ()
    """These denominators, as far as the host can see them without waiting for a device."""
    fractions: tuple[str, ...] = ()
    """Those of the losses whose denominators are given as floats."""
    holds: bool = False
    """Gradients are handed to the caller, not written."""
    inspects: bool = False
    """Before anything is written, hooks are run or values looked at, which may stop the step on all ranks."""
    stops: Literal["", "prepared", "counted"] = ""
    """What is done when it is prepared, or its tokens are counted; then no parameter is read."""

    @property
    def runs(self) -> bool:
        return not self.stops

    @property
    def keeps(self) -> bool:
        return self.outputs != "none"

    @property
    def numbers(self) -> tuple[float, ...]:
        """The same in numbers that are alike in every process."""
        given = number_of(repr((self.tokens, self.amounts, self.fractions))) if self.tokens else 0
        # Not the scale itself: Python's hashes of -1.0 and of -2.0 are equal.
        scale = number_of(repr(float(self.loss_scale))) if self.loss_scale != 1 else 0
        outputs = ("none", "local", "all").index(self.outputs)
        stops = ("", "prepared", "counted").index(self.stops)
        return self.training, self.holds, stops, self.inspects, outputs, scale, given

    def __str__(self) -> str:
        kind = "a training" if self.training else "an evaluation"
        words = [f"{kind} step" + f", {self.stops} only" * bool(self.stops), f"outputs={self.outputs!r}"]
        words += [f"loss_scale={self.loss_scale}", f"tokens {dict(zip(self.tokens, self.amounts, strict=True))}"]
        words += [f"as floats of {self.fractions}"] if self.fractions else []
        words += ["its gradients held"] if self.holds else []
        words += ["with hooks or check_finite"] if self.inspects else []
        return ", ".join(words)

    def given(self, tokens: Mapping[str, torch.Tensor]) -> Options:
        """The same, with these denominators."""
        names = tuple(sorted(tokens))
        amounts = tuple(tokens[name].item() if tokens[name].is_cpu else None for name in names)
        fractions = tuple(name for name in names if tokens[name].is_floating_point())
        return replace(self, tokens=names, amounts=amounts, fractions=fractions)


@dataclass(frozen=True)
class Line:
    """One pipeline of this process in a step: its microbatches, and what runs them.

    first: the place of its first microbatch among those of all data ranks.
    """

    bound: tuple[Bound, ...]
    prepared: Prepared
    data_rank: int
    first: int


@dataclass(frozen=True)
class BoundStep:
    """A step that is ready to run. lines: of this process. ranks: what all data ranks have said."""

    lines: tuple[Line, ...]
    ranks: tuple[DataRank, ...]
    options: Options


@dataclass(frozen=True)
class Ran:
    """A finished step. gradients: by name, of the ranks in this process. buffers: new values.

    They are written where a process runs one rank, gradients unless the caller holds them; of virtual ranks nothing is.
    """

    result: StepResult
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    messages: int
    bytes_sent: int
    collectives: int


def intent_text(options: Options, bound: Sequence[Bound], state: Facts, contents: Mapping[tuple[int, str], int]) -> str:
    """What a rank is about to do, for comparing: what was given, then the model's state, then which programs serve it.

    contents: see `contents_of`. The first line is what all ranks of the job have in common.
    """
    found = [str(options), f"{len(bound)} microbatches"]
    found += [f"microbatch {i}: {_forms(one)}" for i, one in enumerate(bound)]
    found += contents_text(contents)
    found += lines(state, PASSING.__contains__)
    found += [f"microbatch {i}: {one.specialisation.kind}" for i, one in enumerate(bound)]
    found += lines(state, lambda kind: kind not in PASSING)
    found += [f"microbatch {i}: specialisation {one.specialisation.number}" for i, one in enumerate(bound)]
    return "\n".join(found)


def _forms(one: Bound) -> str:
    forms = (f"{path} {spelling.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in one.leaves.items())
    return ", ".join(forms)


def contents_of(bound: Sequence[Bound]) -> dict[tuple[int, str], int]:
    """A checksum of every tensor, by microbatch and path. Reads them on the host."""
    return {(i, path): int(checksum(leaf)) for i, one in enumerate(bound) for path, leaf in one.leaves.items()}


def contents_text(contents: Mapping[tuple[int, str], int]) -> list[str]:
    """A line for each tensor."""
    return [f"microbatch {i}: contents of {path} {x & (1 << 64) - 1:016x}" for (i, path), x in contents.items()]
