"""What the ranks of a pipeline exchange over their channels: each in a thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graphcomp.runtime.program.channel import Channel, PeerLate, PeerLost
from graphcomp.runtime.ranks.chain import Chain

Chains = list[Chain]


@pytest.fixture(params=[2, 3, 5])
def chains(request: pytest.FixtureRequest) -> Iterator[Chains]:
    ranks: int = request.param
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    after = [Channel(one, place + 1, 1.0) for place, (one, _) in enumerate(pairs)]
    before = [Channel(other, place, 1.0) for place, (_, other) in enumerate(pairs)]
    yield [
        Chain(place, before[place - 1] if place else None, after[place] if place < ranks - 1 else None, ranks)
        for place in range(ranks)
    ]
    for channel in (*after, *before):
        channel.close()


def together(chains: Chains, call: Callable[[Chain], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(chains)) as pool:
        return [pool.submit(call, chain) for chain in chains]


def test_sums_are_equal_bit_by_bit(chains: Chains) -> None:
    """Of numbers whose sum depends on the order; several times, as nobody waits for anybody in between."""
    vectors = [torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(c.place)) for c in chains]

    def add(chain: Chain) -> torch.Tensor:
        for _ in range(3):
            vector = vectors[chain.place].clone()
            chain.add(vector)
        return vector

    found = [one.result() for one in together(chains, add)]
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.allclose(found[0], torch.stack(vectors).sum(0), rtol=1e-12, atol=1e-12)


def test_rows_are_gathered_in_order(chains: Chains) -> None:
    largest = (1 << 62) - 1
    found = together(chains, lambda chain: chain.gather(torch.tensor([chain.place, largest - chain.place, -1])))
    expected = [[chain.place, largest - chain.place, -1] for chain in chains]
    assert [one.result().tolist() for one in found] == [expected] * len(chains)


@pytest.mark.parametrize("missing", [0, -1], ids=["the first", "the last"])
def test_nobody_comes_through_before_all_have_come(chains: Chains, missing: int) -> None:
    left = [chain for chain in chains if chain is not chains[missing]]
    for one in together(left, lambda chain: chain.add(torch.ones(2))):
        assert isinstance(one.exception(), PeerLate)


def test_a_rank_that_leaves_is_noticed_by_those_beside_it(chains: Chains) -> None:
    def run(chain: Chain) -> None:
        if chain is not chains[-1]:
            chain.add(torch.ones(2))
        elif chain.before is not None:
            chain.before.close()

    assert isinstance(together(chains, run)[-2].exception(), PeerLost)
