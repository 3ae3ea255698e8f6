"""The closing exchange: losses and metrics of every microbatch and stage, on every rank, bitwise equal.

Every rank puts what it has into one float64 vector, zero elsewhere; one sum over the pipeline completes it.
Everything reported is then computed from that vector by the same operations on every rank. Nothing is read
back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphcomp.capture.joint import LossSpec, MetricSpec
from graphcomp.ir.signature import Loss, Metric, Role
from graphcomp.partition.stages import Partitioned

Packing = Callable[[Sequence[torch.Tensor]], torch.Tensor]
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

    def packing(self, records: Sequence[tuple[int, Role]], stages: Collection[int]) -> Packing:
        """How one rank, that holds `stages`, makes its vector of what it records: a value for each of `records`."""
        found = [(self._entries[key], number) for number, key in enumerate(records) if key in self._entries]
        pieces: list[tuple[int, list[int]]] = []
        for place, number in sorted((place, number) for (stage, place), number in found if stage in stages):
            if not pieces or pieces[-1][0] + len(pieces[-1][1]) != place:
                pieces.append((place, []))
            pieces[-1][1].append(number)

        def pack(values: Sequence[torch.Tensor]) -> torch.Tensor:
            vector = torch.zeros(self.length, dtype=torch.float64, device=self.device)
            for start, numbers in pieces:
                piece = [values[number] for number in numbers]
                if len({value.dtype for value in piece}) > 1:
                    piece = [value.double() for value in piece]
                vector[start : start + len(piece)] = torch.stack(piece)
            return vector

        return pack

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
        shares = _shares(totals, below)
        sums, largest = self._summary(vector, totals, data is None or data.first)
        if data is not None:
            data.add(sums)
            if len(largest):
                data.largest(largest)
        return self._closed(sums, largest, below, shares)

    def close_together(
        self,
        others: Sequence[Closing],
        vectors: Sequence[torch.Tensor],
        denominators: Mapping[str, torch.Tensor],
    ) -> list[Closed]:
        """`close` for several data ranks in one process: this one and `others`, each with its complete
        vector.
        """
        if not others:
            return [self.close(vectors[0], denominators)]
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
        return [self._closed(sums, largest, below, _shares(total, below)) for total in totals]

    def _denominators(self, denominators: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not self.losses:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.stack([denominators[spec.name] for spec in self.losses]).to(torch.float64)

    def _summary(self, vector: torch.Tensor, totals: torch.Tensor, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added up over data ranks (losses; sums; means with their counts; the first rank's last),
        and what the largest of is taken (maxima, and minima negated)."""
        sums, largest = [totals.sum(1)], []
        for spec in self.metrics:
            count, index = self._present[spec.name]
            values = vector[index]
            match spec.reduction:
                case "sum":
                    sums.append(values.sum(0, keepdim=True))
                case "mean":
                    sums += [values.sum(0, keepdim=True), vector.new_full((1,), count)]
                case "last":
                    sums.append(values[-1:] if first and count else vector.new_zeros(1))
                case "max":
                    largest.append(values.amax(0, keepdim=True) if count else vector.new_full((1,), -torch.inf))
                case "min":
                    largest.append(values.amin(0, keepdim=True).neg() if count else vector.new_full((1,), -torch.inf))
        return torch.cat(sums) if len(sums) > 1 else sums[0], torch.cat(largest) if largest else vector.new_zeros(0)

    def _closed(
        self, sums: torch.Tensor, largest: torch.Tensor, below: torch.Tensor, shares: tuple[torch.Tensor, ...]
    ) -> Closed:
        divided = (sums[: len(self.losses)] if self.metrics else sums) / below
        rest = (sums[len(self.losses) :].unbind(), largest.unbind()) if self.metrics else ((), ())
        added, extremes = map(iter, rest)
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


def _shares(totals: torch.Tensor, below: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (totals / below.unsqueeze(1)).sum(0).unbind()


def _owners(one: Partitioned) -> dict[Role, int]:
    """The stage each loss and metric is taken from: the first that yields it."""
    owners: dict[Role, int] = {}
    for stage in one.stages:
        for role, node in stage.forward.output_items():
            if isinstance(role, Loss | Metric) and node is not None:
                owners.setdefault(role, stage.index)
    return owners
