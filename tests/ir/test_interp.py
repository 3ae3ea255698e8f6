"""Programs run as eager PyTorch does, at any size, and hold nothing longer than they need."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from graphcomp.compat.collective_operators import ALL_REDUCE, WAIT
from graphcomp.errors import VerifyError
from graphcomp.ir import interp
from graphcomp.ir.program import Program
from graphcomp.ir.signature import (
    BatchLeaf,
    Constant,
    Denominator,
    Grad,
    Loss,
    Output,
    Param,
    Role,
    Size,
    Tokens,
)
from tests.ir.build import Builder, aten, training_step


def inputs_of(program: Program, rows: int) -> dict[Role, Any]:
    symbol = next(role for role in program.inputs if isinstance(role, Size))
    return {
        Param("fc.weight"): torch.randn(8, 4, requires_grad=True),
        BatchLeaf("x"): torch.randn(rows, 8),
        Denominator("loss"): torch.tensor(float(rows)),
        symbol: rows,
    }


def eager(inputs: dict[Role, Any]) -> dict[Role, torch.Tensor]:
    """What the program stands for, written with autograd."""
    w = inputs[Param("fc.weight")].detach().clone().requires_grad_()
    total = (torch.relu(inputs[BatchLeaf("x")] @ w) * 0.5).sum()
    (total / inputs[Denominator("loss")]).backward()
    assert w.grad is not None
    return {Loss("loss"): total.detach(), Grad("fc.weight"): w.grad}


@pytest.mark.parametrize("rows", [1, 5, 6, 32])
def test_equals_eager_at_any_size(rows: int) -> None:
    program = training_step()
    inputs = inputs_of(program, rows)
    found = interp.run(program, inputs)
    expected = eager(inputs)
    assert torch.equal(found[Loss("loss")], expected[Loss("loss")])
    torch.testing.assert_close(found[Grad("fc.weight")], expected[Grad("fc.weight")], rtol=1e-6, atol=1e-7)
    assert found[Tokens("loss")] == rows


def test_callable_is_positional_and_flat() -> None:
    program = training_step()
    inputs = inputs_of(program, 5)
    results = interp.python_callable(program)(*(inputs[role] for role in program.inputs))
    assert isinstance(results, tuple)
    for result, expected in zip(results, interp.run(program, inputs).values(), strict=True):
        assert torch.equal(result, expected)


def test_a_missing_gradient_is_none() -> None:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    program = b.program({Output("x"): x, Grad("unused"): None})
    assert interp.python_callable(program)(torch.ones(2, 2))[1] is None
    assert interp.run(program, {BatchLeaf("x"): torch.ones(2, 2)})[Grad("unused")] is None


def test_groups_stand_for_axes_in_the_callable_only() -> None:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    done = b.call(WAIT, b.call(ALL_REDUCE, x, "sum", "dp"))
    program = b.program({Output("y"): done})
    run = interp.boxed_callable(program, {"dp": "no such group"})
    with pytest.raises(RuntimeError, match="no such group"):
        run([torch.ones(2, 2)])
    assert "'dp'" in str([node.args for node in program.calls()])
    with pytest.raises(VerifyError, match="mesh axis 'dp', which has no process group") as caught:
        interp.boxed_callable(program, {"pp": "0"})
    assert caught.value.where == "program 'sample'"


def test_records_no_autograd() -> None:
    """Parameters require grad, and the trainer has gradients enabled."""
    program = training_step()
    with torch.enable_grad():
        found = interp.run(program, inputs_of(program, 5))
        assert torch.is_grad_enabled()
    assert not any(value.requires_grad for value in found.values())


def test_autocast_is_not_applied_again() -> None:
    """The casts of autocast are in the program; operations outside of them keep their dtype."""
    program = training_step()
    inputs = inputs_of(program, 5)
    plain = interp.run(program, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        again = interp.run(program, inputs)
    assert torch.equal(plain[Grad("fc.weight")], again[Grad("fc.weight")])
    assert again[Grad("fc.weight")].dtype == torch.float32


def test_program_may_change_after_it_was_made_callable() -> None:
    program = training_step()
    inputs = inputs_of(program, 5)
    call = interp.python_callable(program)
    before = program.graph.owning_module
    program.calls()[2].args = (program.calls()[1], 7.0)
    expected = eager(inputs)[Loss("loss")]
    assert torch.equal(call(*(inputs[role] for role in program.inputs))[0], expected)
    assert program.graph.owning_module is before


def chain(length: int = 4) -> Program:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    for _ in range(length):
        x = b.call(aten.cos.default, x)
    return b.program({Output("y"): x})


class Alive(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts, before each operation, how many results of earlier ones and of `first` still live."""

    def __init__(self, first: torch.Tensor) -> None:
        super().__init__()
        self.seen = [weakref.ref(first)]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.append(sum(reference() is not None for reference in self.seen))
        result = func(*args, **(kwargs or {}))
        self.seen.append(weakref.ref(result))
        return result


def test_boxed_callable_frees_inputs_and_values_at_last_use() -> None:
    call = interp.boxed_callable(chain(4))
    box = [torch.ones(2, 2)]
    with Alive(box[0]) as alive:
        call(box)
    assert box == []
    assert alive.counts == [1, 1, 1, 1]


def test_trace_values_names_nodes_in_order_and_keeps_nothing() -> None:
    program = training_step()
    inputs = inputs_of(program, 5)
    found = [(node.name, node.op) for node, _ in interp.trace_values(program, inputs)]
    assert found == [(node.name, node.op) for node in program.graph.nodes if node.op != "output"]
    results = dict(interp.trace_values(program, inputs))
    for role, node in program.output_items():
        assert torch.equal(results[node], interp.run(program, inputs)[role])

    one = torch.ones(2, 2)
    alive = Alive(one)
    values = interp.trace_values(chain(4), {BatchLeaf("x"): one})
    del one
    with alive:
        for _ in values:
            pass
    assert max(alive.counts) <= 2  # the loop's own variable holds one


def test_constants_are_known_and_may_be_overridden() -> None:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    c = b.input(Constant("0"), (), "c")
    total = b.call(aten.add.Tensor, x, c)
    program = b.program({Output("y"): total}, constants={"0": torch.tensor(3.0)})
    x_value = torch.zeros(2, 2)
    assert interp.run(program, {BatchLeaf("x"): x_value})[Output("y")].eq(3).all()
    given = {BatchLeaf("x"): x_value, Constant("0"): torch.tensor(4.0)}
    assert interp.run(program, given)[Output("y")].eq(4).all()


def test_a_view_of_an_unforeseen_layout_is_a_copy() -> None:
    """The trace saw a dense tensor; what comes at run time is transposed."""
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    program = b.program({Output("y"): b.call(aten.view.default, x, [-1])})
    x_value = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(interp.run(program, {BatchLeaf("x"): x_value})[Output("y")], x_value.reshape(-1))
    last = [value for _, value in interp.trace_values(program, {BatchLeaf("x"): x_value})][-1]
    assert torch.equal(last, x_value.reshape(-1))


def test_missing_input_is_named() -> None:
    program = training_step()
    with pytest.raises(VerifyError, match=r"got: nothing for param fc.weight, batch x"):
        interp.run(program, dict(list(inputs_of(program, 5).items())[2:]))


def test_wrong_number_of_inputs() -> None:
    with pytest.raises(VerifyError, match="takes 1 inputs"):
        interp.python_callable(chain())()


def test_a_pausing_program_stops_where_it_is_told_and_lets_go_of_what_is_done() -> None:
    program = training_step()
    inputs = inputs_of(program, 5)
    products = [node for node in program.calls() if node.target is aten.mm.default]
    assert len(products) == 2
    begin = interp.pausing_callable(program, {}, products.__contains__)
    box = interp.ordered(program, inputs)
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        running = begin(box)
        assert box, "nothing runs before it is asked for"
        for _ in products:
            next(running)
            assert not box and torch.is_grad_enabled() and torch.is_autocast_enabled("cpu"), "others run as before"
        with pytest.raises(StopIteration) as end:
            next(running)
    expected = interp.run(program, inputs).values()
    for result, value in zip(end.value.value, expected, strict=True):
        assert result is value or torch.equal(torch.as_tensor(result), torch.as_tensor(value))
