"""What stands for numbers that are read of fake tensors."""

from __future__ import annotations

import torch

from graphcomp.compat.estimates import hint
from graphcomp.compat.known_splits import knowing_splits
from graphcomp.compat.reads import EXCHANGE_SPLITS
from graphcomp.compat.run_time_sizes import is_run_time, is_run_time_name
from graphcomp.compat.symbols import new_fake_mode


def test_fake_splits_stand_for_symbols() -> None:
    mode = new_fake_mode()
    sent, received = (mode.from_tensor(torch.tensor([1, 2, 3]), static_shapes=True) for _ in range(2))
    with mode:
        total, *parts = EXCHANGE_SPLITS(sent, received, 6)
        assert is_run_time(total) and is_run_time_name(str(total)) and not is_run_time_name("s0")
        assert sum(parts[:3]) == 6 and bool(sum(parts[3:]) == total) and bool(parts[2] >= 0)
        assert (hint(total), hint(total * 2), [hint(part) for part in parts[:3]]) == (6, 12, [2, 2, 2])
        rows = torch.empty(total, 4)
    assert is_run_time(rows) and is_run_time((rows, 1)) and not is_run_time(sent)


def test_what_was_read_is_known_while_something_is_captured() -> None:
    mode = new_fake_mode()
    sent, received = (mode.from_tensor(torch.tensor([1, 5]), static_shapes=True) for _ in range(2))

    def there_and_back() -> object:
        total, *_ = EXCHANGE_SPLITS(sent, received, 6)
        return EXCHANGE_SPLITS(received, sent, total)[0]

    with mode, knowing_splits():
        assert there_and_back() == 6
    with mode:
        assert is_run_time(there_and_back())
