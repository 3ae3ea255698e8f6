"""Real processes over gloo: the transport changes nothing, sends what was planned, and every rank knows the result."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphcomp as gc
from graphcomp.partition.stages import Boundary
from graphcomp.runtime.program import transport
from graphcomp.runtime.program.channel import Channel
from graphcomp.testing import VirtualStep, run_ranks
from tests.zoo import ZOO
from tests.zoo.gpt import TinyGPT
from tests.zoo.reference import reference

MODELS = {2: ("gpt", "u_shape", "ragged_gpt"), 4: ("gpt", "tied_gpt", "u_shape")}
"""By the number of processes."""
NUMBERS = (5, 1)  # more and fewer microbatches than stages
WAYS = {"ProcessGroup": 0, "Channel": transport.MOST_BYTES}
"""The most bytes of a message that goes over a channel, by what all of them go over then."""


def plan_of(mesh: DeviceMesh, backend: Any = "eager") -> gc.Plan:
    return gc.Plan(mesh=mesh, backend=backend, quiet=True, deadline=60.0)


class Wire:
    """Counts what this process hands to process groups and channels, below everything of ours. ways: where to."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.received: list[tuple[str, int]] = []
        self.ways: set[str] = set()

    def __enter__(self) -> Wire:
        self.original = {(owner, name): vars(owner)[name] for owner, name in self.calls}  # as they lie there, unbound
        for (owner, name), original in self.original.items():
            setattr(owner, name, self._counting(original, owner, self.calls[owner, name]))
        return self

    def __exit__(self, *error: object) -> None:
        for (owner, name), original in self.original.items():
            setattr(owner, name, original)

    @property
    def calls(self) -> dict[tuple[type, str], list[tuple[str, int]]]:
        names = {dist.ProcessGroup: ("send", "recv"), Channel: ("send", "post")}
        return {
            (owner, one): found
            for owner, (s, r) in names.items()
            for one, found in ((s, self.sent), (r, self.received))
        }

    def _counting(self, original: Any, owner: type, found: list[tuple[str, int]]) -> Any:
        def counting(way: Any, tensors: Sequence[Tensor], *given: Any) -> Any:
            found.extend((str(one.dtype), one.nbytes) for one in tensors)
            if tensors[0].dtype is torch.float32:  # a message between stages, see `apart`
                self.ways.add(owner.__name__)
            return original.__get__(way)(tensors, *given)

        return counting


def numbers(result: gc.StepResult) -> dict[str, float]:
    """Everything that a step reports, as plain numbers."""
    found = {f"loss {name}": value for name, value in result.losses.items()}
    found |= {f"tokens {name}": value for name, value in result.tokens.items()}
    found |= {f"microbatch {i}": value for i, value in enumerate(result.microbatch_losses)}
    return {name: value.item() for name, value in {"loss": result.loss, **found}.items()}


def one_model(name: str, mesh: DeviceMesh) -> dict[str, Any]:
    case = ZOO[name]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=plan_of(mesh))
    found: dict[str, Any] = {}
    for way, number in itertools.product(WAYS, NUMBERS):
        model.zero_grad()
        batches = case.microbatches(number, 2)
        transport.MOST_BYTES = WAYS[way]
        with Wire() as wire:
            result = step(batches)
        found[f"step {number} over {way}"] = {
            "ways": wire.ways,
            "numbers": numbers(result),
            "gradients": {key: p.grad.clone() for key, p in step.named_parameters()},
            "elsewhere": [key for key, p in model.named_parameters() if p.grad is not None],
            "sent": wire.sent,
            "received": wire.received,
            "stats": vars(step.stats).copy(),
        }
    if name != "gpt":
        return found
    found["evaluation"] = numbers(step.evaluate(case.microbatches(3, 4)))
    for outputs in ("local", "all"):
        found[outputs] = step(case.microbatches(2, 3), outputs=outputs).outputs
    model.zero_grad()
    step(case.microbatches(3, 6))
    found["norm"] = gc.clip_grad_norm_(step, 0.05)
    found["clipped"] = {key: p.grad for key, p in step.named_parameters()}
    return found


def shared_in_double() -> nn.Module:
    """In double precision: in single, AdamW makes steps of pure rounding where a gradient is zero in theory."""
    return ZOO["tied_gpt"].build().double()


def train(step: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(3):
        losses.append(step(ZOO["tied_gpt"].microbatches(3, number)).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def everything(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    found: dict[str, Any] = {name: one_model(name, mesh) for name in MODELS[world_size]}
    model = shared_in_double()
    step = gc.compile_train_step(model, ZOO["tied_gpt"].loss_fn, plan=plan_of(mesh))
    losses = train(step, torch.optim.AdamW(model.parameters(), 1e-2))
    found["trained"] = losses, {key: p.detach() for key, p in step.named_parameters()}
    if world_size == 2:
        found["several"] = several(mesh)
    return found


INTERLEAVED: dict[str, Any] = {"stages": 4, "schedule": "interleaved-1f1b", "backend": "eager", "quiet": True}


def several(mesh: DeviceMesh) -> dict[str, Any]:
    """Four stages on two ranks, with a weight that the first and the last share; transfers are compared."""
    case = ZOO["tied_gpt"]
    model = case.build()
    step = gc.compile_train_step(
        model, case.loss_fn, plan=gc.Plan(mesh=mesh, check="transfers", deadline=60.0, **INTERLEAVED)
    )
    found: dict[str, Any] = {}
    for number in NUMBERS:
        model.zero_grad()
        ran = numbers(step(case.microbatches(number, 2)))
        found[f"step {number}"] = ran, {k: p.grad.clone() for k, p in step.named_parameters()}, step.stats.messages
    found["evaluation"] = numbers(step.evaluate(case.microbatches(3, 4)))
    found["outputs"] = step(case.microbatches(2, 3), outputs="all").outputs
    model.zero_grad()
    step(case.microbatches(3, 6))
    found["norm"] = gc.clip_grad_norm_(step, 0.05)
    return found


@functools.cache
def ranks(world_size: int) -> list[dict[str, Any]]:
    """What each process found: one start of them for all tests."""
    return run_ranks(everything, world_size, world_size, timeout=200)


@functools.cache
def virtual(name: str, stages: int) -> VirtualStep:
    plan = gc.Plan(stages=stages, backend="eager", quiet=True)
    return VirtualStep(ZOO[name].build(), ZOO[name].loss_fn, plan=plan)


EACH = pytest.mark.parametrize(("world_size", "name"), [(size, name) for size in MODELS for name in MODELS[size]])
WORLDS = pytest.mark.parametrize("world_size", MODELS)


def same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two or (one is not None and two is not None and torch.equal(one, two))


@pytest.mark.gloo
@EACH
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("way", WAYS)
def test_processes_equal_virtual_ranks_bitwise(name: str, world_size: int, number: int, way: str) -> None:
    ran = virtual(name, world_size).run(ZOO[name].microbatches(number, 2))
    found = [rank[name][f"step {number} over {way}"] for rank in ranks(world_size)]
    for one in found:
        assert one["ways"] == {way}
        assert one["numbers"] == numbers(ran.result)
        assert all(same(grad, ran.gradients.get(key)) for key, grad in one["gradients"].items())
        assert set(one["elsewhere"]) <= set(one["gradients"])
    assert {key for one in found for key in one["gradients"]} == set(ran.gradients)


def planned(name: str, stages: int, number: int, rank: int) -> list[int]:
    """The bytes of each payload a rank has to send, from the boundaries and the microbatches' own sizes."""
    step = virtual(name, stages)
    step.run(ZOO[name].microbatches(number, 2))
    cut = step.latest[0].specialisation.partitions[False]
    found: list[int] = []
    for one in step.latest:
        for boundaries in (cut.forward_boundaries, cut.backward_boundaries):
            if rank in boundaries:
                found += sizes(boundaries[rank], one.sizes)
    weights = dict(step.model.named_parameters())
    for key, users in cut.parameter_stages.items():
        if len(users) > 1 and rank in users:
            found += [weights[key].nbytes] * (len(users) - 1 if rank == users[0] else 1)
    return found


def apart(payloads: list[tuple[str, int]]) -> tuple[list[int], Counter[str]]:
    """The bytes of messages between stages, all of one dtype here; of what ranks exchange beside them, the dtypes."""
    messages = [size for dtype, size in payloads if dtype == "torch.float32"]
    return messages, Counter(dtype for dtype, _ in payloads if dtype != "torch.float32")


def sizes(boundary: Boundary, given: dict[str, int]) -> list[int]:
    found = []
    for value in boundary.values:
        elements = 1
        for size in value.shape:
            elements *= int(size if isinstance(size, int) else size.subs({s: given[str(s)] for s in size.free_symbols}))
        found.append(elements * value.dtype.itemsize)
    return found


@pytest.mark.gloo
@EACH
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("way", WAYS)
def test_exactly_the_planned_payloads_are_sent(name: str, world_size: int, number: int, way: str) -> None:
    sent, received = 0, 0
    for rank, found in enumerate(ranks(world_size)):
        one = found[name][f"step {number} over {way}"]
        payloads = planned(name, world_size, number, rank)
        messages, exchanges = apart(one["sent"])
        assert sorted(messages) == sorted(payloads)
        came, _ = apart(one["received"])
        neighbours = (rank > 0) + (rank < world_size - 1)
        if way == "Channel":  # prepared by then: what the ranks are about to do, and what the step has yielded
            assert exchanges == {"torch.int64": neighbours, "torch.float64": neighbours}
        assert (one["stats"]["messages"], one["stats"]["bytes_sent"]) == (len(payloads), sum(payloads))
        assert (one["stats"]["traces"], one["stats"]["collectives"]) == (1, 1)
        sent, received = sent + sum(payloads), received + sum(came)
        if "gpt" in name and name != "tied_gpt":  # an activation and a gradient for each cut and microbatch
            assert len(payloads) == number * neighbours
    assert sent == received


@pytest.mark.gloo
@WORLDS
def test_evaluation_outputs_and_clipping(world_size: int) -> None:
    case, found = ZOO["gpt"], [rank["gpt"] for rank in ranks(world_size)]
    model = case.build()
    evaluated = reference(model.eval(), case.loss_fn, case.microbatches(3, 4), backward=False)
    assert all(one["evaluation"] == found[0]["evaluation"] for one in found)
    assert found[0]["evaluation"]["loss"] == pytest.approx(evaluated.loss.item(), rel=1e-6)
    expected = reference(model.train(), case.loss_fn, case.microbatches(2, 3)).outputs
    for rank, one in enumerate(found):
        for local, everywhere, output in zip(one["local"], one["all"], expected, strict=True):
            assert torch.allclose(everywhere, output, rtol=1e-5, atol=1e-6)
            assert torch.equal(everywhere, found[-1]["local"][0 if output is expected[0] else 1])
            assert (local is None) == (rank < world_size - 1)
    for key, gradient in reference(model, case.loss_fn, case.microbatches(3, 6)).gradients.items():
        model.get_parameter(key).grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert all(torch.equal(one["norm"], found[0]["norm"]) for one in found)
    assert torch.allclose(found[0]["norm"], norm, rtol=1e-6)
    for one in found:
        for key, gradient in one["clipped"].items():
            assert torch.allclose(gradient, model.get_parameter(key).grad, rtol=1e-5, atol=1e-8), key


@pytest.mark.gloo
@WORLDS
def test_copies_of_a_shared_parameter_stay_equal_through_training(world_size: int) -> None:
    model = shared_in_double()
    plan = gc.Plan(backend="eager", quiet=True)
    step = gc.compile_train_step(model, ZOO["tied_gpt"].loss_fn, plan=plan)
    losses = train(step, torch.optim.AdamW(step.parameters(), 1e-2))
    found = [rank["trained"] for rank in ranks(world_size)]
    holders = [rank for rank, (_, owned) in enumerate(found) if "embed.weight" in owned]
    assert holders == [0, world_size - 1]
    assert torch.equal(found[0][1]["embed.weight"], found[-1][1]["embed.weight"])
    for ours, owned in found:
        assert ours == pytest.approx(losses, rel=1e-6) and ours == found[0][0]
        for key, value in owned.items():
            expected = model.get_parameter(key).detach()
            assert (value - expected).abs().max() <= 1e-6 * expected.abs().max(), key
    assert set().union(*(owned for _, owned in found)) == {key for key, _ in model.named_parameters()}


@pytest.mark.gloo
def test_several_stages_on_a_rank() -> None:
    case = ZOO["tied_gpt"]
    virtual_step = VirtualStep(case.build(), case.loss_fn, plan=gc.Plan(**INTERLEAVED))
    found = [rank["several"] for rank in ranks(2)]
    for number in NUMBERS:
        ran = virtual_step.run(case.microbatches(number, 2))
        for ours, gradients, messages in (one[f"step {number}"] for one in found):
            assert ours == numbers(ran.result)
            assert all(torch.equal(gradient, ran.gradients[key]) for key, gradient in gradients.items())
            assert messages == 3 * number + 1  # three of the six ends of boundaries, and the weight's gradient or sum
        assert [("embed.weight" in one[f"step {number}"][1]) for one in found] == [True, True]
        assert {key for one in found for key in one[f"step {number}"][1]} == set(ran.gradients)
    model = case.build()
    evaluated = reference(model.eval(), case.loss_fn, case.microbatches(3, 4), backward=False)
    expected = reference(model.train(), case.loss_fn, case.microbatches(2, 3)).outputs
    for key, gradient in reference(model, case.loss_fn, case.microbatches(3, 6)).gradients.items():
        model.get_parameter(key).grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for one in found:
        assert one["evaluation"]["loss"] == pytest.approx(evaluated.loss.item(), rel=1e-6)
        assert torch.allclose(one["norm"], norm, rtol=1e-6) and torch.equal(one["norm"], found[0]["norm"])
        for output, wanted in zip(one["outputs"], expected, strict=True):
            assert torch.allclose(output, wanted, rtol=1e-5, atol=1e-6)


def fails_on(failing: int) -> Any:
    """A loss function that raises on one rank for one kind of batch."""

    def loss_fn(logits: Tensor, batch: dict[str, Any]) -> gc.TokenLoss:
        if batch["fail"] and dist.get_rank() == failing:
            raise KeyError("only here")
        return gc.token_loss(logits, batch["labels"])

    return loss_fn


def refused(call: Any, *given: Any, **options: Any) -> str:
    with pytest.raises(Exception) as caught:
        call(*given, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def failures(rank: int) -> dict[str, Any]:
    """Each disagreement and failure in turn; the same processes and steps go on after each."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    case, found = ZOO["gpt"], {}
    model = case.build()
    step = gc.compile_train_step(model, fails_on(1), plan=plan_of(mesh))
    good = [{**batch, "fail": False} for batch in case.microbatches(4)]
    found["tracing"] = refused(step, [{**good[0], "fail": True}])
    found["single"] = refused(step, good if rank == 0 else good[0])
    found["untouched"] = [key for key, p in model.named_parameters() if p.grad is not None], step.stats.traces
    found["loss"] = step(good).loss.item()
    kept = {key: p.grad.clone() for key, p in step.named_parameters() if p.grad is not None}
    found["count"] = refused(step, good[: 3 + rank])
    shorter = {key: value[:, :8] if isinstance(value, Tensor) else value for key, value in good[1].items()}
    found["sizes"] = refused(step, [good[0], good[1] if rank == 0 else shorter])
    found["structure"] = refused(step, [good[0], good[1] if rank == 0 else {**good[1], "fail": 0}])
    model.train(rank == 0)
    found["modules"] = refused(step, good)
    model.train()
    found["scale"] = refused(step, good, loss_scale=1.0 + rank)
    found["outputs"] = refused(step, good, outputs=("none", "all")[rank])
    found["mode"] = refused(step if rank == 0 else step.evaluate, good)
    found["negative"] = refused(step, good, loss_scale=-1.0 - rank)  # of which Python's hashes are equal
    found["tokens"] = refused(step, good, tokens={"loss": 3 + rank})
    found["counted"] = refused(step if rank == 0 else step.count, good)
    found["prepared"] = refused(step.count, good[:1]) if rank == 0 else refused(step.compile, good[0])
    found["held"] = refused(step if rank == 0 else step.hold, good)
    found["argument"] = refused(step, good, outputs="none" if rank == 0 else "every")
    with torch.set_grad_enabled(rank == 0):
        found["grad mode"] = refused(step, good)
    found["kept"] = all(torch.equal(dict(step.named_parameters())[key].grad, grad) for key, grad in kept.items())
    found["again"] = step(good).loss.item()
    deeper = type(model)(blocks=2 + rank)
    other = gc.compile_train_step(deeper, case.loss_fn, plan=plan_of(mesh))
    found["model"] = refused(other, case.microbatches(2))
    found["gradients"] = [key for key, p in deeper.named_parameters() if p.grad is not None]
    too_many = gc.compile_train_step(nn.Linear(4, 4), lambda y, _: y.mean(), plan=plan_of(mesh))
    found["cut"] = refused(too_many, [torch.ones(2, 4)])
    return found


@pytest.mark.gloo
def test_failures_and_disagreements_reach_every_rank() -> None:
    first, second = run_ranks(failures, 2, timeout=120)
    told = "RankFailure: rank 1 could not take part in the step\n  where: rank 1, stage 1\n  got: "
    assert first["tracing"].startswith(told)
    assert "KeyError: 'only here'" in first["tracing"] and second["tracing"] == "KeyError: 'only here'"
    for key, error in (("argument", "PlanError: unknown outputs='every'"), ("grad mode", "StepError: a training step")):
        assert first[key].startswith(told) and error in first[key] and second[key].startswith(error)
    assert "BatchError: a step takes a list" in first["single"] and second["single"].startswith("BatchError: a step")
    assert first["untouched"] == second["untouched"][:1] + first["untouched"][1:] and first["untouched"][0] == []
    assert first["loss"] == second["loss"] == first["again"] == second["again"]
    expected = {
        "count": ("3 microbatches", "4 microbatches"),
        "sizes": ("microbatch 1: tokens i64[2, 16], labels", "microbatch 1: tokens i64[2, 8], labels"),
        "structure": ("(<class 'bool'>, False)", "(<class 'int'>, 0)"),
        "modules": ("training mode of the model: True", "training mode of the model: False"),
        "scale": ("loss_scale=1.0", "loss_scale=2.0"),
        "outputs": ("outputs='none'", "outputs='all'"),
        "mode": ("a training step", "an evaluation step"),
        "negative": ("loss_scale=-1.0", "loss_scale=-2.0"),
        "tokens": ("tokens {'loss': 3}", "tokens {'loss': 4}"),
        "counted": ("a training step, outputs", "a training step, counted only"),
        "prepared": ("counted only", "prepared only"),
        "held": ("a training step", "its gradients held"),
        "model": ("", ""),
    }
    for key, texts in expected.items():
        for rank, found in enumerate((first, second)):
            assert found[key].startswith("AgreementError: the ranks would not do the same\n"), (key, found[key])
            mine, theirs = found[key].split("expected: ")[1].split("\n  got: ")
            assert texts[rank] in mine and texts[1 - rank] in theirs, (key, found[key])
    assert first["kept"] and second["kept"]
    assert first["gradients"] == second["gradients"] == []
    assert first["cut"].startswith("PartitionError") and second["cut"].startswith("PartitionError")


def fails_while_running(rank: int) -> None:
    """A label that no class has: it is found on the last stage, in the middle of a step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    case = ZOO["gpt"]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=plan_of(mesh))
    batches = case.microbatches(3)
    batches[1]["labels"][0, 0] = 1000
    try:
        step(batches)
    except IndexError:
        assert all(p.grad is None for p in model.parameters())
        assert refused(step, batches).startswith(
            "StepError: this step is unusable: an earlier one failed while messages were under way\n"
            "  where: rank 1\n  got: IndexError: Target 1000 is out of bounds."
        )
        raise


@pytest.mark.gloo
def test_a_rank_that_fails_while_running_ends_all_and_is_named() -> None:
    with pytest.raises(IndexError, match="Target 1000") as caught:
        run_ranks(fails_while_running, 2, timeout=120)
    notes = "\n".join(caught.value.__notes__)
    assert "in rank 1, stage 1, microbatch 1, action 1FB1" in notes and "raised on rank 1 of 2" in notes


def short() -> nn.Module:
    """Two blocks take half the time of four to compile."""
    torch.manual_seed(0)
    return TinyGPT(blocks=2)


def on_inductor(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    case = ZOO["ragged_gpt"]
    step = gc.compile_train_step(short(), case.loss_fn, plan=plan_of(mesh, "inductor"))
    found = []
    for number in (4, 3):
        step.model.zero_grad()
        result = step(case.microbatches(number, number))
        found.append((numbers(result), {key: p.grad for key, p in step.named_parameters()}, vars(step.stats).copy()))
    conditions = sorted(map(str, step.latest[0].joint.sizes.conditions))
    return {"steps": found, "conditions": conditions}


@pytest.mark.gloo
@pytest.mark.inductor
def test_inductor_on_two_processes() -> None:
    first, second = run_ranks(on_inductor, 2)
    assert first["conditions"] == second["conditions"]
    case = ZOO["ragged_gpt"]
    step = VirtualStep(short(), case.loss_fn, plan=gc.Plan(stages=2, backend="eager", quiet=True))
    for place, number in enumerate((4, 3)):
        ran = step.run(case.microbatches(number, number))
        assert first["steps"][place][0] == second["steps"][place][0]
        assert first["steps"][place][0] == pytest.approx(numbers(ran.result), rel=1e-5)
        for found in (first, second):
            _, gradients, stats = found["steps"][place]
            assert stats["traces"] == 1 and stats["programs"] == found["steps"][0][2]["programs"]
            for key, gradient in gradients.items():
                expected = ran.gradients[key]
                assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), key
