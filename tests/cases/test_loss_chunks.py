"""`Plan(loss_chunks=n)`: equal to eager in every layout, less memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import CaptureError, PartitionError
from graphcomp.huggingface import causal_lm_loss
from graphcomp.ir import meta
from graphcomp.testing import VirtualStep
from tests.cases.live import LiveBytes
from tests.cases.tiny import assert_equal, next_token, step_of, tiny_gpt
from tests.zoo.gpt import TinyGPT


class TwoBlocks(TinyGPT):
    def __init__(self) -> None:
        super().__init__(blocks=2)


class Tied(TwoBlocks):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Cap(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return 5 * torch.tanh(logits / 5)


class Capped(TwoBlocks):
    """With a bias, and a module of its own behind the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.cap = nn.Linear(32, 64), Cap()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cap(super().forward(tokens))


def batch(rows: int, length: int, vocabulary: int = 64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rows * 100 + length)
    tokens, labels = (torch.randint(vocabulary, (rows, length), generator=draw) for _ in range(2))
    return {"tokens": tokens, "labels": labels.masked_fill(torch.rand(rows, length, generator=draw) < 0.3, -100)}


SIZES = [(2, 16), (3, 11), (2, 3), (1, 2)]
"""Rows that divide by the number of chunks, that do not, too few for chunks, and one that a shifted loss looks at."""


def shifted(logits: Tensor, given: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits[:, :-1], given["labels"][:, 1:], label_smoothing=0.1)


def two(logits: Tensor, given: dict[str, Tensor]) -> tuple[dict[str, gc.TokenLoss], dict[str, Any]]:
    large = logits.logsumexp(-1).square()
    right = (logits.argmax(-1) == given["labels"]).sum()
    losses = {"lm": next_token(logits, given), "large": gc.TokenLoss(0.01 * large.sum(), large.numel())}
    return losses, {"right": gc.metric(right, "sum")}


LAYOUTS: list[tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], dict[str, Any]]] = [
    (TwoBlocks, next_token, {"loss_chunks": 4}),
    (TwoBlocks, two, {"loss_chunks": 8, "stages": 2}),
    (Tied, shifted, {"loss_chunks": 3, "stages": 2, "schedule": "gpipe"}),
    (Capped, shifted, {"loss_chunks": 8, "stages": 2}),
]


@pytest.mark.parametrize(("model", "loss_fn", "options"), LAYOUTS)
def test_equals_eager(
    model: Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Any], options: dict[str, Any]
) -> None:
    made = tiny_gpt(model).double()
    assert_equal(made, loss_fn, [batch(*size) for size in SIZES], step_of(made, loss_fn, **options), 1e-12)


def test_over_data_ranks() -> None:
    made = tiny_gpt(TwoBlocks).double()
    step = step_of(made, shifted, 2, data_ranks=2, parameters="shard", loss_chunks=4)
    assert_equal(made, shifted, [batch(2, 16), batch(3, 11)], step, 1e-12)


def test_half_precision_with_a_loss_in_fp32() -> None:
    """Within the rounding of bf16: gradients of chunks are added in the parameter's dtype."""
    made = tiny_gpt(TwoBlocks).bfloat16()
    assert_equal(made, shifted, [batch(2, 16), batch(3, 11)], step_of(made, shifted, loss_chunks=4), 2e-2)


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_models_of_hugging_face_with_their_outputs_left_out(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    if family == "GPT2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **small, **off)
        )
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **small))
    made = made.double()
    microbatches = [{"input_ids": one["tokens"], "labels": one["labels"]} for one in (batch(2, 16), batch(3, 5))]
    step = step_of(made, causal_lm_loss, loss_chunks=4)
    assert_equal(made, causal_lm_loss, microbatches, step, 1e-9)
    with pytest.raises(CaptureError, match="needs all rows at once"):
        step.run(microbatches, "local")


def test_outputs_that_hold_logits_are_refused() -> None:
    step = step_of(tiny_gpt(TwoBlocks), next_token, loss_chunks=4)
    with pytest.raises(CaptureError, match="'output output' needs all rows at once"):
        step.run([batch(2, 16)], "local")


@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (2, "gpipe")])
def test_logits_of_one_chunk_are_alive(stages: int, schedule: str) -> None:
    """All that grows with the vocabulary is the logits, but for gradients of 2 % of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TinyGPT(vocab=2048, width=8, heads=2, blocks=1)
    given = [batch(8, 48, 2048) for _ in range(2)]
    peaks: dict[int, int] = {}
    for chunks in (1, 8):
        step = step_of(model, shifted, stages, schedule, loss_chunks=chunks, split=["blocks"] if stages > 1 else None)
        step.run(given)
        with LiveBytes([*model.parameters(), *(leaf for one in given for leaf in one.values())]) as live:
            step.run(given)
        peaks[chunks] = live.peak
    assert peaks[8] <= (1 / 8 + 0.1) * peaks[1], peaks


def test_evaluation_is_in_chunks_too() -> None:
    made = tiny_gpt(TwoBlocks).double()
    whole, parts = (step_of(made, two, 2, loss_chunks=chunks) for chunks in (1, 4))
    given = [batch(2, 16), batch(3, 5)]
    expected, found = whole.evaluate(given), parts.evaluate(given)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    assert int(found.metrics["right"]) == int(expected.metrics["right"])


def test_a_cut_behind_the_head_is_refused() -> None:
    step = step_of(tiny_gpt(Capped), next_token, split=["cap"], loss_chunks=4)
    with pytest.raises(PartitionError, match="cuts through head and loss"):
        step.run([batch(2, 16)])


class EarlyHead(TwoBlocks):
    """The head is not the last that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        logits = self.head(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return logits, self.last(x)


def both(output: tuple[Tensor, Tensor], given: dict[str, Tensor]) -> dict[str, gc.TokenLoss]:
    return {"lm": next_token(output[0], given), "last": gc.TokenLoss(output[1].square().sum(), given["labels"] != -100)}


def test_a_head_before_other_layers_runs_behind_them() -> None:
    made = tiny_gpt(EarlyHead).double()
    step = step_of(made, both, loss_chunks=4, split=["blocks.1"])
    assert_equal(made, both, [batch(2, 16)], step, 1e-12)


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.inductor
def test_compiled() -> None:
    """Also where the first microbatch has fewer rows than there are chunks."""
    made = tiny_gpt(Bigrams)
    step = step_of(made, shifted, loss_chunks=5, backend="inductor")
    assert_equal(made, shifted, [batch(2, 3)], step, 1e-5)
    assert_equal(made, shifted, [batch(2, 33), batch(3, 21), batch(4, 3)], step, 1e-5)
    assert step.compiler.traces == 2


def chunks_of(step: VirtualStep) -> list[set[int | None]]:
    """The numbers of chunks in the joint program of each specialisation, as it is cut."""
    programs = [one.partitions[False].joint.program for one in step.compiler.specialisations]
    return [{meta.note(node).chunk for node in program.calls()} - {None} for program in programs]


@pytest.mark.parametrize("first", [(2, 3), (2, 16)])
def test_few_rows_have_a_program_without_chunks(first: tuple[int, int]) -> None:
    """A chunk has two rows or more; how many the loss looks at decides, whichever microbatch comes first."""
    made = tiny_gpt(Bigrams).double()
    step = step_of(made, shifted, loss_chunks=4)
    for size in [first, (2, 5), (1, 8), (2, 4), (1, 9), (2, 16), (2, 3)]:
        assert_equal(made, shifted, [batch(*size)], step, 1e-12)
    assert sorted(map(len, chunks_of(step))) == [0, 0, 4, 4]  # of several sequences, and of one
    conditions = [str(one.joint.sizes.conditions) for one in step.compiler.specialisations]
    assert sum(">= 8" in one for one in conditions) == sum("< 8" in one for one in conditions) == 2
