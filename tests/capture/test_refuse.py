"""Refusals: each names what happened and where, says what to do, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphcomp.capture import capture
from graphcomp.errors import BatchError, CaptureError, GraphcompError, LossError, StateError
from tests.capture.models import Everything, Net, batch, loss_fn


@contextlib.contextmanager
def refused(kind: type[GraphcompError], model: nn.Module, *parts: str) -> Iterator[None]:
    """An error of exactly this kind, with all parts in its text; the model and the random streams as before."""
    before = Everything(model)
    with pytest.raises(GraphcompError) as error:
        yield
    assert type(error.value) is kind
    for part in parts:
        assert part in str(error.value), str(error.value)
    before.check()


class Code(Net):
    """A net whose hidden values go through a piece of user code."""

    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.code(self, self.hidden(self.embed(tokens))))


def read_item(model: Any, h: Tensor) -> Tensor:
    return h * h.sum().item()


def branch(model: Any, h: Tensor) -> Tensor:
    if h.sum() > 0:
        return h
    return -h


def different_rows(model: Any, h: Tensor) -> Tensor:
    return torch.unique(h.flatten(0, 1), dim=0).sum() + h


def as_list(model: Any, h: Tensor) -> Tensor:
    return h * h.mean(dim=(0, 1)).tolist()[0]


NUMBER = "what to do: keep it a tensor: torch.where"
ROWS = "what to do: give each row one number"


@pytest.mark.parametrize(
    ("code", "do"), [(read_item, NUMBER), (branch, NUMBER), (different_rows, ROWS), (as_list, NUMBER)]
)
def test_code_that_decides_on_contents(code: Callable[[Any, Tensor], Any], do: str) -> None:
    model = Code(code)
    line = code.__code__.co_firstlineno + 1
    with refused(
        CaptureError,
        model,
        "the code decides on the contents of a tensor, which one program for all batches cannot do",
        f"tests/capture/test_refuse.py:{line}",
        "Code",
        "got: it ",
        do,
        "(see docs/errors.md#captureerror)",
    ):
        capture(model, loss_fn, batch())


def grid(model: Any, h: Tensor) -> Tensor:
    return h * F.affine_grid(h[:, :2, :3], (h.shape[0], 1, h.shape[1], 8), align_corners=False)[..., 0]


def reflections(model: Any, h: Tensor) -> Tensor:
    return h * torch.geqrf(h.detach())[0].sum()


def least_squares(model: Any, h: Tensor) -> Tensor:
    return h + torch.linalg.lstsq(h, h)[0].sum()


@pytest.mark.parametrize(
    ("code", "what", "do"),
    [
        (grid, "an operation of torch takes sizes of the batch as plain numbers only", "as int(n) does"),
        (reflections, "torch cannot foretell the results of operator 'aten::geqrf'", "with other operations"),
        (least_squares, "it asks for the residuals of a least squares solution", "torch.linalg.pinv(A) @ B"),
    ],
)
def test_operations_that_cannot_be_traced(code: Callable[[Any, Tensor], Any], what: str, do: str) -> None:
    model = Code(code)
    where = f"tests/capture/test_refuse.py:{code.__code__.co_firstlineno + 1}"
    with refused(CaptureError, model, what, where, do):
        capture(model, loss_fn, batch())


def list_of_counts(model: Any, h: Tensor) -> Tensor:
    return h * len(h.split(torch.bincount(h[0].argmax(1), minlength=2).tolist()))


def test_list_of_as_many_as_contents_say() -> None:
    model = Code(list_of_counts)
    with refused(
        CaptureError,
        model,
        "the code makes a list of a tensor",
        f"tests/capture/test_refuse.py:{list_of_counts.__code__.co_firstlineno + 1}",
        "torch.bincount(x, minlength=E)[:E].tolist()",
    ):
        capture(model, loss_fn, batch())


def test_decision_in_a_child_names_the_module() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.mean().item() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), Gate())
    with refused(CaptureError, model, "module '1', "):
        capture(model, lambda output, x: output.mean(), torch.ones(2, 4))


def test_loss_that_is_not_scalar() -> None:
    model = Net()
    with refused(LossError, model, "a mean loss must be a scalar", "0-dim", "float32 tensor of shape"):
        capture(model, lambda output, data: output, batch())


@pytest.mark.parametrize("result", [None, "text", {}, (1, 2, 3)])
def test_what_is_no_loss(result: Any) -> None:
    model = Net()
    with refused(LossError, model, "expected: a loss"):
        capture(model, lambda output, data: result, batch())


def test_loss_without_gradient() -> None:
    model = Net()
    with refused(LossError, model, "the loss needs no gradient", "what to do: check requires_grad"):
        capture(model, lambda output, data: output.detach().mean(), batch())


def test_nothing_to_train() -> None:
    model = Net().requires_grad_(False)
    with refused(LossError, model, "no trainable parameter takes part in it"):
        capture(model, loss_fn, batch())


def test_sparse_gradient() -> None:
    model = Net()
    model.embed = nn.Embedding(16, 8, sparse=True)
    with refused(
        CaptureError, model, "parameter 'embed.weight' gets a sparse gradient", "what to do: build the embedding"
    ):
        capture(model, loss_fn, batch())


def count_calls(model: Any, h: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return h


def keep_hidden(model: Any, h: Tensor) -> Tensor:
    model.hidden.last = h
    return h


class Told:
    """As a block mask does, it says of itself what its tensors hold."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def __repr__(self) -> str:
        return f"Told({float(self.h.sum())})"


def keep_object(model: Any, h: Tensor) -> Tensor:
    model.told = Told(h)
    return h


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (count_calls, ("its attribute 'calls'", "expected: no such attribute", "got: 1")),
        (keep_hidden, ("its attribute 'hidden.last'", "got: tensor of shape")),
        (keep_object, ("its attribute 'told'", "got: an object of Told")),
    ],
)
def test_attribute_rewritten_in_forward(code: Callable[[Any, Tensor], Any], parts: tuple[str, ...]) -> None:
    model = Code(code)
    with refused(StateError, model, *parts, "a compiled step would not repeat", "what to do: make it a buffer"):
        capture(model, loss_fn, batch())


def append(model: Any, h: Tensor) -> Tensor:
    model.log.append(h.mean())
    return h


def remember(model: Any, h: Tensor) -> Tensor:
    model.masks[h.dim()] = h
    return h


def count_in_place(model: Any, h: Tensor) -> Tensor:
    model.counts["calls"] += 1
    return h


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (append, ("its attribute 'log'", "expected: a list of 1", "got: a list of 2")),
        (remember, ("its attribute 'masks'", "expected: a dict of 0", "got: a dict of 1")),
        (count_in_place, ("its attribute 'counts'",)),
    ],
)
def test_container_written_in_forward(code: Callable[[Any, Tensor], Any], parts: tuple[str, ...]) -> None:
    model = Code(code)
    model.log, model.masks, model.counts = ["start"], {}, {"calls": 7}
    with refused(StateError, model, *parts, "a compiled step would not repeat", "what to do: make it a buffer"):
        capture(model, loss_fn, batch())
    assert (model.log, model.masks, model.counts) == (["start"], {}, {"calls": 7})


def test_every_module_is_restored_when_several_are_rewritten() -> None:
    def rewrite(model: Any, h: Tensor) -> Tensor:
        model.embed.seen = model.head.seen = h
        return h

    model = Code(rewrite)
    with refused(StateError, model, "its attribute 'embed.seen'"):
        capture(model, loss_fn, batch())


def test_tensor_that_nobody_can_follow() -> None:
    class Box:
        __slots__ = ("value",)

    box = Box()
    box.value = torch.ones(8)

    def use(model: Any, h: Tensor) -> Tensor:
        return h * box.value

    model = Code(use)
    with refused(
        CaptureError,
        model,
        "the code uses a tensor that is neither in the model's state nor in the batch",
        f"test_refuse.py:{use.__code__.co_firstlineno + 1}",
        "what to do: register it as a buffer",
    ):
        capture(model, loss_fn, batch())


def test_trained_tensor_that_the_model_does_not_register() -> None:
    scale = nn.Parameter(torch.ones(16))

    def scaled(output: Any, data: Any) -> Any:
        return (output * scale).square().mean()

    model = Net()
    line = f"test_refuse.py:{scaled.__code__.co_firstlineno + 1}"
    with refused(StateError, model, "'scaled.scale' requires a gradient", line, "what to do: use nn.ParameterList"):
        capture(model, scaled, batch())
    capture(model, scaled, batch(), training=False)  # nothing is trained there
    scale.requires_grad_(False)
    capture(model, scaled, batch())


def test_parameter_read_out_of_a_plain_list() -> None:
    def use(model: Any, h: Tensor) -> Tensor:
        return h * model.weights[0]

    model = Code(use)
    model.weights = [model.hidden.bias]
    with refused(StateError, model, "'weights[0]' requires a gradient", "would get none"):
        capture(model, loss_fn, batch())


def test_random_numbers_in_the_backward_of_a_function() -> None:
    class RunsAgain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return torch.nn.functional.dropout(h, 0.5)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.nn.functional.dropout(gradient, 0.5)

    model = Code(lambda model, h: RunsAgain.apply(h))
    with refused(CaptureError, model, "a custom autograd function draws random numbers in its backward", "use torch."):
        capture(model, loss_fn, batch())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_region_runs_once(use_reentrant: bool) -> None:
    def region(model: Any, h: Tensor) -> Tensor:
        return checkpoint(model.drop, h, use_reentrant=use_reentrant)

    model = Code(region)
    before = Everything(model)
    joint = capture(model, loss_fn, batch())
    before.check()
    assert sum("bernoulli" in str(node.target) for node in joint.program.calls()) == 1


def test_a_region_in_a_context_of_its_own() -> None:
    def region(model: Any, h: Tensor) -> Tensor:
        return checkpoint(
            model.hidden, h, use_reentrant=False, context_fn=lambda: (torch.autograd.graph.save_on_cpu(),) * 2
        )

    def offloaded(model: Any, h: Tensor) -> Tensor:
        def policy(*_: Any, **__: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_CPU_OFFLOAD

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(model.hidden, h, use_reentrant=False, context_fn=contexts)

    for code, what, got, line in (
        (region, "in a context of another kind", "save_on_cpu", region.__code__.co_firstlineno + 1),
        (offloaded, "values in another memory", "MUST_CPU_OFFLOAD", offloaded.__code__.co_firstlineno + 5),
    ):
        model = Code(code)
        with refused(CaptureError, model, what, got, f"test_refuse.py:{line}", "what to do: leave context_fn out"):
            capture(model, loss_fn, batch())


def test_batch_that_requires_a_gradient() -> None:
    model = nn.Linear(4, 4)
    with refused(BatchError, model, "the batch tensor batch requires a gradient", "what to do: detach it"):
        capture(model, lambda output, x: output.mean(), torch.ones(2, 4, requires_grad=True))


def test_missing_argument() -> None:
    model = Net()
    with refused(BatchError, model, "the model's forward needs tokens", "Net.forward", "got: words"):
        capture(model, loss_fn, {"words": torch.zeros(2, 3)})


class UserError(RuntimeError):
    pass


def test_users_exception_keeps_its_type_and_gets_a_note() -> None:
    def fail(model: Any, h: Tensor) -> Tensor:
        raise UserError("mine")

    model = Code(fail)
    before = Everything(model)
    with pytest.raises(UserError, match="mine") as error:
        capture(model, loss_fn, batch())
    (note,) = error.value.__notes__
    assert note.startswith("graphcomp: while tracing forward of Code")
    assert f"tests/capture/test_refuse.py:{fail.__code__.co_firstlineno + 1}" in note
    before.check()


def test_failure_in_the_loss_and_in_backward_say_so() -> None:
    def fail(output: Tensor, data: Any) -> Any:
        raise UserError("mine")

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise UserError("backward")

    model = Net()
    before = Everything(model)
    with pytest.raises(UserError) as error:
        capture(model, fail, batch())
    assert "while tracing loss of Net" in error.value.__notes__[0]
    before.check()
    with pytest.raises(UserError) as error:
        capture(model, lambda output, data: Breaks.apply(output).mean(), batch())
    assert "while tracing backward of Net" in error.value.__notes__[0]
    before.check()


def test_a_failed_capture_can_be_repeated_with_another_batch() -> None:
    model = Net()
    with refused(BatchError, model):
        capture(model, loss_fn, {"words": torch.zeros(2, 3)})
    assert capture(model, loss_fn, batch()).program.calls()
