"""Programs written by hand, one call a node, with values computed by fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphcomp.compat.symbols import fake_batch_leaf, new_fake_mode
from graphcomp.ir import meta
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import BatchLeaf, Denominator, Grad, Loss, Param, Role, Size, Tokens

aten = torch.ops.aten


class Builder:
    """Collects nodes; `note` is the annotation of those that follow."""

    def __init__(self, leaf: str = "x", example: tuple[int, ...] = (6, 8)) -> None:
        """One batch leaf of `example` shape, symbolic in each dimension; its sizes are the symbols."""
        self.mode = new_fake_mode()
        self.graph = Graph()
        self.leaf = fake_batch_leaf(self.mode, torch.empty(example), leaf)
        self.sizes: Sequence[Any] = self.leaf.shape
        self.inputs: list[Role] = []
        self.note = Note(Phase.FORWARD)
        self._last_input: Node | None = None

    def input(self, role: Role, value: Any, name: str) -> Node:
        """A placeholder behind those before it. A tuple of sizes stands for a float tensor."""
        if isinstance(value, tuple):
            with self.mode:
                value = torch.empty(value)
        anchor = self._last_input
        with self.graph.inserting_after(anchor) if anchor else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        meta.set_value(node, value)
        self.inputs.append(role)
        self._last_input = node
        return node

    def size(self, dim: int) -> Node:
        number = self.sizes[dim]
        return self.input(Size(str(number.node.expr)), number, f"size_{dim}")

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node: Node = self.graph.create_node(
            "call_function", target, args, kwargs, name=target.__name__.partition(".")[0]
        )
        with self.mode, torch.no_grad():
            values, keywords = map_arg((args, kwargs), meta.value)  # type: ignore[arg-type]
            meta.set_value(node, target(*values, **keywords))
        meta.annotate(node, self.note)
        return node

    def program(
        self, outputs: dict[Role, Node | None], name: str = "sample", level: Level = Level.JOINT, **more: Any
    ) -> Program:
        self.graph.output(tuple(outputs.values()))
        return Program(name, level, self.graph, tuple(self.inputs), tuple(outputs), self.mode, **more)


def training_step(names: tuple[str, str, str] = ("fc.weight", "loss", "tiny"), scale: float = 0.5) -> Program:
    """loss = sum(relu(x @ w) * scale), its token count, and the gradient of w; symbolic in rows."""
    parameter, loss, title = names
    b = Builder(example=(6, 8))
    rows, _ = b.sizes
    w = b.input(Param(parameter), (8, 4), "w")
    with b.mode:
        batch = torch.empty(rows, 8)
    x = b.input(BatchLeaf("x"), batch, "x")
    size = b.size(0)
    total = b.input(Denominator(loss), (), "denominator")

    b.note = Note(Phase.FORWARD, "fc", "model.py:10", operation=0)
    mm = b.call(aten.mm.default, x, w)
    b.note = Note(Phase.FORWARD, "", "model.py:11", operation=1)
    relu = b.call(aten.relu.default, mm)
    b.note = Note(Phase.LOSS, None, "train.py:3", operation=2)
    scaled = b.call(aten.mul.Tensor, relu, scale)
    b.note = Note(Phase.LOSS, None, "train.py:3", operation=3)
    summed = b.call(aten.sum.default, scaled)
    b.note = Note(Phase.LOSS, None, "train.py:3")
    tokens = b.call(aten.full.default, [], size, dtype=torch.int64, device=torch.device("cpu"))
    b.note = Note(Phase.BACKWARD, None, "train.py:3", operation=2)
    ones = b.call(aten.full_like.default, relu, scale)
    grad = b.call(aten.div.Tensor, ones, total)
    b.note = Note(Phase.BACKWARD, "", "model.py:11", operation=1)
    grad = b.call(aten.threshold_backward.default, grad, relu, 0)
    b.note = Note(Phase.BACKWARD, "fc", "model.py:10", operation=0)
    xt = b.call(aten.t.default, x)
    grad_w = b.call(aten.mm.default, xt, grad)
    return b.program({Loss(loss): summed, Tokens(loss): tokens, Grad(parameter): grad_w}, title)
