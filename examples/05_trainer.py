"""A whole trainer around the four lines: data, evaluation, checkpoints, going on, a log. One text at every layout.

    python examples/05_trainer.py                                            this process alone
    torchrun --nproc-per-node 2 examples/05_trainer.py                       two stages
    torchrun --nproc-per-node 4 examples/05_trainer.py --data-ranks 2        two pipelines of two stages

Nothing here asks where it runs; `place.py` does. Stop it and start it again, at another layout if you like: it goes on
from its last checkpoint. Programs are saved beside it, so that a later start at the same layout compiles nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

import torch
from byte_gpt import GPT
from place import Place, place
from stdlib_text import documents, groups, pad
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import register_dataclass

import graphcomp as gc


@dataclass(frozen=True)
class Config:
    steps: int = 60
    microbatches: int = 4  # in a step, over all data ranks
    rows: int = 4  # documents in a microbatch
    documents: int = 2000  # a tenth of them is held out
    longest: int = 128  # bytes of a document
    width: int = 64
    blocks: int = 3
    dropout: float = 0.0
    rate: float = 3e-3
    log_every: int = 5
    evaluate_every: int = 20
    save_every: int = 20
    folder: str = "runs/trainer"
    backend: str = "inductor"
    data_ranks: int = 1
    parameters: str = "replicate"
    schedule: str = "1f1b"
    seed: int = 0


@dataclass
class Output:
    loss: gc.TokenLoss


register_dataclass(Output)


class Model(nn.Module):
    """Your model, and how it makes its batches."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.gpt = GPT(config.width, 4, config.blocks, config.longest, config.dropout)

    def prepare_batch(self, microbatches: list[list[bytes]]) -> list[dict[str, Tensor]]:
        """Each padded to its own longest document."""
        return [pad(texts, self.device) for texts in microbatches]

    def forward(self, batch: dict[str, Tensor]) -> Output:
        return Output(gc.token_loss(self.gpt(batch["tokens"]), batch["labels"]))


class Trainer:
    def __init__(self, config: Config, where: Place) -> None:
        self.config, self.where, self.folder = config, where, Path(config.folder)
        texts, size = documents(config.documents, config.longest), (config.microbatches, config.rows, config.seed)
        cut = len(texts) // 10
        self.data = groups(texts[cut:], *size)  # the same at every layout
        self.held_out = list(islice(groups(texts[:cut], *size), 2))  # in two calls
        torch.manual_seed(config.seed)  # of dropout
        self.model = self.compiled()
        self.model.step.compile(self.model.prepare_batch(self.held_out[0])[0])  # then it is known who owns what
        self.optimizer = torch.optim.AdamW(self.model.parameters(), config.rate)
        self.rates = LambdaLR(self.optimizer, lambda done: min((done + 1) / 5, 1 - done / config.steps))

    def compiled(self) -> gc.CompiledModel[list[list[bytes]], list[dict[str, Tensor]]]:
        """Built without memory; with the programs of an earlier start, if they are of this model and this layout."""
        with torch.device("meta"):
            model = Model(self.config, self.where.device)
        try:
            return gc.compile(model, plan=self.where.plan, saved=self.folder / "programs")
        except gc.errors.GraphcompError as error:  # on all ranks
            self.log(compiling=error.got or error.what)
            return gc.compile(model, plan=self.where.plan)

    def run(self) -> None:
        step, done, began = self.model.step, self.start(), time.perf_counter()
        for number, microbatches in enumerate(islice(self.data, done, self.config.steps), done + 1):
            self.optimizer.zero_grad()
            batch = self.model.prepare_batch(self.where.share(microbatches))
            out = self.model.forward(batch)
            out.loss.backward()
            norm = gc.clip_grad_norm_(step, 1.0)
            self.optimizer.step()
            self.rates.step()
            if number % self.config.log_every == 0:
                seen = out.result.to_floats()  # here the loop waits for the device
                speed = self.config.log_every * seen["tokens/loss"] / (time.perf_counter() - began)
                self.log(step=number, loss=seen["loss"], norm=float(norm), tokens_per_second=round(speed))
            if number % self.config.evaluate_every == 0:
                self.log(step=number, held_out=self.evaluate())
            if number % self.config.save_every == 0 or number == self.config.steps:
                self.save(number)
            if number % self.config.log_every == 0:
                began = time.perf_counter()
        self.log(done=step.stats.steps, held_out=self.evaluate(), captures=step.stats.traces)

    def evaluate(self) -> float:
        """The loss over all tokens that were held out."""
        batches = [self.model.prepare_batch(self.where.share(microbatches)) for microbatches in self.held_out]
        with torch.no_grad():
            return gc.combine([self.model.forward(batch).result for batch in batches]).to_floats()["loss"]

    def save(self, number: int) -> None:
        folder = self.folder / f"step_{number:06d}"
        gc.checkpoint.save(self.model.step, folder, self.optimizer, extra=self.rates.state_dict())
        self.model.step.save(self.folder / "programs")

    def start(self) -> int:
        """First values, or the last checkpoint, which may be of another layout. Returns how many steps are done."""
        found = sorted(self.folder.glob("step_" + 6 * "[0-9]"))
        for folder in found[-1:]:
            self.rates.load_state_dict(gc.checkpoint.load(self.model.step, folder, self.optimizer))
            self.log(going_on_from=str(folder))
        self.model.step.materialize(seed=self.config.seed)  # what has values keeps them
        return self.model.step.stats.steps

    def log(self, **numbers: object) -> None:
        self.where.log(self.folder / "log.jsonl", **numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    config = Config(**vars(parser.parse_args()))
    options = {"parameters": config.parameters, "schedule": config.schedule, "backend": config.backend}
    with place(config.data_ranks, **options, quiet=True) as where:
        Trainer(config, where).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
