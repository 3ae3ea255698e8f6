"""What the partition yields: one set of programs a stage, and the boundaries between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphcomp.capture.joint import Joint
from graphcomp.errors import VerifyError
from graphcomp.ir import meta
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Param
from graphcomp.ir.sizes import Expression
from graphcomp.ir.spelling import Symbols, dtype


@dataclass(frozen=True)
class Carried:
    """One value of a boundary: its node's name, dtype, device type, and shape over the microbatch's own sizes."""

    name: str
    dtype: torch.dtype
    device: str
    shape: tuple[Expression, ...]

    def text(self, symbols: Symbols) -> str:
        return f"{self.name}: {dtype(self.dtype)}{symbols.sizes(self.shape)}"


@dataclass(frozen=True)
class Boundary:
    """The ordered values that cross from stage `source` to its neighbour `target`; target < source: gradients."""

    source: int
    target: int
    values: tuple[Carried, ...]

    def text(self, symbols: Symbols) -> str:
        """In one line, with the symbols' printed names."""
        return f"boundary {self.source}>{self.target}: {', '.join(v.text(symbols) for v in self.values)}"


@dataclass(frozen=True)
class Stage:
    """The programs of one stage; all signatures are subsets of the ambient inputs, Activation and Saved roles.

    forward: outputs Activation(index, index+1, i) in order, then Saved(i) in order, then Loss, Metric, BufferUpdate,
        Output, Statistic(i).
    backward: inputs with Saved(i) and Activation(index+1, index, i); outputs Activation(index, index-1, i), then Grad.
        None where nothing in this stage or below needs a gradient.
    fused: both in one, without saved values, for when the schedule runs them back to back. The forward where there is
        no backward; None where the backward waits for a later stage.
    update: inputs Buffer and Statistic(i), outputs BufferUpdate, where several data ranks change the same buffers: run
        behind the last microbatch, when this data rank's turn has come. None where nothing is to be updated.
    """

    index: int
    forward: Program
    backward: Program | None
    fused: Program | None
    update: Program | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """Those that there are, in this order, each once."""
        fused = None if self.fused is self.forward else self.fused
        return tuple(program for program in (self.forward, self.backward, fused, self.update) if program is not None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.programs))


def sum_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """In what the gradients of a parameter of dtype `own` add up; asked: the plan's `accumulate_dtype`.

    A complex parameter's are complex, with real parts of the dtype that was asked for.
    """
    if asked is None:
        return own
    return asked.to_complex() if own.is_complex else asked


@dataclass(frozen=True)
class Partitioned:
    """A joint program cut into stages.

    prologue: the token counts of one microbatch from the batch alone: outputs Tokens; None with no token loss.
    forward_boundaries / backward_boundaries: by source stage; absent where nothing crosses.
    parameter_stages: for every parameter, the stages that use it, ascending; more than one: gradients are summed over
        them once a step.
    """

    joint: Joint
    prologue: Program | None
    stages: tuple[Stage, ...]
    forward_boundaries: Mapping[int, Boundary]
    backward_boundaries: Mapping[int, Boundary]
    parameter_stages: Mapping[str, tuple[int, ...]]

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter's form: a fake tensor of its shape, strides and dtype."""
        found = meta.tensor(self.joint.program.input(Param(name)))
        if found is None:
            raise VerifyError(f"input 'param {name}' of the joint program is no tensor")
        return found

    def accumulator(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The form of what a parameter's gradients add up in, a fake tensor.

        Of the parameter's order of dimensions, and dense: also where the parameter has gaps or is expanded.
        """
        parameter = self.parameter(name)
        return torch.empty_like(parameter, dtype=sum_dtype(parameter.dtype, dtype))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The prologue, then those of each stage, each once."""
        first = () if self.prologue is None else (self.prologue,)
        return first + tuple(program for stage in self.stages for program in stage.programs)

    def __str__(self) -> str:
        """The programs, then the boundaries."""
        symbols = Symbols(self.joint.program)
        boundaries = [*self.forward_boundaries.values(), *self.backward_boundaries.values()]
        return "\n".join([*map(str, self.programs), *(boundary.text(symbols) for boundary in boundaries)]) + "\n"
