"""A compiled step inside `transformers.Trainer`, through the method that it offers for this; and the plain Trainer.

    pip install 'graphcomp[hf]'
    python examples/09_hf_trainer.py

The Trainer keeps what it is good at: data, optimizer, learning rates, clipping, accumulation, evaluation, logs. Each of
its training steps is one call, which writes `.grad`. It is one process with one stage: for several, the Trainer would
wrap the model in ways of its own. Both runs print the same losses; exit code 1 if they do not.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from stdlib_text import IGNORED, VOCAB, documents, pad
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, logging

import graphcomp as gc
from graphcomp.huggingface import causal_lm_loss


class CompiledTrainer(Trainer):
    """The loss of a step is that of its tokens, over all microbatches that the Trainer accumulates."""

    def __init__(self, *args: Any, plan: gc.Plan, **options: Any) -> None:
        super().__init__(*args, **options)
        self.compiled = gc.compile_train_step(self.model, causal_lm_loss, plan=plan)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        batch = {name: value.to(self.args.device) for name, value in inputs.items()}
        tokens = None if num_items_in_batch is None else {"loss": torch.as_tensor(num_items_in_batch).long()}
        return self.compiled([batch], tokens=tokens).loss


def collate(texts: list[bytes]) -> dict[str, Tensor]:
    """Padded to the longest; labels are not shifted, as transformers takes them."""
    labels = pad(texts, torch.device("cpu"))["labels"]
    return {"input_ids": labels.where(labels != IGNORED, 0), "labels": labels}


def train(kind: type[Trainer], options: argparse.Namespace, **more: Any) -> tuple[Trainer, dict[str, list[float]]]:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **small))
    texts = documents(limit=200, longest=96)
    arguments = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.steps,
        save_strategy="no",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    data = {"train_dataset": texts[20:], "eval_dataset": texts[:20], "data_collator": collate}
    trainer = kind(model, arguments, **data, **more)
    trainer.train()
    history = trainer.state.log_history
    return trainer, {name: [one[name] for one in history if name in one] for name in ("loss", "grad_norm", "eval_loss")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--folder", default="runs/hf_trainer")
    options = parser.parse_args()
    logging.set_verbosity_error()

    _, expected = train(Trainer, options)
    trainer, found = train(CompiledTrainer, options, plan=gc.Plan(backend=options.backend, quiet=True))
    largest = max(abs(a / b - 1) for name in expected for a, b in zip(found[name], expected[name], strict=True))
    stats = trainer.compiled.stats
    print(f"{stats.steps} compiled steps, {stats.traces} capture(s), {stats.programs} program(s) for all lengths")
    print(f"largest relative difference of losses, gradient norms and evaluation: {largest:.1e}")
    return 0 if largest < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
