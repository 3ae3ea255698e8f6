"""How long capture, partition and compile take as a model grows."""

from __future__ import annotations

import time
from typing import Any

import torch
from models import Config, make
from systems import token_loss

import graphcomp as gc

LAYERS = (4, 8, 16, 32)


def layers(number: int, compiled: bool) -> dict[str, Any]:
    """Seconds for a GPT of `number` layers, two stages, all in this process."""
    config = Config(width=64, layers=number, vocabulary=256)
    ids = torch.randint(config.vocabulary, (2, 48))
    return {"layers": number} | _stations(make(config), token_loss, {"ids": ids, "labels": ids}, compiled)


def llama() -> dict[str, Any]:
    """Seconds for a four-layer Llama of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(256, (2, 48))
    model = LlamaForCausalLM(config)
    return {"layers": "Llama, 4"} | _stations(model, _causal_loss, {"input_ids": ids, "labels": ids}, False)


def _causal_loss(output: Any, batch: dict[str, torch.Tensor]) -> Any:
    return gc.token_loss(output.logits, batch["labels"])


def _stations(model: torch.nn.Module, loss: Any, example: Any, compiled: bool) -> dict[str, Any]:
    from graphcomp.compiler import GraphCompiler

    compiler = GraphCompiler(model, loss, gc.Plan(stages=2, quiet=True))
    seconds: dict[str, Any] = {}
    seconds["capture"] = _timed(lambda: compiler.capture(example))
    seconds["partition"] = _timed(compiler.partition)
    if compiled:
        seconds["compile"] = _timed(compiler.compile)
    return seconds


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
