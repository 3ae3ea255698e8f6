"""Tools for tests of models and plans, a user's own and ours."""

from graphcomp.testing.ranks import run_ranks

__all__ = ["run_ranks"]
