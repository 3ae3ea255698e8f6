"""What looks at a compiled step compiles nothing, and talks to no other rank."""

from __future__ import annotations

import pytest

import graphcomp as gc
from tests.zoo import ZOO


@pytest.mark.parametrize("outputs", ["none", "local"])
def test_looking_at_a_step_uses_the_programs_that_it_ran(outputs: str) -> None:
    case = ZOO["gpt"]
    step = gc.compile_train_step(case.build(), case.loss_fn, plan=gc.Plan(backend="eager", quiet=True))
    step(case.microbatches(2), outputs=outputs)
    programs = step.compiler.backend.programs
    step.explain()
    gc.clip_grad_norm_(step, 1.0)
    assert dict(step.named_parameters()).keys() == dict(step.model.named_parameters()).keys()
    assert step.compiler.backend.programs == programs


def test_options_that_cannot_hold_are_refused_before_process_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcomp.step.make_layout", lambda *_: pytest.fail("it has made the layout"))
    case = ZOO["gpt"]
    with pytest.raises(gc.errors.PlanError, match="no option 'cpp_wraper'"):
        gc.compile_train_step(case.build(0), case.loss_fn, plan=gc.Plan(compile_options={"cpp_wraper": True}))
