"""Capture: module, loss function and an example microbatch become one joint program."""

from graphcomp.capture.capture import capture
from graphcomp.capture.joint import Joint, LossSpec, MetricSpec

__all__ = ["Joint", "LossSpec", "MetricSpec", "capture"]
