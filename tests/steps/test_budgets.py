"""What a steady step costs: traces, programs, reads of the device, memory that stays behind; and that it repeats."""

from __future__ import annotations

import random
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphcomp as gc
from graphcomp.compat.dispatch import Watch
from graphcomp.testing import VirtualStep
from tests.steps.test_step import EAGER, compiled, equals, gradients
from tests.zoo import ZOO
from tests.zoo.case import IGNORED
from tests.zoo.reference import reference


def text(rows: int, length: int, valid: int | None = None) -> dict[str, Tensor]:
    labels = torch.randint(64, (rows, length))
    if valid is not None:
        labels.flatten()[valid:] = IGNORED
        assert int((labels != IGNORED).sum()) == valid
    return {"tokens": torch.randint(64, (rows, length)), "labels": labels}


def test_fifty_steps_of_random_lengths_are_traced_once_and_equal_eager() -> None:
    case, model, step = compiled("gpt")
    lengths = random.Random(1)
    sizes: list[tuple[int, int]] = []
    for number in range(50):
        shapes = [(lengths.randint(2, 3), lengths.randint(2, 24)) for _ in range(lengths.randint(1, 2))]
        if number == 25:
            shapes.append((2, 64))  # the longest that the model has positions for
        sizes += shapes
        batches = [text(*shape) for shape in shapes]
        model.zero_grad()
        equals(step(batches), model, reference(model, case.loss_fn, batches))
    assert len(set(sizes)) > 25
    assert step.stats.traces == 1
    programs = step.stats.programs
    model.zero_grad()
    batches = [text(2, 1), text(2, 9), text(3, 1)]
    equals(step(batches), model, reference(model, case.loss_fn, batches))
    assert (step.stats.traces, step.stats.programs) == (2, 2 * programs)


def test_fifty_steps_of_random_lengths_on_two_stages_are_traced_once_and_equal_eager() -> None:
    case = ZOO["gpt"]
    model = case.build().double()
    step = VirtualStep(model, case.loss_fn, plan=gc.Plan(stages=2, backend="eager", quiet=True))
    lengths, seen, programs = random.Random(2), set[tuple[int, int]](), []
    for number in range(50):
        shapes = [(lengths.randint(2, 3), lengths.randint(2, 24)) for _ in range(lengths.randint(1, 3))]
        if number == 25:
            shapes.append((2, 64))  # the longest that the model has positions for
        seen |= set(shapes)
        batches = [text(*shape) for shape in shapes]
        ran, expected = step.run(batches), reference(model, case.loss_fn, batches)
        assert ran.result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
        for name, gradient in expected.gradients.items():
            assert gradient is not None and torch.allclose(ran.gradients[name], gradient, 1e-9, 1e-12), name
        programs.append(step.compiler.backend.programs)
    assert len(seen) > 25
    assert step.compiler.traces == 1
    # Forward and backward of each stage, and both in one where nothing comes between; all known after a few steps.
    assert programs[-1] == programs[10] <= 3 * 2


@pytest.mark.parametrize("name", ["tied_gpt", "moe", "batch_norm", "dropout"])
def test_identical_steps_are_bitwise_identical(name: str) -> None:
    case, model, step = compiled(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches, start = case.microbatches(3), {key: value.clone() for key, value in model.named_buffers()}
    seen = []
    for _ in range(5):
        torch.manual_seed(3)
        for key, buffer in model.named_buffers():
            buffer.copy_(start[key])
        optimizer.zero_grad()
        result = step(batches)
        seen.append((result.loss.item(), {key: grad.clone() for key, grad in gradients(model).items()}))
        optimizer.step()
    for loss, grads in seen[1:]:
        assert loss == seen[0][0]
        assert all(torch.equal(grad, seen[0][1][key]) for key, grad in grads.items())
    assert step.stats.traces == 1


def test_the_number_of_tokens_is_in_no_program(tmp_path: Path) -> None:
    """The same programs, letter by letter, from a first step with 5 and one with 50 valid tokens; 2 x 41 in all."""
    dumped = {}
    for valid in (5, 50):
        case, model, step = compiled("gpt")
        batches = [text(2, 41, valid)]
        equals(step(batches), model, reference(model, case.loss_fn, batches))
        files = step.dump(tmp_path / str(valid))
        dumped[valid] = {file.name: file.read_text() for file in files if file.name != "index.txt"}
        other = [text(2, 41, 55 - valid)]
        model.zero_grad()
        equals(step(other), model, reference(model, case.loss_fn, other))
        assert step.stats.traces == 1
    programs = [{k: v for k, v in one.items() if "plan" not in k} for one in dumped.values()]
    assert len(programs[0]) >= 3 and programs[0].keys() == programs[1].keys()
    for name, program in programs[0].items():
        other_lines = [line for line in programs[1][name].splitlines() if " ms" not in line]
        assert [line for line in program.splitlines() if " ms" not in line] == other_lines, name


@pytest.mark.parametrize("name", ["gpt", "ragged_gpt", "moe", "batch_norm", "dropout"])
def test_a_steady_step_reads_nothing_back(name: str) -> None:
    case, model, step = compiled(name)
    step(case.microbatches(3))
    ran: list[str] = []
    with Watch(lambda operator, _: ran.append(str(operator))):
        result = step(case.microbatches(3), loss_scale=1.0)
        model.zero_grad()
    assert len(ran) > 50
    assert [
        one for one in ran if "_local_scalar_dense" in one or one.startswith(("aten.item", "aten.is_nonzero"))
    ] == []
    with Watch(lambda operator, _: ran.append(str(operator))):
        float(result.loss)
    assert ran[-1] == "aten._local_scalar_dense.default"


@pytest.mark.parametrize("name", ["ragged_gpt", "mlp", "dropout"])
def test_no_microbatch_outlives_its_step(name: str) -> None:
    case, model, step = compiled(name)
    step(case.microbatches(2))
    for call in (step, step.evaluate):
        batches = case.microbatches(3, 5)
        leaves = [leaf for batch in batches for leaf in (batch.values() if isinstance(batch, dict) else batch)]
        alive = [weakref.ref(leaf) for leaf in leaves]
        memory = [weakref.ref(leaf.untyped_storage()) for leaf in leaves]
        result = call(batches)
        del batches, leaves
        assert [ref for ref in alive if ref() is not None] == []
        del result, memory
    assert all(grad is not None for grad in gradients(model).values())


def test_only_outputs_that_were_asked_for_stay() -> None:
    case, _, step = compiled("gpt")
    made: list[weakref.ref[Tensor]] = []
    step(case.microbatches(1))
    with Watch(lambda _, result: made.append(weakref.ref(result)) if isinstance(result, Tensor) else None):
        result = step(case.microbatches(2))
    kept = {id(p.grad) for p in step.parameters()} | {id(one) for one in result.tokens.values()}
    alive = [one for ref in made if (one := ref()) is not None and id(one) not in kept]
    assert all(one.numel() <= 8 for one in alive), [tuple(one.shape) for one in alive]


def test_a_step_without_tokens_is_zero_and_counts_none() -> None:
    case = ZOO["gpt"]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=EAGER)
    result = step([text(2, 8, 0), text(2, 5, 0)])
    assert (result.loss.item(), int(result.tokens["loss"])) == (0.0, 0)
    assert all(not grad.any() for grad in gradients(model).values() if grad is not None)
