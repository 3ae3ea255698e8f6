"""Capture: an unmodified module, a loss function and one example microbatch become one joint program."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from graphcomp import losses as loss_rules
from graphcomp.capture.batch import BatchSpec, arguments, describe, plain, prepares_batches
from graphcomp.capture.checks import CHECKS, check_kept, leave_out_profiling
from graphcomp.capture.communication import normalize_collectives, require_functional
from graphcomp.capture.contents import FUNCTIONS, RULES, contents_read_once
from graphcomp.capture.fields import Fields
from graphcomp.capture.hooks import check_hooks, traced_hooks
from graphcomp.capture.joint import Joint, LossSpec, MetricSpec, Number, Opaque
from graphcomp.capture.labels import Labels, role_of
from graphcomp.capture.operations import number_operations
from graphcomp.capture.refuse import (
    check_buffers,
    check_devices,
    check_random_backward,
    explained,
)
from graphcomp.capture.regions import marked_regions
from graphcomp.capture.state import Captured, Reachable, State, unchanged_model
from graphcomp.capture.taken import check_functions
from graphcomp.capture.userfiles import is_user_file
from graphcomp.compat.assigned import unseen_assignments_refused
from graphcomp.compat.believed import relied_on
from graphcomp.compat.known_splits import knowing_splits
from graphcomp.compat.pytree import path_text, register_record, tree_flatten_with_path
from graphcomp.compat.scans import scans_of_parts
from graphcomp.compat.symbols import (
    FakeTensorMode,
    conditions,
    expression,
    fake_batch_leaf,
    is_asked_about,
    new_fake_mode,
    symbol_names,
)
from graphcomp.compat.tensor_parallel import forget_meshes, part_like, whole
from graphcomp.compat.tracing import swapped_state, trace
from graphcomp.compat.uneven import parts_of_any_size
from graphcomp.errors import CaptureError, LossError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.body import take_up
from graphcomp.ir.meta import Phase
from graphcomp.ir.normalize import lift_sizes
from graphcomp.ir.program import Level, Program
from graphcomp.ir.relations import check_where_read
from graphcomp.ir.sizes import Sizes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
LossFunction = Callable[[Any, Any], Any]
_TRACING = threading.RLock()  # while a trace lasts, names of torch stand for something else, in all threads

# A model may return a loss of ours in its output, and that output can be asked for.
for _kind in (loss_rules.TokenLoss, loss_rules.MeanLoss, loss_rules.Metric):
    register_record(_kind)


@dataclass
class _Results:
    """What the traced function hands out, by role, and what it learned on the way."""

    roles: list[role.Role] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    losses: list[LossSpec] = field(default_factory=list)
    metrics: list[MetricSpec] = field(default_factory=list)
    output_leaves: list[Any] = field(default_factory=list)
    output_tree: Any = None
    read: frozenset[str] | None = None

    def add(self, what: role.Role, value: Any) -> None:
        self.roles.append(what)
        self.values.append(value)


def capture(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: Any,
    *,
    training: bool = True,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
) -> Joint:
    """Trace forward, loss and backward of one microbatch into a joint program.

    batch: an example; its tensor sizes become symbols (0 and 1 excepted), everything else in it is fixed.
    training: with its backward; otherwise forward and loss only, for evaluation.
    device: where parameters on meta will live; others stay where they are.
    mesh: the plan's mesh; collectives of the model along one of its axes are named by it.

    The model is left exactly as it was, also on an error. The graph may still hold in-place operations, which the
    `functionalize` pass removes. Raises CaptureError, LossError, BatchError, StateError.
    """
    began = time.perf_counter()
    check_buffers(model.named_buffers(), type(model).__name__)
    check_hooks(model)
    spec, tensors = describe(batch)
    mode = new_fake_mode()
    state = State.fake(model, mode, device, mesh)
    leaves = {path: fake_batch_leaf(mode, leaf, path) for path, leaf in tensors.items()}
    labels, results = Labels(), _Results()
    if state.parts:
        forget_meshes()

    def function(fakes: Sequence[torch.Tensor], batch_leaves: Sequence[torch.Tensor]) -> list[Any]:
        inputs = state.named(fakes)
        # The state stays swapped in through the backward, where a function of the user's may run a part again.
        rules = _rules(model, labels, inputs)
        with labels.applied(), labels.module_names(model), rules, torch.set_grad_enabled(training):
            own = state.in_model(inputs, labels)
            with swapped_state(model, own), unseen_assignments_refused(model):
                given = dict(zip(leaves, batch_leaves, strict=True))
                objective = _run(model, loss_fn, spec, own, given, labels, results)
                if training:
                    pairs = zip(state.roles, fakes, strict=True)
                    buffers = ((what.name, fake) for what, fake in pairs if isinstance(what, role.Buffer))
                    check_buffers(buffers, type(model).__name__)
                    _differentiate(objective, inputs, labels, results)
        return results.values

    with _TRACING, unchanged_model(model), explained(model, labels), mode, knowing_splits(), _tensor_parallel():
        with contents_read_once():
            module = trace(function, (state.fakes, list(leaves.values())), is_user_file, RULES | CHECKS, FUNCTIONS)
        require_functional(module.graph)
    roles = [*state.roles, *(role.BatchLeaf(path) for path in leaves)]
    program, captured = _normalize(module, roles, results.roles, mode, leaves, Reachable(model, loss_fn, training))
    groups = normalize_collectives(program.graph, mesh)
    check_random_backward(program)
    check_devices(program)
    check_kept(program)
    kept = [
        replace(x, formula=expression(mode, x.formula)) if isinstance(x, Number) else x for x in results.output_leaves
    ]
    sizes = _sizes(program, mode, leaves, symbol_names([leaf.formula for leaf in kept if isinstance(leaf, Number)]))
    return Joint(
        program=program,
        sizes=sizes,
        losses=tuple(results.losses),
        metrics=tuple(results.metrics),
        captured=captured,
        output_tree=results.output_tree,
        output_leaves=tuple(_told(leaf, sizes) for leaf in kept),
        read=results.read,
        groups=groups,
        seconds=time.perf_counter() - began,
    )


@contextlib.contextmanager
def _rules(model: nn.Module, labels: Labels, inputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, checkpointed regions run once, and gradient hooks are traced."""
    with marked_regions(labels), traced_hooks(model, labels, inputs):
        yield


@contextlib.contextmanager
def _tensor_parallel() -> Iterator[None]:
    """Within, `DTensor` gets right what it does not get by itself."""
    with parts_of_any_size(), scans_of_parts():
        yield


def _run(
    model: nn.Module,
    loss_fn: LossFunction | None,
    spec: BatchSpec,
    state: dict[str, torch.Tensor],
    leaves: dict[str, torch.Tensor],
    labels: Labels,
    results: _Results,
) -> torch.Tensor | None:
    """Forward and loss of one microbatch, as eager code, run once under the tracer; yields what is differentiated.

    state: what is swapped into the model in the place of its parameters and buffers.
    """
    batch = spec.unflatten(leaves)
    fields = Fields(batch) if type(batch) is dict and all(isinstance(name, str) for name in batch) else None
    if fields is not None and prepares_batches(model):
        batch = fields  # what forward reads of it is seen as it reads
    positional, named = arguments(model, batch)
    if fields is not None:
        batch = fields
        fields.read.update(named)
    output = model(*positional, **named)
    registered = model.named_buffers(remove_duplicate=False)
    updated = {name: buffer for name, buffer in registered if name in state and buffer is not state[name]}
    updated = {name: part_like(buffer, state[name]) for name, buffer in updated.items()}
    labels.phase, labels.module = Phase.LOSS, None
    if loss_fn is None:
        found, metrics = loss_rules.from_output(output)
    else:
        found, metrics = loss_rules.normalize(loss_fn(output, batch))
    if isinstance(batch, Fields):
        results.read = frozenset(batch.read)
    objective = None
    for name, loss in found.items():
        if isinstance(loss, loss_rules.TokenLoss):
            total, kind, tokens = whole(loss.total), "token", whole(loss.tokens)
            results.add(role.Tokens(name), tokens)
        else:
            total, kind, tokens = whole(loss.value), "mean", torch.empty((), dtype=torch.int64)
        results.losses.append(LossSpec(name, kind))  # type: ignore[arg-type]
        results.add(role.Loss(name), total)
        dtype = torch.float64 if torch.is_tensor(tokens) and tokens.is_floating_point() else torch.int64
        with labels.standing_for(role.Denominator(name)):
            denominator = torch.empty((), dtype=dtype, device=total.device)
        wide = torch.promote_types(total.dtype, torch.float32)  # half precision cannot hold every count
        share = total.to(wide) / denominator.to(wide)
        objective = share if objective is None else objective + share
    for name, value in metrics.items():
        results.metrics.append(MetricSpec(name, value.reduction))
        results.add(role.Metric(name), whole(value.value))
    for name, buffer in updated.items():
        results.add(role.BufferUpdate(name), buffer)
    pairs, results.output_tree = tree_flatten_with_path(plain(output) if type(output) is dict else output)
    for keys, leaf in pairs:
        path = path_text(keys, "output")
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            results.output_leaves.append(role.Output(path))
            results.add(role.Output(path), leaf)
        elif isinstance(leaf, _SYMBOLIC):
            results.output_leaves.append(Number(path, leaf))
        else:
            # An object of another kind may hold tensors of the trace, which must not outlive it.
            results.output_leaves.append(leaf if isinstance(leaf, _PLAIN) else Opaque(path, type(leaf).__name__))
    return objective


def _differentiate(
    objective: torch.Tensor | None, state: dict[str, torch.Tensor], labels: Labels, results: _Results
) -> None:
    """The backward of one microbatch: a gradient, or None, for each trainable parameter."""
    if objective is None or not objective.requires_grad:
        raise LossError(
            "the loss needs no gradient: no trainable parameter takes part in it",
            got=", ".join(spec.name for spec in results.losses),
            do="check requires_grad of the parameters and that the loss is not detached or made under no_grad",
        )
    trainable = {name: p for name, p in state.items() if p.requires_grad}
    with labels.standing_for(role.LossScale()):
        scale = torch.empty_like(objective)
    with labels.backward_of(objective):
        gradients = torch.autograd.grad(objective, list(trainable.values()), scale, allow_unused=True)
    for name, gradient in zip(trainable, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(
                f"parameter '{name}' gets a sparse gradient, which cannot be reduced or accumulated here",
                do="build the embedding with sparse=False",
            )
        results.add(role.Grad(name), gradient)


def _normalize(
    module: GraphModule,
    inputs: Sequence[role.Role],
    outputs: Sequence[role.Role],
    mode: FakeTensorMode,
    leaves: dict[str, torch.Tensor],
    reachable: Reachable,
) -> tuple[Program, dict[str, Captured]]:
    """From make_fx's graph to a program: outside values become inputs with roles, sizes are lifted."""
    leave_out_profiling(module.graph)
    check_functions(module)
    take_up(module)
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    roles = dict(zip(nodes, inputs, strict=True))
    constants: dict[str, torch.Tensor] = {}
    captured: dict[str, Captured] = {}
    end = next(node for node in graph.nodes if node.op != "placeholder")

    def add(what: role.Role, value: object) -> Node:
        with graph.inserting_before(end):
            node = graph.placeholder(_identifier(str(what)))
            node.target = node.name  # which is unique
        meta.set_value(node, value)
        roles[node] = what
        return node

    known: dict[int, Node] = {}
    for node in list(graph.nodes):
        stands_for = role_of(node)
        if stands_for is not None:
            node.replace_all_uses_with(add(stands_for, meta.value(node)))
            graph.erase_node(node)
        elif node.op == "get_attr":
            real = getattr(module, str(node.target))
            if id(real) not in known:
                fake = mode.from_tensor(real, static_shapes=True)
                source = reachable.find(real, node)
                if source is not None:
                    captured[source.name] = source
                    known[id(real)] = add(role.Captured(source.name), fake)
                else:
                    reachable.require_literal(node)
                    name = str(len(constants))
                    constants[name] = real
                    known[id(real)] = add(role.Constant(name), fake)
            node.replace_all_uses_with(known[id(real)])
            graph.erase_node(node)
    sizes, places = dict[str, Node](), dict[str, tuple[str, int]]()
    for path, leaf in leaves.items():
        for dimension, number in enumerate(leaf.shape):
            symbol = expression(mode, number)
            if not isinstance(symbol, int) and symbol.is_Symbol and str(symbol) not in sizes:
                sizes[str(symbol)] = add(role.Size(str(symbol)), number)
                places[str(symbol)] = path, dimension
    check_where_read(graph, relied_on(mode, is_user_file), sizes, Sizes(places, {}).names)
    lift_sizes(graph, mode, sizes)
    for node in nodes:
        node.name = _short(str(roles[node]))
    number_operations(graph)
    returned: Any = graph.output_node().args[0]
    graph.output_node().args = (tuple(returned),)
    order = [node for node in graph.nodes if node.op == "placeholder"]
    program = Program("joint", Level.JOINT, graph, tuple(roles[n] for n in order), tuple(outputs), mode, constants)
    return drop_unused_inputs(program), captured


def drop_unused_inputs(program: Program) -> Program:
    """Remove placeholders that nobody reads, such as batch fields that the model does not use."""
    kept = []
    for what, node in list(program.input_nodes()):
        if node.users:
            kept.append(what)
        else:
            program.graph.erase_node(node)
    program.set_signature(kept, program.outputs)
    return program


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text).strip("_")


def _short(text: str) -> str:
    return _identifier(text.split(" ", 1)[-1]) or "batch"


def _told(leaf: Any, sizes: Sizes) -> Any:
    """A leaf of the output; a number that sizes do not tell cannot be returned."""
    if isinstance(leaf, Number) and not symbol_names([leaf.formula]) <= sizes.symbols.keys():
        return Opaque(leaf.path, "number out of the contents of a tensor", "let the model return it as a tensor")
    return leaf


def _sizes(program: Program, mode: FakeTensorMode, leaves: dict[str, torch.Tensor], returned: set[str]) -> Sizes:
    """The sizes of the leaves that the program reads, whose symbols it uses otherwise, or that the trace asked about.

    returned: symbols of numbers in the output. Code may decide on a size (`if mask.shape[1] > 8`) of a leaf that then
    is no input.
    """
    shapes = {path: tuple(expression(mode, size) for size in leaf.shape) for path, leaf in leaves.items()}
    read = {what.path for what in program.inputs if isinstance(what, role.BatchLeaf)}
    used = returned | {what.symbol for what in program.inputs if isinstance(what, role.Size)}
    asked = {path for path, leaf in leaves.items() if is_asked_about(mode, leaf)}
    relevant = {p: shape for p, shape in shapes.items() if p in read | asked or used & symbol_names(shape)}
    symbols: dict[str, tuple[str, int]] = {}
    for path, shape in relevant.items():
        for dimension, size in enumerate(shape):
            if not isinstance(size, int) and size.is_Symbol:
                symbols.setdefault(str(size), (path, dimension))
    return Sizes(symbols, relevant, conditions(mode, set(symbols)))
