"""Step programs as they run: joined collectives, bitwise the plain program, within memory, over real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase

from graphcomp.dataparallel.build import collectives_of, step_program
from graphcomp.dataparallel.programs import reduce_program, unshard_program
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import PlanError, VerifyError
from graphcomp.ir import interp
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.testing import run_ranks
from tests.dataparallel.running import Bytes, random, rows, run_all, sharded, spec, specs

AXIS = {"dp": "dp"}
RANKS = [1, 2, 3, 4]
BUCKETS = [1, 100, 300, 1 << 20]


def mixed(ranks: int) -> list[Shards]:
    """Every shape in two dtypes, one after the other."""
    return [
        Shards(Spec(f"{each.name}.{dtype}", each.shape, dtype, "cpu"), ranks)
        for each in specs()
        for dtype in (torch.float32, torch.bfloat16)
    ]


def plain_reduce(ranks: int) -> tuple[Program, list[Spec]]:
    of = mixed(ranks)
    replicated = [spec("scale"), *(Spec(f"whole.{e.name}", e.spec.shape, e.spec.dtype, "cpu") for e in of)]
    return reduce_program(0, replicated, of, ranks), [*replicated, *(each.spec for each in of)]


class TestText(TestCase):
    maxDiff = None

    def test_unshard(self) -> None:
        of = [Shards(spec("fc.weight", 4, 3), 2), Shards(spec("fc.bias", 3), 2), Shards(spec("big", 40), 2)]
        self.assertExpectedInline(
            print_program(step_program(unshard_program(0, of), 128), groups=AXIS),
            """\
step program "stage 0 unshard"
  %shard_fc_weight: f64[2, 3] = shard fc.weight
  %shard_fc_bias: f64[2] = shard fc.bias
  %shard_big: f64[20] = shard big
forward:
  %contiguous: f64[2, 3] = contiguous(%shard_fc_weight)                         # fc.weight
  %view: f64[6] = view(%contiguous, [6])                                        # fc.weight
  %contiguous_1: f64[2] = contiguous(%shard_fc_bias)                            # fc.bias
  %view_2: f64[2] = view(%contiguous_1, [2])                                    # fc.bias
  %cat: f64[8] = cat([%view, %view_2])                                          # fc.weight .. fc.bias
  %all_gather_into_tensor_3: f64[16] = _c10d_functional.all_gather_into_tensor(%cat, 2, dp)  # fc.weight .. fc.bias
  %contiguous_2: f64[20] = contiguous(%shard_big)                               # big
  %view_4: f64[20] = view(%contiguous_2, [20])                                  # big
  %all_gather_into_tensor_2: f64[40] = _c10d_functional.all_gather_into_tensor(%view_4, 2, dp)  # big
  %wait_tensor_3: f64[16] = _c10d_functional.wait_tensor(%all_gather_into_tensor_3)  # fc.weight .. fc.bias
  %view_6: f64[2, 8] = view(%wait_tensor_3, [2, 8])                             # fc.weight .. fc.bias
  %slice_2: f64[2, 6] = slice.Tensor(%view_6, 1, 0, 6)                          # fc.weight
  %clone: f64[2, 6] = clone(%slice_2, memory_format=contiguous)                 # fc.weight
  %view_7: f64[12] = view(%clone, [12])                                         # fc.weight
  %view_1: f64[4, 3] = view(%view_7, [4, 3])                                    # fc.weight
  %slice_3: f64[2, 2] = slice.Tensor(%view_6, 1, 6, 8)                          # fc.bias
  %clone_1: f64[2, 2] = clone(%slice_3, memory_format=contiguous)               # fc.bias
  %view_8: f64[4] = view(%clone_1, [4])                                         # fc.bias
  %slice_1: f64[3] = slice.Tensor(%view_8, 0, 0, 3)                             # fc.bias
  %view_3: f64[3] = view(%slice_1, [3])                                         # fc.bias
  %wait_tensor_2: f64[40] = _c10d_functional.wait_tensor(%all_gather_into_tensor_2)  # big
  %view_5: f64[40] = view(%wait_tensor_2, [40])                                 # big
return param fc.weight = %view_1
return param fc.bias = %view_3
return param big = %view_5
""",
        )

    def test_reduce(self) -> None:
        of = [Shards(spec("fc.w", 4, 3), 2), Shards(spec("fc.b", 3), 2), Shards(spec("big", 40), 2)]
        program = reduce_program(0, [spec("scale"), spec("shift", 1)], of, 2)
        self.assertExpectedInline(
            print_program(step_program(program, 128), groups=AXIS),
            """\
step program "stage 0 reduce"
  %grad_scale: f64[] = grad scale
  %grad_shift: f64[1] = grad shift
  %grad_fc_w: f64[4, 3] = grad fc.w
  %grad_fc_b: f64[3] = grad fc.b
  %grad_big: f64[40] = grad big
backward:
  %contiguous: f64[] = contiguous(%grad_scale)                                  # scale
  %view: f64[1] = view(%contiguous, [1])                                        # scale
  %contiguous_1: f64[1] = contiguous(%grad_shift)                               # shift
  %view_2: f64[1] = view(%contiguous_1, [1])                                    # shift
  %cat: f64[2] = cat([%view, %view_2])                                          # scale .. shift
  %all_reduce_2: f64[2] = _c10d_functional.all_reduce(%cat, 'sum', dp)          # scale .. shift
  %contiguous_2: f64[4, 3] = contiguous(%grad_fc_w)                             # fc.w
  %view_4: f64[12] = view(%contiguous_2, [12])                                  # fc.w
  %view_10: f64[2, 6] = view(%view_4, [2, 6])                                   # fc.w .. fc.b
  %contiguous_3: f64[3] = contiguous(%grad_fc_b)                                # fc.b
  %view_6: f64[3] = view(%contiguous_3, [3])                                    # fc.b
  %constant_pad_nd: f64[4] = constant_pad_nd(%view_6, [0, 1], 0)                # fc.b
  %view_11: f64[2, 2] = view(%constant_pad_nd, [2, 2])                          # fc.w .. fc.b
  %cat_1: f64[2, 8] = cat([%view_10, %view_11], 1)                              # fc.w .. fc.b
  %view_12: f64[16] = view(%cat_1, [16])                                        # fc.w .. fc.b
  %reduce_scatter_tensor_3: f64[8] = _c10d_functional.reduce_scatter_tensor(%view_12, 'sum', 2, dp)  # fc.w .. fc.b
  %wait_tensor_5: f64[2] = _c10d_functional.wait_tensor(%all_reduce_2)          # scale .. shift
  %slice_1: f64[1] = slice.Tensor(%wait_tensor_5, 0, 0, 1)                      # scale
  %view_1: f64[] = view(%slice_1, [])                                           # scale
  %slice_2: f64[1] = slice.Tensor(%wait_tensor_5, 0, 1, 2)                      # shift
  %view_3: f64[1] = view(%slice_2, [1])                                         # shift
  %contiguous_4: f64[40] = contiguous(%grad_big)                                # big
  %view_8: f64[40] = view(%contiguous_4, [40])                                  # big
  %reduce_scatter_tensor_2: f64[20] = _c10d_functional.reduce_scatter_tensor(%view_8, 'sum', 2, dp)  # big
  %wait_tensor_6: f64[8] = _c10d_functional.wait_tensor(%reduce_scatter_tensor_3)  # fc.w .. fc.b
  %slice_3: f64[6] = slice.Tensor(%wait_tensor_6, 0, 0, 6)                      # fc.w
  %view_5: f64[2, 3] = view(%slice_3, [2, 3])                                   # fc.w
  %slice_4: f64[2] = slice.Tensor(%wait_tensor_6, 0, 6, 8)                      # fc.b
  %view_7: f64[2] = view(%slice_4, [2])                                         # fc.b
  %wait_tensor_4: f64[20] = _c10d_functional.wait_tensor(%reduce_scatter_tensor_2)  # big
  %view_9: f64[20] = view(%wait_tensor_4, [20])                                 # big
return grad scale = %view_1
return grad shift = %view_3
return grad fc.w = %view_5
return grad fc.b = %view_7
return grad big = %view_9
""",
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_unshard_equals_the_plain_program_bitwise(ranks: int, bucket: int) -> None:
    of = mixed(ranks)
    program = step_program(unshard_program(0, of), bucket)
    whole = [random(each.spec) for each in of]
    shards = [[rows(w, each, rank) for w, each in zip(whole, of, strict=True)] for rank in range(ranks)]
    for results in run_all(program, shards):
        for result, w in zip(results, whole, strict=True):
            assert torch.equal(result, w) and result.is_contiguous()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_reduce_equals_the_plain_program_bitwise(ranks: int, bucket: int) -> None:
    plain, of = plain_reduce(ranks)
    gradients = [[random(each) for each in of] for _ in range(ranks)]
    expected = run_all(plain, gradients)
    for results, wanted in zip(run_all(step_program(plain, bucket), gradients), expected, strict=True):
        for result, want in zip(results, wanted, strict=True):
            assert torch.equal(result, want) and result.is_contiguous() and result.shape == want.shape


def test_number_of_collectives() -> None:
    """Two dtypes, two kinds of collectives; empty parameters need none."""
    plain, _ = plain_reduce(2)
    filled = sum(1 for each in specs() if each.numel)
    assert collectives_of(plain) == 1 + 4 * filled
    assert collectives_of(step_program(plain, 1 << 20)) == 5  # float64 `scale`, and two dtypes of each kind
    assert collectives_of(step_program(plain, 1)) == collectives_of(plain)
    gather = unshard_program(0, mixed(2))
    assert (collectives_of(gather), collectives_of(step_program(gather, 1 << 20))) == (2 * filled, 2)


def test_the_program_is_a_function_of_names_and_shapes() -> None:
    first, second = (str(step_program(plain_reduce(3)[0], 200)) for _ in range(2))
    assert first == second


def test_the_plain_program_is_left_as_it_is() -> None:
    plain, _ = plain_reduce(2)
    before = str(plain)
    step_program(plain, 300)
    assert str(plain) == before


def test_a_bucket_holds_at_least_a_byte() -> None:
    with pytest.raises(PlanError, match="most bytes of a joined collective"):
        step_program(unshard_program(0, sharded(2)), 0)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_reducing_needs_two_buckets_beside_the_gradients(kind: str, ranks: int) -> None:
    shapes = [spec(f"{i}.weight", 40, 25) for i in range(16)]  # 8,000 bytes each
    bucket = 16_000
    naive = (
        reduce_program(0, shapes, [], ranks)
        if kind == "replicated"
        else reduce_program(0, [], [Shards(each, ranks) for each in shapes], ranks)
    )
    program = step_program(naive, bucket)
    assert collectives_of(program) == 8
    boxes = [[random(each).t().contiguous().t() for each in shapes] for _ in range(ranks)]
    counter = Bytes([tensor for box in boxes for tensor in box])
    given = counter.now()
    assert given == ranks * 16 * 8_000
    with counter.watch():
        results = lockstep(program, "dp", boxes)
    assert boxes == [[] for _ in range(ranks)]
    kept = given if kind == "replicated" else given // ranks
    assert counter.now() == kept
    over = kept if kind == "sharded" else 0  # sums come to be while gradients are still there
    assert counter.peak <= given + ranks * 2 * bucket + over
    del results
    assert counter.now() == 0


def test_gathering_needs_one_bucket_beside_the_parameters() -> None:
    of = [Shards(spec(f"{i}.weight", 40, 25), 2) for i in range(16)]
    program = step_program(unshard_program(0, of), 16_000)
    whole = [random(each.spec) for each in of]
    boxes = [[rows(w, each, rank) for w, each in zip(whole, of, strict=True)] for rank in range(2)]
    counter = Bytes([tensor for box in boxes for tensor in box])
    shards = counter.now()
    with counter.watch():
        results = lockstep(program, "dp", boxes)
    assert counter.peak <= shards + 2 * (16 * 8_000 + 2 * 16_000)
    assert counter.now() == 2 * 16 * 8_000
    assert torch.equal(results[1][3], whole[3])


def on_rank(rank: int, world: int) -> list[list[torch.Tensor]]:
    """The results of unshard and reduce over real processes."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    torch.manual_seed(0)
    of = mixed(world)
    whole = [random(each.spec) for each in of]
    unshard = interp.boxed_callable(step_program(unshard_program(0, of), 200), {"dp": name})
    gathered = unshard([rows(w, each, rank) for w, each in zip(whole, of, strict=True)])
    plain, specs_of = plain_reduce(world)
    gradients = [[random(each) for each in specs_of] for _ in range(world)]
    reduce = interp.boxed_callable(step_program(plain, 200), {"dp": name})
    return [list(gathered), whole, list(reduce([*gradients[rank]])), list(run_all(plain, gradients)[rank])]


@pytest.mark.gloo
def test_processes_compute_what_lockstep_does() -> None:
    for gathered, whole, reduced, expected in run_ranks(on_rank, 3, 3):
        assert all(map(torch.equal, gathered, whole))
        for one, other in zip(reduced, expected, strict=True):
            tolerance = 2e-2 if one.dtype is torch.bfloat16 else 1e-6  # gloo adds in another order of ranks
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_an_axis_without_group_is_refused() -> None:
    with pytest.raises(VerifyError, match="mesh axis 'dp', which has no process group"):
        interp.boxed_callable(unshard_program(0, sharded(2)), {"pp": "0"})
