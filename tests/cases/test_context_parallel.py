"""Sequences that are split over ranks by the model's own collectives: equal to one process, whatever the parts are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.errors import AgreementError
from graphcomp.testing import run_ranks

LENGTHS = ((7, 5), (4, 6))  # of the sequences of each data rank; most do not divide by two
LONGEST = 4  # the largest part of a rank
WIDTH = 8


class Attention(nn.Module):
    """Causal attention of this rank's queries over the keys and values of all ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.group = group

    def forward(self, x: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
        h = self.norm(x)
        kv = self.kv(h)
        if self.group is not None:
            kv = gc.collectives.all_gather_uneven(kv, self.group, counts, LONGEST)
        keys, values = kv.chunk(2, -1)
        unseen = torch.arange(kv.shape[0])[None, :] > positions[:, None]
        scores = (self.q(h) @ keys.T).masked_fill(unseen, -torch.inf)
        return x + self.out(scores.softmax(-1) @ values)


class Model(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList(Attention(group) for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, counts)
        return self.head(x)


def build(group: Any = None) -> Model:
    torch.manual_seed(0)
    return Model(group).double()


def loss_fn(output: Tensor, batch: Any) -> Any:
    loss = gc.token_loss(output, batch["labels"])
    return loss, {"rows": gc.metric(batch["tokens"].shape[0] * torch.ones(()), "sum")}


def sequence(data_rank: int, number: int) -> dict[str, Tensor]:
    """A whole sequence. Its last half has few labels, so that ranks count very different numbers of tokens."""
    generator = torch.Generator().manual_seed(10 * data_rank + number)
    length = LENGTHS[data_rank][number]
    tokens, labels = torch.randint(11, (2, length), generator=generator)
    labels[length // 2 : length - number] = -100
    return {"tokens": tokens, "labels": labels, "positions": torch.arange(length), "counts": torch.tensor([length])}


def part(whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The first rank has the longer part."""
    length = whole["tokens"].shape[0]
    middle = -(-length // 2)
    mine = slice(0, middle) if rank == 0 else slice(middle, length)
    own = {name: whole[name][mine] for name in ("tokens", "labels", "positions")}
    return {**own, "counts": torch.tensor([middle, length - middle])}


def reference(data_ranks: int) -> tuple[float, dict[str, Tensor]]:
    model = build()
    sequences = [sequence(d, n) for d in range(data_ranks) for n in range(2)]
    total = torch.stack([loss_fn(model(**_inputs(s)), s)[0].total for s in sequences]).sum()
    count = sum(int((s["labels"] != -100).sum()) for s in sequences)
    (total / count).backward()
    return (total / count).item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def run(rank: int, axes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = build(mesh["cp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(mesh=mesh, quiet=True, deadline=60.0, **options))
    data_rank = mesh.get_local_rank("dp") if "dp" in axes else 0
    for _ in range(2):
        optimizer.zero_grad()
        result = step([part(sequence(data_rank, n), mesh.get_local_rank("cp")) for n in range(2)])
        norm = gc.clip_grad_norm_(step, 1e9)
        optimizer.step()
    gradients = {n: p.grad for n, p in step.named_parameters() if p.grad is not None}
    return {
        "loss": result.loss.item(),
        "tokens": result.tokens["loss"].item(),
        "rows": result.metrics["rows"].item(),
        "norm": norm.item(),
        "gradients": {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in gradients.items()},
        "explained": step.explain(),
        "traces": step.stats.traces,
    }


def compare(found: list[dict[str, Any]], data_ranks: int) -> None:
    loss, gradients = reference(data_ranks)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    seen = set()
    for one in found:
        assert (one["loss"], one["norm"]) == (pytest.approx(loss, rel=1e-9), pytest.approx(norm, rel=1e-9))
        assert one["rows"] == sum(sum(LENGTHS[d]) for d in range(data_ranks))
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-11)
            seen.add(name)
    assert seen == set(gradients)


@pytest.mark.gloo
def test_cut_and_over_both_data_axes() -> None:
    """Axes in another order; gradients over both at once; parameters in shards over both."""
    compare(run_ranks(run, 4, {"cp": 2, "pp": 2}, {"backend": "eager"}), 1)
    compare(run_ranks(run, 4, {"cp": 2, "dp": 2}, {"backend": "eager", "parameters": "shard"}), 2)


@pytest.mark.gloo
def test_parts_of_any_lengths() -> None:
    """In one program; ranks that would have different numbers of them say so before anything meets."""
    found = run_ranks(parts_and_counts, 2)
    compare([one for one, _ in found], 1)
    assert "cp" in found[0][0]["explained"] and {one["traces"] for one, _ in found} == {1}
    text = "the mesh's axis 'cp' needs as many microbatches on every data rank: 1 on data rank 0, 2 on data rank 1"
    assert [refused for _, refused in found] == [text] * 2


def parts_and_counts(rank: int) -> tuple[dict[str, Any], str]:
    found = run(rank, {"cp": 2}, {"backend": "eager"})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    step = gc.compile_train_step(build(mesh["cp"]), loss_fn, plan=gc.Plan(mesh=mesh, backend="eager", quiet=True))
    with pytest.raises(AgreementError) as caught:
        step([part(sequence(0, n), rank) for n in range(1 + rank)])
    return found, f"{caught.value.what}: {caught.value.got}"
