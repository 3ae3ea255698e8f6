"""Captured and compiled programs in a file: written by one process, taken over by a later one that is alike."""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import sympy
import torch

from graphcomp.capture.facts import Facts
from graphcomp.capture.spelled import PASSING, Subject, difference, spelled
from graphcomp.capture.state import Captured, Reachable
from graphcomp.compat.inductor_options import options_text, source_text
from graphcomp.compiler import GraphCompiler, Specialisation
from graphcomp.errors import ArtifactError
from graphcomp.ir.digest import digest
from graphcomp.ir.pickling import from_bytes, to_bytes
from graphcomp.ir.sizes import Sizes
from graphcomp.plan import AXES, Plan

_NOT_IN_PROGRAMS = ("mesh", "max_programs", "deadline", "quiet", "check_finite", "compile_options")
"""Options of a plan that no program depends on, and those that are spelled otherwise: the mesh by its axes, and options
of Inductor, whoever sets them, each by its name."""


@dataclass(frozen=True)
class Kind:
    """What a specialisation serves: a state of the model, and a kind of batch. read: as of a `Joint`."""

    state: Facts
    training: bool
    fields: Hashable
    batch: Hashable
    read: frozenset[str] | None


@dataclass(frozen=True)
class Stored:
    """A specialisation. state: place among the file's states. batch, sizes, body: pickled, read when asked for."""

    state: int
    training: bool
    fields: Hashable
    read: frozenset[str] | None
    batch: bytes
    sizes: bytes
    body: bytes
    digest: str


@dataclass(frozen=True)
class Contents:
    """A file. key: what all of it depends on, by name. states: of the model, as text."""

    key: Mapping[str, str]
    states: tuple[Mapping[Subject, str], ...]
    specialisations: tuple[Stored, ...]


def key_of(plan: Plan, device: torch.device, rank: int, model: object) -> dict[str, str]:
    """Everything besides the model's own state that programs and their code depend on, as text by name."""
    found = {
        "graphcomp": _own_source(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": _version("triton"),
        "sympy": sympy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.cpu.get_capabilities().get('cpu_name', '')}",
        "device": _device_text(device),
        "threads": str(torch.get_num_threads()),
        "float32 products": torch.get_float32_matmul_precision(),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "rank": str(rank),
        "mesh": "none" if plan.mesh is None else ", ".join(f"{axis} {plan.axis(axis)}" for axis in AXES),
    }
    for option in fields(plan):
        if option.name not in _NOT_IN_PROGRAMS:
            found[f"Plan({option.name}=...)"] = repr(getattr(plan, option.name))
    if plan.backend == "inductor":
        found |= {f"option '{name}' of Inductor": text for name, text in options_text(plan.compile_options).items()}
    return found


def write(path: Path, key: Mapping[str, str], programs: Iterable[tuple[Kind, Specialisation]], backend: Any) -> None:
    """Whole or not at all. Raises ArtifactError for a program that cannot be written."""
    states: dict[Facts, int] = {}
    stored = []
    for kind, one in programs:
        foreign = [text for text in one.joint.groups if text not in AXES]
        if foreign:
            raise ArtifactError(
                "a program cannot be saved: it communicates over ranks that are no axis of the mesh",
                got=", ".join(foreign),
                do="let the model communicate along an axis of the plan's mesh",
            )
        packed = backend.pack(one.joint.program.fake_mode.shape_env)
        body = (one.joint, one.passes, one.partitions, one.kind, packed)
        place = states.setdefault(kind.state, len(states))
        try:
            parts = to_bytes(kind.batch), to_bytes(one.joint.sizes), to_bytes(body, _name_of_captured)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ArtifactError(
                "a program cannot be saved: it refers to an object that cannot be pickled", got=str(error)
            ) from error
        stored.append(Stored(place, kind.training, kind.fields, kind.read, *parts, digest(one.joint.program)))
    contents = Contents(dict(key), tuple(spelled(state) for state in states), tuple(stored))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(to_bytes(contents))
    os.replace(part, path)


class Store:
    """A file's programs, taken over one by one as microbatches ask for them.

    Raises ArtifactError, naming what has changed, if the file was written for something else than `key`, or for another
    model than `state` is of.
    """

    def __init__(self, path: Path, key: Mapping[str, str], state: Facts, compiler: GraphCompiler) -> None:
        self.path, self._compiler = path, compiler
        if not path.exists():
            raise ArtifactError("there are no saved programs", where=str(path), do="save some: step.save(folder)")
        try:
            self._contents: Contents = from_bytes(path.read_bytes())
        except Exception as error:
            raise self._unreadable(error) from error
        changed = [
            f"{name} was {self._contents.key.get(name, 'nothing')}, is {key.get(name, 'nothing')}"
            for name in dict.fromkeys((*self._contents.key, *key))
            if self._contents.key.get(name) != key.get(name)
        ]
        if not changed:
            now = spelled(state)
            each = [difference(dict(old), now, lambda kind: kind not in PASSING) for old in self._contents.states]
            changed = min(each, key=len, default=[])
        if changed:
            more = [f"and {len(changed) - 5} more"] if len(changed) > 5 else []
            raise ArtifactError(
                "the saved programs are of another model, plan or machine",
                where=str(path),
                got="; ".join(changed[:5] + more),
                do="compile anew, and save again",
            )
        self._places: dict[Facts, int | None] = {}
        self._batches = [from_bytes(one.batch) for one in self._contents.specialisations]
        self._left = set(range(len(self._contents.specialisations)))

    def read(self, state: Facts, training: bool, fields: Hashable) -> frozenset[str] | None:
        """The fields that programs read of such batches, if it is known."""
        found = (one.read for one in self._contents.specialisations if self._serves(one, state, training, fields))
        return next(found, None)

    def take(
        self, state: Facts, training: bool, fields: Hashable, batch: Hashable, tensors: Mapping[str, torch.Tensor]
    ) -> Specialisation | None:
        """The next specialisation for a batch; it joins those of the compiler. None if there is none."""
        for place in sorted(self._left):
            one = self._contents.specialisations[place]
            if self._serves(one, state, training, fields) and self._batches[place] == batch:
                sizes: Sizes = from_bytes(one.sizes)
                if sizes.fit(tensors) is not None:
                    self._left.discard(place)
                    return self._taken(one, training)
        return None

    def _serves(self, one: Stored, state: Facts, training: bool, fields: Hashable) -> bool:
        if (one.training, one.fields) != (training, fields):
            return False
        if state not in self._places:
            now, states = spelled(state), self._contents.states
            self._places[state] = next((i for i, each in enumerate(states) if dict(each) == now), None)
        return self._places[state] == one.state

    def _taken(self, one: Stored, training: bool) -> Specialisation:
        compiler = self._compiler
        outside: dict[str, object] = dict(Reachable(compiler.model, compiler.loss_fn, training).named())
        try:
            joint, passes, partitions, kind, packed = from_bytes(one.body, outside)
        except Exception as error:
            raise self._unreadable(error) from error
        if digest(joint.program) != one.digest:
            raise self._unreadable("the program does not read back as it was written")
        mesh = compiler.plan.mesh
        if joint.groups and mesh is not None:
            joint = replace(joint, groups={text: mesh.get_group(text).group_name for text in joint.groups})
        specialisation = Specialisation(len(compiler.specialisations), joint, passes, partitions, {}, kind)
        compiler.backend.adopt(packed, joint.program.fake_mode.shape_env)
        compiler.specialisations.append(specialisation)
        return specialisation

    def _unreadable(self, why: object) -> ArtifactError:
        return ArtifactError(
            "the saved programs cannot be read", where=str(self.path), got=str(why), do="compile anew, and save again"
        )


def _name_of_captured(value: object) -> str | None:
    return value.name if isinstance(value, Captured) else None


def _own_source() -> str:
    """The text of graphcomp itself: between two releases programs may change."""
    packages = map(import_module, ("graphcomp", "graphcomp.passes"))
    return source_text(*(Path(folder) for package in packages for folder in package.__path__))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _device_text(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}, CUDA {torch.version.cuda}"
