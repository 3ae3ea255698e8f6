"""Schedules as pure data: what every rank does in a step, and in which order. Nothing here imports torch.

The usual way, from who computes what to a proof that it completes:

    get("1f1b").build(stages, microbatches)    who computes what, in order; with `ranks` fewer than stages, several each
    without_backward(schedule, stages)         stages with nothing to train; evaluation
    with_transfers(schedule, ...)              sends and receives of the boundaries that exist
    fuse(schedule)                             F and B back to back become one action
    check(schedule)                            proof that it completes, with blocking sends too

`simulate(schedule, cost)` predicts time, bubble and memory of every rank; `timeline` draws it.
"""

from graphcomp.schedule.actions import Action, Kind, counterpart, named_stages, parse
from graphcomp.schedule.checker import Proof, check
from graphcomp.schedule.communicate import with_transfers
from graphcomp.schedule.eager_one_f_one_b import EagerOneFOneB
from graphcomp.schedule.gpipe import GPipe
from graphcomp.schedule.interleaved import InterleavedOneFOneB
from graphcomp.schedule.memory import peak_bytes, peak_in_flight
from graphcomp.schedule.one_f_one_b import OneFOneB
from graphcomp.schedule.registry import KNOWN, Builder, get
from graphcomp.schedule.rewrite import fuse, without_backward
from graphcomp.schedule.schedule import Schedule, dealt
from graphcomp.schedule.simulate import Cost, RankTimes, Simulation, Span, simulate
from graphcomp.schedule.timeline import timeline

__all__ = [
    "KNOWN",
    "Action",
    "Builder",
    "Cost",
    "EagerOneFOneB",
    "GPipe",
    "InterleavedOneFOneB",
    "Kind",
    "OneFOneB",
    "Proof",
    "RankTimes",
    "Schedule",
    "Simulation",
    "Span",
    "check",
    "counterpart",
    "dealt",
    "fuse",
    "get",
    "named_stages",
    "parse",
    "peak_bytes",
    "peak_in_flight",
    "simulate",
    "timeline",
    "with_transfers",
    "without_backward",
]
