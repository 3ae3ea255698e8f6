"""The prologue: the token counts of a microbatch, lifted out of the joint program so that they are known first."""

from __future__ import annotations

from graphcomp.capture.joint import Joint
from graphcomp.errors import LossError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.program import Level, Program
from graphcomp.partition.extract import extract
from graphcomp.partition.traits import is_impure

_ALLOWED = (role.BatchLeaf, role.Size, role.Constant, role.Captured)


def build_prologue(joint: Joint) -> Program | None:
    """A program of the `Tokens` outputs alone; None if no loss counts tokens.

    Raises LossError if a count depends on anything but the batch: the whole step is divided by it before any
    stage has run.
    """
    program = joint.program
    results = [(what, node) for what, node in program.output_items() if isinstance(what, role.Tokens)]
    if not results:
        return None
    roles = {node: what for what, node in program.input_nodes()}
    for what, node in results:
        pending, seen = [node], set()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            if (current in roles and not isinstance(roles[current], _ALLOWED)) or is_impure(current):
                raise LossError(
                    f"the token count of loss '{what.loss}' depends on more than the batch",
                    where=meta.note(current).source or meta.note(node).source,
                    expected="a count that follows from batch fields alone",
                    got=f"a dependence on {roles.get(current, current.target)}",
                    do="count the tokens from the labels or from a mask in the batch",
                )
            pending.extend(current.all_input_nodes)
    return extract(program, "prologue", [], {}, results, computes=lambda node: True, level=Level.STAGE)
