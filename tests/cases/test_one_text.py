"""The examples' models and training loops are one text at all layouts: nothing in them asks where it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PLACE = ("rank", "stage", "mesh", "world_size", "pipeline", "is_first", "is_last", "layout", "get_rank", "data_rank")
BRANCHES = (ast.If, ast.IfExp, ast.While, ast.Assert, ast.comprehension, ast.Match, ast.BoolOp, ast.Compare)


def texts(tree: ast.Module) -> Iterator[ast.AST]:
    """Modules, loss functions, and loops that run steps. Who prints may well depend on the rank."""
    for node in ast.walk(tree):
        is_module = isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(base) for base in node.bases)
        is_loss = isinstance(node, ast.FunctionDef) and node.name == "loss_fn"
        calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
        is_loop = isinstance(node, ast.For | ast.While) and calls & {"step", "step.evaluate", "optimizer.step"}
        if is_module or is_loss or is_loop:
            yield node


def place_tests(node: ast.AST) -> list[str]:
    found = []
    for part in ast.walk(node):
        if isinstance(part, BRANCHES):
            test = getattr(part, "test", None) or getattr(part, "subject", None) or part
            names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
            names |= {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
            found += [f"line {getattr(test, 'lineno', '?')}: {ast.unparse(test)}" for name in names if name in PLACE]
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_test_on_rank_stage_or_layout(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [test for text in texts(tree) for test in place_tests(text)]


def test_the_scan_finds_a_test_on_the_rank() -> None:
    text = "class M(nn.Module):\n def forward(self, x):\n  return x if self.stage.is_first else self.layer(x)"
    assert place_tests(next(texts(ast.parse(text))))
    assert sum(len(list(texts(ast.parse(path.read_text())))) for path in EXAMPLES) > 3
