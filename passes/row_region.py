"""The region of head and loss: the nodes that are computed for some rows at a time, and what the rest needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.calls import upstream
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Loss
from graphcomp.passes.row_rules import RowRules
from graphcomp.passes.rows import Mixes, Rows, Selection, Step, Total

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_OTHER_PRODUCTS = frozenset({"bmm", "baddbmm", "convolution", "addmv", "mv", "dot"})


def find_head(program: Program) -> Node:
    """The product of forward with the most columns that a loss needs and no other product; the last of equals."""
    losses = [node for what, node in program.output_items() if isinstance(what, Loss)]
    needed = upstream(losses)
    products = [n for n in program.calls() if n in needed and _is_product(n)]
    inner = upstream([source for node in products for source in node.all_input_nodes])
    ends = [n for n in products if n.target in _PRODUCTS and n not in inner and isinstance(_columns(n), int)]
    if not ends:
        raise CaptureError(
            f"head and loss of program '{program.name}' cannot be computed in chunks: there is no head",
            expected="a matrix product (nn.Linear) whose result the loss is computed from",
            got="no mm or addmm on the way to the loss",
            do="leave out Plan(loss_chunks=...)",
        )
    return max(reversed(ends), key=_columns)


def _columns(product: Node) -> Any:
    found = meta.tensor(product)
    return None if found is None else found.shape[1]


def _is_product(node: Node) -> bool:
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return node.target in _PRODUCTS or packet in _OTHER_PRODUCTS or "attention" in packet


class Region:
    """What is repeated. steps: by node, how it is computed of some rows. exports: what the rest needs of it.

    behind: the nodes outside that need something of the region, in order.
    """

    def __init__(self, program: Program, head: Node) -> None:
        self.program, self.head = program, head
        self.rules = RowRules(program)
        self.steps: dict[Node, Step] = {}
        self.exports: dict[Node, None] = {}
        self.behind: dict[Node, None] = {}
        self.columns: int = _columns(head)
        try:
            self._add(head, self.rules.start(head))
        except Mixes as reason:
            raise self._refusal(head, str(reason)) from None
        for node in program.calls():
            if node is not head:
                self._visit(node)
        for node in program.output_node.all_input_nodes:
            if node in self.steps:
                self._export(node, program.output_node, "it is asked for whole")
        self._check_selections()

    @property
    def selections(self) -> list[Selection]:
        return self.rules.selections

    @property
    def rows(self) -> Sequence[Any]:
        """The dimensions that make up the rows which the loss looks at: of the head's, what no selection leaves out."""
        if self.selections:
            return self.selections[-1].after
        return tuple(meta.value(self.head).shape[:1])  # type: ignore[attr-defined]

    def _add(self, node: Node, step: Step) -> None:
        self.steps[node] = step
        self.rules.states[node] = step.state

    def _visit(self, node: Node) -> None:
        own = [n for n in node.all_input_nodes if n in self.steps]
        late = [n for n in node.all_input_nodes if n in self.behind]
        if not own:
            if late:
                self.behind[node] = None
            return
        reason = f"it also needs '{late[0].name}', which exists when all rows are through" if late else ""
        if not late and not any(map(self._is_end, own)):
            try:
                return self._add(node, self.rules.step(node))
            except Mixes as found:
                reason = str(found)
        self.behind[node] = None
        for source in own:
            self._export(source, node, reason)

    def _is_end(self, node: Node) -> bool:
        """The gradient of the head's input: nothing behind it has logits."""
        backward = meta.note(node).phase is Phase.BACKWARD
        return backward and node.target in _PRODUCTS and isinstance(self.steps[node].state, Rows)

    def _export(self, node: Node, user: Node, reason: str) -> None:
        state = self.steps[node].state
        if isinstance(state, Rows) and not self._is_end(node):
            inside = meta.value(node).shape[state.lead :]  # type: ignore[attr-defined]
            if (
                state.turned
                or not all(isinstance(s, int) for s in inside)
                or torch.Size(inside).numel() >= self.columns
            ):
                raise self._refusal(user, reason, node)
        if not isinstance(state, Rows | Total):
            raise self._refusal(user, reason, node)
        self.exports[node] = None

    def _check_selections(self) -> None:
        """What leaves the region is of the rows that are computed, or zero elsewhere."""
        for node in self.exports:
            state = self.steps[node].state
            rows = state.of if isinstance(state, Total) else state
            if isinstance(rows, Rows) and rows.space < len(self.selections) and not rows.zero:
                raise self._refusal(node, "it takes rows that another operation leaves out (a slice of the logits)")

    def _refusal(self, user: Node, reason: str, source: Node | None = None) -> CaptureError:
        named = source if user.op == "output" and source is not None else user
        what = f"'{user.target}'"
        if user.op == "output":
            what = ", ".join(f"'{role}'" for role, node in self.program.output_items() if node is source)
        return CaptureError(
            f"head and loss cannot be computed in chunks of rows: {what} needs all rows at once",
            where=", ".join((*_place(named), f"node '{named.name}'")),
            expected="operations on each row of the logits by itself, and sums over rows",
            got=reason,
            do="use token_loss or sums (not means) over rows, or leave out Plan(loss_chunks=...); "
            "outputs with logits are there without chunks only",
        )


def _place(node: Node) -> list[str]:
    """Where a node comes from; a sum of gradients has no line of its own, but what it adds has."""
    return next((found for one in (node, *node.all_input_nodes) if (found := meta.place(one))), [])
