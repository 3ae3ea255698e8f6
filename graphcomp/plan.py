"""The plan: a frozen description of what the user asks for. Checked once, when it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from graphcomp.buckets import Buckets
from graphcomp.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b")
SEVERAL = ("gpipe", "interleaved-1f1b")
"""Schedules in which a rank may hold several stages."""
BACKENDS = ("inductor", "eager")
PARAMETERS = ("replicate", "shard")
CHECKS = (None, "transfers")
AXES = ("pp", "dp", "tp", "cp")
DATA_AXES = ("dp", "cp")
"""Over whose ranks a step adds up losses, counts and gradients."""
JOINED = "dp_cp"
"""What programs call both of them together."""


class _Options(Mapping[str, Any]):
    """Options by name, read-only. Sorted, so that equal ones are equal as text."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._items = dict(sorted(given.items(), key=lambda item: item[0]))

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Plan:
    """What to compile for.

    mesh: a `DeviceMesh` with axes named from pp, dp, tp, cp, in any order; None: this process alone.
    stages: number of pipeline stages; None: the size of `pp`, or 1. A multiple of `pp` where the schedule may put
        several on a rank ("gpipe", "interleaved-1f1b"): stage s is then on rank s % pp.
    schedule: one of SCHEDULES; docs/concepts.md says which to use when.
    split: names of the modules that begin stages 1, 2, ... in order of execution; None: a balanced cut.
    parameters: "replicate" or "shard" (over `dp` and `cp`).
    backend: "inductor", or "eager" (the same graphs, run operation by operation, bitwise as eager PyTorch).
    regather: with parameters="shard": gather parameters anew for every action and free them behind it, instead of once
        a step.
    bucket_bytes: collectives over data ranks are joined up to this many bytes of whole parameters; one of as many or
        more is communicated alone, without packing.
    accumulate_dtype: dtype in which gradients accumulate; None: the parameter's own.
    max_programs: most specialisations kept before a step refuses to make another.
    deadline: seconds to wait for another rank before giving up.
    check: "transfers" sends a fingerprint with each transfer and compares it; None does not.
    check_finite: raise NonFiniteError, before anything is written, if a loss, boundary value or gradient of a step is
        nan or infinite. Looks at every such value on the device, and waits for the device once a step.
    buckets: lengths that microbatches are padded up to; None: none is padded.
    loss_chunks: head and loss are computed, forward and backward, for this many parts of a microbatch's rows, one after
        the other, so that the logits of one part exist at a time.
    quiet: show no progress.
    stages_per_rank: how many stages a rank holds; None: what `stages` and the mesh say, or, where they do not, 1, and
        2 for "interleaved-1f1b" if there are several ranks.
    compile_options: options of Inductor by name, as `torch.compile(options=...)` takes them, such as
        {"max_autotune": True}, or {"cpp_wrapper": True} for models of small operations on CPU.

    Raises PlanError for an unknown or contradictory option.
    """

    mesh: DeviceMesh | None = None
    stages: int | None = None
    schedule: str = "1f1b"
    split: Sequence[str] | None = None
    parameters: Literal["replicate", "shard"] = "replicate"
    backend: Literal["inductor", "eager"] = "inductor"
    regather: bool = False
    bucket_bytes: int = 4 * 2**20
    accumulate_dtype: torch.dtype | None = None
    max_programs: int = 8
    deadline: float = 1800.0
    check: Literal["transfers"] | None = None
    check_finite: bool = False
    buckets: Buckets | None = None
    loss_chunks: int = 1
    quiet: bool = False
    stages_per_rank: int | None = None
    compile_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.split, str):
            raise PlanError(
                "Plan(split=...) takes a sequence of module names, not one string",
                expected=f"[{self.split!r}]",
                got=repr(self.split),
                do="put the name into a list",
            )
        if self.split is not None:
            object.__setattr__(self, "split", tuple(self.split))
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("parameters", self.parameters, PARAMETERS)
        _one_of("check", self.check, CHECKS)
        _one_of("check_finite", self.check_finite, (True, False))
        _whole("max_programs", self.max_programs, 1)
        _whole("bucket_bytes", self.bucket_bytes, 1)
        _whole("loss_chunks", self.loss_chunks, 1)
        self._check_compile_options()
        if self.stages_per_rank is not None:
            _whole("stages_per_rank", self.stages_per_rank, 1)
        if self.buckets is not None and not isinstance(self.buckets, Buckets):
            raise PlanError("Plan(buckets=...) is a graphcomp.Buckets or None", got=repr(self.buckets))
        if self.regather and self.parameters != "shard":
            raise PlanError(
                "Plan(regather=True) gathers sharded parameters, and this plan shards none",
                expected="parameters='shard'",
                got=f"parameters={self.parameters!r}",
            )
        if self.stages is not None:
            _whole("stages", self.stages, 1)
            if self.split is not None and len(self.split) + 1 != self.stages:
                raise PlanError(
                    "Plan(stages=..., split=...) disagree",
                    expected=f"{self.stages - 1} names to cut into {self.stages} stages",
                    got=f"{len(self.split)}: {', '.join(self.split)}",
                    do="leave out `stages`, or name the module that begins each stage but the first",
                )
        seconds = self.deadline if isinstance(self.deadline, (int, float)) else 0
        if isinstance(self.deadline, bool) or not 0 < seconds < float("inf"):
            raise PlanError("Plan(deadline=...) is a positive number of seconds", got=repr(self.deadline))
        if self.accumulate_dtype is not None and not (
            isinstance(self.accumulate_dtype, torch.dtype) and self.accumulate_dtype.is_floating_point
        ):
            raise PlanError(
                "Plan(accumulate_dtype=...) is a floating-point dtype or None", got=repr(self.accumulate_dtype)
            )
        if self.mesh is not None:
            self._check_mesh()
        self._check_stages()

    def _check_compile_options(self) -> None:
        """Their names and values are the backend's to check."""
        given = self.compile_options
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise PlanError(
                "Plan(compile_options=...) is a dictionary of options by name",
                expected="{'max_autotune': True}, for example",
                got=repr(given),
            )
        if given and self.backend == "eager":
            raise PlanError(
                "Plan(compile_options=...) is for backend='inductor', and this plan compiles nothing",
                got="backend='eager'",
            )
        options = {name.replace("-", "_"): value for name, value in given.items()}
        if len(options) < len(given):
            raise PlanError("Plan(compile_options=...) has one option twice, with '-' and with '_'", got=repr(given))
        object.__setattr__(self, "compile_options", _Options(options))

    def _check_mesh(self) -> None:
        if not hasattr(self.mesh, "mesh_dim_names"):
            raise PlanError("Plan(mesh=...) is a DeviceMesh or None", got=type(self.mesh).__name__)
        names = self.mesh.mesh_dim_names if self.mesh is not None else None
        if not names or any(name not in AXES for name in names):
            raise PlanError(
                "Plan(mesh=...) needs axes with known names",
                expected=f"names from {', '.join(AXES)} (init_device_mesh(..., mesh_dim_names=...))",
                got=names or "no names",
            )

    def _check_stages(self) -> None:
        count, each, ranks = self.stage_count, self.stages_per_rank, self.axis("pp")
        several = self.schedule in SEVERAL
        if self.mesh is not None and each is None and count != ranks and not several:
            raise PlanError(
                "the number of stages is not the size of the mesh's axis 'pp'",
                expected=f"a mesh with pp={count}",
                got=f"pp={ranks}",
                do="make the mesh fit, leave `stages` out, or take a schedule with several stages on a rank: "
                + ", ".join(map(repr, SEVERAL)),
            )
        unit = each or ranks
        if count % unit or (self.mesh is not None and each is not None and count != ranks * each):
            raise PlanError(
                f"{count} stages cannot be dealt to the ranks of the pipeline",
                expected="as many stages on each rank as on any other",
                got=", ".join([f"stages_per_rank={each}"] * bool(each) + [f"pp={ranks}"] * (self.mesh is not None)),
                do="make the mesh fit, or leave `stages` or `stages_per_rank` out",
            )
        if self.stages_on_each > 1 and not several:
            raise PlanError(
                f"schedule {self.schedule!r} has one stage on each rank",
                expected=f"stages_per_rank=1, or a schedule of {', '.join(map(repr, SEVERAL))}",
                got=f"{self.stages_on_each} stages on each rank",
            )

    def axis(self, name: str) -> int:
        """The size of a mesh axis; 1 if the mesh does not have it."""
        names = (self.mesh.mesh_dim_names if self.mesh is not None else None) or ()
        return self.mesh.size(names.index(name)) if self.mesh is not None and name in names else 1

    @property
    def stage_count(self) -> int:
        """The number of pipeline stages this plan asks for."""
        return self._named_stages or self.axis("pp") * self.stages_on_each

    @property
    def stages_on_each(self) -> int:
        """How many of them a rank of the pipeline holds."""
        named, each = self._named_stages, 2 if self.schedule == "interleaved-1f1b" else 1
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        if self.mesh is None:  # as many ranks as that makes, if it makes several
            return each if named is not None and named > each and named % each == 0 else 1
        if named is not None:
            return named // self.axis("pp")
        return each if self.axis("pp") > 1 else 1

    @property
    def _named_stages(self) -> int | None:
        """How many stages `stages` or `split` say."""
        return self.stages if self.split is None else len(self.split) + 1

    @property
    def pipeline_ranks(self) -> int:
        """How many ranks a pipeline has."""
        return self.stage_count // self.stages_on_each


def _one_of(option: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise PlanError(
            f"unknown {option}: {value!r}",
            where=f"Plan({option}=...)",
            expected=", ".join(map(repr, known)),
            got=repr(value),
        )


def _whole(option: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"Plan({option}=...) is a whole number of at least {least}", got=repr(value))
