"""The contestants: each runs one training step (forward, loss, backward; gradients into `.grad`) on a list
of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Back, Config, Front, make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import graphcomp as gc

Batches = list[dict[str, torch.Tensor]]
IGNORED = -100


class Graphcomp:
    """The whole model, a plan with these options, and one call."""

    def __init__(self, config: Config, **options: Any) -> None:
        self.model = make(config)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
        plan = gc.Plan(mesh=mesh, quiet=True, **options)
        self.step = gc.compile_train_step(self.model, token_loss, plan=plan)

    def run(self, batches: Batches) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        return self.step(batches).loss

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def token_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    return gc.token_loss(logits, batch["labels"])


class Peer:
    """torch.distributed.pipelining on hand-cut halves.

    It is spared what it cannot do itself: all microbatches come as one tensor, padded to `length` (its
    stages take one shape for the whole run); the number of tokens of the step is known to its loss; no
    outputs are returned; and the loss is left on the last rank.

    compile_options: of `torch.compile`; None: it runs eagerly.
    """

    def __init__(
        self, config: Config, microbatches: int, length: int, compile_options: Mapping[str, Any] | None
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        model = make(config)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.half: torch.nn.Module = Front(model) if rank == 0 else Back(model)
        self.length, self.first = length, rank == 0
        self.tokens = torch.ones(())
        module, loss = self.half, self._loss
        if compile_options is not None:
            options = dict(compile_options)
            module, loss = (torch.compile(one, dynamic=False, options=options) for one in (module, loss))
        stage = PipelineStage(module, rank, world, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / self.tokens

    def prepare(self, batches: Batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What its loader would do, outside of the measured time."""
        ids = torch.cat([_padded(batch["ids"], self.length, 0) for batch in batches])
        labels = torch.cat([_padded(batch["labels"], self.length, IGNORED) for batch in batches])
        return ids, labels, (labels != IGNORED).sum().float()

    def run(self, prepared: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, labels, tokens = prepared
        self.half.zero_grad(set_to_none=True)
        self.tokens.copy_(tokens)
        if self.first:
            self.schedule.step(ids, return_outputs=False)
            return torch.zeros(())
        losses: list[torch.Tensor] = []
        self.schedule.step(target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).sum()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {self.names[id(p)]: p.grad for p in self.half.parameters() if p.grad is not None}


def _padded(x: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return F.pad(x, (0, length - x.shape[1]), value=value)


Run = Callable[[], torch.Tensor]
