"""The small decoder, its data, and the comparison with eager that the cases share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from graphcomp import Plan, token_loss
from graphcomp.call import Ran
from graphcomp.plan import SCHEDULES
from graphcomp.testing import VirtualStep
from tests.zoo.gpt import TinyGPT
from tests.zoo.reference import Reference, reference

STAGES = (1, 2, 4)
LAYOUTS = [(stages, schedule) for stages in STAGES for schedule in SCHEDULES]
PARAMETERS: list[dict[str, Any]] = [{}, {"parameters": "shard"}, {"parameters": "shard", "regather": True}]
"""How data ranks hold parameters, as options of a plan."""
VOCAB, LENGTH, IGNORED = 64, 16, -100


def tiny_gpt(model: Callable[[], nn.Module] = TinyGPT) -> nn.Module:
    """Vocabulary 64, width 32, 4 heads, 2 pre-norm blocks, untied head, seed 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model()


def rows(number: int = 8, length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    """Tokens and labels; each row has its own number of valid labels, 1 to length - 1."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCAB, (number, length), generator=draw)
    for row in labels:
        valid = int(torch.randint(1, length, (), generator=draw))
        row[torch.randperm(length, generator=draw)[valid:]] = IGNORED
    return {"tokens": torch.randint(VOCAB, (number, length), generator=draw), "labels": labels}


def divided(batch: dict[str, Tensor], microbatches: int) -> list[dict[str, Tensor]]:
    """The rows in as many microbatches, in order."""
    parts = {name: leaf.chunk(microbatches) for name, leaf in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(microbatches)]


def next_token(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    return token_loss(logits, batch["labels"])


def step_of(
    model: nn.Module, loss_fn: Any, stages: int = 1, schedule: str = "1f1b", data_ranks: int = 1, **options: Any
) -> VirtualStep:
    """All stages and data ranks in this process, on the eager backend unless told otherwise."""
    if "split" not in options:
        options["stages"] = stages
    plan = Plan(schedule=schedule, quiet=True, **{"backend": "eager", **options})
    return VirtualStep(model, loss_fn, plan=plan, data_ranks=data_ranks)


def dealt(microbatches: Sequence[Any], data_ranks: int) -> list[Any]:
    """What a step takes: the microbatches, or, with several data ranks, a list of them for each, in order."""
    if data_ranks == 1:
        return list(microbatches)
    ends = [len(microbatches) * rank // data_ranks for rank in range(data_ranks + 1)]
    return [list(microbatches[begin:end]) for begin, end in pairwise(ends)]


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if expected.numel() == 0:
        return 0.0
    scale = float(expected.detach().double().abs().max())
    return float((found.detach().double() - expected.detach().double()).abs().max()) / (scale or 1.0)


def assert_equal(
    model: nn.Module,
    loss_fn: Any,
    microbatches: Sequence[Any],
    step: VirtualStep,
    tolerance: float = 1e-5,
    outputs: str = "none",
) -> tuple[Ran, Reference]:
    """Run one step of `step` and one of eager, both from the model as it is, and compare all that they yield."""
    state = torch.get_rng_state()
    expected = reference(model, loss_fn, microbatches)
    torch.set_rng_state(state)
    ran = step.run(dealt(microbatches, step.data_ranks), outputs)
    result = ran.result
    assert relative(result.loss, torch.as_tensor(expected.loss)) <= tolerance
    for name, loss in expected.losses.items():
        assert relative(result.losses[name], loss) <= tolerance, name
    for name, metric in expected.metrics.items():
        assert relative(result.metrics[name], torch.as_tensor(metric)) <= tolerance, name
    assert len(result.microbatch_losses) == len(microbatches)
    for share, loss in zip(result.microbatch_losses, expected.microbatch_losses, strict=True):
        assert relative(share, torch.as_tensor(loss)) <= tolerance
    for name, gradient in expected.gradients.items():
        found = ran.gradients.get(name)
        assert (found is None) == (gradient is None), name
        if gradient is not None:
            assert relative(found, gradient) <= tolerance, name
    for name, buffer in model.named_buffers():
        assert relative(buffer, expected.buffers[name]) <= tolerance, name
    return ran, expected
