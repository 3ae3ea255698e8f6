"""What user code reads by name is followed: methods, class attributes, inner functions, objects, Python modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp import Plan, compile_train_step
from graphcomp.capture.guards import ModelGuard

SCALE = 2.0


class Scaled(nn.Module):
    """How the scale is read differs from subclass to subclass."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).view(3, 3) / 9)

    def scale(self) -> float:
        return SCALE

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale()


class ByClass(Scaled):
    def scale(self) -> float:
        return self.factor


class ByProperty(Scaled):
    @property
    def amount(self) -> float:
        return SCALE

    def scale(self) -> float:
        return self.amount


class ByStatic(Scaled):
    @staticmethod
    def scale() -> float:
        return SCALE


class ByInnerFunction(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return sum([x @ self.weight * SCALE for _ in range(2)], torch.zeros(()))


class BySuper(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Trainer:
    def __init__(self) -> None:
        self.alpha, self.weight, self.unread = 1.0, torch.tensor(1.0), 0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return self.weighted(output.pow(2).mean())

    def weighted(self, value: Tensor) -> Tensor:
        return value * self.alpha * self.weight

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        return self.loss(output, batch)


def square(output: Tensor, batch: Any) -> Tensor:
    return output.pow(2).mean()


def assert_followed(model: nn.Module, loss: Callable[..., Any], change: Callable[[], Any]) -> int:
    """The loss of a step is eager's before and after a change that matters; returns the captures made."""
    step, x = compile_train_step(model, loss, plan=Plan(backend="eager", quiet=True)), torch.randn(4, 3)
    seen = []
    for _ in range(2):
        expected = float(loss(model(x), x).detach())
        assert float(step([x]).loss) == pytest.approx(expected)
        seen.append(expected)
        if len(seen) == 1:
            change()
    assert seen[0] != seen[1]
    return step.stats.traces


@pytest.mark.parametrize("kind", [Scaled, ByProperty, ByStatic, ByInnerFunction, BySuper])
def test_globals_of_methods_and_inner_functions(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_followed(kind(), square, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0))


def test_class_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByClass()
    before = ModelGuard(model, square).key()
    assert_followed(model, square, lambda: monkeypatch.setattr(Scaled, "factor", 5.0))
    found = ModelGuard.difference(before, ModelGuard(model, square).key())
    assert found == ["class attribute 'factor' of Scaled was 2.0 and is 5.0"]


@pytest.mark.parametrize("bound", [True, False])
def test_the_object_behind_a_loss(bound: bool) -> None:
    trainer = Trainer()
    loss = trainer.loss if bound else trainer
    assert assert_followed(Scaled(), loss, lambda: setattr(trainer, "alpha", 3.0)) == 2
    assert assert_followed(Scaled(), loss, lambda: trainer.weight.fill_(3.0)) == 1


class Criterion(nn.Module):
    """A loss that a module or a class computes."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.pow(2).mean() * self.alpha

    @classmethod
    def of_class(cls, output: Tensor, batch: Any) -> Tensor:
        return output.pow(2).mean() * cls.rate


def test_the_module_and_the_class_behind_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    criterion = Criterion()
    assert assert_followed(Scaled(), criterion.loss, lambda: setattr(criterion, "alpha", 3.0)) == 2
    assert assert_followed(Scaled(), Criterion.of_class, lambda: monkeypatch.setattr(Criterion, "rate", 3.0)) == 2


class ByCached(Scaled):
    @functools.cached_property
    def kind(self) -> float:
        return SCALE

    def scale(self) -> float:
        return self.kind * SCALE


def test_what_a_cached_property_uses_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_followed(ByCached(), square, lambda: monkeypatch.setitem(globals(), "SCALE", 7.0))


def test_attributes_that_no_code_names_change_nothing() -> None:
    trainer = Trainer()
    guard = ModelGuard(Scaled(), trainer.loss)
    before = guard.key()
    trainer.unread = 1
    assert guard.key() == before


def test_a_criterion_and_a_teacher_in_a_closure() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    teacher = nn.Linear(3, 3).requires_grad_(False)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return criterion(output, torch.tensor([0, 1, 2, 0])) + F.mse_loss(output, teacher(batch))

    assert assert_followed(Scaled(), loss, lambda: criterion.weight[0].fill_(5.0)) == 1
    assert assert_followed(Scaled(), loss, lambda: teacher.weight.add_(1.0)) == 1
    assert assert_followed(Scaled(), loss, lambda: setattr(criterion, "label_smoothing", 0.5)) == 2


class Settings:
    """What a project keeps beside its models: a class that is read as it is, or its instance."""

    rate = 2.0

    def __init__(self) -> None:
        self.own, self.tensor = 2.0, torch.tensor(2.0)
        self.inner = SimpleNamespace(rate=2.0)
        self.unread = 0


SETTINGS = Settings()
PYTHON_MODULE = ModuleType("settings_of_this_test")
PYTHON_MODULE.rate = 2.0  # type: ignore[attr-defined]
PYTHON_MODULE.twice = lambda: 2 * SCALE  # type: ignore[attr-defined]
PYTHON_MODULE.inner = INNER = ModuleType("more_settings_of_this_test")  # type: ignore[attr-defined]
INNER.rate, INNER.unread = 2.0, 0  # type: ignore[attr-defined]


class Reads(Scaled):
    """How the scale is read is given as a function of the module."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = read
        self.settings, self.parts = Settings(), {"list": [Settings()]}

    def scale(self) -> float:
        return self.read(self)


@pytest.mark.parametrize(
    ("read", "change", "traces"),
    [
        (lambda model: Settings.rate, lambda model: (Settings, "rate"), 2),
        (lambda model: SETTINGS.rate, lambda model: (SETTINGS, "rate"), 2),  # hides that of the class
        (lambda model: SETTINGS.own, lambda model: (SETTINGS, "own"), 2),
        (lambda model: SETTINGS.inner.rate, lambda model: (SETTINGS.inner, "rate"), 2),
        (lambda model: SETTINGS.tensor, lambda model: (SETTINGS, "tensor"), 1),
        (lambda model: PYTHON_MODULE.rate, lambda model: (PYTHON_MODULE, "rate"), 2),
        (lambda model: PYTHON_MODULE.twice(), lambda model: (PYTHON_MODULE, "twice"), 2),
        (lambda model: PYTHON_MODULE.inner.rate, lambda model: (INNER, "rate"), 2),
        (lambda model: model.settings.own, lambda model: (model.settings, "own"), 2),
        (lambda model: model.settings.inner.rate, lambda model: (model.settings.inner, "rate"), 2),
        (lambda model: model.settings.tensor, lambda model: (model.settings, "tensor"), 1),
        (lambda model: model.parts["list"][0].own, lambda model: (model.parts["list"][0], "own"), 2),
    ],
)
def test_what_objects_and_python_modules_hold(
    read: Callable[[Any], Any],
    change: Callable[[Any], tuple[Any, str]],
    traces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Reads(read)
    owner, name = change(model)
    value: Any = {"tensor": torch.tensor(5.0), "twice": lambda: 5.0}.get(name, 5.0)
    made = assert_followed(model, square, lambda: monkeypatch.setattr(owner, name, value))
    assert made == traces


@pytest.mark.parametrize(
    ("read", "owner"), [(lambda model: SETTINGS.own, SETTINGS), (lambda model: PYTHON_MODULE.inner.rate, INNER)]
)
def test_what_no_code_names_in_a_global_object_changes_nothing(
    read: Callable[[Any], Any], owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = ModelGuard(Reads(read), square)
    before = guard.key()
    monkeypatch.setattr(owner, "unread", 1)
    assert guard.key() == before
