"""A chain of blocks with operators in which something can happen: in forward, in backward, while counting, tracing."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.runtime.program import step_calls, transport
from graphcomp.runtime.ranks.chain import Chain as ChainOfRanks
from graphcomp.runtime.ranks.layout import Layout

WIDTH = 4


class Injected(Exception):
    """What a user's code raises."""


@dataclass
class Trap:
    """Does `what` when `place` is passed for the `number`-th time. when: the clock then."""

    place: str = ""
    number: int = 1
    what: str = "raise"
    when: float = 0.0

    def passed(self, place: str) -> None:
        if place != self.place:
            return
        self.number -= 1
        if self.number:
            return
        self.when = time.monotonic()
        match self.what:
            case "raise":
                raise Injected(f"at {place}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            case "signal":  # where it is held back
                os.kill(os.getpid(), signal.SIGINT)
            case "stall":
                time.sleep(7)


class Armed:
    """Holds the trap of this process where no guard looks for it. Places of no user's code are passed as well."""

    def __init__(self) -> None:
        self.trap = Trap()

    def install(self) -> None:
        """Pass "compare", "send", "receive", "close" and "reduce" too. For a process of its own."""
        for owner, name, place in (
            (transport.ProcessTransport, "send", "send"),
            (transport._ProcessReceive, "wait", "receive"),
            (Layout, "add_up", "close"),  # over the pipeline, and then over data ranks
            (dist, "all_reduce", "close"),
            (ChainOfRanks, "gather", "compare"),
        ):
            setattr(owner, name, self._passing(getattr(owner, name), place))
        make = step_calls._step_call

        def step_call(program: Any, call: Any) -> Any:
            made = make(program, call)
            return dataclasses.replace(made, call=self._passing(call, program.name.split()[-1]))

        step_calls._step_call = step_call

    def _passing(self, original: Any, place: str) -> Any:
        def passing(*given: Any, **options: Any) -> Any:
            self.trap.passed(place)
            return original(*given, **options)

        return passing


ARMED = Armed()


def armed() -> Armed:
    """By a name that is put together, which no guard follows: a trap changes all the time."""
    return globals()["ARM" + "ED"]


@torch.library.custom_op("graphcomp_faults::passing", mutates_args=())
def passing(x: Tensor, place: str) -> Tensor:
    armed().trap.passed(place)
    return x.clone()


@passing.register_fake
def _(x: Tensor, place: str) -> Tensor:
    return torch.empty_like(x)


def _keep_place(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.place = inputs[1]


passing.register_autograd(
    lambda ctx, grad: (passing(grad, ctx.place.replace("F", "B")), None), setup_context=_keep_place
)


class Chain(nn.Module):
    """blocks: each one a stage. counted: the first one counts its microbatches in a buffer."""

    def __init__(self, blocks: int, counted: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.counted = counted
        if counted:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        armed().trap.passed("trace")
        if self.counted:
            self.seen = self.seen + 1
        for number, block in enumerate(self.blocks):
            x = passing(block(x).tanh(), f"F{number}")
        return x


def loss_fn(output: Tensor, batch: dict[str, Any]) -> gc.TokenLoss:
    tokens = passing(batch["tokens"], "count")
    return gc.TokenLoss(output.square().sum() * batch.get("scale", 1.0), tokens.sum())


def batches(number: int = 4, rows: int = 3, **more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(number)
    return [
        {"x": torch.randn(rows, WIDTH, generator=generator), "tokens": torch.ones(rows), **more} for _ in range(number)
    ]
