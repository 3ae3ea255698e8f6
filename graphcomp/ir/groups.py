"""How programs call the ranks that a collective runs over: the same on every run and every rank of the group.

Along a mesh axis by the axis ("tp"; "dp_cp": along both of these), else by the global ranks: "ranks(0-3,8)", and
"ranks(0,1)#2" for a second process group of the same ranks. A process group's own name is a serial number; it is filled
in when a program becomes callable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphcomp.plan import AXES, JOINED

_RANKS = re.compile(r"ranks\(\d+(-\d+)?(,\d+(-\d+)?)*\)(#\d+)?")


def is_text(name: str) -> bool:
    """Whether a name is one that programs use."""
    return name in (*AXES, JOINED) or _RANKS.fullmatch(name) is not None


def text_of(ranks: Sequence[int]) -> str:
    """The text for global ranks, in their order; three or more that follow each other are a range."""
    parts: list[str] = []
    place = 0
    while place < len(ranks):
        end = place
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        if end - place < 2:
            end = place
        parts.append(str(ranks[place]) if end == place else f"{ranks[place]}-{ranks[end]}")
        place = end + 1
    return f"ranks({','.join(parts)})"
