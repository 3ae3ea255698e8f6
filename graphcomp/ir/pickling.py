"""Programs, and all that refers to them, as bytes and back: graphs with their values, annotations and symbols.

Whoever reads such bytes runs code that is in them, as always with pickle.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphcomp.compat.serial import reduced
from graphcomp.ir import meta


@dataclass(frozen=True)
class _At:
    """Stands for the node at this place of its graph."""

    place: int


def to_bytes(value: object, outside: Callable[[object], str | None] = lambda _: None) -> bytes:
    """outside: the name of an object that is not written itself, but found by its name when it is read."""
    file = io.BytesIO()
    _Pickler(file, outside).dump(value)
    return file.getvalue()


def from_bytes(data: bytes, outside: Mapping[str, object] | None = None) -> Any:
    """outside: objects by the names that were written for them. Raises KeyError for one that is not there."""
    return _Unpickler(io.BytesIO(data), outside or {}).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, outside: Callable[[object], str | None]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._outside = outside

    def persistent_id(self, value: object) -> str | None:
        return self._outside(value)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Graph):
            return _graph, (_nodes(value),)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # By its fields: what it has worked out from them is worked out again.
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return _record, (type(value), fields)
        found = reduced(value)
        return NotImplemented if found is None else found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, outside: Mapping[str, object]) -> None:
        super().__init__(file)
        self._known = outside

    def persistent_load(self, name: str) -> object:
        return self._known[name]


def _record(kind: type[Any], fields: Mapping[str, Any]) -> object:
    record = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


_NodeParts = tuple[str, str, Any, Any, Any, Any, meta.Note | None]


def _nodes(graph: Graph) -> list[_NodeParts]:
    places = {node: _At(place) for place, node in enumerate(graph.nodes)}

    def place(node: Node) -> Any:
        return places[node]

    def parts(node: Node) -> _NodeParts:
        args, kwargs = (map_arg(given, place) for given in (node.args, node.kwargs))
        return node.op, node.name, node.target, args, kwargs, meta.value(node), meta.noted(node)

    return [parts(node) for node in graph.nodes]


def _graph(parts: list[_NodeParts]) -> Graph:
    graph, nodes = Graph(), list[Node]()

    def at(value: Any) -> Any:
        if isinstance(value, _At):
            return nodes[value.place]
        if isinstance(value, slice):
            return slice(at(value.start), at(value.stop), at(value.step))
        if isinstance(value, dict):
            return {key: at(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return (tuple if isinstance(value, tuple) else list)(map(at, value))
        return value

    for op, name, target, args, kwargs, value, note in parts:
        node = graph.create_node(op, target, at(args), at(kwargs), name)
        node.name = name
        if value is not None:
            meta.set_value(node, value)
        if note is not None:
            meta.annotate(node, note)
        nodes.append(node)
    return graph
