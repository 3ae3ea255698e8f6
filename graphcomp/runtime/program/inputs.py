"""What a step gives to a rank program, and how it gets into the registers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from graphcomp.errors import StepError, VerifyError
from graphcomp.ir.signature import (
    BatchLeaf,
    Buffer,
    Captured,
    Constant,
    Denominator,
    LossScale,
    Param,
    Role,
    Seed,
    Shard,
    Size,
)
from graphcomp.partition.stages import Partitioned
from graphcomp.runtime.program.instructions import RankProgram
from graphcomp.runtime.program.link import State

Given = TypeVar("Given")


@dataclass(frozen=True)
class MicrobatchInputs:
    """leaves: tensors by path, on the device. sizes: by symbol."""

    leaves: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class StepInputs:
    """All inputs of one step. Only those that a rank's programs name are read.

    parameters, buffers, captured: by name. denominators: 0-dim, by loss name. loss_scale: 0-dim. shards: the padded
    rows that this rank holds of sharded parameters, by name. seeds: 0-dim int64 on the host, one a microbatch; None
    where no program draws.
    """

    microbatches: Sequence[MicrobatchInputs]
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    captured: Mapping[str, torch.Tensor] = field(default_factory=dict)
    denominators: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_scale: torch.Tensor | None = None
    shards: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seeds: Sequence[torch.Tensor] | None = None


def link_binds(program: RankProgram, specialisations: Sequence[Partitioned]) -> Callable[[State, StepInputs], None]:
    """A function that puts the inputs of a step into the registers of a state."""
    constants: list[tuple[int, torch.Tensor]] = []
    shared: dict[str, list[tuple[int, str]]] = defaultdict(list)
    scales: list[int] = []
    leaves: list[list[tuple[int, str]]] = [[] for _ in range(program.microbatches)]
    sizes: list[list[tuple[int, str]]] = [[] for _ in range(program.microbatches)]
    seeds: list[tuple[int, int]] = []
    for bind in program.binds:
        microbatch = -1 if bind.microbatch is None else bind.microbatch
        match bind.role:
            case Param(name):
                shared["parameters"].append((bind.register, name))
            case Shard(name):
                shared["shards"].append((bind.register, name))
            case Buffer(name):
                shared["buffers"].append((bind.register, name))
            case Captured(name):
                shared["captured"].append((bind.register, name))
            case Denominator(name):
                shared["denominators"].append((bind.register, name))
            case LossScale():
                scales.append(bind.register)
            case Constant(name):
                constants.append((bind.register, _constant(specialisations[bind.specialisation or 0], name)))
            case BatchLeaf(path):
                leaves[microbatch].append((bind.register, path))
            case Size(symbol):
                sizes[microbatch].append((bind.register, symbol))
            case Seed():
                seeds.append((bind.register, microbatch))
            case _:
                raise VerifyError(f"'{bind.role}' is no input of a step", where=f"rank {program.rank}")

    def fill(state: State, inputs: StepInputs) -> None:
        registers = state.registers
        for register, constant in constants:
            registers[register] = constant
        try:
            for group, pairs in shared.items():
                values = getattr(inputs, group)
                for register, name in pairs:
                    registers[register] = values[name]
            for given, wanted in zip(inputs.microbatches, leaves, strict=True):
                for register, name in wanted:
                    registers[register] = given.leaves[name]
            for given, wanted in zip(inputs.microbatches, sizes, strict=True):
                for register, name in wanted:
                    registers[register] = given.sizes[name]
        except KeyError as error:
            raise StepError(
                f"the step was not given '{error.args[0]}', which the program reads",
                where=f"rank {program.rank}",
            ) from error
        for register in scales:
            registers[register] = _given(inputs.loss_scale, LossScale(), program.rank)
        for register, microbatch in seeds:
            registers[register] = _given(inputs.seeds, Seed(), program.rank)[microbatch]
        state.sizes = [given.sizes for given in inputs.microbatches]

    return fill


def _given(value: Given | None, role: Role, rank: int) -> Given:
    if value is None:
        raise StepError(f"the step was not given '{role}', which the program reads", where=f"rank {rank}")
    return value


def _constant(specialisation: Partitioned, name: str) -> torch.Tensor:
    for stage in specialisation.stages:
        for program in stage.programs:
            if name in program.constants:
                return program.constants[name]
    return specialisation.joint.program.constants[name]
