"""Where the forward is cut at named modules. A cut is a position in the order of execution of the owned nodes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch.fx import Node

from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program


def owned_forward(program: Program, replicable: set[Node]) -> list[Node]:
    """The forward and loss nodes that belong to one stage each, in order of execution."""
    return [n for n in program.calls() if meta.note(n).phase is not Phase.BACKWARD and n not in replicable]


def named_cuts(forward: Sequence[Node], split: Sequence[str]) -> list[int]:
    """The positions at which the named modules run for the first time. Raises PartitionError naming what is wrong."""
    modules = [meta.note(node).module for node in forward]
    known = list(dict.fromkeys(part for name in modules if name for part in _prefixes(name)))
    cuts: list[int] = []
    for index, name in enumerate(split):
        if name in split[:index]:
            raise PartitionError(f"the plan's split names '{name}' twice", got=list(split), do="name each module once")
        inside = (i for i, module in enumerate(modules) if module and (module == name or module.startswith(name + ".")))
        position = next(inside, None)
        if position is None:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:8]
            raise PartitionError(
                f"the plan's split names '{name}', but no module of that name computes anything in forward",
                expected=f"a module that runs, such as {', '.join(map(repr, close))}",
                got=repr(name),
                do="use a name as named_modules() gives it",
            )
        if position == 0 or (cuts and position <= cuts[-1]):
            before = f"'{split[index - 1]}'" if cuts else "everything else"
            raise PartitionError(
                f"the plan's split names '{name}', which begins before {before} has run",
                got=list(split),
                do="give the names in order of execution; the first stage needs no name",
            )
        cuts.append(position)
    return cuts


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
