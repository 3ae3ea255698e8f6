"""Labels: where the code that runs at this moment of a trace comes from, stamped on each node it makes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.fx import Node

from graphcomp.capture.userfiles import is_user_file
from graphcomp.compat.tensor_parallel import loss_parallel_is_on
from graphcomp.compat.tracing import next_sequence_number, observe_nodes, sequence_number
from graphcomp.ir.meta import Note, Phase, annotate
from graphcomp.ir.signature import Role

_BEGIN = str(Path(__file__).parent / "capture.py")  # which calls the user's code
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_ROLE, _SEQUENCE = "graphcomp_role", "graphcomp_sequence"


def user_line(frame: FrameType | None) -> str | None:
    """The innermost line of user code on the stack, as file:line; None for nodes that the capture itself makes."""
    while frame is not None and frame.f_code.co_filename != _BEGIN:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def error_line(trace: TracebackType | None) -> str | None:
    """The innermost line of user code in an exception's traceback."""
    found = None
    while trace is not None:
        if is_user_file(trace.tb_frame.f_code.co_filename):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@dataclass
class Labels:
    """What is true of the code that runs at this moment of the trace."""

    phase: Phase = Phase.FORWARD
    module: str | None = None
    sequence: int | None = None  # of the autograd node that runs, in backward
    role: Role | None = None  # of the node that is about to be made
    failed: str | None = None  # the innermost module that an exception left
    hook: bool = False  # whether a gradient hook runs
    region: int | None = None  # the checkpointed region that runs
    made: list[Node] = field(default_factory=list)  # in that region, since its policy was asked last
    parallel: dict[int, bool] = field(default_factory=dict)  # autograd nodes: whether recorded under loss_parallel
    sources: dict[int, str | None] = field(default_factory=dict)  # autograd nodes: the user's line that recorded them

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within, each node that is made is annotated."""
        with observe_nodes(self._stamp):
            yield

    def _stamp(self, node: Node) -> None:
        backward = self.phase is Phase.BACKWARD
        source = None if backward and not self.hook else user_line(sys._getframe(2))
        # A custom autograd Function takes its number before its forward runs, hence "the last one given".
        node.meta[_SEQUENCE] = self.sequence if backward else next_sequence_number() - 1
        if not backward:  # what records no autograd node has the last one's number: the first one decides
            self.parallel.setdefault(node.meta[_SEQUENCE], loss_parallel_is_on())
            self.sources.setdefault(node.meta[_SEQUENCE], source)
        if self.role is not None:
            node.meta[_ROLE] = self.role
        is_sum = backward and self.sequence is None and not self.hook and node.target in _ADDITIONS
        region = None if backward else self.region
        annotate(node, Note(self.phase, self.module, source, gradient_sum=is_sum, recompute=region))
        if region is not None:
            self.made.append(node)

    def _first_made(self, number: int) -> int:
        """The number that the first nodes made for an autograd node have: what `loss_parallel` makes of an operator
        takes numbers of its own, so it may be a later one."""
        return next((each for each in self.parallel if each >= number), -1)  # they ascend

    def _was_parallel(self, number: int) -> bool:
        """Whether an autograd node was recorded under `loss_parallel`."""
        return self.parallel.get(self._first_made(number), False)

    def differentiated(self) -> str | None:
        """The user's line whose backward runs, or has failed."""
        return None if self.sequence is None else self.sources.get(self._first_made(self.sequence))

    @contextlib.contextmanager
    def standing_for(self, role: Role) -> Iterator[None]:
        """Within, a node that is made stands for an input with this role."""
        self.role = role
        try:
            yield
        finally:
            self.role = None

    @contextlib.contextmanager
    def module_names(self, model: nn.Module) -> Iterator[None]:
        """Within, `module` names the innermost module of `model` that runs. Leaves no trace on the model."""
        names = {id(module): name for name, module in model.named_modules()}
        stack: list[str | None] = []
        outer = sys.exc_info()[1]

        def enter(module: nn.Module, _inputs: object) -> None:
            stack.append(self.module)
            self.module = names.get(id(module), self.module)

        def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
            if self.failed is None and sys.exc_info()[1] is not outer:
                self.failed = self.module
            self.module = stack.pop()

        handles = (
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def backward_of(self, root: torch.Tensor) -> Iterator[None]:
        """Within, the backward of `root` may run; its nodes learn which autograd node makes them.

        Each of these runs under `loss_parallel` if it was recorded under that.
        """
        pending, seen, contexts = [root.grad_fn], set(), contextlib.ExitStack()
        while pending:
            function: Any = pending.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            pending.extend(below for below, _ in function.next_functions)
            number = sequence_number(function)

            def before(_gradients: object, number: int = number) -> None:
                self.sequence = number
                if self._was_parallel(number):
                    contexts.enter_context(loss_parallel())

            def after(_inputs: object, _outputs: object) -> None:
                self.sequence = None
                contexts.close()

            function.register_prehook(before)
            function.register_hook(after)
        self.phase, self.module = Phase.BACKWARD, None
        # One thread: the labels are plain attributes, and node order must be the same on every run.
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            contexts.close()


def role_of(node: Node) -> Role | None:
    """The role a node was made for, if the trace made it to stand for an input."""
    return node.meta.get(_ROLE)


def sequence_of(node: Node) -> int | None:
    """Autograd's sequence number: a forward node and the backward nodes made from it have the same one."""
    return node.meta.get(_SEQUENCE)
