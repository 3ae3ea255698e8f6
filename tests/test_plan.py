"""The plan: every refusal says what, where, expected, got and what to do, and changes nothing."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphcomp as gc
from graphcomp import backend, plan, schedule
from graphcomp.errors import PlanError, ScheduleError
from graphcomp.testing import run_ranks
from tests.zoo import ZOO

END = "  (see docs/errors.md#planerror)"


@dataclass(frozen=True)
class Mesh:
    """What a plan reads of a DeviceMesh, without processes."""

    sizes: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    device_type: str = "cpu"

    def size(self, axis: int | None = None) -> int:
        return self.sizes[axis] if axis is not None else torch.Size(self.sizes).numel()


def message(**options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        gc.Plan(**options)
    return str(caught.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"schedule": "zigzag"},
        "unknown schedule: 'zigzag'\n  where: Plan(schedule=...)\n"
        "  expected: 'gpipe', '1f1b', 'eager-1f1b', 'interleaved-1f1b'\n  got: 'zigzag'",
    ),
    (
        {"backend": "tvm"},
        "unknown backend: 'tvm'\n  where: Plan(backend=...)\n  expected: 'inductor', 'eager'\n  got: 'tvm'",
    ),
    (
        {"parameters": "offload"},
        "unknown parameters: 'offload'\n  where: Plan(parameters=...)\n  expected: 'replicate', 'shard'\n"
        "  got: 'offload'",
    ),
    (
        {"check": "all"},
        "unknown check: 'all'\n  where: Plan(check=...)\n  expected: None, 'transfers'\n  got: 'all'",
    ),
    (
        {"split": "blocks.2"},
        "Plan(split=...) takes a sequence of module names, not one string\n  expected: ['blocks.2']\n"
        "  got: 'blocks.2'\n  what to do: put the name into a list",
    ),
    (
        {"stages": 4, "split": ["a", "b"]},
        "Plan(stages=..., split=...) disagree\n  expected: 3 names to cut into 4 stages\n  got: 2: a, b\n"
        "  what to do: leave out `stages`, or name the module that begins each stage but the first",
    ),
    ({"stages": 0}, "Plan(stages=...) is a whole number of at least 1\n  got: 0"),
    ({"stages": 2.0}, "Plan(stages=...) is a whole number of at least 1\n  got: 2.0"),
    ({"stages": True}, "Plan(stages=...) is a whole number of at least 1\n  got: True"),
    ({"max_programs": 0}, "Plan(max_programs=...) is a whole number of at least 1\n  got: 0"),
    ({"loss_chunks": 0}, "Plan(loss_chunks=...) is a whole number of at least 1\n  got: 0"),
    ({"deadline": 0}, "Plan(deadline=...) is a positive number of seconds\n  got: 0"),
    ({"deadline": "1h"}, "Plan(deadline=...) is a positive number of seconds\n  got: '1h'"),
    (
        {"accumulate_dtype": torch.int64},
        "Plan(accumulate_dtype=...) is a floating-point dtype or None\n  got: torch.int64",
    ),
    (
        {"accumulate_dtype": "float32"},
        "Plan(accumulate_dtype=...) is a floating-point dtype or None\n  got: 'float32'",
    ),
    ({"mesh": 2}, "Plan(mesh=...) is a DeviceMesh or None\n  got: int"),
    (
        {"mesh": Mesh((2,), ("pipe",))},
        "Plan(mesh=...) needs axes with known names\n"
        "  expected: names from pp, dp, tp, cp (init_device_mesh(..., mesh_dim_names=...))\n  got: ('pipe',)",
    ),
    (
        {"mesh": Mesh((2,), None)},
        "Plan(mesh=...) needs axes with known names\n"
        "  expected: names from pp, dp, tp, cp (init_device_mesh(..., mesh_dim_names=...))\n  got: no names",
    ),
    (
        {"mesh": Mesh((2,), ("pp",)), "stages": 4},
        "the number of stages is not the size of the mesh's axis 'pp'\n  expected: a mesh with pp=4\n  got: pp=2\n"
        "  what to do: make the mesh fit, leave `stages` out, or take a schedule with several stages on a rank: "
        "'gpipe', 'interleaved-1f1b'",
    ),
    (
        {"mesh": Mesh((2,), ("dp",)), "split": ["a"]},
        "the number of stages is not the size of the mesh's axis 'pp'\n  expected: a mesh with pp=2\n  got: pp=1\n"
        "  what to do: make the mesh fit, leave `stages` out, or take a schedule with several stages on a rank: "
        "'gpipe', 'interleaved-1f1b'",
    ),
    (
        {"mesh": Mesh((2,), ("pp",)), "stages": 5, "schedule": "interleaved-1f1b"},
        "5 stages cannot be dealt to the ranks of the pipeline\n"
        "  expected: as many stages on each rank as on any other\n  got: pp=2\n"
        "  what to do: make the mesh fit, or leave `stages` or `stages_per_rank` out",
    ),
    (
        {"stages": 4, "stages_per_rank": 3},
        "4 stages cannot be dealt to the ranks of the pipeline\n"
        "  expected: as many stages on each rank as on any other\n  got: stages_per_rank=3\n"
        "  what to do: make the mesh fit, or leave `stages` or `stages_per_rank` out",
    ),
    (
        {"mesh": Mesh((2,), ("pp",)), "stages_per_rank": 2},
        "schedule '1f1b' has one stage on each rank\n"
        "  expected: stages_per_rank=1, or a schedule of 'gpipe', 'interleaved-1f1b'\n"
        "  got: 2 stages on each rank",
    ),
    ({"stages_per_rank": 0}, "Plan(stages_per_rank=...) is a whole number of at least 1\n  got: 0"),
    (
        {"compile_options": ["cpp_wrapper"]},
        "Plan(compile_options=...) is a dictionary of options by name\n"
        "  expected: {'max_autotune': True}, for example\n  got: ['cpp_wrapper']",
    ),
    (
        {"compile_options": {"cpp_wrapper": True}, "backend": "eager"},
        "Plan(compile_options=...) is for backend='inductor', and this plan compiles nothing\n  got: backend='eager'",
    ),
    (
        {"compile_options": {"max-autotune": True, "max_autotune": False}},
        "Plan(compile_options=...) has one option twice, with '-' and with '_'\n"
        "  got: {'max-autotune': True, 'max_autotune': False}",
    ),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[", ".join(options) for options, _ in REFUSED])
def test_a_plan_that_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], text: str) -> None:
    assert message(**options) == f"{text}\n{END}"


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (
        {"stages": 3},
        "a plan of 3 stages needs a mesh with an axis 'pp' of that size\n  got: mesh=None (this process alone)\n"
        '  what to do: init_device_mesh(..., mesh_dim_names=("pp",)) under torchrun; or try it with'
        " testing.run_virtual",
    ),
    (
        {"split": ["layers.2"]},
        "a plan of 2 stages needs a mesh with an axis 'pp' of that size\n  got: mesh=None (this process alone)\n"
        '  what to do: init_device_mesh(..., mesh_dim_names=("pp",)) under torchrun; or try it with'
        " testing.run_virtual",
    ),
    (
        {"mesh": Mesh((2,), ("pp",))},
        "the plan has a mesh, but this process is in no process group\n  expected: 2 processes, as the mesh has ranks\n"
        "  got: no default process group\n  what to do: start the processes with torchrun and call init_process_group",
    ),
]


@pytest.mark.parametrize(
    ("options", "text"), UNSUPPORTED, ids=[", ".join(map(str, o.values())) for o, _ in UNSUPPORTED]
)
def test_a_plan_that_this_process_cannot_follow_is_refused_without_an_effect(
    options: dict[str, Any], text: str
) -> None:
    model = ZOO["mlp"].build()
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    asked = gc.Plan(**options)
    with pytest.raises(PlanError) as caught:
        gc.compile_train_step(model, ZOO["mlp"].loss_fn, plan=asked)
    assert str(caught.value) == f"{text}\n{END}"
    assert attributes == {name: dict(vars(module)) for name, module in model.named_modules()}
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert not dist.is_initialized()


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_with_nothing_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(PlanError) as caught:
        gc.compile_train_step(model)
    assert str(caught.value) == (
        "the model has nothing to train: no parameter requires a gradient\n"
        f"  where: {type(model).__name__}\n"
        f"  what to do: call requires_grad_() on what is to be trained\n{END}"
    )


def on_part_of_the_world(rank: int) -> str:
    """A mesh that leaves out a process of the job; no process group is made for it."""
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("pp",))
    with pytest.raises(PlanError) as caught:
        gc.compile_train_step(ZOO["mlp"].build(), ZOO["mlp"].loss_fn, plan=gc.Plan(mesh=mesh))
    whole = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(PlanError):
        gc.compile_train_step(nn.ReLU(), plan=gc.Plan(mesh=whole))
    return str(caught.value)


@pytest.mark.gloo
def test_the_mesh_must_hold_every_process() -> None:
    text = (
        "the mesh does not hold all processes of this job\n  expected: a mesh of 2 ranks\n  got: a mesh of 1 ranks\n"
        "  what to do: make the mesh of the world's size, or start as many processes as the mesh has ranks"
    )
    assert run_ranks(on_part_of_the_world, 2) == [f"{text}\n{END}"] * 2


def _deals_several(name: str) -> bool:
    try:
        schedule.get(name).build(4, 1, 2)
    except ScheduleError:
        return False
    return True


def test_a_plan_is_frozen_and_knows_what_the_layers_know() -> None:
    with pytest.raises(FrozenInstanceError):
        gc.Plan().stages = 2  # type: ignore[misc]
    assert set(schedule.KNOWN) == set(plan.SCHEDULES)
    several = {name for name in schedule.KNOWN if _deals_several(name)}
    assert several == set(plan.SEVERAL)
    assert [backend.get(name).name for name in plan.BACKENDS] == list(plan.BACKENDS)
    assert [each.name for each in fields(gc.Plan)][:6] == [
        "mesh",
        "stages",
        "schedule",
        "split",
        "parameters",
        "backend",
    ]


def test_equal_plans_are_equal_as_text_and_by_hash() -> None:
    """Ranks compare them as text, whatever order their options were written in."""
    first = gc.Plan(compile_options={"cpp.threads": 1, "max_autotune": True, "cpp-wrapper": True})
    second = gc.Plan(compile_options={"cpp_wrapper": True, "max_autotune": True, "cpp.threads": 1})
    assert first == second and repr(first) == repr(second) and hash(first) == hash(second)
    assert gc.Plan() != first


def test_options_of_inductor_stay_as_they_were_checked() -> None:
    given = {"max_autotune": True}
    made = gc.Plan(compile_options=given)
    given["max_autotune"] = False
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.compile_options["max_autotune"] = False  # type: ignore[index]
    assert not hasattr(made.compile_options, "update")
    assert made.compile_options == {"max_autotune": True} and repr(made.compile_options) == "{'max_autotune': True}"
    for same in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), replace(made, quiet=False)):
        assert same == made and repr(same) == repr(made)


def test_the_number_of_stages_follows_from_what_is_given() -> None:
    assert gc.Plan().stage_count == 1
    assert gc.Plan(stages=3).stage_count == 3
    names = ["a", "b"]
    by_name = gc.Plan(split=names)
    names.append("c")
    assert (by_name.stage_count, by_name.split) == (3, ("a", "b"))
    assert gc.Plan(split=[]).stage_count == 1
    on_mesh: Any = Mesh((4, 1), ("pp", "dp"))
    assert gc.Plan(mesh=on_mesh).stage_count == 4
    assert (gc.Plan(mesh=on_mesh).axis("pp"), gc.Plan(mesh=on_mesh).axis("tp")) == (4, 1)


def test_several_stages_on_a_rank() -> None:
    on_mesh: Any = Mesh((2, 2), ("pp", "dp"))
    for options, stages, each in [
        ({"stages": 4, "schedule": "interleaved-1f1b"}, 4, 2),
        ({"stages_per_rank": 3, "schedule": "interleaved-1f1b"}, 6, 3),
        ({"split": ["a", "b", "c"], "schedule": "gpipe"}, 4, 2),
        ({"stages_per_rank": 1}, 2, 1),
        ({"schedule": "interleaved-1f1b"}, 4, 2),
        ({"stages": 2, "schedule": "interleaved-1f1b"}, 2, 1),
    ]:
        made = gc.Plan(mesh=on_mesh, **options)
        assert (made.stage_count, made.stages_on_each, made.pipeline_ranks) == (stages, each, 2)
    for stages, ranks in {1: 1, 2: 2, 3: 3, 4: 2, 6: 3, 8: 4}.items():
        assert gc.Plan(stages=stages, schedule="interleaved-1f1b").pipeline_ranks == ranks
        assert gc.Plan(stages=stages, schedule="gpipe").pipeline_ranks == stages
    assert gc.Plan(stages=6, schedule="interleaved-1f1b", stages_per_rank=3).pipeline_ranks == 2
