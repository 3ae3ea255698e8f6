"""Partition: the joint graph becomes stage programs with typed boundaries."""

from graphcomp.partition.partition import partition
from graphcomp.partition.stages import Boundary, Carried, Partitioned, Stage

__all__ = ["Boundary", "Carried", "Partitioned", "Stage", "partition"]
