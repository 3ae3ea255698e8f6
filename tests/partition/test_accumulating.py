"""Gradients added up inside the programs that compute them."""

from __future__ import annotations

import gc as garbage
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp import Plan, TokenLoss, backend
from graphcomp.ir import meta, verify
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.partition import partition
from graphcomp.partition.accumulating import accumulated, accumulating, in_place, written
from graphcomp.partition.stages import Partitioned
from graphcomp.testing import run_virtual
from tests.backend.test_inductor import Peak
from tests.partition.running import joint_of, square_loss

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


class Uses(nn.Module):
    """Gradients of several kinds: of a product, a sum, expanded, twice the same, and the one that arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())  # its strides are not those of its gradient
        self.one, self.other, self.scale = (nn.Parameter(torch.randn(n)) for n in (3, 3, 1))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.one + self.other) * self.scale


def cut_of(model: nn.Module, x: Tensor) -> Partitioned:
    return partition(joint_of(model, square_loss, (x,)), 1)


def fused_of(cut: Partitioned) -> Program:
    found = cut.stages[0].fused
    if found is None:
        raise LookupError("no fused program")
    return found


class TestText(TestCase):
    maxDiff = None

    def test_each_sum_stands_right_behind_its_gradient(self) -> None:
        cut = cut_of(nn.Linear(4, 2), torch.randn(3, 4))
        self.assertExpectedInline(
            str(accumulating(fused_of(cut), cut)),
            """\
stage program "stage 0 forward and backward"
  %weight: f32[2, 4] = param weight
  %bias: f32[2] = param bias
  %_0: f32[s0, 4] = batch [0]
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %acc_weight: f32[2, 4] = accumulator weight
  %acc_bias: f32[2] = accumulator bias
forward:
  %t: f32[4, 2] = t(%weight)                                                    # (root)
  %addmm: f32[s0, 2] = addmm(%bias, %_0, %t)                                    # (root)
loss:
  %pow_1: f32[s0, 2] = pow.Tensor_Scalar(%addmm, 2)                             # running.py:31
  %sum_1: f32[] = sum(%pow_1)                                                   # running.py:31
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
backward:
  %div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 2] = expand(%div_1, [%s0, 2])                                # running.py:31  of %sum_1
  %pow_2: f32[s0, 2] = pow.Tensor_Scalar(%addmm, 1.0)                           # running.py:31  of %pow_1
  %mul: f32[s0, 2] = mul.Scalar(%pow_2, 2.0)                                    # running.py:31  of %pow_1
  %mul_1: f32[s0, 2] = mul.Tensor(%expand, %mul)                                # running.py:31  of %pow_1
  %t_1: f32[2, s0] = t(%mul_1)                                                  # (root)  of %addmm
  %mm: f32[2, 4] = mm(%t_1, %_0)                                                # (root)  of %addmm
  %t_2: f32[4, 2] = t(%mm)                                                      # (root)  of %addmm
  %sum_2: f32[1, 2] = sum.dim_IntList(%mul_1, [0], True)                        # (root)  of %addmm
  %view: f32[2] = view(%sum_2, [2])                                             # (root)  of %addmm
  %add_tensor_1: f32[2] = add.Tensor(%acc_bias, %view)                          # (root)  of %addmm
  %t_3: f32[2, 4] = t(%t_2)                                                     # (root)  of %t
  %add_tensor: f32[2, 4] = add.Tensor(%acc_weight, %t_3)                        # (root)  of %t
return loss loss = %sum_1
return output output = %addmm
return grad weight = %add_tensor
return grad bias = %add_tensor_1
""",
        )

    def test_in_another_dtype(self) -> None:
        cut = cut_of(nn.Linear(4, 2, bias=False), torch.randn(3, 4))
        for dtype in (torch.float64, torch.bfloat16):
            program = accumulating(fused_of(cut), cut, dtype)
            verify.verify(program, made_by="accumulating")
        self.assertExpectedInline(
            str(in_place(program)),
            """\
stage program "stage 0 forward and backward"
  %weight: f32[2, 4] = param weight
  %_0: f32[s0, 4] = batch [0]
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %acc_weight: bf16[2, 4] = accumulator weight
forward:
  %t: f32[4, 2] = t(%weight)                                                    # (root)
  %mm: f32[s0, 2] = mm(%_0, %t)                                                 # (root)
loss:
  %pow_1: f32[s0, 2] = pow.Tensor_Scalar(%mm, 2)                                # running.py:31
  %sum_1: f32[] = sum(%pow_1)                                                   # running.py:31
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
backward:
  %div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 2] = expand(%div_1, [%s0, 2])                                # running.py:31  of %sum_1
  %pow_2: f32[s0, 2] = pow.Tensor_Scalar(%mm, 1.0)                              # running.py:31  of %pow_1
  %mul: f32[s0, 2] = mul.Scalar(%pow_2, 2.0)                                    # running.py:31  of %pow_1
  %mul_1: f32[s0, 2] = mul.Tensor(%expand, %mul)                                # running.py:31  of %pow_1
  %t_1: f32[2, s0] = t(%mul_1)                                                  # (root)  of %mm
  %mm_1: f32[2, 4] = mm(%t_1, %_0)                                              # (root)  of %mm
  %t_2: f32[4, 2] = t(%mm_1)                                                    # (root)  of %mm
  %t_3: f32[2, 4] = t(%t_2)                                                     # (root)  of %t
  %add_tensor: bf16[2, 4] = add_.Tensor(%acc_weight, %t_3)                      # (root)  of %t
return loss loss = %sum_1
return output output = %mm
return grad weight = %add_tensor
""",
        )


def given(program: Program, model: nn.Module, x: Tensor) -> tuple[list[Any], dict[str, Tensor]]:
    """Inputs in order, and the accumulators among them by name."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    box: list[Any] = []
    for what, node in program.input_nodes():
        match what:
            case role.Param(name):
                box.append(parameters[name])
            case role.BatchLeaf():
                box.append(x)
            case role.Size():
                box.append(x.shape[0])
            case role.Accumulator(name):
                form = meta.tensor(node)
                box.append(torch.full_like(parameters[name], 0.5, dtype=form.dtype if form is not None else None))
            case _:
                form = meta.tensor(node)
                box.append(torch.ones((), dtype=form.dtype if form is not None else None))
    kinds = program.inputs
    return box, {what.name: box[place] for place, what in enumerate(kinds) if isinstance(what, role.Accumulator)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_the_sum_is_in_the_accumulators_own_memory(name: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Uses(), torch.randn(5, 4)
    cut = cut_of(model, x)
    program = accumulating(fused_of(cut), cut, dtype)
    assert accumulated(fused_of(cut)) == ("weight", "one", "other", "scale")
    assert [(program.inputs[i], program.outputs[o]) for i, o in written(program)] == [
        (role.Accumulator(each), role.Grad(each)) for each in accumulated(fused_of(cut))
    ]
    call = backend.get(name).compile(program).call
    box, accumulators = given(program, model, x)
    before = {each: (acc.data_ptr(), acc.stride()) for each, acc in accumulators.items()}
    for _ in range(2):
        call(list(box))
    model(x).square().sum().backward()
    for each, acc in accumulators.items():
        gradient = model.get_parameter(each).grad
        expected = torch.full_like(gradient, 0.5, dtype=acc.dtype)
        for _ in range(2):
            expected += gradient
        assert (acc.data_ptr(), acc.stride()) == before[each] == (acc.data_ptr(), model.get_parameter(each).stride())
        tolerance = {"rtol": 0.0, "atol": 0.0} if name == "eager" else {"rtol": 1e-2, "atol": 1e-2}
        if name != "eager" and dtype is not torch.bfloat16:
            tolerance = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(acc, expected, **tolerance)


def expanded() -> Tensor:
    return torch.randn(1, 4).expand(4, 4)


def with_gaps() -> Tensor:
    return torch.randn(8, 6)[::2, 1:5]


def of_complex_numbers() -> Tensor:
    return torch.randn(4, 4, dtype=torch.complex64)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("made", [expanded, with_gaps, of_complex_numbers])
def test_sums_for_parameters_of_every_form(made: Callable[[], Tensor], dtype: torch.dtype | None) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.last = nn.Parameter(made()), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight
            return self.last(x @ (weight.real * weight.imag if weight.is_complex() else weight))

    torch.manual_seed(0)
    model, batches = Product(), [torch.randn(rows, 4) for rows in (3, 5, 2)]
    plan = Plan(stages=2, backend="eager", accumulate_dtype=dtype, quiet=True)
    _, gradients = run_virtual(
        model, lambda output, x: TokenLoss(output.square().sum(), x.shape[0]), batches, plan=plan
    )
    rows = sum(len(x) for x in batches)
    torch.stack([model(x).square().sum() / rows for x in batches]).sum().backward()
    found, expected = gradients["weight"], model.weight.grad
    assert found is not None and expected is not None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    assert found.dtype == (expected.dtype if dtype is None else wide)
    torch.testing.assert_close(found.to(expected.dtype), expected)


def test_a_gradient_is_gone_once_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of layers at most two gradients exist at once: the one at hand, and none of those before."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    cut = cut_of(model, torch.randn(3, 8))
    program = accumulating(fused_of(cut), cut)
    alive: list[weakref.ref[Tensor]] = []
    most = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default and result.shape == (8, 8):
                alive.append(weakref.ref(result))
                most[0] = max(most[0], sum(one() is not None for one in alive))
            return result

    call = backend.get("eager").compile(program).call
    box, _ = given(program, model, torch.randn(3, 8))
    garbage.collect()
    with Watch():
        call(box)
    assert len(alive) == 6
    assert most[0] == 1


@pytest.mark.inductor
def test_compiled_there_is_no_second_set_of_gradients() -> None:
    """Twelve layers; beside the sums at most a few gradients at once."""
    width, layers = 64, 12
    model, x = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))), torch.randn(2, width)
    cut = cut_of(model, x)
    program = accumulating(fused_of(cut), cut)
    call = backend.get("inductor").compile(program).call
    call(given(program, model, x)[0])
    box, peak = given(program, model, x)[0], Peak()
    with torch.profiler.profile(profile_memory=True) as profile:
        call(box)
    for event in profile.profiler.kineto_results.events():
        peak.see(event)
    assert 0 < peak.most < 4 * width * width * 4
