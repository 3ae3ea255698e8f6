"""Reading and writing the collectives of a graph: which call is one, over which mesh axis, what it is given."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from graphcomp.compat.collective_operators import WAIT
from graphcomp.compat.operators import OpOverload, argument_names
from graphcomp.errors import VerifyError
from graphcomp.ir.calls import arguments
from graphcomp.ir.groups import is_text
from graphcomp.plan import AXES

GROUP = "group_name"


def is_start(node: Node) -> bool:
    """Whether a call begins a collective: it names a group of ranks."""
    return isinstance(node.target, OpOverload) and GROUP in argument_names(node.target)


def is_wait(node: Node) -> bool:
    return node.target is WAIT


def axis_of(node: Node) -> str | None:
    """The mesh axis (or the name of another group) that a collective runs over; None for other calls."""
    return str(arguments(node)[GROUP]) if is_start(node) else None


def name_groups(graph: Graph, groups: Mapping[str, str], where: str) -> None:
    """Put process groups' names in the place of mesh axes and of other texts for ranks (see `ir.groups`).

    Raises VerifyError for one that has no group here. Names of process groups stay as they are.
    """
    for node in graph.nodes:
        axis = axis_of(node)
        if axis is None:
            continue
        if axis not in groups and is_text(axis):
            over = f"mesh axis '{axis}'" if axis in AXES else f"'{axis}'"
            raise VerifyError(
                f"collective '{node.name}' runs over {over}, which has no process group here",
                where=where,
                expected=", ".join(sorted(groups)) or "no collective",
                got=axis,
                do=f"use a mesh with an axis '{axis}'" if axis in AXES else None,
            )
        named = groups.get(axis, axis)
        if GROUP in node.kwargs:
            node.update_kwarg(GROUP, named)
        else:
            node.update_arg(argument_names(node.target).index(GROUP), named)
