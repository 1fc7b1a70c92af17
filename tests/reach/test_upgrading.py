"""Direct connections instead of relayed ones: what the pool prefers, and how it comes to have them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.base.tasks import TaskSet
from shoal.errors import DialError, InterruptedDialError, NoRelayError, NoReservationError, NotAMemberError
from shoal.metrics import Metrics
from shoal.net.connection import Connection, Hello
from shoal.net.connection_pool import MAX_IDLE_PER_PEER, MAX_PARALLEL_DIALS, SPARE, ConnectionPool
from shoal.net.limits import DEFAULT_LIMITS, MAX_DIALLED_PER_PEER, HeaderMemory
from shoal.net.transport import Stream
from shoal.peers.identity import Identity
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.connection_upgrade import ROOM_FOR_SPARES, UPGRADE_SECONDS, ConnectionUpgrades
from shoal.testing import run
from tests.p2p.peers import ScriptedStream
from tests.reach.relays import Relayed, square, tell

PEER, RELAY = Identity.generate().peer_id, Identity.generate().peer_id
CIRCUIT = Multiaddr("/memory/1")
DIAL_SECONDS = 0.5


def stream(*, relayed: bool = False, arranged: bool = False) -> Stream:
    made = ScriptedStream(b"", PEER)
    made.via, made.is_arranged = RELAY if relayed else None, arranged
    return made


def connection_on(made: Stream) -> Connection:
    return Connection(made, Metrics(), Hello, lambda *_: None, HeaderMemory(DEFAULT_LIMITS))


class Caller:
    """A peer, as far as it takes part in this."""

    def __init__(self) -> None:
        self.is_alive = True
        self.finds_direct = False
        """Whether its dials lead to direct connections."""
        self.dial_instead: Callable[[], Awaitable[Connection]] | None = None
        self.is_worth_it, self.expects_success = True, False
        self.broken: list[object] = []
        """Relays through which connections have broken."""
        self.dials: list[int] = []
        """Of circuits: how many were wanted."""
        self.error: Exception | None = None
        self.pool = ConnectionPool(self.dial, 1e9, lambda peer: self.upgrades.watch(peer))
        self.prepared = 0
        """How often spare connections were wanted."""
        self.circuits = SimpleNamespace(
            dial=self.dial_circuits,
            punching=SimpleNamespace(
                is_worth_it=lambda peer: self.is_worth_it, expects_success=lambda peer: self.expects_success
            ),
            prepare=self.prepare_circuits,
        )
        self.dialler = SimpleNamespace(circuits=lambda peer: [CIRCUIT], note_broken=self.broken.append)
        self.tasks = TaskSet()
        self.upgrades = ConnectionUpgrades(self, self.circuits)  # type: ignore[arg-type]

    async def dial(self, peer: object) -> Connection:
        if self.dial_instead is not None:
            return await self.dial_instead()
        return self.greet(stream(relayed=not self.finds_direct))

    async def dial_circuits(self, address: Multiaddr, peer: object, count: int) -> list[Stream]:
        assert (address, peer) == (CIRCUIT, PEER)
        self.dials.append(count)
        if self.error is not None:
            raise self.error
        self.made = [stream(relayed=not self.finds_direct) for _ in range(count)]
        return self.made

    async def prepare_circuits(self, peer: object, connections: int) -> None:
        assert (peer, connections) == (PEER, 1)
        self.prepared += 1
        await asyncio.sleep(DIAL_SECONDS)
        if self.error is not None:
            raise self.error
        for _ in range(SPARE - len(self.pool.streams_to(PEER))):
            self.pool.add(connection_on(stream(arranged=True)))

    def greet(self, made: Stream) -> Connection:
        return connection_on(made)

    async def take(self, count: int) -> list[Connection]:
        return [await self.pool.acquire(PEER) for _ in range(count)]

    def give_back(self, taken: list[Connection]) -> None:
        for each in taken:
            self.pool.release(each, reusable=True)


def simulated(test: Callable[[Caller], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        caller = Caller()
        try:
            await test(caller)
        finally:
            caller.is_alive = False
            await caller.tasks.cancel()
            caller.pool.close()

    def test_it() -> None:
        run(main())

    test_it.__name__, test_it.__doc__ = test.__name__, test.__doc__
    return test_it


def count(taken: list[Connection]) -> tuple[int, int]:
    """Direct and relayed ones."""
    relayed = sum(each.stream.is_relayed for each in taken)
    return len(taken) - relayed, relayed


# --- what the pool prefers --------------------------------------------------------------------------------------------


@simulated
async def test_a_direct_connection_is_taken_first(caller: Caller) -> None:
    for relayed in (True, False, True):
        caller.pool.add(connection_on(stream(relayed=relayed)))
    [first] = await caller.take(1)
    assert not first.stream.is_relayed
    assert count(await caller.take(2)) == (0, 2)


@simulated
async def test_a_peer_that_ends_each_connection_at_once_is_not_dialled_for_ever(caller: Caller) -> None:
    dials = 0

    async def dial() -> Connection:
        nonlocal dials
        dials += 1
        assert dials < 10
        await asyncio.sleep(DIAL_SECONDS)
        made = stream()
        made.abort()
        return connection_on(made)

    caller.dial_instead = dial
    calls = [asyncio.ensure_future(caller.pool.acquire(PEER)) for _ in range(3)]
    for attempt in (*calls, caller.pool.prepare(PEER, 3)):
        with pytest.raises(InterruptedDialError, match="ended the connection before it could be used"):
            await attempt
    assert PEER not in caller.pool


@simulated
async def test_all_who_wait_for_a_dial_hear_why_it_has_failed(caller: Caller) -> None:
    async def dial() -> Connection:
        await asyncio.sleep(DIAL_SECONDS)
        raise NotAMemberError("no", reason="expired")

    caller.dial_instead = dial
    calls = [asyncio.ensure_future(caller.pool.acquire(PEER)) for _ in range(MAX_PARALLEL_DIALS + 1)]
    for call in calls:
        with pytest.raises(NotAMemberError, match="no") as found:
            await call
        assert found.value.reason == "expired"


@simulated
async def test_a_relayed_connection_ends_after_its_call_if_there_is_a_direct_one(caller: Caller) -> None:
    relayed = await caller.take(2)
    caller.pool.release(relayed[0], reusable=True)
    assert caller.pool.idle_count == 1  # it is the best so far
    caller.pool.add(connection_on(stream()))
    caller.pool.release(relayed[1], reusable=True)
    assert relayed[1].closed
    assert caller.pool.idle_count == 2
    [direct, other] = await caller.take(2)
    caller.pool.release(other, reusable=True)  # the direct one is in use, and that counts
    assert other.closed
    assert not direct.closed


@simulated
async def test_whoever_waits_gets_a_relayed_connection_all_the_same(caller: Caller) -> None:
    taken = await caller.take(MAX_DIALLED_PER_PEER - 1)
    caller.finds_direct = True
    taken += await caller.take(1)
    waiting = asyncio.ensure_future(caller.pool.acquire(PEER))
    await asyncio.sleep(1)
    caller.pool.release(taken[0], reusable=True)
    assert await waiting is taken[0]


@simulated
async def test_whoever_waits_gets_what_is_added(caller: Caller) -> None:
    await caller.take(MAX_DIALLED_PER_PEER)
    waiting = asyncio.ensure_future(caller.pool.acquire(PEER))
    await asyncio.sleep(1)
    added = connection_on(stream())
    caller.pool.add(added)
    assert await waiting is added
    assert caller.pool.in_use_count == MAX_DIALLED_PER_PEER + 1


@simulated
async def test_a_direct_connection_finds_room_among_relayed_ones(caller: Caller) -> None:
    for _ in range(MAX_IDLE_PER_PEER):
        caller.pool.add(connection_on(stream(relayed=True)))
    caller.pool.add(connection_on(stream()))
    caller.pool.add(connection_on(stream(relayed=True)))
    assert count(await caller.take(MAX_IDLE_PER_PEER)) == (1, MAX_IDLE_PER_PEER - 1)


@simulated
async def test_prepared_connections_may_be_of_both_kinds(caller: Caller) -> None:
    caller.pool.add(connection_on(stream()))
    await caller.pool.prepare(PEER, 3)
    assert count(await caller.take(3)) == (1, 2)


# --- how it comes to have them ----------------------------------------------------------------------------------------


@simulated
async def test_as_many_direct_connections_as_there_are_relayed_ones(caller: Caller) -> None:
    taken = await caller.take(5)
    caller.give_back(taken[:2])
    caller.finds_direct = True
    await asyncio.sleep(UPGRADE_SECONDS - 0.1)
    assert caller.dials == []
    await asyncio.sleep(0.2)
    assert caller.dials == [5]
    assert not any(each.closed for each in taken)  # calls go on where they are
    assert count(await caller.take(5)) == (5, 0)
    await asyncio.sleep(5 * UPGRADE_SECONDS)
    assert caller.dials == [5]
    assert not caller.upgrades.tasks


@simulated
async def test_attempts_go_on_while_there_are_only_relayed_ones(caller: Caller) -> None:
    taken = await caller.take(1)
    caller.error = DialError("the relay has no room")
    await asyncio.sleep(2.5 * UPGRADE_SECONDS)
    caller.error = None
    await asyncio.sleep(UPGRADE_SECONDS)
    assert caller.dials == [1, 1, 1]
    assert [each.closed for each in caller.made] == [True]  # there is one of that kind already
    caller.give_back(taken)
    assert count(await caller.take(1)) == (0, 1)


@simulated
async def test_no_more_at_once_than_a_relay_joins(caller: Caller) -> None:
    await caller.take(20)
    await asyncio.sleep(1.5 * UPGRADE_SECONDS)
    assert caller.dials == [8]


@simulated
async def test_nothing_is_tried_while_it_is_not_worth_it(caller: Caller) -> None:
    caller.is_worth_it = False
    await caller.take(1)
    await asyncio.sleep(3.5 * UPGRADE_SECONDS)
    assert caller.dials == []
    caller.is_worth_it = True
    await asyncio.sleep(UPGRADE_SECONDS)
    assert caller.dials == [1]


@simulated
async def test_it_ends_with_the_connections(caller: Caller) -> None:
    taken = await caller.take(1)
    assert len(caller.upgrades.tasks) == 1
    caller.pool.release(taken[0], reusable=False)
    await asyncio.sleep(1.5 * UPGRADE_SECONDS)
    assert not caller.upgrades.tasks
    assert caller.dials == []
    # And begins anew with the next ones.
    await caller.take(1)
    await asyncio.sleep(1.5 * UPGRADE_SECONDS)
    assert caller.dials == [1]


# --- spare ones -------------------------------------------------------------------------------------------------------


@simulated
async def test_the_first_direct_connection_that_a_relay_arranges_does_not_stay_alone(caller: Caller) -> None:
    caller.pool.add(connection_on(stream(arranged=True)))
    assert len(await caller.take(1)) == 1  # a call goes on meanwhile
    await asyncio.sleep(2 * DIAL_SECONDS)
    assert caller.pool.count_of(PEER) == SPARE - 1
    assert caller.prepared == 1
    caller.pool.add(connection_on(stream(arranged=True)))
    assert (caller.prepared, caller.upgrades.filling) == (1, {}), "there are enough"


@simulated
async def test_a_direct_connection_that_comes_late_gets_company_too(caller: Caller) -> None:
    await caller.take(1)
    assert caller.prepared == 0
    caller.pool.add(connection_on(stream(arranged=True)))
    await asyncio.sleep(2 * DIAL_SECONDS)
    assert caller.prepared == 1


@simulated
async def test_spare_connections_that_fail_harm_nobody(caller: Caller) -> None:
    caller.error = DialError("the relay has no room")
    caller.pool.add(connection_on(stream(arranged=True)))
    await asyncio.sleep(2 * DIAL_SECONDS)
    assert (caller.prepared, caller.upgrades.filling) == (1, {})
    assert caller.pool.count_of(PEER) == 1


@simulated
async def test_whoever_needs_no_relay_has_none_to_spare(caller: Caller) -> None:
    caller.pool.add(connection_on(stream()))
    assert not caller.upgrades.filling


@simulated
async def test_no_spare_connections_take_the_place_of_others(caller: Caller) -> None:
    for number in range(ROOM_FOR_SPARES):
        made = ScriptedStream(b"", Identity.generate(random.Random(number)).peer_id)
        caller.pool.add(connection_on(made))
    caller.pool.add(connection_on(stream(arranged=True)))
    assert not caller.upgrades.filling


# --- after a break ----------------------------------------------------------------------------------------------------


@simulated
async def test_what_has_broken_is_dialled_at_once_for_all_calls(caller: Caller) -> None:
    taken = await caller.take(3)
    taken[0].abort()
    for _ in range(2):
        caller.upgrades.replace(PEER, 3)
    assert caller.broken == [RELAY]
    assert len({await caller.pool.acquire(PEER) for _ in range(3)} - set(taken)) == 3
    assert caller.dials == [3]
    await asyncio.sleep(1.0)
    assert not caller.upgrades.replacing


@pytest.mark.parametrize(("wanted", "dialled"), [(1, SPARE), (6, 6), (20, 8)])
def test_where_routers_let_punches_through_there_are_enough_at_once(wanted: int, dialled: int) -> None:
    async def check(caller: Caller) -> None:
        caller.expects_success = caller.finds_direct = True
        caller.upgrades.replace(PEER, wanted)
        await asyncio.sleep(1.0)
        assert caller.dials == [dialled]
        assert caller.pool.count_of(PEER) == dialled

    simulated(check)()


@simulated
async def test_calls_dial_themselves_if_nothing_can_be_replaced(caller: Caller) -> None:
    caller.error = NoReservationError("it has left")
    caller.upgrades.replace(PEER, 3)
    assert await caller.pool.acquire(PEER)
    assert caller.dials == [3]
    await asyncio.sleep(1.0)
    assert not caller.upgrades.replacing


@simulated
async def test_another_relay_is_asked_if_one_does_not_answer(caller: Caller) -> None:
    caller.dialler.circuits = lambda peer: [CIRCUIT, CIRCUIT]
    caller.error = NoRelayError("the connection to it has broken, too")
    caller.upgrades.replace(PEER, 3)
    assert await caller.pool.acquire(PEER)
    assert caller.dials == [3, 3]


def test_a_pair_that_loses_its_relay_soon_after_it_has_met_has_enough_connections() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            await peers.relay()
            guest, caller = await peers.guest(), await peers.caller()
            for each in (guest, caller):
                each.circuits.punching = each.punching
            tell(caller, guest)
            assert await square(caller, guest) == 9
            await asyncio.sleep(3.0)
            assert len(caller.pool.streams_to(guest.peer_id)) == SPARE
            assert not any(each.is_relayed for each in caller.pool.streams_to(guest.peer_id))

    run(main())


def test_peers_that_call_each_other_through_a_relay_find_a_direct_way() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            await peers.relay()
            guest, caller = await peers.guest(), await peers.caller()
            tell(caller, guest)
            assert await square(caller, guest) == 9
            assert [stream.is_relayed for stream in caller.pool.streams_to(guest.peer_id)] == [True]
            for each in (guest, caller):  # now they may
                each.circuits.punching = each.punching
            for _ in range(3):
                await asyncio.sleep(0.3 * UPGRADE_SECONDS)
                assert await square(caller, guest) == 9  # before the connection is closed as unused
            assert caller.metrics.dials_punched == 0
            await asyncio.sleep(0.2 * UPGRADE_SECONDS)
            assert caller.metrics.dials_punched >= 1
            assert not all(stream.is_relayed for stream in caller.pool.streams_to(guest.peer_id))
            before = caller.metrics.bytes_relayed
            assert await square(caller, guest) == 9
            assert caller.metrics.bytes_relayed == before

    run(main())


@pytest.mark.parametrize("is_alive", [True, False])
def test_closing(is_alive: bool) -> None:
    @simulated
    async def close(caller: Caller) -> None:
        caller.is_alive = is_alive
        await caller.take(1)
        assert len(caller.upgrades.tasks) == is_alive
        await caller.tasks.cancel()
        assert not caller.upgrades.tasks

    close()
