"""Parts of different sizes, of a size that tensor ranks do not divide. While a program is traced.

`DTensor` splits a size as `torch.chunk` does and fills parts up for its collectives, which holds for sizes that are
numbers. How it does either with sizes that are symbols asks more of them than it has to, one program for each length,
or fails in an operator; and a plain tensor that is handed on is always taken for a part of equal ones. All of this has
no public names.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.distributed.tensor._ops import utils
from torch.utils._sympy.functions import FloorDiv

from graphcomp.compat.estimates import hint
from graphcomp.compat.replaced import replaced
from graphcomp.compat.run_time_sizes import is_run_time
from graphcomp.errors import CaptureError

Size = Any  # an int, or a symbolic one


@contextlib.contextmanager
def parts_of_any_size() -> Iterator[None]:
    """Within, `DTensor`s of sizes that do not divide are traced: one program for all of them that are not small.

    What torch raises once layers have handed on parts becomes a CaptureError that tells which there were.
    """
    wholes = _Wholes()
    to_local, from_local = DTensor.to_local, DTensor.from_local

    def handing_on(self: DTensor, **options: Any) -> torch.Tensor:
        local = to_local(self, **options)
        wholes.note(self, local)
        return local

    def handed_on(
        local_tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> DTensor:
        shape = None
        if options.get("shape") is None and device_mesh is not None and placements is not None:
            shape = wholes.shape_of(local_tensor, device_mesh, placements)
        if shape is not None:
            options |= {"shape": shape, "stride": _dense(shape)}
            local_tensor = local_tensor.contiguous()
        return from_local(local_tensor, device_mesh, placements, **options)

    with replaced(
        (placement_types, "pad_tensor", _filled_up),
        (utils, "is_tensor_shardable", lambda *_, **__: True),
        (Shard, "_custom_chunk", staticmethod(_chunks)),
        (Shard, "local_shard_size_and_offset", staticmethod(part)),
        (DTensor, "to_local", handing_on),
        (DTensor, "from_local", staticmethod(handed_on)),
    ):
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError or not wholes or not _torchs_own(error):
                raise
            raise CaptureError(
                "an operator fails in a model whose layers hand each other parts of tensors",
                expected=f"code that goes with any tensor rank's part of {wholes}",
                got=" ".join(str(error).split()),
                do="if it does not fail in one process, let the tensor ranks divide these sizes, and the number of "
                "heads as well",
            ).with_traceback(error.__traceback__) from error


def _torchs_own(error: Exception) -> bool:
    """Whether torch raised it, rather than code of the user's."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(_TORCH)


_TORCH = Path(torch.__file__).parent


def part(size: Size, ranks: int, rank: int) -> tuple[Size, Size]:
    """How much of a size one of the ranks has, and where that begins. Plain formulas: whether a part is whole, cut
    short, or empty is asked, of all parts, so that every rank has a program for the same sizes."""
    return _parts(size, ranks)[rank]


def _parts(size: Size, ranks: int) -> list[tuple[Size, Size]]:
    most, found = (size + ranks - 1) // ranks, []
    for rank in range(ranks):
        begin = most * rank
        if rank == 0 or begin + most <= size:
            found.append((most, begin))
        else:
            found.append((size - begin, begin) if begin < size else (0, size))
        bool(found[-1][0] == 1)  # operators ask for that, of their own rank's
    return found


def _chunks(tensor: torch.Tensor, ranks: int, dim: int) -> list[torch.Tensor]:
    return [tensor.narrow(dim, begin, size) for size, begin in _parts(tensor.size(dim), ranks)]


def _filled_up(tensor: torch.Tensor, dim: int, missing: Size) -> torch.Tensor:
    """With zeros. No tensor is as small as what is missing, or there would be a program for each number of those."""
    if _key(missing) == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = shape[dim] + missing
    return tensor.new_zeros(shape).slice_scatter(tensor, dim, 0, tensor.size(dim))


@dataclass
class _Whole:
    """A size in parts, by rank. dims: the dimensions that have been as large."""

    size: Size
    parts: list[Size]
    dims: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{hint(self.size)} ({', '.join(str(hint(one)) for one in self.parts)})"

    @property
    def keys(self) -> set[Any]:
        return set(map(_key, self.parts))

    @property
    def equal(self) -> bool:
        return len(self.keys) == 1


class _Wholes:
    """Those whose parts became plain tensors, by mesh. A plain tensor is known as a part by its size."""

    def __init__(self) -> None:
        self._known: dict[DeviceMesh, list[_Whole]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def __str__(self) -> str:
        return _listed(one for known in self._known.values() for one in known)

    def note(self, tensor: DTensor, local: torch.Tensor) -> None:
        """Take note of a tensor whose part becomes a plain one."""
        mesh, dim = tensor.device_mesh, _split_dim(tensor.device_mesh, tensor.placements, tensor.dim())
        if dim is None:
            return
        size, ranks = tensor.shape[dim], mesh.size()
        if is_run_time(size):
            return
        known = self._known.setdefault(mesh, [])
        whole = next((one for one in known if _key(one.size) == _key(size)), None)
        if whole is None:
            divides = size % ranks == 0
            parts = [local.size(dim)] * ranks if divides else [length for length, _ in _parts(size, ranks)]
            whole = _Whole(size, parts)
            known.append(whole)
        whole.dims.add(dim)

    def shape_of(self, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[Size, ...] | None:
        """The shape of the whole, if a plain tensor is a part of one that does not divide; None if all parts are equal.

        A whole is refused if any rank's part of it could be one of another: by all ranks, for all know the same wholes.
        An equal part of one that nobody has seen may be as large as some rank's part here. It is not as large as this
        part on every rank, for those differ; so one rank raises, if it is taken for what it is not.
        """
        dim = _split_dim(mesh, placements, local.dim())
        if dim is None or mesh not in self._known:
            return None
        size, known = _key(local.size(dim)), self._known[mesh]
        found = _along(dim, [one for one in known if size in one.keys])
        if found:
            found = _along(dim, [one for one in known if not one.keys.isdisjoint(found[0].keys)])
        else:
            found = [one for one in known if not one.equal]
            if not any(_made_of(size, one) for one in found):
                return None
        if all(one.equal for one in found):
            return None
        own = mesh.get_local_rank()
        if len(found) != 1 or _key(found[0].parts[own]) != size:
            raise CaptureError(
                "a layer is handed a part of a tensor whose size does not tell how large the whole is",
                expected=f"a part of {_listed(found)}",
                got=f"{[hint(each) for each in local.shape]}, in parts along dimension {dim}, on tensor rank {own}",
                do="let layers hand on DTensors (use_local_output=False), or let the tensor ranks divide these sizes",
            )
        return (*local.shape[:dim], found[0].size, *local.shape[dim + 1 :])


def _along(dim: int, wholes: list[_Whole]) -> list[_Whole]:
    """Those that this dimension has been as large as, if there are any."""
    return [one for one in wholes if dim in one.dims] or wholes


def _listed(wholes: Iterable[_Whole]) -> str:
    return ", or of ".join(dict.fromkeys(map(str, wholes)))


def _dense(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * (1 if _key(size) == 0 else size))
    return tuple(reversed(strides))


def _split_dim(mesh: DeviceMesh, placements: Sequence[Any], dims: int) -> int | None:
    """Along which dimension a tensor is laid out, over a mesh of one axis; None if it is whole, or over several."""
    only = placements[0] if mesh.ndim == 1 and mesh.size() > 1 else None
    if type(only) is not Shard:
        return None
    return only.dim + dims if only.dim < 0 else only.dim


def _key(size: Size) -> Any:
    """What is equal for equal sizes, without asking."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _made_of(size: Any, whole: _Whole) -> bool:
    """Whether a formula is made of that of the parts, or is that of the whole, as no equal part is."""
    formula = _key(whole.parts[0])
    if not isinstance(size, sympy.Basic) or not isinstance(formula, sympy.Basic):
        return False
    return size == _key(whole.size) or size.has(*formula.atoms(FloorDiv))
