"""What this process holds of the model, and how that gets memory where the model was built on meta."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from graphcomp.compiler import GraphCompiler
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.runtime.state.initial import Initialiser, Recipe
from graphcomp.runtime.state.materialize import Holding, allocation, initialisation, on_meta


@dataclass(frozen=True)
class Owned:
    """Parameters and buffers of one rank of a layout, or of all ranks at once (virtual)."""

    compiler: GraphCompiler
    layout: Layout
    virtual: bool

    @property
    def is_placed(self) -> bool:
        """Whether it is known which stage holds what."""
        return len(self.layout.ranks) == 1 or self.virtual or bool(self.compiler.homes)

    def holds(self, name: str) -> bool:
        """Whether a parameter or buffer is held in this process. What no stage uses, the first one holds."""
        homes = self.compiler.homes.get(name, (0,))
        return self.virtual or any(stage in homes for stage in self.layout.own_stages)

    @property
    def used(self) -> set[str]:
        """The parameters and buffers that steps in this process read."""
        return {name for name in self.compiler.homes if self.holds(name)}

    @property
    def holding(self) -> Holding:
        shards = self.compiler.plan.parameters == "shard"
        return Holding(self.layout.device, self.layout.data_mesh if shards else None)

    def materialisation(self, recipe: Recipe) -> Callable[[], None]:
        """What gives memory and first values to all that this process holds on meta; that may be nothing.

        Raises StateError for a model of which something cannot be initialised, also if another rank holds that.
        """
        names = [name for name in on_meta(self.compiler.model) if self.is_placed and self.holds(name)]
        if self.is_placed and not names:
            return _nothing
        return initialisation(self.compiler.model, recipe, names, self.holding)

    def memory(self, filled: Collection[str], init: Initialiser | None) -> Callable[[], None]:
        """What gives memory to all that this process holds on meta: first values where the caller fills in none.

        Raises StateError for what cannot be placed or initialised.
        """
        model = self.compiler.model
        held = [name for name in on_meta(model) if self.holds(name)]
        empty = [name for name in held if name in filled]
        others = [name for name in held if name not in filled]
        allocate = allocation(model, empty, self.holding)
        initialise = initialisation(model, Recipe(init), others, self.holding, others) if others else _nothing

        def give() -> None:
            allocate()
            initialise()

        return give


def _nothing() -> None:
    pass
