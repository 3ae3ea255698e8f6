"""Whether tensors still have the form they had: all of them in one call.

The check is the one that torch's own compiler makes before it runs compiled code. Its name is not public; to ask each
tensor for its properties by public ones takes five times as long, at every step and for every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards


def form_check(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A function that says whether all have the class, shape, strides, dtype, device and `requires_grad` of now.

    It may say no without a change, where modes of torch (inference mode) are others than now.
    """
    if not tensors:
        return lambda: True
    check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return lambda: check(*tensors)
