"""Functions that operators take: which of them a program can hold, and what is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphcomp.compat.aliasing import written_arguments
from graphcomp.compat.higher_order import BACKWARD, PLAIN, FunctionsRefusedError, whole_gradients
from graphcomp.compat.operators import HigherOrderOperator
from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.body import DETACHED
from graphcomp.ir.effects import is_collective, is_random


def refusal(error: FunctionsRefusedError, where: str | None) -> CaptureError:
    return _refused(error.operator, error.what, where, error.do)


def check_functions(module: GraphModule) -> None:
    """Refuse operators that a program cannot hold, and functions that do more than compute from what they are given.

    module: a traced graph that holds functions as modules.
    """
    for node in module.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        if node.target not in PLAIN:
            raise _refused(node.target.name(), _UNKNOWN, _place(node), "write it out in plain operations")
        if node.target is BACKWARD and not whole_gradients(getattr(module, str(node.args[8].target))):
            what = "whose score uses a value that needs a gradient without indexing it"
            do = "index it: bias[h], bias[b, q_idx]; or compute it before"
            raise _refused("flex_attention", what, _place(_forward_of(node)), do)
        for source in node.all_input_nodes:
            held = getattr(module, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(held, GraphModule):
                for inner in held.graph.nodes:
                    found = _fault(held, inner)
                    if found is not None:
                        raise _refused(node.target.name(), found[0], _place(node), found[1])


def _place(node: Node) -> str | None:
    return ", ".join(meta.place(node)) or None


def _forward_of(node: Node) -> Node:
    """A backward node does not know its line yet; it is given the result of its forward."""
    source: Any = node.args[3]
    while source.target not in PLAIN:
        source = source.args[0]
    return source


_LITERAL = torch.ops.aten.lift_fresh_copy.default
_UNKNOWN = "which a program cannot hold"


def _fault(function: GraphModule, node: Node) -> tuple[str, str] | None:
    """What is wrong with a call in a function, and what to do."""
    if node.op == "get_attr":
        held: Any = getattr(function, str(node.target))
        if not isinstance(held, torch.Tensor):
            return "one of whose functions calls such an operator itself", "write the inner one out in plain operations"
        if held.dim() > 0:
            return "one of whose functions makes a tensor from numbers", "make it outside of the function"
    if isinstance(node.target, HigherOrderOperator):
        return "one of whose functions calls such an operator itself", "write the inner one out in plain operations"
    if is_random(node):
        return "one of whose functions draws random numbers", "draw outside of the function, and index what was drawn"
    if is_collective(node):
        return "one of whose functions communicates", "communicate outside of the function"
    made = node.args[0] if node.target is DETACHED else None
    if written_arguments(node) and not (isinstance(made, Node) and made.target is _LITERAL):
        return "one of whose functions works in place", "write it without: score = score + x"
    return None


def _refused(operator: str, what: str, where: str | None, do: str) -> CaptureError:
    return CaptureError(
        f"the code calls '{operator}', an operator that takes functions, {what}",
        where=where,
        expected="plain operations, or flex_attention with functions of its own arguments",
        got=operator,
        do=do,
    )
