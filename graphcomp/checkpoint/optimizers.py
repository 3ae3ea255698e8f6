"""The state of an optimizer by the names of parameters, so that it goes with them to another layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphcomp.compat.sharded import local_rows, sharded_like
from graphcomp.errors import CheckpointError

NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerState:
    """tensors: by name of parameter and key. The rest is plain: numbers by the same, and groups of names."""

    kind: str
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    numbers: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]

    def plain(self) -> dict[str, Any]:
        keys = {name: list(held) for name, held in self.tensors.items()}
        return {"kind": self.kind, "tensors": keys, "numbers": self.numbers, "groups": self.groups}


def optimizer_state(model: nn.Module, optimizer: Optimizer, owns: Callable[[str], bool]) -> OptimizerState:
    """What an optimizer holds for the parameters that this rank owns. Raises CheckpointError for what has no name."""
    names = _names(model, optimizer)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        if owns(name) and parameter in optimizer.state:
            tensors[name], numbers[name] = {}, {}
            for key, value in optimizer.state[parameter].items():
                _check_value(optimizer, name, key, parameter, value)
                (tensors if isinstance(value, torch.Tensor) else numbers)[name][key] = value
    groups = [
        {
            "names": [names[p] for p in group["params"] if owns(names[p])],
            "options": {key: value for key, value in group.items() if key not in NOT_OPTIONS},
        }
        for group in optimizer.param_groups
    ]
    return OptimizerState(type(optimizer).__name__, tensors, numbers, groups)


def merged(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """One plain state from those of all ranks. Groups with equal options, in the same place, become one."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for part in given:
        for place, group in enumerate(part["groups"]):
            one = groups.setdefault((place, repr(group["options"])), {"names": [], "options": group["options"]})
            one["names"] += [name for name in group["names"] if name not in one["names"]]
    return {
        "kind": given[0]["kind"],
        "tensors": {name: keys for part in given for name, keys in part["tensors"].items()},
        "numbers": {name: held for part in given for name, held in part["numbers"].items()},
        "groups": [groups[key] for key in sorted(groups, key=lambda key: key[0])],
    }


def groups_to_load(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of each of the optimizer's groups. Raises CheckpointError where they cannot be told."""
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            "the checkpoint holds the state of another optimizer", expected=saved["kind"], got=type(optimizer).__name__
        )
    names = _names(model, optimizer)
    place = {name: number for number, group in enumerate(saved["groups"]) for name in group["names"]}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        own = [names[p] for p in group["params"]]
        places = {place[name] for name in own if name in place}
        unknown = [name for name in own if name not in place]
        if unknown or len(places) > 1:
            raise CheckpointError(
                f"group {number} of the optimizer is none of the checkpoint's",
                expected="parameters that were in one group when it was saved",
                got=f"'{unknown[0]}', which was in none" if unknown else f"parameters of groups {sorted(places)}",
                do="make the optimizer with the groups that it had",
            )
        chosen = next(iter(places), number)
        known = saved["groups"][chosen]["options"] if chosen < len(saved["groups"]) else {}
        kept = {key: value for key, value in group.items() if key in NOT_OPTIONS and key != "params"}
        found.append({**{k: v for k, v in group.items() if k not in NOT_OPTIONS}, **known, **kept})
    return found


def tensors_to_load(
    model: nn.Module,
    optimizer: Optimizer,
    owns: Callable[[str], bool],
    saved: Mapping[str, Any],
    shape_of: Callable[[str, str], tuple[torch.Size, torch.dtype]],
) -> dict[str, dict[str, torch.Tensor]]:
    """Memory for the tensors of the parameters that this rank owns, split as these are."""
    return {
        name: {key: _memory(parameter, *shape_of(name, key)) for key in saved["tensors"].get(name, ())}
        for parameter, name in _names(model, optimizer).items()
        if owns(name)
    }


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Through the optimizer's own `load_state_dict`, which numbers parameters in the order of its groups."""
    names = _names(model, optimizer)
    places = {parameter: number for number, parameter in enumerate(names)}
    state = {
        places[parameter]: {**tensors[name], **numbers.get(name, {})}
        for parameter, name in names.items()
        if tensors.get(name) or (name in tensors and numbers.get(name))
    }
    own = [[places[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    filled = [{**options, "params": order} for options, order in zip(groups, own, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": filled})


def _names(model: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, str]:
    """The optimizer's parameters, in the order of its groups, each with its first name in the model."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in given if id(parameter) not in known]
    if foreign:
        raise CheckpointError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's",
            got=", ".join(f"one of shape {tuple(parameter.shape)}" for parameter in foreign[:4]),
            do="make it of step.parameters(), or model.parameters()",
        )
    return {parameter: known[id(parameter)] for parameter in given}


def _check_value(optimizer: Optimizer, name: str, key: str, parameter: torch.Tensor, value: object) -> None:
    """Of a sharded parameter nobody knows the rows of what is not split like it."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    whole = [each for each in inside if isinstance(each, torch.Tensor) and each.dim() and not isinstance(each, DTensor)]
    if isinstance(parameter, DTensor) and whole:
        raise CheckpointError(
            f"'{key}', which {type(optimizer).__name__} holds for '{name}', is not split over data ranks",
            expected=f"a DTensor like the parameter, {parameter.placements}, or a number",
            got=f"a tensor of shape {tuple(whole[0].shape)}",
            do="graphcomp.shard_optimizer_state(optimizer)",
        )


def _memory(parameter: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if shape == parameter.shape and isinstance(parameter, DTensor):
        return sharded_like(torch.empty_like(local_rows(parameter), dtype=dtype, requires_grad=False), parameter)
    # What a number counts is kept on the host; the optimizer moves it if it wants it elsewhere.
    return torch.empty(shape, dtype=dtype, device=parameter.device if shape else "cpu")
