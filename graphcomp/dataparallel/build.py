"""From the plain step program to the one that runs."""

from __future__ import annotations

from graphcomp.ir.collective_calls import is_start
from graphcomp.ir.program import Program
from graphcomp.passes.bucket_collectives import BucketCollectives
from graphcomp.passes.manager import PassManager
from graphcomp.passes.order_collectives import OrderCollectives


def step_program(naive: Program, bucket_bytes: int) -> Program:
    """A step program whose collectives are joined up to `bucket_bytes` each, begin early and are waited for late."""
    return PassManager([BucketCollectives(bucket_bytes), OrderCollectives()]).run(naive)


def collectives_of(program: Program) -> int:
    """How many collectives a run of the program issues."""
    return sum(map(is_start, program.calls()))
