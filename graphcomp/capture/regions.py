"""Checkpointed regions: captured once, each of their nodes marked with the region's number."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import count

from torch.utils.checkpoint import CheckpointPolicy

from graphcomp.capture.labels import Labels, user_line
from graphcomp.compat.checkpointed import (
    OFFLOADED,
    SAVED,
    AskPolicy,
    ContextFunction,
    checkpointed_regions,
    selective_policy,
)
from graphcomp.errors import CaptureError
from graphcomp.ir import meta


@contextlib.contextmanager
def marked_regions(labels: Labels) -> Iterator[None]:
    """Within, `labels` knows the region that runs. A region inside another is part of that one."""
    numbers = count()

    @contextlib.contextmanager
    def enter(context_fn: ContextFunction) -> Iterator[None]:
        line = user_line(sys._getframe(1))
        with contextlib.ExitStack() as stack:
            try:
                policy = selective_policy(context_fn)
            except TypeError as error:
                raise _refused("a checkpointed region runs in a context of another kind", line, str(error)) from None
            if labels.region is None:
                labels.region = next(numbers)
                stack.callback(setattr, labels, "region", None)
                labels.made.clear()
                if policy is not None:
                    stack.enter_context(AskPolicy(policy, lambda answer: _decide(labels, answer, line)))
            yield

    with checkpointed_regions(enter):
        yield


def _decide(labels: Labels, answer: CheckpointPolicy | None, line: str | None) -> None:
    """Mark what the latest operation made as the user's policy says."""
    if answer in OFFLOADED:
        raise _refused("a checkpointed region would keep values in another memory", line, str(answer))
    for node in labels.made:
        meta.amend(node, kept=answer in SAVED)
    labels.made.clear()


def _refused(what: str, line: str | None, got: str) -> CaptureError:
    return CaptureError(
        f"{what}, which a program cannot repeat",
        where=line,
        expected="no context_fn, or torch.utils.checkpoint.create_selective_checkpoint_contexts with policies "
        "that save or recompute",
        got=got,
        do="leave context_fn out, or say with a policy which operations are saved",
    )
