"""Train a byte-level GPT on the source text of Python's standard library, as a compiled pipeline.

    python examples/01_train_gpt.py                              two processes on this machine: two stages
    torchrun --nproc-per-node 4 examples/01_train_gpt.py         as many stages as processes
    python examples/01_train_gpt.py --data-ranks 2               two pipelines of one stage; the same numbers
    python examples/01_train_gpt.py --processes 4 --data-ranks 2 --parameters shard

It ends with a parity table (loss and gradients of one step against eager PyTorch) and a folder `runs/...`
with the plan and every program as text. Exit code 1 if the loss did not fall or a gradient differs.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from byte_gpt import GPT
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stdlib_text import documents, steps
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphcomp as gc


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits, batch["labels"])


# ------------------------------------------------------------------ the run


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        start_processes(options.processes)
    device = start_rank()
    first = dist.get_rank() == 0
    console = Console(quiet=not first, width=None if sys.stdout.isatty() else 120)

    torch.manual_seed(options.seed)
    texts = documents(limit=4000, longest=options.longest)
    data = steps(texts, options.microbatches, options.rows, options.seed, device)
    model = GPT(options.width, 4, options.blocks, options.longest).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    stages = dist.get_world_size() // options.data_ranks
    mesh = init_device_mesh(device.type, (stages, options.data_ranks), mesh_dim_names=("pp", "dp"))
    mine = slice(mesh.get_local_rank("dp"), None, options.data_ranks)  # of a step's microbatches
    plan = gc.Plan(mesh=mesh, schedule="1f1b", parameters=options.parameters, backend=options.backend)
    step = gc.compile_train_step(model, loss_fn, plan=plan)

    check = next(data)
    console.print(f"{len(texts)} documents, {sum(p.numel() for p in model.parameters()):,} parameters, {device.type}")
    expected = eager(model, check)
    table, same = parity(step, check[mine], expected, tolerance=1e-4)
    optimizer.zero_grad()

    losses: list[float] = []
    with progress(console) as bar:
        task = bar.add_task("train", total=options.steps, shown="")
        for number in range(options.steps):
            began = time.perf_counter()
            result = step(next(data)[mine])
            gc.clip_grad_norm_(step, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result.loss))
            speed = int(result.tokens["loss"]) / (time.perf_counter() - began)
            line = f"loss {losses[-1]:.3f}   {speed:7,.0f} valid tokens/s"
            bar.update(task, advance=1, shown=line)
            if number % 10 == 0:
                console.print(f"step {number:4d}   {line}")

    folder = Path("runs") / f"train_gpt_{stages}_stages_{options.data_ranks}_data_ranks"
    step.dump(folder)
    start, end = sum(losses[:3]) / len(losses[:3]), sum(losses[-5:]) / len(losses[-5:])
    learned = end < 0.8 * start
    console.print(table)
    made = f"{step.stats.traces} capture and {step.stats.programs} compiled programs served all lengths on this rank"
    console.print(
        f"mean loss of the first 3 steps {start:.3f}, of the last 5 {end:.3f}; {made}; every program as text: {folder}/"
    )
    if not learned:
        console.print("[red]the loss did not fall clearly[/red]")
    if not same:
        console.print("[red]the compiled step differs from eager PyTorch[/red]")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if learned and same else 1


def eager(model: nn.Module, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step in plain PyTorch: sum over valid tokens / their number."""
    model = copy.deepcopy(model)
    count = sum((batch["labels"] != -100).sum() for batch in microbatches)
    total = torch.zeros((), device=count.device)
    for batch in microbatches:
        logits = model(batch["tokens"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters()}


def parity(step, microbatches, expected, tolerance: float) -> tuple[Table, bool]:
    """One compiled step against the eager one; every rank compares the parameters that it owns, sharded ones whole."""
    loss, gradients = expected
    result = step(microbatches)
    rows = [("loss", float(result.loss), float(loss), abs(float(result.loss - loss)) / float(loss))]
    for name, p in step.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        norm, other = grad.norm(), gradients[name].norm()
        rows.append((name, float(norm), float(other), float((grad - gradients[name]).norm() / other)))
    everywhere: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, rows)
    table = Table(
        "rank",
        "value",
        "compiled",
        "eager",
        "relative difference",
        title="one step, compiled and eager: the loss, and the norm of each gradient",
    )
    for rank, found in enumerate(everywhere):
        for name, mine, other, difference in found:
            table.add_row(str(rank), name, f"{mine:.6f}", f"{other:.6f}", f"{difference:.1e}")
    return table, all(row[-1] <= tolerance for found in everywhere for row in found)


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        console=console,
        disable=console.quiet,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--rows", type=int, default=4, help="documents in a microbatch")
    parser.add_argument("--longest", type=int, default=256, help="bytes of a document")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--processes", type=int, default=2, help="started here, when not under torchrun")
    parser.add_argument("--data-ranks", type=int, default=1, help="pipelines; each takes its part of the microbatches")
    parser.add_argument("--parameters", default="replicate", choices=["replicate", "shard"], help="over data ranks")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def start_processes(number: int) -> None:
    """Become torchrun with this file. One thread a process: the processes share the cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    os.execv(sys.executable, [sys.executable, *run, *sys.argv])


def start_rank() -> torch.device:
    """Join the process group; a GPU for each process of this machine if there are enough, else the CPU."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


if __name__ == "__main__":
    sys.exit(main())
