"""Parts of a model under torch.compile: captured as what they wrap, and watched like that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.cases.tiny import relative, step_of

RATES = {"now": 2.0}


def scaled(x: Tensor) -> Tensor:
    return torch.tanh(x) * RATES["now"]


compiled = torch.compile(scaled, backend="eager")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return compiled(self.fc(x))


def loss_fn(y: Tensor, _: Tensor) -> Tensor:
    return y.square().mean()


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    loss_fn(model(batch), batch).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def test_modules_compiled_by_either_way() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(5, 4)
    expected = gradients(plain, batch)
    model = nn.Sequential(plain[0], torch.compile(plain[1], backend="eager"), plain[2])
    model[2].compile(backend="eager")
    ran = step_of(model, loss_fn, 2).run([batch])
    for (name, _), one in zip(model.named_parameters(), expected, strict=True):
        assert relative(ran.gradients[name], one) < 1e-6, name


def test_a_variable_of_a_compiled_function_is_watched() -> None:
    model, batch = Scaled(), torch.randn(5, 4)
    step = step_of(model, loss_fn)
    first = step.run([batch]).result.loss
    try:
        RATES["now"] = 4.0
        again = step.run([batch]).result.loss
    finally:
        RATES["now"] = 2.0
    assert step.compiler.traces == 2
    assert relative(again, 4 * first) < 1e-6
