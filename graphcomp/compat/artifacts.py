"""Inductor's compiled code as bytes and back. It has an entry for that, but only above AOTAutograd, and without the
shared objects that code for a CPU is in.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

from graphcomp.compat.inductor import CompiledCode, callable_of
from graphcomp.compat.inductor_options import with_options
from graphcomp.compat.symbols import FakeTensorMode


@dataclass(frozen=True)
class PackedCode:
    """graph: Inductor's own object, pickled. files: the shared objects it loads, by their place in its cache folder."""

    graph: bytes
    files: tuple[tuple[str, bytes], ...]


def pack(code: CompiledCode) -> PackedCode:
    """Raises what pickle raises for code that holds something that cannot be written."""
    graph = copy.copy(code.graph)
    graph.prepare_for_serialization()
    files = {path: (_folder() / path).read_bytes() for path in _objects(graph.cache_key)}
    return PackedCode(pickle.dumps(graph), tuple(sorted(files.items())))


def unpack(
    packed: PackedCode, inputs: Sequence[Any], mode: FakeTensorMode, options: Mapping[str, Any] | None = None
) -> CompiledCode:
    """inputs, options: as for compiling. Files that Inductor's cache folder has already stay as they are."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.virtualized import V

    for path, contents in packed.files:
        target = _folder() / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.{os.getpid()}")  # other processes may do the same
            part.write_bytes(contents)
            part.chmod(0o755)
            part.replace(target)
    graph = pickle.loads(packed.graph)
    with tracing(TracingContext(mode)), with_options(options or {}), V.set_fake_mode(mode):
        constants = CompiledFxGraphConstants()
        loaded, _ = FxGraphCache.cache_hit_post_compile(graph, {}, constants)
        if loaded is None:
            raise OSError(f"the code of {graph.cache_key} cannot be read back from {_folder()}")
        loaded.post_compile(list(inputs), constants, loaded.fx_kwargs)
    return CompiledCode(callable_of(loaded), loaded)


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _objects(key: str) -> Iterator[str]:
    """The shared objects behind the kernels of a generated module."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules:
        if getattr(module, "key", None) == key:
            for value in vars(module).values():
                owner = value.__self__ if isinstance(value, BuiltinFunctionType) else None
                file = getattr(owner, "__file__", None) if isinstance(owner, ModuleType) else None
                if file is not None and Path(file).is_relative_to(_folder()):
                    yield str(Path(file).relative_to(_folder()))
