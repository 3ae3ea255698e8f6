"""Random numbers that are a function of a seed and a place, not of how many were drawn before.

Four operators of (Tensor seed, int place, ..., SymInt[] size, ScalarType dtype, Device device, ...). `seed`
is a 0-dim int64 tensor on the host; `place` tells the draws of one seed apart; the result is dense, on `device`.
Same arguments, same bits, on one kind of device. They are pure: a compiler may repeat, move or drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.operators import OpOverload, argument_names
from graphcomp.errors import StepError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LIBRARY = torch.library.Library("graphcomp", "FRAGMENT")
_LATER = "SymInt[] size, ScalarType dtype, Device device"


def mix(*numbers: int) -> int:
    """64 bits that depend on all bits of all the numbers and on their order.

    Source: splitmix64; Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def step_seeds(microbatches: int, first: int = 0) -> list[torch.Tensor]:
    """The seeds of one step: one 0-dim int64 host tensor for each of this rank's microbatches.

    first: index of the first of them among the microbatches of all data ranks. Draws one number from torch's
    default CPU generator, however many microbatches there are, so that `torch.manual_seed` makes a step
    repeatable; the ranks of a pipeline use the numbers of their first rank.
    """
    draw = _number(torch.randint(0, 1 << 62, (), dtype=torch.int64, device="cpu"))
    numbers = (mix(draw, first + i) >> 1 for i in range(microbatches))  # 63 bits: int64 has a sign
    return [torch.tensor(number, dtype=torch.int64, device="cpu") for number in numbers]


def draws(node: Node) -> bool:
    """Whether a call takes numbers from a random stream.

    Torch's tag says more than is true: attention without dropout draws nothing, nor does an operation that is
    told not to train, and the backward of attention is given its forward's numbers.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = argument_names(target)
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "philox_seed" in names or ("dropout_p" in names and not arguments.get("dropout_p")):
        return False
    return not any(arguments.get(flag, True) is False for flag in ("train", "training") if flag in names)


def is_seeded(node: Node) -> bool:
    """Whether a call is one of the operators below: a draw that depends on its arguments alone."""
    return node.target in (seeded_uniform, seeded_normal, seeded_exponential, seeded_randint)


def _number(seed: torch.Tensor) -> int:
    """Reads a host tensor without dispatching an operation, as `.item()` would. Never waits for a device."""
    if seed.device.type != "cpu":
        raise StepError("a seed is not on the host", expected="a 0-dim int64 tensor on cpu", got=seed.device)
    number: Any = seed.tolist()
    return int(number)


def _generator(seed: torch.Tensor, place: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(mix(_number(seed), place))


# fmt: off
def _uniform(
    seed: torch.Tensor, place: int, size: Sequence[int], dtype: torch.dtype, device: torch.device,
    low: float = 0.0, high: float = 1.0,
) -> torch.Tensor:
    """Uniform in [low, high)."""
    empty = torch.empty(size, dtype=dtype, device=device)
    return empty.uniform_(low, high, generator=_generator(seed, place, device))


def _normal(
    seed: torch.Tensor, place: int, size: Sequence[int], dtype: torch.dtype, device: torch.device,
    mean: float = 0.0, std: float = 1.0,
) -> torch.Tensor:
    empty = torch.empty(size, dtype=dtype, device=device)
    return empty.normal_(mean, std, generator=_generator(seed, place, device))


def _exponential(
    seed: torch.Tensor, place: int, size: Sequence[int], dtype: torch.dtype, device: torch.device,
    rate: float = 1.0,
) -> torch.Tensor:
    empty = torch.empty(size, dtype=dtype, device=device)
    return empty.exponential_(rate, generator=_generator(seed, place, device))


def _randint(
    seed: torch.Tensor, place: int, low: int, high: int,
    size: Sequence[int], dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:
    """Whole numbers in [low, high)."""
    generator = _generator(seed, place, device)
    return torch.randint(low, high, size, generator=generator, dtype=dtype, device=device)
# fmt: on


def _fake(seed: torch.Tensor, place: int, *rest: Any, **options: Any) -> torch.Tensor:
    """Shape and kind of any of these operators' results."""
    at = next(i for i, argument in enumerate(rest) if isinstance(argument, list | tuple | torch.Size))
    size, dtype, device = rest[at : at + 3]
    return torch.empty(size, dtype=dtype, device=device)


def _define(name: str, before: str, after: str, run: Callable[..., torch.Tensor]) -> OpOverload:
    schema = f"{name}(Tensor seed, int place, {before}{_LATER}{after}) -> Tensor"
    # The seed is read when the operator runs: a recorded CUDA graph would repeat it for ever.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphcomp::{name}", _fake, lib=_LIBRARY)
    defined: OpOverload = getattr(torch.ops.graphcomp, name).default
    return defined


seeded_uniform = _define("seeded_uniform", "", ", float low=0., float high=1.", _uniform)
seeded_normal = _define("seeded_normal", "", ", float mean=0., float std=1.", _normal)
seeded_exponential = _define("seeded_exponential", "", ", float rate=1.", _exponential)
seeded_randint = _define("seeded_randint", "SymInt low, SymInt high, ", "", _randint)
