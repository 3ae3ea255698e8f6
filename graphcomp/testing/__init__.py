"""Tools for tests of models and plans, a user's own and ours."""

from graphcomp.testing.ranks import run_ranks
from graphcomp.testing.virtual import VirtualStep, run_virtual

__all__ = ["VirtualStep", "run_ranks", "run_virtual"]
