"""Hooks: what they return is part of the program, and what would happen once only is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, compile_train_step, testing
from graphcomp.capture import capture
from graphcomp.errors import StateError
from graphcomp.ir import meta
from tests.capture.models import Everything, Net, batch, loss_fn
from tests.capture.test_refuse import Code, refused

Register = Callable[[nn.Module], Any]


class Chain(nn.Module):
    """code: what is done with the hidden values."""

    def __init__(self, code: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.code(self.b(self.a(x).relu())))


def square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def eager_plan(stages: int = 1) -> Plan:
    return Plan(stages=stages, backend="eager", quiet=True)


def compare(model: nn.Module, stages: int) -> None:
    testing.check_parity(model, square, [(torch.randn(rows, 4),) for rows in (3, 5)], plan=eager_plan(stages))


def test_doubled_output_and_tripled_gradient() -> None:
    model = nn.Linear(3, 1)
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    model.weight.register_hook(lambda gradient: gradient * 3)
    step = compile_train_step(model, lambda output, x: output.sum(), plan=eager_plan())
    step([torch.ones(1, 3)])
    assert model.weight.grad.tolist() == [[6.0, 6.0, 6.0]]
    assert model.bias.grad.tolist() == [2.0]
    step([torch.ones(1, 3), torch.ones(1, 3)])  # each microbatch weighs half, and is tripled by itself
    assert model.weight.grad.tolist() == [[12.0, 12.0, 12.0]]


REGISTER: list[Register] = [
    lambda m: m.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
    lambda m: m.b.register_forward_hook(lambda module, inputs, output: output.sin()),
    lambda m: m.b.register_forward_hook(lambda module, inputs, kwargs, output: output * 2, with_kwargs=True),
    lambda m: m.b.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,)),
    lambda m: m.b.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * outputs[0].sum(),)),
    lambda m: m.b.register_backward_hook(lambda module, inputs, outputs: (inputs[0], inputs[1] * 3, inputs[2])),
    lambda m: m.b.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
    lambda m: [m.b.bias.register_hook(lambda g: g + 1), m.b.bias.register_hook(lambda g: g * g)],
    lambda m: [m.b.weight.register_hook(lambda g: g * 3), m.b.weight.requires_grad_(False)],
    lambda m: m.register_state_dict_post_hook(lambda *arguments: None),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("register", REGISTER, ids=range(len(REGISTER)))
def test_hooks_of_modules_and_parameters(register: Register, stages: int) -> None:
    model = Chain()
    register(model)
    before = [dict(table) for module in model.modules() for table in (module._backward_hooks, module._forward_hooks)]
    compare(model, stages)
    assert before == [table for module in model.modules() for table in (module._backward_hooks, module._forward_hooks)]


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def code(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return code


def with_the_sum(h: Tensor) -> Tensor:
    """A hook that adds a forward value, which looks like what autograd adds up."""
    if h.requires_grad:
        kept = h.detach()
        h.register_hook(lambda gradient: gradient + kept)
    return h


def by_its_function(h: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: tuple(g * 3 for g in gradients))
    return h


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("code", [hooked(lambda g: g * 3), hooked(torch.sin), with_the_sum, by_its_function])
def test_hooks_of_tensors_in_forward(code: Callable[[Tensor], Tensor], stages: int) -> None:
    register = torch.Tensor.register_hook
    compare(Chain(code), stages)
    assert torch.Tensor.register_hook is register


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_hook_of_a_tied_parameter_sees_the_sum(stages: int) -> None:
    model = Chain()
    model.c.weight = model.a.weight
    model.a.weight.register_hook(lambda gradient: gradient * gradient)
    compare(model, stages)


def test_hooks_of_all_modules() -> None:
    every = nn.modules.module
    handles = [
        every.register_module_forward_hook(lambda module, inputs, output: output * 2),
        every.register_module_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 3,) if inputs[0] is not None else inputs
        ),
    ]
    try:
        compare(Chain(), 2)
    finally:
        for handle in handles:
            handle.remove()


def test_nodes_of_a_hook_are_no_gradient_sums_and_know_their_line() -> None:
    def hook(gradient: Tensor) -> Tensor:
        return gradient + gradient

    model = Chain()
    model.a.weight.register_hook(hook)
    program = capture(model, square, (torch.randn(3, 4),)).program
    line = f"test_hooks.py:{hook.__code__.co_firstlineno + 1}"
    (node,) = [node for node in program.calls() if (meta.note(node).source or "").endswith(line)]
    assert not meta.note(node).gradient_sum


LOOKS: list[tuple[Register, str]] = [
    (lambda m: m.b.weight.register_hook(lambda gradient: None), "where: parameter 'b.weight'"),
    (lambda m: m.b.register_full_backward_hook(lambda module, inputs, outputs: None), "where: module 'b'"),
    (lambda m: m.b.register_full_backward_pre_hook(lambda module, outputs: None), "where: module 'b'"),
    (lambda m: setattr(m, "code", hooked(print)), "where: a tensor in forward, "),
]


@pytest.mark.parametrize(("register", "where"), LOOKS, ids=range(len(LOOKS)))
def test_a_gradient_hook_that_only_looks(register: Register, where: str) -> None:
    model = Chain()
    register(model)
    with refused(StateError, model, "returns nothing", where, "got: None", "what to do: return the gradient"):
        capture(model, square, (torch.ones(3, 4),))


def several(model: Any, h: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook((h,), lambda gradients: None)
    return h


def behind_backward(model: Any, h: Tensor) -> Tensor:
    model.hidden.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return h


@pytest.mark.parametrize(("code", "what"), [(several, "returns nothing"), (behind_backward, "was added to .grad")])
def test_hooks_that_forward_registers(code: Callable[[Any, Tensor], Tensor], what: str) -> None:
    model = Code(code)
    with refused(StateError, model, what, f"test_hooks.py:{code.__code__.co_firstlineno + 1}"):
        capture(model, loss_fn, batch())


def test_hooks_behind_the_accumulation() -> None:
    model = Net()
    model.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with refused(StateError, model, "was added to .grad", "where: parameter 'head.bias' of Net", "after the step"):
        capture(model, loss_fn, batch())


def test_hooks_that_come_and_change_are_followed() -> None:
    model, scale = Chain(), 2.0

    def scaled(gradient: Tensor) -> Tensor:
        return gradient * scale

    step = compile_train_step(model, square, plan=eager_plan())
    x = (torch.randn(3, 4),)

    def gradient() -> Tensor:
        model.zero_grad()
        step([x])
        return model.b.weight.grad.clone()

    plain = gradient()
    handle = model.b.weight.register_hook(scaled)
    assert torch.equal(gradient(), plain * 2)
    scale = 5.0
    assert torch.equal(gradient(), plain * 5)
    other = model.b.weight.register_hook(lambda gradient: gradient * 4)
    assert torch.equal(gradient(), plain * 20)
    handle.remove()
    assert torch.equal(gradient(), plain * 4)
    other.remove()
    assert torch.equal(gradient(), plain)


def test_a_hook_in_the_place_of_one_that_was_removed_is_noticed() -> None:
    model = nn.Linear(3, 1)
    model.weight.register_hook(lambda gradient: gradient * 7).remove()
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None).remove()
    step = compile_train_step(model, lambda output, x: output.sum(), plan=eager_plan())
    step([torch.ones(1, 3)])
    model.weight.register_hook(lambda gradient: gradient * 3)
    step([torch.ones(1, 3)])
    assert model.weight.grad.tolist() == [[4.0, 4.0, 4.0]]
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(StateError, match="each time a gradient was added"):
        step([torch.ones(1, 3)])


def test_a_model_with_hooks_is_left_as_it_was() -> None:
    model = Chain()
    for register in (*REGISTER[:5], *REGISTER[6:8]):
        register(model)
    before = Everything(model)
    capture(model, square, (torch.ones(3, 4),))
    before.check()
