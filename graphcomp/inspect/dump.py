"""Every program of a compilation as numbered text files, in the order in which they were made."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphcomp.errors import StepError

INDEX = "index.txt"
_OURS = re.compile(r"\d{2,}_[\w.-]*\.txt")


@dataclass(frozen=True)
class Text:
    """One file of a dump: a name such as `stage 0 forward`, and its contents."""

    name: str
    text: str


def dump(folder: str | os.PathLike[str], texts: Sequence[Text]) -> list[Path]:
    """Write `00_plan.txt`, `01_joint.txt`, ... and `index.txt` into `folder`, which is made if it is not there.

    The same texts give the same files. Each file is replaced as a whole, so that a reader never sees half of one;
    files of a former dump that are not written again are removed, any other file is left alone. Returns the paths of
    the programs in order, then that of the index. Raises StepError if `folder` is a file.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise StepError(
            "the dump needs a folder",
            expected="a folder, or a path where nothing is yet",
            got=f"the file {root}",
            do="give another path",
        )
    root.mkdir(parents=True, exist_ok=True)
    digits = max(2, len(str(len(texts) - 1)))
    names = [f"{number:0{digits}}_{_file_name(each.name)}.txt" for number, each in enumerate(texts)]
    for name, each in zip(names, texts, strict=True):
        _replace(root / name, each.text)
    for old in root.iterdir():
        if _OURS.fullmatch(old.name) and old.name not in names:
            old.unlink()
    lines = (f"{name}  {each.name}, {_lines(each.text)}" for name, each in zip(names, texts, strict=True))
    _replace(root / INDEX, "\n".join(lines))
    return [root / name for name in [*names, INDEX]]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_") or "program"


def _lines(text: str) -> str:
    count = len(text.splitlines())
    return f"{count} line{'' if count == 1 else 's'}"


def _replace(path: Path, text: str) -> None:
    """Write beside the place and move there, which no reader can see in part."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text if text.endswith("\n") else text + "\n")
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
