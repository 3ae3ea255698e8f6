"""The models of the gallery: unmodified architectures of Hugging Face transformers, and one U-Net, at tiny sizes.

Weights are random. Dropout is off, for a cut program draws other masks than eager PyTorch; all else is the library's
default. Nothing here, or in graphcomp, is made for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from graphcomp.huggingface import causal_lm_loss, masked_lm_loss, seq2seq_lm_loss
from tests.gallery.unet import UNet, denoising_loss, noised

VOCAB, IGNORED = 64, -100
Fields = dict[str, Any]
Batch = Callable[[int, int], Fields]
SHAPES = ((2, 7), (3, 5))
"""Rows and length of each microbatch."""


@dataclass(frozen=True)
class Entry:
    """name: as in the table. source: the class that is built. batch: (rows, length) -> a microbatch."""

    name: str
    source: str
    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Batch
    shapes: Sequence[tuple[int, int]] = SHAPES

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformers.logging.set_verbosity_error()  # a small vocabulary has no place for the special tokens
            return self.make()

    def microbatches(self) -> list[Fields]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return [self.batch(*shape) for shape in self.shapes]


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 48}
GROUPED = {**DECODER, "num_key_value_heads": 2}
POSITIONS = {"max_position_embeddings": 64}
DEEP = {"num_hidden_layers": 4}  # a block for each of four stages; two blocks are cut within


def tiny(architecture: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """The library's own class, from its own config with these sizes and without dropout."""

    def make() -> nn.Module:
        made = getattr(transformers, config)(vocab_size=VOCAB, **{**SPECIAL, **options})
        for name, value in vars(made).items():
            if "drop" in name and isinstance(value, float):
                setattr(made, name, 0.0)
        return getattr(transformers, architecture)(made)

    return make


def text(rows: int, length: int) -> Fields:
    """Rows of unequal length, padded to the right; about a third of the labels is ignored."""
    ends = torch.randint(2, length + 1, (rows, 1))
    mask = torch.arange(length) < ends
    ids = torch.randint(3, VOCAB, (rows, length)).masked_fill(~mask, SPECIAL["pad_token_id"])
    labels = torch.where(mask & (torch.rand(rows, length) < 0.7), ids, IGNORED)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def pairs(rows: int, length: int) -> Fields:
    """A source, and a target of another length."""
    return {**text(rows, length), "labels": text(rows, length + 2)["labels"]}


def speech(rows: int, length: int) -> Fields:
    """Spectrograms of the one length that Whisper takes, and texts."""
    return {"input_features": torch.randn(rows, 8, 12), "labels": text(rows, length)["labels"]}


def images(rows: int, length: int) -> Fields:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(4, (rows,))}


def causal(name: str, family: str, **options: Any) -> Entry:
    source = f"{family}ForCausalLM" if not family.endswith("GPT2") else "GPT2LMHeadModel"
    config = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    return Entry(name, source, tiny(source, config, **options), causal_lm_loss, text)


def masked(name: str, family: str, **options: Any) -> Entry:
    source = f"{family}ForMaskedLM"
    return Entry(name, source, tiny(source, f"{family}Config", **options), masked_lm_loss, text)


def other(name: str, source: str, config: str, loss_fn: Callable[..., Any], batch: Batch, **options: Any) -> Entry:
    return Entry(name, source, tiny(source, config, **options), loss_fn, batch)


ENTRIES = (
    causal("GPT-2", "GPT2", n_embd=32, n_layer=4, n_head=4, n_positions=64),
    causal("GPT-J", "GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    causal("GPT-NeoX", "GPTNeoX", **DECODER, **POSITIONS),
    causal("OPT", "OPT", **SIZES, **POSITIONS, ffn_dim=48, word_embed_proj_dim=32),
    causal("Bloom", "Bloom", hidden_size=32, n_layer=2, n_head=4),
    causal("Falcon", "Falcon", **SIZES, **POSITIONS),
    causal("Llama", "Llama", **{**GROUPED, **DEEP}, **POSITIONS),
    causal("Mistral", "Mistral", **GROUPED, **POSITIONS, sliding_window=4),
    causal("Qwen3", "Qwen3", **GROUPED, **POSITIONS, head_dim=8),
    causal("Gemma 2", "Gemma2", **GROUPED, **POSITIONS, head_dim=8, sliding_window=4),
    causal("Gemma 3", "Gemma3", **GROUPED, **POSITIONS, head_dim=8, sliding_window=4),
    causal("Phi", "Phi", **DECODER, **POSITIONS),
    causal("OLMo 2", "Olmo2", **GROUPED, **POSITIONS),
    causal("Mixtral", "Mixtral", **GROUPED, **POSITIONS, num_local_experts=4),
    causal(
        "Qwen3-MoE",
        "Qwen3Moe",
        **GROUPED,
        **POSITIONS,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    ),
    # Without its CUDA kernels it loops over time, so each length is a capture: short ones.
    replace(causal("Mamba", "Mamba", hidden_size=32, num_hidden_layers=2, state_size=4), shapes=((2, 4), (3, 3))),
    masked("BERT", "Bert", **{**DECODER, **DEEP}, **POSITIONS),
    masked("RoBERTa", "Roberta", **DECODER, max_position_embeddings=66),
    masked("DistilBERT", "DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48, **POSITIONS),
    masked("ALBERT", "Albert", **DECODER, **POSITIONS, embedding_size=16),
    other(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        seq2seq_lm_loss,
        pairs,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
    ),
    other(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        seq2seq_lm_loss,
        pairs,
        **POSITIONS,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    ),
    other(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        seq2seq_lm_loss,
        speech,
        num_mel_bins=8,
        max_source_positions=6,
        max_target_positions=32,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    ),
    other(
        "ViT",
        "ViTForImageClassification",
        "ViTConfig",
        masked_lm_loss,
        images,
        **DECODER,
        image_size=16,
        patch_size=4,
        num_labels=4,
    ),
    other(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        masked_lm_loss,
        images,
        embedding_size=8,
        hidden_sizes=(8, 16),
        depths=(2, 2),
        layer_type="basic",
        num_labels=4,
    ),
    Entry("U-Net", "tests.gallery.unet.UNet", UNet, denoising_loss, noised),
)
