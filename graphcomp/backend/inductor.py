"""Compiles programs with Inductor, each distinct one once, for all sizes.

The graph goes to Inductor's own compiler directly, not through `torch._inductor.standalone_compile`: that
one traces the graph a second time to find mutations, aliases and gradients, of which a program has none,
and wraps every call. For two small matrix products (16x16 @ 16x32 @ 32x8, 4.9 us in eager) a call takes 4.7
us instead of 10.2, and a training step of a small GPT compiles in three quarters of the time. The wrapper's
list protocol is lost too: it keeps all inputs alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph

from graphcomp.backend.base import Boxed, Compiled, Listener, Progress
from graphcomp.backend.chunks import in_turn
from graphcomp.backend.cross_entropy import drop_class_sum
from graphcomp.backend.embeddings import scatter_embeddings
from graphcomp.backend.functions import compilable
from graphcomp.backend.layout import Layouts
from graphcomp.compat.artifacts import PackedCode, pack, unpack
from graphcomp.compat.grad_mode import runs_as_written
from graphcomp.compat.inductor import CompiledCode, compile_graph, guards_since
from graphcomp.compat.inductor_options import check_options, writes_cpp
from graphcomp.compat.symbols import fails_in_the_example, guard_count
from graphcomp.errors import BackendError
from graphcomp.ir import meta, spelling
from graphcomp.ir.collective_calls import axis_of, is_start, name_groups
from graphcomp.ir.digest import digest
from graphcomp.ir.interp import as_written, boxed_callable
from graphcomp.ir.program import Program
from graphcomp.partition.accumulating import in_place, written

_LOCK = threading.RLock()  # Inductor's options are global while it compiles


@dataclass(frozen=True)
class _Artifact:
    """code: without a check of inputs. symbols: those of the program it was compiled from, by their normal
    names. assumed: all conditions that its shape environment held at the end. Code that was read from a file
    is unpacked at its first use."""

    code: Boxed | CompiledCode | PackedCode
    environment: Any
    symbols: Mapping[str, str]
    assumed: tuple[sympy.Basic, ...]


@dataclass(frozen=True)
class PackedArtifact:
    """An artifact, and the key that it is found by, without its shape environment."""

    key: object
    code: PackedCode
    symbols: Mapping[str, str]
    assumed: tuple[sympy.Basic, ...]


@dataclass
class InductorBackend:
    """See the module's docstring."""

    listener: Listener | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    programs: int = 0
    reused: int = 0
    _artifacts: dict[object, list[_Artifact]] = field(default_factory=dict, repr=False)
    name = "inductor"

    def __post_init__(self) -> None:
        check_options(self.options)

    def compile(self, program: Program, groups: Mapping[str, str] | None = None) -> Compiled:
        """Compile a program, or hand out the code of an equal one.

        groups: for the program's collectives: what it calls their ranks -> name of this process's group.

        Raises BackendError with the program's name if Inductor fails; its own error is the cause.
        """
        begin = time.perf_counter()
        with _LOCK:
            # Code is made for a number of threads, and for process groups by name.
            key = digest(program), torch.get_num_threads(), _group_names(program, groups or {})
            known = self._artifacts.setdefault(key, [])
            for place, artifact in enumerate(known):
                conditions = _carry_over(artifact, program)
                if conditions is not None and not any(fails_in_the_example(program.fake_mode, c) for c in conditions):
                    self.reused += 1
                    known[place] = artifact = _unpacked(artifact, program, self.options)
                    return self._done(program, artifact, conditions, begin, reused=True)
            self._tell(Progress(program.name, "started"))
            before = guard_count(program.fake_mode)
            artifact = _compile(program, groups or {}, self.options)
            known.append(artifact)
            self.programs += 1
            added = guards_since(program.fake_mode, before, artifact.symbols)
            return self._done(program, artifact, added, begin, reused=False)

    def _done(
        self, program: Program, artifact: _Artifact, conditions: tuple[Any, ...], begin: float, reused: bool
    ) -> Compiled:
        seconds = time.perf_counter() - begin
        self._tell(Progress(program.name, "reused" if reused else "compiled", seconds))
        code: Any = artifact.code
        call = code.call if isinstance(code, CompiledCode) else code
        return Compiled(_guarded(call, Layouts(program)), conditions, seconds, reused)

    def pack(self, environment: Any) -> tuple[PackedArtifact, ...]:
        found = []
        for key, known in self._artifacts.items():
            for one in known:
                if one.environment is environment and isinstance(one.code, CompiledCode | PackedCode):
                    code = pack(one.code) if isinstance(one.code, CompiledCode) else one.code
                    found.append(PackedArtifact(key, code, one.symbols, one.assumed))
        return tuple(found)

    def adopt(self, packed: tuple[PackedArtifact, ...], environment: Any) -> None:
        for one in packed:
            artifact = _Artifact(one.code, environment, one.symbols, one.assumed)
            self._artifacts.setdefault(one.key, []).append(artifact)

    def _tell(self, progress: Progress) -> None:
        if self.listener is not None:
            self.listener(progress)


def _group_names(program: Program, groups: Mapping[str, str]) -> tuple[str | None, ...]:
    """The process groups behind the collectives of a program, in order."""
    return tuple(groups.get(axis_of(node) or "") for node in program.calls() if is_start(node))


def _compile(program: Program, groups: Mapping[str, str], options: Mapping[str, Any]) -> _Artifact:
    _check_devices(program, options)
    symbols = _symbols(program)
    graph = program.copy().graph
    in_turn(graph)
    name_groups(graph, groups, f"program '{program.name}'")
    try:
        code = _code(program, graph, options)
    except Exception as error:
        text = str(error).strip().splitlines() or ["(no text)"]
        raise BackendError(
            f"Inductor cannot compile program '{program.name}'",
            where=f"program '{program.name}'",
            got=f"{type(error).__name__}: {text[0]}",
            do=f"see the cause below; {_way_out(options)}backend='eager' runs the same program without compiling",
        ) from error
    return _Artifact(code, program.fake_mode.shape_env, symbols, guards_since(program.fake_mode, 0, symbols))


def _check_devices(program: Program, options: Mapping[str, Any]) -> None:
    """Code in C++ around kernels of a device is tuned and loaded by other options, which nobody has tried here."""
    if not writes_cpp(options):
        return
    tensors = (meta.tensor(node) for node in program.graph.nodes)
    other = next((x.device for x in tensors if x is not None and x.device.type != "cpu"), None)
    if other is not None:
        raise BackendError(
            f"Inductor's option 'cpp_wrapper' is for programs on CPU, and program '{program.name}' is not",
            where=f"program '{program.name}'",
            expected="tensors on cpu",
            got=f"one on {other}",
            do="leave 'cpp_wrapper' out of Plan(compile_options=...), and out of torch._inductor.config",
        )


def _way_out(options: Mapping[str, Any]) -> str:
    return f"leave out compile_options={dict(options)}; " if options else ""


def _unpacked(artifact: _Artifact, program: Program, options: Mapping[str, Any]) -> _Artifact:
    if not isinstance(artifact.code, PackedCode):
        return artifact
    inputs = [meta.value(node) for node in program.placeholders]
    with as_written():
        return replace(artifact, code=unpack(artifact.code, inputs, program.fake_mode, options))


def _code(program: Program, graph: Graph, options: Mapping[str, Any]) -> Boxed | CompiledCode:
    """graph: a copy of the program's, in which process groups go by their own names."""
    if not program.calls():  # nothing to compile, and Inductor would keep the list
        return boxed_callable(in_place(program))
    scatter_embeddings(graph)
    drop_class_sum(graph)
    module = compilable(graph)
    inputs = [meta.value(node) for node in program.placeholders]
    with as_written():
        return compile_graph(module, inputs, program.fake_mode, list(written(program)), options)


def _symbols(program: Program) -> dict[str, str]:
    """By the program's own symbols: the names they have in every equal program."""
    symbols = spelling.Symbols(program)
    for node in program.graph.nodes:
        spelling.value(meta.value(node), symbols)
    return dict(symbols.items())


def _carry_over(artifact: _Artifact, program: Program) -> tuple[sympy.Basic, ...] | None:
    """The conditions under which the code of an equal program serves this one, over this one's symbols.

    All that was known where it was compiled, not only what compiling added: the code may rely on it. What this trace
    knows already is left out. None: a condition there speaks of a size that this program does not have, so nobody could
    check it.
    """
    same = artifact.environment is program.fake_mode.shape_env
    own = {normal: symbol for symbol, normal in _symbols(program).items()}
    carried = []
    for relation in artifact.assumed:
        swap: dict[sympy.Basic, sympy.Basic] = {}
        for symbol in relation.free_symbols:
            normal = artifact.symbols.get(str(symbol))
            if normal is None and same:
                continue  # a symbol of the microbatch at large
            if normal is None or normal not in own:
                return None
            swap[symbol] = sympy.Symbol(own[normal], **symbol.assumptions0)
        found = relation.xreplace(swap)
        if not same or found != relation:
            carried.append(found)
    return tuple(carried)


def _guarded(code: Boxed, layouts: Layouts) -> Boxed:
    """Code with the first call's inputs compared with the program, and no autograd or autocast on top."""
    unchecked = True

    def call(box: list[Any]) -> Sequence[Any]:
        nonlocal unchecked
        if unchecked:
            layouts.check(box)
            unchecked = False
        if runs_as_written():
            return code(box)
        with as_written():
            return code(box)

    return call
