"""The package is plain data: it needs no torch, and says what it offers."""

from __future__ import annotations

import subprocess
import sys

import graphcomp.schedule as surface


def test_every_name_is_there() -> None:
    assert sorted(surface.__all__) == sorted(set(surface.__all__))
    assert all(hasattr(surface, name) for name in surface.__all__)


def test_importing_it_imports_no_torch() -> None:
    # In a fresh process; `graphcomp` itself may import torch, so its package is replaced by an empty one.
    code = (
        "import importlib, sys, types\n"
        "root = sys.modules['graphcomp'] = types.ModuleType('graphcomp')\n"
        "root.__path__ = [sys.argv[1]]\n"
        "importlib.import_module('graphcomp.schedule')\n"
        "assert 'torch' not in sys.modules\n"
    )
    folder = surface.__path__[0].rpartition("schedule")[0]
    subprocess.run([sys.executable, "-c", code, folder], check=True)
