"""Four processes: built on meta, trained, saved as two stages on two data ranks, and gone on with at other layouts."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphcomp as gc
from graphcomp.testing import run_ranks
from tests.checkpoint.model import Decoder, Trainer, batches, decoder, meta_decoder, step_of
from tests.sharing import shared_captures

pytestmark = pytest.mark.gloo

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "pp2 x dp2": ((2, 2), ("pp", "dp")),
    "pp4": ((4,), ("pp",)),
    "dp4": ((4,), ("dp",)),
}
SAVED = ("replicate", "shard")
OTHERS = (("pp4", "replicate"), ("dp4", "shard"))
SEED = 5


class RealBytes(TorchDispatchMode):
    """Within, the most bytes of memory that were held at once by numbers that operations made; meta counts nothing.

    Bytes that ranks tell each other do not count: a process group lets go of them when it comes to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef

        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
            if is_plain and tensor.device.type != "meta" and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(step: gc.CompiledStep) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in step.state_dict().items()}


def local_bytes(tensor: Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()


class Job:
    """What a rank does at one layout."""

    def __init__(self, layout: str, parameters: str) -> None:
        shape, names = LAYOUTS[layout]
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        ranks = self.mesh["dp"].size() if "dp" in names else 1
        place = self.mesh["dp"].get_local_rank() if "dp" in names else 0
        self.place = slice(place * 4 // ranks, (place + 1) * 4 // ranks)
        self.options = {"mesh": self.mesh, "parameters": parameters}

    def trainer(self, build: Callable[[], Decoder], kind: Any = torch.optim.AdamW) -> Trainer:
        step = step_of(build(), **self.options)
        step.compile(batches(0)[0])
        return Trainer(step, kind)


def message(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def built(job: Job) -> dict[str, Any]:
    """A model on meta: the errors before it has memory, the memory it takes, and its first values."""
    model = meta_decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    same = [id(p) for p in model.parameters()]
    step = step_of(model, **job.options)
    found: dict[str, Any] = {"uncut": message(lambda: step.state_dict())}
    rank = step.layout.place
    found["seeds"] = message(lambda: step.materialize(seed=rank))
    step.compile(batches(0)[0])
    found["early"] = message(lambda: step(batches(0)[job.place]))
    before = torch.get_rng_state()
    with RealBytes() as counted:
        step.materialize(seed=SEED)
    found["untouched"] = torch.equal(before, torch.get_rng_state())
    owned = {n: local_bytes(p) for n, p in step.named_parameters()}
    owned |= {n: local_bytes(b) for n, b in model.named_buffers() if not b.is_meta}
    found["peak"] = counted.peak
    found["owned"] = sum(owned.values())
    found["largest"] = max(p.numel() * p.element_size() for p in model.parameters())
    found["values"] = whole(step)
    found["elsewhere"] = sorted(name for name, p in model.named_parameters() if p.is_meta)
    found["mine"] = sorted(name for name, _ in step.named_parameters())
    assert same == [id(p) for p in model.parameters()] == [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert model.head.weight is model.embed.weight
    found["loss"] = float(step(batches(0)[job.place]).loss)
    return found


def saved(job: Job, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more; and a failure of one rank while the next is written."""
    torch.manual_seed(11)
    step = step_of(meta_decoder(), **job.options)
    step.materialize(seed=SEED)  # with two stages: once it is cut
    assert all(p.is_meta for p in step.model.parameters())
    step.compile(batches(0)[0])
    first, trainer = whole(step), Trainer(step)
    trainer.train(range(2), job.place)
    trainer.save(folder)
    later = gc.checkpoint.save_async(trainer.step, folder.with_name(folder.name + " async"), trainer.optimizer, "extra")
    found: dict[str, Any] = {"first values": first, "losses": trainer.train(range(2, 4), job.place)}
    later.result()
    found["values"] = whole(trainer.step)
    rank = trainer.step.layout.place
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(dcp.FileSystemWriter, "write_data", broken)
        found["failed"] = message(lambda: trainer.save(folder))
        later = gc.checkpoint.save_async(trainer.step, folder)
        found["failed later"] = message(later.result)
    found["steps"] = trainer.step.stats.steps
    return found


def broken(*_: Any) -> None:
    raise OSError("no space left")


def gone_on(job: Job, folder: Path, build: Callable[[], Decoder] = meta_decoder) -> dict[str, Any]:
    """From a checkpoint, two more steps."""
    trainer = job.trainer(build)
    trainer.load(folder)
    steps = trainer.step.stats.steps
    return {"steps": steps, "losses": trainer.train(range(2, 4), job.place), "values": whole(trainer.step)}


def undropped() -> Decoder:
    """Trains without dropout, whose masks one process draws otherwise than several do."""
    return meta_decoder().eval()


def weights(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """From one file of whole tensors, and from a dict; refused where one rank has another file."""
    state = decoder(seed=3).state_dict()
    file = folder / f"weights of {rank}.pt"
    torch.save(state, file)
    step = step_of(meta_decoder(), **job.options)
    found = {"uncut": message(lambda: gc.checkpoint.load_weights(step, file))}
    step.compile(batches(0)[0])
    short = folder / f"short of {rank}.pt"
    torch.save({name: one for name, one in state.items() if rank != 1 or name != "norm.bias"}, short)
    found["short"] = message(lambda: gc.checkpoint.load_weights(step, short))
    found["still on meta"] = message(lambda: step(batches(0)[job.place]))
    gc.checkpoint.load_weights(step, file)
    found["equal"] = all(torch.equal(tensor, state[name]) for name, tensor in whole(step).items())
    other = decoder(seed=4).state_dict()
    step.load_state_dict(other)
    found["equal too"] = all(torch.equal(tensor, other[name]) for name, tensor in whole(step).items())
    step.load_state_dict({name: tensor.clone() for name, tensor in step.state_dict().items()})
    found["and its own"] = all(torch.equal(tensor, other[name]) for name, tensor in whole(step).items())
    return found


def everything(rank: int, folder: str) -> dict[Any, Any]:
    with shared_captures():
        return at_all_layouts(rank, Path(folder))


def at_all_layouts(rank: int, place: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for mode in SAVED:
        job = Job("pp2 x dp2", mode)
        found["built", mode] = built(job)
        found["saved", mode] = saved(job, place / mode)
        torch.manual_seed(100 + rank)
        found["unbroken", mode] = gone_on(job, place / mode)
        found["async", mode] = sorted(path.name for path in (place / f"{mode} async").iterdir())
    found["weights"] = weights(job, place, rank)
    for layout, mode in OTHERS:
        torch.manual_seed(200 + rank)
        build = decoder if layout == "pp4" else meta_decoder
        found["gone on", layout, mode] = gone_on(Job(layout, mode), place / "shard", build)
    found["undropped"] = gone_on(Job("pp2 x dp2", "shard"), place / "shard", undropped)
    found["momentum"] = momentum(place)
    return found


def momentum(place: Path) -> bool:
    """SGD, whose state is a DTensor or nothing: from stages and rows to other rows."""
    before = Job("pp2 x dp2", "shard")
    trainer = before.trainer(meta_decoder, functools.partial(torch.optim.SGD, momentum=0.9))
    trainer.step.materialize()
    trainer.train(range(2), before.place)
    trainer.save(place / "sgd")
    after = Job("dp4", "shard")
    other = after.trainer(meta_decoder, functools.partial(torch.optim.SGD, momentum=0.9))
    held = momenta(trainer)
    other.load(place / "sgd")
    now = momenta(other)
    return len(held) > 5 and all(torch.equal(now[name], value) for name, value in held.items())


def momenta(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.optimizer.state
    return {name: full(state[p]["momentum_buffer"]) for name, p in trainer.step.named_parameters() if p in state}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(everything, 4, str(folder), timeout=200)


@functools.cache
def alone() -> dict[str, Tensor]:
    """The first values in one process."""
    step = step_of(meta_decoder())
    step.materialize(seed=SEED)
    return whole(step)


@pytest.mark.parametrize("mode", SAVED)
def test_first_values_are_the_same_at_every_layout(ranks: list[dict[Any, Any]], mode: str) -> None:
    for rank in ranks:
        found = rank["built", mode]
        assert found["untouched"]
        for values in (found["values"], rank["saved", mode]["first values"]):
            assert all(torch.equal(tensor, alone()[name]) for name, tensor in values.items())
        assert set(found["mine"]).isdisjoint(found["elsewhere"])
        assert set(found["mine"]) | set(found["elsewhere"]) == {name for name, _ in decoder().named_parameters()}
    assert set().union(*(rank["built", mode]["values"] for rank in ranks)) == set(alone())
    assert len({rank["built", mode]["loss"] for rank in ranks}) == 1


@pytest.mark.parametrize("mode", SAVED)
def test_a_rank_takes_memory_for_what_it_owns(ranks: list[dict[Any, Any]], mode: str) -> None:
    for rank in ranks:
        found = rank["built", mode]
        assert found["owned"] <= found["peak"] <= found["owned"] + found["largest"]


def test_what_is_too_early_or_differs_is_refused_on_all_ranks(ranks: list[dict[Any, Any]]) -> None:
    for number, rank in enumerate(ranks):
        for mode in SAVED:
            assert rank["built", mode]["uncut"].startswith("StepError: it is not known yet which stage owns what")
            assert "still on the meta device" in rank["built", mode]["early"]
            assert rank["built", mode]["seeds"].startswith("AgreementError")
        found = rank["weights"]
        what = "the names do not fit the model" if number == 1 else "rank 1 could not load weights"
        assert found["short"].startswith(f"CheckpointError: {what}")
        assert "'norm.bias'" in found["short"]
        assert "still on the meta device" in found["still on meta"]
        assert (found["equal"], found["equal too"], found["and its own"]) == (True, True, True)


@pytest.mark.parametrize("mode", SAVED)
def test_going_on_equals_the_unbroken_run_bitwise(ranks: list[dict[Any, Any]], mode: str) -> None:
    for rank in ranks:
        unbroken, found = rank["saved", mode], rank["unbroken", mode]
        assert found["steps"] == 2
        assert found["losses"] == unbroken["losses"]
        assert all(torch.equal(tensor, unbroken["values"][name]) for name, tensor in found["values"].items())
        assert rank["async", mode] == [".metadata", *(f"__{i}_0.distcp" for i in range(4)), "graphcomp.pt"]


@pytest.mark.parametrize("layout", OTHERS, ids=" ".join)
def test_it_goes_on_at_another_layout(ranks: list[dict[Any, Any]], layout: tuple[str, str]) -> None:
    expected = {name: tensor for rank in ranks for name, tensor in rank["saved", "shard"]["values"].items()}
    for rank in ranks:
        found = rank["gone on", *layout]
        assert found["losses"] == pytest.approx(rank["saved", "shard"]["losses"], rel=1e-9)
        for name, tensor in found["values"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9)


def test_it_goes_on_in_one_process(ranks: list[dict[Any, Any]], folder: Path) -> None:
    trainer = Trainer(step_of(undropped()))
    trainer.load(folder / "shard")
    losses, values = trainer.train(range(2, 4)), whole(trainer.step)
    for rank in ranks:
        assert rank["undropped"]["losses"] == pytest.approx(losses, rel=1e-9)
        for name, tensor in rank["undropped"]["values"].items():
            torch.testing.assert_close(tensor, values[name], rtol=1e-6, atol=1e-9)


def test_momentum_comes_along(ranks: list[dict[Any, Any]]) -> None:
    assert all(rank["momentum"] for rank in ranks)


@pytest.mark.parametrize("mode", SAVED)
def test_a_rank_that_fails_while_saving_fails_all_and_leaves_what_was_there(
    ranks: list[dict[Any, Any]], mode: str, folder: Path
) -> None:
    for rank in ranks:
        for which in ("failed", "failed later"):
            text = rank["saved", mode][which]
            assert text.startswith("CheckpointError: the checkpoint was not written\n  where: rank 2\n  got: OSError")
        assert rank["saved", mode]["steps"] == 4
    assert not list(folder.glob("*.saving")) + list(folder.glob("*.old"))
    step = step_of(meta_decoder(0.0))
    trainer = Trainer(step)
    trainer.load(folder / mode)
    assert step.stats.steps == 2
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**2
    held = {key: value for p, own in trainer.optimizer.state.items() for key, value in own.items()}
    assert set(held) == {"step", "exp_avg", "exp_avg_sq"}
