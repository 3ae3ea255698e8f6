"""The transport of `Plan(check="transfers")`: a fingerprint goes ahead of each transfer, and the receiver compares it.

It says what the sender is about to send: step, edge, microbatch, dtypes, shapes, and a checksum of each value. It goes
over the gloo side group, so the transfers themselves stay as they are. All but the checksums is compared before a
byte of the payload is taken, since a process group would write beyond the end of a buffer, or abort.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from graphcomp.errors import AgreementError
from graphcomp.runtime.program.instructions import Edge
from graphcomp.runtime.program.transport import ProcessTransport, ReceiveHandle, SendHandle, describe, payload

_TEXT, _SUMS = 1, 2
"""Tags of the two parts of a fingerprint."""

_HEADER = 1024
"""Bytes of the first part: a digest of the text, and as much of the text as there is room for."""

_DIGEST = hashlib.sha256().digest_size


def checksum(value: torch.Tensor) -> torch.Tensor:
    """One int64 of all bits of a tensor and their places: 0-dim, on its device, the same for every device and layout.

    Each 8 bytes and their place are mixed (the finaliser of SplitMix64; Steele, Lea, Flood, 2014) and added up.
    """
    flat = payload(value.detach()).reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    words = words + torch.arange(1, len(words) + 1, device=words.device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        words = (words ^ _shifted(words, shift)) * factor
    return (words ^ _shifted(words, 31)).sum()


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """To the right, without the sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


@dataclass
class Steps:
    """The number of the step that all transports of this process are in."""

    number: int = 0


class CheckedTransport:
    """A `ProcessTransport` whose transfers are announced and compared. Reads values back to the host.

    side: gloo, over all ranks. places: of each stage of the pipeline in it. Fingerprints are not among the messages.
    """

    def __init__(
        self, transport: ProcessTransport, side: dist.ProcessGroup, places: Sequence[int], steps: Steps
    ) -> None:
        self.transport, self.side, self.places, self.steps = transport, side, places, steps
        self._posted: dict[Edge, deque[_CheckedReceive]] = defaultdict(deque)

    @property
    def messages(self) -> int:
        return self.transport.messages

    @property
    def bytes_sent(self) -> int:
        return self.transport.bytes_sent

    def reset(self) -> None:
        self.transport.reset()
        self.steps.number += 1
        self._posted.clear()

    def send(self, edge: Edge, microbatch: int | None, values: Sequence[torch.Tensor]) -> SendHandle:
        parts, peer = {_TEXT: _header(self._text(edge, microbatch, values))}, self.places[edge.target]
        if values:
            parts[_SUMS] = _checksums(values)
        works = [self.side.send([part], peer, self._tag(edge, part_of)) for part_of, part in parts.items()]
        return _CheckedSend(self.transport.send(edge, microbatch, values), works, list(parts.values()))

    def post_receive(self, edge: Edge, microbatch: int | None, buffers: Sequence[torch.Tensor]) -> ReceiveHandle:
        """Receives nothing yet: what comes is looked at first."""
        receive = _CheckedReceive(self, edge, microbatch, buffers)
        self._posted[edge].append(receive)
        return receive

    def take_until(self, last: _CheckedReceive) -> None:
        """Take the transfers of an edge in the order in which they were posted, for so they are sent."""
        posted = self._posted[last.edge]
        while last.values is None:
            self._take(posted.popleft())

    def _take(self, receive: _CheckedReceive) -> None:
        edge, buffers, peer = receive.edge, receive.buffers, self.places[receive.edge.source]
        expected, header = self._text(edge, receive.microbatch, buffers), torch.empty(_HEADER, dtype=torch.uint8)
        self.side.recv([header], peer, self._tag(edge, _TEXT)).wait()
        if bytes(header[:_DIGEST].tolist()) != hashlib.sha256(expected.encode()).digest():
            raise self._differs("a transfer is not the one that was expected", receive, expected, _text_in(header))
        announced = torch.empty(len(buffers), dtype=torch.int64)
        if len(buffers):
            self.side.recv([announced], peer, self._tag(edge, _SUMS)).wait()
        receive.values = self.transport.post_receive(edge, receive.microbatch, buffers).wait()
        for number, (sent, got) in enumerate(zip(announced.tolist(), _checksums(receive.values).tolist(), strict=True)):
            if sent != got:
                raise self._differs(
                    f"value {number} of a transfer did not arrive as it was sent",
                    receive,
                    f"{_described(buffers[number])} with checksum {sent & _ALL:016x}",
                    f"checksum {got & _ALL:016x}",
                )

    def _tag(self, edge: Edge, part: int) -> int:
        """Two ranks may have several edges between them."""
        return (edge.source * len(self.places) + edge.target) * (_SUMS + 1) + part

    def _text(self, edge: Edge, microbatch: int | None, values: Sequence[torch.Tensor]) -> str:
        what = "a gradient of a shared parameter" if microbatch is None else f"microbatch {microbatch}"
        return f"step {self.steps.number}, edge {edge}, {what}: {', '.join(map(_described, values))}"

    def _differs(self, what: str, receive: _CheckedReceive, expected: str, got: str) -> AgreementError:
        edge, microbatch = receive.edge, receive.microbatch
        place = "" if microbatch is None else f", microbatch {microbatch}"
        return AgreementError(
            what,
            where=f"edge {edge} (from rank {self.places[edge.source]} to rank {self.places[edge.target]}){place}",
            expected=expected,
            got=got,
            do="look for what changes a value, or the order of sends, on either rank; if nothing of yours does, "
            "suspect the network or the memory",
        )


_ALL = (1 << 64) - 1


@dataclass(slots=True)
class _CheckedSend:
    payloads: SendHandle
    works: list[dist.Work]
    kept: list[torch.Tensor]

    def done(self) -> bool:
        return self.payloads.done() and all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.payloads.wait()


@dataclass(slots=True, eq=False)
class _CheckedReceive:
    transport: CheckedTransport
    edge: Edge
    microbatch: int | None
    buffers: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor] | None = field(default=None)

    def ready(self) -> bool:
        return True

    def wait(self) -> Sequence[torch.Tensor]:
        self.transport.take_until(self)
        return self.values or ()


def _described(value: torch.Tensor) -> str:
    return describe(value.shape, value.dtype)


def _checksums(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """On the host."""
    return torch.stack([checksum(value).cpu() for value in values]) if values else torch.empty(0, dtype=torch.int64)


def _header(text: str) -> torch.Tensor:
    content = (hashlib.sha256(text.encode()).digest() + text.encode())[:_HEADER]
    return torch.tensor(list(content.ljust(_HEADER, b"\0")), dtype=torch.uint8)


def _text_in(header: torch.Tensor) -> str:
    return bytes(header[_DIGEST:].tolist()).rstrip(b"\0").decode(errors="replace")
