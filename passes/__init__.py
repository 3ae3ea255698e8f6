"""Passes: graph to graph, one a file, each a frozen dataclass with a declared contract."""
