"""Declared buckets: microbatches are padded, so that only a few lengths ever reach the programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphcomp.errors import BatchError, PlanError


@dataclass(frozen=True)
class Pad:
    """How a field is made longer. dim: along which dimension, negative from the end. value: what is put there."""

    dim: int
    value: float = 0

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise PlanError("Pad(dim=...) is a whole number", got=repr(self.dim))
        if not isinstance(self.value, bool | int | float):
            raise PlanError("Pad(value=...) is a number or a bool", got=repr(self.value))


@dataclass(frozen=True)
class Buckets:
    """The lengths that microbatches are padded up to, and which fields are padded how.

        Buckets((128, 512, 2048), {"tokens": Pad(1, 0), "labels": Pad(1, -100), "attention_mask": Pad(1, 0)})

    The longest of these fields grows to the next bucket, the others by as much; fields that are not named stay as they
    are. A microbatch may lack some of the named ones; each has to be in one of the first step's. Programs follow any
    length by themselves; this is for models that need one program for each length (recurrent layers,
    `int(x.shape[1])`) and for kernels that like certain sizes. That results do not depend on the padding is for the
    model to see to, by causality, a mask or ignored labels: `testing.check_parity` compares with the batch as it came.

    Raises PlanError for lengths that do not rise, and for no fields.
    """

    lengths: Sequence[int]
    fields: Mapping[str, Pad]

    def __post_init__(self) -> None:
        lengths = (self.lengths,) if isinstance(self.lengths, int) else tuple(self.lengths)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in lengths)
        if not lengths or not whole or list(lengths) != sorted(set(lengths)):
            raise PlanError("Buckets(lengths=...) are rising whole numbers from 1", got=repr(self.lengths))
        fields = dict(self.fields) if isinstance(self.fields, Mapping) else {}
        if not fields or not all(isinstance(pad, Pad) for pad in fields.values()):
            raise PlanError(
                "Buckets(fields=...) says how each field is padded",
                expected='a dict such as {"labels": Pad(1, -100)}',
                got=repr(self.fields),
            )
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "fields", fields)

    def check_names(self, microbatches: Sequence[Any]) -> None:
        """Raise PlanError for a field that none of the first microbatches has: its name is misspelt."""
        known = dict.fromkeys(name for batch in microbatches if isinstance(batch, Mapping) for name in batch)
        unknown = [name for name in self.fields if name not in known]
        if known and unknown:
            raise PlanError(
                f"Buckets(fields=...) names '{unknown[0]}', which no microbatch has",
                expected=f"fields of the microbatches: {', '.join(map(str, known))}",
                got=", ".join(self.fields),
                do="name the fields as the microbatches do; one that only later ones have, give to the first ones too",
            )

    def padded(self, batch: Any) -> Any:
        """The microbatch in its bucket. Raises BatchError if it is too long, or no dict of tensors."""
        if not isinstance(batch, Mapping):
            raise BatchError(
                "Plan(buckets=...) names fields, and a microbatch has none",
                expected="a dict",
                got=type(batch).__name__,
            )
        found = {name: self._size(name, pad, batch[name]) for name, pad in self.fields.items() if name in batch}
        if not found:
            return batch
        longest = max(found, key=found.__getitem__)
        bucket = next((length for length in self.lengths if length >= found[longest]), None)
        if bucket is None:
            raise BatchError(
                f"a microbatch is longer than the largest bucket: field '{longest}'",
                expected=f"at most {self.lengths[-1]}",
                got=found[longest],
                do="declare a larger bucket in Plan(buckets=...), or cut the documents",
            )
        more = bucket - found[longest]
        return {**batch, **{name: _longer(batch[name], self.fields[name], more) for name in found}} if more else batch

    def _size(self, name: str, pad: Pad, field: Any) -> int:
        if not isinstance(field, torch.Tensor) or not -field.dim() <= pad.dim < field.dim():
            got = f"shape {tuple(field.shape)}" if isinstance(field, torch.Tensor) else type(field).__name__
            raise BatchError(
                f"field '{name}' cannot be padded as Plan(buckets=...) says",
                expected=f"a tensor with a dimension {pad.dim}",
                got=got,
            )
        rounds = field.is_floating_point() or field.is_complex()
        if not rounds and torch.tensor(pad.value).to(field.dtype).item() != pad.value:
            raise BatchError(
                f"field '{name}' cannot hold the value that Plan(buckets=...) pads it with",
                expected=f"a number that {field.dtype} has",
                got=pad.value,
            )
        return field.shape[pad.dim]


def _longer(field: torch.Tensor, pad: Pad, more: int) -> torch.Tensor:
    shape = list(field.shape)
    shape[pad.dim] = more
    return torch.cat([field, field.new_full(shape, pad.value)], pad.dim)
