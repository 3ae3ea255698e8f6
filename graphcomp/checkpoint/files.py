"""Files of weights, opened so that only what is asked for is read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from graphcomp.compat.blocks import Block
from graphcomp.errors import CheckpointError

Read = Callable[[str, Block | None], torch.Tensor]
Rename = Callable[[str], str] | None


@dataclass(frozen=True)
class Source:
    """Tensors by name. read(name, block): all of one, or this part. extra_state: what modules keep besides."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Read
    extra_state: Mapping[str, Any] = field(default_factory=dict)


class Weights:
    """A path whose files are opened when that is asked for, and closed with the context that made this."""

    def __init__(self, path: Path, rename: Rename, stack: ExitStack) -> None:
        self.path, self.rename, self.stack = path, rename, stack

    def opened(self) -> Source:
        """Raises CheckpointError where there are no weights that can be read."""
        found: dict[str, tuple[Path, str, Source]] = {}
        for file in files_of(self.path):
            source = _open(file, self.stack)
            for name in source.shapes:
                own = self.rename(name) if self.rename is not None else name
                if own in found:
                    raise CheckpointError(f"'{own}' comes twice", where=f"{found[own][0]} and {file}")
                found[own] = (file, name, source)

        def read(name: str, block: Block | None) -> torch.Tensor:
            _, own, source = found[name]
            return source.read(own, block)

        return Source({name: source.shapes[own] for name, (_, own, source) in found.items()}, read)


@contextlib.contextmanager
def open_weights(path: str | PathLike[str], rename: Rename = None) -> Iterator[Weights]:
    with ExitStack() as stack:
        yield Weights(Path(path), rename, stack)


def files_of(path: Path) -> list[Path]:
    """The files that hold the weights: those that an index lists, those in a folder, or the file itself."""
    if path.name.endswith(".index.json"):
        listed = json.loads(path.read_text()).get("weight_map", {})
        return [path.parent / name for name in dict.fromkeys(listed.values())]
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError("there are no weights", where=str(path), expected="a file or a folder", got="neither")
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"):
        found = sorted(path.glob(pattern))
        if found and pattern.endswith("index.json"):
            return files_of(_only(found))
        if found:
            return found if pattern == "*.safetensors" or pattern == "*.bin" else [_only(found)]
    raise CheckpointError(
        "the folder holds no weights",
        where=str(path),
        expected="*.safetensors, *.bin, *.pt or *.pth, or an index of them",
        got=", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing",
    )


def _only(found: list[Path]) -> Path:
    if len(found) > 1:
        raise CheckpointError(
            "the folder holds several sets of weights",
            where=str(found[0].parent),
            got=", ".join(each.name for each in found),
            do="pass the path of one of these files",
        )
    return found[0]


def _open(file: Path, stack: ExitStack) -> Source:
    if not file.exists():
        raise CheckpointError("a file of weights is not there", where=str(file))
    try:
        return _open_safetensors(file, stack) if file.suffix == ".safetensors" else _open_torch(file)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            "a file of weights cannot be read", where=str(file), got=f"{type(error).__name__}: {error}"
        ) from error


def _open_safetensors(file: Path, stack: ExitStack) -> Source:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(
            "reading .safetensors needs the package safetensors", where=str(file), do="pip install safetensors"
        ) from error
    opened = stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
    names: list[str] = list(opened.keys())
    slices = {name: opened.get_slice(name) for name in names}
    shapes = {name: tuple(one.get_shape()) for name, one in slices.items()}

    def read(name: str, block: Block | None) -> torch.Tensor:
        if not block:
            whole: torch.Tensor = opened.get_tensor(name)
            return whole
        sizes = [one.stop - one.start for one in block]
        if not all(sizes):  # which the file cannot be asked for
            return torch.empty(sizes)
        part: torch.Tensor = slices[name][block]
        return part

    return Source(shapes, read)


def _open_torch(file: Path) -> Source:
    """Of `torch.save`: mapped into memory, so that pages are read when they are copied."""
    loaded: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else loaded
    other = _no_tensors(state.items()) if isinstance(state, Mapping) else [type(state).__name__]
    if other:
        raise CheckpointError(
            "the file holds something else than a state dict",
            where=str(file),
            expected="a dict of tensors by name, or one under the key 'state_dict'",
            got=", ".join(other[:8]),
        )
    tensors: Mapping[str, torch.Tensor] = state

    def read(name: str, block: Block | None) -> torch.Tensor:
        return tensors[name] if block is None else tensors[name][block]

    return Source({name: tuple(tensor.shape) for name, tensor in tensors.items()}, read)


def _no_tensors(items: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"'{name}': {type(value).__name__}" for name, value in items if not isinstance(value, torch.Tensor)]
