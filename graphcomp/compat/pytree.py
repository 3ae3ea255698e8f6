"""Pytrees. torch registers its own and Hugging Face's containers in `torch.utils._pytree`, which has no public name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch.utils._pytree import (
    GetAttrKey,
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "KeyPath",
    "TreeSpec",
    "path_text",
    "register_mapping",
    "register_record",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_unflatten",
]


def path_text(keys: KeyPath, lone: str) -> str:
    """A leaf's path as a user would write it: `tokens`, `h.aux.x`, `[0]`, `pair[1]`; `lone` for a tree that is a leaf.

    Keys that are no identifiers are quoted as in Python, so that two leaves never have the same path.
    """
    text = ""
    for key in keys:
        name = key.key if isinstance(key, MappingKey) else key.name if isinstance(key, GetAttrKey) else None
        if isinstance(name, str) and name.isidentifier():
            text += f".{name}" if text else name
        elif isinstance(key, SequenceKey):
            text += f"[{key.idx}]"
        else:
            text += f"[{name!r}]" if isinstance(key, MappingKey) else str(key)
    return text or lone


def register_mapping(kind: type[dict[str, Any]]) -> None:
    """Make a kind of dict a pytree that is flattened by its values and rebuilt as a plain dict."""
    register_pytree_node(
        kind,
        lambda batch: (list(batch.values()), list(batch.keys())),
        lambda values, keys: dict(zip(keys, values, strict=True)),
    )


def register_record(kind: type[Any]) -> None:
    """Make a dataclass a pytree of its fields. It is rebuilt without its own checks: some leaves may be None then."""
    names = [field.name for field in fields(kind)]

    def rebuild(values: Any, _: object) -> Any:
        record = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(record, name, value)
        return record

    register_pytree_node(
        kind,
        lambda record: ([getattr(record, name) for name in names], None),
        rebuild,
        flatten_with_keys_fn=lambda record: ([(GetAttrKey(name), getattr(record, name)) for name in names], None),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )
