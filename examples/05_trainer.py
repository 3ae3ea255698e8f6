"""A whole trainer around the four lines: data, evaluation, checkpoints, going on, a log. One text at every layout.

    python examples/05_trainer.py                                            this process alone
    torchrun --nproc-per-node 2 examples/05_trainer.py                       two stages
    torchrun --nproc-per-node 4 examples/05_trainer.py --data-ranks 2        two pipelines of two stages

Only `place` knows where it runs. Stop it and start it again, at another layout if you like: it goes on from its last
checkpoint. Programs are saved beside it, so that a later start at the same layout compiles nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from stdlib_text import VOCAB, documents, pad
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._pytree import register_dataclass

import graphcomp as gc


@dataclass(frozen=True)
class Config:
    steps: int = 60
    microbatches: int = 4  # in a step, over all data ranks
    rows: int = 4  # documents in a microbatch
    longest: int = 128  # bytes of a document
    width: int = 64
    blocks: int = 3
    rate: float = 3e-3
    evaluate_every: int = 20
    save_every: int = 20
    folder: str = "runs/trainer"
    backend: str = "inductor"
    data_ranks: int = 1
    seed: int = 0


# ------------------------------------------------------------------ where it runs: the only part that asks


@dataclass(frozen=True)
class Place:
    """part: which of the documents of a step this rank takes. parts: in how many they are dealt out."""

    plan: gc.Plan
    device: torch.device
    part: int
    parts: int
    console: Console


def place(config: Config) -> Place:
    if "RANK" not in os.environ:
        plan = gc.Plan(backend=config.backend, quiet=True)
        return Place(plan, torch.device("cpu"), 0, 1, Console(highlight=False))
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // config.data_ranks, config.data_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    plan = gc.Plan(mesh=mesh, backend=config.backend, quiet=True)
    console = Console(quiet=dist.get_rank() > 0, highlight=False)
    return Place(plan, torch.device("cpu"), mesh.get_local_rank("dp"), config.data_ranks, console)


# ------------------------------------------------------------------ data and model


@dataclass
class Batch:
    tokens: Tensor
    labels: Tensor


@dataclass
class Output:
    loss: gc.TokenLoss


register_dataclass(Batch), register_dataclass(Output)


class Data:
    """The same documents in every step at every layout; a part of them is one rank's."""

    def __init__(self, config: Config, part: int, parts: int) -> None:
        self.config, self.part, self.parts = config, part, parts
        found = documents(limit=2000, longest=config.longest)
        self.held_out, self.texts = found[:36], found[36:]

    def of_step(self, number: int) -> list[bytes]:
        draw = random.Random(f"{self.config.seed} {number}")
        return draw.sample(self.texts, self.config.rows * self.config.microbatches)[self.part :: self.parts]

    def to_evaluate(self) -> list[list[bytes]]:
        """In several calls, the last of which is shorter."""
        own = self.held_out[self.part :: self.parts]
        size = self.config.rows * self.config.microbatches // self.parts
        return [own[start : start + size] for start in range(0, len(own), size)]


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A byte-level language model that makes its own batches."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rows = config.rows
        self.embed, self.positions = nn.Embedding(VOCAB, config.width), nn.Embedding(config.longest, config.width)
        self.blocks = nn.Sequential(*(Block(config.width) for _ in range(config.blocks)))
        self.head = nn.Linear(config.width, VOCAB, bias=False)

    def prepare_batch(self, texts: list[bytes]) -> list[Batch]:
        """Microbatches, each padded to its longest document."""
        groups = [texts[start : start + self.rows] for start in range(0, len(texts), self.rows)]
        return [Batch(**pad(group, torch.device("cpu"))) for group in groups]

    def forward(self, batch: Batch) -> Output:
        x = self.embed(batch.tokens) + self.positions(torch.arange(batch.tokens.shape[1]))
        return Output(gc.token_loss(self.head(self.blocks(x)), batch.labels))


# ------------------------------------------------------------------ the trainer


class Trainer:
    def __init__(self, config: Config, where: Place) -> None:
        self.config, self.console, self.folder = config, where.console, Path(config.folder)
        self.data = Data(config, where.part, where.parts)
        torch.manual_seed(config.seed)
        self.model = compiled(GPT(config), where, self.folder / "programs")
        self.model.step.compile(self.model.prepare_batch(self.data.of_step(0))[0])  # then it is known who owns what
        self.optimizer = torch.optim.AdamW(self.model.parameters(), config.rate)
        self.rates = OneCycleLR(self.optimizer, config.rate, total_steps=config.steps)

    def run(self) -> None:
        self.resume()
        began = time.perf_counter()
        for number in range(self.model.step.stats.steps, self.config.steps):
            self.optimizer.zero_grad()
            batch = self.model.prepare_batch(self.data.of_step(number))
            out = self.model.forward(batch)
            out.loss.backward()
            gc.clip_grad_norm_(self.model.step, 1.0)
            self.optimizer.step()
            self.rates.step()
            if (number + 1) % 5 == 0:
                seen = out.result.to_floats()  # the only time that the loop waits for a device
                speed = 5 * seen["tokens/loss"] / (time.perf_counter() - began)
                self.console.print(f"step {number + 1:4d}  loss {seen['loss']:.4f}  about {speed:,.0f} tokens/s")
                began = time.perf_counter()
            if (number + 1) % self.config.evaluate_every == 0:
                self.console.print(f"step {number + 1:4d}  held out {self.evaluate():.4f}")
            if (number + 1) % self.config.save_every == 0:
                self.save(number + 1)
        self.model.step.save(self.folder / "programs")
        made = f"{self.model.step.stats.traces} captures, {self.model.step.stats.programs} compiled programs"
        self.console.print(f"done: held out {self.evaluate():.6f}; {made}")

    def evaluate(self) -> float:
        """The loss over all tokens that were held out."""
        with torch.no_grad():
            results = [self.model.forward(self.model.prepare_batch(part)).result for part in self.data.to_evaluate()]
        return gc.combine(results).to_floats()["loss"]

    def save(self, number: int) -> None:
        folder = self.folder / f"step_{number:06d}"
        gc.checkpoint.save(self.model.step, folder, self.optimizer, extra=self.rates.state_dict())

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one; it may have been written at another layout."""
        for folder in sorted(self.folder.glob("step_*"))[-1:]:
            self.rates.load_state_dict(gc.checkpoint.load(self.model.step, folder, self.optimizer))
            self.console.print(f"going on from {folder}")


def compiled(model: GPT, where: Place, programs: Path) -> gc.CompiledModel[list[bytes], list[Batch]]:
    """With the programs of an earlier start, if they are of this model and this layout."""
    try:
        return gc.compile(model, plan=where.plan, saved=programs)
    except gc.errors.GraphcompError as error:  # on all ranks
        where.console.print(f"compiling: {error.got or error.what}")
        return gc.compile(model, plan=where.plan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    config = Config(**vars(parser.parse_args()))
    where = place(config)
    Trainer(config, where).run()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
