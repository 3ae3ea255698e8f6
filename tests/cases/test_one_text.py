"""The examples' models, losses, training loops and evaluators are one text at all layouts: none asks where it runs.

The rule. In these texts no branch, loop condition, match, assertion, filter, comparison or and/or reads a name that
means a place: `is_first`, `is_last`, or an identifier with one of the words of `PLACE` in it, such as `get_rank()` or
`mesh.size()`; nor is such a name an index, which is a branch in other words; nor do they use `torch.distributed`. It
holds for modules, loss functions and loops of all examples, and for whole trainers but for what `MAY_ASK` names: the
parts that make the plan from the command line, and that show or log.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
PLACE = {"rank", "ranks", "stage", "stages", "mesh", "world", "layout", "layouts", "pp", "dp", "tp", "cp", "pipeline"}
PLACE |= {"part", "parts"}
MAY_ASK: dict[str, set[str]] = {
    "05_trainer.py": set(),
    "place.py": {"Place", "place"},
    "08_job.py": {"Dims", "Metrics", "main"},
}
"""What makes the plan from the command line, shows and logs; `main` ends the process group."""


def texts(tree: ast.Module) -> Iterator[ast.AST]:
    """Modules, loss functions, and loops that run steps. Who prints may well depend on the rank."""
    for node in ast.walk(tree):
        is_module = isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(base) for base in node.bases)
        is_loss = isinstance(node, ast.FunctionDef) and node.name == "loss_fn"
        calls = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
        is_loop = isinstance(node, ast.For | ast.While) and calls & {"step", "step.evaluate", "optimizer.step"}
        if is_module or is_loss or is_loop:
            yield node


def decides(node: ast.AST) -> list[ast.AST]:
    """The expressions that this node takes a decision on."""
    match node:
        case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
            return [node.test]
        case ast.Match():
            return [node.subject]
        case ast.match_case(guard=guard) if guard is not None:
            return [guard]
        case ast.comprehension():
            return list(node.ifs)
        case ast.Subscript():
            return [node.slice]
        case ast.BoolOp() | ast.Compare():
            return [node]
    return []


def identifiers(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(name)):  # environment variables, names of axes
                yield name


def means_a_place(name: str) -> bool:
    name = name.lower()
    return name in PLACE or not PLACE.isdisjoint(re.split(r"[^a-z]+", name)) or "is_first" in name or "is_last" in name


def place_tests(node: ast.AST) -> list[str]:
    found = {}
    for part in ast.walk(node):
        for decision in decides(part):
            if any(means_a_place(name) for name in identifiers(decision)):
                found[ast.unparse(decision)] = f"line {getattr(decision, 'lineno', '?')}: {ast.unparse(decision)}"
        if isinstance(part, ast.Name) and part.id in ("dist", "distributed"):
            found["dist"] = f"line {part.lineno}: uses torch.distributed"
    return list(found.values())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_test_on_rank_stage_or_layout(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [test for text in texts(tree) for test in place_tests(text)]


@pytest.mark.parametrize("name", MAY_ASK)
def test_of_a_trainer_only_these_parts_ask(name: str) -> None:
    tree = ast.parse(next(path for path in EXAMPLES if path.name == name).read_text())
    asking = {}
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) and (found := place_tests(node)):
            asking[getattr(node, "name", "the module itself")] = found
    assert asking.keys() == MAY_ASK[name], asking


@pytest.mark.parametrize(
    "line",
    [
        "return x if self.stage.is_first else self.layer(x)",
        "if dist.get_rank() == 0: print(x)",
        "while mesh.size() > 1: pass",
        "first = plan.mesh is None or x.ndim",
        "match config.world_size:\n   case 1: return x",
        "match x:\n   case 1 if self.pp_rank: return x",
        "return [y for y in x if y.stage]",
        "return [self.layer, self.norm][local_rank](x)",
        "x = 2 * int(os.environ['RANK'] == '0')",
        "assert x is not None or self.is_last",
    ],
)
def test_the_scan_finds_a_test_on_the_place(line: str) -> None:
    tree = ast.parse(f"class M(nn.Module):\n def forward(self, x):\n  {line}")
    assert place_tests(next(texts(tree)))


def test_the_scan_lets_other_tests_pass() -> None:
    text = "class M(nn.Module):\n def forward(self, x, mesh):\n  return f(mesh) if x.ndim and self.worldly else x[0]"
    assert not place_tests(next(texts(ast.parse(text))))
    assert sum(len(list(texts(ast.parse(path.read_text())))) for path in EXAMPLES) > 3
