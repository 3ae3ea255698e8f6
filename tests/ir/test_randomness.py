"""Draws as functions of seed and place: distribution, repeatability, no operation that waits for a device."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from graphcomp.errors import StepError
from graphcomp.ir.randomness import (
    draws,
    mix,
    seeded_exponential,
    seeded_normal,
    seeded_randint,
    seeded_uniform,
    step_seeds,
)

CPU = torch.device("cpu")
COUNT = 100_000


def seed(number: int = 3) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int64)


def uniform(number: int, place: int, size: int = 64) -> torch.Tensor:
    return seeded_uniform(seed(number), place, [size], torch.float32, CPU)


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (lambda: seeded_uniform(seed(), 0, [COUNT], torch.float64, CPU), 1 / 2, 1 / 12),
        (lambda: seeded_uniform(seed(), 0, [COUNT], torch.float64, CPU, -1.0, 3.0), 1.0, 16 / 12),
        (lambda: seeded_normal(seed(), 1, [COUNT], torch.float64, CPU), 0.0, 1.0),
        (lambda: seeded_normal(seed(), 1, [COUNT], torch.float64, CPU, 2.0, 3.0), 2.0, 9.0),
        (lambda: seeded_exponential(seed(), 2, [COUNT], torch.float64, CPU, 2.0), 0.5, 0.25),
        (lambda: seeded_randint(seed(), 3, -2, 4, [COUNT], torch.float64, CPU), 0.5, 35 / 12),
    ],
    ids=["uniform", "uniform of a range", "normal", "normal with mean", "exponential", "randint"],
)
def test_mean_and_variance_are_within_five_sigma(draw: Any, mean: float, variance: float) -> None:
    found = draw()
    assert abs(found.mean().item() - mean) < 5 * math.sqrt(variance / COUNT)
    squares = (found - mean) ** 2
    assert abs(squares.mean().item() - variance) < 5 * squares.std().item() / math.sqrt(COUNT)


def test_places_and_seeds_are_independent() -> None:
    streams = torch.stack([uniform(s, place, COUNT) for s in (0, 1, 2) for place in (0, 1, 2)]).double()
    correlation = torch.corrcoef(streams) - torch.eye(9, dtype=torch.float64)
    assert correlation.abs().max() < 5 / math.sqrt(COUNT)


def test_same_arguments_same_bits_whatever_was_drawn_between() -> None:
    first = uniform(7, 2)
    torch.rand(5)
    uniform(7, 3)
    assert torch.equal(uniform(7, 2), first)
    assert not torch.equal(uniform(7, 3), first)
    assert not torch.equal(uniform(8, 2), first)


def test_draws_leave_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    uniform(1, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_and_shape(dtype: torch.dtype) -> None:
    found = seeded_normal(seed(), 0, [3, 0, 2], dtype, CPU)
    assert (found.dtype, found.shape) == (dtype, (3, 0, 2))


def test_randint_stays_in_its_range() -> None:
    found = seeded_randint(seed(), 0, -1, 2, [1000], torch.int64, CPU)
    assert found.unique().tolist() == [-1, 0, 1]


def test_schema_and_fake_agree_with_the_operators() -> None:
    for draw in (seeded_uniform, seeded_normal, seeded_exponential):
        torch.library.opcheck(draw, (seed(), 1, [2, 3], torch.float32, CPU))
    torch.library.opcheck(seeded_randint, (seed(), 1, 0, 5, [2, 3], torch.int64, CPU))


@pytest.mark.cuda
def test_on_a_device() -> None:
    cuda = torch.device("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [seeded_uniform(seed(), place, [64], torch.float32, cuda) for place in (0, 0, 1)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(StepError, match="a seed is not on the host"):
        seeded_uniform(seed().cuda(), 0, [2], torch.float32, cuda)


def test_nothing_is_read_back() -> None:
    with Operations() as operations:
        for one in step_seeds(3):
            seeded_uniform(one, 0, [4], torch.float32, CPU)
    assert operations.count["aten._local_scalar_dense.default"] == 0
    assert operations.count["graphcomp.seeded_uniform.default"] == 3


def test_mix_depends_on_every_number_and_their_order() -> None:
    numbers = [mix(a, b) for a in range(-20, 20) for b in range(20)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**64 for number in numbers)
    flips = [(mix(5, 1 << bit) ^ mix(5, 0)).bit_count() for bit in range(64)]
    assert 28 < sum(flips) / len(flips) < 36


class TestStepSeeds:
    def test_one_number_is_drawn_a_step(self) -> None:
        states = []
        for microbatches in (1, 5):
            torch.manual_seed(0)
            step_seeds(microbatches)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)

    def test_a_microbatch_has_its_seed_on_whatever_data_rank_it_is(self) -> None:
        torch.manual_seed(0)
        together = step_seeds(4)
        torch.manual_seed(0)
        second = step_seeds(2, first=2)
        assert together[2:] == second
        assert len({int(s) for s in together}) == 4

    def test_steps_differ_and_repeat(self) -> None:
        torch.manual_seed(0)
        run = [step_seeds(1)[0].item() for _ in range(3)]
        torch.manual_seed(0)
        assert [step_seeds(1)[0].item() for _ in range(3)] == run
        assert len(set(run)) == 3

    def test_kind(self) -> None:
        (one,) = step_seeds(1)
        assert (one.shape, one.dtype, one.device) == ((), torch.int64, CPU)


@pytest.mark.parametrize(
    ("target", "arguments", "options", "expected"),
    [
        ("bernoulli.p", (0.5,), {}, True),
        ("sin.default", (), {}, False),
        ("native_dropout.default", (0.5, True), {}, True),
        ("native_dropout.default", (0.5, False), {}, False),
        ("rrelu_with_noise_functional.default", (None, 0.1, 0.3), {"training": False}, False),
        ("_scaled_dot_product_flash_attention.default", (None, None), {}, False),
        ("_scaled_dot_product_flash_attention.default", (None, None, 0.1), {}, True),
        ("_scaled_dot_product_efficient_attention_backward.default", (None,) * 8 + (0.1,), {}, False),
    ],
)
def test_what_draws(target: str, arguments: tuple[Any, ...], options: dict[str, Any], expected: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    packet, overload = target.split(".")
    node = graph.call_function(getattr(getattr(torch.ops.aten, packet), overload), (x, *arguments), options)
    assert draws(node) is expected
