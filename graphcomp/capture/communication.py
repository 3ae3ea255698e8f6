"""Collectives of a captured graph in the normal form of programs: functional, waited for once, over named ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import Graph, Node

from graphcomp.compat.collective_operators import ALL_TO_ALL, WAIT
from graphcomp.compat.operators import is_mutable
from graphcomp.compat.process_groups import ranks_of
from graphcomp.compat.run_time_sizes import is_run_time
from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.calls import arguments
from graphcomp.ir.collective_calls import GROUP, is_start, is_wait, name_groups
from graphcomp.ir.effects import FUNCTIONAL, is_collective
from graphcomp.ir.groups import text_of
from graphcomp.ir.meta import Phase
from graphcomp.ir.spelling import operation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ONE_SIDED = frozenset({"isend", "irecv", "batch_p2p_ops"})


def require_functional(graph: Graph) -> None:
    """Raise CaptureError, with the user's line, for communication that is no functional collective."""
    for node in filter(is_collective, graph.nodes):
        target: Any = node.target
        name = target.name().partition(".")[0].rpartition("::")[2]
        is_known = (is_start(node) and name not in _ONE_SIDED and not is_mutable(target)) or is_wait(node)
        if not is_known or target.namespace != FUNCTIONAL:
            raise CaptureError(
                "the code communicates with other ranks in a way that a program cannot hold",
                where=meta.note(node).source,
                expected="a functional collective, whose result is a new tensor",
                got=str(target),
                do="use graphcomp.collectives; torch.distributed's own collectives write to their arguments",
            )


def normalize_collectives(graph: Graph, mesh: DeviceMesh | None) -> dict[str, str]:
    """Bring the collectives of a graph into normal form; yields the process group's name for each text in use.

    mesh: the plan's, whose axes name the groups along them.

    Raises CaptureError, with the user's line, for a collective over ranks that do not run the same program.
    """
    _require_known_sizes(graph)
    _wait_once(graph)
    texts = _Texts(mesh)
    found = {str(arguments(node)[GROUP]): texts.of(node) for node in graph.nodes if is_start(node)}
    name_groups(graph, found, "capture")
    return texts.groups


def _require_known_sizes(graph: Graph) -> None:
    """Refuse a collective to which all ranks have to give alike, on a size that each of them alone knows."""
    for node in filter(is_start, graph.nodes):
        given = meta.value(node.all_input_nodes[0])
        if is_run_time(given) and node.target is not ALL_TO_ALL:
            raise CaptureError(
                "a collective is given a tensor whose size is known at run time only, and may differ between ranks",
                where=meta.note(node).source,
                expected="tensors of one shape on all ranks",
                got=f"{operation(node.target)} of the rows that an exact all_to_all brings",
                do="send the rows back first, or reduce them: all_reduce(rows.sum(0), ...)",
            )


def _wait_once(graph: Graph) -> None:
    """One wait right behind each collective (behind each part of one that yields several); all else reads the wait."""
    for node in list(graph.nodes):
        if is_wait(node) and not _is_pending(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in filter(is_start, list(graph.nodes)):
        found = meta.value(node)
        parts = [node] if not isinstance(found, list | tuple) else _parts(graph, node, found)
        for pending in parts:
            users = list(pending.users)
            if len(users) == 1 and is_wait(users[0]):
                continue
            with graph.inserting_after(pending):
                wait = graph.call_function(WAIT, (pending,))
            meta.set_value(wait, meta.value(pending))
            meta.inherit(wait, node)
            if meta.note(node).phase is not Phase.BACKWARD:
                meta.amend(wait, operation=None)  # the collective alone stands for the differentiable operation
            for user in users:
                if is_wait(user):
                    user.replace_all_uses_with(wait)
                    graph.erase_node(user)
                else:
                    user.replace_input_with(pending, wait)


def _is_pending(value: object) -> bool:
    if isinstance(value, Node) and value.target is operator.getitem:
        value = value.args[0]
    return isinstance(value, Node) and is_start(value)


def _parts(graph: Graph, node: Node, values: Sequence[Any]) -> list[Node]:
    """One node for each part of a collective's results."""
    parts: dict[int, Node] = {}
    for user in list(node.users):
        place: Any = user.args[1] if user.target is operator.getitem else None
        if place in parts:
            user.replace_all_uses_with(parts[place])
            graph.erase_node(user)
        elif place is not None:
            parts[place] = user
    for place, value in enumerate(values):
        if place not in parts:
            with graph.inserting_after(node):
                parts[place] = graph.call_function(operator.getitem, (node, place))
            meta.set_value(parts[place], value)
            meta.inherit(parts[place], node)
    return [parts[place] for place in range(len(values))]


class _Texts:
    """Gives each process group its text. groups: the name of the process group, by text."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.groups: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._mesh = mesh
        self._axes: dict[str, str] = {}
        for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
            self._axes.setdefault(str(mesh.get_group(axis).group_name), axis)  # type: ignore[union-attr]

    def of(self, node: Node) -> str:
        given = arguments(node)[GROUP]
        name = str(given if isinstance(given, str) else given.group_name)
        if name not in self._texts:
            text = self._axes.get(name) or self._by_ranks(name)
            self._require_one_stage(node, text, ranks_of(name))
            self._texts[name] = text
            self.groups[text] = name
        return self._texts[name]

    def _by_ranks(self, name: str) -> str:
        first = text = text_of(ranks_of(name))
        count = 1
        while text in self.groups:  # another process group of the same ranks
            count += 1
            text = f"{first}#{count}"
        return text

    def _require_one_stage(self, node: Node, text: str, ranks: Sequence[int]) -> None:
        """Refuse a collective whose ranks run different stages: each node runs on one stage alone, at its own time.

        Ranks of one stage run the same rank program, so they issue their collectives in the same order.
        """
        if self._mesh is None or "pp" not in (self._mesh.mesh_dim_names or ()):
            return
        axis = (self._mesh.mesh_dim_names or ()).index("pp")
        own = self._mesh.get_local_rank("pp")
        together = set(self._mesh.mesh.select(axis, own).flatten().tolist())
        if not set(ranks) <= together:
            raise CaptureError(
                "a collective of the model runs over ranks of different pipeline stages, which never meet in it",
                where=meta.note(node).source,
                expected=f"a group within the ranks of one stage, here {sorted(together)}",
                got=f"{text}, ranks {list(ranks)}",
                do="use a group along another axis of the mesh; the compiler itself moves values between stages",
            )
