"""Checksums: of all bits and their places. The checked transport runs between processes in tests/faults."""

from __future__ import annotations

import pytest
import torch

from graphcomp.runtime.program.fingerprint import checksum
from graphcomp.runtime.program.transport import payload

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex64]
MASK = (1 << 64) - 1


def by_hand(content: bytes) -> int:
    """In Python's integers."""
    content += b"\0" * (-len(content) % 8)
    total = 0
    for place in range(len(content) // 8):
        word = int.from_bytes(content[8 * place : 8 * place + 8], "little")
        word = word + (place + 1) * 0x9E3779B97F4A7C15 & MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
        total += word ^ word >> 31
    return total & MASK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 7), (2, 3, 4)], ids=str)
def test_it_is_what_is_written_down(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 3).to(dtype)
    sent = payload(value)
    content = bytes(sent.reshape(-1).view(torch.uint8).tolist())
    found = checksum(value)
    assert (found.shape, found.dtype, int(found) & MASK) == ((), torch.int64, by_hand(content))


def test_any_bit_changes_it() -> None:
    value = torch.randn(3, 5)
    seen = {int(checksum(value))}
    for byte in range(value.nbytes):
        for bit in range(8):
            other = value.clone()
            other.view(torch.uint8).view(-1)[byte] ^= 1 << bit
            seen.add(int(checksum(other)))
    assert len(seen) == 1 + 8 * value.nbytes


def test_order_changes_it_also_of_values_with_few_bits() -> None:
    value = torch.zeros(5000, dtype=torch.float64)
    value[0], value[2048] = 1.0, 2.0
    other = value.clone()
    other[0], other[2048] = 2.0, 1.0
    assert int(checksum(value)) != int(checksum(other))


def test_strides_and_gradients_do_not_matter() -> None:
    value = torch.randn(4, 6, requires_grad=True)
    assert int(checksum(value.t())) == int(checksum(value.detach().t().contiguous()))
