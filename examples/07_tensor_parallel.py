"""Two pipeline stages of two tensor ranks each: four processes train one small GPT, exactly as one would.

    python examples/07_tensor_parallel.py                      starts four processes on this machine
    torchrun --nproc-per-node 4 examples/07_tensor_parallel.py

PyTorch's `parallelize_module` lays the model out over the axis `tp`; graphcomp traces it down to operations on parts,
with collectives between them, and cuts the result into stages. At the end it compares the losses with those of one
process; exit code 1 if they differ.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphcomp as gc
from graphcomp.testing import run_ranks

WIDTH, HEADS, CLASSES, STEPS = 32, 4, 16, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shape = rows, length, -1, WIDTH // HEADS  # -1: of the heads, as many as this rank has
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lay_out(model: GPT, mesh: DeviceMesh) -> None:
    """Heads, hidden units and classes in parts; between them, each rank has its part of the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    layers = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "mlp": gather}
    layers |= {f"attention.{name}": columns for name in ("q", "k", "v")} | {"attention.out": rows}
    for block in model.blocks:
        parallelize_module(block, mesh, {**layers, "mlp.0": columns, "mlp.2": rows})


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits, batch["labels"])  # works on the parts of the classes as they are


def batches() -> list[dict[str, Tensor]]:
    """Each token is the one before plus a step that the sequence keeps to."""
    found = []
    for length in (12, 8):
        start, stride = torch.randint(CLASSES, (2, 4, 1))
        tokens = (start + stride * torch.arange(length + 1)) % CLASSES
        found.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    return found


def train(mesh: DeviceMesh | None) -> tuple[list[float], str]:
    """Losses, and the plan. Only `lay_out` and the plan know of a mesh."""
    torch.manual_seed(0)
    model = GPT()
    if mesh is not None:
        lay_out(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(mesh=mesh, backend="eager", quiet=True))
    losses = []
    for _ in range(STEPS):
        losses.append(float(step(batches()).loss))
        gc.clip_grad_norm_(step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, step.explain()


def on_rank(rank: int) -> None:
    losses, plan = train(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")))
    if rank == 0:
        alone, _ = train(None)
        print(plan)
        for number, (here, there) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {number}: loss {here:.6f} on four ranks, {there:.6f} on one")
        if max(abs(here - there) for here, there in zip(losses, alone, strict=True)) > 1e-4:
            raise SystemExit("the losses differ")
    dist.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        on_rank(dist.get_rank())
        dist.destroy_process_group()
    else:
        run_ranks(on_rank, 4)
