"""About ten tiny models that every pass, schedule and partition is tried on. `ZOO` holds them by name."""

from __future__ import annotations

from tests.zoo import (
    batch_norm,
    dropout,
    encoder_decoder,
    gpt,
    half_frozen,
    mlp,
    moe,
    ragged_gpt,
    tied_gpt,
    two_losses,
    u_shape,
)
from tests.zoo.case import Case

_MODULES = (
    mlp,
    gpt,
    tied_gpt,
    u_shape,
    encoder_decoder,
    moe,
    dropout,
    batch_norm,
    two_losses,
    half_frozen,
    ragged_gpt,
)

ZOO: dict[str, Case] = {module.CASE.name: module.CASE for module in _MODULES}
