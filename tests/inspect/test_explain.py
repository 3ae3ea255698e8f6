"""The plan as text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import TestCase

import graphcomp as gc
from graphcomp.call import Ran
from graphcomp.inspect import explain
from graphcomp.inspect.table import WIDTH, count, ranges, size
from graphcomp.partition import partition
from graphcomp.testing import VirtualStep
from tests.partition.running import joint_of
from tests.zoo import ZOO
from tests.zoo.tied_gpt import TiedGPT

CASES = {**ZOO, "tied_gpt": replace(ZOO["tied_gpt"], make_model=partial(TiedGPT, blocks=4))}
"""With several blocks on a stage, whose names are put together."""


def text(name: str, stages: int, microbatches: int = 4, schedule: str = "1f1b") -> str:
    case = CASES[name]
    model, plan = case.build(), gc.Plan(stages=stages, schedule=schedule)
    cut = partition(joint_of(model, case.loss_fn, case.microbatches(1)[0]), stages)
    return explain(cut, plan, gc.GraphCompiler(model, case.loss_fn, plan).schedule([cut] * microbatches))


def over_data_ranks(name: str, stages: int, counts: tuple[int, ...], **options: Any) -> tuple[list[str], Ran]:
    """The text of every data rank, and a step."""
    case = CASES[name]
    plan = gc.Plan(stages=stages, backend="eager", quiet=True, **options)
    step = VirtualStep(case.build(), case.loss_fn, plan=plan, data_ranks=len(counts))
    given = [case.microbatches(count) for count in counts]
    prepared = [line.prepared for line in step.bind(given).lines]
    return [explain(p.partitioned[-1], plan, p.programs.schedule, p.data) for p in prepared], step.run(given)


def section(found: str, title: str) -> str:
    return found.split(f"\n{title}\n")[1].split("\n\n")[0] + "\n"


class TestText(TestCase):
    maxDiff = None

    def test_sharded_over_data_ranks(self) -> None:
        texts, _ = over_data_ranks("tied_gpt", 2, (2, 2), parameters="shard", bucket_bytes=2**16)
        self.assertEqual(texts[0], texts[1])
        self.assertExpectedInline(
            texts[0].splitlines()[0], """plan: 2 stages, schedule 1f1b, parameters shard, backend eager"""
        )
        named = [line.split(maxsplit=1)[1] for line in texts[0].splitlines() if line.startswith("    modules")]
        # Sizes of blocks.0 are computed by the second stage too, and do not count.
        assert named == ["embed, positions, blocks.0-blocks.1", "blocks.2-blocks.3, norm, head"]
        self.assertExpectedInline(
            section(texts[0], "data ranks"),
            """\
  2, parameters sharded, gathered once a step, collectives of up to 64.0 KiB
           program  collective      tensors  elements      bytes  calls  times a step
  stage 0  unshard  all_gather           26    29.5 K  115.2 KiB      3             1
           reduce   reduce_scatter       26    29.5 K  115.2 KiB      3             1
  stage 1  unshard  all_gather           27    27.5 K  107.5 KiB      2             1
           reduce   reduce_scatter       26    25.5 K   99.5 KiB      2             1
""",
        )
        self.assertExpectedInline(
            section(texts[0], "predicted"),
            """\
          bubble  in flight  parameters   gathered  gradients      saved  peak memory
  rank 0  36.5 %          2    57.6 KiB  115.2 KiB  115.2 KiB  196.2 KiB    484.4 KiB
  rank 1  31.8 %          1    53.8 KiB  107.5 KiB  107.5 KiB  114.3 KiB    383.0 KiB
""",
        )

    def test_gathered_for_every_action(self) -> None:
        texts, _ = over_data_ranks("tied_gpt", 2, (3, 3), parameters="shard", regather=True)
        self.assertExpectedInline(
            section(texts[0], "data ranks"),
            """\
  2, parameters sharded, gathered for every action, collectives of up to 4.0 MiB
           program  collective      tensors  elements      bytes  calls  times a step
  stage 0  unshard  all_gather           26    29.5 K  115.2 KiB      1             6
           reduce   reduce_scatter       26    29.5 K  115.2 KiB      1             1
  stage 1  unshard  all_gather           27    27.5 K  107.5 KiB      1             3
           reduce   reduce_scatter       26    25.5 K   99.5 KiB      1             1
""",
        )

    def test_replicated_over_data_ranks(self) -> None:
        texts, _ = over_data_ranks("half_frozen", 2, (1, 1), accumulate_dtype=torch.float64)
        self.assertExpectedInline(
            section(texts[0], "data ranks"),
            """\
  2, parameters replicated, collectives of up to 4.0 MiB
           program  collective  tensors  elements     bytes  calls  times a step
  stage 0  reduce   all_reduce        6     4.3 K  33.5 KiB      1             1
  stage 1  reduce   all_reduce        9    10.5 K  82.2 KiB      1             1
""",
        )
        self.assertExpectedInline(
            section(texts[0], "predicted"),
            """\
          bubble  in flight  parameters  gradients     saved  peak memory
  rank 0  50.8 %          1    82.4 KiB   33.5 KiB  24.8 KiB    140.6 KiB
  rank 1  49.2 %          1    41.1 KiB   82.2 KiB  40.5 KiB    163.9 KiB
""",
        )

    def test_tied_gpt(self) -> None:
        self.assertExpectedInline(
            text("tied_gpt", 2),
            """\
plan: 2 stages, schedule 1f1b, parameters replicate, backend inductor
estimates at the sizes of the example microbatch

stages
           parameters      bytes  FLOPs   share  saved      bytes
  stage 0      29.5 K  115.2 KiB  5.5 M  48.2 %     29   98.1 KiB
  stage 1      27.5 K  107.5 KiB  6.0 M  51.8 %     34  114.3 KiB
  stage 0
    modules  embed, positions, blocks.0-blocks.1
    batch    tokens
  stage 1
    modules  blocks.2-blocks.3, norm, head
    batch    labels

cuts
  0 > 1  activation  add_4   f32[s0, s1, 32]  4.0 KiB
  1 > 0  gradient    add_12  f32[s0, s1, 32]  4.0 KiB

shared parameters
  embed.weight  stages 0, 1

results
  loss loss  token, averaged by its tokens  stage 1

schedule
  1f1b: 2 stages, 4 microbatches
  rank 0 (stage 0): 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
  rank 1 (stage 1): 1FB0 1FB1 1FB2 1FB3

predicted
          bubble  in flight  parameters  gradients      saved  peak memory
  rank 0  24.6 %          2   115.2 KiB  115.2 KiB  196.2 KiB    426.8 KiB
  rank 1  18.8 %          1   107.5 KiB  107.5 KiB  114.3 KiB    329.3 KiB

sizes
  s0 = tokens.shape[0], 2 in the example
  s1 = tokens.shape[1], 16 in the example
  if tokens.shape[0] >= 2
  if tokens.shape[1] >= 2
""",
        )

    def test_batch_norm(self) -> None:
        self.assertExpectedInline(
            text("batch_norm", 2, 2, "gpipe"),
            """\
plan: 2 stages, schedule gpipe, parameters replicate, backend inductor
estimates at the sizes of the example microbatch

stages
           parameters    bytes   FLOPs   share  saved    bytes
  stage 0       1.6 K  6.2 KiB  31.6 K  52.6 %      7  1.6 KiB
  stage 1       1.2 K  4.8 KiB  28.5 K  47.4 %      4    832 B
  stage 0
    modules  first, norm1, second, norm2
    batch    [0]
    buffers  norm1.num_batches_tracked (updated), norm1.running_mean (updated), norm1.running_var (updated),
             norm2.num_batches_tracked (updated), norm2.running_mean (updated), norm2.running_var (updated)
  stage 1
    modules  third, last
    batch    [1]

cuts
  0 > 1  activation  getitem_3             f32[s0, 32]  384 B
  1 > 0  gradient    threshold_backward_1  f32[s0, 32]  384 B

shared parameters
  none

results
  loss loss     token, averaged by its tokens  stage 1
  metric right  sum                            stage 1
  metric peak   max                            stage 1

schedule
  gpipe: 2 stages, 2 microbatches
  rank 0 (stage 0): 0F0 0F1 0B0 0B1
  rank 1 (stage 1): 1F0 1F1 1B0 1B1

predicted
          bubble  in flight  parameters  gradients    saved  peak memory
  rank 0  31.0 %          2     6.2 KiB    6.2 KiB  3.2 KiB     15.8 KiB
  rank 1  37.9 %          2     4.8 KiB    4.8 KiB  1.6 KiB     11.2 KiB

sizes
  s0 = [0].shape[0], 3 in the example
  if [0].shape[0] >= 2
""",
        )


@pytest.mark.parametrize("options", [{}, {"parameters": "shard"}, {"parameters": "shard", "regather": True}])
@pytest.mark.parametrize("name", ["u_shape", "moe"])
def test_as_many_collectives_as_a_step_issues(name: str, options: dict[str, Any]) -> None:
    texts, ran = over_data_ranks(name, 2, (2, 2), bucket_bytes=512, **options)
    rows = [line.split() for line in section(texts[0], "data ranks").splitlines()[2:]]
    assert ran.collectives == sum(int(row[-2]) * int(row[-1]) for row in rows) * len(texts)
    assert max(map(len, texts[0].splitlines())) <= WIDTH


def test_one_data_rank_shards_nothing() -> None:
    case, plan = ZOO["mlp"], gc.Plan(parameters="shard", backend="eager", quiet=True)
    step = gc.compile_train_step(case.build(), case.loss_fn, plan=plan)
    step.compile(case.microbatches(1)[0])
    found = step.explain()
    assert found.splitlines()[0].endswith("parameters whole (one data rank), backend eager")
    assert "gathered" not in found and "data ranks" not in found.split("\n", 1)[1]


@pytest.mark.parametrize("name", ZOO)
def test_every_model_fits_the_width_and_reads_the_same_every_time(name: str) -> None:
    found = text(name, 3)
    assert max(map(len, found.splitlines())) <= WIDTH
    assert found == text(name, 3)


def test_what_is_computed_in_chunks_is_named() -> None:
    case, found = ZOO["tied_gpt"], []
    for chunks in (1, 4, 64):
        plan = gc.Plan(loss_chunks=chunks, backend="eager", quiet=True)
        step = gc.compile_train_step(case.build(), case.loss_fn, plan=plan)
        step.compile(case.microbatches(1)[0])
        found.append(section(step.explain(), "results").splitlines()[1:])
    assert found[0] == []
    assert found[1] == ["  head 'head' and loss in 4 chunks of s0*s1 rows"]
    assert found[2] == ["  head and loss in one piece: the example has fewer than 128 rows"]


def test_a_stage_with_nothing_to_train_says_so() -> None:
    found = text("half_frozen", 4)
    assert found.count("no backward: nothing here or before is trained") == 1
    assert "backward stages: 1 2 3" in found and "gradient    " in found


def test_words() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB"]
    assert [count(n) for n in (999, 1500, 2e6, 3e9, 4e12)] == ["999", "1.5 K", "2.0 M", "3.0 G", "4.0 T"]
    assert ranges(["embed", "h.0", "h.1", "h.2", "norm", "h.4"]) == ["embed", "h.0-h.2", "norm", "h.4"]


def test_a_rank_with_several_stages_holds_a_shared_weight_once() -> None:
    plan = gc.Plan(stages=4, schedule="interleaved-1f1b", stages_per_rank=4, backend="eager", quiet=True)
    compiler = gc.GraphCompiler(ZOO["tied_gpt"].build(), ZOO["tied_gpt"].loss_fn, plan)
    compiler.capture(ZOO["tied_gpt"].microbatches(1)[0])
    text = explain(compiler.partition(), plan, compiler.lower().schedule)
    assert text.startswith("plan: 4 stages on 1 rank, schedule interleaved-1f1b, ")
    held = sum(parameter.nbytes for parameter in compiler.model.parameters())
    assert f"{held / 1024:.1f} KiB" in text.split("predicted")[1]
