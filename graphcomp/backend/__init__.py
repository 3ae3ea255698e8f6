"""Backends: program -> callable."""

from __future__ import annotations

from graphcomp.backend.base import Backend, Boxed, Compiled, Listener, Progress
from graphcomp.backend.eager import EagerBackend
from graphcomp.backend.inductor import InductorBackend
from graphcomp.errors import PlanError

__all__ = ["Backend", "Boxed", "Compiled", "EagerBackend", "InductorBackend", "Listener", "Progress", "get"]

BACKENDS: dict[str, type[EagerBackend] | type[InductorBackend]] = {
    "eager": EagerBackend,
    "inductor": InductorBackend,
}


def get(name: str, listener: Listener | None = None) -> Backend:
    """A new backend by name; equal programs given to one backend are compiled once.

    listener: told when a compile starts and ends. Raises PlanError for a name that does not exist.
    """
    if name not in BACKENDS:
        raise PlanError(f"there is no backend '{name}'", expected=" or ".join(map(repr, BACKENDS)), got=repr(name))
    return BACKENDS[name](listener)
