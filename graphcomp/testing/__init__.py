"""Tools for tests of models and plans, a user's own and ours."""

from graphcomp.testing.parity import ParityTable, Row, check_parity
from graphcomp.testing.ranks import run_ranks
from graphcomp.testing.survey import Survey, survey
from graphcomp.testing.syncs import HostSyncs
from graphcomp.testing.virtual import VirtualStep, run_virtual

__all__ = [
    "HostSyncs",
    "ParityTable",
    "Row",
    "Survey",
    "VirtualStep",
    "check_parity",
    "run_ranks",
    "run_virtual",
    "survey",
]
