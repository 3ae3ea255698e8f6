"""Refusals at capture: what a traced step cannot honour is named, with the user's own line and a way out."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphcomp.capture.labels import Labels, error_line
from graphcomp.capture.questions import question_of
from graphcomp.capture.taken import refusal
from graphcomp.compat.fakes import wants_plain_sizes
from graphcomp.compat.higher_order import FunctionsRefusedError
from graphcomp.compat.operators import target_name
from graphcomp.compat.symbols import HAS_NO_FAKE, asked_operator
from graphcomp.errors import CaptureError, StateError
from graphcomp.ir import meta
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.randomness import draws


def check_buffers(buffers: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Refuse buffers that require a gradient: only parameters are trained."""
    for name, buffer in buffers:
        if buffer.requires_grad:
            raise StateError(
                f"buffer '{name}' requires a gradient, which a compiled step gives to parameters only",
                where=where,
                do="make it an nn.Parameter, or detach what it is made of, and write to it under torch.no_grad()",
            )


def check_random_backward(program: Program) -> None:
    """Refuse random operations in the backward of a function of the user's.

    One that runs its forward again there would need the forward's numbers; torch.utils.checkpoint is known, others are
    not.
    """
    for node in program.calls():
        at = meta.note(node)
        if at.phase is Phase.BACKWARD and draws(node):
            raise CaptureError(
                "a custom autograd function draws random numbers in its backward: others than in its forward",
                where=f"module '{at.module}' {at.source or ''}",
                got=str(node.target),
                do="draw in forward and save the numbers; to compute a part again, use torch.utils.checkpoint",
            )


def check_devices(program: Program) -> None:
    """Refuse operations that have no kernel on the device where they are to run, but would be captured."""
    for node in program.calls():
        kernel = _ONLY_ON.get(target_name(node.target))
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        value = meta.tensor(first) if first is not None else None
        if kernel is not None and value is not None and value.device.type != kernel[1]:
            raise CaptureError(
                f"the code calls {kernel[0]}, for which torch has no kernel on this device",
                where=", ".join(meta.place(node)) or None,
                expected=kernel[1],
                got=value.device.type,
                do=kernel[2],
            )


_ONLY_ON = {
    "torch_attn::_varlen_attn": (
        "varlen_attn",
        "cuda",
        "use flex_attention with a mask of documents, or scaled_dot_product_attention over documents as rows",
    )
}
"""By operator: what users call it, the device that has it, and what to do elsewhere."""


def _host_random() -> dict[str, Any]:
    """The states of Python's and NumPy's default random generators. NumPy is asked only if somebody uses it."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _, numbers, *rest = numpy_random.get_state()
        states["numpy.random"] = (numbers.tobytes(), *rest)
    return states


def _check_host_random(before: dict[str, Any], model: nn.Module) -> None:
    """Refuse code that drew a random number in Python: the program would repeat that number at each step."""
    for name, state in _host_random().items():
        if name in before and state != before[name]:
            raise CaptureError(
                f"the code draws a number from the module {name}, which a program would repeat at each step",
                where=type(model).__name__,
                expected="random numbers that are tensors",
                do="draw it with torch and use it as a tensor (torch.where), or pass it as a batch field",
            )


@contextlib.contextmanager
def explained(model: nn.Module, labels: Labels) -> Iterator[None]:
    """Turn what goes wrong while tracing into an error that shows the user's line; user errors keep their type."""
    before = _host_random()
    try:
        yield
    except Exception as error:
        line = error_line(error.__traceback__) or labels.differentiated()
        name = labels.failed or labels.module
        where = f"module '{name}', {line}" if name else line
        asked = question_of(error)
        if asked is not None:
            raise CaptureError(
                "the code decides on the contents of a tensor, which one program for all batches cannot do",
                where=(f"module '{name}', " if name else f"{type(model).__name__}, ") + (line or labels.phase),
                got=asked.got,
                do=asked.do,
            ) from error
        if isinstance(error, CaptureError | StateError) and error.where is None:
            raise error.at(where) from error.__cause__
        if isinstance(error, FunctionsRefusedError):
            raise refusal(error, where) from error
        if wants_plain_sizes(error):
            raise CaptureError(
                "an operation of torch takes sizes of the batch as plain numbers only",
                where=where or labels.phase,
                do="compute it with other operations; or make the sizes it depends on plain numbers, as int(n) does, "
                "which is a program for each",
            ) from error
        if isinstance(error, HAS_NO_FAKE):
            raise CaptureError(
                f"torch cannot foretell the results of operator '{asked_operator(error)}', so it cannot be traced",
                where=where or labels.phase,
                do="compute it with other operations; if it is an operator of yours, torch.library.register_fake",
            ) from error
        if isinstance(error, TypeError) and "unhashable type: non-nested SymInt" in str(error):
            raise CaptureError(
                "the code uses a size of the batch as a key, which a size that may be any number cannot be",
                where=where,
                expected="a plain number",
                got="a size, in a dict, a set or the arguments of a function under functools.cache",
                do="make it a plain number: table[int(n)], which is one program for each size; or compute what the "
                "table holds from the size",
            ) from error
        error.add_note(
            f"graphcomp: while tracing {labels.phase} of {type(model).__name__}"
            + (f", module '{name}'" if name else "")
            + (f", at {line}" if line else "")
        )
        raise
    _check_host_random(before, model)
