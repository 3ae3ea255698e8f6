"""Packed documents: exact, whatever the padding, and without any value that has two dimensions of sequence length."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sympy import sympify
from torch import Tensor, nn

from graphcomp.compiler import Specialisation
from graphcomp.ir import meta
from graphcomp.partition import Partitioned
from graphcomp.testing import VirtualStep
from tests.cases.tiny import IGNORED, LAYOUTS, VOCAB, next_token, relative, step_of, tiny_gpt
from tests.zoo.gpt import BLOCKS, TinyGPT

Document = tuple[Tensor, Tensor]
"""Tokens and labels."""


class Segments(TinyGPT):
    """The decoder over a pack. Attention sees the documents as rows of (documents, longest); all else sees (tokens,).

    documents, positions: of each token. table: where each token of each document is in the pack; the rest of a row is
    behind the document, where a causal attention does not look.
    """

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(positions)
        for block in self.blocks:
            x = x + self.attend(block.attention, block.norm1(x), documents, positions, table)
            x = x + block.mlp(block.norm2(x))
        return self.head(self.norm(x))

    def attend(self, layer: Any, x: Tensor, documents: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        number, longest = table.shape
        heads = (
            part.index_select(0, table.flatten()).view(number, longest, layer.heads, -1).transpose(1, 2)
            for part in layer.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        rows = mixed.transpose(1, 2).reshape(number * longest, -1)
        return layer.out(rows.index_select(0, documents * longest + positions))


class Masked(Segments):
    """The same with a mask of (tokens, tokens), made from the documents inside of forward."""

    def attend(self, layer: Any, x: Tensor, documents: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        places = torch.arange(documents.shape[0], device=x.device)
        mask = (documents[:, None] == documents[None, :]) & (places[:, None] >= places[None, :])
        heads = (part.view(1, x.shape[0], layer.heads, -1).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return layer.out(mixed.transpose(1, 2).reshape(x.shape))


@functools.cache
def packed(form: type[Segments], dtype: torch.dtype = torch.float64, blocks: int = BLOCKS) -> nn.Module:
    return tiny_gpt(functools.partial(form, blocks=blocks)).to(dtype)


def document(length: int, seed: int) -> Document:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCAB, (length,), generator=draw)
    labels[torch.rand(length, generator=draw) < 0.2] = IGNORED
    return torch.randint(VOCAB, (length,), generator=draw), labels


def pack(documents: Sequence[Document], padding: int = 0, padding_token: int = 0) -> dict[str, Tensor]:
    """Documents one behind the other. Padding is one more document, of which no label counts."""
    rest = (torch.full((padding,), padding_token), torch.full((padding,), IGNORED))
    parts = [*documents, *([rest] if padding else [])]
    lengths = [len(tokens) for tokens, _ in parts]
    table = torch.zeros(len(parts), max(lengths), dtype=torch.int64)
    start = 0
    for row, length in zip(table, lengths, strict=True):
        row[:length] = torch.arange(start, start + length)
        start += length
    return {
        "tokens": torch.cat([tokens for tokens, _ in parts]),
        "labels": torch.cat([labels for _, labels in parts]),
        "documents": torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)]),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "table": table,
    }


def alone(model: nn.Module, documents: Sequence[Document]) -> tuple[Tensor, dict[str, Tensor]]:
    """Eager: the plain decoder on one document at a time; the sum of all token losses over the number of tokens."""
    plain = TinyGPT().to(next(model.parameters()).dtype)
    plain.load_state_dict(model.state_dict())
    count = sum(int((labels != IGNORED).sum()) for _, labels in documents)
    total = torch.zeros(())
    for tokens, labels in documents:
        logits = plain(tokens[None])[0]
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / max(count, 1)
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad for name, p in plain.named_parameters()}


PACKS = [(5, 9, 3), (2, 2, 7, 4), (11, 3)]


def documents_of(packs: Sequence[Sequence[int]]) -> list[list[Document]]:
    return [[document(length, 100 * i + j) for j, length in enumerate(lengths)] for i, lengths in enumerate(packs)]


def equal(step: VirtualStep, batches: list[Any], expected: tuple[Tensor, dict[str, Tensor]], tolerance: float) -> None:
    ran = step.run(batches)
    assert relative(ran.result.loss, expected[0]) < tolerance
    for name, gradient in expected[1].items():
        assert relative(ran.gradients[name], gradient) < tolerance, name


FORMS = pytest.mark.parametrize("form", [Segments, Masked])


@FORMS
@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_a_pack_is_the_sum_of_its_documents(form: type[Segments], stages: int, schedule: str) -> None:
    model, groups = packed(form), documents_of(PACKS)
    expected = alone(model, [each for group in groups for each in group])
    step = step_of(model, next_token, stages, schedule)
    equal(step, [pack(group) for group in groups], expected, 1e-12)
    equal(step, [pack(group, 2 + i) for i, group in enumerate(groups)], expected, 1e-12)
    # Other packs of the same documents: the step does not change.
    one, two, three = groups
    equal(step, [pack(three[::-1] + one), pack(two)], expected, 1e-12)
    assert step.compiler.traces == 1


@FORMS
@pytest.mark.parametrize("stages", [1, 2])
def test_a_pack_of_one_document_and_one_without_tokens(form: type[Segments], stages: int) -> None:
    model, (first, second, _) = packed(form), documents_of(PACKS)
    lone = first[:1]
    silent = [(tokens, torch.full_like(labels, IGNORED)) for tokens, labels in second]
    step = step_of(model, next_token, stages)
    equal(step, [pack(lone), pack(silent)], alone(model, lone), 1e-12)
    equal(step, [pack(lone), pack(second)], alone(model, lone + second), 1e-12)
    assert step.compiler.traces == 2  # one document, and more


@FORMS
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_tokens_change_not_one_bit(form: type[Segments], stages: int, dtype: torch.dtype) -> None:
    step = step_of(packed(form, dtype), next_token, stages)
    found = []
    for token in (0, 3, VOCAB - 1):
        found.append(step.run([pack(group, 4 + i, token) for i, group in enumerate(documents_of(PACKS))]))
    for ran in found[1:]:
        assert torch.equal(ran.result.loss, found[0].result.loss)
        assert all(torch.equal(gradient, found[0].gradients[name]) for name, gradient in ran.gradients.items())


@FORMS
@pytest.mark.parametrize("stages", [1, 4])
def test_the_amount_of_padding_changes_nothing(form: type[Segments], stages: int) -> None:
    model, groups = packed(form), documents_of(PACKS)
    expected = alone(model, [each for group in groups for each in group])
    step = step_of(model, next_token, stages)
    for padding in (0, 2, 13, 40):
        equal(step, [pack(group, padding) for group in groups], expected, 1e-12)
    assert step.compiler.traces == 1


def bordering(cut: Partitioned) -> dict[str, tuple[Any, ...]]:
    """The shape of every input and output of every program, saved values among them, and of all that crosses."""
    found = {}
    for program in cut.programs:
        for what, node in (*program.input_nodes(), *program.output_items()):
            value = None if node is None else meta.tensor(node)
            if value is not None:
                found[f"{program.name}: {what}"] = tuple(value.shape)
    for boundary in (*cut.forward_boundaries.values(), *cut.backward_boundaries.values()):
        for value in boundary.values:
            found[f"{boundary.source}>{boundary.target}: {value.name}"] = value.shape
    return found


def lengths_in(shape: Sequence[Any], number: str) -> int:
    """How many dimensions grow with the tokens of a pack or of a document; `number`: the symbol of the documents."""
    return sum(bool({str(s) for s in sympify(str(size)).free_symbols} - {number}) for size in shape)


def captured(
    form: type[Segments], stages: int, packs: Sequence[Sequence[int]], blocks: int = BLOCKS
) -> tuple[Specialisation, str]:
    """What these packs are served by, and the symbol of the number of documents."""
    step = step_of(packed(form, blocks=blocks), next_token, stages)
    step.run([pack(group) for group in documents_of(packs)])
    one = step.latest[0].specialisation
    return one, next((s for s, at in one.joint.sizes.symbols.items() if at == ("table", 0)), "")


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_value_has_two_dimensions_of_sequence_length(stages: int) -> None:
    one, number = captured(Segments, stages, PACKS)
    found = bordering(one.partitions[False])
    assert len(found) > 50 and any("saved" in name for name in found)
    assert [name for name, shape in found.items() if lengths_in(shape, number) > 1] == []
    assert any(lengths_in(shape, number) == 1 for shape in found.values())
    # Nor is there one within a program.
    tensors = [(node, value) for node in one.joint.program.calls() if (value := meta.tensor(node)) is not None]
    assert [node.name for node, value in tensors if lengths_in(value.shape, number) > 1] == []


@pytest.mark.parametrize("stages", [2, 4])
def test_a_mask_made_inside_is_made_on_each_stage(stages: int) -> None:
    one, number = captured(Masked, stages, PACKS, blocks=4)
    dense = {name for name, shape in bordering(one.partitions[False]).items() if lengths_in(shape, number) > 1}
    assert all("saved" in name for name in dense)  # kept for the backward, never sent
