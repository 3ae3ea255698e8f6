"""Data ranks as processes over gloo: they train what one process trains, replicated, sharded and gathered anew."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import graphcomp as gc
from graphcomp.runtime.program import transport
from graphcomp.testing import run_ranks
from tests.sharing import shared_captures
from tests.steps.wire import GLOO, Wire, buckets, seen_by_gloo
from tests.zoo import ZOO
from tests.zoo.case import IGNORED
from tests.zoo.gpt import TinyGPT
from tests.zoo.reference import reference

MODES = ("replicate", "shard", "regather")
LAYOUTS = {"dp2": ((2,), ("dp",)), "pp2 x dp2": ((2, 2), ("pp", "dp")), "dp2 x pp2": ((2, 2), ("dp", "pp"))}
MODELS = {
    # What is done is the same on virtual ranks, where every model meets every mode.
    "dp2": {"two_losses": ("replicate",), "half_frozen": ("shard",), "moe": ("regather",)},
    "pp2 x dp2": {"tied_gpt": MODES, "moe": ("replicate",)},
    "dp2 x pp2": {"tied_gpt": ("shard",)},
}
RUNS = [(layout, name, mode) for layout, models in MODELS.items() for name, modes in models.items() for mode in modes]
LEARN = {"lr": 0.01, "weight_decay": 0.1}
NORM = 0.5  # below the norm of the models' gradients: clipping changes them
BUCKET = 30_000


def mesh_of(layout: str) -> DeviceMesh:
    shape, names = LAYOUTS[layout]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def plan_of(mesh: DeviceMesh, mode: str, **options: Any) -> gc.Plan:
    options = {"backend": "eager", "bucket_bytes": BUCKET, "deadline": 60.0, **options}
    kind: Any = "replicate" if mode == "replicate" else "shard"
    return gc.Plan(mesh=mesh, parameters=kind, regather=mode == "regather", quiet=True, **options)


def microbatches(name: str, step: int) -> list[dict[str, Tensor]]:
    """Four of a step. Step 1: the last has a single token. From step 2 on, it has none, nor has the third."""
    batches = ZOO[name].microbatches(4, step, torch.float64)
    for place in range(2 if step > 1 else 3, 4) if step else ():
        batches[place]["labels"].fill_(IGNORED)
        if "weights" in batches[place]:
            batches[place]["weights"].zero_()
    if step == 1:
        batches[3]["labels"][0, 0] = 7
    return batches


NOTHING = 9
"""A step without any token."""


def dealt(name: str, step: int, counts: tuple[int, int]) -> list[list[dict[str, Tensor]]]:
    """The microbatches of each data rank."""
    batches = microbatches(name, step)
    if step == NOTHING:
        for batch in batches:
            batch["labels"].fill_(IGNORED)
            if "weights" in batch:
                batch["weights"].zero_()
    return [batches[: counts[0]], batches[counts[0] :]]


def counts_of(mode: str, step: int) -> tuple[int, int]:
    return (2, 2) if mode == "regather" or step > 1 else (3, 1)


def numbers(result: gc.StepResult) -> dict[str, float]:
    """What has to be the same on all ranks."""
    found = {f"loss {name}": value for name, value in result.losses.items()}
    found |= {f"tokens {name}": value for name, value in result.tokens.items()}
    found |= {f"metric {name}": value for name, value in result.metrics.items()}
    return {name: value.item() for name, value in {"loss": result.loss, **found}.items()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def evaluates(name: str, mode: str) -> bool:
    return name == "tied_gpt" or (name == "moe" and mode == "replicate")


def trained(name: str, mesh: DeviceMesh, mode: str, early: bool) -> dict[str, Any]:
    """Three steps of AdamW, an evaluation, and a step without tokens."""
    case, data_rank = ZOO[name], mesh["dp"].get_local_rank()
    model = case.build().double()
    identities = [id(p) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), **LEARN) if early else None
    step = gc.compile_train_step(model, case.loss_fn, plan=plan_of(mesh, mode))
    found: dict[str, Any] = {"steps": [], "norms": []}
    for number in range(3):
        result = step(dealt(name, number, counts_of(mode, number))[data_rank])
        found["steps"].append(numbers(result))
        optimizer = optimizer or torch.optim.AdamW(step.parameters(), **LEARN)
        found["norms"].append(gc.clip_grad_norm_(step, NORM))
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {key: full(p) for key, p in step.named_parameters()}
    found["evaluation"] = numbers(step.evaluate(dealt(name, 0, (2, 2))[data_rank])) if evaluates(name, mode) else {}
    found["nothing"] = numbers(step(dealt(name, NOTHING, (2, 2))[data_rank]))
    found["gradients"] = {key: None if p.grad is None else full(p.grad) for key, p in step.named_parameters()}
    found["elsewhere"] = [key for key, p in model.named_parameters() if p.grad is not None]
    assert identities == [id(p) for p in model.parameters()]
    assert all(isinstance(p, DTensor) == (mode != "replicate" and p.dim() > 0) for p in model.parameters())
    found["stats"] = vars(step.stats).copy()
    return found


def counted(mesh: DeviceMesh, mode: str) -> dict[str, Any]:
    """What goes over the wire: tied weights, four microbatches of four lengths, and the same without any token.

    All of it over process groups, where it is seen.
    """
    model, most, transport.MOST_BYTES = ZOO["tied_gpt"].build().double(), transport.MOST_BYTES, 0
    step = gc.compile_train_step(model, ZOO["tied_gpt"].loss_fn, plan=plan_of(mesh, mode))
    batches = ZOO["ragged_gpt"].microbatches(8)[4 * mesh["dp"].get_local_rank() :][:4]
    step(batches)
    found: dict[str, Any] = {"shapes": {key: p.shape for key, p in step.named_parameters()}}
    found["reduced"] = [key for key, stages in step.compiler.homes.items() if stages[0] == step.layout.rank]
    with Wire() as found["step"]:
        step(batches)
    found["stats"] = vars(step.stats).copy()
    for batch in batches:
        batch["labels"].fill_(IGNORED)
    found["nothing"], found["gloo"] = seen_by_gloo(lambda: step(batches))
    found["counted"] = vars(step.stats).copy()
    with Wire() as found["evaluation"]:
        step.evaluate(batches)  # compiles
        place = len(found["evaluation"].calls)
        step.evaluate(batches)
    found["evaluation"].calls = found["evaluation"].calls[place:]
    transport.MOST_BYTES = most
    return found


def everything(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    meshes = {layout: mesh_of(layout) for layout, (shape, _) in LAYOUTS.items() if math.prod(shape) == world_size}
    with shared_captures():
        for number, (layout, name, mode) in enumerate(run for run in RUNS if run[0] in meshes):
            found[layout, name, mode] = trained(name, meshes[layout], mode, early=number % 2 == 0)
        for mode in MODES if world_size == 4 else ():
            found["counted", mode] = counted(meshes["pp2 x dp2"], mode)
    return found


@functools.cache
def processes(number: int) -> list[dict[Any, Any]]:
    """What each process found: one start of them for all tests."""
    return run_ranks(everything, number, number, timeout=280, fresh=number == 4)  # as under torchrun


def ranks(layout: str, *key: str) -> list[dict[str, Any]]:
    """Of one run, in order of ranks."""
    return [each[layout, *key] for each in processes(math.prod(LAYOUTS[layout][0]) if layout in LAYOUTS else 4)]


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """The same in one process, eager."""
    case = ZOO[name]
    model = case.build().double()
    optimizer = torch.optim.AdamW(model.parameters(), **LEARN)
    found: dict[str, Any] = {"steps": [], "norms": []}
    for number in range(3):
        expected = reference(model, case.loss_fn, microbatches(name, number))
        found["steps"].append(expected)
        for key, p in model.named_parameters():
            p.grad = expected.gradients.get(key)
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM))
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {key: p.detach() for key, p in model.named_parameters()}
    found["evaluation"] = reference(copy.deepcopy(model).eval(), case.loss_fn, microbatches(name, 0), backward=False)
    return found


def equal(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


EACH = pytest.mark.parametrize(("layout", "name", "mode"), RUNS)


@pytest.mark.gloo
@EACH
def test_data_ranks_train_what_one_process_trains(layout: str, name: str, mode: str) -> None:
    expected, found = alone(name), ranks(layout, name, mode)
    for number, step in enumerate(expected["steps"]):
        ours = found[0]["steps"][number]
        assert ours["loss"] == pytest.approx(float(step.loss), rel=1e-9, abs=1e-12)
        for key, loss in step.losses.items():
            assert ours[f"loss {key}"] == pytest.approx(float(loss), rel=1e-9, abs=1e-12)
        for key, tokens in step.tokens.items():
            assert ours[f"tokens {key}"] == tokens
        for key, metric in step.metrics.items():
            if not key.startswith("last"):
                assert ours[f"metric {key}"] == pytest.approx(float(metric), rel=1e-9)
        equal(found[0]["norms"][number], expected["norms"][number], f"norm {number}")
    for one in found:
        for key, parameter in one["parameters"].items():
            equal(parameter, expected["parameters"][key], key)
    assert set().union(*(one["parameters"] for one in found)) == set(expected["parameters"])
    if evaluates(name, mode):
        evaluated = expected["evaluation"]
        assert found[0]["evaluation"]["loss"] == pytest.approx(float(evaluated.loss), rel=1e-9)
        for key, tokens in evaluated.tokens.items():
            assert found[0]["evaluation"][f"tokens {key}"] == tokens


@pytest.mark.gloo
@EACH
def test_all_ranks_say_the_same_and_all_copies_are_equal_bitwise(layout: str, name: str, mode: str) -> None:
    found = ranks(layout, name, mode)
    for one in found[1:]:
        for what in ("steps", "norms", "evaluation", "nothing"):
            assert one[what] == found[0][what], what
    holders = {key: [one["parameters"][key] for one in found if key in one["parameters"]] for key in all_of(found)}
    assert all(torch.equal(copies[0], other) for copies in holders.values() for other in copies[1:])
    stages = len(found) // 2
    tied = 2 * stages if name == "tied_gpt" else 2
    assert len(holders["embed.weight"]) == tied and all(len(copies) >= 2 for copies in holders.values())
    assert all(set(one["elsewhere"]) <= set(one["parameters"]) for one in found)


def all_of(found: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for one in found for key in one["parameters"]))


@pytest.mark.gloo
@EACH
def test_a_step_without_tokens_has_gradients_and_a_loss_of_exactly_zero(layout: str, name: str, mode: str) -> None:
    found = ranks(layout, name, mode)
    model = ZOO[name].build()
    for one in found:
        assert all(value == 0 for key, value in one["nothing"].items() if name != "moe")
        assert all(one["nothing"][key] == 0 for key in one["nothing"] if key.endswith(("lm", "tokens loss")))
        for key, gradient in one["gradients"].items():
            assert (gradient is None) == (not model.get_parameter(key).requires_grad), key
            if gradient is not None and name != "moe":  # there the balance is a mean and stays
                assert not gradient.count_nonzero(), key
        assert one["stats"]["traces"] <= 2 and one["stats"]["steps"] == 4


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.mark.gloo
@pytest.mark.parametrize("mode", MODES)
def test_what_a_step_sends(mode: str) -> None:
    """Gathers and reductions are once a step for each bucket, between the microbatches is nothing but messages."""
    for rank, found in enumerate(ranks("counted", mode)):
        stage = rank // 2
        wire: Wire = found["step"]
        whole = {key: 2 * -(-shape[0] // 2) * shape[1:].numel() * 8 for key, shape in found["shapes"].items()}
        gathers = buckets(whole.values(), BUCKET)
        reductions = buckets([whole[key] for key in whole if key in found["reduced"]], BUCKET)
        assert min(gathers, reductions) > 1
        gathered = {"replicate": 0, "shard": 1, "regather": (8, 4)[stage]}[mode]  # the last stage fuses F and B
        assert len(wire.of("all_gather")) == gathers * gathered
        assert len(wire.of("reduce_scatter")) == (0 if mode == "replicate" else reductions)
        # the counts; gradients; losses over data ranks
        assert len(wire.of("all_reduce")) == 1 + (reductions if mode == "replicate" else 0) + 1
        # an activation and a gradient of each microbatch, and the tied weight's gradient, up and down again
        assert len(wire.of("send")) == len(wire.of("recv")) == 4 + 1
        messages = wire.places("send", "recv")[:8]
        if mode != "regather":
            assert not [place for place in wire.places(*COLLECTIVES) if messages[0] < place < messages[-1]]
        # what ranks tell each other before a step is of one size, whatever the microbatches are
        assert [call.elements for call in wire.of("host")] == [7] and wire.calls[0].kind == "host"
        assert {call.kind for call in wire.calls} <= {"host", "send", "recv", *COLLECTIVES}
        for stats, seen in ((found["stats"], wire), (found["counted"], found["nothing"])):
            assert stats["collectives"] == len(seen.of(*COLLECTIVES)) + 1  # losses over the pipeline, over sockets
            assert stats["messages"] == len(seen.of("send"))
            assert stats["bytes_sent"] == sum(call.nbytes for call in seen.of("send"))


@pytest.mark.gloo
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_sends_the_same_and_gloo_sees_no_more(mode: str) -> None:
    for found in ranks("counted", mode):
        assert found["nothing"].calls == found["step"].calls
        assert found["gloo"] == Counter(GLOO.get(call.kind, call.kind) for call in found["step"].calls)


@pytest.mark.gloo
@pytest.mark.parametrize("mode", MODES)
def test_what_an_evaluation_sends(mode: str) -> None:
    for rank, found in enumerate(ranks("counted", mode)):
        stage = rank // 2
        wire, gathers = found["evaluation"], len(found["step"].of("all_gather"))
        assert len(wire.of("all_gather")) == (gathers // 2 if mode == "regather" and stage == 0 else gathers)
        assert (len(wire.of("all_reduce")), len(wire.of("reduce_scatter"))) == (2, 0)
        assert (len(wire.of("send")), len(wire.of("recv"))) == ((4, 0), (0, 4))[stage]


class Small(TinyGPT):
    """The zoo's tied decoder with fewer blocks, which take less time to compile."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks)
        self.head.weight = self.embed.weight


def small(layout: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Small(blocks=len(LAYOUTS[layout][0]))


def on_inductor(rank: int, layout: str, mode: str) -> list[Any]:
    mesh, case = mesh_of(layout), ZOO["ragged_gpt"]
    model = small(layout)
    step = gc.compile_train_step(model, case.loss_fn, plan=plan_of(mesh, mode, backend="inductor"))
    found = []
    for number in range(2):
        model.zero_grad()
        batches = case.microbatches(4, number)
        result = step([batches[:3], batches[3:]][mesh["dp"].get_local_rank()])
        found.append((numbers(result), {key: full(p.grad) for key, p in step.named_parameters() if p.grad is not None}))
    return [found, step.stats.traces]


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.parametrize(("layout", "mode"), [("pp2 x dp2", "shard")])
def test_inductor_over_data_ranks(layout: str, mode: str) -> None:
    found = run_ranks(on_inductor, math.prod(LAYOUTS[layout][0]), layout, mode, timeout=280)
    case = ZOO["ragged_gpt"]
    for number in range(2):
        expected = reference(small(layout), case.loss_fn, case.microbatches(4, number), torch.float64)
        for steps, traces in found:
            assert traces == 1 and steps[number][0] == found[0][0][number][0]
            assert steps[number][0]["loss"] == pytest.approx(float(expected.loss), rel=1e-5)
            for key, gradient in steps[number][1].items():
                wanted = expected.gradients[key]
                assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), key
        assert set().union(*(steps[number][1] for steps, _ in found)) == set(expected.gradients)
