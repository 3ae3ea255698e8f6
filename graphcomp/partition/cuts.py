"""Where the forward is cut: at named modules, or balanced. A cut is a position in the order of execution."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from torch.fx import Node

from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.partition.costs import flops, matrix_flops, size_bytes
from graphcomp.partition.traits import uses_parameter

# The imbalance that is tolerated for a cheaper boundary.
SLACK = 1.1
MOST_CANDIDATES = 400


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


def balanced_cuts(program: Program, forward: Sequence[Node], replicable: set[Node], stages: int) -> list[int]:
    """Cut positions that give each stage about equal work and cheap boundaries, at module boundaries if possible.

    First the smallest possible work of the largest stage is found; then, among the cuts within a tenth of it, those
    whose boundaries carry the fewest bytes, at the highest modules. Raises PartitionError if there are more stages
    than operations with parameters or matrix products.
    """
    parameters = {node for what, node in program.input_nodes() if isinstance(what, role.Param)}
    weighty = [bool(matrix_flops(n)) or uses_parameter(n, replicable, parameters) for n in forward]
    if sum(weighty) < stages:
        raise PartitionError(
            f"the model cannot be cut into {stages} stages",
            expected=f"at most {max(sum(weighty), 1)} (operations with parameters or matrix products in its forward)",
            got=stages,
            do="ask for fewer stages",
        )
    if stages == 1:
        return []
    work = list(accumulate((flops(node) for node in forward), initial=0))
    weights = list(accumulate(weighty, initial=0))
    crossing = crossing_bytes(forward, replicable)
    candidates = _candidates(forward, crossing, weights, stages)
    ends = [0, *candidates, len(forward)]
    best = _smallest_maximum(ends, work, weights, stages)
    return _cheapest(ends, work, weights, crossing, forward, stages, best * SLACK)


def crossing_bytes(forward: Sequence[Node], replicable: set[Node]) -> list[int]:
    """For each position, the bytes of the values made before it and used at or after it."""
    place = {node: i for i, node in enumerate(forward)}
    change = [0] * (len(forward) + 2)
    for i, node in enumerate(forward):
        uses = [place[user] for user in _owned_users(node, replicable) if user in place]
        if uses and max(uses) > i:
            change[i + 1] += size_bytes(node) or 1
            change[max(uses) + 1] -= size_bytes(node) or 1
    return list(accumulate(change))[: len(forward) + 1]


def _owned_users(node: Node, replicable: set[Node]) -> list[Node]:
    return [user for user in node.users if user not in replicable]


def depth(forward: Sequence[Node], position: int) -> int:
    """How deep inside modules a cut would be: the number of module levels that its two sides share."""
    left, right = meta.note(forward[position - 1]).module, meta.note(forward[position]).module
    if left is None or right is None:
        return 0
    a, b = left.split(".") if left else [], right.split(".") if right else []
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _candidates(forward: Sequence[Node], crossing: list[int], weights: list[int], stages: int) -> list[int]:
    """Positions worth a look: module boundaries; every position where these are too few to give each stage work."""

    def is_module_boundary(i: int) -> bool:
        left, right = meta.note(forward[i - 1]).module, meta.note(forward[i]).module
        return left != right or not left

    everywhere = [i for i in range(1, len(forward)) if not _splits_a_tuple(forward, i)]
    found = [i for i in everywhere if is_module_boundary(i)]
    groups = len({weights[i] for i in found} - {0, weights[-1]}) + 1
    if groups < stages:
        found = everywhere
    if len(found) > MOST_CANDIDATES:
        cheapest = sorted(found, key=lambda i: (crossing[i], depth(forward, i), i))[:MOST_CANDIDATES]
        found = sorted(cheapest)
    return found


def _splits_a_tuple(forward: Sequence[Node], position: int) -> bool:
    """Whether the value before the cut is a tuple whose parts are taken after it."""
    node = forward[position]
    return isinstance(meta.value(node.all_input_nodes[0]), (tuple, list)) if node.all_input_nodes else False


def _smallest_maximum(ends: list[int], work: list[int], weights: list[int], stages: int) -> float:
    """The least possible work of the largest stage, by dynamic programming over the number of stages."""
    infinite = float("inf")
    best = [0.0 if i == 0 else infinite for i in range(len(ends))]
    for _ in range(stages):
        following = [infinite] * len(ends)
        for right in range(1, len(ends)):
            for left in range(right - 1, -1, -1):
                inside = float(work[ends[right]] - work[ends[left]])
                if inside >= following[right]:
                    break
                if best[left] < infinite and weights[ends[right]] > weights[ends[left]]:
                    following[right] = min(following[right], max(best[left], inside))
        best = following
    return best[-1]


def _cheapest(
    ends: list[int],
    work: list[int],
    weights: list[int],
    crossing: list[int],
    forward: Sequence[Node],
    stages: int,
    limit: float,
) -> list[int]:
    """Among cuts with no stage above `limit`, those with the fewest bytes crossing, then the shallowest, then the evenest."""
    infinite = (float("inf"),) * 3
    prices = [(float(crossing[p]), float(depth(forward, p)) if 0 < p < len(forward) else 0.0) for p in ends]
    mean = work[-1] / stages
    best: list[tuple[float, ...]] = [(0.0,) * 3 if i == 0 else infinite for i in range(len(ends))]
    choices: list[list[int]] = []
    for _ in range(stages):
        following, choice = [infinite] * len(ends), [0] * len(ends)
        for right in range(1, len(ends)):
            first = bisect_left(work, work[ends[right]] - limit)
            price = prices[right] if right < len(ends) - 1 else (0.0, 0.0)
            for left in range(right - 1, -1, -1):
                if ends[left] < first and work[ends[left]] < work[ends[right]] - limit:
                    break
                if best[left] == infinite or weights[ends[right]] <= weights[ends[left]]:
                    continue
                uneven = (work[ends[right]] - work[ends[left]] - mean) ** 2
                total = (best[left][0] + price[0], best[left][1] + price[1], best[left][2] + uneven)
                if total < following[right]:
                    following[right], choice[right] = total, left
        best = following
        choices.append(choice)
    cuts, at = [], len(ends) - 1
    for choice in reversed(choices):
        at = choice[at]
        cuts.append(ends[at])
    return cuts[-2::-1]
