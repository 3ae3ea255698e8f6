"""The step programs of one stage: shards to parameters, and gradients to their sums over data ranks.

Written the plain way, one collective for each parameter, each over a dense tensor of one dimension, waited for at once.
How collectives are joined and ordered is the business of passes; see `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphcomp.compat import collective_operators as ops
from graphcomp.compat.symbols import new_fake_mode
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import PlanError
from graphcomp.ir import meta
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import Grad, Param, Role, Shard

aten = torch.ops.aten


def unshard_program(stage: int, parameters: Sequence[Shards], axis: str = "dp") -> Program:
    """Inputs: `Shard(name)`, each of its `padded` shape. Outputs: `Param(name)`, each whole and dense."""
    ranks = parameters[0].ranks if parameters else 1
    build = _Builder(parameters, ranks, Phase.FORWARD)
    shards = [build.input(Shard(each.name), each.spec, each.padded) for each in parameters]
    wholes: dict[Role, Node] = {}
    for each, shard in zip(parameters, shards, strict=True):
        build.serve(each.name)
        wholes[Param(each.name)] = _gather(build, each, shard, axis)
    return build.program(f"stage {stage} unshard", wholes)


def reduce_program(
    stage: int, replicated: Sequence[Spec], sharded: Sequence[Shards], ranks: int, axis: str = "dp"
) -> Program:
    """Inputs: `Grad(name)`, each whole, of any strides. Outputs: `Grad(name)`, dense: its sum over data ranks, whole
    for a replicated parameter and this rank's rows (in their `padded` shape) for a sharded one.

    The dtype in each spec is that of the gradient.
    """
    build = _Builder(sharded, ranks, Phase.BACKWARD)
    specs = [*replicated, *(each.spec for each in sharded)]
    gradients = {spec.name: build.input(Grad(spec.name), spec, spec.shape) for spec in specs}
    sums: dict[Role, Node] = {}
    for spec in replicated:
        build.serve(spec.name)
        sums[Grad(spec.name)] = _all_reduce(build, spec, gradients[spec.name], axis)
    for each in sharded:
        build.serve(each.name)
        sums[Grad(each.name)] = _reduce_scatter(build, each, gradients[each.name], axis)
    return build.program(f"stage {stage} reduce", sums)


def _gather(build: _Builder, of: Shards, shard: Node, axis: str) -> Node:
    if not of.spec.numel:
        return build.call(aten.new_zeros.default, shard, [*of.spec.shape])
    gathered = build.call(ops.ALL_GATHER, _flat(build, shard, prod(of.padded)), of.ranks, axis)
    rows = build.call(ops.WAIT, gathered)
    if of.chunk * of.ranks != of.rows:
        rows = build.call(aten.slice.Tensor, rows, 0, 0, of.spec.numel)
    return build.call(aten.view.default, rows, [*of.spec.shape])


def _all_reduce(build: _Builder, spec: Spec, gradient: Node, axis: str) -> Node:
    if not spec.numel:
        return build.call(aten.new_zeros.default, gradient, [*spec.shape])
    reduced = build.call(ops.ALL_REDUCE, _flat(build, gradient, spec.numel), "sum", axis)
    return build.call(aten.view.default, build.call(ops.WAIT, reduced), [*spec.shape])


def _reduce_scatter(build: _Builder, of: Shards, gradient: Node, axis: str) -> Node:
    if not of.spec.numel:
        return build.call(aten.new_zeros.default, gradient, [*of.padded])
    flat = _flat(build, gradient, of.spec.numel)
    missing = (of.chunk * of.ranks - of.rows) * (of.spec.numel // of.rows)
    if missing:
        flat = build.call(aten.constant_pad_nd.default, flat, [0, missing], 0)
    reduced = build.call(ops.REDUCE_SCATTER, flat, "sum", of.ranks, axis)
    return build.call(aten.view.default, build.call(ops.WAIT, reduced), [*of.padded])


def _flat(build: _Builder, node: Node, size: int) -> Node:
    """All elements in row-major order. Inputs may have any strides, so also one of one dimension is made dense."""
    dense = build.call(aten.contiguous.default, node)
    return build.call(aten.view.default, dense, [size])


class _Builder:
    """Collects inputs and calls, with values computed by fake tensors; no process group is needed for that."""

    def __init__(self, sharded: Sequence[Shards], ranks: int, phase: Phase) -> None:
        for each in sharded:
            if each.ranks != ranks:
                raise PlanError(
                    f"parameter '{each.name}' is split over another number of data ranks than the program is for",
                    expected=ranks,
                    got=each.ranks,
                )
        self.mode, self.graph = new_fake_mode(), Graph()
        self.inputs: list[Role] = []
        self.note = Note(phase)
        self._serves = ""

    def input(self, role: Role, spec: Spec, shape: tuple[int, ...]) -> Node:
        node = self.graph.placeholder(str(role))
        node.target = node.name  # a name in Python and the only one of its kind, for code is made of the graph
        with self.mode:
            meta.set_value(node, torch.empty(shape, dtype=spec.dtype, device=spec.device))
        self.inputs.append(role)
        return node

    def serve(self, parameter: str) -> None:
        """The calls that follow are made for this parameter."""
        self.note = Note(self.note.phase, module=parameter)

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        name = target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode, torch.no_grad():
            meta.set_value(node, target(*map_arg(args, meta.value)))  # type: ignore[arg-type]
        meta.annotate(node, self.note)
        return node

    def program(self, name: str, outputs: dict[Role, Node]) -> Program:
        self.graph.output(tuple(outputs.values()))
        return Program(name, Level.STEP, self.graph, tuple(self.inputs), tuple(outputs), self.mode)
