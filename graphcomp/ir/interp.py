"""Runs a program as it is, one operation after the other: the oracle for all that is compiled or cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

from graphcomp.compat import higher_order
from graphcomp.compat.grad_mode import runs_as_written
from graphcomp.errors import VerifyError
from graphcomp.ir.body import with_modules
from graphcomp.ir.collective_calls import name_groups
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Constant, Role

# Where a trace could view, running may have to copy: the layout that fake kernels foretell is not always the
# real one (batch norm of a transposed input). The values are the same.
_RUN_AS: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default, **higher_order.PLAIN}

Boxed = Callable[[list[Any]], tuple[Any, ...]]


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within, operations do just what a program says: no autograd on top, and no autocast a second time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def boxed_callable(program: Program, groups: Mapping[str, str] | None = None) -> Boxed:
    """The program as a function of one list of inputs, in the order of its signature.

    groups: mesh axis -> name of this rank's process group along it, for the collectives of the program.

    The list is emptied, so that each input, as each value in between, is freed after its last use. Sizes are
    ints. Returns the outputs in order, None where an output stands for nothing. The program may change later.
    """
    body = _body(program, groups)

    def call(box: list[Any]) -> tuple[Any, ...]:
        if runs_as_written():
            return tuple(body(box))
        with as_written():
            return tuple(body(box))

    return call


def pausing_callable(
    program: Program, groups: Mapping[str, str], before: Callable[[Node], bool]
) -> Callable[[list[Any]], Generator[None, None, tuple[Any, ...]]]:
    """The same as a generator, which stops before each call that `before` names. It returns the outputs."""
    body = _body(program, groups, frozenset(node.name for node in program.calls() if before(node)))

    def begin(box: list[Any]) -> Generator[None, None, tuple[Any, ...]]:
        running = body(box)
        while True:
            with as_written():  # not while others run
                try:
                    next(running)
                except StopIteration as end:
                    return tuple(end.value)
            yield

    return begin


def _body(program: Program, groups: Mapping[str, str] | None, pauses: Collection[str] = ()) -> Callable[..., Any]:
    graph = program.copy().graph
    if groups is not None:
        name_groups(graph, groups, f"program '{program.name}'")
    for node in graph.nodes:
        node.target = _RUN_AS.get(node.target, node.target)
    holder = with_modules(graph)
    graph.set_codegen(_BoxedCode())
    if pauses:
        graph.on_generate_code(lambda _: partial(_with_pauses, names=pauses))
    module = GraphModule(holder, graph, class_name="program")
    body, count = type(module).forward, len(program.inputs)

    def call(box: list[Any]) -> Any:
        if len(box) != count:
            raise VerifyError(f"program '{program.name}' takes {count} inputs", expected=count, got=len(box))
        return body(module, box)

    return call


def _with_pauses(code: list[str], names: Collection[str]) -> list[str]:
    return [f"yield\n{text}" if text.partition(" ")[0] in names else text for text in code]


def python_callable(program: Program) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of its inputs in order; see `boxed_callable`."""
    boxed = boxed_callable(program)

    def call(*inputs: Any) -> tuple[Any, ...]:
        box = list(inputs)
        del inputs  # or this frame would keep every input to the end
        return boxed(box)

    return call


def run(program: Program, inputs: Mapping[Role, Any]) -> dict[Role, Any]:
    """Outputs by role from inputs by role. Constants are known; superfluous inputs are ignored."""
    results = boxed_callable(program)(ordered(program, inputs))
    return dict(zip(program.outputs, results, strict=True))


def trace_values(program: Program, inputs: Mapping[Role, Any]) -> Iterator[tuple[Node, Any]]:
    """Each node with the value it computes, inputs included, in order. Keeps no value beyond its last use."""
    given = iter(ordered(program, inputs))
    last = last_uses(program)
    values: dict[Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            values[node] = next(given)
        else:
            values[node] = evaluate(node, values)
        yield node, values[node]
        for done in last.get(node, ()):
            del values[done]


def evaluate(node: Node, values: Mapping[Node, Any]) -> Any:
    """What one call computes from the values of its inputs."""
    if node.op != "call_function" or not callable(node.target):
        raise VerifyError(f"node '{node.name}' cannot run", expected="call_function", got=node.op)
    arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
    with as_written():
        return _RUN_AS.get(node.target, node.target)(*arguments, **keywords)


def ordered(program: Program, inputs: Mapping[Role, Any]) -> list[Any]:
    """The inputs of a program in order, constants filled in.

    Raises VerifyError with the roles that are missing.
    """
    known: dict[Role, Any] = {Constant(name): tensor for name, tensor in program.constants.items()}
    known.update(inputs)
    missing = [str(role) for role in program.inputs if role not in known]
    if missing:
        raise VerifyError(
            f"program '{program.name}' was not given all its inputs",
            expected=", ".join(map(str, program.inputs)),
            got=f"nothing for {', '.join(missing)}",
        )
    return [known[role] for role in program.inputs]


def last_uses(program: Program) -> dict[Node, list[Node]]:
    """By node: the values that nobody reads after it."""
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    last: dict[Node, list[Node]] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            last.setdefault(max(node.users, key=place.__getitem__, default=node), []).append(node)
    return last


class _BoxedCode(CodeGen):
    """Generates a function of one list, which it empties first."""

    def gen_fn_def(self, free_vars: list[str], *rest: Any, **options: Any) -> str:
        names = [text.partition(":")[0].partition("=")[0].strip() for text in free_vars if text != "self"]
        unpack = f"    {', '.join(names)}, = box\n" if names else ""
        return f"def forward(self, box):\n{unpack}    box.clear()"
