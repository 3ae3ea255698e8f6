"""The error hierarchy. A message says what happened, where, what was expected and found, and what to do."""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "ArtifactError",
    "BackendError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "GraphcompError",
    "GuardError",
    "LossError",
    "NonFiniteError",
    "ParityError",
    "PartitionError",
    "PlanError",
    "RankFailure",
    "ScheduleError",
    "StateError",
    "StepError",
    "VerifyError",
]

DOCS = "docs/errors.md"


class GraphcompError(Exception):
    """Base of every error that graphcomp raises on purpose.

    `what` is one sentence. The keyword parts are printed one a line below it, in a fixed order, and only if given:
    where (stage, node, module, user's source line), expected, got, and do (the remedy).
    """

    def __init__(
        self, what: str, *, where: str | None = None, expected: object = None, got: object = None, do: str | None = None
    ) -> None:
        self.what, self.where, self.expected, self.got, self.do = what, where, expected, got, do
        parts = {"where": where, "expected": expected, "got": got, "what to do": do}
        lines = [what] + [f"  {label}: {value}" for label, value in parts.items() if value is not None]
        lines.append(f"  (see {DOCS}#{type(self).__name__.lower()})")
        super().__init__("\n".join(lines))

    def at(self, where: str | None) -> GraphcompError:
        """The same error, with the place that whoever raised it did not know."""
        found = _rebuild(type(self), self.what, where, self.expected, self.got, self.do)
        return found.with_traceback(self.__traceback__)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when an error travels between processes."""
        return _rebuild, (type(self), self.what, self.where, self.expected, self.got, self.do)


def _rebuild(
    kind: type[GraphcompError], what: str, where: str | None, expected: object, got: object, do: str | None
) -> GraphcompError:
    return kind(what, where=where, expected=expected, got=got, do=do)


class PlanError(GraphcompError):
    """An option of `Plan` is unknown, contradicts another one, or does not fit the mesh. Raised before any effect."""


class CaptureError(GraphcompError):
    """The model or the loss function cannot be traced into one graph.

    Typical: Python code that decides on the contents of a tensor (`if x.sum() > 0`, `int(n)`), or a custom operator
    without a fake implementation. The message names the user's own source line. Nothing was changed.
    """


class LossError(CaptureError):
    """The loss function returned something that is no loss: not scalar, without gradient, or of an unknown type."""


class CollectiveError(GraphcompError):
    """A collective was called in a way that has no meaning: an unknown reduction, a group that is none, splits that do
    not fit, a dimension that does not divide, or a gradient through a reduction that has none.

    Raised before any communication, on every rank that makes the same call.
    """


class GuardError(GraphcompError):
    """Something the compiled program depends on has changed, and no other specialisation may be made for it.

    Or numbers that a program reads out of tensors do not fit together as the code at the line named needs it.
    """


class BatchError(GraphcompError):
    """The microbatches are not what the step takes: not a list, or of another structure than the captured one."""


class PartitionError(GraphcompError):
    """The joint program cannot be cut as the plan asks: too many stages, or a split name that does not fit."""


class ScheduleError(GraphcompError):
    """A schedule does not exist for these numbers of stages and microbatches, or its text is malformed."""


class VerifyError(GraphcompError):
    """A program breaks the rules of its level. Shows the pass that made it, the node, and a window of the program."""


class StateError(GraphcompError):
    """A parameter or buffer is used in a way that a cut program cannot reproduce exactly."""


class StepError(GraphcompError):
    """A step was called in a state in which it cannot run: under no_grad, not materialised, unusable after an error."""


class NonFiniteError(StepError):
    """A loss, boundary value or gradient of a step is nan or infinite, and the plan has `check_finite=True`.

    Names the step, and the first stage and microbatch where it is so. Raised on all ranks; nothing was written.
    """


class BackendError(GraphcompError):
    """The backend cannot compile a program, or a compiled program was given inputs it was not compiled for."""


class ArtifactError(GraphcompError):
    """Saved programs cannot be used: they are of another model, plan, version or machine. Names what differs."""


class AgreementError(GraphcompError):
    """Ranks were given different programs, batches or plans. Shows the first disagreement."""


class CheckpointError(GraphcompError):
    """Weights or a checkpoint cannot be read or written, or do not fit the model: names, shapes, an optimizer."""


class ParityError(GraphcompError):
    """The compiled step and eager PyTorch differ by more than the tolerance. Names the first node that differs."""


class RankFailure(GraphcompError):
    """Another rank failed; carries that rank's text: rank, stage, microbatch, action and the original error."""


def error_text(error: BaseException, notes: bool = False) -> str:
    """Type and text of an error. notes: with those that say in which microbatch, and where in the code."""
    more = "".join(f" ({note})" for note in getattr(error, "__notes__", [])) if notes else ""
    return f"{type(error).__name__}: {error}".removesuffix(": ") + more
