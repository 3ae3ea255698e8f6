"""What every backend promises, and the check of inputs."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch

from graphcomp import backend
from graphcomp.backend.layout import Layouts
from graphcomp.errors import BackendError, PlanError
from tests.backend import samples

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.fixture(params=BACKENDS, scope="module")
def made(request: pytest.FixtureRequest) -> tuple[backend.Backend, backend.Compiled]:
    """One backend and one program it compiled, for all tests of this file."""
    chosen = backend.get(request.param)
    with torch.enable_grad():
        return chosen, chosen.compile(samples.forward())


def reference(weight: torch.Tensor, x: torch.Tensor) -> list[Any]:
    product = x @ weight.detach()
    return [torch.nn.functional.gelu(product), x, product.t(), None]


@pytest.mark.parametrize("rows", samples.ROWS)
def test_one_program_equals_pytorch_at_every_length(made: tuple[backend.Backend, backend.Compiled], rows: int) -> None:
    chosen, compiled = made
    inputs = samples.forward_inputs(rows)
    got = compiled.call(list(inputs))
    samples.equal(got, reference(*inputs), exactly=chosen.name == "eager")
    assert chosen.programs == 1


def test_results_carry_no_gradient(made: tuple[backend.Backend, backend.Compiled]) -> None:
    _, compiled = made
    with torch.enable_grad():
        results = compiled(samples.forward_inputs(5))
    assert not any(result.requires_grad for result in results if result is not None)
    assert torch.is_grad_enabled()


def test_autocast_does_not_apply_a_second_time(made: tuple[backend.Backend, backend.Compiled]) -> None:
    _, compiled = made
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = compiled(samples.forward_inputs(5))
    assert results[0].dtype == torch.float32


def test_inputs_die_while_the_program_runs(made: tuple[backend.Backend, backend.Compiled]) -> None:
    _, compiled = made
    weight, x = samples.forward_inputs(5)
    box = [weight, x.clone()]
    gone = weakref.ref(box[1])
    results = compiled.call(box)
    assert box == []
    assert gone() is results[1]  # only the saved value is left of it
    del results
    assert gone() is None


@pytest.mark.parametrize("name", BACKENDS)
def test_a_program_without_operations(name: str) -> None:
    compiled = backend.get(name).compile(samples.nothing())
    box = [torch.ones(3, 16)]
    kept = box[0]
    assert compiled.call(box)[0] is kept
    assert box == []


def test_listener_hears_of_each_program() -> None:
    heard: list[backend.Progress] = []
    backend.get("eager", heard.append).compile(samples.nothing())
    assert [(event.program, event.state) for event in heard] == [("relay", "compiled")]


def test_unknown_name() -> None:
    with pytest.raises(PlanError, match="there is no backend 'tvm'"):
        backend.get("tvm")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.ones(4, 16, dtype=torch.float64), "got: torch.float64 of sizes [4, 16]"),
        (torch.ones(4, 15), "expected: torch.float32 of sizes [4, 16], strides [16, 1], on cpu"),
        (torch.ones(16, 4).t(), "got: torch.float32 of sizes [4, 16], strides [1, 4]"),
        (torch.ones(4, 16, 1), "sizes [4, 16, 1]"),
        (3, "got: 3"),
    ],
    ids=["dtype", "size", "stride", "rank", "kind"],
)
def test_an_input_the_program_was_not_compiled_for(wrong: Any, says: str) -> None:
    with pytest.raises(BackendError, match=re.escape(says)) as caught:
        Layouts(samples.forward()).check([torch.ones(16, 16), wrong])
    assert "'activation 0>1[0]' of program 'stage 1 forward'" in str(caught.value)


def test_strides_of_single_elements_do_not_matter() -> None:
    row = torch.ones(16, 2).t()[:1]
    assert row.stride() == (1, 2)
    with pytest.raises(BackendError):
        Layouts(samples.forward()).check([torch.ones(16, 16), row])
    Layouts(samples.forward()).check([torch.ones(16, 16), torch.ones(1, 16).as_strided((1, 16), (99, 1))])


def test_number_of_inputs() -> None:
    with pytest.raises(BackendError, match="expected: 2\n  got: 1"):
        Layouts(samples.forward()).check([torch.ones(16, 16)])
