"""Collectives for use inside models: differentiable, each with a stated meaning and adjoint.

They are the same in eager code and in captured programs: functional collectives over dense tensors, each with one
wait. Gradients are those of the sum of all ranks' losses. See docs/collectives.md.
"""

from graphcomp.collectives.exchange import Exchange, all_to_all
from graphcomp.collectives.gather import all_gather, all_gather_uneven, broadcast
from graphcomp.collectives.reduce import all_reduce, reduce_scatter
from graphcomp.compat.reads import host_syncs

__all__ = [
    "Exchange",
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "host_syncs",
    "reduce_scatter",
]
