"""One averaging round of many peers on a simulated network, and what came of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.averaging.control import RoundResult, StepControl
from shoal.averaging.node import AveragerNode
from shoal.testing import Host, Link, Network, SharedTable, run, start_averagers, start_step

WINDOW = 5.0
"""Seconds for which groups are open."""
STAGGER = 1.0
"""Seconds within which all peers begin."""
TABLE_DELAY = 0.15
PART_BYTES = 64
VALUES_PER_MEMBER = 32
WIDE_AREA = Link(delay=(0.02, 0.15), jitter=0.01, dial_failure=0.01)


@dataclass
class Member:
    """One peer of the round.

    Attributes:
        index: among all peers; its values are ``2 ** index`` before the round.
        values: what it has afterwards.
        step: its step.
        ended: loop time at which the step ended.
    """

    index: int
    node: AveragerNode
    host: Host
    values: torch.Tensor
    step: StepControl | None = None
    ended: float = 0.0

    @property
    def result(self) -> RoundResult:
        """Of a successful round."""
        assert self.step is not None
        self.step.result()  # raises what the step raised
        assert self.step.round is not None
        return self.step.round

    @property
    def group_size(self) -> int:
        return len(self.result.peers)


Interfere = Callable[[Network, list[Member]], None]
"""Called when all members exist, before they begin."""


def run_round(seed: int, size: int, *, link: Link = WIDE_AREA, interfere: Interfere | None = None) -> list[Member]:
    """Let peers begin a step at about the same time, and wait until all living ones are done."""

    async def main() -> list[Member]:
        network = Network(link)
        tensors = [torch.full((size * VALUES_PER_MEMBER,), float(2**index)) for index in range(size)]
        table = SharedTable(TABLE_DELAY)
        settings = {"min_matchmaking_time": WINDOW, "part_size_bytes": PART_BYTES}
        nodes = await start_averagers(network, [[tensor] for tensor in tensors], table, **settings)
        members = [
            Member(index, node, network.host_of(node.p2p.peer_id), tensor)
            for index, (node, tensor) in enumerate(zip(nodes, tensors, strict=True))
        ]
        if interfere is not None:
            interfere(network, members)
        await asyncio.gather(*(_take_part(network, member) for member in members))
        return members

    return run(main(), seed=seed, time_limit=600)


async def _take_part(network: Network, member: Member) -> None:
    await asyncio.sleep(STAGGER * network.rng.random())
    if not member.host.is_up:
        return
    member.step = start_step(network, member.node, timeout=3 * WINDOW)
    await asyncio.wait([asyncio.wrap_future(member.step)])
    member.ended = asyncio.get_running_loop().time()


def contributors(mean: float, size: int) -> frozenset[int]:
    """Whose values a mean is made of, given that member ``i`` had ``2 ** i``.

    Raises:
        AssertionError: it is not the mean of any of them.
    """
    return _contributors(mean, size)


@functools.cache
def _contributors(mean: float, size: int) -> frozenset[int]:
    for count in range(1, size + 1):
        total = round(mean * count)
        if abs(mean * count - total) <= 1e-6 * total and total.bit_count() == count and total < 2**size:
            return frozenset(index for index in range(size) if total >> index & 1)
    raise AssertionError(f"{mean} is not the mean of different powers of two below 2 ** {size}")


def contributors_of_all_values(member: Member, size: int) -> list[frozenset[int]]:
    """For every value that a member has after the round."""
    return [contributors(value, size) for value in member.values.tolist()]


def assert_same_bytes(members: Sequence[Member]) -> None:
    first = members[0].values
    assert all(torch.equal(member.values, first) for member in members)
