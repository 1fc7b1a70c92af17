"""Members that fail in every round, without ever leaving: what they cost, and how they come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from shoal.averaging.control import AveragingMode, AveragingStage
from shoal.averaging.groups import matchmaking
from shoal.averaging.groups.search import GroupSearch
from shoal.averaging.node import AveragerNode
from shoal.averaging.round import sending
from shoal.averaging.round.coordinator import Coordinator
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.traffic import Traffic
from shoal.p2p import PeerID
from shoal.peers.book import FAILURES_TO_LOSE_SHARE, SHARE_WASTED
from shoal.testing import Network, SharedTable, run, start_averager, start_averagers, start_step
from tests.drills import mostly_drills

MEMBERS, VALUES = 4, 4000
SENDER_TIMEOUT, REDUCER_TIMEOUT = 5.0, 10.0
FAST = 2.0
WINDOW = 5.0


@dataclass
class Watched:
    """What happens in the groups, and who misbehaves."""

    withholding: set[PeerID] = field(default_factory=set)
    """They say that they live, take parts, and give no averages."""
    never_starting: set[PeerID] = field(default_factory=set)
    """They accept followers, and start no group."""
    never_ending: set[PeerID] = field(default_factory=set)
    """They coordinate rounds, and end none."""
    groups: list[tuple[PeerID, dict[PeerID, int]]] = field(default_factory=list)
    """Leader and shares of each."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched()
    begin_stripe, describe_group, may_start, commit = (
        AllReduce.begin_stripe,
        matchmaking.describe_group,
        GroupSearch.may_start,
        Coordinator.commit,
    )

    def begin(self, sender, begin):
        intake = begin_stripe(self, sender, begin)
        if self.group.peer_ids[self.own_index] in watched.withholding:
            intake.give_averages = lambda call: asyncio.Event().wait()
        return intake

    def describe(p2p, *args):
        start = describe_group(p2p, *args)
        watched.groups.append((p2p.peer_id, {PeerID(each.peer.peer_id): each.share for each in start.members}))
        return start

    def may(self, now):
        return self.own not in watched.never_starting and may_start(self, now)

    async def end(self, action):
        if self.state.own.peer_id in watched.never_ending:
            await asyncio.Event().wait()
        await commit(self, action)

    monkeypatch.setattr(Coordinator, "commit", end)
    monkeypatch.setattr(AllReduce, "begin_stripe", begin)
    monkeypatch.setattr(matchmaking, "describe_group", describe)
    monkeypatch.setattr(GroupSearch, "may_start", may)
    return watched


async def make_swarm(
    network: Network, members: int = MEMBERS, values: int = VALUES, **settings: float
) -> tuple[list[AveragerNode], list[torch.Tensor]]:
    tensors = [torch.full((values,), float(value)) for value in range(members)]
    nodes = await start_averagers(
        network,
        [[tensor] for tensor in tensors],
        min_matchmaking_time=WINDOW,
        request_timeout=3.0,
        sender_timeout=SENDER_TIMEOUT,
        reducer_timeout=REDUCER_TIMEOUT,
        part_size_bytes=1000,
        **settings,
    )
    return nodes, tensors


async def average(
    network: Network, nodes: list[AveragerNode], first: AveragerNode | None = None, *, timed: int | None = None
) -> float:
    """All of them make a step; returns how many seconds it took.

    Args:
        first: the one that promises to start before all others, so that it should lead.
        timed: it counts how long it took so many of them; ``None``: all.
    """
    loop, now = asyncio.get_running_loop(), network.hosts[0].dht_time()
    began_at = loop.time()
    steps = [
        start_step(
            network,
            node,
            scheduled_time=now + WINDOW + (0 if node is first else 1 + 0.1 * index),
            expected_group_size=len(nodes),
        )
        for index, node in enumerate(nodes)
    ]
    work = [asyncio.wrap_future(step) for step in steps]
    await asyncio.gather(*work[:timed], return_exceptions=True)
    seconds = loop.time() - began_at
    await asyncio.gather(*work, return_exceptions=True)
    return seconds


@pytest.mark.parametrize("seed", mostly_drills(range(5)))
@pytest.mark.parametrize("wants_to_lead", [False, True])
def test_who_withholds_averages_soon_reduces_nothing(watched, caplog, seed, wants_to_lead):
    caplog.set_level(logging.WARNING)
    rounds = 12

    async def main() -> None:
        network = Network()
        nodes, tensors = await make_swarm(network)
        liar = nodes[3].p2p.peer_id
        watched.withholding.add(liar)
        seconds = []
        for _ in range(rounds):
            for index, tensor in enumerate(tensors):
                tensor.fill_(index)
            seconds.append(await average(network, nodes, nodes[3] if wants_to_lead else None))
            assert {tensor[0].item() for tensor in tensors[:3]} == {1.5}, "what it withholds is averaged again"
            for node in nodes[:3]:
                assert len(node.last_round.peers) == MEMBERS, "it is a member as before"
        assert min(seconds[:2]) >= REDUCER_TIMEOUT
        assert max(seconds) < REDUCER_TIMEOUT + FAST, "the liar, who may coordinate, is told that it was given up"
        assert max(seconds[FAILURES_TO_LOSE_SHARE:]) < FAST, f"{seconds}"
        for leader, shares in watched.groups[FAILURES_TO_LOSE_SHARE:]:
            assert leader != liar
            assert shares[liar] == 0
        for node in nodes[:3]:
            deeds = node.p2p.metrics.peers[str(liar)]
            assert deeds.came > deeds.delivered + 2
            assert deeds.excluded > 2
            assert node.p2p.metrics.troubles["reducers without a share"] == 1
            assert node.p2p.behaviour.has_delivered(nodes[(nodes.index(node) + 1) % 3].p2p.peer_id)
        named = [record for record in caplog.records if f"averages of peer {liar}" in record.getMessage()]
        assert len(named) == 3, "each honest member tells its user, once"

        # It behaves again.
        watched.withholding.clear()
        watched.groups.clear()
        await asyncio.sleep(2 * REDUCER_TIMEOUT / SHARE_WASTED)
        seconds = [await average(network, nodes) for _ in range(4)]
        assert max(seconds) < FAST
        shares = [shares[liar] for _, shares in watched.groups]
        assert 0 < shares[0] < VALUES // MEMBERS
        assert shares[-1] == VALUES // MEMBERS
        assert all(node.p2p.behaviour.may_lead(liar) for node in nodes)

    run(main(), seed=seed, time_limit=3000)


@pytest.mark.parametrize("seed", mostly_drills(range(5)))
@pytest.mark.parametrize("clients", [0, 1])
def test_who_coordinates_and_ends_no_round_does_so_once(watched, caplog, seed, clients):
    """It lives, and has all averages. So the others could wait for it as long as it likes."""

    async def main() -> None:
        network = Network()
        nodes, tensors = await make_swarm(network)
        if clients:
            nodes[0].lanes[""].matchmaking.settings.mode = AveragingMode.CLIENT
        liar, honest, seconds = nodes[3].p2p.peer_id, nodes[:3], []
        watched.never_ending.add(liar)
        nodes[3].config.allreduce_timeout = 2 * REDUCER_TIMEOUT  # it gives itself up, too
        for _ in range(12):
            for index, tensor in enumerate(tensors):
                tensor.fill_(index)
            seconds.append(await average(network, nodes, timed=len(honest)))
            assert {tensor[0].item() for tensor in tensors[:3]} == {1.5}
            assert all(len(node.last_round.peers) == MEMBERS for node in honest), "it is a member as before"
        assert sum(each > FAST for each in seconds) == clients, f"who reduces knows that all have all: {seconds}"
        await asyncio.sleep(2 * REDUCER_TIMEOUT)
        assert not any(node.p2p.behaviour.may_lead(liar) for node in honest)
        assert not sum(map(len, (node.rounds for node in honest))), "no round goes on"

    run(main(), seed=seed, time_limit=10_000)
    assert "that was complete" in caplog.text


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_who_withholds_a_small_vector_does_so_once(watched, seed):
    """One member reduces all of it. The others have a share, but no part of it, and show nothing by that."""

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network, values=64)
        watched.withholding.add(nodes[3].p2p.peer_id)
        seconds = [await average(network, nodes, nodes[3]) for _ in range(12)]
        assert sum(each >= REDUCER_TIMEOUT for each in seconds) == 1, f"{seconds}"
        assert all(node.p2p.behaviour.share_of(nodes[3].p2p.peer_id) == 0.5 for node in nodes[:3])

    run(main(), seed=seed, time_limit=3000)


@pytest.mark.parametrize("wants_to_lead", [False, True])
def test_of_two_one_may_withhold(watched, wants_to_lead):
    async def main() -> None:
        network = Network()
        nodes, tensors = await make_swarm(network, members=2)
        watched.withholding.add(nodes[1].p2p.peer_id)
        seconds = [await average(network, nodes, nodes[1] if wants_to_lead else None) for _ in range(6)]
        assert max(seconds[FAILURES_TO_LOSE_SHARE:]) < FAST, f"{seconds}"
        for index, tensor in enumerate(tensors):
            tensor.fill_(index)
        await average(network, nodes, nodes[1] if wants_to_lead else None)
        assert [tensor[0].item() for tensor in tensors] == [0.5, 0.5]

    run(main(), seed=1, time_limit=3000)


def test_rounds_that_are_cut_short_teach_too(watched):
    """The time for the whole round is over before a reducer is given up."""

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network, allreduce_timeout=0.9 * REDUCER_TIMEOUT)
        watched.withholding.add(nodes[3].p2p.peer_id)
        seconds = [await average(network, nodes) for _ in range(FAILURES_TO_LOSE_SHARE + 1)]
        assert seconds[0] > FAST
        assert seconds[-1] < FAST, f"{seconds}"
        assert watched.groups[-1][1][nodes[3].p2p.peer_id] == 0

    run(main(), seed=1, time_limit=3000)


def test_who_sends_so_slowly_that_rounds_are_cut_short_is_blamed_and_those_who_wait_are_not(watched, monkeypatch):
    """It gives averages, and takes almost as long for each piece as a member may: it is not given up before."""
    monkeypatch.setattr(sending, "BUNDLE_BYTES", 1000)

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network, allreduce_timeout=REDUCER_TIMEOUT)
        honest, slow, send = nodes[:3], nodes[3], Traffic.send

        async def send_slowly(self, call, usual, calls):
            is_slow = any(each.allreduce.vector is self.vector for each in slow.rounds.running.values())
            while is_slow and usual is self.parts_out and not usual.is_taken:
                await asyncio.sleep(0.8 * SENDER_TIMEOUT)
                await usual.send_next(call)
            await send(self, call, usual, calls)

        monkeypatch.setattr(Traffic, "send", send_slowly)
        for _ in range(2):
            await average(network, nodes, timed=3)
        for each in honest:
            memory = each.p2p.behaviour
            assert all(memory.may_lead(other.p2p.peer_id) for other in honest)
            assert {memory.share_of(other.p2p.peer_id) for other in honest} == {1.0}
            assert memory.share_of(slow.p2p.peer_id) == 0.25
            assert not memory.may_lead(slow.p2p.peer_id)
        await average(network, nodes, timed=3)
        for _ in range(3):
            assert await average(network, nodes, timed=3) < FAST
            assert {node.last_round.peers for node in honest} == {honest[0].last_round.peers}
            assert slow.p2p.peer_id not in honest[0].last_round.peers

    run(main(), seed=1, time_limit=3000)


@pytest.mark.slow_drill
def test_who_goes_on_withholding_is_tried_ever_more_seldom(watched):
    """After the first rounds, the steps in which it fails again take a small part of the time."""

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network)
        watched.withholding.add(nodes[3].p2p.peer_id)
        for _ in range(FAILURES_TO_LOSE_SHARE):
            await average(network, nodes)
        began_at, slow = asyncio.get_running_loop().time(), 0.0
        while asyncio.get_running_loop().time() < began_at + 3000:
            seconds = await average(network, nodes)
            slow += seconds if seconds > FAST else 0.0
            await asyncio.sleep(30)
        assert 0 < slow < 2 * SHARE_WASTED * 3000 / 2

    run(main(), seed=1, time_limit=10_000)


@pytest.mark.parametrize("seed", mostly_drills(range(5)))
@pytest.mark.parametrize("is_silent", [False, True])
def test_who_accepts_and_never_starts_does_not_lead(watched, monkeypatch, seed, is_silent):
    send_away = GroupSearch._send_away
    if is_silent:
        monkeypatch.setattr(
            GroupSearch,
            "_send_away",
            lambda self, *args: () if self.own in watched.never_starting else send_away(self, *args),
        )

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network)
        silent = nodes[3].p2p.peer_id
        watched.never_starting.add(silent)
        seconds = [await average(network, nodes, nodes[3]) for _ in range(8)]
        # Not all of the others follow it in each round, so some learn a round later.
        assert max(seconds[FAILURES_TO_LOSE_SHARE + 1 :]) < FAST, f"{seconds}"
        assert all(len(node.last_round.peers) == MEMBERS for node in nodes), "it follows others"
        assert all(node.p2p.metrics.troubles["leaders not followed"] == 1 for node in nodes[:3])

    run(main(), seed=seed, time_limit=3000)


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_two_that_would_not_follow_each_other_still_meet_where_a_third_leads(seed):
    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network)
        for one, other in ((nodes[1], nodes[2]), (nodes[2], nodes[1])):
            for _ in range(FAILURES_TO_LOSE_SHARE):
                one.p2p.behaviour.note_lead(other.p2p.peer_id, 60.0, started=False)
        assert await average(network, nodes, nodes[0]) < FAST
        assert all(len(node.last_round.peers) == MEMBERS for node in nodes)

    run(main(), seed=seed)


@pytest.mark.parametrize("seed", mostly_drills(range(5)))
def test_two_that_would_not_follow_each_other_have_nobody_else(seed):
    """Their line has failed again and again, for both of them."""

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network, members=2)
        for one, other in (nodes, reversed(nodes)):
            for _ in range(2 * FAILURES_TO_LOSE_SHARE):
                one.p2p.behaviour.note_lead(other.p2p.peer_id, 60.0, started=False)
                one.p2p.behaviour.note_round([other.p2p.peer_id], [], [], {other.p2p.peer_id: 60.0}, 60.0)
        for _ in range(3):
            assert await average(network, nodes) < FAST
            assert all(len(node.last_round.peers) == 2 for node in nodes)

    run(main(), seed=seed)


def test_a_client_has_no_choice():
    async def main() -> None:
        network, table = Network(), SharedTable()
        nodes = [
            await start_averager(
                network.add_host(), [torch.ones(VALUES)], table, mode=mode, min_matchmaking_time=WINDOW
            )
            for mode in (AveragingMode.NODE, AveragingMode.CLIENT)
        ]
        for _ in range(FAILURES_TO_LOSE_SHARE):
            nodes[1].p2p.behaviour.note_lead(nodes[0].p2p.peer_id, 60.0, started=False)
        assert await average(network, nodes) < FAST
        assert all(len(node.last_round.peers) == 2 for node in nodes)

    run(main(), seed=1)


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_peers_in_the_middle_of_their_batches_do_not_blame_each_other(seed):
    """Both have joined in advance and wait for a third peer. Neither is ready itself, so neither loses any time."""

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network, members=2)
        steps = [start_step(network, node, timeout=200.0, expected_group_size=3) for node in nodes]
        for step in steps:
            step.keep_open = True
        await asyncio.sleep(20 * WINDOW)
        loop = asyncio.get_running_loop()
        released_at = loop.time()
        for step in steps:
            step.expected_group_size = 2
            step.keep_open = False
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        assert loop.time() - released_at < FAST
        assert [node.p2p.metrics.troubles for node in nodes] == [{}, {}]

    run(main(), seed=seed, time_limit=3000)


@pytest.mark.parametrize("seed", mostly_drills(range(10), quick=3))
def test_a_member_that_comes_late_to_its_round_accuses_nobody(seed):
    """It was in the middle of a batch. The first peer has given it up meanwhile, and the others have not."""

    async def main() -> None:
        network = Network()
        nodes, _ = await make_swarm(network, members=3, values=30)
        steps = [start_step(network, node, triggered=index == 0) for index, node in enumerate(nodes)]
        while any(step.stage < AveragingStage.AWAITING_TRIGGER for step in steps[1:]):
            await asyncio.sleep(0.1)
        await asyncio.sleep(SENDER_TIMEOUT / 2)
        steps[1].allow_allreduce()
        await asyncio.sleep(SENDER_TIMEOUT)
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        steps[2].allow_allreduce()
        await asyncio.gather(*map(asyncio.wrap_future, steps), return_exceptions=True)
        assert loop.time() - came_at < SENDER_TIMEOUT
        for step in steps[1:]:
            # Where the others have ended the round, the latecomer notices it at once. No time is lost to the first one.
            has_result = step.exception() is None and step.round.duration > FAST
            assert not has_result or nodes[0].p2p.peer_id not in step.round.seen_failing

    run(main(), seed=seed, time_limit=3000)
