"""The contestants over data ranks: each runs one training step on this rank's microbatches, gradients into `.grad`.

All divide the sum of the token losses by the tokens of all microbatches and ranks, and no gradient is communicated
before the last microbatch's. The peers are spared the reported loss: theirs stays on its rank.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT, Config, make
from systems import IGNORED, Batches, token_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import graphcomp as gc


class Contestant(ABC):
    """model: what is trained; its parameters carry the gradients after `run`."""

    model: nn.Module

    @abstractmethod
    def run(self, batches: Batches) -> Tensor:
        """One step from no gradients at all; the loss (of the peers: this rank's part of it)."""

    def gradients(self) -> dict[str, Tensor]:
        """Whole, by name; all ranks must call it."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}

    def forget(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Graphcomp(Contestant):
    """The whole model, a plan, and one call. options: of the plan."""

    def __init__(self, config: Config, parameters: str, **options: Any) -> None:
        self.model = make(config)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        plan = gc.Plan(mesh=mesh, parameters=parameters, quiet=True, **options)
        self.step = gc.compile_train_step(self.model, token_loss, plan=plan)

    def run(self, batches: Batches) -> Tensor:
        self.forget()
        return self.step(batches).loss


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class Objective(nn.Module):
    """A GPT with its summed loss, so that a peer's compiler can see both in one graph."""

    def __init__(self, model: GPT, loss: Callable[[Tensor, Tensor], Tensor] = summed) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(ids), labels)


class Peer(Contestant):
    """The loop that both peers share. They average gradients over ranks, hence the number of ranks in `scale`."""

    objective: nn.Module

    def run(self, batches: Batches) -> Tensor:
        self.forget()
        tokens = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).sum()
        dist.all_reduce(tokens)
        scale = dist.get_world_size() / tokens
        total = torch.zeros(())
        for place, batch in enumerate(batches):
            with self.communicating(place == len(batches) - 1):
                loss = self.objective(batch["ids"], batch["labels"]) * scale
                loss.backward()
            total += loss.detach()
        return total

    def communicating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around a microbatch; gradients are communicated in the last one's backward only."""
        raise TypeError(f"{type(self).__name__} does not say how it accumulates")


class Replicated(Peer):
    """DistributedDataParallel; all microbatches but the last under `no_sync`. Gradients are views of its buckets."""

    def __init__(self, config: Config, compiled: bool) -> None:
        self.model = make(config)
        objective: nn.Module = Objective(self.model)
        if compiled:
            objective.compile(dynamic=False)
        self.objective = self.ddp = DistributedDataParallel(objective, gradient_as_bucket_view=True)

    def communicating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.ddp.no_sync()


class Sharded(Peer):
    """fully_shard on every block and on the whole, with gradients accumulated unsharded until the last microbatch.

    Its hooks stand between the blocks, so blocks and loss are compiled one by one.
    regather: parameters are gathered for every forward and backward and freed behind it. Otherwise they are gathered
    once in a step and stay until the last microbatch's backward.
    """

    def __init__(self, config: Config, compiled: bool, regather: bool) -> None:
        self.model = make(config)
        self.regather = regather
        if compiled:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=regather)
        self.root = fully_shard(self.model, mesh=mesh, reshard_after_forward=regather)
        self.objective = Objective(self.model, torch.compile(summed, dynamic=False) if compiled else summed)

    def communicating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        self.root.set_requires_gradient_sync(last)
        self.root.set_is_last_backward(last)
        if not self.regather:
            self.root.set_reshard_after_backward(last)
        return contextlib.nullcontext()
