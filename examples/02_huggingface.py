"""GPT-2 and a Llama from Hugging Face transformers, as the library builds them, in two and in four stages.

    python examples/02_huggingface.py

The same text trains the models in 1, 2 and 4 processes: only the mesh differs. GPT-2's head shares its weight
with the embedding, so first and last stage hold a copy each; their gradients are added once in a step.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

import graphcomp as gc
from graphcomp.testing import run_ranks

VOCAB = 128


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    logging.set_verbosity_error()  # the small vocabulary has no place for the default special tokens
    if name == "gpt2":
        small = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **small, **no_dropout))
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **small))


def loss_fn(output: Any, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(output.logits[:, :-1], batch["labels"][:, 1:])


def data(steps: int) -> list[list[dict[str, Tensor]]]:
    """Sequences that count upwards from a random start, of another length in each microbatch."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        lengths = [9 + (7 * step + 5 * i) % 24 for i in range(4)]
        starts = [torch.randint(VOCAB, (4, 1), generator=generator) for _ in lengths]
        ids = [(start + torch.arange(length)) % VOCAB for start, length in zip(starts, lengths, strict=True)]
        found.append([{"input_ids": each, "labels": each} for each in ids])
    return found


def train(rank: int, names: list[str], steps: int, backend: str) -> dict[str, list[float]]:
    """What every process runs; nothing in it depends on how many there are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    plan = gc.Plan(mesh=mesh, backend=backend, quiet=True)
    losses: dict[str, list[float]] = {}
    for name in names:
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = gc.compile_train_step(model, loss_fn, plan=plan)
        losses[name] = []
        for microbatches in data(steps):
            result = step(microbatches)
            gc.clip_grad_norm_(step, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(float(result.loss))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"], choices=["gpt2", "llama"])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    options = parser.parse_args()

    found = {n: run_ranks(train, n, options.models, options.steps, options.backend) for n in options.stages}
    largest = 0.0
    for name in options.models:
        reference = torch.tensor(found[options.stages[0]][0][name])
        for stages, ranks in found.items():
            print(f"{name:6} {stages} stage(s): " + "  ".join(f"{loss:.6f}" for loss in ranks[0][name]))
            for losses in ranks:
                largest = max(largest, float((torch.tensor(losses[name]) / reference - 1).abs().max()))
    print(f"largest relative difference between layouts and ranks: {largest:.1e}")
    return 0 if largest < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
