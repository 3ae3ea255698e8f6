"""Whether torch would add anything to an operation. Autocast of all devices at once is asked for privately only."""

from __future__ import annotations

import torch


def runs_as_written() -> bool:
    """Whether neither autograd nor autocast would: then no context need be entered, which costs as much as a small
    operation."""
    return not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled())
