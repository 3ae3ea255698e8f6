"""flex_attention: functions that make masks and scores are part of the program, cut and differentiated like the rest.

torch does not differentiate flex_attention on a CPU. It is compared with the same written out, and with documents
that run alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphcomp import Plan
from graphcomp.errors import CaptureError
from graphcomp.testing import check_parity
from tests.cases.tiny import IGNORED, VOCAB, next_token, relative, step_of, tiny_gpt
from tests.zoo.gpt import TinyGPT

BLOCK = 16


class Documents(TinyGPT):
    """The decoder, with two blocks, over rows of documents, each of which sees only itself."""

    def __init__(self) -> None:
        super().__init__(blocks=2)

    def forward(self, tokens: Tensor, document: Tensor, positions: Tensor) -> Tensor:
        mask = self.mask(document)
        x = self.embed(tokens) + self.positions(positions)
        for number, block in enumerate(self.blocks):
            x = x + self.attend(number, block.attention, block.norm1(x), mask)
            x = x + block.mlp(block.norm2(x))
        return self.head(self.norm(x))

    def mask(self, document: Tensor) -> Any:
        rows, length = document.shape

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (document[b, q] == document[b, k])

        return create_block_mask(same, rows, None, length, length, device=document.device, BLOCK_SIZE=BLOCK)

    def attend(self, number: int, layer: Any, x: Tensor, mask: Any) -> Tensor:
        rows, length, width = x.shape
        heads = (part.view(rows, length, layer.heads, -1).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
        mixed = self.mix(number, *heads, mask)
        return layer.out(mixed.transpose(1, 2).reshape(rows, length, width))

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)


class WrittenOut(Documents):
    def mask(self, document: Tensor) -> Tensor:
        places = torch.arange(document.shape[1])
        return ((places[:, None] >= places) & (document[:, :, None] == document[:, None, :]))[:, None]

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Biased(Documents):
    """With learned scores, which all blocks have in common: of distance and head, of the block, and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 64))
        self.scales, self.power = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(()))

    def forward(self, tokens: Tensor, document: Tensor, positions: Tensor) -> Tensor:
        mask = self.mask(document)
        x = self.embed(tokens) + self.positions(positions)
        for number, block in enumerate(self.blocks):

            def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                # In backward, `number` is that of the last block.
                bias = torch.tanh(self.scales[number]) * self.bias[h, (q - k).abs()]  # noqa: B023
                return s * torch.exp(self.power) + bias

            x = x + self.attend(number, block.attention, block.norm1(x), (mask, score))
            x = x + block.mlp(block.norm2(x))
        return self.head(self.norm(x))

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask[0], score_mod=mask[1])


class BiasedWrittenOut(Biased):
    mask = WrittenOut.mask

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        places = torch.arange(q.shape[2])
        bias = torch.tanh(self.scales[number]) * self.bias[:, (places[:, None] - places).abs()]
        bias = bias[None].masked_fill(~mask[0], float("-inf"))
        return F.scaled_dot_product_attention(q * torch.exp(self.power), k, v, attn_mask=bias)


@functools.cache
def documents(form: type[Documents], dtype: torch.dtype = torch.float64) -> Documents:
    return tiny_gpt(form).to(dtype)


Rows = Sequence[Sequence[int]]
"""The lengths of the documents of each row; all rows are equally long."""
MICROBATCHES: tuple[Rows, ...] = (
    ((20, 17), (37,), (5, 5, 27)),
    ((33, 15), (16, 32)),
    ((1, 18, 1), (7, 13), (20,), (19, 1)),
)


def batch_of(rows: Rows, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = len(rows), sum(rows[0])
    labels = torch.randint(VOCAB, shape, generator=draw)
    labels[torch.rand(shape, generator=draw) < 0.2] = IGNORED
    return {
        "tokens": torch.randint(VOCAB, shape, generator=draw),
        "labels": labels,
        "document": torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]),
        "positions": torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows]),
    }


def batches_of(microbatches: Sequence[Rows] = MICROBATCHES) -> list[dict[str, Tensor]]:
    return [batch_of(rows, seed) for seed, rows in enumerate(microbatches)]


def alone(model: nn.Module, microbatches: Sequence[Rows]) -> tuple[Tensor, dict[str, Tensor]]:
    """Eager: the plain decoder, with is_causal, on one document at a time."""
    plain = TinyGPT(blocks=2).double()
    plain.load_state_dict(model.state_dict())
    batches = batches_of(microbatches)
    count = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    total = torch.zeros(())
    for rows, batch in zip(microbatches, batches, strict=True):
        for row, tokens, labels in zip(rows, batch["tokens"], batch["labels"], strict=True):
            for part, target in zip(tokens.split(list(row)), labels.split(list(row)), strict=True):
                logits = plain(part[None])[0]
                loss = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum") / count
                loss.backward()
                total = total + loss.detach()
    return total, {name: p.grad for name, p in plain.named_parameters()}


def written_out(model: nn.Module, form: type[nn.Module], batches: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    plain = form().to(next(model.parameters()).dtype)
    plain.load_state_dict(model.state_dict())
    count = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        logits = plain(batch["tokens"], batch["document"], batch["positions"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad for name, p in plain.named_parameters()}


def mean_square(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()


def mean_squares(
    model: nn.Module, form: type[nn.Module], batches: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Eager: the same model written out, in double precision."""
    plain = form().double()
    plain.load_state_dict(model.state_dict())
    total = torch.zeros(())
    for batch in batches:
        loss = mean_square(plain(batch), batch) / len(batches)
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad for name, p in plain.named_parameters()}


def compare(ran: Any, expected: tuple[Tensor, dict[str, Tensor]], tolerance: float = 1e-12) -> None:
    assert relative(ran.result.loss, expected[0]) < tolerance
    assert ran.gradients.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert relative(ran.gradients[name], gradient) < tolerance, name


@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "gpipe"), (2, "1f1b"), (4, "gpipe"), (4, "1f1b")])
def test_rows_of_documents_are_documents_alone(stages: int, schedule: str) -> None:
    model = documents(Documents)
    step = step_of(model, next_token, stages, schedule)
    compare(step.run(batches_of()), alone(model, MICROBATCHES))
    other = (((64,), (30, 34)), ((10, 11), (2, 19)))  # of other lengths, multiples of the block and not
    compare(step.run(batches_of(other)), alone(model, other))
    assert step.compiler.traces == 1
    short = (((9, 7), (8, 8)), ((4, 5), (9,)))
    compare(step.run(batches_of(short)), alone(model, short))
    assert step.compiler.traces == 2  # one block, and more of them


@pytest.mark.parametrize(
    ("stages", "options"),
    [(1, {}), (2, {"schedule": "gpipe"}), (4, {}), (2, {"data_ranks": 2, "parameters": "shard"})],
)
def test_a_learned_bias_gets_its_gradient(stages: int, options: dict[str, Any]) -> None:
    model, batches = documents(Biased), batches_of(MICROBATCHES[:2])
    step = step_of(model, next_token, stages, **options)
    given = [[batch] for batch in batches] if "data_ranks" in options else batches
    compare(step.run(given), written_out(model, BiasedWrittenOut, batches))


class Windows(Documents):
    """A window that depends on the length of the batch, as a mask and as a score."""

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        length = q.shape[2]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i - j < length // 3, s, s - (i - j) / (length + 1))

        return flex_attention(q, k, v, score_mod=score, block_mask=mask)


class WindowsWrittenOut(WrittenOut):
    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        length = q.shape[2]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = torch.where(distance < length // 3, 0.0, -distance / (length + 1)).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(mask.shape).masked_fill(~mask, -1e300))


def test_functions_may_use_sizes_of_the_batch() -> None:
    model, batches = documents(Windows), batches_of()
    step = step_of(model, next_token, 2)
    compare(step.run(batches), written_out(model, WindowsWrittenOut, batches))
    assert step.compiler.traces == 1


class Checkpointed(Documents):
    options: ClassVar[dict[str, Any]] = {}

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        def run(*heads: Tensor) -> Tensor:
            return super(Checkpointed, self).mix(number, *heads, mask)

        return checkpoint(run, q, k, v, use_reentrant=False, **self.options)


def saves_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator is torch.ops.higher_order.flex_attention
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Checkpointed):
    options: ClassVar[dict[str, Any]] = {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, saves_attention)
    }


@pytest.mark.parametrize(("form", "again"), [(Checkpointed, True), (Selective, False)])
def test_in_a_checkpointed_region(form: type[Documents], again: bool) -> None:
    model, batches = documents(form), batches_of(MICROBATCHES[:2])
    step = step_of(model, next_token, 2, "gpipe")
    compare(step.run(batches), alone(model, MICROBATCHES[:2]))
    backward = step.latest[0].specialisation.partitions[False].stages[0].backward
    assert (torch.ops.higher_order.flex_attention in [node.target for node in backward.calls()]) == again


class UnderCompile(Documents):
    """What users write to get a fused kernel in eager code."""

    def mask(self, document: Tensor) -> BlockMask:
        return torch.compile(super().mask)(document)

    def mix(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return torch.compile(flex_attention, dynamic=True)(q, k, v, block_mask=mask)


def test_under_torch_compile_it_is_the_same_program() -> None:
    texts = []
    for form in (Documents, UnderCompile):
        step = step_of(documents(form), next_token, 2)
        step.run(batches_of(MICROBATCHES[:1]))
        program = step.latest[0].specialisation.joint.program
        texts.append([line.split("  # ")[0].rstrip() for line in str(program).splitlines()])
    assert texts[0] == texts[1]


class Grouped(nn.Module):
    """Four heads of queries for two of keys; no mask, a score that takes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.mix(q, k, v)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=q.dtype)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), enable_gqa=True)


class GroupedWrittenOut(Grouped):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=q.dtype)
        bias = -slopes[:, None, None] * (places[:, None] - places).abs()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], enable_gqa=True)


def test_fewer_heads_of_keys() -> None:
    torch.manual_seed(0)
    model = Grouped().double()
    batches = [torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(3, 9, 8, dtype=torch.float64)]
    compare(step_of(model, mean_square, 1).run(batches), mean_squares(model, GroupedWrittenOut, batches))


class Statistics(Grouped):
    """The logarithms of the sums take part in the loss."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, found = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return y.sum(-1) * found.lse


class StatisticsWrittenOut(Grouped):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 2
        return (scores.softmax(-1) @ v.repeat_interleave(2, 1)).sum(-1) * scores.logsumexp(-1)


def test_statistics_have_their_gradients() -> None:
    torch.manual_seed(0)
    model, batches = Statistics().double(), [torch.randn(2, 5, 8, dtype=torch.float64)]
    compare(step_of(model, mean_square, 1).run(batches), mean_squares(model, StatisticsWrittenOut, batches))


class Detached(Grouped):
    """A score that uses parameters, and gives no gradient to one of them."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        learned, fixed = self.q.bias, self.kv.bias

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * learned[h] + fixed.detach()[j]

        return flex_attention(q, k, v, score, enable_gqa=True)


class DetachedWrittenOut(Grouped):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 2
        scores = scores * self.q.bias[:4, None, None] + self.kv.bias.detach()[: q.shape[2]]
        return scores.softmax(-1) @ v.repeat_interleave(2, 1)


def test_a_detached_parameter_gets_no_gradient_of_a_score() -> None:
    torch.manual_seed(0)
    model, batches = Detached().double(), [torch.randn(2, 5, 8, dtype=torch.float64)]
    compare(step_of(model, mean_square, 1).run(batches), mean_squares(model, DetachedWrittenOut, batches))


class Held(Documents):
    """A block mask made once, for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.held = create_block_mask(lambda b, h, q, k: q >= k, None, None, 37, 37, "cpu", BLOCK_SIZE=BLOCK)

    def mask(self, document: Tensor) -> BlockMask:
        return self.held


def test_a_mask_that_the_model_holds_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="a tensor that is neither in the model's state nor in the batch"):
        step_of(documents(Held), next_token).run(batches_of((((37,), (37,)),)))


def test_parity_is_checked_on_a_cpu_too() -> None:
    rows = check_parity(
        documents(Biased), next_token, batches_of(MICROBATCHES[:1]), plan=Plan(stages=2, backend="eager", quiet=True)
    )
    assert {row.name for row in rows} >= {"bias", "scales", "power"}


def test_evaluation_equals_torchs_own_operator() -> None:
    model, (batch,) = documents(Documents), batches_of(MICROBATCHES[:1])
    step = step_of(model, next_token, 2)
    found = step.evaluate([batch], outputs="local").outputs[0]
    model.eval()
    with torch.no_grad():
        expected = model(batch["tokens"], batch["document"], batch["positions"])
    model.train()
    assert relative(found, expected) < 1e-12


@pytest.mark.inductor
def test_compiled_on_a_cpu_it_is_spelled_out() -> None:
    torch.manual_seed(0)
    model, batches = Grouped().double(), [torch.randn(2, 5, 8, dtype=torch.float64)]
    compare(
        step_of(model, mean_square, backend="inductor").run(batches),
        mean_squares(model, GroupedWrittenOut, batches),
        1e-10,
    )
