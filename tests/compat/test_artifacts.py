"""Inductor's code as bytes: unpacked where its folder is empty, it runs and compiles no kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.artifacts import pack, unpack
from graphcomp.compat.inductor import compile_graph
from graphcomp.compat.symbols import fake_batch_leaf, new_fake_mode
from graphcomp.ir.interp import as_written


@pytest.mark.inductor
@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["Python", "C++"])
def test_code_comes_back_with_its_shared_objects(
    options: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.randn(6, 4), "x")
    with mode:
        module = make_fx(lambda rows, x: [(x.sin() + 1).sum(1)], tracing_mode="real")(x.shape[0], x)
    with as_written():
        packed = pack(compile_graph(module, [x.shape[0], x], mode, options=options))
    assert packed.files and all(path.endswith(".so") for path, _ in packed.files)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with as_written():
        code = unpack(packed, [x.shape[0], x], mode, options)
        value = torch.randn(9, 4)
        box = [9, value]
        (found,) = code(box)
    assert torch.allclose(found, (value.sin() + 1).sum(1)) and not box
    assert {path for path, _ in packed.files} <= {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.so")}
