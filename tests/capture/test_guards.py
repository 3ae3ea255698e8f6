"""Guards: the key changes exactly when a program may not be used again, and the change is said in words."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp.capture.guards import ModelGuard, read_captured
from graphcomp.capture.state import Captured
from graphcomp.errors import GuardError
from tests.capture.models import Net, loss_fn


class Kind(enum.Enum):
    SOFT = 1
    HARD = 2


class Other(nn.Dropout):
    """Another class with the same attributes."""


class Config:
    def __init__(self) -> None:
        self.width, self.names, self.kind = 8, ["a", "b"], Kind.SOFT


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.kind = Kind.SOFT
        self.taps = [1, 2]
        self.table = {"depth": 3, "nested": {"rate": 0.1}}
        self.dtype = torch.float32
        self.activation = torch.relu
        self.register_buffer("ramp", torch.arange(4.0))


def change(model: nn.Module, how: Callable[[Any], Any], loss: Any = loss_fn) -> list[str]:
    """What the guard says about a change; it must notice both a change and its absence."""
    guard = ModelGuard(model, loss)
    before = guard.key()
    assert guard.key() is before
    how(model)
    after = guard.key()
    found = ModelGuard.difference(before, after)
    assert (after == before) == (not found)
    assert after == ModelGuard(model, loss).key()
    return found


def put(path: str, value: Any) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return apply


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (put("scale", 4.0), "'scale' of the model was 2.0 and is 4.0"),
        (put("scale", 2), "'scale' of the model was 2.0 and is 2"),
        (put("scale", "2.0"), "'scale' of the model was 2.0 and is '2.0'"),
        (put("drop.p", 0.1), "'p' of module 'drop' was 0.5 and is 0.1"),
        (put("kind", Kind.HARD), "'kind' of the model was Kind.SOFT and is Kind.HARD"),
        (put("dtype", torch.float64), "'dtype' of the model was torch.float32 and is torch.float64"),
        (put("extra", 1), "'extra' of the model is new"),
        (lambda m: delattr(m, "scale"), "'scale' of the model is gone"),
        (lambda m: m.taps.append(3), "'taps' of the model was [1, 2] and is [1, 2, 3]"),
        (lambda m: m.taps.__setitem__(0, 5), "'taps' of the model was [1, 2] and is [5, 2]"),
        (lambda m: m.table.update(depth=4), "'table['depth']' of the model was 3 and is 4"),
        (
            lambda m: m.table["nested"].update(rate=0.2),
            "'table['nested']['rate']' of the model was 0.1 and is 0.2",
        ),
        (put("config.width", 16), "'config.width' of the model was 8 and is 16"),
        (put("config.depth", 16), "'config.depth' of the model is new"),
        (lambda m: m.config.names.pop(), "'config.names' of the model was ['a', 'b'] and is ['a']"),
        (put("drop.training", False), "module 'drop' was in training mode and is in evaluation mode"),
        (lambda m: m.eval(), "the model was in training mode and is in evaluation mode (likewise 4 more)"),
        (
            lambda m: m.hidden.weight.requires_grad_(False),
            "parameter 'hidden.weight' required a gradient and does not any more",
        ),
        (
            lambda m: setattr(m.hidden.weight, "data", torch.zeros(8, 8, dtype=torch.float64)),
            "parameter 'hidden.weight' had dtype torch.float32 and has torch.float64",
        ),
        (
            lambda m: setattr(m.embed.weight, "data", torch.zeros(20, 8)),
            "parameter 'embed.weight' had shape (16, 8) and has (20, 8)",
        ),
        (
            lambda m: setattr(m.hidden.weight, "data", m.hidden.weight.data.t().clone()),
            "parameter 'hidden.weight' had stride (8, 1) and has (1, 8)",
        ),
        (
            lambda m: setattr(m.head, "weight", m.embed.weight),
            "parameter 'head.weight' was not tied and is tied to 'embed.weight'",
        ),
        (
            lambda m: m.hidden.weight.register_hook(lambda g: g),
            "parameter 'hidden.weight' has a new gradient hook",
        ),
        (lambda m: m.register_parameter("w", nn.Parameter(torch.ones(2))), "parameter 'w' is new"),
        (lambda m: m.hidden.register_parameter("bias", None), "parameter 'hidden.bias' is gone"),
        (
            lambda m: setattr(m, "ramp", torch.arange(6.0)),
            "buffer 'ramp' had shape (4,) and has (6,)",
        ),
        (lambda m: m.add_module("more", nn.Identity()), "module 'more' is new"),
        (
            put("drop", nn.Identity()),
            "module 'drop' was torch.nn.modules.dropout.Dropout and is torch.nn.modules.linear.Identity",
        ),
        (put("drop.__class__", Other), "module 'drop' was torch.nn.modules.dropout.Dropout and is "),
        (
            lambda m: m.hidden.register_forward_hook(double),
            "the forward hooks of module 'hidden' were none and are double",
        ),
        (put("hidden.forward", torch.relu), "'forward' of module 'hidden' is new"),
        (
            put("activation", torch.tanh),
            "'activation' of the model was this builtin_function_or_method and is another one",
        ),
    ],
)
def test_change_is_noticed_and_named(how: Callable[[Any], Any], sentence: str) -> None:
    found = change(Configured(), how)
    assert any(text.startswith(sentence) if sentence.endswith(" ") else text == sentence for text in found), found


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize(
    "how",
    [
        lambda m: m.hidden.weight.data.add_(1),
        lambda m: m.ramp.add_(1),
        lambda m: setattr(m.hidden.weight, "grad", torch.ones(8, 8)),
        lambda m: setattr(m, "ramp", m.ramp.clone()),
        lambda m: setattr(m.hidden.weight, "data", torch.ones(8, 8)),
        lambda m: m.hidden.register_parameter("weight", nn.Parameter(torch.ones(8, 8))),
        lambda m: setattr(m, "config", Config()),
        lambda m: setattr(m, "table", {"depth": 3, "nested": {"rate": 0.1}}),
        lambda m: setattr(m, "scale", float("2.0")),
        lambda m: m.eval().train(),
        lambda m: m.hidden.register_forward_hook(double).remove(),
        lambda m: m.register_state_dict_post_hook(lambda *a: None),
    ],
    ids=[
        "weights",
        "buffer",
        "gradient",
        "new buffer",
        "new data",
        "new parameter",
        "equal config",
        "equal dict",
        "equal float",
        "mode and back",
        "hook and back",
        "state_dict hook",
    ],
)
def test_what_no_program_depends_on_changes_nothing(how: Callable[[Any], Any]) -> None:
    assert change(Configured(), how) == []


def test_module_hook_is_told_apart_by_its_code() -> None:
    model = Net()
    handle = model.hidden.register_forward_hook(lambda m, a, o: o)

    def swap(model: Net) -> None:
        handle.remove()
        model.hidden.register_forward_hook(lambda m, a, o: o * 2)

    (sentence,) = change(model, swap)
    assert sentence.startswith("the forward hooks of module 'hidden' were ")


SCALE = 3.0


def scaled(output: Tensor) -> Tensor:
    return output * SCALE


def test_variables_of_the_loss_function_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, options = 0.1, SimpleNamespace(smoothing=0.0)

    def loss(output: Tensor, batch: Any, weight: float = 1.0, *, power: int = 2) -> Tensor:
        return scaled(output).sum() * alpha * options.smoothing * weight**power

    def set_alpha(model: Any) -> None:
        nonlocal alpha
        alpha = 0.2

    model = Net()
    assert change(model, set_alpha, loss) == ["closure variable 'alpha' of loss was 0.1 and is 0.2"]
    assert change(model, lambda m: setattr(options, "smoothing", 0.5), loss) == [
        "closure variable 'options.smoothing' of loss was 0.0 and is 0.5"
    ]
    assert change(model, lambda m: setattr(loss, "__defaults__", (3.0,)), loss) == [
        "default 'weight' of loss was 1.0 and is 3.0"
    ]
    assert change(model, lambda m: loss.__kwdefaults__.update(power=3), loss) == [
        "default 'power' of loss was 2 and is 3"
    ]
    assert change(model, lambda m: monkeypatch.setitem(globals(), "SCALE", 4.0), loss) == [
        "global 'SCALE' of scaled was 3.0 and is 4.0"
    ]


def test_replaced_forward_of_a_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch(model: Any) -> None:
        monkeypatch.setattr(Net, "forward", lambda self, tokens: self.head(self.embed(tokens)))

    assert "the code of Net.forward has changed" in change(Net(), patch)


def test_settings_of_torch_are_followed() -> None:
    guard = ModelGuard(Net(), loss_fn)
    plain = guard.key()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = guard.key()
    assert ModelGuard.difference(plain, cast) == ["autocast on cpu was off and is torch.bfloat16"]
    assert guard.key() == plain and cast != plain
    torch.use_deterministic_algorithms(True)
    try:
        assert ModelGuard.difference(plain, guard.key()) == ["deterministic algorithms was False and is True"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_materialising_a_meta_model_changes_nothing() -> None:
    model = Net().to("meta")
    guard = ModelGuard(model, loss_fn, torch.device("cpu"))
    before = guard.key()
    model.to_empty(device="cpu")
    assert guard.key() == before
    assert ModelGuard(model, loss_fn).key() == before


def test_nan_and_negative_zero_are_values() -> None:
    assert change(Net(float("nan")), put("scale", float("nan"))) == []
    assert change(Net(0.0), put("scale", -0.0)) == ["'scale' of the model was 0.0 and is -0.0"]


def test_a_module_that_holds_itself_is_no_trap() -> None:
    model = Net()
    model.taps = [model.taps] if hasattr(model, "taps") else []
    model.taps.append(model.taps)
    assert change(model, put("scale", 5.0)) == ["'scale' of the model was 2.0 and is 5.0"]


EXPECTED = {"bias": torch.zeros(3)}


def test_captured_tensors_are_read_anew() -> None:
    box = {"bias": torch.ones(3)}
    source = {"bias": Captured("bias", lambda: box["bias"])}
    assert read_captured(source, EXPECTED)["bias"] is box["bias"]
    box["bias"] = torch.full((3,), 2.0)
    assert read_captured(source, EXPECTED)["bias"] is box["bias"]


@pytest.mark.parametrize(
    ("now", "got"),
    [
        (torch.ones(4), "float32 tensor of shape (4,) on cpu"),
        (torch.ones(3).double(), "float64 tensor of shape (3,) on cpu"),
        (torch.ones(3, device="meta"), "float32 tensor of shape (3,) on meta"),
        (torch.ones(3, requires_grad=True), "float32 tensor of shape (3,) on cpu, requires a gradient"),
        (2.0, "float"),
    ],
)
def test_captured_tensor_of_another_form_is_refused(now: Any, got: str) -> None:
    with pytest.raises(GuardError) as error:
        read_captured({"bias": Captured("bias", lambda: now)}, EXPECTED)
    assert error.value.got == got
    assert error.value.expected == "float32 tensor of shape (3,) on cpu"
    assert "the tensor 'bias', which the program reads at each step, has changed its form" in str(error.value)
