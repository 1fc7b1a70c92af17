"""Swarms in which the clocks of some machines are off: they live by one time all the same."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Sequence

import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import ValidationError
from shoal.p2p import P2P
from shoal.testing import Host, Link, Network, VirtualTimeLoop, run
from tests.dht.members import Authority, Member
from tests.drills import mostly_drills
from tests.simulation.training import Course, Swarm

WIDE_AREA = Link(delay=(0.01, 0.1), jitter=0.02)
MINUTES = 60.0
FRIENDS = 3
SAME_TIME = 0.5
"""Seconds by which the times of two peers may differ."""


class ClockSwarm:
    """Nodes on hosts whose clocks are off by given numbers of seconds."""

    def __init__(self, link: Link = WIDE_AREA) -> None:
        self.network = Network(link)
        self.nodes: list[DHTNode] = []

    def host_of(self, node: DHTNode) -> Host:
        return self.network.host_of(node.peer_id)

    async def join(self, offset: float, friends: Sequence[DHTNode] | None = None, **options: object) -> DHTNode:
        """One more node, which joins through some of the others."""
        host = self.network.add_host()
        host.clock_offset = offset
        chosen = self.network.rng.sample(self.nodes, min(FRIENDS, len(self.nodes))) if friends is None else friends
        addresses = [address for friend in chosen for address in await friend.get_visible_maddrs()]
        p2p = await host.run(P2P.create(transport=host.transport(), rng=host.rng))
        node = await host.run(DHTNode.create(p2p=p2p, initial_peers=addresses, **options))
        self.nodes.append(node)
        return node

    async def store(self, node: DHTNode, key: str, seconds: float) -> float:
        """Let a node store something; returns the expiration that it meant."""

        async def store() -> float:
            expiration = get_dht_time() + seconds
            assert await node.store(key, key.upper(), expiration)
            return expiration

        return await self.host_of(node).run(store())

    async def get(self, node: DHTNode, key: str) -> object:
        found = await self.host_of(node).run(node.get(key, latest=True))
        return None if found is None else found.value

    def times(self) -> list[float]:
        """What time it is at each node, less the true time."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return [self.host_of(node).dht_time() - loop.true_time() for node in self.nodes]


def assert_same_time(swarm: ClockSwarm, expected: float = 0.0) -> None:
    times = swarm.times()
    assert max(times) - min(times) < SAME_TIME, times
    assert abs(statistics.median(times) - expected) < SAME_TIME, times


@pytest.mark.parametrize(
    "wrong", mostly_drills([(0, 1), (7, 12), (0, 19)]), ids=["the first two", "later", "first and last"]
)
def test_two_of_twenty_clocks_are_wrong(wrong, caplog):
    """One five minutes ahead, one five minutes behind: all join, and what they store expires when it should."""

    async def main() -> None:
        swarm = ClockSwarm()
        for number in range(20):
            offset = {wrong[0]: 5 * MINUTES, wrong[1]: -5 * MINUTES}.get(number, 0.0)
            await swarm.join(offset)
        for node in swarm.nodes:  # the first ones may have met too few clocks yet: each looks around
            await swarm.get(node, "nothing")
        assert_same_time(swarm)
        for number, node in enumerate(swarm.nodes):
            await swarm.store(node, f"key {number}", 600)
        assert_same_time(swarm)
        for number in range(20):
            for reader in (swarm.nodes[wrong[0]], swarm.nodes[wrong[1]], swarm.nodes[5]):
                assert await swarm.get(reader, f"key {number}") == f"KEY {number}"
        for number in wrong:
            node = swarm.nodes[number]
            assert node.p2p.metrics.clock_offset == pytest.approx(swarm.host_of(node).clock_offset, abs=SAME_TIME)

    with caplog.at_level(logging.WARNING, logger="shoal.base.clock"):
        run(main(), seed=0)
    messages = [record.getMessage() for record in caplog.records]
    assert any("300." in m or "299." in m for m in messages if "seconds ahead of the time of the swarm" in m), messages
    assert any("300." in m or "299." in m for m in messages if "seconds behind the time of the swarm" in m), messages
    assert all("NTP" in m or "agrees" in m for m in messages)


@pytest.mark.parametrize("offset", [5 * MINUTES, -5 * MINUTES])
def test_expirations_are_right_to_within_a_second(offset):
    async def main() -> None:
        swarm = ClockSwarm()
        for number in range(8):
            await swarm.join(offset if number == 4 else 0.0)
        wrong, right = swarm.nodes[4], swarm.nodes[6]
        for writer, reader in ((wrong, right), (right, wrong)):
            loop = asyncio.get_running_loop()
            began = loop.time()
            await swarm.store(writer, f"by {writer.peer_id}", 20)
            await asyncio.sleep(began + 19 - loop.time())
            assert await swarm.get(reader, f"by {writer.peer_id}") is not None
            await asyncio.sleep(began + 21 - loop.time())
            assert await swarm.get(reader, f"by {writer.peer_id}") is None

    run(main())


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_most_clocks_are_wrong_each_in_its_own_way(seed):
    """The swarm has one time all the same: that of the first."""

    async def main() -> None:
        swarm = ClockSwarm()
        await swarm.join(0.0)
        for _ in range(19):
            wrong = swarm.network.rng.random() < 0.7
            await swarm.join(swarm.network.rng.uniform(-600, 600) if wrong else 0.0)
        await swarm.store(swarm.nodes[3], "key", 60)
        assert_same_time(swarm)
        for node in swarm.nodes:
            assert await swarm.get(node, "key") == "KEY"
        assert_same_time(swarm)

    run(main(), seed=seed)


def test_all_clocks_but_the_first_are_wrong_in_the_same_way():
    """Nobody can know better than two thirds of all: they set the time, and the first one follows."""

    async def main() -> None:
        swarm = ClockSwarm()
        await swarm.join(0.0)
        for _ in range(11):
            await swarm.join(90.0)
        for node in swarm.nodes:
            await swarm.store(node, f"by {node.peer_id}", 60)
        assert_same_time(swarm, expected=90.0)

    run(main())


def test_two_peers_live_by_the_time_of_the_first():
    async def main() -> None:
        swarm = ClockSwarm()
        await swarm.join(100.0)
        await swarm.join(-100.0)
        assert_same_time(swarm, expected=100.0)
        for node in swarm.nodes:
            await swarm.store(node, f"by {node.peer_id}", 10)
        assert_same_time(swarm, expected=100.0)

    run(main())


def lie(swarm: ClockSwarm, node: DHTNode, seconds: float) -> None:
    """Let a node tell others another time than it has, in whatever way."""
    greet = node.p2p.hello

    def greet_wrongly() -> object:
        hello = greet()
        hello.time += seconds
        return hello

    node.p2p.hello = greet_wrongly


@pytest.mark.parametrize("seconds", mostly_drills([1e9, -100.0, float("nan"), 100.0, 2.5, float("inf")], quick=3))
def test_liars_in_the_minority_move_nobody(seconds):
    async def main() -> None:
        swarm = ClockSwarm()
        honest, liars = [await swarm.join(0.0)], []
        for number in range(15):  # who joins through more liars than others cannot know better
            friends = honest[:1] if number < 3 else [*honest[-2:], liars[-1]]
            node = await swarm.join(-200.0 if number == 7 else 0.0, friends)
            if number in (1, 5, 9, 13):
                lie(swarm, node, seconds)
                liars.append(node)
            else:
                honest.append(node)
            assert_same_time(swarm)
        for node in swarm.nodes:
            await swarm.store(node, f"by {node.peer_id}", 60)
        assert_same_time(swarm)

    run(main())


@pytest.mark.parametrize("seconds", [1e9, -100.0, 2.9])
def test_a_stranger_alone_does_not_move_the_first_peer(seconds):
    async def main() -> None:
        swarm = ClockSwarm()
        first = await swarm.join(0.0)
        stranger = await swarm.join(0.0)
        lie(swarm, stranger, seconds)
        for _ in range(30):
            await swarm.store(first, "key", get_dht_time())
            await asyncio.sleep(40)  # longer than idle connections live: each time they greet anew
        assert abs(swarm.times()[0]) < SAME_TIME

    run(main())


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_a_newcomer_is_not_kept_out_by_clocks_that_are_right(seed):
    """It knows but a few peers, so it is not for the newcomer to know better what time it is."""

    async def main() -> None:
        swarm = ClockSwarm()
        for offset in (300.0, 300.0, 300.0, 0.0, 0.0):
            await swarm.join(offset)
        assert_same_time(swarm, expected=300)
        await swarm.join(0.0, swarm.nodes[3:5])
        for node in swarm.nodes:
            await swarm.store(node, f"by {node.peer_id}", 60)
        assert_same_time(swarm, expected=300)

    run(main(), seed=seed)


async def two_swarms_with_different_times(swarm: ClockSwarm) -> list[DHTNode]:
    await swarm.join(0.0)
    await swarm.join(500.0, [])
    return swarm.nodes[:2]


def test_initial_peers_that_disagree():
    """A newcomer whose own clock agrees with neither of them cannot know."""

    async def main() -> None:
        swarm = ClockSwarm()
        both = await two_swarms_with_different_times(swarm)
        with pytest.raises(ValidationError, match="do not agree about the time") as error:
            await swarm.join(-77.0, both)
        for node in both:
            assert f"peer {node.peer_id}: clock off by +" in str(error.value)
        assert {round(float(verdict.split()[3])) for verdict in error.value.verdicts.values()} == {77, 577}
        await swarm.join(-1234.0, both, strict=False)

    run(main())


@pytest.mark.parametrize("offset", [0.0, 500.0])
def test_whoever_agrees_with_one_of_two_knows_the_time(offset):
    async def main() -> None:
        swarm = ClockSwarm()
        await swarm.join(offset, await two_swarms_with_different_times(swarm))
        assert abs(swarm.times()[-1] - offset) < SAME_TIME

    run(main())


def test_a_clock_that_is_put_right_while_it_is_corrected():
    """Time goes on evenly."""

    async def main() -> None:
        swarm = ClockSwarm()
        for number in range(6):
            await swarm.join(300.0 if number == 3 else 0.0)
        host = swarm.host_of(swarm.nodes[3])
        assert abs(swarm.times()[3]) < SAME_TIME
        host.clock_offset = 0.01  # as the warning asks for
        assert abs(swarm.times()[3]) < SAME_TIME
        await asyncio.sleep(1000)
        await swarm.store(swarm.nodes[3], "key", 60)
        assert abs(swarm.times()[3]) < SAME_TIME
        assert host.clock.offset == 0

    run(main())


@pytest.mark.slow_drill
@pytest.mark.parametrize("drift", [2e-4, -2e-4])
def test_a_clock_that_drifts_is_followed_without_steps_back(drift):
    """Seventeen seconds a day, for six hours."""

    async def main() -> None:
        swarm = ClockSwarm()
        for _ in range(5):
            await swarm.join(0.0)
        node = swarm.nodes[2]
        host = swarm.host_of(node)
        last = host.dht_time()
        for minute in range(6 * 60):
            await asyncio.sleep(60)
            host.clock_offset += 60 * drift
            if minute % 10 == 0:
                await swarm.store(node, f"{minute}", 30)
            assert host.dht_time() > last
            last = host.dht_time()
            assert abs(swarm.times()[2]) < 2 * SAME_TIME
        assert abs(host.clock_offset) > 4

    run(main())


@pytest.mark.parametrize("offset", [5 * MINUTES, -5 * MINUTES])
def test_a_table_for_members_only(offset):
    """There each request bears the time at which it was made, also the first one of a newcomer."""

    async def main() -> None:
        swarm, authority = ClockSwarm(), Authority()
        for number in range(5):
            await swarm.join(offset if number == 3 else 0.0, authorizer=Member(authority))
        await swarm.store(swarm.nodes[3], "key", 60)
        assert await swarm.get(swarm.nodes[1], "key") == "KEY"
        assert_same_time(swarm)

    run(main())


def test_nobody_is_corrected_where_all_clocks_are_right():
    """Also over slow links, whose two directions take different times: the measurement is off by half of that."""

    async def main() -> None:
        swarm = ClockSwarm(Link(delay=(0.02, 0.1), jitter=0.15))
        for _ in range(20):
            await swarm.join(swarm.network.rng.uniform(-0.02, 0.02))
        for node in swarm.nodes:
            await swarm.store(node, f"by {node.peer_id}", 60)
            assert node.p2p.clock.offset == 0

    run(main())


EPOCH_SECONDS, SPEED = 20.0, 50.0


@pytest.mark.parametrize("jump", mostly_drills([2 * MINUTES, -120 * MINUTES, -2 * MINUTES, 120 * MINUTES], quick=2))
@pytest.mark.parametrize("of_peers", mostly_drills([(2, 0), (2, 1), (4, 2)], quick=2))
def test_a_clock_that_jumps_during_training_holds_nobody_up(of_peers, jump, caplog):
    """And when it is set right again, everything goes on as well."""
    peers, jumping = of_peers

    async def main() -> None:
        swarm = Swarm(Network(WIDE_AREA), Course(target_batch_size=round(peers * SPEED * EPOCH_SECONDS)))
        trainers = [await swarm.add(SPEED) for _ in range(peers)]
        await asyncio.sleep(4 * EPOCH_SECONDS)
        odd = trainers[jumping]
        for clock_offset in (jump, 0.01):
            swarm.forget()
            caplog.clear()
            epochs = [trainer.epoch for trainer in trainers]
            await asyncio.sleep(0.4 * EPOCH_SECONDS)
            odd.host.clock_offset = clock_offset
            await asyncio.sleep(2.0)
            lines = [record.getMessage() for record in caplog.records if record.name == "shoal.base.clock"]
            assert len(lines) == 1, "the user is told within seconds, once"
            assert ("has jumped by" if clock_offset == jump else "agrees with the other peers") in lines[0]
            await asyncio.sleep(6 * EPOCH_SECONDS)
            assert odd.host.clock.offset == pytest.approx(round(clock_offset), abs=SAME_TIME)
            assert odd.node.p2p.metrics.clock_offset == pytest.approx(round(clock_offset), abs=SAME_TIME)
            times = [trainer.host.dht_time() for trainer in trainers]
            assert max(times) - min(times) < SAME_TIME
            assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == lines
            for trainer, epoch in zip(trainers, epochs, strict=True):
                assert trainer.record.group_sizes.keys() == {peers}
                assert (trainer.record.failed, trainer.record.alone, trainer.record.downloads) == (0, 0, 0)
                assert trainer.epoch - epoch >= 6
        await swarm.close()

    run(main(), seed=3)


@pytest.mark.parametrize("paused", [2 * MINUTES, 120 * MINUTES])
def test_a_machine_that_stood_still_finds_out_during_training(paused):
    """Both of its clocks stood still. One of them is set then, or neither; its first progress is late or refused."""

    async def main() -> None:
        swarm = Swarm(Network(WIDE_AREA), Course(target_batch_size=round(4 * SPEED * EPOCH_SECONDS)))
        trainers = [await swarm.add(SPEED) for _ in range(4)]
        await asyncio.sleep(4 * EPOCH_SECONDS)
        clock = trainers[2].host.clock
        wall, monotonic = clock._wall, clock._monotonic
        clock._wall, clock._monotonic = lambda: wall() - paused, lambda: monotonic() - paused
        await asyncio.sleep(10.0)
        times = [trainer.host.dht_time() for trainer in trainers]
        assert max(times) - min(times) < SAME_TIME
        assert clock.offset == pytest.approx(-paused, abs=SAME_TIME)
        clock._wall = wall
        await asyncio.sleep(10.0)
        times = [trainer.host.dht_time() for trainer in trainers]
        assert max(times) - min(times) < SAME_TIME
        assert clock.offset == pytest.approx(0, abs=SAME_TIME)
        await swarm.close()

    run(main(), seed=3)
