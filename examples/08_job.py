"""A job in phases, as large trainers are written: a config file, axes, a model on meta, a loader, metrics, checkpoints.

    python examples/08_job.py                                         this process alone, with the defaults below
    torchrun --nproc-per-node 4 examples/08_job.py job.toml           where job.toml holds what is to differ:
        [parallel]
        pipeline = 2        # data ranks: what is left, two here
        parameters = "shard"

Started again, it goes on after its last checkpoint, whatever the axes are by then. `Dims` makes the plan of the axes,
and the first rank shows the metrics; nothing else asks where it runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_gpt import GPT
from stdlib_text import documents, groups, pad
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import graphcomp as gc


@dataclass(frozen=True)
class ModelConfig:
    width: int = 64
    heads: int = 4
    blocks: int = 3
    longest: int = 128  # bytes of a document


@dataclass(frozen=True)
class TrainingConfig:
    steps: int = 40
    microbatches: int = 4  # in a step, over all data ranks
    rows: int = 4  # documents in a microbatch
    documents: int = 2000
    rate: float = 3e-3
    warmup: int = 5
    max_norm: float = 1.0
    seed: int = 0
    log_every: int = 5
    save_every: int = 20
    folder: str = "runs/job"


@dataclass(frozen=True)
class ParallelConfig:
    pipeline: int = 1
    schedule: str = "1f1b"
    parameters: str = "replicate"
    backend: str = "inductor"


@dataclass(frozen=True)
class Config:
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    parallel: ParallelConfig = ParallelConfig()

    def changed(self, path: str) -> Config:
        """With what a file says."""
        return _replaced(self, tomllib.loads(Path(path).read_text()), path)


def _replaced(config: Any, given: dict[str, Any], where: str) -> Any:
    """The config with these values; those of a section replace some of it."""
    known = [field.name for field in fields(config)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise SystemExit(f"{where}: unknown key '{unknown[0]}'; known are {', '.join(known)}")
    own = {name: getattr(config, name) for name in given}
    nested = {n: _replaced(own[n], v, f"{where} [{n}]") if is_dataclass(own[n]) else v for n, v in given.items()}
    return replace(config, **nested)


@dataclass(frozen=True)
class Dims:
    """The plan, and which of how many data ranks this is."""

    plan: gc.Plan
    data_rank: int = 0
    data_ranks: int = 1

    @classmethod
    def of(cls, config: ParallelConfig) -> Dims:
        options = {"schedule": config.schedule, "backend": config.backend, "quiet": True}
        if "RANK" not in os.environ:
            return cls(gc.Plan(**options))
        dist.init_process_group("gloo")
        data_ranks = dist.get_world_size() // config.pipeline
        mesh = init_device_mesh("cpu", (config.pipeline, data_ranks), mesh_dim_names=("pp", "dp"))
        plan = gc.Plan(mesh=mesh, parameters=config.parameters, **options)
        return cls(plan, mesh.get_local_rank("dp"), data_ranks)

    def share(self, items: list[list[bytes]]) -> list[list[bytes]]:
        """This data rank's part of what is the same on all ranks."""
        count, ranks = len(items), self.data_ranks
        return items[self.data_rank * count // ranks : (self.data_rank + 1) * count // ranks]


class Loader:
    """The microbatches of each step, without end; it knows how far it is."""

    def __init__(self, config: Config, dims: Dims) -> None:
        self.config, self.dims, self.taken = config, dims, 0

    def __iter__(self) -> Iterator[list[dict[str, Tensor]]]:
        training = self.config.training
        texts = documents(training.documents, self.config.model.longest)
        steps = groups(texts, training.microbatches, training.rows, training.seed)
        for step in islice(steps, self.taken, None):
            self.taken += 1
            yield [pad(group, torch.device("cpu")) for group in self.dims.share(step)]


class Metrics:
    """Numbers of steps, shown and kept by the first rank every few steps; until then they stay on the device."""

    def __init__(self, config: TrainingConfig) -> None:
        self.every, self.file = config.log_every, Path(config.folder) / "metrics.jsonl"
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.tokens, self.began = [], time.perf_counter()

    def add(self, number: int, result: gc.StepResult, norm: Tensor, rate: float) -> None:
        self.tokens.append(result.tokens["loss"])
        if number % self.every == 0 and self.first:
            speed = int(sum(self.tokens) / (time.perf_counter() - self.began))
            seen = {"step": number, "loss": float(result.loss), "norm": float(norm), "rate": rate, "tokens/s": speed}
            print("  ".join(f"{name} {value:.6g}" for name, value in seen.items()), flush=True)
            with self.file.open("a") as file:
                file.write(json.dumps(seen) + "\n")
            self.tokens, self.began = [], time.perf_counter()


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits, batch["labels"])


class Job:
    def __init__(self, config: Config) -> None:
        training = config.training
        self.config, self.folder = config, Path(training.folder)
        dims = Dims.of(config.parallel)
        self.loader = Loader(config, dims)
        with torch.device("meta"):
            self.model = GPT(**vars(config.model))
        self.step = gc.compile_train_step(self.model, loss_fn, plan=dims.plan)
        self.step.compile(next(iter(Loader(config, dims)))[0])
        self.optimizer = torch.optim.AdamW(self.step.parameters(), training.rate, betas=(0.9, 0.95))
        steps, warmup = training.steps, training.warmup
        self.rates = LambdaLR(self.optimizer, lambda done: min((done + 1) / warmup, (steps - done) / steps))
        self.metrics, self.saving = Metrics(training), None

    def train_step(self, microbatches: list[dict[str, Tensor]]) -> None:
        result = self.step(microbatches)
        norm = gc.clip_grad_norm_(self.step, self.config.training.max_norm)
        self.metrics.add(self.step.stats.steps, result, norm, self.rates.get_last_lr()[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rates.step()

    def train(self) -> None:
        self.load_or_begin()
        for microbatches in islice(self.loader, self.config.training.steps - self.loader.taken):
            self.train_step(microbatches)
            if self.step.stats.steps % self.config.training.save_every == 0:
                self.save()
        if self.saving is not None:
            self.saving.result()

    def save(self) -> None:
        """In the background, while it trains on."""
        folder = self.folder / f"step_{self.step.stats.steps:06d}"
        state = {"rates": self.rates.state_dict(), "taken": self.loader.taken}
        self.saving = gc.checkpoint.save_async(self.step, folder, self.optimizer, state)

    def load_or_begin(self) -> None:
        for folder in sorted(self.folder.glob("step_" + 6 * "[0-9]"))[-1:]:
            state = gc.checkpoint.load(self.step, folder, self.optimizer)
            self.rates.load_state_dict(state["rates"])
            self.loader.taken = state["taken"]
        self.step.materialize(seed=self.config.training.seed)  # what has values keeps them


def main() -> int:
    Job(reduce(Config.changed, sys.argv[1:], Config())).train()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
