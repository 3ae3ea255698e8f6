"""A pipeline of passes as text, there and back: `functionalize,noop,cse,decompose{table=inductor}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import get_type_hints

from graphcomp.errors import PlanError
from graphcomp.passes.base import Pass
from graphcomp.passes.bucket_collectives import BucketCollectives
from graphcomp.passes.chunk_loss import ChunkLoss
from graphcomp.passes.cse import CommonSubexpressions
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.decompose import Decompose
from graphcomp.passes.functionalize import Functionalize
from graphcomp.passes.noop import NoOp
from graphcomp.passes.order_collectives import OrderCollectives
from graphcomp.passes.seeded_random import SeededRandom
from graphcomp.passes.split_norms import SplitNorms

PASSES: Mapping[str, type[Pass]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BucketCollectives,
            ChunkLoss,
            CommonSubexpressions,
            DeadCode,
            Decompose,
            Functionalize,
            NoOp,
            OrderCollectives,
            SeededRandom,
            SplitNorms,
        )
    }
)

ITEM = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def pipeline_text(passes: Iterable[Pass]) -> str:
    return ",".join(map(str, passes))


def parse_pipeline(text: str, known: Mapping[str, type[Pass]] = PASSES) -> list[Pass]:
    """The passes that a text names, in order; options left out take their defaults.

    Raises PlanError for malformed text, an unknown pass or option, a value of the wrong type.
    """
    passes: list[Pass] = []
    at = 0
    while at < len(text.rstrip()):
        match = ITEM.match(text, at)
        if match is None:
            raise PlanError(
                "the text of a pipeline is malformed",
                where=f"character {at}: {text[at : at + 20]!r}",
                expected="name or name{option=value,...}, separated by commas",
            )
        passes.append(_make(match[1], match[2] or "", known))
        at = match.end()
    return passes


def _make(name: str, options: str, known: Mapping[str, type[Pass]]) -> Pass:
    if name not in known:
        raise PlanError(f"there is no pass '{name}'", expected=", ".join(sorted(known)), got=name)
    kind = known[name]
    types = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}
    given: dict[str, object] = {}
    for option in filter(None, map(str.strip, options.split(","))):
        key, equals, value = map(str.strip, option.partition("="))
        if not equals or key not in types:
            raise PlanError(
                f"pass '{name}' has no option '{key}'", expected=", ".join(types) or "no options", got=option
            )
        given[key] = _value(types[key], value, f"option '{key}' of pass '{name}'")
    return kind(**given)


def _value(kind: type, text: str, where: str) -> object:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        return kind(text)
    except (KeyError, ValueError):
        raise PlanError(
            "an option has a value of the wrong type", where=where, expected=kind.__name__, got=text
        ) from None
