"""Batches: how a microbatch is flattened, told apart from others, and passed to the model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcomp.compat.pytree import TreeSpec, path_text, tree_flatten, tree_flatten_with_path, tree_unflatten
from graphcomp.errors import BatchError


def plain(batch: Any) -> Any:
    """Any Mapping counts as a dict, so that batches of a library's own type are pytrees."""
    return dict(batch) if type(batch) is not dict and isinstance(batch, Mapping) else batch


def leaf_key(leaf: Any) -> Any:
    """What a program depends on in one leaf: never the contents of a tensor, always those of everything else."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            return leaf.layout  # `describe` refuses it
        # 0 and 1 need programs of their own (no rows; broadcasting); all larger sizes share one.
        shape = tuple([size if size < 2 else 2 for size in leaf.shape])
        return type(leaf), leaf.dtype, leaf.device, shape, leaf.requires_grad
    if isinstance(leaf, float):
        return type(leaf), repr(leaf)  # the text tells 0.0 from -0.0, and nan equals nan
    return type(leaf), leaf


def dense(leaf: torch.Tensor) -> torch.Tensor:
    """As programs take it: contiguous, with no conjugation or negation left to be done.

    With sizes 0 and 1 the strides of a contiguous tensor may be any: such as those of the tensor it is a part of.
    """
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.resolve_conj().resolve_neg()
    leaf = leaf.contiguous()
    shape = leaf.shape
    if 1 in shape or 0 in shape:
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        strides.reverse()
        if leaf.stride() != tuple(strides):
            leaf = leaf.as_strided(shape, strides)
    return leaf


@dataclass(frozen=True)
class BatchSpec:
    """The structure of a microbatch.

    tree: pytree spec. paths: one a leaf. static: the leaves that are no tensors, by position.
    """

    tree: TreeSpec
    paths: tuple[str, ...]
    static: Mapping[int, Any]

    def unflatten(self, tensors: Mapping[str, Any]) -> Any:
        """The pytree with these tensors, by path, and the original other leaves."""
        leaves = [self.static[i] if i in self.static else tensors[path] for i, path in enumerate(self.paths)]
        return tree_unflatten(leaves, self.tree)


def describe(batch: Any) -> tuple[BatchSpec, dict[str, torch.Tensor]]:
    """Flatten an example microbatch: its spec, and its tensors by path."""
    pairs, tree = tree_flatten_with_path(plain(batch))
    paths, tensors, static = [], {}, {}
    for position, (keys, leaf) in enumerate(pairs):
        path = path_text(keys, "batch")
        paths.append(path)
        if isinstance(leaf, torch.Tensor):
            _check(path, leaf)
            tensors[path] = dense(leaf)
        else:
            static[position] = leaf
    return BatchSpec(tree, tuple(paths), static), tensors


def _check(path: str, leaf: torch.Tensor) -> None:
    if leaf.requires_grad:
        raise BatchError(
            f"the batch tensor {path} requires a gradient, which a compiled step does not compute",
            do="detach it, or make it a parameter of the model",
        )
    if leaf.layout is not torch.strided:
        raise BatchError(
            f"the batch tensor {path} is not strided",
            expected="a dense tensor",
            got=f"layout {leaf.layout}",
            do="make it dense, or pass its parts (indices and values; values and lengths) as fields of the batch",
        )
    if type(leaf) not in (torch.Tensor, nn.Parameter):
        raise BatchError(
            f"the batch tensor {path} is of a class of its own, which a program could not ask about",
            expected="a plain tensor",
            got=type(leaf).__name__,
            do="pass x.as_subclass(torch.Tensor), or its parts as fields of the batch",
        )


def batch_key(batch: Any) -> tuple[Any, list[Any]]:
    """A hashable key of everything in a microbatch that selects a program, and its flat leaves.

    Raises BatchError for a leaf that cannot be compared.
    """
    batch = plain(batch)
    if type(batch) is dict and _LEAVES.issuperset(map(type, batch.values())):  # walking over trees takes its time
        leaves = list(batch.values())
        return (tuple(batch), *map(leaf_key, leaves)), leaves
    leaves, structure = tree_flatten(batch)
    key = (structure, *map(leaf_key, leaves))
    try:
        hash(key)
    except TypeError as error:
        pairs, _ = tree_flatten_with_path(batch)
        keys, bad = next(pair for pair in pairs if not _hashable(leaf_key(pair[1])))
        raise BatchError(
            f"the batch holds a {type(bad).__name__}, which is neither a tensor nor a plain value",
            where=path_text(keys, "batch"),
            expected="tensors, numbers, strings, None, and containers of them",
            do="register its type as a pytree, or leave it out of the batch",
        ) from error
    return key, leaves


_LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None)})


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def prepares_batches(model: nn.Module) -> bool:
    """Whether the model has `prepare_batch(inputs)`, and a `forward(batch)` that needs nothing else."""
    if not callable(getattr(model, "prepare_batch", None)):
        return False
    first, *others = [*inspect.signature(model.forward).parameters.values(), None]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in others if p is not None and p.default is p.empty and p.kind not in rest]
    return first is not None and first.kind in named and not needed


def arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for the model's forward.

    A dict gives the arguments that the forward accepts by name (all of its fields where there is a `**kwargs`), a
    tuple as many positional ones as the forward takes, anything else the one argument. A model that prepares its own
    batches is given what it prepared, as it is.
    """
    if prepares_batches(model):
        return (batch,), {}
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(batch, dict):
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return (), dict(batch)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        accepted = {parameter.name for parameter in parameters if parameter.kind in named}
        given = {name: value for name, value in batch.items() if name in accepted}
        missing = [p.name for p in parameters if p.kind in named and p.default is p.empty and p.name not in given]
        if missing:
            raise BatchError(
                f"the model's forward needs {', '.join(missing)}, which the batch does not hold",
                where=f"{type(model).__name__}.forward",
                expected=", ".join(sorted(accepted)),
                got=", ".join(map(str, batch)),
                do="name the batch's fields as the forward names its arguments, or pass a tuple",
            )
        return (), given
    if isinstance(batch, tuple):
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return batch, {}
        positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        return batch[: sum(parameter.kind in positional for parameter in parameters)], {}
    return (batch,), {}
