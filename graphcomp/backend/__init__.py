"""Backends: program -> callable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphcomp.backend.base import Backend, Boxed, Compiled, Listener, Progress
from graphcomp.backend.eager import EagerBackend
from graphcomp.backend.inductor import InductorBackend
from graphcomp.errors import PlanError
from graphcomp.plan import BACKENDS

__all__ = ["Backend", "Boxed", "Compiled", "EagerBackend", "InductorBackend", "Listener", "Progress", "get"]


def get(name: str, listener: Listener | None = None, options: Mapping[str, Any] | None = None) -> Backend:
    """A new backend by name; equal programs given to one backend are compiled once.

    listener: told when a compile starts and ends. options: of Inductor, by name. Raises PlanError for a name that does
    not exist, and for options that Inductor does not have, or that cannot hold here.
    """
    if name not in BACKENDS:
        raise PlanError(f"there is no backend '{name}'", expected=" or ".join(map(repr, BACKENDS)), got=repr(name))
    return EagerBackend(listener) if name == "eager" else InductorBackend(listener, options or {})
