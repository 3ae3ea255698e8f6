"""Head and loss in chunks of rows (`passes.chunk_loss`) stay together: no cut goes through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.partition.place import Slot


def inside_chunks(forward: Sequence[Node]) -> range:
    """The positions among the owned forward nodes where a cut would leave chunks on both of its sides."""
    places = [i for i, node in enumerate(forward) if meta.note(node).chunk is not None]
    return range(places[0] + 1, places[-1] + 1) if places else range(0)


def check_chunks(forward: Sequence[Node], cuts: Sequence[int], slots: Mapping[Node, Slot]) -> None:
    """Raises PartitionError for a cut through the chunks; and where their logits would have to be kept for a backward
    that comes later, since they are not computed again."""
    inside = inside_chunks(forward)
    if not inside:
        return
    through = next((cut for cut in cuts if cut in inside), None)
    if through is not None:
        note = meta.note(forward[through])
        raise PartitionError(
            "the plan cuts through head and loss, which it also has computed in chunks (Plan(loss_chunks=...))",
            where=", ".join(filter(None, (f"module '{note.module}'" if note.module else "the loss", note.source))),
            expected="the head and everything behind it on one stage",
            do="name another module in Plan(split=...), or leave out loss_chunks",
        )
    backward = [n for n, slot in slots.items() if slot.backward and meta.note(n).chunk is not None]
    repeated = meta.note(forward[inside.start - 1]).recompute is not None
    stage = slots[forward[inside.start]].stage
    if backward and stage < len(cuts) and not repeated:
        raise PartitionError(
            f"head and loss are on stage {stage}, whose forward and backward run apart under this schedule: the logits "
            "of all chunks would be kept in between",
            expected=f"head and loss on the last stage ({len(cuts)})",
            got=f"stage {stage}",
            do="cut so that the head is on the last stage, use schedule='gpipe' (it computes logits again), or leave "
            "out Plan(loss_chunks=...)",
        )
