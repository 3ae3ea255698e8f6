"""Models that `parallelize_module` has laid out over tensor ranks: equal to the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphcomp as gc
from graphcomp.errors import AgreementError, StepError
from graphcomp.testing import run_ranks

WIDTH, HEADS, CLASSES, INNER = 8, 4, 12, 24
Shapes = Sequence[tuple[int, int]]  # of the microbatches
SHAPES: Shapes = ((4, 6), (2, 4))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            layer(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, blocks: int, inner: int = INNER) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(blocks: int = 2, inner: int = INNER) -> GPT:
    torch.manual_seed(0)
    return GPT(blocks, inner).double()


def laid_out(
    mesh: DeviceMesh, sequence: bool, classes: bool, blocks: int = 2, make: Callable[[int], GPT] = build
) -> GPT:
    """sequence: activations between the layers are in parts of the sequence. classes: logits stay in parts."""
    between = Shard(1) if sequence else Replicate()
    inside = (
        {
            name: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            for name in ("attn", "mlp")
        }
        | {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        if sequence
        else {}
    )
    logits = {"output_layouts": Shard(-1), "use_local_output": False} if classes else {"output_layouts": Replicate()}
    outside: dict[str, Any] = {"head": ColwiseParallel(input_layouts=between, **logits)}
    if sequence:
        outside |= {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        outside |= {"norm": SequenceParallel()}
    model = parallelize_module(make(blocks), mesh, outside)
    for block in model.blocks:
        columns = {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp.up")}
        rows = {name: RowwiseParallel(output_layouts=between) for name in ("attn.o", "mlp.down")}
        parallelize_module(block, mesh, {**inside, **columns, **rows})
    return model


def loss_fn(logits: Tensor, batch: Any) -> Any:
    return gc.token_loss(logits, batch["labels"])


def batch_of(number: int, shapes: Shapes = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(CLASSES, (2, *shapes[number]), generator=generator)
    labels[0, : 2 + number] = -100
    return {"tokens": tokens, "labels": labels}


def train(model: nn.Module, step: Any) -> list[tuple[float, float, dict[str, Tensor]]]:
    """Two optimizer steps: loss, gradient norm, and gradients in whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss, norm, named = step()
        found.append((loss, norm, {n: p.grad.clone() for n, p in named() if p.grad is not None}))
        optimizer.step()
    return [(loss, norm, {n: whole(g) for n, g in grads.items()}) for loss, norm, grads in found]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(blocks: int, shapes: Shapes, inner: int) -> list[tuple[float, float, dict[str, Tensor]]]:
    model = build(blocks, inner)
    batches = [batch_of(number, shapes) for number in range(len(shapes))]

    def step() -> Any:
        losses = [loss_fn(model(batch["tokens"]), batch) for batch in batches]
        loss = torch.stack([one.total for one in losses]).sum() / sum(int(one.tokens) for one in losses)
        loss.backward()
        return loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item(), model.named_parameters

    return train(model, step)


def run(
    rank: int,
    axes: dict[str, int],
    sequence: bool,
    classes: bool,
    blocks: int = 2,
    backend: Any = "eager",
    parameters: Sequence[Any] = ("replicate",),
    shapes: Shapes = SHAPES,
    inner: int = INNER,
) -> Any:
    """parameters: how data ranks hold them, in the first step and in the next."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = laid_out(mesh["tp"], sequence, classes, blocks, partial(build, inner=inner))
    plans = [gc.Plan(mesh=mesh, backend=backend, parameters=one, quiet=True, deadline=60.0) for one in parameters]
    steps = [gc.compile_train_step(model, loss_fn, plan=plan) for plan in plans]
    left = iter([steps[0], steps[-1]])
    numbers = range(len(shapes)) if "dp" not in axes else [mesh.get_local_rank("dp")]

    def step() -> Any:
        compiled = next(left)
        loss = compiled([batch_of(number, shapes) for number in numbers]).loss.item()
        return loss, gc.clip_grad_norm_(compiled, 0.5).item(), compiled.named_parameters

    found = train(model, step)
    for name, parameter in steps[-1].named_parameters():
        assert isinstance(parameter, DTensor) == isinstance(parameter.grad, DTensor), name
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements, name
    return found, steps[-1].explain(), steps[-1].stats.traces


def compare(found: list[Any], blocks: int = 2, shapes: Shapes = SHAPES, inner: int = INNER, programs: int = 1) -> None:
    expected, seen = reference(blocks, shapes, inner), set()
    for steps, explained, traced in found:
        assert traced == programs and "tensor ranks" in explained
        for (loss, norm, gradients), (true_loss, true_norm, true_gradients) in zip(steps, expected, strict=True):
            assert (loss, norm) == (pytest.approx(true_loss, rel=1e-9), pytest.approx(true_norm, rel=1e-9))
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, true_gradients[name], rtol=1e-8, atol=1e-11)
                seen.add(name)
    assert seen == set(expected[0][2])


@pytest.mark.gloo
@pytest.mark.inductor
def test_compiled_where_no_size_divides() -> None:
    """Neither lengths nor the inner size of the perceptron."""
    sizes = {"shapes": ((4, 5), (2, 7)), "inner": 25}
    compare(run_ranks(partial(run, **sizes), 2, {"tp": 2}, True, True, 1, "inductor"), blocks=1, **sizes)


@pytest.mark.gloo
def test_cut_with_parts_of_sequences_and_classes() -> None:
    """Of any length: one that divides, one that does not, and one that leaves nothing for the second rank. The inner
    size does not divide."""
    sizes = {"shapes": ((4, 6), (2, 5), (2, 1)), "inner": 11}
    compare(run_ranks(partial(run, **sizes), 4, {"pp": 2, "tp": 2}, True, True), programs=3, **sizes)


class Small(nn.Module):
    """A plain layer before two that are laid out; the output stays a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x)).tanh())


def small(mesh: DeviceMesh, seed: int = 0) -> Small:
    torch.manual_seed(0)
    model = Small()
    torch.manual_seed(seed)
    nn.init.normal_(model.norm.weight)
    layers = {"first": ColwiseParallel(), "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    return parallelize_module(model, mesh, layers)


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def refused(mesh: DeviceMesh) -> list[str]:
    plan = gc.Plan(mesh=mesh, backend="eager", quiet=True, deadline=60.0)
    rank = mesh.get_local_rank("tp")
    step = gc.compile_train_step(small(mesh["tp"]), squares, plan=plan)
    calls: list[Any] = [
        lambda: gc.compile_train_step(small(mesh["tp"], seed=rank), squares, plan=plan)([torch.ones(2, 6, 4)]),
        lambda: step([torch.ones(2 + 2 * rank, 6, 4)]),
        lambda: step([torch.ones(2, 6, 4)], outputs="local"),
    ]
    heard = []
    for call in calls:
        with pytest.raises((AgreementError, StepError)) as caught:
            call()
        heard.append(f"{caught.value.what}: {caught.value.expected} / {caught.value.got}")
    return heard


def over_data_ranks(rank: int) -> Any:
    found = run(rank, {"dp": 2, "tp": 2}, False, False, blocks=1)
    rows = run(rank, {"dp": 2, "tp": 2}, False, False, blocks=1, parameters=("replicate", "shard"))
    return found, rows, refused(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


@pytest.mark.gloo
def test_over_data_ranks() -> None:
    """Each data rank has one of the microbatches. Tensor ranks add nothing to the count, and have much in common.

    What the optimizer holds by then is split with the parameters.
    """
    found = run_ranks(over_data_ranks, 4)
    compare([steps for steps, _, _ in found], blocks=1)
    compare([steps for _, steps, _ in found], blocks=1)
    for _, _, (plain, sizes, output) in found:
        assert "'norm.weight', a plain tensor and so the same on all tensor ranks: checksum" in plain
        assert "batch f32[2, 6, 4]" in sizes and "batch f32[4, 6, 4]" in sizes
        assert "the model's output cannot be returned: it holds a DTensor" in output


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "flatten before": lambda h: h.flatten(0, 1),
    "expand": lambda h: h[:, :, None].expand(-1, -1, 2, -1).flatten(2, 3),
    "cat along": lambda h: torch.cat([h, 2 * h], -1),
    "cat across": lambda h: torch.cat([h, 2 * h], 1),
    "slice": lambda h: h[..., 3:],
    "pad": lambda h: F.pad(h, (1, 0)),
    "repeat": lambda h: h.repeat(1, 1, 2),
    "softmax": lambda h: h.softmax(-1),
    "variance": lambda h: h.var(-1),
    "running sum": lambda h: h.cumsum(-1),
    "roll": lambda h: h.roll(1, -1),
    "product": lambda h: h.transpose(1, 2) @ h,
}
ROWS: dict[str, Callable[[Any], Any]] = {
    "split": lambda h: h.unflatten(-1, (2, 2)).transpose(1, 2),
    "expand rows": lambda h: h[:, :, None].expand(-1, -1, 3, -1),
    "cat rows": lambda h: torch.cat([h, h + 1], 1),
    "last row": lambda h: h[:, -1],
    "mean over rows": lambda h: h.mean(1),
    "softmax over rows": lambda h: h.softmax(1),
    "running sum over rows": lambda h: h.cumsum(-2),
}


class Uneven(nn.Module):
    """15 columns, and any number of rows, in parts that operators on DTensors change the shape of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 15), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wide, long = self.up(x), self.down(x)
        found = {n: f(wide) for n, f in COLUMNS.items()} | {n: f(long) for n, f in ROWS.items()}
        return {name: whole(y) for name, y in found.items()}


def each_place_counts(output: dict[str, Tensor], batch: Any) -> Any:
    ramps = {name: torch.arange(y.numel(), dtype=y.dtype).view(y.shape).cos() for name, y in output.items()}
    return {name: gc.mean_loss((y.sin() * ramps[name]).sum()) for name, y in output.items()}


def uneven() -> Uneven:
    torch.manual_seed(0)
    return Uneven().double()


def uneven_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, 4, dtype=torch.float64, generator=generator) for length in (5, 1)]


def over_parts(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    model = parallelize_module(uneven(), mesh, {"up": ColwiseParallel(use_local_output=False), "down": rows})
    step = gc.compile_train_step(model, each_place_counts, plan=gc.Plan(mesh=mesh, backend="eager", quiet=True))
    losses = {name: loss.item() for name, loss in step(uneven_batches()).losses.items()}
    return losses, {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.gloo
def test_operators_on_parts_that_do_not_divide() -> None:
    model, expected = uneven(), dict.fromkeys((*COLUMNS, *ROWS), 0.0)
    for batch in uneven_batches():
        for name, loss in each_place_counts(model(batch), batch).items():
            (loss.value / 2).backward(retain_graph=True)
            expected[name] += loss.value.item() / 2
    for losses, gradients in run_ranks(over_parts, 2):
        assert losses == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-11)
