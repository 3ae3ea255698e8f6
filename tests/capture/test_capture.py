"""Capture: what the joint program holds, and that it computes what eager PyTorch does."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp.capture import capture
from graphcomp.capture.batch import describe
from graphcomp.capture.guards import read_captured
from graphcomp.capture.joint import Joint
from graphcomp.errors import GuardError
from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.losses import TokenLoss, mean_loss, metric, token_loss
from graphcomp.passes.functionalize import Functionalize
from tests.capture.models import Everything, Net, batch, loss_fn
from tests.zoo import ZOO


def run(joint: Joint, model: nn.Module, data: Any, tokens: float = 1.0) -> dict[role.Role, Any]:
    """The outputs of a joint program on a microbatch, by role, with this denominator for every loss."""
    _, leaves = describe(data)
    values: dict[role.Role, Any] = {role.Size(s): n for s, n in joint.sizes.bind(leaves).items()}
    values |= {role.BatchLeaf(path): leaf for path, leaf in leaves.items()}
    values |= {role.Param(name): p.detach() for name, p in model.named_parameters()}
    values |= {role.Buffer(name): buffer.clone() for name, buffer in model.named_buffers()}
    expected = {w.name: meta.value(n) for w, n in joint.program.input_nodes() if isinstance(w, role.Captured)}
    values |= {role.Captured(name): t for name, t in read_captured(joint.captured, expected).items()}
    for what, node in joint.program.input_nodes():
        like = meta.tensor(node)
        if isinstance(what, role.Denominator | role.LossScale) and like is not None:
            values[what] = torch.full((), tokens if isinstance(what, role.Denominator) else 1, dtype=like.dtype)
    wanted = [what for what in joint.program.inputs if not isinstance(what, role.Constant)]
    return interp.run(joint.program, {what: values[what] for what in wanted})


def gradients(outputs: dict[role.Role, Any]) -> dict[str, Tensor]:
    return {what.name: value for what, value in outputs.items() if isinstance(what, role.Grad)}


def names(joint: Joint, kind: type) -> list[str]:
    return [str(what) for what in joint.program.inputs if isinstance(what, kind)]


def test_inputs_and_outputs_have_the_users_names() -> None:
    joint = capture(Net(), loss_fn, batch())
    parameters = ["embed.weight", "hidden.weight", "hidden.bias", "head.weight", "head.bias"]
    assert names(joint, role.Param) == [f"param {name}" for name in parameters]
    assert names(joint, role.BatchLeaf) == ["batch tokens", "batch labels"]
    outputs = list(map(str, joint.program.outputs))
    assert outputs == ["tokens loss", "loss loss", "output output", *(f"grad {name}" for name in parameters)]
    assert [(spec.name, spec.kind) for spec in joint.losses] == [("loss", "token")]
    verify(Functionalize().apply(joint.program), made_by="functionalize")


@pytest.mark.parametrize("shape", [(2, 5), (2, 2), (7, 3), (4, 9)])
def test_one_capture_serves_all_lengths_and_equals_eager(shape: tuple[int, int]) -> None:
    model = Net().eval()
    joint = capture(model, loss_fn, batch(2, 5))
    data = batch(*shape)
    outputs = run(joint, model, data, tokens=7.0)
    loss = loss_fn(model(data["tokens"]), data)
    (loss.total / 7).backward()
    assert outputs[role.Tokens("loss")].item() == data["labels"].numel()
    torch.testing.assert_close(outputs[role.Loss("loss")], loss.total.detach())
    for name, gradient in gradients(outputs).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_equal_example_sizes_are_not_tied() -> None:
    joint = capture(Net(), loss_fn, batch(5, 5))
    _, leaves = describe(batch(3, 4))
    assert joint.sizes.fit(leaves) is not None


def test_labels_are_tied_to_tokens_where_the_loss_needs_it() -> None:
    joint = capture(Net(), loss_fn, batch(2, 5))
    _, leaves = describe({"tokens": batch(2, 5)["tokens"], "labels": batch(2, 6)["labels"]})
    sizes = joint.sizes.bind(leaves)
    assert joint.sizes.fit(leaves) is None
    (sentence,) = joint.sizes.differences(sizes, leaves)
    assert sentence == "labels has shape (2, 6), expected (2, 5)"


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_tied_parameters_are_one_input_with_one_summed_gradient() -> None:
    model, data = Tied().eval(), batch()
    joint = capture(model, loss_fn, data)
    assert "param head.weight" not in names(joint, role.Param)
    found = gradients(run(joint, model, data))
    loss_fn(model(data["tokens"]), data).total.backward()
    assert "head.weight" not in found
    torch.testing.assert_close(found["embed.weight"], model.embed.weight.grad)


def test_a_model_on_meta_gives_the_same_text() -> None:
    text = str(capture(Net(), loss_fn, batch()).program)
    with torch.device("meta"):
        model = Net()
    assert str(capture(model, loss_fn, batch()).program) == text
    assert all(p.device.type == "meta" for p in model.parameters())


@functools.cache
def captured(name: str) -> tuple[nn.Module, Program]:
    """A model of the zoo, and what was captured of it first."""
    case = ZOO[name]
    model = case.build()
    return model, capture(model, case.loss_fn, case.microbatches(1)[0]).program


@pytest.mark.parametrize("name", list(ZOO))
def test_capture_is_deterministic_and_changes_nothing(name: str) -> None:
    case, (model, first) = ZOO[name], captured(name)
    before = Everything(model)
    second = capture(model, case.loss_fn, case.microbatches(1)[0]).program
    before.check()
    assert str(first) == str(second)


@pytest.mark.parametrize("name", list(ZOO))
def test_every_node_says_where_it_comes_from(name: str) -> None:
    model, program = captured(name)
    modules = {name for name, _ in model.named_modules()}
    forward = {meta.note(n).operation for n in program.calls() if meta.note(n).phase is not Phase.BACKWARD}
    for node in program.calls():
        at = meta.note(node)
        if at.phase is Phase.BACKWARD:
            if not at.gradient_sum and meta.tensor(node) is not None:
                assert at.operation is not None and at.operation in forward, node
            continue
        if at.phase is Phase.FORWARD:
            assert at.module in modules and at.source is not None and "tests/zoo/" in at.source, node
        else:  # what turns the loss into one number is no user's line
            assert at.module is None and (at.source is None or ".py:" in at.source), node


def test_notes_name_module_line_and_phase() -> None:
    program = capture(Net(), loss_fn, batch()).program
    notes = [(meta.note(n).phase, meta.note(n).module) for n in program.calls()]
    forward = [module for phase, module in notes if phase is Phase.FORWARD]
    assert list(dict.fromkeys(forward)) == ["embed", "hidden", "", "drop", "head"]
    assert {module for phase, module in notes if phase is Phase.LOSS} == {None}
    lines = {meta.note(n).source for n in program.calls() if meta.note(n).module == "head"}
    assert all("tests/capture/models.py:" in (line or "") for line in lines)


def test_the_users_code_runs_once() -> None:
    calls = []

    class Counted(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            calls.append("forward")
            return super().forward(tokens)

    def counted(output: Tensor, data: Any) -> Any:
        calls.append("loss")
        return loss_fn(output, data)

    capture(Counted(), counted, batch())
    assert calls == ["forward", "loss"]


def test_one_thread_traces_at_a_time() -> None:
    """Names of torch stand for something else meanwhile; two threads would put them back in the wrong order."""
    second = threading.Event()

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            other.start()
            assert not second.wait(0.3)
            return super().forward(x)

    class Tells(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            second.set()
            return super().forward(x)

    def traced(kind: type[nn.Linear]) -> None:
        capture(kind(2, 2), lambda output, batch: mean_loss(output.sum()), (torch.ones(3, 2),))

    before = torch.Tensor.register_hook
    other = threading.Thread(target=traced, args=(Tells,))
    traced(Waits)
    other.join()
    assert second.is_set() and torch.Tensor.register_hook is before


def test_buffers_changed_in_forward_are_outputs() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.1)), torch.randn(3, 4)
    before = Everything(model)
    joint = capture(model, lambda output, x: output.square().mean(), x)
    before.check()
    program = Functionalize().apply(joint.program)
    verify(program, made_by="functionalize")
    updates = {what.name for what in program.outputs if isinstance(what, role.BufferUpdate)}
    assert updates == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


class Reads(nn.Module):
    """Uses tensors that are no state: in an attribute, in a list, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = torch.ones(4)
        self.steps = [torch.ones(4), torch.full((4,), 2.0)]
        self.table = {"gain": torch.full((4,), 3.0)}

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.shift + self.steps[1]) * self.table["gain"]


def test_tensors_in_attributes_are_lifted_and_followed() -> None:
    model, x = Reads(), torch.randn(3, 4)
    joint = capture(model, lambda output, x: output.square().mean(), x)
    assert sorted(joint.captured) == ["shift", "steps[1]", "table['gain']"]
    model.shift = torch.full((4,), 5.0)
    model.steps[1] = torch.full((4,), 6.0)
    model.table["gain"].mul_(2)
    torch.testing.assert_close(run(joint, model, x)[role.Loss("loss")], model(x).square().mean().detach())


def test_closure_tensor_is_lifted_and_followed() -> None:
    weights = torch.full((16,), 0.5)

    def loss(output: Tensor, data: Any) -> Any:
        return token_loss(output * weights, data["labels"])

    model, data = Net().eval(), batch()
    joint = capture(model, loss, data)
    assert list(joint.captured) == ["loss.weights"]
    weights = torch.full((16,), 3.0)
    found = run(joint, model, data)[role.Loss("loss")]
    torch.testing.assert_close(found, loss(model(data["tokens"]), data).total.detach())
    weights = torch.ones(3)
    with pytest.raises(GuardError, match=r"loss\.weights"):
        run(joint, model, data)


def test_literal_tensors_are_constants() -> None:
    def loss(output: Tensor, data: Any) -> Tensor:
        return (output.mean(dim=(0, 1))[:2] * torch.tensor([1.0, 2.0])).sum()

    joint = capture(Net(), loss, batch())
    assert not joint.captured
    assert [t.tolist() for t in joint.program.constants.values()] == [[1.0, 2.0]]


class Seven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, 7.0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return Seven.apply(x * self.w)


def test_custom_autograd_function_keeps_its_backward() -> None:
    model = Custom()
    joint = capture(model, lambda output, x: output.sum(), torch.ones(2, 3))
    found = run(joint, model, torch.ones(2, 3))
    assert gradients(found)["w"].tolist() == [14.0, 14.0, 14.0]
    assert found[role.Loss("loss")].item() == 12.0


def test_forward_hook_is_honoured() -> None:
    model = nn.Linear(3, 1, bias=False)
    model.register_forward_hook(lambda module, args, output: output * 2)
    joint = capture(model, lambda output, x: output.sum(), torch.ones(2, 3))
    assert gradients(run(joint, model, torch.ones(2, 3)))["weight"].tolist() == [[4.0, 4.0, 4.0]]


def test_the_denominator_is_an_input_and_no_token_count_is_frozen() -> None:
    data = batch(2, 5)
    data["labels"][0, :3] = -100
    joint = capture(Net(), loss_fn, data)
    assert names(joint, role.Denominator) == ["denominator loss"]
    assert names(joint, role.LossScale) == ["loss_scale"]
    numbers = [a for n in joint.program.calls() for a in n.args if isinstance(a, int | float)]
    assert 7 not in numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loss_in_half_precision_is_divided_by_the_exact_count(dtype: torch.dtype) -> None:
    model, data, count = nn.Linear(4, 1, bias=False).to(dtype), torch.ones(2, 4, dtype=dtype), 70_001
    joint = capture(model, lambda output, batch: TokenLoss(output.sum(), count), (data,))
    found = gradients(run(joint, model, (data,), count))["weight"]
    (model(data).sum() / count).backward()
    assert float(found.sum()) > 0  # half precision would take the count for infinite
    torch.testing.assert_close(found, model.weight.grad, rtol=0, atol=0)


def test_named_losses_metrics_and_outputs() -> None:
    class Two(Net):
        def forward(self, tokens: Tensor) -> dict[str, Any]:
            hidden = self.embed(tokens)
            return {"logits": self.head(hidden), "extra": [hidden.mean(), "note"]}

    def loss(output: dict[str, Any], data: Any) -> Any:
        losses = {
            "lm": TokenLoss(output["logits"].square().sum(), data["labels"].ge(0)),
            "aux": mean_loss(output["extra"][0]),
        }
        return losses, {"top": metric(output["logits"].max(), "max"), "size": output["logits"].mean()}

    joint = capture(Two(), loss, batch())
    assert [(s.name, s.kind) for s in joint.losses] == [("lm", "token"), ("aux", "mean")]
    assert [(s.name, s.reduction) for s in joint.metrics] == [("top", "max"), ("size", "mean")]
    assert joint.output_leaves == (role.Output("logits"), role.Output("extra[0]"), "note")
    assert {"tokens lm", "loss lm", "loss aux", "metric top", "metric size"} <= set(map(str, joint.program.outputs))
    assert sorted(names(joint, role.Denominator)) == ["denominator aux", "denominator lm"]


def test_unused_parameter_has_no_gradient_and_frozen_one_no_output() -> None:
    model = Net()
    model.unused = nn.Linear(2, 2)
    model.embed.weight.requires_grad_(False)
    program = capture(model, loss_fn, batch()).program
    assert program.output(role.Grad("unused.weight")) is None
    assert role.Grad("embed.weight") not in program.outputs
    assert role.Param("unused.weight") not in program.inputs


@pytest.mark.parametrize(
    "decide",
    [lambda n, rows: n > 4, lambda n, rows: n == 5, lambda n, rows: n != rows, lambda n, rows: n + rows < 9],
    ids=["range", "equal", "unequal", "sum"],
)
def test_decisions_on_sizes_of_a_field_that_is_no_input_are_conditions(decide: Any) -> None:
    def loss(output: Tensor, data: Any) -> Tensor:
        return output.mean() * (3 if decide(data["extra"].shape[0], data["tokens"].shape[0]) else 1)

    def data(extra: int) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(3, 4, dtype=torch.int64), "extra": torch.zeros(extra)}

    joint = capture(Net(), loss, data(5))
    assert role.BatchLeaf("extra") not in joint.program.inputs
    for extra in range(2, 9):
        _, leaves = describe(data(extra))
        assert (joint.sizes.fit(leaves) is not None) == (decide(extra, 3) == decide(5, 3)), extra


def test_unread_batch_fields_are_no_inputs() -> None:
    data = batch() | {"source": torch.zeros(4, 4), "note": "text"}
    joint = capture(Net(), loss_fn, data)
    assert names(joint, role.BatchLeaf) == ["batch tokens", "batch labels"]
    assert "source" not in joint.sizes.shapes


def test_evaluation_has_no_backward() -> None:
    program = capture(Net().eval(), loss_fn, batch(), training=False).program
    assert not any(isinstance(what, role.Grad) for what in program.outputs)
    assert not any(meta.note(n).phase is Phase.BACKWARD for n in program.calls())
