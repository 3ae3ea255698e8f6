"""Which fields of a batch the traced code reads; the others may change without another capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphcomp.compat.pytree import register_mapping


class Fields(dict[str, Any]):
    """A batch that notes which of its fields are read. Whatever looks at it as a whole has read all of it."""

    def __init__(self, batch: dict[str, Any]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.read.add(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        self.read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


register_mapping(Fields)
