"""The plan as text."""

from __future__ import annotations

import pytest
from expecttest import TestCase

from graphcomp.inspect import explain
from graphcomp.inspect.table import WIDTH, count, ranges, size
from graphcomp.partition import partition
from graphcomp.plan import Plan
from tests.partition.running import joint_of
from tests.zoo import ZOO


def text(name: str, stages: int, microbatches: int = 4, schedule: str = "1f1b") -> str:
    case = ZOO[name]
    joint = joint_of(case.build(), case.loss_fn, case.microbatches(1)[0])
    return explain(partition(joint, stages), Plan(schedule=schedule), microbatches)


class TestText(TestCase):
    maxDiff = None

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
  s0 = tokens.shape[0]
  s1 = tokens.shape[1]
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
  s0 = [0].shape[0]
  if [0].shape[0] >= 2
""",
        )


@pytest.mark.parametrize("name", ZOO)
def test_every_model_fits_the_width_and_reads_the_same_every_time(name: str) -> None:
    found = text(name, 3)
    assert max(map(len, found.splitlines())) <= WIDTH
    assert found == text(name, 3)


def test_a_stage_with_nothing_to_train_says_so() -> None:
    found = text("half_frozen", 4)
    assert found.count("no backward: nothing here or before is trained") == 1
    assert "backward stages: 1 2 3" in found and "gradient    " in found


def test_words() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB"]
    assert [count(n) for n in (999, 1500, 2e6, 3e9, 4e12)] == ["999", "1.5 K", "2.0 M", "3.0 G", "4.0 T"]
    assert ranges(["embed", "h.0", "h.1", "h.2", "norm", "h.4"]) == ["embed", "h.0-h.2", "norm", "h.4"]
