"""Programs and plans as text, for people: the plan, a folder with every program, and what differs between two."""

from graphcomp.inspect.diff import Difference, diff, first_difference
from graphcomp.inspect.dump import Text, dump
from graphcomp.inspect.explain import explain
from graphcomp.inspect.step_texts import dump_step

__all__ = ["Difference", "Text", "diff", "dump", "dump_step", "explain", "first_difference"]
