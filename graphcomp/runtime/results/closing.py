"""The closing exchange: losses and metrics of every microbatch and stage, on every rank, bitwise equal.

Every rank puts what it has into one float64 vector, zero elsewhere; one sum over the pipeline completes it.
Everything reported is then computed from that vector by the same operations on every rank. Nothing is read
back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from graphcomp.capture.joint import LossSpec, MetricSpec
from graphcomp.ir.signature import Loss, Metric, Role
from graphcomp.partition.stages import Partitioned

Reduce = Callable[[torch.Tensor], object]
"""Adds (or takes the largest of) a vector over ranks, in place."""


@dataclass(frozen=True)
class Closed:
    """Lazy, 0-dim, float64, equal on all ranks of the pipeline; `loss`, `losses` and `metrics` on all data
    ranks too.

    losses: by name, divided by their denominators. metrics: by name, combined. microbatch_losses: the share
    of each microbatch in the loss. counts: how many values a mean metric is the mean of. A metric that no microbatch
    has is nan (mean), 0 (sum, last), or an infinity (max, min).
    """

    loss: torch.Tensor
    losses: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor]
    microbatch_losses: tuple[torch.Tensor, ...]
    counts: Mapping[str, torch.Tensor]


class Closing:
    """How the values of a step lie in the vector; made once for a sequence of specialisations.

    specialisations: one a microbatch. losses, metrics: what is reported, in an order that data ranks agree
    on; None: what the specialisations have. device: where the recorded values are.
    """

    def __init__(
        self,
        specialisations: Sequence[Partitioned],
        device: torch.device | str = "cpu",
        losses: Sequence[LossSpec] | None = None,
        metrics: Sequence[MetricSpec] | None = None,
    ) -> None:
        joints = [one.joint for one in specialisations]
        self.losses = tuple(dict.fromkeys(spec for one in joints for spec in one.losses) if losses is None else losses)
        self.metrics = tuple(
            dict.fromkeys(spec for one in joints for spec in one.metrics) if metrics is None else metrics
        )
        self.microbatches, self.device = len(specialisations), torch.device(device)
        owned = [(stage, m, role) for m, one in enumerate(specialisations) for role, stage in _owners(one).items()]
        owned.sort(key=lambda item: item[:2])
        # Sorted by stage, so that what a rank has is mostly one piece.
        self._entries = {(m, role): (stage, place) for place, (stage, m, role) in enumerate(owned)}
        self.length = len(owned) + 1  # the last place stays zero: what a microbatch does not have
        zero = self.length - 1
        absent = (0, zero)
        self._totals = self._index(
            [
                self._entries.get((m, Loss(spec.name)), absent)[1]
                for spec in self.losses
                for m in range(self.microbatches)
            ]
        )
        present = {
            spec.name: [
                self._entries[key][1]
                for m in range(self.microbatches)
                if (key := (m, Metric(spec.name))) in self._entries
            ]
            for spec in self.metrics
        }
        self._present = {name: (len(places), self._index(places)) for name, places in present.items()}

    def pack(self, records: Iterable[tuple[tuple[int, Role], torch.Tensor]], stages: Iterable[int]) -> torch.Tensor:
        """The vector of one rank, that holds `stages`, from its recorded values."""
        held = set(stages)
        # One look-up a value: hashing the keys is what this costs.
        found = [(self._entries.get(key), value) for key, value in records]
        own = [(entry[1], value) for entry, value in found if entry is not None and entry[0] in held]
        own.sort(key=itemgetter(0))
        vector = torch.zeros(self.length, dtype=torch.float64, device=self.device)
        start = 0
        while start < len(own):
            first, dtype = own[start][0], own[start][1].dtype
            end = start
            while end < len(own) and own[end][0] == first + end - start and own[end][1].dtype == dtype:
                end += 1
            vector[first : first + end - start] = torch.stack([value for _, value in own[start:end]])
            start = end
        return vector

    def of_each(
        self, vector: torch.Tensor, denominators: Mapping[str, torch.Tensor]
    ) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        """From the complete vector, for each microbatch: its share of every loss it has, and its own metrics."""
        values, below = vector.unbind(), self._denominators(denominators).unbind()
        found = []
        for m in range(self.microbatches):
            losses = [(spec, self._entries.get((m, Loss(spec.name)))) for spec in self.losses]
            metrics = [(spec, self._entries.get((m, Metric(spec.name)))) for spec in self.metrics]
            divided = zip(losses, below, strict=True)
            found.append(
                (
                    {spec.name: values[entry[1]] / number for (spec, entry), number in divided if entry is not None},
                    {spec.name: values[entry[1]] for spec, entry in metrics if entry is not None},
                )
            )
        return found

    def close(
        self,
        vector: torch.Tensor,
        denominators: Mapping[str, torch.Tensor],
        data: DataRanks | None = None,
    ) -> Closed:
        """The results from the complete vector. denominators: over the whole step, by loss name, never
        zero.
        """
        totals = vector[self._totals].view(len(self.losses), self.microbatches)
        below = self._denominators(denominators)
        shares = (totals / below[:, None]).sum(0)
        sums, largest = self._summary(vector, totals, data is None or data.first)
        if data is not None:
            data.add(sums)
            if len(largest):
                data.largest(largest)
        return self._closed(sums, largest, below, tuple(shares.unbind()))

    def close_together(
        self,
        others: Sequence[Closing],
        vectors: Sequence[torch.Tensor],
        denominators: Mapping[str, torch.Tensor],
    ) -> list[Closed]:
        """`close` for several data ranks in one process: this one and `others`, each with its complete
        vector.
        """
        everyone = [self, *others]
        totals = [
            vector[one._totals].view(len(one.losses), one.microbatches)
            for one, vector in zip(everyone, vectors, strict=True)
        ]
        below = self._denominators(denominators)
        parts = [
            one._summary(vector, total, number == 0)
            for number, (one, vector, total) in enumerate(zip(everyone, vectors, totals, strict=True))
        ]
        sums = torch.stack([part[0] for part in parts]).sum(0)
        largest = torch.stack([part[1] for part in parts]).amax(0) if len(parts[0][1]) else parts[0][1]
        return [self._closed(sums, largest, below, tuple((total / below[:, None]).sum(0).unbind())) for total in totals]

    def _denominators(self, denominators: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not self.losses:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.stack([denominators[spec.name].to(torch.float64).reshape(()) for spec in self.losses])

    def _summary(self, vector: torch.Tensor, totals: torch.Tensor, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added up over data ranks (losses; sums; means with their counts; the first rank's last),
        and what the largest of is taken (maxima, and minima negated)."""
        sums, largest = list(totals.sum(1).unbind()), []
        for spec in self.metrics:
            count, index = self._present[spec.name]
            values = vector[index]
            match spec.reduction:
                case "sum":
                    sums.append(values.sum())
                case "mean":
                    sums += [values.sum(), vector.new_full((), count)]
                case "last":
                    sums.append(values[-1] if first and count else vector.new_zeros(()))
                case "max":
                    largest.append(values.amax() if count else vector.new_full((), -torch.inf))
                case "min":
                    largest.append(values.amin().neg() if count else vector.new_full((), -torch.inf))
        return _stack(sums, vector), _stack(largest, vector)

    def _closed(
        self, sums: torch.Tensor, largest: torch.Tensor, below: torch.Tensor, shares: tuple[torch.Tensor, ...]
    ) -> Closed:
        divided = sums[: len(self.losses)] / below
        added, extremes = iter(sums[len(self.losses) :].unbind()), iter(largest.unbind())
        metrics: dict[str, torch.Tensor] = {}
        counts: dict[str, torch.Tensor] = {}
        for spec in self.metrics:
            match spec.reduction:
                case "sum" | "last":
                    metrics[spec.name] = next(added)
                case "mean":
                    total, counts[spec.name] = next(added), next(added)
                    metrics[spec.name] = total / counts[spec.name]
                case "max":
                    metrics[spec.name] = next(extremes)
                case "min":
                    metrics[spec.name] = next(extremes).neg()
        losses = dict(zip((spec.name for spec in self.losses), divided.unbind(), strict=True))
        return Closed(divided.sum(), losses, metrics, shares, counts)

    def _index(self, places: Sequence[int]) -> torch.Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.device)


@dataclass(frozen=True)
class DataRanks:
    """How to combine over data ranks. add, largest: in place, on all of them. first: this is data rank 0."""

    add: Reduce
    largest: Reduce
    first: bool


def _stack(values: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(values)) if values else like.new_zeros(0)


def _owners(one: Partitioned) -> dict[Role, int]:
    """The stage each loss and metric is taken from: the first that yields it."""
    owners: dict[Role, int] = {}
    for stage in one.stages:
        for role, node in stage.forward.output_items():
            if isinstance(role, Loss | Metric) and node is not None:
                owners.setdefault(role, stage.index)
    return owners
