"""The rules of the source tree: what each says, as a function from one source file to its violations.

A rule sees a path (as it stands in the tree) and the parsed text, so it can be tried on text that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

import torch

# Lowest first. A layer may import any layer of a lower level; layers of one level do not know each other.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("buckets",),
    ("plan", "losses", "progress"),
    ("compat", "huggingface"),
    ("ir",),
    ("capture", "schedule", "collectives"),
    ("passes",),
    ("partition",),
    ("dataparallel",),
    ("backend",),
    ("runtime",),
    ("compiler",),
    ("stored",),
    ("dispatch",),
    ("owned",),
    ("prepare",),
    ("call",),
    ("ending",),
    ("engine",),
    ("step",),
    ("clip", "protocol", "deployment"),
)
LEVEL = {layer: level for level, layers in enumerate(LEVELS) for layer in layers}
# Layers that may import less than their level allows.
ONLY = {"schedule": {"errors"}, "losses": {"errors"}, "huggingface": {"errors", "losses"}}
OBSERVERS = {"inspect", "testing", "checkpoint"}  # read every layer
WIRING = {
    "compiler",
    "step",
    "graphcomp",
}  # may import observers, when they are asked for; graphcomp: __init__.py
# Files of passes/ that are no passes: what every pass may import, and who may name the passes.
SHARED_PASSES = {
    "base",
    "driver",
    "effects",
    "manager",
    "memory",
    "operations",
    "reorder",
    "retrace",
    "row_arguments",
    "row_operations",
    "row_parts",
    "row_region",
    "row_rules",
    "rows",
    "symbols",
}
PASS_LISTS = {"graphcomp.passes", "graphcomp.passes.pipeline"}
READS_PASS_LIST = {"graphcomp.passes.manager": {"pipeline"}}
MAX_LINES = 500
MAX_MEDIAN_LINES = 150


@dataclass(frozen=True)
class Import:
    """One imported dotted name. `bound` is the local name it gets; `lazy` means: inside a function."""

    target: str
    bound: str
    line: int
    lazy: bool
    for_types: bool


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        """Dotted name under which the file is imported."""
        parts = list(PurePosixPath(self.path).with_suffix("").parts)
        if parts[0] == "passes":
            parts.insert(0, "graphcomp")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def package(self) -> str:
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]

    @cached_property
    def layer(self) -> str:
        return layer_of(self.module)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self, self.tree, lazy=False, for_types=False))


@dataclass(frozen=True)
class Violation:
    path: str
    line: int
    says: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.says}"


def layer_of(module: str) -> str:
    """First name below `graphcomp`; the package itself is its own layer."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _imports(source: Source, node: ast.AST, lazy: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield Import(alias.name, bound, child.lineno, lazy, for_types)
        elif isinstance(child, ast.ImportFrom):
            base = _base(source, child)
            for alias in child.names:
                target = f"{base}.{alias.name}" if base else alias.name
                yield Import(target, alias.asname or alias.name, child.lineno, lazy, for_types)
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typed = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from _imports(source, child, inside, typed)


def _base(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    above = source.package.split(".")[: len(source.package.split(".")) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def import_direction(source: Source) -> Iterator[Violation]:
    """Every layer imports only layers below it."""
    layer = source.layer
    if layer not in LEVEL and layer not in OBSERVERS | {"graphcomp"}:
        yield Violation(source.path, 1, f"layer '{layer}' has no place in the order of layers (tests/architecture.py)")
        return
    for item in source.imports:
        if item.target.partition(".")[0] == "passes":
            yield Violation(source.path, item.line, "import it as graphcomp.passes: only that name is shipped")
        if item.target.partition(".")[0] != "graphcomp":
            continue
        other = layer_of(item.target)
        if other in OBSERVERS or other == layer or layer in OBSERVERS | {"graphcomp"}:
            continue
        if other not in LEVEL:
            yield Violation(source.path, item.line, f"{item.target} is no layer: import from the file that defines it")
        elif layer in ONLY and other not in ONLY[layer]:
            yield Violation(source.path, item.line, f"{layer} may import only {sorted(ONLY[layer])}, not {other}")
        elif LEVEL[other] >= LEVEL[layer]:
            yield Violation(source.path, item.line, f"{layer} stands below or beside {other} and must not import it")


def observers_are_lazy(source: Source) -> Iterator[Violation]:
    """inspect, testing and checkpoint are imported by the wiring only, and only when they are asked for."""
    for item in source.imports:
        other = layer_of(item.target)
        if not item.target.startswith("graphcomp.") or other not in OBSERVERS or other == source.layer:
            continue
        if source.layer in OBSERVERS:
            continue
        if source.layer not in WIRING:
            yield Violation(source.path, item.line, f"{source.layer} must not import {other}")
        elif not (item.lazy or item.for_types):
            yield Violation(source.path, item.line, f"{other} must be imported inside the function that needs it")


def schedule_without_torch(source: Source) -> Iterator[Violation]:
    """A schedule is plain data."""
    if source.layer == "schedule":
        for item in source.imports:
            if item.target.partition(".")[0] == "torch":
                yield Violation(source.path, item.line, "schedule/ is plain data and imports no torch")


def passes_apart(source: Source) -> Iterator[Violation]:
    """A pass knows the shared files of passes/ and no other pass. Only the lists of passes name all."""
    if source.layer != "passes" or source.module in PASS_LISTS:
        return
    known = {source.module.split(".")[2]} | SHARED_PASSES | READS_PASS_LIST.get(source.module, set())
    for item in source.imports:
        parts = item.target.split(".")
        if parts[:2] == ["graphcomp", "passes"] and not known & set(parts[2:3]):
            yield Violation(source.path, item.line, f"passes never import each other: {item.target}")


def _private(dotted: str) -> bool:
    return any(re.match(r"_(?!_)", part) for part in dotted.split("."))


# Private attributes that torch's own objects carry, whatever the variable is called that holds one.
TORCH_OBJECTS = (torch.nn.Module, torch.Tensor, torch.fx.Graph, torch.fx.Node, torch.fx.GraphModule)
PRIVATE_ATTRIBUTES = {name for kind in TORCH_OBJECTS for name in dir(kind) if _private(name)} | {
    name for kind in (torch.nn.Module(), torch.fx.Graph()) for name in vars(kind) if _private(name)
}


def private_torch(source: Source) -> Iterator[Violation]:
    """Only compat/ uses names of torch that begin with an underscore."""
    if source.layer == "compat":
        return
    torch_names = {item.bound for item in source.imports if item.target.partition(".")[0] == "torch"}
    for item in source.imports:
        if item.target.partition(".")[0] == "torch" and _private(item.target):
            yield Violation(source.path, item.line, f"private torch name {item.target} outside compat/")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            yield from _private_attribute(source, node, torch_names)
        elif isinstance(node, ast.Call):
            yield from _private_by_text(source, node, torch_names)


def _private_attribute(source: Source, node: ast.Attribute, torch_names: set[str]) -> Iterator[Violation]:
    if not _private(node.attr):
        return
    root: ast.expr = node
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name) and root.id in torch_names:
        yield Violation(source.path, node.lineno, f"private torch name {ast.unparse(node)} outside compat/")
    elif node.attr in PRIVATE_ATTRIBUTES and ast.unparse(node.value) not in ("self", "cls"):
        yield Violation(source.path, node.lineno, f"private attribute of a torch object, {node.attr}, outside compat/")


def _private_by_text(source: Source, node: ast.Call, torch_names: set[str]) -> Iterator[Violation]:
    """`getattr(torch.x, "_y")` and `import_module("torch._x")` are private names too."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if name in ("getattr", "hasattr", "setattr") and node.args:
        first = ast.unparse(node.args[0]).partition(".")[0]
        found = [text for text in texts if _private(text) and (first in torch_names or text in PRIVATE_ATTRIBUTES)]
    elif name in ("import_module", "__import__"):
        found = [text for text in texts if text.partition(".")[0] == "torch" and _private(text)]
    else:
        return
    for text in found:
        yield Violation(source.path, node.lineno, f"private torch name '{text}' by text outside compat/")


def honest_errors(source: Source) -> Iterator[Violation]:
    """No assert, AssertionError or NotImplementedError: a user cannot act on any of them."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield Violation(source.path, node.lineno, "assert: raise an error of graphcomp.errors")
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if ast.unparse(raised).rpartition(".")[2] in ("AssertionError", "NotImplementedError"):
                text = ast.unparse(raised)
                yield Violation(source.path, node.lineno, f"raise {text}: raise an error of graphcomp.errors")


def short_file(source: Source) -> Iterator[Violation]:
    """No file is longer than MAX_LINES."""
    lines = source.text.count("\n")
    if lines > MAX_LINES:
        yield Violation(source.path, lines, f"{lines} lines, at most {MAX_LINES}: split it along its ideas")
