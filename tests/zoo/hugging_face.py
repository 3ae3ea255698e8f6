"""Tiny models of Hugging Face, without dropout. What imports this is skipped where `transformers` is not installed."""

from __future__ import annotations

import pytest
from torch import nn

transformers = pytest.importorskip("transformers")


def gpt2(vocabulary: int = 48, width: int = 24, heads: int = 2, longest: int = 32) -> nn.Module:
    """Two layers; the head is tied to the embedding."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=longest,
        n_embd=width,
        n_layer=2,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        **no_dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(
    vocabulary: int = 48, width: int = 24, inner: int = 32, heads: int = 2, shared_heads: int | None = None
) -> nn.Module:
    """Two layers. shared_heads: of keys and values, for several heads each; None: every head has its own."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=shared_heads or heads,
    )
    return transformers.LlamaForCausalLM(config)
