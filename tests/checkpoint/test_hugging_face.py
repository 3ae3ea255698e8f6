"""A Hugging Face model as it comes: built on meta, initialised by its own function, or filled from its own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphcomp as gc
from graphcomp.huggingface import causal_lm_loss
from tests.zoo.hugging_face import gpt2

pytest.importorskip("safetensors")


def model_of(device: str) -> Any:
    with torch.device(device):
        return gpt2(31, 8, longest=16).eval()


def step_of(model: Any) -> gc.CompiledStep:
    return gc.compile_train_step(model, causal_lm_loss, plan=gc.Plan(backend="eager", quiet=True))


def test_gpt2_on_meta(tmp_path: Path) -> None:
    real, model = model_of("cpu"), model_of("meta")
    real.save_pretrained(tmp_path)
    batch = {"input_ids": torch.arange(20).view(2, 10)}
    batch["labels"] = batch["input_ids"]
    step = step_of(model)
    step.compile(batch)
    gc.checkpoint.load_weights(step, tmp_path, init=model._init_weights)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert float(step([batch]).loss) == pytest.approx(float(real(**batch).loss.detach()))

    other = model_of("meta")
    step_of(other).materialize(other._init_weights)
    assert float(other.transformer.h[0].attn.c_attn.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert float(other.transformer.h[0].mlp.c_proj.weight.detach().std()) == pytest.approx(
        0.01, rel=0.2
    )  # 0.02 / sqrt(2 * 2)
    with pytest.raises(gc.errors.StateError, match=r"nothing initialises parameter 'transformer\.h\.0\.attn\.c_attn"):
        step_of(model_of("meta")).materialize()
