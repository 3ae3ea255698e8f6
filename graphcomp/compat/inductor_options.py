"""Inductor's options: those that programs need, and those that a plan adds. `torch._inductor.config` has them, for the
whole process; here they hold while a program is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from graphcomp.errors import PlanError

OWN: Mapping[str, Any] = {
    "fallback_random": True,  # draws come from torch's own generator, as in eager
    "size_asserts": False,  # a third of what a call of a small program costs; the first call is checked
    "alignment_asserts": False,
    "scalar_asserts": False,  # what must hold of sizes is checked where they are read, in one program of several
    "triton.cudagraphs": False,  # a replayed graph overwrites its last results, while other microbatches need them
}

_ELSEWHERE = "it acts where torch.compile traces and differentiates a module, and programs are compiled behind that"
_REFUSED = {
    "fallback_random": "dropout would draw other numbers than in eager PyTorch",
    "triton.cudagraphs": "a replayed graph overwrites what its last call has left, while other microbatches need it",
    "custom_partitioner_fn": _ELSEWHERE,
    "fx_wrapper": _ELSEWHERE,
    "keep_output_stride": _ELSEWHERE,
    "pad_outputs": "what a program returns would have other strides than the programs that take it are compiled for",
    "use_pre_grad_passes": _ELSEWHERE,
    "add_pre_grad_passes": _ELSEWHERE,
    "remove_pre_grad_passes": _ELSEWHERE,
}
_REFUSED_BEGINNINGS = {
    "aot_inductor.": "no program is compiled ahead of time",
    "freezing": _ELSEWHERE,
    "pre_grad_": _ELSEWHERE,
}
_OF_THE_COMPILER = ("compile_threads", "worker_", "quiesce_", "cpp.cxx", "trace.", "log_")
"""How it works, not what it makes."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise PlanError for an option that Inductor does not have, that has another type, or that cannot hold here."""
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in options.items():
        where = f"Plan(compile_options={{{name!r}: ...}})"
        if name not in known:
            raise PlanError(
                f"Inductor has no option {name!r}", where=where, do="see torch._inductor.list_options() for the names"
            )
        reason = _reason(name)
        if reason and value != OWN.get(name, known[name]):
            raise PlanError(f"Inductor's option {name!r} cannot be set: {reason}", where=where, do="leave it out")
        form = config.get_type(name)  # type: ignore[attr-defined]
        if isinstance(form, type) and not isinstance(value, form):
            raise PlanError(
                f"Inductor's option {name!r} has another type", where=where, expected=form.__name__, got=repr(value)
            )
        if not _is_plain(value):
            raise PlanError(
                f"Inductor's option {name!r} is given an object that ranks and saved programs cannot compare",
                where=where,
                expected="numbers, strings, None, and lists, tuples and dictionaries of them",
                got=repr(value),
            )


def _reason(name: str) -> str:
    """Why an option cannot be set; empty where it can."""
    return _REFUSED.get(name) or next((why for one, why in _REFUSED_BEGINNINGS.items() if name.startswith(one)), "")


def _is_plain(value: object) -> bool:
    """Whether equal values are equal as text, in every process."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


@contextlib.contextmanager
def with_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Within, programs are compiled with these options, and with those that they need.

    Code that Inductor has kept on disk was made with this folder's corrections, and calls its operators: the key of
    such code holds the folder's text.
    """
    from torch._inductor import config
    from torch.compiler import config as disk

    tag = f"{disk.cache_key_tag} {source_text(Path(__file__).parent)}"
    with config.patch({**OWN, **options}), disk.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


@cache
def source_text(*folders: Path) -> str:
    """A digest of all Python files of these folders and of those below."""
    seen = hashlib.sha256()
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        seen.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return seen.hexdigest()[:16]


def writes_cpp(options: Mapping[str, Any]) -> bool:
    """Whether the code around the kernels will be in C++, by these options or those of the process."""
    from torch._inductor import config

    return bool(options.get("cpp_wrapper", config.cpp_wrapper))


def options_text(options: Mapping[str, Any]) -> dict[str, str]:
    """All options that then hold, by name, as far as code depends on them."""
    from torch._inductor import config

    with with_options(options):
        found: dict[str, Any] = config.save_config_portable(ignore_private_configs=False)
    return {name: _text(value) for name, value in sorted(found.items()) if not name.startswith(_OF_THE_COMPILER)}


def _text(value: object) -> str:
    return str(getattr(value, "__qualname__", None) or repr(value))
