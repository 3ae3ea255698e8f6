"""Random operations become functions of the microbatch's seed and of their place in the program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphcomp.capture.refuse import check_random_backward
from graphcomp.compat.estimates import hint
from graphcomp.compat.operators import OpOverload, argument_names
from graphcomp.compat.symbols import expression, size_value, symbol_names
from graphcomp.errors import CaptureError
from graphcomp.ir import meta, randomness
from graphcomp.ir.normalize import lift_sizes
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import Role, Seed, Size
from graphcomp.passes.base import Pass
from graphcomp.passes.effects import has_effect

aten = torch.ops.aten


@dataclass(frozen=True)
class SeededRandom(Pass):
    """Replaces random operations by operators that take the input `seed` and a number of their own, their
    place.

    Level: joint. To be run right behind `functionalize`, before any pass that moves or drops nodes: a node's
    place is its position among the random nodes of the graph.

    Sound because every draw has the distribution that eager's has, though not eager's numbers, and the
    backward reads the forward's own mask, as before. Afterwards no draw depends on the order in which nodes,
    stages or microbatches run, so all ways to cut and schedule the program agree bit for bit. Operations that
    draw nothing (attention without dropout) stay. One that is not in the table is refused by name.

        before: %b = bernoulli.p(%x, 0.7)
        after:  %u = graphcomp.seeded_uniform(%seed, 0, [%s0, 8], f32, cpu)    %m = lt.Scalar(%u, 0.7)
                %b = _to_copy(%m, dtype=f32)
    """

    name: ClassVar[str] = "seeded_random"
    levels: ClassVar[frozenset[Level]] = frozenset({Level.JOINT})
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"seeded"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"decomposed"})

    def apply(self, program: Program) -> Program:
        check_random_backward(program)
        random = [node for node in program.calls() if randomness.draws(node)]
        for node in random:
            _require_known(node)
        if not random:
            return program
        seed = _input(program, Seed(), _seed_value(program))
        for place, node in enumerate(random, start=_first_free_place(program)):
            _replace(program, node, _RULES[node.target](_Draw(program, node, seed, place)))
        _lift(program)
        return program


@dataclass
class _Draw:
    """One random node while it is being replaced: what a rule may ask, and the nodes it makes."""

    program: Program
    node: Node
    seed: Node
    place: int

    def __getitem__(self, name: str) -> Any:
        return _arguments(self.node)[name]

    def get(self, name: str, default: Any) -> Any:
        return _arguments(self.node).get(name, default)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A new node in front of the old one, with the value it computes and the old one's annotation."""
        part = target.__name__.partition(".")[0].removeprefix("seeded_").strip("_")
        name = f"{self.node.name}_{part}"
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.create_node("call_function", target, args, kwargs, name)
        with torch.no_grad(), self.program.fake_mode:
            values, keywords = map_arg((args, kwargs), meta.value)  # type: ignore[arg-type]
            meta.set_value(new, target(*values, **keywords))
        meta.inherit(new, self.node)
        meta.amend(new, operation=None)  # the result alone stands for the differentiable operation
        return new

    def sample(self, draw: OpOverload, *more: Any, dtype: torch.dtype | None = None) -> Node:
        """A draw with the sizes, strides and device of the node's (first) value. more: the draw's options.

        The numbers lie in memory as they were drawn; a view puts the dimensions in their order.
        """
        shape = _first(self.node)
        order = sorted(range(shape.dim()), key=lambda i: -hint(shape.stride(i)))
        sizes = [self._size(shape.shape[i]) for i in order]
        bounds, options = (more, ()) if draw is randomness.seeded_randint else ((), more)
        arguments = (self.seed, self.place, *bounds, sizes, dtype or shape.dtype, shape.device, *options)
        new = self.call(draw, *arguments)
        if order == sorted(order):
            return new
        return self.call(aten.permute.default, new, sorted(range(len(order)), key=order.__getitem__))

    def _size(self, number: Any) -> Any:
        """A size as an argument: a plain number, the size's input, or arithmetic on such."""
        found = expression(self.program.fake_mode, number)
        if isinstance(found, int):
            return found
        for symbol in sorted(symbol_names([found])):
            _input(self.program, Size(symbol), size_value(number, _symbol(found, symbol)))
        with self.node.graph.inserting_before(self.node):
            # Stands for the number until all sizes are lifted together.
            new = self.node.graph.call_function(aten.sym_size.int, (self.seed, 0))
        meta.set_value(new, number)
        meta.inherit(new, self.node)
        return new


def _bernoulli(draw: _Draw, p: Any) -> Node:
    dtype = _first(draw.node).dtype
    uniform = draw.sample(randomness.seeded_uniform, dtype=_compared(dtype))
    below = aten.lt.Tensor if isinstance(p, Node) and meta.tensor(p) is not None else aten.lt.Scalar
    mask = draw.call(below, uniform, p)
    return mask if dtype is torch.bool else draw.call(aten._to_copy.default, mask, dtype=dtype)


def _native_dropout(draw: _Draw) -> tuple[Node, Node]:
    """The mask is kept for the backward; the output is rounded as eager's: first the mask, then the scale."""
    x, keep = draw["input"], 1.0 - draw["p"]
    uniform = draw.sample(randomness.seeded_uniform, dtype=_compared(_first(draw.node).dtype))
    mask = draw.call(aten.lt.Scalar, uniform, keep)
    kept = draw.call(aten.mul.Tensor, x, mask)
    return draw.call(aten.mul.Tensor, kept, 1.0 / keep if keep else 0.0), mask


def _rrelu(draw: _Draw) -> tuple[Node, Node]:
    x = draw["self"]
    slope = draw.sample(randomness.seeded_uniform, draw.get("lower", 0.125), draw.get("upper", 1 / 3))
    negative = draw.call(aten.le.Scalar, x, 0)
    noise = draw.call(aten.where.ScalarOther, negative, slope, 1)
    return draw.call(aten.mul.Tensor, x, noise), noise


def _normal_of(draw: _Draw) -> Node:
    """Mean or deviation, or both, are tensors."""
    mean, std = draw.get("mean", 0.0), draw.get("std", 1.0)
    if isinstance(std, Node):
        noise = draw.call(aten.mul.Tensor, draw.sample(randomness.seeded_normal), std)
    else:
        noise = draw.sample(randomness.seeded_normal, 0.0, std)
    return draw.call(aten.add.Tensor, noise, mean)


def _normal(draw: _Draw) -> Node:
    return draw.sample(randomness.seeded_normal, draw.get("mean", 0.0), draw.get("std", 1.0))


def _uniform(draw: _Draw) -> Node:
    return draw.sample(randomness.seeded_uniform, draw.get("from", 0.0), draw.get("to", 1.0))


def _randint(draw: _Draw) -> Node:
    return draw.sample(randomness.seeded_randint, draw.get("low", 0), draw["high"])


Result = Node | tuple[Node, ...]
_RULES: Mapping[Any, Callable[[_Draw], Result]] = {
    aten.bernoulli.default: lambda draw: _bernoulli(draw, draw["self"]),
    aten.bernoulli.p: lambda draw: _bernoulli(draw, draw["p"]),
    aten.bernoulli.Tensor: lambda draw: _bernoulli(draw, draw["p"]),
    aten.native_dropout.default: _native_dropout,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten.rand.default: lambda draw: draw.sample(randomness.seeded_uniform),
    aten.rand_like.default: lambda draw: draw.sample(randomness.seeded_uniform),
    aten.uniform.default: _uniform,
    aten.randn.default: lambda draw: draw.sample(randomness.seeded_normal),
    aten.randn_like.default: lambda draw: draw.sample(randomness.seeded_normal),
    aten.normal.float_float: _normal,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.exponential.default: lambda draw: draw.sample(randomness.seeded_exponential, draw.get("lambd", 1.0)),
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
    aten.random.to: lambda draw: draw.sample(randomness.seeded_randint, 0, draw["to"]),
}
"""What the pass knows; it looks at nothing else. Each rule makes the new nodes and answers the results."""


def _require_known(node: Node) -> None:
    """Refuse what has no rule, and a generator of the user's own, whose stream a cut program cannot follow.

    Raises CaptureError.
    """
    own = _arguments(node).get("generator")
    if node.target in _RULES and own is None:
        return
    fused = "dropout_p" in _arguments(node)
    do = "draw it outside of the model and pass it as a field of the batch, or use one stage"
    if fused:
        do = "attention with dropout must be written out: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    raise CaptureError(
        f"the random operation '{node.target}' cannot draw the same numbers however a program is cut",
        where=", ".join((*meta.place(node), f"node '{node.name}'")),
        expected=", ".join(sorted({str(known.overloadpacket) for known in _RULES})),
        got=str(node.target) if own is None else f"{node.target} with a generator of its own",
        do=do,
    )


def _replace(program: Program, old: Node, result: Result) -> None:
    """Put the results in the place of the old node, or of its parts; they take over the names."""
    if isinstance(result, Node):
        pairs = [(old, result)]
    else:
        items = [user for user in old.users if user.target is operator.getitem]
        pairs = [(item, result[item.args[1]]) for item in items]  # type: ignore[index]
    sources = old.all_input_nodes
    meta.inherit(result if isinstance(result, Node) else result[0], old)
    for gone, new in pairs:
        gone.replace_all_uses_with(new)
        program.graph.erase_node(gone)
        new.name = gone.name
    if not isinstance(result, Node):
        program.graph.erase_node(old)
    for source in sources:  # the empty tensor that was to be filled
        if source.op == "call_function" and not source.users and not has_effect(source):
            program.graph.erase_node(source)


def _lift(program: Program) -> None:
    sizes = {what.symbol: node for what, node in program.input_nodes() if isinstance(what, Size)}
    lift_sizes(program.graph, program.fake_mode, sizes)


def _input(program: Program, what: Role, value: object) -> Node:
    """The placeholder with this role, made behind the others if there is none."""
    if what in program.inputs:
        return program.input(what)
    before = program.placeholders
    graph = program.graph
    with graph.inserting_after(before[-1]) if before else graph.inserting_before(program.output_node):
        node = graph.placeholder(str(what).replace(" ", "_"))
    meta.set_value(node, value)
    program.set_signature((*program.inputs, what), program.outputs)
    return node


def _seed_value(program: Program) -> torch.Tensor:
    with program.fake_mode:
        return torch.empty((), dtype=torch.int64, device="cpu")


def _first_free_place(program: Program) -> int:
    used = [node.args[1] for node in program.calls() if getattr(node.target, "namespace", "") == "graphcomp"]
    return max((place for place in used if isinstance(place, int)), default=-1) + 1


def _arguments(node: Node) -> dict[str, Any]:
    """What a call is given, by the names in the operator's schema; defaults are left out."""
    names = argument_names(node.target) if isinstance(node.target, OpOverload) else []
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _first(node: Node) -> torch.Tensor:
    """The tensor a node computes, the first if several."""
    found = meta.value(node)
    first = found[0] if isinstance(found, tuple | list) else found
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"node '{node.name}' computes no tensor")
    return first


def _compared(dtype: torch.dtype) -> torch.dtype:
    """In what a uniform number is drawn that is compared with a probability: half precision is too coarse."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _symbol(found: Any, name: str) -> Any:
    return next(symbol for symbol in found.free_symbols if str(symbol) == name)
