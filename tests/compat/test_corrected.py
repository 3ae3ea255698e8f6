"""What Inductor computes wrong by itself is corrected."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphcomp.compat import inductor as shim
from graphcomp.compat.inductor import guards_since
from tests.compat.compiling import compiled, symbols_of

pytestmark = pytest.mark.inductor
aten = torch.ops.aten


def shifted_and_pooled(x: Tensor) -> list[Tensor]:
    y = x.tanh()
    shifted = y.index_put((torch.arange(x.shape[0])[1:],), y[:-1])
    images = x.view(1, 1, *x.shape)
    whole = (images, [2, 3], [2, 3], [0, 0], True, True, None)
    pooled = aten.avg_pool2d.default(*whole)
    deep = (images.unsqueeze(0), [1, 2, 3], [1, 2, 3], [0, 0, 0], True, True, None)
    return [
        shifted,
        aten.avg_pool2d_backward.default(pooled, *whole),
        aten.avg_pool3d_backward.default(aten.avg_pool3d.default(*deep), *deep),
    ]


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as_it_is"])
def test_what_inductor_computes_wrong(corrected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each place is wrong without the correction."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # both have the same key
    if not corrected:
        monkeypatch.setattr(shim, "corrected", contextlib.nullcontext)
    x = torch.randn(7, 5)
    pairs = zip(compiled(shifted_and_pooled)[0]([x]), shifted_and_pooled(x), strict=True)
    assert [torch.allclose(got, wanted) for got, wanted in pairs] == [corrected] * 3


def test_code_that_is_found_on_disk_comes_with_its_conditions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def conditions(rows: int) -> set[str]:
        _, mode, before = compiled(lambda x: [F.adaptive_avg_pool2d(x[None].sin(), 3)], rows)
        return {str(relation) for relation in guards_since(mode, before, symbols_of(mode))}

    made = conditions(6)
    assert made
    hits = counters["inductor"]["fxgraph_cache_hit"]
    assert conditions(6) == made
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
    assert conditions(9) != made
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
