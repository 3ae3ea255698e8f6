"""How messages travel between stages: over channels and process groups, or through a dictionary within one process.

A message is the ordered values of one boundary for one microbatch; each value is one payload. Both sides
derive number, dtypes and shapes from the same program, so only the bytes travel, and both know which way. An empty
value travels as one byte, so that the order of payloads never depends on sizes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from graphcomp.errors import AgreementError
from graphcomp.runtime.program.channel import Channel, Posted
from graphcomp.runtime.program.instructions import Edge

MOST_BYTES = 64 * 1024
"""Of a message that goes over a channel. Two of them and more are on their way in what a kernel keeps for a socket (208
KiB on Linux), so that a sender that is one message ahead needs no thread.
"""

# What every backend sends as it is; anything else travels as its bytes.
_PLAIN = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


class SendHandle(Protocol):
    """A send under way; it keeps the memory that is being sent."""

    def done(self) -> bool:
        """Whether it is known, without waiting, that the memory is no longer needed."""
        ...

    def wait(self) -> None: ...


class ReceiveHandle(Protocol):
    """A receive under way."""

    def ready(self) -> bool:
        """False if `wait` cannot return because another virtual rank has to go on first."""
        ...

    def wait(self) -> Sequence[torch.Tensor]:
        """The received values. On CUDA the current stream waits, not the host."""
        ...


class Transport(Protocol):
    """messages: payloads sent by this rank in this step; bytes_sent: their bytes."""

    @property
    def messages(self) -> int: ...

    @property
    def bytes_sent(self) -> int: ...

    def reset(self) -> None:
        """A new step begins: set the counters to 0."""
        ...

    def send(self, edge: Edge, microbatch: int | None, values: Sequence[torch.Tensor]) -> SendHandle: ...

    def post_receive(self, edge: Edge, microbatch: int | None, buffers: Sequence[torch.Tensor]) -> ReceiveHandle: ...


def payload(value: torch.Tensor) -> torch.Tensor:
    """The tensor that travels for a value: dense, and of a dtype that every backend can send. Shares memory
    if it can.
    """
    if value.dtype in _PLAIN and value.is_contiguous() and not value.is_neg() and value.numel():
        return value
    if value.is_complex() or value.dtype.is_floating_point:
        value = value.resolve_conj().resolve_neg()
    dense = value.contiguous()
    if not dense.numel():
        return torch.zeros(1, dtype=torch.uint8, device=value.device)
    return dense if dense.dtype in _PLAIN else dense.reshape(-1).view(torch.uint8)


def way(edge: Edge, ranks: Sequence[int] | Mapping[int, int]) -> tuple[bool, bool]:
    """Whether an edge goes up, to a lower stage; and back, to a rank on the other side than that stage is."""
    up = edge.source > edge.target
    return up, (ranks[edge.source] > ranks[edge.target]) != up


class ProcessTransport:
    """Messages over torch.distributed, and small ones on CPU over channels, where there are any.

    groups: two over the same ranks, one for activations and one for gradients. back: two more where a rank holds
    several stages, for activations that go to a lower rank and gradients that go to a higher one. With NCCL all that
    two ranks exchange over a group is done in one order on both; so it is of one kind and in one direction, and holds
    up nothing else (`streams.prove`). ranks: group rank of each stage. channels: by group rank, for `groups` and, with
    them, for `back`: the two directions of one are the two groups, in the same order.
    """

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        ranks: Sequence[int] | Mapping[int, int],
        back: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        channels: Mapping[int, Sequence[Channel]] | None = None,
    ) -> None:
        self.groups, self.ranks, self.back, self.channels = groups, ranks, back or groups, channels or {}
        self._routes: dict[tuple[Edge, int], _Route] = {}
        self.reset()

    def _route(self, edge: Edge, stage: int) -> _Route:
        """To the other end of an edge, a stage."""
        found = self._routes.get((edge, stage))
        if found is None:
            (up, back), peer = way(edge, self.ranks), self.ranks[stage]
            channels = self.channels.get(peer)
            group = (self.back if back else self.groups)[up]
            found = self._routes[edge, stage] = group, peer, None if channels is None else channels[back]
        return found

    def reset(self) -> None:
        self.messages = self.bytes_sent = 0

    def send(self, edge: Edge, microbatch: int | None, values: Sequence[torch.Tensor]) -> SendHandle:
        group, peer, channel = self._route(edge, edge.target)
        payloads = [payload(value) for value in values]
        size = sum(one.nbytes for one in payloads)
        self.messages += len(payloads)
        self.bytes_sent += size
        if channel is not None and _is_small(payloads, size):
            channel.send(payloads)
            return _SENT
        return _ProcessSend([group.send([one], peer, 0) for one in payloads], payloads)

    def post_receive(self, edge: Edge, microbatch: int | None, buffers: Sequence[torch.Tensor]) -> _ProcessReceive:
        group, peer, channel = self._route(edge, edge.source)
        # The payload of a dense, non-empty buffer shares its memory.
        payloads = [payload(buffer) for buffer in buffers]
        if channel is not None and _is_small(payloads, sum(one.nbytes for one in payloads)):
            return _ProcessReceive([channel.post(payloads)], buffers, payloads)
        return _ProcessReceive([group.recv([one], peer, 0) for one in payloads], buffers, payloads)


_Route = tuple[dist.ProcessGroup, int, Channel | None]
"""A group, the peer's rank in it, and the channel to that peer."""


def _is_small(payloads: Sequence[torch.Tensor], size: int) -> bool:
    return size <= MOST_BYTES and all(one.is_cpu for one in payloads)


class _Sent:
    """A send that needs its memory no longer."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_SENT = _Sent()


@dataclass(slots=True)
class _ProcessSend:
    works: list[dist.Work]
    kept: list[torch.Tensor]

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class _ProcessReceive:
    works: Sequence[dist.Work | Posted]
    buffers: Sequence[torch.Tensor]
    kept: list[torch.Tensor]

    def ready(self) -> bool:
        return True

    def wait(self) -> Sequence[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.buffers


class VirtualNetwork:
    """The messages between virtual ranks of one process: in order for each edge, as on a wire."""

    def __init__(self) -> None:
        self.messages: dict[Edge, deque[tuple[int | None, list[torch.Tensor]]]] = defaultdict(deque)


class VirtualTransport:
    """One virtual rank's end of a network. A received value is a copy, as it would be over a wire."""

    def __init__(self, network: VirtualNetwork) -> None:
        self.network = network
        self.reset()

    def reset(self) -> None:
        """What an earlier step left on the network, after an error, is dropped: no rank has begun yet."""
        self.messages = self.bytes_sent = 0
        for queue in self.network.messages.values():
            queue.clear()

    def send(self, edge: Edge, microbatch: int | None, values: Sequence[torch.Tensor]) -> SendHandle:
        dense = [value.contiguous() for value in values]
        self.messages += len(dense)
        self.bytes_sent += sum(max(1, value.nbytes) for value in dense)
        self.network.messages[edge].append((microbatch, dense))
        return _SENT

    def post_receive(self, edge: Edge, microbatch: int | None, buffers: Sequence[torch.Tensor]) -> _VirtualReceive:
        return _VirtualReceive(self.network.messages[edge], edge, microbatch, buffers)


@dataclass(slots=True)
class _VirtualReceive:
    queue: deque[tuple[int | None, list[torch.Tensor]]]
    edge: Edge
    microbatch: int | None
    buffers: Sequence[torch.Tensor]

    def ready(self) -> bool:
        return bool(self.queue)

    def wait(self) -> Sequence[torch.Tensor]:
        microbatch, values = self.queue.popleft()
        forms, planned = ([(one.shape, one.dtype) for one in tensors] for tensors in (values, self.buffers))
        if microbatch != self.microbatch or forms != planned:
            raise AgreementError(
                "a message is not the one that was expected",
                where=f"edge {self.edge}, microbatch {self.microbatch}",
                expected=(self.microbatch, [describe(*form) for form in planned]),
                got=(microbatch, [describe(*form) for form in forms]),
            )
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)
        return self.buffers


def describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """dtype and shape, for messages."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
