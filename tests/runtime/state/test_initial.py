"""First values: the same bits whichever part of a model is asked for, and nobody else's random streams are touched."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphcomp.errors import StateError
from graphcomp.runtime.state.initial import Initial, Initialiser, Recipe
from graphcomp.runtime.state.slots import slots_of
from tests.cases.live import LiveBytes
from tests.checkpoint.model import Decoder
from tests.zoo import ZOO

CPU = torch.device("cpu")


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def values(model: nn.Module, names: list[str] | None = None, init: Initialiser | None = None, seed: int = 0) -> dict:
    every = [slot.name for slot in slots_of(model)]
    return Initial(model, Recipe(init, seed), CPU).values(every if names is None else names, lambda _, whole: whole)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("name", ZOO)
def test_each_tensor_by_itself_has_the_same_bits(name: str) -> None:
    model = on_meta(ZOO[name].build)
    every = values(model)
    for number in range(3):
        names = list(every)[number::3]
        found = values(on_meta(ZOO[name].build), names)
        assert list(found) == names
        assert_equal(found, every)
    assert all(slot.tensor.is_meta and slot.table[slot.key] is slot.tensor for slot in slots_of(model))


def init_as_gpt2(module: nn.Module) -> None:
    """The root draws once more for some weights of its children, as the function of GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(std=0.02)
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Sequential | Decoder):
        for name, parameter in module.named_parameters():
            if name.endswith("3.weight"):
                nn.init.normal_(parameter, std=0.01)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def test_a_function_that_reaches_into_other_modules() -> None:
    every = values(on_meta(Decoder), init=init_as_gpt2)
    assert every["layers.0.3.weight"].std() < 0.014 < every["layers.0.0.weight"].std()
    for name in every:
        assert_equal(values(on_meta(Decoder), [name], init_as_gpt2), every)


def init_with_rejection(module: nn.Module) -> None:
    """From the root, by functions of torch that draw as often as they need to, and do nothing on meta."""
    if isinstance(module, Decoder):
        for _, parameter in module.named_parameters():
            nn.init.trunc_normal_(parameter, std=0.5, a=-0.6, b=0.6)
        for layer in module.layers:
            nn.init.orthogonal_(layer[0].weight)
    elif hasattr(module, "factor"):
        module.reset_parameters()


def test_functions_that_do_nothing_on_meta() -> None:
    every = values(on_meta(Decoder), init=init_with_rejection)
    weight = every["layers.1.0.weight"]
    torch.testing.assert_close(weight.t() @ weight, torch.eye(6))
    assert 0.5 < every["embed.weight"].abs().max() <= 0.6
    for name in every:
        assert_equal(values(on_meta(Decoder), [name], init_with_rejection), every)


def test_draws_apart_from_tensors_of_several_modules_are_refused() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Sequential):
            nn.init.trunc_normal_(module[0].weight)
            module[1].weight.copy_(torch.randn(2, 2))

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    with pytest.raises(StateError, match="draws numbers apart from the tensors that it initialises"):
        Initial(model, Recipe(init), CPU)


def test_who_only_asks_and_does_not_write_is_found_out() -> None:
    model = on_meta(lambda: nn.Linear(2, 2, bias=False))
    with pytest.raises(StateError, match="nothing initialises parameter 'weight'"):
        values(model, init=lambda module: module.weight.is_meta)
    assert model.weight.is_meta


def test_values_are_those_that_the_layers_say() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 200), nn.LayerNorm(200), nn.Embedding(300, 50, padding_idx=3)))
    found = values(model)
    bound = 1 / math.sqrt(64)
    assert found["0.weight"].abs().max() <= bound
    assert float(found["0.weight"].std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert_equal({"1.weight": torch.ones(200), "1.bias": torch.zeros(200)}, found)
    assert float(found["2.weight"].std()) == pytest.approx(1, rel=0.02)
    assert not found["2.weight"][3].any()


def test_seed_and_place_decide() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    found = values(on_meta(build), seed=1)
    assert_equal(values(on_meta(build), seed=1), found)
    assert not torch.equal(found["0.weight"], found["1.weight"])
    assert not torch.equal(found["0.weight"], values(on_meta(build), seed=2)["0.weight"])


def test_the_callers_stream_is_as_before() -> None:
    before = torch.get_rng_state()
    values(on_meta(Decoder), seed=7)
    assert torch.equal(before, torch.get_rng_state())


def test_it_does_not_matter_that_some_have_values_already() -> None:
    every = values(on_meta(Decoder))
    model = on_meta(Decoder)
    model.norm = nn.LayerNorm(6)
    model.layers[1] = model.layers[1].to_empty(device="cpu")
    kept = model.layers[1][0].weight.detach().clone()
    assert_equal(values(model, ["layers.0.0.weight", "embed.weight"]), every)
    assert torch.equal(model.layers[1][0].weight, kept)


def test_a_tied_tensor_is_initialised_at_its_first_place() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.constant_(module.weight, 1.0)
        elif isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    model = on_meta(lambda: Decoder().requires_grad_(False))
    for layer in model.layers:
        layer[0].bias = layer[3].bias = None
    model.unused.bias = None
    assert values(model, init=init)["embed.weight"].unique().tolist() == [1.0]


class Replaces(nn.Module):
    """Its buffer becomes another tensor."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("table", torch.zeros(3))

    def reset_parameters(self) -> None:
        self.table = torch.ones(self.size).cumsum(0)


def test_a_buffer_may_be_replaced_by_another_of_its_form() -> None:
    assert_equal(values(on_meta(Replaces)), {"table": torch.tensor([1.0, 2.0, 3.0])})
    with pytest.raises(StateError, match="buffer 'table' of Replaces was replaced by something else"):
        values(on_meta(lambda: Replaces(4)))


def test_under_a_default_device_of_meta() -> None:
    expected = values(on_meta(Decoder))
    model = on_meta(Decoder)
    with torch.device("meta"):
        found = values(model)
    assert_equal(found, expected)


def test_one_module_is_whole_at_a_time() -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8))))
    initial = Initial(model, Recipe(), CPU)
    every = [slot.name for slot in slots_of(model)]
    with LiveBytes(slot.tensor for slot in slots_of(model)) as live:
        initial.values(every, lambda _, whole: whole[:25].clone())
    whole = 100 * 100 * 4
    assert live.peak <= 8 * whole / 4 + whole


# ---- refused


def test_what_nothing_initialises_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(3))

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Odd()))
    with pytest.raises(StateError, match=r"nothing initialises parameter '1\.position' of Odd\n  where: module '1'"):
        Initial(model, Recipe(), CPU)
    with pytest.raises(StateError, match=r"nothing initialises parameter '0\.weight' of Linear.*\n.*\n.*from init"):
        Initial(model, Recipe(lambda module: None), CPU)


def test_what_is_initialised_in_part_is_named() -> None:
    def half(module: nn.Module) -> None:
        module.weight[:2].fill_(1.0)

    def both(module: nn.Module) -> None:
        for number, rows in enumerate(module.weight.data.chunk(2)):
            rows.fill_(number)

    model = on_meta(lambda: nn.Linear(3, 4, bias=False))
    with pytest.raises(StateError, match="a part only of parameter 'weight' of Linear is initialised"):
        Initial(model, Recipe(half), CPU)
    assert values(model, init=both)["weight"].sum(1).tolist() == [0, 0, 3, 3]


def test_a_generator_of_its_own_is_refused() -> None:
    model, own = on_meta(lambda: nn.Linear(2, 2)), torch.Generator()
    with pytest.raises(StateError, match="draws from a generator of its own"):
        Initial(model, Recipe(lambda module: nn.init.normal_(module.weight, generator=own)), CPU)


def test_memory_in_common_is_refused() -> None:
    model = on_meta(lambda: nn.Linear(4, 4))
    model.register_buffer("row", model.weight.detach()[0])
    with pytest.raises(StateError, match="buffer 'row' of Linear shares memory with 'weight'"):
        Initial(model, Recipe(), CPU)


def test_an_error_of_the_function_keeps_its_type_and_says_where() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            raise KeyError("std")

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    entries = [(slot.table, slot.key, slot.tensor) for slot in slots_of(model)]
    with pytest.raises(KeyError) as raised:
        Initial(model, Recipe(init), CPU)
    assert raised.value.__notes__ == ["while initialising module '0', Linear"]
    assert all(table[key] is tensor for table, key, tensor in entries)
