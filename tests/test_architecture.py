"""The tree keeps the rules of tests/architecture.py, and every rule fires on a text that breaks it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import architecture as rules
from tests.architecture import Source, Violation

ROOT = Path(__file__).parent.parent
Rule = Callable[[Source], Iterator[Violation]]
RULES: tuple[Rule, ...] = (
    rules.import_direction,
    rules.observers_are_lazy,
    rules.schedule_without_torch,
    rules.passes_apart,
    rules.private_torch,
    rules.honest_errors,
    rules.short_file,
)


def tree() -> list[Source]:
    files = sorted([*ROOT.glob("graphcomp/**/*.py"), *ROOT.glob("passes/**/*.py")])
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    broken = [str(violation) for source in tree() for violation in rule(source)]
    assert not broken, f"{rule.__doc__}\n" + "\n".join(broken)


def test_files_are_short_as_a_rule() -> None:
    assert statistics.median(source.text.count("\n") for source in tree()) <= rules.MAX_MEDIAN_LINES


def test_other_python_files_are_not_long_either() -> None:
    folders = ("tests", "examples", "benchmarks")
    texts = {path: path.read_text() for name in folders for path in ROOT.glob(f"{name}/**/*.py")}
    long = [str(path) for path, text in texts.items() if text.count("\n") > rules.MAX_LINES]
    assert not long


BROKEN: list[tuple[Rule, str, str, str]] = [
    (
        rules.import_direction,
        "graphcomp/ir/a.py",
        "from graphcomp.partition import cut",
        "below or beside partition",
    ),
    (rules.import_direction, "graphcomp/ir/a.py", "import graphcomp.step", "below or beside step"),
    (rules.import_direction, "graphcomp/ir/a.py", "from ..capture import trace", "below or beside capture"),
    (
        rules.import_direction,
        "graphcomp/ir/a.py",
        "def f():\n    from graphcomp import passes",
        "beside passes",
    ),
    (
        rules.import_direction,
        "graphcomp/capture/a.py",
        "from graphcomp.collectives import x",
        "beside collectives",
    ),
    (rules.import_direction, "graphcomp/compat/__init__.py", "from ..ir import meta", "below or beside ir"),
    (rules.import_direction, "graphcomp/ir/a.py", "from graphcomp import Plan", "is no layer"),
    (rules.import_direction, "graphcomp/schedule/a.py", "from graphcomp.plan import Plan", "only ['errors']"),
    (rules.import_direction, "graphcomp/losses.py", "from graphcomp.plan import Plan", "only ['errors']"),
    (rules.import_direction, "graphcomp/extra/a.py", "import os", "no place in the order"),
    (
        rules.import_direction,
        "graphcomp/runtime/a.py",
        "from passes.base import Pass",
        "import it as graphcomp.passes",
    ),
    (
        rules.import_direction,
        "passes/a.py",
        "from graphcomp.runtime import run",
        "passes stands below or beside runtime",
    ),
    (
        rules.observers_are_lazy,
        "graphcomp/runtime/a.py",
        "def f():\n    import graphcomp.testing",
        "must not import",
    ),
    (rules.observers_are_lazy, "graphcomp/step.py", "from graphcomp import inspect", "inside the function"),
    (rules.observers_are_lazy, "graphcomp/__init__.py", "from . import testing", "inside the function"),
    (rules.schedule_without_torch, "graphcomp/schedule/a.py", "from torch import Tensor", "no torch"),
    (rules.schedule_without_torch, "graphcomp/schedule/a.py", "def f():\n    import torch.fx", "no torch"),
    (rules.passes_apart, "passes/a.py", "from graphcomp.passes.b import B", "never import each other"),
    (rules.passes_apart, "passes/a.py", "from .b import B", "never import each other"),
    (rules.passes_apart, "passes/a.py", "from . import b", "never import each other"),
    (rules.passes_apart, "passes/a.py", "from graphcomp.passes import pipeline", "never import each other"),
    (rules.passes_apart, "passes/manager.py", "from graphcomp.passes.b import B", "never import each other"),
    (rules.private_torch, "graphcomp/ir/a.py", "import torch._dynamo", "torch._dynamo"),
    (rules.private_torch, "graphcomp/ir/a.py", "from torch._inductor import x", "torch._inductor.x"),
    (rules.private_torch, "graphcomp/ir/a.py", "from torch import _C", "torch._C"),
    (rules.private_torch, "graphcomp/ir/a.py", "from torch.fx import _pytree", "torch.fx._pytree"),
    (rules.private_torch, "graphcomp/ir/a.py", "import torch\ntorch._C.f()", "torch._C"),
    (rules.private_torch, "graphcomp/ir/a.py", "import torch\ntorch.fx._x", "torch.fx._x"),
    (rules.private_torch, "graphcomp/ir/a.py", "import torch.distributed as dist\ndist._x", "dist._x"),
    (
        rules.private_torch,
        "graphcomp/ir/a.py",
        "from torch import fx\ndef f():\n    return fx.Graph._y",
        "fx.Graph._y",
    ),
    (
        rules.private_torch,
        "graphcomp/ir/a.py",
        "def f(module):\n    return module._parameters",
        "_parameters",
    ),
    (rules.private_torch, "graphcomp/ir/a.py", "import torch\ngetattr(torch, '_C')", "'_C' by text"),
    (rules.private_torch, "graphcomp/ir/a.py", "import_module('torch._guards')", "'torch._guards' by text"),
    (rules.honest_errors, "graphcomp/ir/a.py", "assert True", "assert"),
    (rules.honest_errors, "graphcomp/ir/a.py", "raise AssertionError('x')", "AssertionError"),
    (rules.honest_errors, "passes/a.py", "raise NotImplementedError", "NotImplementedError"),
    (rules.short_file, "graphcomp/ir/a.py", "x = 1\n" * 501, "501 lines"),
]

KEPT: list[tuple[Rule, str, str]] = [
    (
        rules.import_direction,
        "graphcomp/runtime/a.py",
        "from graphcomp.schedule import x\nfrom ..ir import y",
    ),
    (
        rules.import_direction,
        "graphcomp/ir/a.py",
        "from .meta import x\nfrom . import meta\nimport graphcomp.errors",
    ),
    (rules.import_direction, "graphcomp/__init__.py", "from graphcomp.step import x\nfrom .plan import Plan"),
    (
        rules.import_direction,
        "graphcomp/testing/a.py",
        "from graphcomp.step import x\nfrom graphcomp import ir",
    ),
    (rules.observers_are_lazy, "graphcomp/step.py", "def f():\n    from graphcomp.inspect import explain"),
    (
        rules.observers_are_lazy,
        "graphcomp/step.py",
        "if TYPE_CHECKING:\n    from graphcomp.inspect import explain",
    ),
    (rules.observers_are_lazy, "graphcomp/ir/a.py", "import inspect"),
    (rules.passes_apart, "passes/a.py", "from graphcomp.passes.base import Pass\nfrom .base import x"),
    (rules.passes_apart, "passes/__init__.py", "from .a import A\nfrom graphcomp.passes.b import B"),
    (rules.private_torch, "graphcomp/compat/a.py", "import torch._C"),
    (rules.private_torch, "graphcomp/ir/a.py", "import torch\ntorch.__version__\nself._parameters\nx._mine_"),
    (rules.honest_errors, "graphcomp/ir/a.py", "raise PlanError('x')\nraise"),
    (rules.short_file, "graphcomp/ir/a.py", "x = 1\n" * 500),
]


@pytest.mark.parametrize(("rule", "path", "text", "says"), BROKEN)
def test_a_rule_fires(rule: Rule, path: str, text: str, says: str) -> None:
    assert any(says in str(violation) for violation in rule(Source(path, text))), list(rule(Source(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), KEPT)
def test_a_rule_is_silent(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text)))


def test_every_rule_is_tried_on_a_broken_text() -> None:
    assert {rule for rule, *_ in BROKEN} == set(RULES)
