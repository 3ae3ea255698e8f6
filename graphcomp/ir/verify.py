"""The verifier: does a program keep the rules of its level, and if not, where does it break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphcomp.errors import VerifyError
from graphcomp.ir import meta, rules_calls, rules_functions, rules_signature, rules_values
from graphcomp.ir.fault import Fault
from graphcomp.ir.printer import name, window
from graphcomp.ir.program import Level, Program

Check = Callable[[Program], Iterator[Fault]]
ALL = frozenset(Level)


@dataclass(frozen=True)
class Rule:
    """says: what holds for every program of these levels. check: yields each place where it does not."""

    name: str
    says: str
    check: Check
    levels: frozenset[Level] = ALL


# In this order: a rule may rely on those above it.
RULES: tuple[Rule, ...] = (
    Rule(
        "order",
        "inputs, then calls, then one output; each value is computed before its use",
        rules_calls.order,
    ),
    Rule("signature", "one role an input and one a result, each role once", rules_signature.signature),
    Rule("roles", "the kinds of inputs and outputs that the level has", rules_signature.roles),
    Rule("edges", "messages come from and go to a neighbour", rules_signature.edges, frozenset({Level.STAGE})),
    Rule("saved", "saved values are numbered 0, 1, ...", rules_signature.saved, frozenset({Level.STAGE})),
    Rule(
        "calls",
        "nodes call operators, or arithmetic on sizes; no attributes, modules, methods",
        rules_calls.calls,
    ),
    Rule(
        "functions",
        "functions are given to operators that take them, and only compute, from their arguments alone",
        rules_functions.functions,
    ),
    Rule("pure", "no operation writes to its arguments", rules_calls.pure),
    Rule("device", "no operation reads tensor contents to the host, nor sizes off a tensor", rules_calls.device),
    Rule(
        "literals",
        "arguments hold nodes and plain literals, no tensor and no symbolic number",
        rules_calls.literals,
    ),
    Rule("waits", "each functional collective is used by one wait and nothing else", rules_calls.waits),
    Rule("groups", "collectives name their ranks by mesh axis, or by which they are", rules_calls.groups),
    Rule("phases", "no forward or loss node depends on a backward node", rules_calls.phases),
    Rule("values", "every node knows its value", rules_values.values),
    Rule("symbols", "every symbol in a value is a size input or a dimension of an input", rules_values.symbols),
    Rule("agreement", "values have the shape and dtype that their role asks for", rules_values.agreement),
)


def verify(program: Program, made_by: str = "capture") -> None:
    """Check a program against every rule of its level.

    made_by: what made the program, for the message.
    Raises VerifyError at the first breach: the rule, the node, its module and line, and the text around it.
    """
    for rule in RULES:
        if program.level in rule.levels:
            for fault in rule.check(program):
                raise _error(program, made_by, rule, fault)


def _error(program: Program, made_by: str, rule: Rule, fault: Fault) -> VerifyError:
    where = f"{program.level} program '{program.name}', made by '{made_by}'"
    if fault.node is not None:
        where += f", node {name(program, fault.node)}" if fault.node.op != "output" else ", outputs"
        where += "".join(f", {part}" for part in meta.place(fault.node))
    where += f"\n  rule '{rule.name}': {rule.says}"
    if fault.node is not None:
        where += "".join(f"\n    {line}" for line in window(program, fault.node).splitlines())
    return VerifyError(fault.what, where=where, expected=fault.expected, got=fault.got, do=fault.do)
