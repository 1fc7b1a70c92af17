"""Groups of which some members are known better than by their own word."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging import RoundResult
from shoal.averaging.groups.search import GroupSearch
from shoal.averaging.messages import Code, JoinReply
from shoal.averaging.round.coordinator import Coordination
from shoal.net.transport import MOST
from shoal.p2p import PeerID
from shoal.testing import Link, Network, run, start_averagers, start_step
from tests.drills import mostly_drills

SECONDS = 5.0
LINK = Link(delay=(0.01, 0.1), jitter=0.01)


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


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_nobody_weighs_more_than_its_leader_can_believe(seed):
    averages, results, _ = one_round(seed, largest_weight=2.0)
    assert averages == pytest.approx([(0 + 1 + 2 * 2) / 4] * 3)
    for result in results:
        assert sorted(result.weights) == [1.0, 1.0, 2.0], "all reducers and all results say the same"


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_a_group_does_not_wait_for_those_whom_a_stranger_expects(seed):
    _, results, seconds = one_round(seed, expects=10**6)
    assert [len(result.peers) for result in results] == [3, 3, 3]
    assert seconds < SECONDS


def meet_newcomers(seed: int, members: int, newcomers: int) -> tuple[list[RoundResult | None], float]:
    """Members who know each other from rounds meet newcomers, who promise to start earlier, and whom nobody knows.

    Returns:
        What came of the round at each of them, and how many seconds it took.
    """

    async def main() -> tuple[list[RoundResult | None], float]:
        network, count = Network(LINK), members + newcomers
        tensors = [[torch.full((3000,), float(value))] for value in range(count)]
        nodes = await start_averagers(network, tensors, min_matchmaking_time=SECONDS)
        known = {node.p2p.peer_id for node in nodes[:members]}
        for node in nodes:
            is_member = node.p2p.peer_id in known
            node.trust.is_proven = lambda peer, is_member=is_member: peer in known or not is_member
        now, loop = network.hosts[0].dht_time(), asyncio.get_running_loop()
        started = loop.time()
        steps = [
            start_step(network, node, scheduled_time=now + 2 * SECONDS - index, expected_group_size=count)
            for index, node in enumerate(nodes)
        ]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        return [node.last_round for node in nodes], loop.time() - started

    return run(main(), seed=seed)


@pytest.mark.parametrize(("members", "newcomers"), [(3, 1), (1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("seed", mostly_drills(range(8), quick=3))
def test_newcomers_and_members_meet_although_members_do_not_know_them(members, newcomers, seed):
    results, seconds = meet_newcomers(seed, members, newcomers)
    assert [len(result.peers) for result in results] == [members + newcomers] * (members + newcomers)
    assert len({result.group_id for result in results}) == 1
    assert seconds < SECONDS, "nobody has waited for a promised time"


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_a_stranger_that_promises_to_start_first_is_not_asked_to_lead(seed, monkeypatch):
    """If strangers have wasted what time there is for them. Nobody changes plans because of it either."""
    outbid, went = GroupSearch._outbid_unfit_leaders, []
    monkeypatch.setattr(GroupSearch, "_outbid_unfit_leaders", lambda *args: went.append(outbid(*args)) or went[-1])

    async def main() -> tuple[list[RoundResult | None], int, float]:
        network, asked = Network(LINK), []
        nodes = await start_averagers(
            network, [[torch.zeros(3000)] for _ in range(4)], min_matchmaking_time=SECONDS, request_timeout=3.0
        )
        stranger = nodes[3]

        async def keep_silent(call, request, remote):
            asked.append(remote)
            await call.send(JoinReply(code=Code.ACCEPTED, expiration=float(MOST)))
            await asyncio.Event().wait()

        stranger.lanes[""].matchmaking.answer_join = keep_silent
        for node in nodes[:3]:
            node.trust.is_proven = node.trust.has_time_for = lambda peer: peer != stranger.p2p.peer_id
        now, loop = network.hosts[0].dht_time(), asyncio.get_running_loop()
        started = loop.time()
        first = start_step(network, stranger, scheduled_time=now + SECONDS)
        steps = [
            start_step(network, node, scheduled_time=now + SECONDS + 1, expected_group_size=3) for node in nodes[:3]
        ]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        first.cancel()
        return [node.last_round for node in nodes[:3]], len(asked), loop.time() - started

    results, asked, seconds = run(main(), seed=seed)
    assert [len(result.peers) for result in results] == [3, 3, 3]
    assert not asked
    assert not any(went), "it would not be let in as a follower"
    assert seconds < SECONDS


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_strangers_do_not_stand_for_members_that_are_on_their_way(seed):
    """Three peers that know each other wait for each other, however many others come first."""

    async def main() -> tuple[list[RoundResult | None], float]:
        network = Network(LINK)
        nodes = await start_averagers(network, [[torch.zeros(3000)] for _ in range(6)], min_matchmaking_time=SECONDS)
        members = {node.p2p.peer_id for node in nodes[:3]}
        for node in nodes[:3]:
            node.trust.is_proven = members.__contains__
        loop = asyncio.get_running_loop()
        began, when = loop.time(), network.hosts[0].dht_time() + SECONDS
        steps = []
        for index in (0, 3, 4, 5, 1, 2):
            node = nodes[index]
            await asyncio.sleep(0.5)
            # Nobody but the first one would lead.
            steps.append(start_step(network, node, scheduled_time=when + index))
            if index < 3:
                steps[-1].expect(members - {node.p2p.peer_id})
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        return [node.last_round for node in nodes], loop.time() - began

    results, seconds = run(main(), seed=seed)
    assert [len(result.peers) for result in results] == [6] * 6, "members are all there, and strangers are let in"
    assert seconds < SECONDS, "who is there need not wait for a promised time"


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_a_newcomer_that_is_waited_for_stands_for_itself(seed):
    async def main() -> tuple[list[RoundResult | None], float]:
        network = Network(LINK)
        nodes = await start_averagers(network, [[torch.zeros(3000)] for _ in range(4)], min_matchmaking_time=SECONDS)
        peers = {node.p2p.peer_id for node in nodes}
        for node in nodes[:3]:
            node.trust.is_proven = {each.p2p.peer_id for each in nodes[:3]}.__contains__
        loop = asyncio.get_running_loop()
        began, when = loop.time(), network.hosts[0].dht_time() + SECONDS
        steps = [start_step(network, node, scheduled_time=when + index) for index, node in enumerate(nodes)]
        for node, step in zip(nodes, steps, strict=True):
            step.expect(peers - {node.p2p.peer_id})
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        return [node.last_round for node in nodes], loop.time() - began

    results, seconds = run(main(), seed=seed)
    assert [len(result.peers) for result in results] == [4] * 4
    assert seconds < SECONDS


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_a_leader_that_claims_all_the_weight_has_no_more_than_others_see(seed):
    """Each reducer limits what it reduces itself: nobody's word is needed, and nobody is refused."""

    async def main() -> None:
        network = Network()
        tensors = [torch.full((3000,), float(value)) for value in range(4)]
        nodes = await start_averagers(network, [[tensor] for tensor in tensors], min_matchmaking_time=SECONDS)
        for node in nodes[:3]:
            node.trust.largest_weight = lambda peer: 20.0
        now = network.hosts[0].dht_time()
        steps = [
            start_step(
                network,
                node,
                scheduled_time=now + SECONDS + (0 if node is nodes[3] else 1 + index),
                weight=float(MOST) if node is nodes[3] else 10.0,
                expected_group_size=4,
            )
            for index, node in enumerate(nodes)
        ]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        for node, tensor in zip(nodes[:3], tensors, strict=False):
            weights = dict(zip(node.last_round.peers, node.last_round.weights, strict=True))
            assert weights[nodes[3].p2p.peer_id] == 20.0
            is_limited = torch.isclose(tensor, torch.tensor((0 + 10 + 20 + 3 * 20) / 50))
            assert is_limited.double().mean() > 0.5
            assert torch.all(is_limited | torch.isclose(tensor, torch.tensor(3.0))), "all but what it reduces itself"

    run(main(), seed=seed)


def test_a_coordinator_cannot_say_that_it_weighs_more_than_its_leader_allows(monkeypatch):
    """What a round counts decides what its members may claim next."""
    has_lied = []

    async def main() -> None:
        network = Network()
        nodes = await start_averagers(network, [[torch.zeros(3000)] for _ in range(3)], min_matchmaking_time=SECONDS)
        liar = nodes[2].p2p.peer_id
        honest = Coordination.final_weights

        def lie(self: Coordination) -> list[float]:
            weights = honest(self)
            if self.group.peer_ids[self.own] == liar:
                has_lied.append(True)
                weights[self.own] = float(MOST)
            return weights

        monkeypatch.setattr(Coordination, "final_weights", lie)
        for node in nodes:
            node.trust.largest_weight = lambda peer: 20.0
        while not has_lied:
            steps = [start_step(network, node, weight=10.0, expected_group_size=3) for node in nodes]
            await asyncio.gather(*map(asyncio.wrap_future, steps))
        for node in nodes[:2]:
            weights = dict(zip(node.last_round.peers, node.last_round.weights, strict=True))
            assert weights[liar] <= 20.0, "its limit, whatever it says"

    run(main(), seed=1)
    assert has_lied
