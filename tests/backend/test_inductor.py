"""Inductor: one compile for equal programs, conditions, errors, random numbers, memory."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
from torch._inductor import config

from graphcomp import backend
from graphcomp.backend import inductor as module
from graphcomp.compat import inductor as shim
from graphcomp.compat.symbols import guard_count
from graphcomp.errors import BackendError
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import Activation, Saved
from tests.backend import samples
from tests.ir.build import Builder

pytestmark = pytest.mark.inductor
aten = torch.ops.aten


def test_equal_programs_compile_once() -> None:
    heard: list[backend.Progress] = []
    chosen = backend.get("inductor", heard.append)
    first = chosen.compile(samples.forward("stage 0 forward", "layers.0.weight"))
    second = chosen.compile(samples.forward("stage 1 forward", "layers.1.weight"))
    assert (chosen.programs, chosen.reused) == (1, 1)
    assert (first.reused, second.reused) == (False, True)
    assert [(event.program, event.state) for event in heard] == [
        ("stage 0 forward", "started"),
        ("stage 0 forward", "compiled"),
        ("stage 1 forward", "reused"),
    ]
    inputs = samples.forward_inputs(9)
    samples.equal(second(list(inputs)), first(list(inputs)), exactly=True)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 9), (31, 3), (64, 64)])
def test_sizes_are_inputs(rows: int, columns: int) -> None:
    program = samples.with_size()
    inputs = [torch.randn(rows, columns), rows, columns, torch.tensor(2.0)]
    got = backend.get("inductor").compile(program)(list(inputs))
    samples.equal(got, boxed_callable(program)(list(inputs)), exactly=False)


def condition_program(rows: int = 6) -> tuple[Program, sympy.Symbol]:
    b = Builder(example=(rows, 16))
    x = b.input(Activation(0, 1, 0), b.leaf, "x")
    y = b.call(aten.sin.default, x)
    return b.program({Activation(1, 2, 0): y}, "conditioned", Level.STAGE), b.sizes[0].node.expr


def test_conditions_that_compiling_adds_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the compiler asks the shape environment whether there are less than 1000 rows."""
    program, rows = condition_program()

    def asking(graph: object, inputs: list[torch.Tensor], mode: object, *rest: Any) -> module.Boxed:
        assert inputs[0].shape[0] < 1000
        return lambda box: [box.pop().sin()]

    monkeypatch.setattr(module, "compile_graph", asking)
    chosen = backend.get("inductor")
    first = chosen.compile(program)
    assert [str(relation) for relation in first.conditions] == [f"{rows} < 1000"]
    # Another trace of the same program has symbols of its own; the condition comes along, in those.
    other, other_rows = condition_program(rows=7)
    second = chosen.compile(other)
    assert second.reused
    assert {s.name for c in second.conditions for s in c.free_symbols} <= {str(other_rows)}
    assert any(c.subs(dict.fromkeys(c.free_symbols, 1000)) == sympy.false for c in second.conditions)


def test_code_for_other_sizes_does_not_serve_an_equal_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler decides on the rows. What it made for few would call for another capture, again and again."""

    def deciding(graph: object, inputs: list[torch.Tensor], mode: object, *rest: Any) -> module.Boxed:
        few = bool(inputs[0].shape[0] < 1000)
        return lambda box: [few]

    monkeypatch.setattr(module, "compile_graph", deciding)
    chosen = backend.get("inductor")
    for rows, reused in ((6, False), (1200, False), (7, True), (1300, True)):
        program, _ = condition_program(rows)
        made = chosen.compile(program)
        assert made.reused == reused
        assert made([torch.zeros(rows, 16)]) == [rows < 1000]
        assert all(c.subs(dict.fromkeys(c.free_symbols, rows)) == sympy.true for c in made.conditions)


@pytest.mark.parametrize("columns", [16, 9])
def test_what_was_known_of_a_size_has_to_hold_for_another_of_the_same_trace(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Rows are known to divide by three when they are compiled. The code may rely on it, also for columns."""
    monkeypatch.setattr(module, "compile_graph", lambda *_: lambda box: [box.pop().sin()])
    trace = Builder(example=(6, columns))

    def sine(size: Any) -> Program:
        b = Builder()
        b.mode = trace.mode
        y = b.call(aten.sin.default, b.input(Activation(0, 1, 0), (size, 4), "x"))
        return b.program({Activation(1, 2, 0): y}, "sine", Level.STAGE)

    rows, other = trace.sizes
    assert rows % 3 == 0
    chosen = backend.get("inductor")
    assert chosen.compile(sine(rows)).conditions == ()
    assert chosen.compile(sine(rows)).reused
    made = chosen.compile(sine(other))
    assert made.reused == (columns == 9)
    if made.reused:
        assert [str(c) for c in made.conditions] == [f"Eq(Mod({other.node.expr}, 3), 0)"]


def test_what_was_known_of_a_size_that_another_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was known to divide by three before the trace found that it equals the one which the program has."""

    monkeypatch.setattr(module, "compile_graph", lambda *_: lambda box: [box.pop().sin()])
    trace = Builder(example=(6, 6, 9))
    numbers = {str(size.node.expr): place for place, size in enumerate(trace.sizes[:2])}
    stays, gone = sorted(numbers)
    third = trace.sizes[2]
    assert trace.sizes[numbers[gone]] % 3 == 0
    assert trace.sizes[0] == trace.sizes[1]
    assert {str(size.node.expr) for size in trace.sizes[:2]} == {stays}

    def sine(size: Any) -> Program:
        b = Builder()
        b.mode = trace.mode
        y = b.call(aten.sin.default, b.input(Activation(0, 1, 0), (size, 4), "x"))
        return b.program({Activation(1, 2, 0): y}, "sine", Level.STAGE)

    chosen = backend.get("inductor")
    assert chosen.compile(sine(trace.sizes[0])).conditions == ()
    other = chosen.compile(sine(third))
    assert other.reused and [str(c) for c in other.conditions] == [f"Eq(Mod({third.node.expr}, 3), 0)"]


def test_indexing_limits_become_conditions() -> None:
    program, _ = condition_program()
    before = guard_count(program.fake_mode)
    compiled = backend.get("inductor").compile(program)
    symbols = set(map(str, program.fake_mode.shape_env.backed_var_to_val))  # type: ignore[union-attr]
    assert len(shim.guards_since(program.fake_mode, before, symbols)) == len(compiled.conditions)
    holds = [c.subs(dict.fromkeys(c.free_symbols, 9)) for c in compiled.conditions]
    assert all(value == sympy.true for value in holds)


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({}, "see the cause below; backend"),
        ({"max_autotune": True}, "leave out compile_options={'max_autotune': True};"),
    ],
    ids=["none", "one"],
)
def test_an_error_of_the_compiler_names_the_program(
    options: dict[str, bool], way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> module.Boxed:
        raise RuntimeError("no such lowering\nand more")

    monkeypatch.setattr(module, "compile_graph", broken)
    with pytest.raises(BackendError, match="Inductor cannot compile program 'stage 1 forward'") as caught:
        backend.get("inductor", options=options).compile(samples.forward())
    assert way_out in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "got: RuntimeError: no such lowering\n" in str(caught.value)


def test_random_numbers_are_those_of_eager() -> None:
    b = Builder(example=(6, 16))
    x = b.input(Activation(0, 1, 0), b.leaf, "x")
    pair = b.call(aten.native_dropout.default, x, 0.5, True)
    kept = b.call(operator.getitem, pair, 0)
    mask = b.call(operator.getitem, pair, 1)
    y = b.call(aten.mul.Tensor, kept, 3.0)
    program = b.program({Activation(1, 2, 0): y, Saved(0): mask}, "dropout", Level.STAGE)
    compiled = backend.get("inductor").compile(program)
    x_value = torch.randn(40, 16)
    torch.manual_seed(5)
    got = compiled([x_value])
    torch.manual_seed(5)
    samples.equal(got, boxed_callable(program)([x_value]), exactly=True)


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["Python", "C++"])
def test_saved_values_are_freed_as_they_are_used(options: dict[str, bool]) -> None:
    """A chain of products, each with another input: what is used first is gone before the end."""
    b = Builder(example=(6, 64))
    x = b.input(Activation(0, 1, 0), (64, 64), "x")
    weights = [b.input(Saved(i), (64, 64), f"w{i}") for i in range(3)]
    for weight in weights:
        x = b.call(aten.mm.default, x, weight)
    program = b.program({Activation(1, 2, 0): x}, "chain", Level.STAGE)
    compiled = backend.get("inductor", options=options).compile(program)
    compiled([torch.zeros(64, 64) for _ in range(4)])
    peak = Peak()
    with torch.profiler.profile(profile_memory=True) as profile:
        compiled([torch.zeros(64, 64) for _ in range(4)])
    for event in profile.profiler.kineto_results.events():
        peak.see(event)
    assert peak.most <= 5 * 64 * 64 * 4  # four inputs and one product; six if inputs were kept


class Peak:
    """Most bytes in use at once, of the profiler's allocation events in order of time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def see(self, event: object) -> None:
        if event.name() == "[memory]":  # type: ignore[attr-defined]
            self.now += event.nbytes()  # type: ignore[attr-defined]
            self.most = max(self.most, self.now)


def test_the_code_around_the_kernels_in_cpp() -> None:
    """A program with sizes among its inputs."""
    chosen = backend.get("inductor", options={"cpp_wrapper": True})
    program = samples.with_size()
    compiled = chosen.compile(program)
    for rows, columns in [(2, 9), (31, 3)]:
        inputs = [torch.randn(rows, columns), rows, columns, torch.tensor(2.0)]
        samples.equal(compiled(list(inputs)), boxed_callable(program)(list(inputs)), exactly=False)


@pytest.mark.parametrize("by_plan", [True, False], ids=["plan", "process"])
def test_that_code_is_for_the_cpu_alone(by_plan: bool) -> None:
    """The program's tensors are fake: no such device is needed."""
    b = Builder()
    with b.mode:
        x = torch.empty(4, 4, device="cuda")
    y = b.call(aten.sin.default, b.input(Activation(0, 1, 0), x, "x"))
    program = b.program({Activation(1, 2, 0): y}, "stage 1 forward", Level.STAGE)
    chosen = backend.get("inductor", options={"cpp_wrapper": True} if by_plan else {})
    with pytest.raises(BackendError) as caught, config.patch(cpp_wrapper=not by_plan):
        chosen.compile(program)
    assert str(caught.value) == (
        "Inductor's option 'cpp_wrapper' is for programs on CPU, and program 'stage 1 forward' is not\n"
        "  where: program 'stage 1 forward'\n  expected: tensors on cpu\n  got: one on cuda:0\n"
        "  what to do: leave 'cpp_wrapper' out of Plan(compile_options=...), and out of torch._inductor.config\n"
        "  (see docs/errors.md#backenderror)"
    )


def test_a_long_sum_asks_nothing_of_the_sizes() -> None:
    """The C++ backend would add up more than 4096 terms in another way, which must not tie the program to fewer."""
    b = Builder(example=(6, 16))
    x = b.input(Activation(0, 1, 0), b.leaf, "x")
    y = b.call(aten.sum.dim_IntList, b.call(aten.sin.default, x), [0])
    program = b.program({Activation(1, 2, 0): y}, "sum", Level.STAGE)
    compiled = backend.get("inductor").compile(program)
    assert all(c.subs(dict.fromkeys(c.free_symbols, 100000)) == sympy.true for c in compiled.conditions)
    inputs = torch.randn(100_000, 16)
    torch.testing.assert_close(compiled([inputs])[0], inputs.double().sin().sum(0).float(), rtol=1e-5, atol=1e-3)
