"""Train on packed documents: no padding, no dense mask, and exactly the numbers of the documents run alone.

    python examples/04_packed_documents.py           two pipeline stages, in two processes on this machine

A microbatch is a pack: documents one behind the other, of any number and any lengths. Embeddings, norms, projections
and the loss work on its tokens, so nothing is spent on padding. Attention alone needs the boundaries. It gets them as a
table of (documents, longest): row d says where the tokens of document d stand in the pack. Gathered by that table the
documents are rows of a batch, on which plain causal attention stays within each of them. No mask exists, and no value
of the program has two dimensions of sequence length.

On a GPU the same boundaries go to a kernel that takes them as they are: cumulative lengths to a variable-length flash
attention (wrapped as a custom operator), or document ids to the mask function of flex attention. The rest, packing and
loss, stays as it is here. A mask of (tokens, tokens) that forward makes from the document ids gives the same numbers,
but is kept for the backward of each stage.

It ends with a check: loss and gradients of a step of packs against those of each document alone. Exit code 1 if they
differ or the loss did not fall.
"""

from __future__ import annotations

import argparse
import copy
import io
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores

import torch
import torch.nn.functional as F
from stdlib_text import IGNORED, VOCAB, documents
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc

# ------------------------------------------------------------------ the data


def pack(texts: list[bytes]) -> dict[str, Tensor]:
    """Documents one behind the other.

    tokens, labels, documents, positions: (tokens,), int64. The label of a place is the byte that comes next; positions
    begin anew in each document. table: (documents, longest), the places of each document's tokens; what a row has left
    lies behind its document, where nobody looks.
    """
    lengths = [len(text) for text in texts]
    values = [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts]
    table = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
    start = 0
    for row, length in zip(table, lengths, strict=True):
        row[:length] = torch.arange(start, start + length)
        start += length
    return {
        "tokens": torch.cat([F.pad(value[:-1], (1, 0)) for value in values]),  # 0 begins each document
        "labels": torch.cat(values),
        "documents": torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)]),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "table": table,
    }


def steps(texts: list[bytes], microbatches: int, capacity: int, seed: int) -> Iterator[list[list[bytes]]]:
    """Without end: the documents of each microbatch of a step, as many as fit into `capacity` tokens."""
    order = random.Random(seed)
    while True:
        found: list[list[bytes]] = []
        for _ in range(microbatches):
            group: list[bytes] = []
            while sum(map(len, group)) + len(text := order.choice(texts)) <= capacity:
                group.append(text)
            found.append(group)
        yield found


# ------------------------------------------------------------------ the model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        """x: (tokens, width). places: of each token among the rows of the table, one behind the other."""
        rows = self.qkv(x).index_select(0, table.flatten()).view(*table.shape, 3, self.heads, -1)
        q, k, v = rows.permute(2, 0, 3, 1, 4)  # each (documents, heads, longest, width of a head)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(table.numel(), -1).index_select(0, places))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table, places)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int, longest: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        places = documents * table.shape[1] + positions
        x = self.embed(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, table, places)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits, batch["labels"])


# ------------------------------------------------------------------ the run


def build(options: argparse.Namespace) -> tuple[GPT, Iterator[list[list[bytes]]]]:
    torch.manual_seed(options.seed)
    texts = documents(limit=4000, longest=options.longest)
    model = GPT(options.width, 4, options.blocks, options.longest)
    return model, steps(texts, options.microbatches, options.capacity, options.seed)


def train(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """What each of the two processes runs: the usual loop."""
    model, data = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(mesh=mesh, backend=options.backend))
    log = sys.stdout if rank == 0 else io.StringIO()  # every rank knows the loss; one prints it
    losses, began, tokens = [], time.perf_counter(), 0
    for number in range(options.steps):
        result = step([pack(group) for group in next(data)])
        gc.clip_grad_norm_(step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss))
        tokens += int(result.tokens["loss"])
        if number == 0:  # which captured and compiled
            began, tokens = time.perf_counter(), 0
        if number % 10 == 0:
            print(f"step {number:4d}   loss {losses[-1]:.3f}", file=log, flush=True)
    speed = tokens / (time.perf_counter() - began)
    return {"losses": losses, "speed": speed, "traces": step.stats.traces, "programs": step.stats.programs}


def alone(model: GPT, groups: list[list[bytes]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain PyTorch, one document at a time: the sum of all token losses, divided by the number of all tokens."""
    model = copy.deepcopy(model)
    batches = [pack([text]) for group in groups for text in group]
    count = sum((batch["labels"] != IGNORED).sum() for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch), labels, reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters()}


def check(options: argparse.Namespace) -> float:
    """A step of packs beside its documents alone, in double precision; yields the largest relative difference."""
    model, data = build(options)
    model, groups = model.double(), next(data)
    loss, gradients = alone(model, groups)
    plan = gc.Plan(stages=2, backend="eager", quiet=True)
    result, found = gc.testing.run_virtual(model, loss_fn, [pack(group) for group in groups], plan=plan)
    lengths = ", ".join("+".join(str(len(text)) for text in group) for group in groups)
    print(
        f"packs of {lengths} tokens, and the documents alone: the loss, and the norms of the gradients that differ most"
    )
    rows = [
        (float((found[name] - gradient).norm() / gradient.norm()), name, found[name].norm(), gradient.norm())
        for name, gradient in gradients.items()
    ]
    rows.sort(key=lambda row: -row[0])
    rows.insert(0, (float(abs(result.loss - loss) / loss), "loss", result.loss, loss))
    for difference, name, packed, separate in rows[:6]:
        print(f"  {name:30} {float(packed):.12f}   {float(separate):.12f}   relative difference {difference:.0e}")
    return max(difference for difference, *_ in rows)


def main() -> int:
    options = parse()
    first, _ = gc.testing.run_ranks(train, 2, options)
    losses = first["losses"]
    start, end = sum(losses[:3]) / 3, sum(losses[-5:]) / 5
    made = f"{first['traces']} capture(s), {first['programs']} compiled programs on the first rank"
    print(
        f"mean loss of the first 3 steps {start:.3f}, of the last 5 {end:.3f}; {first['speed']:,.0f} tokens/s; {made}"
    )
    difference = check(options)
    learned, same = end < 0.8 * start, difference < 1e-10
    if not learned:
        print("the loss did not fall clearly")
    if not same:
        print("a pack differs from its documents alone")
    return 0 if learned and same else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=4, help="packs in a step")
    parser.add_argument("--capacity", type=int, default=512, help="most tokens of a pack")
    parser.add_argument("--longest", type=int, default=256, help="bytes of a document")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
