"""What a rule of the verifier reports."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Fault:
    """One breach of a rule: what is wrong, at which node (None: the whole program), and parts of an error."""

    what: str
    node: Node | None = None
    expected: object = None
    got: object = None
    do: str | None = None
