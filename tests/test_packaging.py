"""What is shipped: every module once, passes/ as graphcomp.passes, types marked, pins that fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel of a copy of the tree: in place, old build outputs could leak in."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("graphcomp", "passes", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(pip, cwd=copy, check=True, capture_output=True, text=True)
    return set(zipfile.ZipFile(next(out.glob("*.whl"))).namelist())


def test_the_wheel_holds_every_module_and_nothing_else(wheel: set[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("graphcomp/**/*.py")}
    passes = {f"graphcomp/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("passes/**/*.py")}
    assert {name for name in wheel if ".dist-info/" not in name} == modules | passes | {"graphcomp/py.typed"}


def test_the_wheel_carries_the_licence(wheel: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for name in ("graphcomp", "passes") for path in (ROOT / name).glob("**/*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_a_users_own_passes_module_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("mine = True\n")
    code = "import passes, graphcomp.passes as ours; print(passes.mine, ours.__path__[0])"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    mine, ours = run.stdout.split(maxsplit=1)
    assert mine == "True"
    assert Path(ours.strip()).name == "passes"


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_requirement_is_pinned_to_a_version_it_accepts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(text for texts in project["optional-dependencies"].values() for text in texts),
    ]
    for requirement in map(Requirement, wanted):
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pin), f"constraints.txt pins {requirement.name} to {pin}"
