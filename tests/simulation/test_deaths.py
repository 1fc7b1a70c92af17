"""Members that die in the middle of a round: the others finish it, with the same bytes, from those who delivered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest
import torch

from shoal.averaging.round import traffic
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.state import RoundState
from shoal.errors import AllreduceException
from shoal.net.resumable import RESUME_SECONDS
from shoal.testing import Link, Network, run, start_averagers, start_step
from tests.drills import mostly_drills
from tests.simulation.deaths import (
    NOTICE_CRASH_SECONDS,
    NOTICE_SILENCE_SECONDS,
    check_survivors,
    deaths,
    run_round_with_deaths,
)
from tests.simulation.rounds import (
    STAGGER,
    WIDE_AREA,
    WINDOW,
    assert_same_bytes,
    own_value,
    run_round,
    when_all_average,
)

NO_LOSS = Link(delay=WIDE_AREA.delay, jitter=0.01)


@pytest.mark.parametrize("when", ["looking for a group", "all-reduce"])
@pytest.mark.parametrize("kind", ["crash", "power_off"])
@pytest.mark.parametrize("runs", mostly_drills([4, 10]))
def test_survivors_finish_the_round(runs, kind, when):
    first, last = (0.0, WINDOW) if when == "looking for a group" else (WINDOW - 0.2, WINDOW + STAGGER + 1)
    notice = NOTICE_CRASH_SECONDS if kind == "crash" else NOTICE_SILENCE_SECONDS
    size, dying, averaged = 8, 3, 0
    for seed in range(runs):
        members = run_round(seed, size, link=NO_LOSS, interfere=deaths(dying, first, last, kind))
        averaged += check_survivors(members, 2 * WINDOW + STAGGER + notice)
    assert averaged >= 0.9 * runs * (size - dying)


@pytest.mark.parametrize("after", mostly_drills([0.15, 0.0, 0.3]))
@pytest.mark.parametrize("count", [1, 2])
def test_silent_coordinators_are_paid_for_only_once(count, after):
    """The first ones in the order of coordinators fall silent, at some moment of the all-reduce."""
    died = []

    def interfere(network, members):
        loop = asyncio.get_running_loop()

        def silence(allreduce):
            died.append(loop.time())
            for index in allreduce.state.coordinators[:count]:
                network.host_of(allreduce.group.peer_ids[index]).power_off()

        when_all_average(members, lambda rounds: loop.call_later(after, silence, rounds[0]))

    members = run_round(1, 8, link=NO_LOSS, interfere=interfere)
    living = [member for member in members if member.host.is_up]
    assert len(living) == 8 - count
    silence = living[0].node.config.sender_timeout
    check_survivors(members, died[0] + silence + 2)  # for the ways there and back


@pytest.mark.parametrize(("sender_timeout", "reducer_timeout"), [(5.0, 10.0), (30.0, 60.0)])
def test_freezing_after_sending_costs_no_more(sender_timeout, reducer_timeout):
    """Of a reducer nobody waits for anything then but averages, for which the limit is longer."""
    frozen = []

    def interfere(network, members):
        loop = asyncio.get_running_loop()

        def look(rounds):
            victims = rounds[0].state.coordinators[::7]  # the one who would notice, and another one
            waiting = set().union(*(each.reducer.waiting_for for each in rounds if each.own_index not in victims))
            if waiting.intersection(victims):
                loop.call_later(0.001, look, rounds)
                return
            frozen.append(loop.time())
            for index in victims:
                network.host_of(rounds[0].group.peer_ids[index]).power_off()

        when_all_average(members, look)

    limits = {"sender_timeout": sender_timeout, "reducer_timeout": reducer_timeout}
    members = run_round(1, 8, link=NO_LOSS, interfere=interfere, **limits)
    living = [member for member in members if member.host.is_up]
    assert len(living) == 6
    assert all(member.result.failed_peers for member in living), "they have not got all averages of the frozen"
    check_survivors(members, frozen[0] + sender_timeout + 1)


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("after", mostly_drills([0.1, 0.6]))
def test_a_short_outage_costs_nothing(which, after):
    def interfere(network, members):
        loop = asyncio.get_running_loop()

        def cut(host):
            network.partition([host], [other for other in network.hosts if other is not host])
            loop.call_later(3.0, network.heal)

        def then(rounds):
            victim = rounds[0].group.peer_ids[rounds[0].state.coordinators[which]]
            loop.call_later(after, cut, network.host_of(victim))

        when_all_average(members, then)

    members = run_round(1, 6, link=NO_LOSS, interfere=interfere)
    assert all(member.result.share_averaged == 1 for member in members)
    assert_same_bytes(members)


@pytest.mark.parametrize("after", [0.3, 0.6])
def test_a_cancelled_coordinator_keeps_nobody_waiting(after):
    left = []

    def interfere(network, members):
        def then(rounds):
            [coordinator] = [m for m in members if m.node.p2p.peer_id == rounds[0].group.peer_ids[0]]
            left.append(coordinator)
            asyncio.get_running_loop().call_later(after, coordinator.step.cancel)

        when_all_average(members, then)

    members = run_round(1, 6, link=NO_LOSS, interfere=interfere)
    assert left[0].step.cancelled()
    others = [member for member in members if member is not left[0]]
    assert all(member.result.share_averaged == 1 for member in others)
    assert_same_bytes(others)


@pytest.mark.parametrize("seed", [83, 115])
def test_members_that_return_have_the_same_bytes(seed):
    """The others have averaged something again without it meanwhile."""
    members = run_round(seed, 8, link=Link(delay=WIDE_AREA.delay, jitter=0.05, break_rate=0.05))
    complete = [member for member in members if member.result.share_averaged == 1]
    assert len(complete) > 1
    assert_same_bytes(complete)


def lose_for_a_while(network, rounds, positions, seconds):
    """Cut members off; they notice only later that the coordinator has lost them, too."""
    [coordinator] = [each for each in rounds if each.own_index == 0]
    links = [next(iter(coordinator.calls[position].link.calls)).connection.stream for position in positions]
    lost = [link.other.host for link in links]
    pairs = [(host, other) for host in lost for other in network.hosts if other is not host]
    for one, other in pairs:
        network.set_link(one, other, Link(delay=0.05, dial_failure=1.0))
    for stream in [stream for host in lost for stream in host.streams if stream.other not in links]:
        stream.abort()
        stream.other.abort()
    for link in links:
        link.vanish()

    def come_back():
        for one, other in pairs:
            network.set_link(one, other, Link(delay=0.05))
            network.break_connections(one, other)

    asyncio.get_running_loop().call_later(seconds, come_back)


@pytest.mark.parametrize("is_kept", [True, False])
def test_returning_after_the_commit_averages_nothing_again(monkeypatch, is_kept):
    """They get the result, if it is kept; else what they lacked stays as it was: the others have something else."""
    if not is_kept:
        monkeypatch.setattr(RoundState, "some_may_return", False)

    def interfere(network, members):
        def then(rounds):
            loop = asyncio.get_running_loop()
            loop.call_later(0.36, lose_for_a_while, network, rounds, (1, 2), RESUME_SECONDS + 1)

        when_all_average(members, then)

    members = run_round(2, 7, link=Link(delay=0.05), interfere=interfere)
    whole = [member for member in members if member.result.share_averaged == 1]
    assert len(whole) == (7 if is_kept else 5)
    assert_same_bytes(whole)
    for member in members:
        if member not in whole:
            own = torch.tensor([own_value(member.index)]).item()
            assert set(member.values.tolist()) <= {own, whole[0].values[0].item()}, (
                "local values, or what the others have"
            )


def test_who_cannot_average_a_part_fails_alone(monkeypatch):
    """It is not the fault of whoever has sent the last values."""
    reduce = PartReducer.reduce

    def fail_sometimes(self, state, index):
        if self._local_index == 1 and index == 1:
            raise RuntimeError("can't allocate memory")
        reduce(self, state, index)

    monkeypatch.setattr(PartReducer, "reduce", fail_sometimes)
    members = run_round(1, 4, link=NO_LOSS)
    failed = [member for member in members if member.step.exception() is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].step.exception(), AllreduceException)
    assert "can't allocate memory" in str(failed[0].step.exception())
    others = [member for member in members if member not in failed]
    assert all(member.result.share_averaged == 1 for member in others)
    assert_same_bytes(others)


@pytest.mark.parametrize("kind", ["crash", "power_off"])
def test_later_phases_do_not_wait_for_the_dead(kind):
    seconds = []

    async def average(session, tensors, infos):
        loop = asyncio.get_running_loop()
        for phase in range(3):
            began = loop.time()
            await session.all_reduce(tensors, infos)
            if phase:
                seconds.append(loop.time() - began)

    def interfere(network, members):
        for member in members:
            member.node.average = average

        def then(rounds):
            host = network.host_of(rounds[0].group.peer_ids[2])
            asyncio.get_running_loop().call_later(0.35, getattr(host, kind))

        when_all_average(members, then)

    members = run_round(1, 6, link=NO_LOSS, interfere=interfere)
    assert sum(member.host.is_up for member in members) == 5
    assert len(seconds) == 2 * 5
    assert max(seconds) < 2.0


@pytest.mark.parametrize("seed", mostly_drills([28, 31, 39]))
def test_a_very_short_grace_splits_no_group(seed):
    link = Link(delay=WIDE_AREA.delay, jitter=0.03)
    members = run_round(seed, 8, link=link, quorum=5, quorum_grace=0.1)
    assert all(member.result.share_averaged == 1 for member in members)
    assert len({member.result.weights for member in members}) == 1
    assert_same_bytes(members)


def test_a_round_is_forgotten_when_it_is_over(monkeypatch):
    """Also if its members have several connections, for which there are time limits."""
    monkeypatch.setattr(traffic, "stripes_for", lambda round_trip, parts: 2)
    begin, vectors = AllReduce.__init__, []

    def note(self, *args, **options):
        begin(self, *args, **options)
        vectors.append(weakref.ref(self.vector))

    monkeypatch.setattr(AllReduce, "__init__", note)

    async def main():
        network = Network(NO_LOSS)
        tensors = [[torch.ones(64)] for _ in range(4)]
        nodes = await start_averagers(network, tensors, part_size_bytes=64, sender_timeout=30.0, reducer_timeout=60.0)
        await asyncio.gather(*(asyncio.wrap_future(start_step(network, node)) for node in nodes))
        await asyncio.sleep(5)

    run(main(), seed=1)
    gc.collect()
    assert len(vectors) == 4
    assert not any(vector() for vector in vectors)


@pytest.mark.parametrize("runs", mostly_drills([2, 8]))
def test_many_deaths_of_all_kinds_on_failing_links(runs):
    size, dying = 16, 8
    averaged = sum(run_round_with_deaths(seed, size, dying) for seed in range(runs))
    assert averaged >= 0.8 * runs * (size - dying)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_search_says_that_an_awaited_peer_cannot_be_called(is_awaited):
    """Otherwise the optimizer would learn much later that the search waits for a dead peer."""

    async def main() -> bool:
        network = Network(NO_LOSS)
        nodes = await start_averagers(network, [[torch.zeros(100)] for _ in range(3)], min_matchmaking_time=WINDOW)
        peers = [node.p2p.peer_id for node in nodes]
        steps = [start_step(network, node) for node in nodes]
        await asyncio.gather(*map(asyncio.wrap_future, steps))
        lost = asyncio.Event()
        # The dead one has promised to be there.
        start_step(network, nodes[1], scheduled_time=network.hosts[1].dht_time() + WINDOW)
        await asyncio.sleep(0.5)
        network.host_of(peers[1]).crash()
        step = start_step(network, nodes[0], scheduled_time=network.hosts[0].dht_time() + WINDOW)
        step.expect({peers[1] if is_awaited else peers[2]})
        step.on_loss = lost.set
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await lost.wait()
        step.cancel()
        return lost.is_set()

    assert run(main(), seed=1) is is_awaited
