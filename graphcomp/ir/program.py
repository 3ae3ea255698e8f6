"""A program: a graph of tensor operations with typed, named inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.fx import Graph, Node

from graphcomp.errors import VerifyError
from graphcomp.ir.signature import Role


class Level(StrEnum):
    """What a program may hold; see `ir.verify` for the rules of each level.

    joint: the whole model, for one microbatch. stage: a part of it, for one microbatch. step: what one stage does once
    a step with its parameters or their gradients, together with the other data ranks.
    """

    JOINT = "joint"
    STAGE = "stage"
    STEP = "step"


@dataclass
class Program:
    """One graph with its signature.

    graph: placeholders in the order of `inputs`, then calls, then one output node holding a flat tuple in the order of
        `outputs`. There are no attribute nodes: constants are inputs.
    outputs: a role may stand for None (a gradient that does not exist).
    constants: the literal tensors behind the `Constant` inputs.
    fake_mode: the fake mode of the trace; it owns the symbols in every node's value.
    """

    name: str
    level: Level
    graph: Graph
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    fake_mode: Any
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output_node(self) -> Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def results(self) -> tuple[Any, ...]:
        """The nodes (or None) that the outputs are, in order."""
        returned: tuple[Any, ...] = self.output_node.args[0]  # type: ignore[assignment]
        return tuple(returned)

    def input_nodes(self) -> Iterator[tuple[Role, Node]]:
        return zip(self.inputs, self.placeholders, strict=True)

    def output_items(self) -> Iterator[tuple[Role, Any]]:
        return zip(self.outputs, self.results, strict=True)

    def input(self, role: Role) -> Node:
        """The placeholder with this role."""
        for candidate, node in self.input_nodes():
            if candidate == role:
                return node
        raise VerifyError(f"program '{self.name}' has no input '{role}'", got=", ".join(map(str, self.inputs)))

    def output(self, role: Role) -> Any:
        """The node with this role, or None where the role stands for nothing."""
        for candidate, node in self.output_items():
            if candidate == role:
                return node
        raise VerifyError(f"program '{self.name}' has no output '{role}'", got=", ".join(map(str, self.outputs)))

    def calls(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    def copy(self) -> Program:
        """An independent copy of graph and signature; node values and annotations are shared, not the nodes."""
        graph = Graph()
        output = graph.output(graph.graph_copy(self.graph, {}))
        output.meta = copy.copy(self.output_node.meta)
        return Program(self.name, self.level, graph, self.inputs, self.outputs, self.fake_mode, dict(self.constants))

    def set_signature(self, inputs: Sequence[Role], outputs: Sequence[Role]) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def __str__(self) -> str:
        from graphcomp.ir.printer import print_program

        return print_program(self)
