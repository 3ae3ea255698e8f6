"""Real text that is on every machine with Python: the functions of its standard library, as bytes.

A document is one function. A microbatch is a few documents padded together, so lengths differ all the time.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 256  # the values of a byte; 0 does not occur in source text and begins each document
IGNORED = -100


def documents(limit: int, longest: int) -> list[bytes]:
    """The source of the first `limit` functions of at most `longest` bytes, in the order of file names."""
    found: list[bytes] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).encode()
                if 40 <= len(source) <= longest:
                    found.append(source)
        if len(found) >= limit:
            break
    return found[:limit]


def groups(texts: list[bytes], microbatches: int, rows: int, seed: int) -> Iterator[list[list[bytes]]]:
    """Without end: the documents of each microbatch of each step; their order follows from `seed`, on every machine."""
    order = random.Random(seed)
    while True:
        yield [order.sample(texts, rows) for _ in range(microbatches)]


def steps(
    texts: list[bytes], microbatches: int, rows: int, seed: int, device: torch.device
) -> Iterator[list[dict[str, Tensor]]]:
    """Without end: the microbatches of each step, padded."""
    for step in groups(texts, microbatches, rows, seed):
        yield [pad(group, device) for group in step]


def pad(texts: list[bytes], device: torch.device) -> dict[str, Tensor]:
    """tokens and labels, int64 (rows, longest); the label of a place is the byte that comes next."""
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    labels = torch.full((len(texts), longest), IGNORED, dtype=torch.int64)
    for row, text in enumerate(texts):
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tokens[row, 1 : len(text)] = values[:-1]
        labels[row, : len(text)] = values
    return {"tokens": tokens.to(device), "labels": labels.to(device)}
