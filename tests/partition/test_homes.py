"""State stays on its stage: what one specialisation trains is what every other one reads."""

from __future__ import annotations

import pytest

import graphcomp as gc
from graphcomp.errors import PartitionError
from graphcomp.partition.homes import homes_of, require_homes
from tests.zoo import ZOO

# Cut by their own loads, evaluation and training of these would hold state on different stages.
CASES = [("half_frozen", 2), ("batch_norm", 2), ("u_shape", 3), ("moe", 4), ("encoder_decoder", 4)]


@pytest.mark.parametrize("training_first", [True, False])
@pytest.mark.parametrize(("name", "stages"), CASES)
def test_evaluation_and_training_hold_state_on_the_same_stages(name: str, stages: int, training_first: bool) -> None:
    case = ZOO[name]
    model, batch = case.build(), case.microbatches(1)[0]
    compiler = gc.GraphCompiler(model, case.loss_fn, gc.Plan(stages=stages, backend="eager", quiet=True))
    homes = []
    for training in (training_first, not training_first):
        compiler.capture(batch, training=training)
        homes.append(homes_of(compiler.partition().stages))
    assert all(set(homes[1][key]) <= set(homes[0][key]) for key in homes[0].keys() & homes[1].keys())


def test_state_on_another_stage_is_refused_by_name() -> None:
    require_homes({"w": (1,), "new": (0,)}, {"w": (0, 1)})
    with pytest.raises(PartitionError, match="'w' would be used on another stage than the one that holds it") as error:
        require_homes({"w": (0, 1)}, {"w": (1,)})
    assert error.value.expected == "stages (1,)" and error.value.got == "stages (0, 1)"
