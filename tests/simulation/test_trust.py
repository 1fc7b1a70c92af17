"""Groups of which some members are known better than by their own word."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging import RoundResult
from shoal.p2p import PeerID
from shoal.p2p.transport import MOST
from shoal.testing import Network, run, start_averagers, start_step

SECONDS = 5.0


def one_round(seed: int, *, largest_weight: float | None = None, expects: int = 3) -> tuple[list[float], list, float]:
    """The last of three members claims all the weight that it can, or expects more members than there are.

    Returns:
        The average at each of them, what came of the round, and how many seconds it took.
    """

    async def main() -> tuple[list[float], list[RoundResult | None], float]:
        network = Network()
        tensors = [torch.full((3000,), float(value)) for value in range(3)]
        nodes = await start_averagers(network, [[tensor] for tensor in tensors], min_matchmaking_time=SECONDS)
        stranger = nodes[2].p2p.peer_id

        def limit(peer: PeerID) -> float:
            return largest_weight if peer == stranger and largest_weight is not None else 10.0

        for node in nodes[:2]:
            node.trust.is_proven = lambda peer: peer != stranger
            node.trust.largest_weight = limit
        now, loop = network.hosts[0].dht_time(), asyncio.get_running_loop()
        started = loop.time()
        # The stranger would lead last.
        steps = [
            start_step(
                network,
                node,
                scheduled_time=now + SECONDS + index,
                weight=MOST if node is nodes[2] else 1.0,
                expected_group_size=expects if node is nodes[2] else 3,
            )
            for index, node in enumerate(nodes)
        ]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        return [tensor[0].item() for tensor in tensors], [node.last_round for node in nodes], loop.time() - started

    return run(main(), seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_weighs_more_than_its_leader_can_believe(seed):
    averages, results, _ = one_round(seed, largest_weight=2.0)
    assert averages == pytest.approx([(0 + 1 + 2 * 2) / 4] * 3)
    for result in results:
        assert sorted(result.weights) == [1.0, 1.0, 2.0], "all reducers and all results say the same"


@pytest.mark.parametrize("seed", range(5))
def test_a_group_does_not_wait_for_those_whom_a_stranger_expects(seed):
    _, results, seconds = one_round(seed, expects=10**6)
    assert [len(result.peers) for result in results] == [3, 3, 3]
    assert seconds < SECONDS
