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

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().setdefault(name, default)

    def __iter__(self) -> Iterator[str]:
        self._read_all()
        return super().__iter__()

    def __reversed__(self) -> Iterator[str]:
        self._read_all()
        return super().__reversed__()

    def __eq__(self, other: object) -> bool:
        self._read_all()
        return super().__eq__(other)

    def __repr__(self) -> str:
        self._read_all()
        return super().__repr__()

    def keys(self) -> Any:
        self._read_all()
        return super().keys()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def popitem(self) -> tuple[str, Any]:
        self._read_all()
        return super().popitem()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def _read_all(self) -> None:
        self.read.update(super().keys())


register_mapping(Fields)
