"""What makes two programs the same to a compiler, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphcomp.ir import meta
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import digest
from graphcomp.ir.program import Program
from graphcomp.ir.signature import BatchLeaf, Buffer, Captured, Output, Param
from tests.ir.build import Builder, aten, training_step

WEIGHT, PLAIN = Param("w"), Note(Phase.FORWARD)


def small(
    *,
    leaf: str = "x",
    name: str = "p",
    role: Any = WEIGHT,
    weight: Any = (8,),
    factor: object = 0.1,
    op: Callable[..., Any] = aten.mul.Tensor,
    keywords: dict[str, Any] | None = None,
    note: Note = PLAIN,
    rows: int = 6,
    swap: bool = False,
    fixed: bool = False,
) -> Program:
    """y = op(x + w, factor), then a cast; each argument changes one thing."""
    b = Builder(leaf, (rows, 8))
    b.note = note
    with b.mode:
        batch = torch.empty(6 if fixed else b.sizes[0], 8)
    x = b.input(BatchLeaf(leaf), batch, name)
    w = b.input(role, weight, f"{name}_w")
    y = b.call(aten.add.Tensor, *((w, x) if swap else (x, w)))
    y = b.call(op, y, factor)
    y = b.call(aten._to_copy.default, y, **(keywords or {"dtype": torch.bfloat16}))
    return b.program({Output("y"): y}, name)


SAME: dict[str, dict[str, Any]] = {
    "names of program and nodes": {"name": "q"},
    "name of a leaf, and so of the symbols": {"leaf": "tokens"},
    "name of a parameter": {"role": Param("layers.7.weight")},
    "module and line": {"note": Note(Phase.BACKWARD, "fc", "a.py:1", operation=4)},
    "example size": {"rows": 9},
}
OTHER: dict[str, dict[str, Any]] = {
    "operation": {"op": aten.div.Tensor},
    "overload": {"op": aten.mul.Scalar},
    "order of arguments": {"swap": True},
    "last bit of a float": {"factor": 0.1 + 1e-16},
    "float for int": {"factor": 1.0},
    "bool": {"factor": True},
    "kind of a role": {"role": Buffer("w")},
    "captured": {"role": Captured("w")},
    "shape": {"weight": (1,)},
    "dtype of an input": {"weight": torch.empty(8, dtype=torch.float64, device="meta")},
    "stride of an input": {"weight": torch.empty_strided((8,), (2,), device="meta")},
    "offset of an input": {"weight": torch.empty(9, device="meta")[1:]},
    "device of an input": {"weight": torch.empty(8, device="meta")},
    "dtype argument": {"keywords": {"dtype": torch.float16}},
    "memory format": {"keywords": {"dtype": torch.bfloat16, "memory_format": torch.preserve_format}},
    "a number for a symbol": {"fixed": True},
}


def test_same_program_same_digest() -> None:
    assert digest(small()) == digest(small()) == digest(small().copy())


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_does_not_count(change: dict[str, Any]) -> None:
    assert digest(small(**change)) == digest(small())


def test_counts() -> None:
    """All variants differ from the plain program and from each other."""
    digests = {"plain": digest(small())}
    for name, change in OTHER.items():
        weight = change.get("weight")
        if isinstance(weight, torch.Tensor):
            change = {**change, "weight": fake(weight, real_device=name != "device of an input")}
        digests[name] = digest(small_with_values(change))
    digests["int for float"] = digest(small(factor=1))
    by_digest: dict[str, list[str]] = {}
    for name, found in digests.items():
        by_digest.setdefault(found, []).append(name)
    assert [names for names in by_digest.values() if len(names) > 1] == []


def fake(weight: torch.Tensor, real_device: bool) -> Callable[[Program], torch.Tensor]:
    """The same tensor in a program's fake mode."""

    def make(program: Program) -> torch.Tensor:
        with program.fake_mode:
            device = "cpu" if real_device else "meta"
            base = torch.empty(weight.untyped_storage().nbytes(), dtype=weight.dtype, device=device)
            return base.as_strided(weight.shape, weight.stride(), weight.storage_offset())

    return make


def small_with_values(change: dict[str, Any]) -> Program:
    """`small`, where the weight may be given as a function of the program; other values stay as they are."""
    weight = change.get("weight")
    if not callable(weight):
        return small(**change)
    program = small()
    meta.set_value(program.input(Param("w")), weight(program))
    return program


def test_ranges_of_sizes_count() -> None:
    """Code compiled for sizes up to 16 may not serve a program that knows no such bound."""
    bounded = small()
    size = meta.tensor(bounded.placeholders[0]).shape[0]  # type: ignore[union-attr]
    torch._check(size <= 16)
    assert digest(bounded) != digest(small())


def test_scale_literal_counts_but_names_do_not() -> None:
    renamed = training_step(("other.weight", "main", "title"))
    assert digest(training_step()) == digest(renamed)
    assert digest(training_step(scale=0.25)) != digest(renamed)
