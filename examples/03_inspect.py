"""Look at every program on the way from a model to the instructions of each rank.

    python examples/03_inspect.py                    one process; nothing is sent

`GraphCompiler` runs the stations one by one. What each returns prints itself.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import graphcomp as gc


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits, batch["labels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b"])
    options = parser.parse_args()

    torch.manual_seed(0)
    tokens = torch.randint(16, (2, 5))
    example = {"tokens": tokens, "labels": tokens}
    plan = gc.Plan(stages=options.stages, schedule=options.schedule, backend="eager", quiet=True)
    compiler = gc.GraphCompiler(Net(), loss_fn, plan)

    show("1. the joint program: forward, loss and backward of one microbatch", compiler.capture(example))
    show("2. cut into stages, and what crosses", compiler.partition())
    show("3. what each rank executes in a step", compiler.lower())
    calls = [f"stage {stage} {kind}" for _, stage, kind in compiler.compile()]
    show("4. compiled", "\n".join(calls))


def show(title: str, program: object) -> None:
    print(f"{'=' * 100}\n{title}\n{'=' * 100}\n{program}\n")


if __name__ == "__main__":
    main()
