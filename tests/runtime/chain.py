"""A hand-made partition: a chain of small stages, with callables written out, and the plain loop to compare
with.

Stage s computes h = tanh(x @ w_s + b_s); the last one adds the sum of h * h as the loss, divided by the
denominator for the gradient. Rows and columns: x is [s0, width].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph

from graphcomp.capture.joint import Joint, LossSpec, MetricSpec
from graphcomp.ir.meta import set_value
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import (
    Activation,
    BatchLeaf,
    Buffer,
    BufferUpdate,
    Denominator,
    Grad,
    Loss,
    Metric,
    Param,
    Role,
    Saved,
)
from graphcomp.ir.sizes import Sizes
from graphcomp.partition.stages import Boundary, Carried, Partitioned, Stage
from graphcomp.runtime.program.executor import RankExecutor, run_virtual_ranks
from graphcomp.runtime.program.inputs import MicrobatchInputs, StepInputs
from graphcomp.runtime.program.instructions import RankProgram
from graphcomp.runtime.program.lower import lower
from graphcomp.runtime.program.transport import VirtualNetwork, VirtualTransport
from graphcomp.schedule.communicate import with_transfers
from graphcomp.schedule.registry import get
from graphcomp.schedule.rewrite import fuse, without_backward
from graphcomp.schedule.schedule import Schedule

WIDTH = 3
ROWS = sympy.Symbol("s0")


def program(
    name: str,
    inputs: Sequence[Role],
    outputs: Sequence[Role],
    absent: Sequence[Role] = (),
    width: int = WIDTH,
) -> Program:
    """A program of which only the border matters: its callable is written by hand. absent: outputs that are
    None.
    """
    graph = Graph()
    placeholders = [graph.placeholder(f"input{number}") for number in range(len(inputs))]
    for role, node in zip(inputs, placeholders, strict=True):
        if isinstance(role, Param):
            shape = (width, width) if role.name.startswith("w") else (width,)
            set_value(node, torch.empty(shape, device="meta"))
    whole = graph.call_function(print, tuple(placeholders))
    graph.output(tuple(None if role in absent else whole for role in outputs))
    return Program(name, Level.STAGE, graph, tuple(inputs), tuple(outputs), None)


Function = Callable[..., Sequence[object]]


@dataclass
class Chain:
    """A partition, its callables by (stage, kind), and fresh inputs."""

    cut: Partitioned
    callables: dict[tuple[int, str], Function]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def inputs(self, batches: Sequence[torch.Tensor]) -> StepInputs:
        return StepInputs(
            [MicrobatchInputs({"x": batch}, {"s0": batch.shape[0]}) for batch in batches],
            self.parameters,
            self.buffers,
            denominators={"loss": torch.tensor(float(sum(batch.shape[0] for batch in batches)))},
        )


def chain(
    stages: int, counted: bool = False, width: int = WIDTH, trainable_from: int = 0, tied: Sequence[int] = ()
) -> Chain:
    """counted: every stage adds the number of its microbatches up in a buffer. trainable_from: the first
    stage with trainable parameters; the stages before it have no backward. tied: stages that share the
    weight of the first of them.
    """
    generator = torch.Generator().manual_seed(7)
    parameters: dict[str, torch.Tensor] = {}
    cut_stages, callables = [], {}
    users: dict[str, list[int]] = {}
    last = stages - 1
    for stage in range(stages):
        w, b, c = f"w{tied[0] if stage in tied else stage}", f"b{stage}", f"c{stage}"
        users.setdefault(w, []).append(stage)
        users[b] = [stage]
        parameters[w] = torch.randn(width, width, generator=generator).requires_grad_()
        parameters[b] = torch.randn(width, generator=generator).requires_grad_()
        down = [BatchLeaf("x") if stage == 0 else Activation(stage - 1, stage, 0)]
        count_in = [Buffer(c)] if counted else []
        count_out = [BufferUpdate(c)] if counted else []
        up: list[Role] = [Activation(stage, stage - 1, 0)] if stage > trainable_from else []
        trained = stage >= trainable_from
        ends = stage == last
        saved: list[Role] = [Saved(0), Saved(1)] if trained else []
        head: list[Role] = [] if ends else [Activation(stage, stage + 1, 0)]
        recorded: list[Role] = [Loss("loss"), Metric("size")] if ends else []
        arrives: list[Role] = [Denominator("loss")] if ends else [Activation(stage + 1, stage, 0)]
        grads: list[Role] = [Grad(w), Grad(b)]
        forward_in: list[Role] = [Param(w), Param(b), *down, *count_in]
        forward = program(f"forward{stage}", forward_in, [*head, *saved, *recorded, *count_out], width=width)
        backward = program(f"backward{stage}", [Param(w), *saved, *arrives], [*up, *grads]) if trained else None
        fused = forward
        if trained and ends:
            fused_in = [*forward_in, Denominator("loss")]
            fused = program(f"fused{stage}", fused_in, [*recorded, *count_out, *up, *grads], width=width)
        cut_stages.append(Stage(stage, forward, backward, fused))
        callables[stage, "forward"] = _forward(ends, trained, counted)
        if trained:
            callables[stage, "backward"] = _backward(ends, bool(up))
        callables[stage, "fused"] = _fused(counted, bool(up)) if trained and ends else callables[stage, "forward"]
    shape = (ROWS, width)
    boundaries = {s: Boundary(s, s + 1, (Carried("h", torch.float32, "cpu", shape),)) for s in range(last)}
    gradients = {
        s: Boundary(s, s - 1, (Carried("grad_h", torch.float32, "cpu", shape),))
        for s in range(trainable_from + 1, stages)
    }
    joint = Joint(
        program("joint", [Param(name) for name in parameters], [], width=width),
        Sizes({"s0": ("x", 0)}, {"x": shape}),
        (LossSpec("loss", "token"),),
        (MetricSpec("size", "mean"),),
        {},
        None,
        (),
        None,
        0.0,
    )
    owners = {name: tuple(stages) for name, stages in users.items()}
    parameters = {name: parameters[name] for name in owners}
    cut = Partitioned(joint, None, tuple(cut_stages), boundaries, gradients, owners)
    buffers = {f"c{stage}": torch.tensor(40, dtype=torch.int64) for stage in range(stages)} if counted else {}
    return Chain(cut, callables, parameters, buffers)


def _forward(ends: bool, trained: bool, counted: bool) -> Function:
    def forward(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *count: torch.Tensor) -> list[object]:
        h = torch.tanh(x @ w + b)
        head = [] if ends else [h]
        recorded = [(h * h).sum(), h.abs().sum()] if ends else []
        return [*head, *([x, h] if trained else []), *recorded, *(one + 1 for one in count)]

    return forward


def _backward(ends: bool, up: bool) -> Function:
    def backward(w: torch.Tensor, x: torch.Tensor, h: torch.Tensor, arrived: torch.Tensor) -> list[object]:
        grad_h = 2 * h / arrived if ends else arrived
        below = grad_h * (1 - h * h)
        return [*([below @ w.t()] if up else []), x.t() @ below, below.sum(0)]

    return backward


def _fused(counted: bool, up: bool) -> Function:
    def fused(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> list[object]:
        *count, denominator = rest
        saved_x, h, *recorded = _forward(True, True, counted)(w, b, x, *count)
        return [*recorded, *_backward(True, up)(w, saved_x, h, denominator)]

    return fused


def boxed(function: Function, program: Program | None) -> Function:
    """As a backend's callables are: a function of one list, which it empties; gradients go to the accumulators at its
    end."""
    grads = [] if program is None else [p for p, (role, x) in enumerate(program.output_items()) if _is_grad(role, x)]

    def call(box: list[Any]) -> Sequence[object]:
        inputs, accumulators = box[: len(box) - len(grads)], box[len(box) - len(grads) :]
        box.clear()
        results: list[Any] = list(function(*inputs))
        for place, accumulator in zip(grads, accumulators, strict=True):
            accumulator.add_(results[place])
            results[place] = None
        return results

    return call


def _is_grad(role: Role, result: object) -> bool:
    return isinstance(role, Grad) and result is not None


def callables_of(made: Chain, number: int = 0) -> dict[tuple[int, int, str], Function]:
    """As a rank executor takes them; `number` is that of the specialisation."""
    stages = made.cut.stages
    return {
        (number, stage, kind): boxed(one, getattr(stages[stage], kind)) for (stage, kind), one in made.callables.items()
    }


def schedule_of(
    cut: Partitioned, name: str, microbatches: int, fused: bool = True, ranks: int | None = None
) -> Schedule:
    stages = len(cut.stages)
    plain = get(name).build(stages, microbatches, ranks)
    silent = [stage.index for stage in cut.stages if stage.backward is None]
    sent = with_transfers(without_backward(plain, silent), cut.forward_boundaries, cut.backward_boundaries)
    return fuse(sent) if fused else sent


def programs_of(
    made: Chain, name: str, microbatches: int, fused: bool = True, ranks: int | None = None
) -> list[RankProgram]:
    schedule = schedule_of(made.cut, name, microbatches, fused, ranks)
    return [lower([made.cut] * microbatches, schedule, rank) for rank in range(len(schedule.ranks))]


def executors_of(
    made: Chain, programs: Sequence[RankProgram], inputs: StepInputs, dtype: torch.dtype | None = None
) -> list[RankExecutor]:
    network = VirtualNetwork()
    named = callables_of(made)
    executors = [
        RankExecutor(one, [made.cut], named, VirtualTransport(network), accumulate_dtype=dtype) for one in programs
    ]
    for executor in executors:
        executor.begin(inputs)
    return executors


@dataclass(frozen=True)
class Outcome:
    gradients: dict[str, torch.Tensor]
    losses: list[torch.Tensor]
    metrics: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    messages: list[int]


def run(
    made: Chain, name: str, batches: Sequence[torch.Tensor], fused: bool = True, ranks: int | None = None
) -> Outcome:
    programs = programs_of(made, name, len(batches), fused, ranks)
    results = run_virtual_ranks(executors_of(made, programs, made.inputs(batches)))
    gradients = {name: grad for one in results for named in one.gradients.values() for name, grad in named.items()}
    return Outcome(
        gradients,
        [one["loss"] for one in results[-1].recorded(Loss)],
        [one["size"] for one in results[-1].recorded(Metric)],
        {name: value for one in results for name, value in one.buffers.items()},
        [one.messages for one in results],
    )


def plain_loop(made: Chain, batches: Sequence[torch.Tensor]) -> Outcome:
    """Microbatch by microbatch, stage by stage, without a pipeline; gradients through autograd."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in made.parameters.items()}
    tokens = torch.tensor(float(sum(batch.shape[0] for batch in batches)))
    losses, metrics = [], []
    for batch in batches:
        h = batch
        for stage in range(len(made.cut.stages)):
            (w,) = (role.name for role in made.cut.stages[stage].forward.inputs[:1] if isinstance(role, Param))
            h = torch.tanh(h @ leaves[w] + leaves[f"b{stage}"])
        loss = (h * h).sum()
        losses.append(loss.detach())
        metrics.append(h.detach().abs().sum())
        (loss / tokens).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Outcome(gradients, losses, metrics, {}, [])


def staged_loop(made: Chain, batches: Sequence[torch.Tensor], fused: bool = True) -> Outcome:
    """The same callables, one microbatch after the other, all stages down and then up: no rank, no
    message.
    """
    inputs, last = made.inputs(batches), len(made.cut.stages) - 1
    denominator = inputs.denominators["loss"]
    gradients: dict[str, torch.Tensor] = {}
    losses, metrics = [], []

    def add(stage: int, w: torch.Tensor, b: torch.Tensor) -> None:
        for name, grad in ((f"w{stage}", w), (f"b{stage}", b)):
            gradients[name] = gradients[name] + grad if name in gradients else grad

    for batch in batches:
        saved, arrived = [], batch
        for stage in range(last):
            w, b = made.parameters[f"w{stage}"].detach(), made.parameters[f"b{stage}"].detach()
            arrived, *kept = made.callables[stage, "forward"](w, b, arrived)
            saved.append(kept)
        w, b = made.parameters[f"w{last}"].detach(), made.parameters[f"b{last}"].detach()
        loss, size, *below = made.callables[last, "fused"](w, b, arrived, denominator)
        losses.append(loss)
        metrics.append(size)
        grad_h = None
        for stage in range(last, -1, -1):
            if stage < last:
                if made.cut.stages[stage].backward is None:
                    break
                w = made.parameters[f"w{stage}"].detach()
                below = list(made.callables[stage, "backward"](w, *saved[stage], grad_h))
            *up, grad_w, grad_b = below
            add(stage, grad_w, grad_b)
            grad_h = up[0] if up else None
    return Outcome(gradients, losses, metrics, {}, [])
