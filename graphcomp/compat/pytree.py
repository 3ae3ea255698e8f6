"""Pytrees. torch registers its own and Hugging Face's containers in `torch.utils._pytree`, which has no public name."""

from __future__ import annotations

from torch.utils._pytree import (
    KeyPath,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

__all__ = ["KeyPath", "TreeSpec", "keystr", "tree_flatten", "tree_flatten_with_path", "tree_map", "tree_unflatten"]
