"""Where the forward is cut when no modules are named: stages of about equal load, with cheap boundaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.partition.costs import matrix_flops, size_bytes, work
from graphcomp.partition.run_time_sizes import uncuttable
from graphcomp.partition.traits import uses_parameter

# What a byte that crosses costs each of its two stages, in FLOPs.
FLOPS_PER_BYTE = 20
# No operation takes less than about 4 microseconds: small models are bound by the number of operations.
LEAST_WORK = 350_000
# The imbalance that is tolerated for cheaper boundaries, and for cuts at higher modules.
SLACK_FOR_BYTES, SLACK_FOR_MODULES = 1.25, 1.03
# The model is looked at in about this many pieces of equal work, which bounds the time of the search.
PIECES = 240

Total = tuple[int, ...]
Extend = Callable[[Total, "_Point", int], Total]


def balanced_cuts(program: Program, forward: Sequence[Node], replicable: set[Node], stages: int) -> list[int]:
    """Cut positions that give each stage about equal load and cheap boundaries, at module boundaries if possible.

    The load of a stage is its work and a price for the bytes of its boundaries. First the smallest possible load of
    the largest stage is found; then, among the cuts within a quarter of it, those whose boundaries carry the fewest
    bytes; among these, and within 3 % of the best of them, the cuts at the highest modules, then the evenest.
    Raises PartitionError if there are more stages than operations with parameters or matrix products.
    """
    parameters = {node for what, node in program.input_nodes() if isinstance(what, role.Param)}
    weighty = [bool(matrix_flops(n)) or uses_parameter(n, replicable, parameters) for n in forward]
    if sum(weighty) < stages or stages < 1:
        raise PartitionError(
            f"the model cannot be cut into {stages} stages",
            expected=f"1 to {max(sum(weighty), 1)} (operations with parameters or matrix products in its forward)",
            got=stages,
            do="ask for fewer stages" if stages > 1 else "ask for at least one stage",
        )
    if stages == 1:
        return []
    done = list(accumulate(_work(program, forward), initial=0))
    weights = list(accumulate(weighty, initial=0))
    crossing = crossing_bytes(forward)
    ends = [0, *_candidates(forward, done, crossing, weights, stages), len(forward)]
    points = [_Point(done[i], weights[i], crossing[i], depth(forward, i)) for i in ends]
    (least,), _ = _search(points, stages, math.inf, (0,), _largest)
    (_, least), _ = _search(points, stages, least * SLACK_FOR_BYTES, (0, 0), _bytes_then_largest)
    _, chosen = _search(points, stages, least * SLACK_FOR_MODULES, (0, 0, 0), _bytes_then_shallow_then_even)
    return [ends[i] for i in chosen]


@dataclass(frozen=True, slots=True)
class _Point:
    """A place where the forward may be cut: what runs before it (FLOPs, weighty operations) and what a cut costs."""

    work: int
    weights: int
    crossing: int
    depth: int

    def load_since(self, left: _Point) -> int:
        """The load of a stage from `left` to here."""
        return self.work - left.work + FLOPS_PER_BYTE * (self.crossing + left.crossing)


def _work(program: Program, forward: Sequence[Node]) -> list[int]:
    """The work of each forward node with that of its backward, which a frozen layer does not have.

    A checkpointed node runs a second time.
    """
    backward: dict[int, int] = {}
    for node in program.calls():
        note = meta.note(node)
        if note.phase is Phase.BACKWARD and note.operation is not None:
            backward[note.operation] = backward.get(note.operation, 0) + _time(node)
    notes = [meta.note(node) for node in forward]
    return [
        _time(node) * (2 if note.recompute is not None else 1) + backward.get(note.operation, 0)  # type: ignore[arg-type]
        for node, note in zip(forward, notes, strict=True)
    ]


def _time(node: Node) -> int:
    found = work(node)
    return max(found, LEAST_WORK) if found else 0


def crossing_bytes(forward: Sequence[Node]) -> list[int]:
    """For each position, the bytes of the values made before it and used at or after it."""
    place = {node: i for i, node in enumerate(forward)}
    change = [0] * (len(forward) + 2)
    for i, node in enumerate(forward):
        uses = [place[user] for user in node.users if user in place]
        if uses and max(uses) > i:
            change[i + 1] += size_bytes(node) or 1
            change[max(uses) + 1] -= size_bytes(node) or 1
    return list(accumulate(change))[: len(forward) + 1]


def depth(forward: Sequence[Node], position: int) -> int:
    """How deep inside modules a cut would be: the number of module levels that its two sides share."""
    if not 0 < position < len(forward):
        return 0
    left, right = meta.note(forward[position - 1]).module, meta.note(forward[position]).module
    if left is None or right is None:
        return 0
    a, b = left.split(".") if left else [], right.split(".") if right else []
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _candidates(
    forward: Sequence[Node], work: list[int], crossing: list[int], weights: list[int], stages: int
) -> list[int]:
    """Positions worth a look: module boundaries; every position where these are too few to give each stage work.

    Of many, the cheapest in each piece of the work.
    """

    def is_module_boundary(i: int) -> bool:
        left, right = meta.note(forward[i - 1]).module, meta.note(forward[i]).module
        return left != right or not left

    def suffice(positions: Sequence[int]) -> bool:
        return possible(positions) >= stages

    def possible(positions: Sequence[int]) -> int:
        return len({weights[i] for i in positions} - {0, weights[-1]}) + 1

    inside = uncuttable(forward)
    everywhere = [i for i in range(1, len(forward)) if i not in inside and not _splits_a_tuple(forward, i)]
    if inside and not suffice(everywhere):
        raise PartitionError(
            f"the model cannot be cut into {stages} stages: what belongs together is in the way",
            expected=f"1 to {possible(everywhere)}",
            got=stages,
            do="ask for fewer stages: an exact all_to_all and its way back stay on one, as does a head in chunks",
        )
    found = [i for i in everywhere if is_module_boundary(i)]
    found = found if suffice(found) else everywhere
    if len(found) <= PIECES:
        return found
    best: dict[int, int] = {}
    for i in found:
        piece = work[i] * PIECES // max(work[-1], 1)
        if piece not in best or _price(forward, crossing, i) < _price(forward, crossing, best[piece]):
            best[piece] = i
    fewer = sorted(best.values())
    return fewer if suffice(fewer) else found


def _price(forward: Sequence[Node], crossing: list[int], position: int) -> tuple[int, int]:
    return crossing[position], depth(forward, position)


def _splits_a_tuple(forward: Sequence[Node], position: int) -> bool:
    """Whether the cut would stand before a part of a tuple, which belongs to the stage of the tuple."""
    inputs = forward[position].all_input_nodes
    return bool(inputs) and isinstance(meta.value(inputs[0]), (tuple, list))


def _search(
    points: Sequence[_Point], stages: int, limit: float, start: Total, extend: Extend
) -> tuple[Total, list[int]]:
    """The cuts of the least total, by dynamic programming over the number of stages; no load is above `limit`.

    extend: the total with one more stage, from that of the stages before it, the point where the stage ends, and its
    load; it must never fall when the former total rises. Returns the total and indices into `points`, ends left out.
    """
    best: list[Total | None] = [start, *[None] * (len(points) - 1)]
    choices: list[list[int]] = []
    for _ in range(stages):
        following: list[Total | None] = [None] * len(points)
        choice = [0] * len(points)
        for i, right in enumerate(points):
            for j in range(i - 1, -1, -1):
                left, former, least = points[j], best[j], following[i]
                if right.work - left.work > limit:
                    break
                load = right.load_since(left)
                if former is None or load > limit or right.weights <= left.weights:
                    continue
                total = extend(former, right, load)
                if least is None or total < least:
                    following[i], choice[i] = total, j
        best = following
        choices.append(choice)
    cuts, at = [], len(points) - 1
    for choice in reversed(choices):
        at = choice[at]
        cuts.append(at)
    return best[-1] or start, cuts[-2::-1]


def _largest(former: Total, right: _Point, load: int) -> Total:
    return (max(former[0], load),)


def _bytes_then_largest(former: Total, right: _Point, load: int) -> Total:
    return former[0] + right.crossing, max(former[1], load)


def _bytes_then_shallow_then_even(former: Total, right: _Point, load: int) -> Total:
    # The sum of squares is least for equal loads, as long as their sum is the same.
    return former[0] + right.crossing, former[1] + right.depth, former[2] + load**2
