"""Random operations as functions of the seed: text, meaning, backends, what is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp.backend.inductor import InductorBackend
from graphcomp.capture.capture import capture
from graphcomp.compat.estimates import hint
from graphcomp.errors import CaptureError, PlanError
from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.randomness import draws, seeded_uniform
from graphcomp.passes.functionalize import Functionalize
from graphcomp.passes.manager import PassManager
from graphcomp.passes.pipeline import parse_pipeline
from graphcomp.passes.seeded_random import SeededRandom
from tests.ir.build import Builder, aten
from tests.ir.test_randomness import Operations
from tests.passes import running

ROWS = 6


class Model(nn.Module):
    """function(x @ w) for a function that draws."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.w)


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def square_sum(output: Tensor, batch: Tensor) -> Tensor:
    return (output * output).sum()


def seeded(
    function: Callable[[Tensor], Tensor],
) -> tuple[Program, Callable[..., dict[role.Role, Any]]]:
    """The rewritten program of a model, and a function of (seed, rows) that gives its inputs."""
    model = Model(function)
    joint = capture(model, square_sum, batch())
    program = PassManager([Functionalize(), SeededRandom()]).run(joint.program)

    def inputs(seed: int, rows: int = ROWS) -> dict[role.Role, Any]:
        given = running.inputs(joint, model, batch(rows))
        given[role.Denominator("loss")] = torch.ones((), dtype=torch.int64)
        given[role.Seed()] = torch.tensor(seed)
        return given

    return program, inputs


def layout(tensor: Tensor) -> list[tuple[int, int]]:
    """Size and stride of every dimension that has more than one element."""
    numbers = [(hint(size), hint(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [pair for pair in numbers if pair[0] > 1]


def output(program: Program, given: dict[role.Role, Any]) -> Tensor:
    found = interp.run(program, given)[role.Output("output")]
    assert isinstance(found, Tensor)
    return found


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h * 2, 0.3, inplace=True),
    "dropout2d": lambda h: F.dropout2d(h.view(-1, 2, 2, 2), 0.3),
    "dropout of a transposed tensor": lambda h: F.dropout(h.t(), 0.3),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "native_dropout": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(1, 1, -1, 8)] * 3, dropout_p=0.2),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rand": lambda h: h * torch.rand(h.shape, dtype=h.dtype),
    "rand_like": lambda h: h * torch.rand_like(h),
    "rand_like of a transposed tensor": lambda h: h.t() * torch.rand_like(h.t()),
    "randn": lambda h: h + torch.randn(h.shape[0], 8, dtype=h.dtype),
    "randn_like": lambda h: h + torch.randn_like(h),
    "randn of a product of sizes": lambda h: h.flatten() + torch.randn(h.numel(), dtype=h.dtype),
    "randint": lambda h: h * torch.randint(-3, 9, h.shape),
    "randint_like": lambda h: h * torch.randint_like(h, 2, 5),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(torch.sigmoid(h.detach())),
    "uniform_": lambda h: h + torch.empty_like(h).uniform_(-1, 2),
    "normal_": lambda h: h + torch.empty_like(h).normal_(1, 2),
    "normal of tensors": lambda h: h + torch.normal(h.detach(), h.detach().abs()),
    "normal of a tensor and a number": lambda h: h + torch.normal(h.detach(), 2.0),
    "exponential_": lambda h: h + torch.empty_like(h).exponential_(2.0),
}


@pytest.mark.parametrize("name", DRAWING)
class TestEveryKnownOperation:
    def test_only_the_seed_decides(self, name: str) -> None:
        program, inputs = seeded(DRAWING[name])
        assert not any(map(draws, program.calls()))
        for rows in (ROWS, 9):
            first = interp.run(program, inputs(3, rows))
            torch.manual_seed(rows)
            for what, value in interp.run(program, inputs(3, rows)).items():
                assert torch.equal(value, first[what]), what
            assert not torch.equal(output(program, inputs(4, rows)), first[role.Output("output")])

    def test_values_on_the_nodes_are_those_computed(self, name: str) -> None:
        program, inputs = seeded(DRAWING[name])
        for node, value in interp.trace_values(program, inputs(3)):
            known = meta.tensor(node)
            if known is not None:
                assert (known.dtype, known.device) == (value.dtype, value.device), node


def test_the_gradient_uses_the_mask_of_the_forward() -> None:
    """h = x w m with mask m (0 or 1/(1-p)); loss = sum(h^2): the gradient is x^T (2 h m)."""
    for function in (DRAWING["dropout"], DRAWING["native_dropout"]):
        program, inputs = seeded(function)
        given = inputs(5)
        found = interp.run(program, given)
        x, w = batch(), given[role.Param("w")]
        mask = (seeded_uniform(torch.tensor(5), 0, [ROWS, 8], torch.float64, x.device) < 0.7).double() / 0.7
        h = (x @ w) * mask
        torch.testing.assert_close(found[role.Output("output")], h, rtol=1e-14, atol=0)
        torch.testing.assert_close(found[role.Grad("w")], x.t() @ (2 * h * mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0)])
def test_dropout_keeps_the_share_it_should(p: float, kept: float) -> None:
    program, inputs = seeded(lambda h: torch.native_dropout(h, p, True)[0])
    found = output(program, inputs(3, 4000))
    share = (found != 0).double().mean().item()
    assert abs(share - kept) <= 5 * (kept * (1 - kept) / found.numel()) ** 0.5
    whole = batch(4000) @ inputs(3)[role.Param("w")]
    expected = torch.where(found != 0, whole * (1 / (1 - p) if p < 1 else 0.0), 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_every_node_has_a_place_of_its_own() -> None:
    program, inputs = seeded(lambda h: F.dropout(h * 0 + 1, 0.5) - F.dropout(h * 0 + 1, 0.5))
    places = [node.args[1] for node in program.calls() if node.target is seeded_uniform]
    assert places == [0, 1]
    assert output(program, inputs(3)).abs().max() == 2


def test_a_program_without_random_nodes_stays() -> None:
    program, _ = seeded(lambda h: h.relu())
    assert role.Seed() not in program.inputs


def test_attention_without_dropout_stays() -> None:
    b = Builder(example=(6, 8))
    x = b.input(role.BatchLeaf("x"), b.leaf, "x")
    four = b.call(aten.view.default, x, [1, 1, 6, 8])
    fused = b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, four, four, four)
    total = b.call(aten.sum.default, b.call(operator.getitem, fused, 0))
    program = SeededRandom().apply(b.program({role.Loss("loss"): total}))
    assert fused in program.calls()
    assert role.Seed() not in program.inputs


def test_no_tensor_is_read_on_the_host() -> None:
    program, inputs = seeded(DRAWING["dropout"])
    given = inputs(3)
    with Operations() as operations:
        interp.run(program, given)
    assert operations.count["aten._local_scalar_dense.default"] == 0
    assert operations.count["graphcomp.seeded_uniform.default"] == 1


@pytest.mark.inductor
@pytest.mark.parametrize(
    "name", ["dropout", "native_dropout", "attention", "rand_like of a transposed tensor", "randn"]
)
def test_compiled_masks_equal_the_interpreted_ones(name: str) -> None:
    """With h = 1 the output is the draw alone, so that no rounding comes in; one compile serves all sizes."""
    program, inputs = seeded(lambda h: DRAWING[name](h * 0 + 1))
    compiled = InductorBackend().compile(program)
    place = program.outputs.index(role.Output("output"))
    for rows in (ROWS, 9):
        given = inputs(3, rows)
        found = compiled(interp.ordered(program, given))[place]
        if name == "attention":
            torch.testing.assert_close(found, output(program, given), rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(found, output(program, given))


class TestText(TestCase):
    maxDiff = None

    def test_before_and_after(self) -> None:
        b = Builder(example=(6, 8))
        x = b.input(role.BatchLeaf("x"), b.leaf, "x")
        b.note = Note(Phase.FORWARD, "d", "m.py:4")
        empty = b.call(aten.empty_like.default, x)
        mask = b.call(aten.bernoulli.p, empty, 0.7)
        b.note = Note(Phase.FORWARD, "d", None, operation=0)
        pair = b.call(aten.native_dropout.default, x, 0.5, True)
        dropped, kept = (b.call(operator.getitem, pair, i) for i in range(2))
        b.note = Note(Phase.LOSS, None, "train.py:9", operation=1)
        total = b.call(aten.sum.default, b.call(aten.mul.Tensor, dropped, mask))
        b.note = Note(Phase.BACKWARD, "d", None, operation=0)
        grad = b.call(aten.native_dropout_backward.default, mask, kept, 2.0)
        program = b.program({role.Loss("loss"): total, role.Metric("grad"): b.call(aten.sum.default, grad)})
        self.assertExpectedInline(
            print_program(program),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
forward:
  %empty_like: f32[s0, s1] = empty_like(%x)                                     # d  m.py:4
  %bernoulli: f32[s0, s1] = bernoulli.p(%empty_like, 0.7)                       # d  m.py:4
  %native_dropout: (f32[s0, s1], bool[s0, s1]) = native_dropout(%x, 0.5, True)  # d
  %getitem: f32[s0, s1] = %native_dropout[0]                                    # d
  %getitem_1: bool[s0, s1] = %native_dropout[1]                                 # d
loss:
  %mul: f32[s0, s1] = mul.Tensor(%getitem, %bernoulli)                          # train.py:9
  %sum_1: f32[] = sum(%mul)                                                     # train.py:9
backward:
  %native_dropout_backward: f32[s0, s1] = native_dropout_backward(%bernoulli, %getitem_1, 2.0)  # d  of %native_dropout
  %sum_2: f32[] = sum(%native_dropout_backward)                                 # d  of %native_dropout
return loss loss = %sum_1
return metric grad = %sum_2
""",
        )
        self.assertExpectedInline(
            print_program(SeededRandom().apply(program)),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %seed: i64[] = seed
  %s0: int = size s0
  %s1: int = size s1
forward:
  %bernoulli_uniform: f32[s0, s1] = graphcomp.seeded_uniform(%seed, 0, [%s0, %s1], f32, cpu)  # d  m.py:4
  %bernoulli_lt: bool[s0, s1] = lt.Scalar(%bernoulli_uniform, 0.7)              # d  m.py:4
  %bernoulli: f32[s0, s1] = _to_copy(%bernoulli_lt, dtype=f32)                  # d  m.py:4
  %native_dropout_uniform: f32[s0, s1] = graphcomp.seeded_uniform(%seed, 1, [%s0, %s1], f32, cpu)  # d
  %getitem_1: bool[s0, s1] = lt.Scalar(%native_dropout_uniform, 0.5)            # d
  %native_dropout_mul: f32[s0, s1] = mul.Tensor(%x, %getitem_1)                 # d
  %getitem: f32[s0, s1] = mul.Tensor(%native_dropout_mul, 2.0)                  # d
loss:
  %mul: f32[s0, s1] = mul.Tensor(%getitem, %bernoulli)                          # train.py:9
  %sum_1: f32[] = sum(%mul)                                                     # train.py:9
backward:
  %native_dropout_backward: f32[s0, s1] = native_dropout_backward(%bernoulli, %getitem_1, 2.0)  # d  of %getitem
  %sum_2: f32[] = sum(%native_dropout_backward)                                 # d  of %getitem
return loss loss = %sum_1
return metric grad = %sum_2
""",
        )


class TestRefusals(TestCase):
    maxDiff = None

    def message(self, target: Any, *arguments: Any, **options: Any) -> str:
        b = Builder(example=(6, 8))
        x = b.input(role.BatchLeaf("x"), b.leaf, "x")
        node = b.graph.create_node("call_function", target, (x, *arguments), options, "drawn")
        meta.annotate(node, Note(Phase.FORWARD, "layers.0", "model.py:4"))
        with pytest.raises(CaptureError) as caught:
            SeededRandom().apply(b.program({role.Output("x"): node}))
        return str(caught.value)

    def test_unknown_operation(self) -> None:
        text = self.message(aten.multinomial.default, 1)
        self.assertExpectedInline(
            text.replace(", aten", ",\n    aten"),
            """\
the random operation 'aten.multinomial.default' cannot draw the same numbers however a program is cut
  where: module 'layers.0', model.py:4, node 'drawn'
  expected: aten.bernoulli,
    aten.exponential,
    aten.native_dropout,
    aten.normal,
    aten.normal_functional,
    aten.rand,
    aten.rand_like,
    aten.randint,
    aten.randint_like,
    aten.randn,
    aten.randn_like,
    aten.random,
    aten.rrelu_with_noise_functional,
    aten.uniform
  got: aten.multinomial.default
  what to do: draw it outside of the model and pass it as a field of the batch, or use one stage
  (see docs/errors.md#captureerror)""",
        )

    def test_generator_of_the_users_own(self) -> None:
        text = self.message(aten.bernoulli.p, 0.5, generator=torch.Generator())
        assert "with a generator of its own" in text

    def test_fused_attention_with_dropout(self) -> None:
        text = self.message(aten._scaled_dot_product_flash_attention.default, dropout_p=0.1)
        assert "sdpa_kernel(SDPBackend.MATH)" in text

    def test_random_node_in_backward(self) -> None:
        b = Builder(example=(6, 8))
        x = b.input(role.BatchLeaf("x"), b.leaf, "x")
        b.note = Note(Phase.BACKWARD, "drop", "model.py:4")
        mask = b.call(aten.bernoulli.p, x, 0.5)
        program = b.program({role.Metric("m"): b.call(aten.sum.default, mask)})
        with pytest.raises(CaptureError, match="draws random numbers in its backward"):
            SeededRandom().apply(program)


def test_in_a_pipeline() -> None:
    passes = parse_pipeline("functionalize,seeded_random,decompose")
    assert str(PassManager(passes)) == "functionalize,seeded_random,decompose{table=inductor}"
    with pytest.raises(PlanError):
        PassManager([SeededRandom()])
    with pytest.raises(PlanError):
        PassManager(parse_pipeline("functionalize,decompose,seeded_random"))
