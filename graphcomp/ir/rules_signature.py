"""Rules about the inputs and outputs of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch.fx import Node

from graphcomp.ir.fault import Fault
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import (
    AMBIENT,
    Accumulator,
    Activation,
    BufferUpdate,
    Grad,
    Loss,
    Metric,
    Output,
    Param,
    Role,
    Saved,
    Shard,
    Size,
    Statistic,
    Tokens,
)
from graphcomp.ir.spelling import Symbols

_RESULTS = (Loss, Tokens, Metric, Grad, BufferUpdate, Output)
INPUTS: dict[Level, tuple[type[Role], ...]] = {
    Level.JOINT: AMBIENT,
    Level.STAGE: (*AMBIENT, Activation, Saved, Accumulator, Statistic),
    Level.STEP: (Param, Shard, Grad),
}
OUTPUTS: dict[Level, tuple[type[Role], ...]] = {
    Level.JOINT: _RESULTS,
    Level.STAGE: (*_RESULTS, Activation, Saved, Statistic, Size),
    Level.STEP: (Param, Shard, Grad),
}
MAY_BE_NONE = (Grad,)


def signature(program: Program) -> Iterator[Fault]:
    output, symbols = program.output_node, Symbols(program)
    returned = output.args[0]
    if not isinstance(returned, tuple | list):
        yield Fault("the output node does not return a flat tuple", output, "tuple", type(returned).__name__)
        return
    for place, result in enumerate(returned):
        if result is not None and not isinstance(result, Node):
            yield Fault(f"result {place} is a literal", output, "a node or None", repr(result))
    for kind, roles, found in (
        ("input", program.inputs, len(program.placeholders)),
        ("output", program.outputs, len(returned)),
    ):
        if len(roles) != found:
            what = f"the program has {found} {kind}s and {len(roles)} {kind} roles"
            listed = ", ".join(str(symbols.role(role)) for role in roles)
            yield Fault(what, output if kind == "output" else None, found, listed or "none")
        for role, times in Counter(roles).items():
            if times > 1:
                yield Fault(f"{kind} role '{role}' stands {times} times in the signature", expected=1, got=times)


def roles(program: Program) -> Iterator[Fault]:
    for role, node in program.input_nodes():
        if not isinstance(role, INPUTS[program.level]):
            yield Fault(f"'{role}' is no input of a {program.level} program", node, _kinds(INPUTS[program.level]))
    for role, result in program.output_items():
        if not isinstance(role, OUTPUTS[program.level]):
            what = f"'{role}' is no output of a {program.level} program"
            yield Fault(what, result or program.output_node, _kinds(OUTPUTS[program.level]))
        if result is None and not isinstance(role, MAY_BE_NONE):
            yield Fault(f"output '{role}' is None", program.output_node, "a node; only a gradient may not exist")


def edges(program: Program) -> Iterator[Fault]:
    """All messages of one program have this program's stage at their near end; indices are in order."""
    own: int | None = None
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], int] = {}
    for role, node in _border(program):
        if not isinstance(role, Activation):
            continue
        if abs(role.source - role.target) != 1 or min(role.source, role.target, role.index) < 0:
            yield Fault(f"'{role}' does not join neighbours", node, "stages that differ by one, an index from 0")
        near = role.target if node.op == "placeholder" else role.source
        if own is not None and near != own:
            yield Fault(f"'{role}' belongs to another stage than the rest of the signature", node, own, near)
        own = near
    for role in program.outputs:
        if isinstance(role, Activation):
            sent.setdefault((role.source, role.target), []).append(role.index)
    for (source, target), indices in sent.items():
        if indices != list(range(len(indices))):
            what = f"the values sent from stage {source} to {target} are not in order"
            yield Fault(what, program.output_node, list(range(len(indices))), indices)
    for role, node in program.input_nodes():
        if isinstance(role, Activation):
            edge = (role.source, role.target)
            if role.index <= received.get(edge, -1):
                what = f"the values received from stage {role.source} are not in order"
                yield Fault(what, node, f"an index above {received[edge]}", role.index)
            received[edge] = role.index


def saved(program: Program) -> Iterator[Fault]:
    for kind, sequence in (("input", program.inputs), ("output", program.outputs)):
        indices = [role.index for role in sequence if isinstance(role, Saved)]
        if indices != list(range(len(indices))):
            what = f"the saved values among the {kind}s are not numbered in order"
            yield Fault(what, None, list(range(len(indices))), indices)


def _border(program: Program) -> Iterator[tuple[Role, Node]]:
    yield from program.input_nodes()
    yield from ((role, program.output_node) for role in program.outputs)


def _kinds(kinds: Sequence[type[Role]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)
