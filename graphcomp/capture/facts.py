"""Facts: what besides the batch a program was captured under, as values that compare and differences in words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphcomp.capture.values import Frozen, inner_difference

Subject = tuple[str, str, str]
"""(kind of the fact, whose it is, its name); kind is one of the keys below or a kind of variable."""


@dataclass(frozen=True)
class TensorFacts:
    """What a program depends on in a parameter or buffer; never its contents, nor which object it is.

    same_as: for a tied tensor its first name, else None. placed: how it is laid out over tensor ranks.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    same_as: str | None
    hooked: bool
    placed: str = ""


class Facts:
    """All facts of one moment. Equal when programs may be reused; the hash is computed once."""

    def __init__(self, facts: Mapping[Subject, Hashable]) -> None:
        self.facts = dict(facts)
        self._hash = hash(tuple(self.facts.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Facts) and self._hash == other._hash and self.facts == other.facts)


_OF_MODULES = {"mode", "attribute", "parameter", "buffer", "hooks"}


def difference(old: Facts, new: Facts) -> list[str]:
    """What has changed, one sentence each, in the order of the model; equal changes of many things are one sentence."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for subject in dict.fromkeys((*old.facts, *new.facts)):
        was, now = old.facts.get(subject), new.facts.get(subject)
        of_both = all(("module", "", subject[1]) in side.facts for side in (old, new))
        if was != now and (of_both or subject[0] not in _OF_MODULES):
            for thing, change in _changes(*subject, was, now):
                name = subject[2] if subject[0] == "attribute" else ""
                groups.setdefault((subject[0], name, change), []).append(thing)
    return [
        f"{things[0]} {change}" + (f" (likewise {len(things) - 1} more)" if len(things) > 1 else "")
        for (_, _, change), things in groups.items()
    ]


def _changes(kind: str, owner: str, name: str, was: Any, now: Any) -> list[tuple[str, str]]:
    """What changed, and how: together a sentence."""
    if kind == "mode":
        words = {True: "training", False: "evaluation"}
        return [(_module(owner), f"was in {words[was]} mode and is in {words[now]} mode")]
    if kind == "module":
        return [(_module(name), _changed(was, now))]
    if kind == "attribute":
        place, change = _value(was, now)
        return [(f"'{name}{place}' of {_module(owner)}", change)]
    if kind in ("parameter", "buffer"):
        return [(f"{kind} '{name}'", change) for change in _tensor(was, now)]
    if kind == "hooks":
        before, after = (", ".join(hook.text for hook in hooks or ()) or "none" for hooks in (was, now))
        if before == after:
            return [(f"the {name} of {_module(owner)}", f"were {before} and are others of this name")]
        return [(f"the {name} of {_module(owner)}", f"were {before} and are {after}")]
    if kind == "setting":
        return [(name, _changed(was, now))]
    if kind == "function":
        return [(f"the code of {name}", "has changed")] if was is not None and now is not None else []
    place, change = _value(was, now)
    return [(f"{kind} '{name}{place}' of {owner}", change)]


def _module(name: str) -> str:
    return f"module '{name}'" if name else "the model"


def _changed(was: object, now: object) -> str:
    if was is None:
        return "is new"
    return "is gone" if now is None else f"was {was} and is {now}"


def _value(was: Frozen | None, now: Frozen | None) -> tuple[str, str]:
    """The part of an object that differs, such as ".width", and how."""
    place = ""
    while was is not None and now is not None and (found := inner_difference(was, now)) is not None:
        place, was, now = place + found[0], found[1], found[2]
    if was is not None and now is not None and was.text == now.text:
        return place, f"was {was.text} and is another one"
    return place, _changed(was and was.text, now and now.text)


def _tensor(was: TensorFacts | None, now: TensorFacts | None) -> list[str]:
    if was is None or now is None:
        return [_changed(was, now)]
    found = []
    if was.requires_grad != now.requires_grad:
        found.append(
            "required a gradient and does not any more" if was.requires_grad else "required no gradient and does now"
        )
    if was.hooked != now.hooked:
        found.append("had a gradient hook and has none" if was.hooked else "has a new gradient hook")
    if was.same_as != now.same_as:
        before, after = (f"tied to '{x.same_as}'" if x.same_as else "not tied" for x in (was, now))
        found.append(f"was {before} and is {after}")
    if was.placed != now.placed:
        before, after = (x.placed or "a plain tensor" for x in (was, now))
        found.append(f"was {before} and is {after}")
    for facet in ("shape", "stride", "dtype", "device"):
        if getattr(was, facet) != getattr(now, facet):
            found.append(f"had {facet} {getattr(was, facet)} and has {getattr(now, facet)}")
    return found
