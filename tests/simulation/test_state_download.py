"""Downloads from donors on slow, long links: all of them work until the end, and a slow one holds nobody up."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.testing import Link, Network, SharedTable, run, start_averager

RATE = 2.5e6
VALUES = 10**7
LIMIT = VALUES * 4 / RATE
"""Seconds that one donor needs for all of it."""


def seconds_from(*rates: float) -> float:
    """How long a newcomer downloads from donors that send so many bytes per second."""

    async def main() -> float:
        network, table = Network(Link(delay=0.03)), SharedTable()
        for rate in rates:
            donor = await start_averager(network.add_host(), [torch.arange(float(VALUES))], table)
            network.host_of(donor.p2p.peer_id).uplink = rate
            donor.state_sharing.set(allowed=True)
            await donor.state_sharing._declare(True)
        newcomer = await start_averager(network.add_host(), [torch.zeros(1)], table)
        began = asyncio.get_running_loop().time()
        state = await network.host_of(newcomer.p2p.peer_id).run(newcomer.state_sharing.download())
        assert state is not None
        assert torch.equal(state.tensors[0], torch.arange(float(VALUES)))
        return asyncio.get_running_loop().time() - began

    return run(main(), time_limit=100)


def test_three_donors_are_nearly_three_times_as_fast_as_one() -> None:
    alone = seconds_from(RATE)
    assert alone < LIMIT * 1.05
    assert seconds_from(RATE, RATE, RATE) < alone / 2.7


@pytest.mark.parametrize("slow", [RATE / 5, RATE / 20])
def test_a_slow_donor_holds_nobody_up(slow: float) -> None:
    assert seconds_from(RATE, RATE, slow) < LIMIT * RATE / (2 * RATE + slow) * 1.15
