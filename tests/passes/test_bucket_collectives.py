"""Small collectives become few larger ones, bitwise the same."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch.fx import Node

from graphcomp.compat import collective_operators as ops
from graphcomp.errors import PlanError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.calls import arguments
from graphcomp.ir.collective_calls import axis_of, is_start
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level, Program
from graphcomp.passes.bucket_collectives import BucketCollectives
from graphcomp.passes.manager import PassManager
from graphcomp.passes.pipeline import parse_pipeline
from tests.ir.build import Builder, aten


class Start(Builder):
    """Gradients named a, b, c, ... and collectives of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[role.Role, Node | None] = {}

    def gradient(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        self.note = Note(Phase.BACKWARD, name)
        with self.mode:
            return self.input(role.Grad(name), torch.empty(shape, dtype=dtype), name)

    def through(self, source: Node, target: object, *rest: object) -> Node:
        return self.call(ops.WAIT, self.call(target, source, *rest))  # type: ignore[arg-type]

    def finish(self, **results: Node) -> Program:
        return self.program({role.Grad(name): node for name, node in results.items()}, level=Level.STEP)


def of_kind(target: object, *rest: object) -> Program:
    b = Start()
    a, c = b.gradient("a", 4), b.gradient("c", 6)
    b.note = Note(Phase.BACKWARD, "a")
    first = b.call(aten.sin.default, b.through(a, target, *rest))
    b.note = Note(Phase.BACKWARD, "c")
    return b.finish(a=first, c=b.call(aten.cos.default, b.through(c, target, *rest)))


KINDS = {
    "all_reduce": (ops.ALL_REDUCE, "sum", "dp"),
    "all_gather": (ops.ALL_GATHER, 2, "dp"),
    "reduce_scatter": (ops.REDUCE_SCATTER, "avg", 2, "dp"),
}


def buckets(program: Program, size: int = 1 << 20) -> list[tuple[str, int]]:
    """The collectives after the pass: operator and bytes of input."""
    joined = PassManager([BucketCollectives(size)]).run(program)
    found = []
    for node in filter(is_start, joined.calls()):
        value = meta.tensor(arguments(node)["input"])
        assert value is not None
        found.append((str(node.target).split(".")[1], value.nbytes))
    return found


class TestText(TestCase):
    maxDiff = None

    def before(self, kind: str) -> str:
        return print_program(of_kind(*KINDS[kind]), groups={"dp": "dp"})

    def after(self, kind: str) -> str:
        joined = PassManager([BucketCollectives(1000)]).run(of_kind(*KINDS[kind]))
        return print_program(joined, groups={"dp": "dp"})

    def test_all_reduce_before(self) -> None:
        self.assertExpectedInline(
            self.before("all_reduce"),
            """\
step program "sample"
  %a: f32[4] = grad a
  %c: f32[6] = grad c
backward:
  %all_reduce: f32[4] = _c10d_functional.all_reduce(%a, 'sum', dp)              # a
  %wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)              # a
  %sin: f32[4] = sin(%wait_tensor)                                              # a
  %all_reduce_1: f32[6] = _c10d_functional.all_reduce(%c, 'sum', dp)            # c
  %wait_tensor_1: f32[6] = _c10d_functional.wait_tensor(%all_reduce_1)          # c
  %cos: f32[6] = cos(%wait_tensor_1)                                            # c
return grad a = %sin
return grad c = %cos
""",
        )

    def test_all_reduce_after(self) -> None:
        self.assertExpectedInline(
            self.after("all_reduce"),
            """\
step program "sample"
  %a: f32[4] = grad a
  %c: f32[6] = grad c
backward:
  %cat: f32[10] = cat([%a, %c])                                                 # a .. c
  %all_reduce_2: f32[10] = _c10d_functional.all_reduce(%cat, 'sum', dp)         # a .. c
  %wait_tensor_2: f32[10] = _c10d_functional.wait_tensor(%all_reduce_2)         # a .. c
  %slice_1: f32[4] = slice.Tensor(%wait_tensor_2, 0, 0, 4)                      # a
  %sin: f32[4] = sin(%slice_1)                                                  # a
  %slice_2: f32[6] = slice.Tensor(%wait_tensor_2, 0, 4, 10)                     # c
  %cos: f32[6] = cos(%slice_2)                                                  # c
return grad a = %sin
return grad c = %cos
""",
        )

    def test_all_gather_after(self) -> None:
        self.assertExpectedInline(
            self.after("all_gather"),
            """\
step program "sample"
  %a: f32[4] = grad a
  %c: f32[6] = grad c
backward:
  %cat: f32[10] = cat([%a, %c])                                                 # a .. c
  %all_gather_into_tensor_2: f32[20] = _c10d_functional.all_gather_into_tensor(%cat, 2, dp)  # a .. c
  %wait_tensor_2: f32[20] = _c10d_functional.wait_tensor(%all_gather_into_tensor_2)  # a .. c
  %view: f32[2, 10] = view(%wait_tensor_2, [2, 10])                             # a .. c
  %slice_1: f32[2, 4] = slice.Tensor(%view, 1, 0, 4)                            # a
  %clone: f32[2, 4] = clone(%slice_1, memory_format=contiguous)                 # a
  %view_1: f32[8] = view(%clone, [8])                                           # a
  %sin: f32[8] = sin(%view_1)                                                   # a
  %slice_2: f32[2, 6] = slice.Tensor(%view, 1, 4, 10)                           # c
  %clone_1: f32[2, 6] = clone(%slice_2, memory_format=contiguous)               # c
  %view_2: f32[12] = view(%clone_1, [12])                                       # c
  %cos: f32[12] = cos(%view_2)                                                  # c
return grad a = %sin
return grad c = %cos
""",
        )

    def test_reduce_scatter_after(self) -> None:
        self.assertExpectedInline(
            self.after("reduce_scatter"),
            """\
step program "sample"
  %a: f32[4] = grad a
  %c: f32[6] = grad c
backward:
  %view: f32[2, 2] = view(%a, [2, 2])                                           # a .. c
  %view_1: f32[2, 3] = view(%c, [2, 3])                                         # a .. c
  %cat: f32[2, 5] = cat([%view, %view_1], 1)                                    # a .. c
  %view_2: f32[10] = view(%cat, [10])                                           # a .. c
  %reduce_scatter_tensor_2: f32[5] = _c10d_functional.reduce_scatter_tensor(%view_2, 'avg', 2, dp)  # a .. c
  %wait_tensor_2: f32[5] = _c10d_functional.wait_tensor(%reduce_scatter_tensor_2)  # a .. c
  %slice_1: f32[2] = slice.Tensor(%wait_tensor_2, 0, 0, 2)                      # a
  %sin: f32[2] = sin(%slice_1)                                                  # a
  %slice_2: f32[3] = slice.Tensor(%wait_tensor_2, 0, 2, 5)                      # c
  %cos: f32[3] = cos(%slice_2)                                                  # c
return grad a = %sin
return grad c = %cos
""",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_the_same(kind: str) -> None:
    program = of_kind(*KINDS[kind])
    joined = PassManager([BucketCollectives(1000)]).run(program)
    assert len(list(filter(is_start, joined.calls()))) == 1
    inputs = [[torch.randn(4), torch.randn(6)] for _ in range(2)]
    expected, found = (lockstep(each, "dp", [list(box) for box in inputs]) for each in (program, joined))
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


def test_bytes_are_an_upper_bound() -> None:
    def program() -> Program:
        b = Start()
        sizes = {"a": 4, "b": 4, "c": 2, "d": 9, "e": 1, "f": 1}
        return b.finish(
            **{name: b.through(b.gradient(name, size), *KINDS["all_reduce"]) for name, size in sizes.items()}
        )

    assert [size for _, size in buckets(program(), 32)] == [32, 36, 16]  # d is larger than any bucket
    assert [size for _, size in buckets(program(), 31)] == [16, 36, 28, 4]
    assert [size for _, size in buckets(program(), 1)] == [16, 16, 8, 36, 4, 4]
    assert [size for _, size in buckets(program(), 84)] == [84]


def test_what_fills_a_bucket_stands_alone_and_is_not_copied() -> None:
    b = Start()
    sizes = {"a": 4, "b": 8, "c": 4, "d": 7}
    program = b.finish(
        **{name: b.through(b.gradient(name, size), *KINDS["reduce_scatter"]) for name, size in sizes.items()}
    )
    joined = PassManager([BucketCollectives(32)]).run(program)
    alone, pair, last = filter(is_start, joined.calls())
    assert [arguments(start)["input"] for start in (alone, last)] == [joined.placeholders[1], joined.placeholders[3]]
    assert meta.tensor(arguments(pair)["input"]).shape == (8,)  # type: ignore[union-attr]


def test_the_larger_of_input_and_result_counts() -> None:
    b = Start()
    results = {name: b.through(b.gradient(name, 4), *KINDS["all_gather"]) for name in "abc"}
    program = b.finish(**results)
    assert [size for _, size in buckets(program, 64)] == [32, 16]
    assert [size for _, size in buckets(program, 32)] == [16, 16, 16]


def test_only_like_collectives_are_joined() -> None:
    b = Start()
    half = {name: b.gradient(name, 4, dtype=torch.bfloat16) for name in ("a", "b")}
    full = {name: b.gradient(name, 4) for name in ("c", "d", "e", "f", "g", "h")}
    done = {
        "a": b.through(half["a"], *KINDS["all_reduce"]),
        "c": b.through(full["c"], *KINDS["all_reduce"]),
        "b": b.through(half["b"], *KINDS["all_reduce"]),
        "d": b.through(full["d"], *KINDS["all_reduce"]),
        "e": b.through(full["e"], ops.ALL_REDUCE, "max", "dp"),
        "f": b.through(full["f"], ops.ALL_REDUCE, "sum", "tp"),
        "g": b.through(full["g"], *KINDS["all_gather"]),
        "h": b.through(full["h"], ops.BROADCAST, 0, "dp"),
    }
    program = b.finish(**done)
    found = buckets(program)
    kinds = ["all_reduce", "all_reduce", "all_reduce", "all_reduce", "all_gather_into_tensor", "broadcast"]
    assert found == list(zip(kinds, [16, 32, 16, 16, 16, 16], strict=True))
    joined = PassManager([BucketCollectives(1 << 20)]).run(program)
    assert [axis_of(node) for node in joined.calls() if is_start(node)] == ["dp", "dp", "dp", "tp", "dp", "dp"]


def test_more_than_one_dimension_stands_alone() -> None:
    b = Start()
    a, c = b.gradient("a", 2, 2), b.gradient("c", 4)
    assert len(buckets(b.finish(a=b.through(a, *KINDS["all_reduce"]), c=b.through(c, *KINDS["all_reduce"])))) == 2


def test_a_collective_never_waits_for_itself() -> None:
    """b's reduction needs a's, d's needs c's; joined across, each bucket would need the other."""
    b = Start()
    a, c = b.gradient("a", 4), b.gradient("c", 4)
    reduce = KINDS["all_reduce"]
    gathered = b.through(b.through(a, *reduce), *KINDS["all_gather"])
    other = b.through(c, *KINDS["all_gather"])
    again = b.through(other, *reduce)
    program = b.finish(a=gathered, c=again)
    joined = PassManager([BucketCollectives(1 << 20)]).run(program)
    assert len(list(filter(is_start, joined.calls()))) == 4
    inputs = [[torch.randn(4), torch.randn(4)] for _ in range(2)]
    expected, found = (lockstep(each, "dp", [list(box) for box in inputs]) for each in (program, joined))
    assert all(map(torch.equal, expected[1], found[1]))


def test_arguments_may_be_given_by_name() -> None:
    b = Start()
    results = {}
    for name in ("a", "c"):
        source = b.gradient(name, 4)
        call = b.call(ops.REDUCE_SCATTER, source, group_name="dp", group_size=2, reduce_op="sum")
        results[name] = b.call(ops.WAIT, call)
    assert buckets(b.finish(**results)) == [("reduce_scatter_tensor", 32)]


def test_notes_name_what_a_bucket_serves() -> None:
    joined = PassManager([BucketCollectives(1000)]).run(of_kind(*KINDS["all_reduce"]))
    notes = {node.name: meta.note(node) for node in joined.calls()}
    assert notes["cat"] == Note(Phase.BACKWARD, "a .. c")
    assert [notes[name].module for name in ("sin", "cos")] == ["a", "c"]


def test_text_of_the_pipeline_and_its_option() -> None:
    (only,) = parse_pipeline("bucket_collectives{bytes=25}")
    assert (only, str(only)) == (BucketCollectives(25), "bucket_collectives{bytes=25}")
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(PlanError, match="takes the most bytes of a joined collective"):
            BucketCollectives(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="does not apply at level joint"):
        PassManager([only]).run(Start().program({}))
