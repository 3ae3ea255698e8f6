"""The operators behind functional collectives. Their namespace has a private name, yet graphs are made of them."""

from __future__ import annotations

import torch

_ops = torch.ops._c10d_functional

ALL_REDUCE = _ops.all_reduce.default
"""(input, reduce_op, group_name)"""
ALL_REDUCE_IN_PLACE = _ops.all_reduce_.default
"""The same, into its input; no program holds it."""
ALL_GATHER = _ops.all_gather_into_tensor.default
"""(input, group_size, group_name): the inputs of all ranks one behind the other, along dimension 0"""
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
"""(input, reduce_op, group_size, group_name): this rank's equal part, along dimension 0, of the reduced input"""
ALL_TO_ALL = _ops.all_to_all_single.default
"""(input, output_split_sizes, input_split_sizes, group_name): splits along dimension 0"""
BROADCAST = _ops.broadcast.default
"""(input, src, group_name): src counts within the group"""
WAIT = _ops.wait_tensor.default
"""(tensor): the tensor, complete"""
