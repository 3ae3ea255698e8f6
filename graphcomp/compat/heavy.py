"""Imports that take long and that a compile needs: for processes from which others are copied.

None of them starts a thread or a process, which a copy would not have.
"""

import torch._inductor.compile_fx
import torch.distributed.tensor  # noqa: F401
