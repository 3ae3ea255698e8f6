"""Run a program's graph again under a tracer, keeping signature, names and annotations. For passes that
replace
operations by what torch itself makes of them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Interpreter, Node
from torch.fx.node import map_arg

from graphcomp.compat.decompositions import Table, trace_with
from graphcomp.compat.symbolic_sizes import symbolic_bodies
from graphcomp.compat.tracing import observe_nodes
from graphcomp.errors import CaptureError, GraphcompError
from graphcomp.ir import meta
from graphcomp.ir.body import take_up
from graphcomp.ir.normalize import lift_sizes
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Role, Size
from graphcomp.passes.operations import settle_operations
from graphcomp.passes.symbols import with_all_sizes

Run = Callable[..., Any]
INPLACE = re.compile(r"^(\w*[a-z0-9])_(_\d+)?$")


@dataclass(frozen=True)
class Retraced:
    """program: the new one. written: for each input that the run wrote to, by placeholder name, the node of
    its last
    value (None of these is in the program's outputs yet)."""

    program: Program
    written: Mapping[str, Node]


class Replay(Interpreter):
    """Runs a program's graph and notes for each node that is traced meanwhile which old node it came from.

    last: the last node that came from an old one, which takes over its name.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(torch.nn.Module(), graph=program.graph)
        self.extra_traceback = False  # an error says by itself where it happened
        self.origin: dict[Node, Node] = {}
        self.last: dict[Node, Node] = {}
        self._current: Node | None = None

    def observe(self, made: Node) -> None:
        if self._current is not None:
            self.origin[made] = self._current
            if made.target is not operator.getitem:
                self.last[self._current] = made

    def run_node(self, n: Node) -> Any:
        self._current = n if n.op == "call_function" else None
        try:
            result = super().run_node(n)
        except GraphcompError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines() or ["(no text)"]
            raise CaptureError(
                f"'{n.target}' cannot be traced a second time, on the symbolic sizes of the program",
                where=", ".join((*meta.place(n), f"node '{n.name}'")),
                got=f"{type(error).__name__}: {text[0]}",
                do="compute it with other operations; or make the sizes it depends on plain numbers, as int(n) does, "
                "which is a program for each",
            ) from error
        self._current = None
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.operation(target, args, kwargs)

    def operation(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What to run for a call; subclasses exchange operations here."""
        return target(*args, **kwargs)


def retrace(
    program: Program,
    player: Callable[[Program], Replay] = Replay,
    *,
    decompositions: Table | None = None,
    transform: Callable[[Run], Run] = lambda run: run,
) -> Retraced:
    """The program that `transform(run)` performs, where `run` has `player` replay it under its fake mode.

    Keeps inputs, outputs and level. A node keeps its name if the run still makes a node for it; nodes that
    come from it besides are named after it; all of them get its annotation.
    """
    asked = frozenset(program.inputs)
    program = with_all_sizes(program)
    replay = player(program)
    # Size inputs come first, for a tracer takes a symbol from the first input that has it.
    order = [node for _, node in sorted(program.input_nodes(), key=lambda item: not isinstance(item[0], Size))]

    def run(*values: Any) -> Any:
        given = dict(zip(order, values, strict=True))
        with observe_nodes(replay.observe):
            return replay.run(*(given[node] for node in program.placeholders), enable_io_processing=False)

    with symbolic_bodies(), program.fake_mode:
        module = trace_with(transform(run), [meta.value(node) for node in order], decompositions or {})
    done = _Rebuild(program, replay, module, order).finish()
    _drop_sizes(done.program, asked)
    return done


def _drop_sizes(program: Program, asked: frozenset[Role]) -> None:
    """Take back the sizes that were only there for the tracer."""
    kept = []
    for role, node in list(program.input_nodes()):
        if isinstance(role, Size) and role not in asked and not node.users:
            program.graph.erase_node(node)
        else:
            kept.append(role)
    program.set_signature(kept, program.outputs)


class _Rebuild:
    """Copies a traced graph into a program with the old signature, names and annotations."""

    def __init__(self, old: Program, replay: Replay, module: torch.fx.GraphModule, order: list[Node]) -> None:
        self.old, self.replay, self.module, self.order = old, replay, module, order
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.written: dict[str, Node] = {}
        self.names = self._names()
        self.taken = {node.name for node in old.graph.nodes} | set(self.names.values())

    def _names(self) -> dict[Node, str]:
        """The traced nodes that keep the name of an old one, less the underscore of an in-place operation."""
        taken = {node.name for node in self.old.graph.nodes}
        items = {(n.args[0], n.args[1]): n for n in self.old.calls() if n.target is operator.getitem}
        names: dict[Node, str] = {}
        for new in self.module.graph.nodes:
            old = self.replay.origin.get(new)
            if old is not None and new.target is operator.getitem and self.replay.last.get(old) is new.args[0]:
                old = items.get((old, new.args[1]))
            elif old is not None and self.replay.last[old] is not new:
                old = None
            if old is not None:
                name = INPLACE.sub(r"\1\2", old.name)
                names[new] = old.name if name in taken else name
        return names

    def finish(self) -> Retraced:
        take_up(self.module)
        for node in reversed(self.module.graph.nodes):
            if meta.holds_nothing(node) and not node.users:
                self.module.graph.erase_node(node)  # a result that does not exist
        nodes = list(self.module.graph.nodes)
        self._placeholders([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.op == "get_attr":
                raise CaptureError(
                    f"what program '{self.old.name}' is replaced by makes a tensor from numbers",
                    where=str(node.target),
                    do="leave out the pass 'decompose', or take another table",
                )
            if node.op == "call_function":
                self._call(node)
        returned: Any = self.module.graph.output_node().args[0]
        self.graph.output(tuple(self.copies[r] if isinstance(r, Node) else r for r in returned))
        sizes = {role.symbol: node for role, node in self._inputs() if isinstance(role, Size)}
        lift_sizes(self.graph, self.old.fake_mode, sizes)
        new = replace(self.old, graph=self.graph, constants=dict(self.old.constants))
        settle_operations(new, {})
        return Retraced(new, self.written)

    def _inputs(self) -> list[tuple[Role, Node]]:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        return list(zip(self.old.inputs, placeholders, strict=True))

    def _placeholders(self, traced: list[Node]) -> None:
        by_old = dict(zip(self.order, traced, strict=True))
        for old in self.old.placeholders:
            new = self.graph.placeholder(old.name)
            new.meta = dict(old.meta)
            self.copies[by_old[old]] = new

    def _call(self, node: Node) -> None:
        origin = self.replay.origin.get(node)
        destination = self.copies.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if node.target is torch.ops.aten.copy_.default and destination is not None and destination.op == "placeholder":
            self.written[destination.name] = self.copies[node.args[1]]  # type: ignore[index]
            self.copies[node] = self.copies[node.args[1]]  # type: ignore[index]
            return
        name = self.names.get(node) or self._new_name(node, origin)
        args = map_arg(node.args, self.copies.__getitem__)
        kwargs = map_arg(node.kwargs, self.copies.__getitem__)
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=name)
        meta.set_value(new, meta.value(node))
        if origin is not None:
            meta.inherit(new, origin)
        elif args and isinstance(args[0], Node):
            meta.inherit(new, args[0])
        self.copies[node] = new

    def _new_name(self, node: Node, origin: Node | None) -> str:
        operation = "item" if node.target is operator.getitem else node.name.rstrip("0123456789").rstrip("_")
        base = f"{origin.name}_{operation}" if origin is not None else operation
        name, count = base, 1
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return name
