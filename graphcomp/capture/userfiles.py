"""Which source files are the user's (models from other libraries count as the user's)."""

from __future__ import annotations

import contextlib
import functools
from functools import lru_cache
from pathlib import Path

import torch

_FOREIGN = (
    str(Path(torch.__file__).parent) + "/",
    str(Path(__file__).parent.parent) + "/",
    contextlib.__file__,
    functools.__file__,
    "<",
)


@lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to torch, nor to this package, nor to the interpreter's own machinery."""
    return not filename.startswith(_FOREIGN)
