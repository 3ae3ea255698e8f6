"""Merges equal computations."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from graphcomp.ir import meta
from graphcomp.ir.program import Level, Program
from graphcomp.passes.base import Pass
from graphcomp.passes.driver import rewrite_nodes
from graphcomp.passes.effects import has_effect
from graphcomp.passes.memory import is_exposed


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Uses the first of several calls with the same operation and the same arguments for all of them.

    Level: joint and stage.

    Sound because operations without effects give the same result for the same arguments, bit for bit. Not
    merged: random operations and collectives; tensors of different phases (a backward node that computes a
    forward value again would turn it into a saved value) or of different checkpointed regions (they would no
    longer be recomputed); in a joint program, tensors of different modules (a stage would wait for another
    one's copy); and what an output shows, for two outputs would share memory. Arithmetic on sizes is merged
    everywhere.

        before: %a = sin(%x)    %b = sin(%x)    %c = add.Tensor(%a, %b)
        after:  %a = sin(%x)                    %c = add.Tensor(%a, %a)
    """

    name: ClassVar[str] = "cse"

    def apply(self, program: Program) -> Program:
        first: dict[Hashable, Node] = {}

        def merge(node: Node) -> Node | None:
            if has_effect(node) or is_exposed(node):
                return None
            same = first.setdefault(_key(node, program.level), node)
            return same if same is not node else None

        rewrite_nodes(program, merge)
        return program


def _key(node: Node, level: Level) -> Hashable:
    """Equal keys mean equal results; types are part of it, since 1, 1.0 and True are equal in Python."""
    note = meta.note(node)
    is_number = isinstance(meta.value(node), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    module = note.module if level is Level.JOINT else None
    region = None if is_number else (note.phase, note.recompute, module)
    return node.target, _frozen(node.args), _frozen(node.kwargs), region


def _frozen(argument: object) -> Hashable:
    if isinstance(argument, list | tuple):
        return type(argument).__name__, tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(part)) for name, part in sorted(argument.items()))
    if isinstance(argument, slice):
        return "slice", _frozen((argument.start, argument.stop, argument.step))
    if isinstance(argument, float):
        return float, argument.hex()  # tells 0.0 from -0.0, and nan from nothing
    return type(argument), argument
