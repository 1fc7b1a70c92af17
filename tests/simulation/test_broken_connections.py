"""Connections that break in the middle of a round: nobody is lost, and the result is the same to the bit."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
import torch

from shoal.averaging import CenteredClip, ClipToMedianNorm
from shoal.averaging.control import LossCause
from shoal.averaging.round.coordinator import Recovery
from shoal.averaging.round.traffic import Delivery
from shoal.compression import Float16Compression, Uniform8BitQuantization
from shoal.errors import DialError
from shoal.net.resumable import MAX_RESUMES, RESUME_SECONDS, SILENT_SECONDS, ResumableCall, open_again
from shoal.testing import Link
from tests.drills import mostly_drills
from tests.simulation.breaking import AUX, CLIENT, NODE, SIZE, Broken, Interfere, at, cuts

KINDS = {
    "mean": {},
    "one call each": {"link": Link(delay=0.005)},
    "lossy codec": {"compression": Uniform8BitQuantization()},
    "half precision": {"compression": Float16Compression()},
    "half of the way": {"averaging_alpha": 0.5},
    "quorum": {"quorum": 3, "quorum_grace": 5.0},
    "robust": {"aggregation": CenteredClip(4.0)},
    "robust with norms": {"aggregation": ClipToMedianNorm()},
    "client": {"modes": (NODE, NODE, CLIENT, NODE)},
    "auxiliary": {"modes": (NODE, AUX, NODE, NODE)},
    "two": {"modes": (NODE, NODE)},
    "small": {"values": 64},
}


@functools.lru_cache
def calm(kind: str) -> Broken:
    """The same round without any trouble."""
    return Broken(**KINDS[kind])


@pytest.mark.parametrize("pair", mostly_drills([(1, 2), (0, 1), (2, 3)]))
def test_a_cut_costs_nothing_but_time(pair):
    """Also of the connections to the coordinator, which is the first one."""
    undisturbed, moments, resumed = calm("mean"), 10, 0
    for moment in range(moments):
        broken = Broken(cuts((moment * undisturbed.seconds / (moments - 2), *pair)))
        broken.check_like(undisturbed)
        resumed += broken.resumed
    assert resumed >= moments


@pytest.mark.parametrize("seeds", mostly_drills([1, 5]))
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_averaged(kind, seeds):
    undisturbed, resumed = calm(kind), 0
    size = len(undisturbed.modes)
    for seed in range(seeds):
        rng = random.Random(seed)
        broken = Broken(cuts((rng.uniform(0, undisturbed.seconds), *rng.sample(range(size), 2))), **KINDS[kind])
        broken.check_like(undisturbed)
        resumed += broken.resumed
    assert resumed or kind == "small", "no cut has hit anything"


@pytest.mark.parametrize("kind", mostly_drills(["mean", "one call each", "lossy codec"], quick=2))
def test_several_cuts_in_one_round(kind):
    undisturbed, count = calm(kind), 5
    for seed in range(2):
        rng = random.Random(seed)
        moments = [(rng.uniform(0, 1.5 * undisturbed.seconds), *rng.sample(range(SIZE), 2)) for _ in range(count)]
        Broken(cuts(*moments), **KINDS[kind]).check_like(undisturbed, count * 0.5)


@pytest.mark.slow_drill
def test_cuts_of_all_connections_over_long_links():
    """The cut is of all connections to it at one moment, as when its router starts anew."""
    link = Link(delay=0.1, jitter=0.01)
    undisturbed = Broken(link=link)
    for part in range(1, 5):
        moment = part * undisturbed.seconds / 4
        broken = Broken(cuts(*((moment, 1, other) for other in (0, 2, 3))), link=link)
        broken.check_like(undisturbed, 2.5)  # a handshake takes 0.6 s


@pytest.mark.parametrize("position", mostly_drills([0, 1, 3]))
def test_a_crash_is_a_death_at_once(position):
    """Its machine refuses the new connections. Also if its connections have broken before."""
    undisturbed = calm("mean")
    for part in (1, 2, 3):
        moment = part * undisturbed.seconds / 4
        crash = at(moment, lambda broken: broken.host_of(position).crash())
        cut_and_crash = cuts((moment, position, 2), then=lambda broken: broken.host_of(position).crash())
        for interfere in (crash, cut_and_crash):
            broken = Broken(interfere)
            assert len(broken.results) == SIZE - 1
            assert all(result.share_averaged == 1 for result in broken.results)
            causes = {broken.group[position]: LossCause.REFUSED}
            assert all(result.causes == causes for result in broken.results)
            # What the dead one had to average is averaged again.
            assert broken.seconds < 2 * undisturbed.seconds + 0.7


@pytest.mark.parametrize("position", mostly_drills([0, 1, 3]))
def test_a_member_that_vanishes_is_given_up_soon(position):
    undisturbed = calm("mean")
    for part in (1, 2, 3):
        others = [other for other in range(SIZE) if other != position]
        moment = part * undisturbed.seconds / 4
        broken = Broken(
            cuts(*((moment, position, other) for other in others), then=lambda b: b.host_of(position).power_off())
        )
        assert len(broken.results) == SIZE - 1
        assert all(result.share_averaged == 1 for result in broken.results)
        assert broken.seconds < 2 * undisturbed.seconds + 0.7 + RESUME_SECONDS


def away(one: int, other: int) -> Interfere:
    """Two members do not reach each other any more."""

    def part(broken):
        hosts = broken.host_of(one), broken.host_of(other)
        broken.network.partition(*([host] for host in hosts))
        broken.network.break_connections(*hosts)

    return part


@pytest.mark.parametrize("position", mostly_drills([1, 2, 3]))
@pytest.mark.parametrize("kind", ["mean", "one call each"])
def test_the_next_coordinator_has_the_result(kind, position):
    """It has averaged its parts without the coordinator, who has had them averaged again without it. Whoever comes when
    all have left lacks a share, and says so; so does the next one itself."""
    undisturbed, results = calm(kind), []
    for part in (0, 1, 2):
        broken = Broken(at(part * undisturbed.seconds / 4, away(0, position)), **KINDS[kind])
        whole = [
            tensor for tensor, result in zip(broken.tensors, broken.results, strict=True) if result.share_averaged == 1
        ]
        assert len(whole) >= SIZE - 1
        assert all(torch.equal(tensor, whole[0]) for tensor in whole)
        results += broken.results
    assert position == 1 or any(result.late for result in results)


def test_all_name_members_that_lost_each_other():
    """Both live, and all end with the same averages. Some of these lack somebody, and every result says so."""
    broken = Broken(at(calm("mean").seconds / 2, away(1, 2)))
    assert all(torch.equal(tensor, broken.tensors[0]) for tensor in broken.tensors)
    for node, step in zip(broken.nodes, broken.steps, strict=True):
        result, position = step.round, broken.group.index(node.p2p.peer_id)
        assert result.share_averaged == 1
        parted = {broken.group[1], broken.group[2]}
        missed = {broken.group[3 - position]} if position in (1, 2) else set()
        assert set(result.failed_peers) == missed
        assert set(result.left_out_peers) == parted - missed


def test_a_member_that_leaves_is_not_waited_for():
    undisturbed = calm("mean")
    moment = undisturbed.seconds / 2

    def leave(broken):
        [node] = [node for node in broken.nodes if node.p2p.peer_id == broken.group[2]]
        broken.steps[broken.nodes.index(node)].cancel()

    broken = Broken(at(moment, leave))
    results = [step.round for step in broken.steps if not step.cancelled()]
    assert [result.share_averaged for result in results] == [1] * (SIZE - 1)
    assert broken.seconds < 2 * undisturbed.seconds + 0.7


@pytest.mark.parametrize("kind", mostly_drills(["mean", "one call each"]))
@pytest.mark.parametrize("end_that_knows", [0, 1])
def test_a_break_that_one_side_notices(kind, end_that_knows):
    """The handler of the old call still lives when the sender begins anew, or the caller when its handler has died."""
    undisturbed, resumed = calm(kind), 0

    def break_one_end(broken):
        one, other = broken.host_of(1), broken.host_of(2)
        for stream in [stream for stream in one.streams if stream.other.host is other]:
            (stream, stream.other)[end_that_knows].vanish()

    for part in range(1, 8):
        broken = Broken(at(part * undisturbed.seconds / 8, break_one_end), **KINDS[kind])
        broken.check_like(undisturbed)
        resumed += broken.resumed
    assert resumed > 0


def sever(broken: Broken, one: int, other: int) -> None:
    """All connections between two members fall silent, also those that carry nothing at present."""
    first, second = broken.host_of(one), broken.host_of(other)
    for stream in [stream for stream in first.streams if stream.other.host is second]:
        stream.sever()


@pytest.mark.parametrize("kind", ["mean", "one call each", "client", "auxiliary", "two"])
@pytest.mark.parametrize("pair", mostly_drills([(0, 1), (1, 2), (0, 2)]))
def test_silent_connections_cost_seconds_and_no_member(kind, pair):
    """Nobody is told, as when a router forgets them. Those to the coordinator, the first one, are among them."""
    if max(pair) >= len(KINDS[kind].get("modes", range(SIZE))):
        pytest.skip("there is no such pair")
    undisturbed = calm(kind)
    for part in (1, 4, 7):
        broken = Broken(at(part * undisturbed.seconds / 8, lambda broken: sever(broken, *pair)), **KINDS[kind])
        broken.check_like(undisturbed, 8.0)


def test_all_connections_of_a_member_fall_silent():
    undisturbed = calm("mean")
    for position in (0, 1, 3):
        others = [other for other in range(SIZE) if other != position]

        def forget(broken, position=position, others=others):
            for other in others:
                sever(broken, position, other)

        Broken(at(undisturbed.seconds / 2, forget)).check_like(undisturbed, 8.0)


def test_waiting_is_not_silence():
    """One member is slow, and the others have nothing to send for a long time. No connection of theirs is cut."""

    def slow_down(broken):
        broken.host_of(2).uplink = 2.0**12

    broken = Broken(slow_down)
    broken.check_like(calm("mean"), 60.0)
    assert broken.seconds > 1.5 * SILENT_SECONDS
    assert not broken.resumed


def test_an_outage_cuts_no_connections():
    """The network is cut for a while: what is on its way comes when it is whole again, and nothing begins anew."""
    seconds = 2 * SILENT_SECONDS

    def interrupt(broken):
        broken.network.partition([broken.host_of(2)], [broken.host_of(other) for other in (0, 1, 3)])
        asyncio.get_running_loop().call_later(seconds, broken.network.heal)

    undisturbed = calm("mean")
    broken = Broken(at(0.75 * undisturbed.seconds, interrupt))
    broken.check_like(undisturbed, seconds + 1.0)
    assert not broken.resumed


@pytest.mark.parametrize("part", mostly_drills([0.6, 0.4, 0.8]))
def test_a_reducer_tells_a_sender_of_broken_calls(part):
    """The auxiliary makes no calls itself. Its end of a call is gone, and the sender writes into the void, or waits for
    averages that were on their way."""
    undisturbed = calm("auxiliary")
    missing = []

    def break_one_end(broken):
        position = broken.rounds[0].group.modes.index(AUX)
        host, other = broken.host_of(position), broken.host_of((position + 1) % SIZE)
        missing.append(bool(broken.round_of(position).calls[(position + 1) % SIZE].contents.parts_in.missing))
        for stream in [stream for stream in host.streams if stream.other.host is other]:
            stream.vanish()

    broken = Broken(at(part * undisturbed.seconds, break_one_end), **KINDS["auxiliary"])
    broken.check_like(undisturbed, 2.0)
    assert broken.resumed > 0
    assert missing == [part < 0.5], "parts, or averages alone"


@pytest.mark.parametrize("lives", [True, False])
def test_a_sender_that_is_done_is_not_lost(monkeypatch, lives):
    """It has delivered everything and holds all averages, but its last word was lost, and it finds no way back."""
    send_parts, traffics, stranded, told = Delivery.send_parts, [], [], []

    async def withhold_the_last_word(self, call):
        if self._traffic not in traffics:
            return await send_parts(self, call)
        stranded.append(self)
        await self._traffic.send(call, self._traffic.parts_out, self._stripes)
        await asyncio.Event().wait()

    def find_no_way(open_call, life):
        if life in stranded:
            raise DialError("no relay knows it")
        return open_again(open_call, life)

    monkeypatch.setattr(Delivery, "send_parts", withhold_the_last_word)
    monkeypatch.setattr("shoal.averaging.round.traffic.open_again", find_no_way)

    def cut_when_all_is_there(broken):
        vector, reducer = broken.round_of(1).vector, broken.round_of(2).reducer
        if vector.held[2] < len(vector.parts[2]):
            asyncio.get_running_loop().call_later(0.01, cut_when_all_is_there, broken)
            return
        told.append(1 in reducer.waiting_for)
        broken.network.break_connections(broken.host_of(1), broken.host_of(2))
        if not lives:
            broken.host_of(1).crash()

    def begin(broken):
        traffics.append(broken.round_of(1).calls[2].contents)
        cut_when_all_is_there(broken)

    broken = Broken(begin)
    assert told == [True]
    assert [len(result.failed_peers) for result in broken.results] == ([0] * SIZE if lives else [1] * (SIZE - 1))
    assert all(result.share_averaged == 1 for result in broken.results)


def test_restarts_of_an_exchange_are_limited(monkeypatch):
    """It is given up, and the others finish without it."""
    undisturbed, keep_calling = calm("mean"), ResumableCall.keep_calling
    hostile: list[ResumableCall] = []

    async def restless(self, make_calls):
        async def make_and_break(generation):
            making = asyncio.ensure_future(make_calls(generation))
            await asyncio.wait([making], timeout=0.3)
            if self in hostile:
                making.cancel()
                await asyncio.wait([making])
                self._advance(generation + 1)
            await making

        await keep_calling(self, make_and_break)

    monkeypatch.setattr(ResumableCall, "keep_calling", restless)

    def begin(broken):
        hostile.extend(broken.round_of(1).calls.values())

    settings = {"sender_timeout": 5.0, "reducer_timeout": 10.0}
    broken = Broken(begin, **settings)
    sides = zip(broken.nodes, broken.steps, strict=True)
    others = [step.round for node, step in sides if node.p2p.peer_id != broken.group[1]]
    assert [result.share_averaged for result in others] == [1] * (SIZE - 1)
    assert broken.resumed <= 2 * SIZE * (MAX_RESUMES + 1)
    assert undisturbed.seconds < broken.seconds < 30


def test_cuts_during_a_recovery(monkeypatch):
    undisturbed, recoveries, rounds = calm("mean"), [], []
    execute = Recovery.run

    async def cut_and_run(self):
        recoveries.append(self)
        if len(recoveries) == 1:
            cuts((0.1, 0, 2))(rounds[0])
        return await execute(self)

    monkeypatch.setattr(Recovery, "run", cut_and_run)

    def crash(broken):
        rounds.append(broken)
        broken.host_of(1).crash()

    broken = Broken(at(undisturbed.seconds / 2, crash))
    assert len(recoveries) > 1
    assert [result.share_averaged for result in broken.results] == [1] * (SIZE - 1)
    assert all(len(result.failed_peers) == 1 for result in broken.results)
    living = [tensor for tensor, host in zip(broken.tensors, broken.hosts, strict=True) if host.is_up]
    assert all(torch.equal(tensor, living[0]) for tensor in living)
