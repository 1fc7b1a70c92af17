"""From circuits to direct connections: what the two sides tell each other, when they begin, and what they remember."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import DialError, IdentityMismatchError
from shoal.metrics import Metrics
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import (
    COOKIE_BYTES,
    ROUND_TRIP,
    Session,
    Splice,
    Stream,
    Throttle,
    Transport,
    pack_frame,
    receive_frame,
    send_frame,
)
from shoal.peers.identity import Identity
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.punching import (
    EXCHANGE_SECONDS,
    FIRST_PAUSE,
    HEAD_START,
    HEAD_START_SHARE,
    PUNCH_SECONDS,
    CandidateHost,
    Candidates,
    Circuit,
    Puncher,
)
from shoal.reach.relay.messages import MAX_AT_ONCE, Reach
from shoal.testing import run
from tests.p2p.peers import PATIENCE

ONE_WAY = 0.03
ROUND = 2 * ONE_WAY
EASY, HARD = Reach.EASY, Reach.HARD


class Unlimited(Throttle):
    def take(self, nbytes: int) -> float:
        return 0.0


class Side:
    """A peer that takes part in a punch."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.metrics = transport, Metrics()
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()
        self.reach = EASY
        self.puncher = Puncher(transport, self.metrics, self.accepted.put_nowait, lambda: self.reach)

    @property
    def peer_id(self) -> Any:
        return self.transport.identity.peer_id


class Walled(MemoryTransport):
    """Can be told what comes of its punches, and has no network of its own."""

    def is_inside(self, address: Multiaddr) -> bool:
        return False

    is_walled = ends_early = False
    is_slow = closes_slowly = 0.0
    instead: Session | None = None
    """What connects to its port first."""
    asked: list[Multiaddr]
    began_at: float = 0.0

    async def punch(
        self, session: Session, candidates: Sequence[Multiaddr], seconds: float, round_trip: float = ROUND_TRIP
    ) -> AsyncGenerator[Session, None]:
        self.asked = list(candidates)
        self.round_trip, self.began_at = round_trip, now()
        await asyncio.sleep(self.is_slow)
        if self.instead is not None:
            yield self.instead
        if self.ends_early:
            return
        if self.is_walled:
            await asyncio.sleep(seconds)
            return
        try:
            async with aclosing(super().punch(session, candidates, seconds, round_trip)) as sessions:
                async for each in sessions:
                    yield each
        finally:
            await asyncio.sleep(self.closes_slowly)


class Trio:
    """A dialler and a target, and a relay that joins their sessions."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.relay = make()
        self.dialler, self.target = Side(make()), Side(make())
        self.joining: list[asyncio.Task[None]] = []
        self.made = 0

    async def listen(self, where: Multiaddr) -> None:
        [self.address] = await self.relay.listen(where, lambda stream: None)

    async def circuits(self, count: int = 1) -> tuple[list[Circuit], list[Circuit]]:
        pairs = await asyncio.gather(*(self._circuit() for _ in range(count)))
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    async def _circuit(self) -> tuple[Circuit, Circuit]:
        outer, inner = [], []
        for side in (self.dialler, self.target):
            self.made += 1
            cookie = self.made.to_bytes(COOKIE_BYTES, "big")
            expected = self.relay.expect_session(cookie)
            outer.append(await side.transport.open_session(self.address, cookie, punchable=True))
            inner.append(await expected)
        self.joining.append(asyncio.ensure_future(Splice(inner[0], inner[1], Unlimited(), 100.0).run()))
        seen = [each.remote_address for each in inner]
        relay = self.relay.identity.peer_id
        return Circuit(outer[0], relay, seen[0], seen[1]), Circuit(outer[1], relay, seen[1], seen[0])

    async def punch(
        self, count: int = 1, reach: Reach = EASY, before: float = 0.0
    ) -> tuple[list[asyncio.Future[Stream]], asyncio.Task[None]]:
        """What comes of it for the dialler, and what the target is doing.

        Args:
            before: seconds since the dial began.
        """
        self.near, self.far = await self.circuits(count)
        going_on = asyncio.ensure_future(self._be_punched())
        since = now() - before
        return list(await self.dialler.puncher.as_dialler(self.target.peer_id, reach, self.near, since)), going_on

    async def _be_punched(self) -> None:
        await (await self.target.puncher.as_target(self.dialler.peer_id, self.dialler.reach, self.far))

    async def close(self) -> None:
        for side in (self.dialler, self.target):
            await side.puncher.close()
            await side.transport.close()
        await self.relay.close()
        for task in self.joining:
            task.cancel()
        await asyncio.gather(*self.joining, return_exceptions=True)


def now() -> float:
    return asyncio.get_running_loop().time()


def simulated(test: Callable[[Trio], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """In memory and in virtual time."""

    async def main() -> None:
        network = MemoryNetwork(lambda source, target, size: ONE_WAY)
        numbers = itertools.count()
        trio = Trio(lambda: Walled(network, Identity.generate(random.Random(next(numbers)))))
        await trio.listen(network.new_address())
        try:
            await test(trio)
        finally:
            await trio.close()

    def test_it() -> None:
        run(main())

    test_it.__name__, test_it.__doc__ = test.__name__, test.__doc__
    return test_it


def transport_of(side: Side) -> Walled:
    assert isinstance(side.transport, Walled)
    return side.transport


# --- the other side names what listens to others ----------------------------------------------------------------------


@simulated
async def test_a_punch_that_fails_takes_its_time(trio: Trio) -> None:
    """It is over as soon as enough has connected; else the other side would see whether something listens there."""
    transport_of(trio.dialler).ends_early = True
    futures, going_on = await trio.punch()
    with pytest.raises(DialError):
        await futures[0]
    assert now() - transport_of(trio.dialler).began_at == pytest.approx(PUNCH_SECONDS)
    going_on.cancel()
    await asyncio.wait([going_on])


# --- both sides are honest --------------------------------------------------------------------------------------------


@simulated
async def test_a_direct_connection_for_each_port(trio: Trio) -> None:
    futures, going_on = await trio.punch(3)
    streams = await asyncio.gather(*futures)
    accepted = [await trio.target.accepted.get() for _ in streams]
    assert [stream.remote for stream in streams] == [trio.target.peer_id] * 3
    assert [stream.remote for stream in accepted] == [trio.dialler.peer_id] * 3
    assert not any(stream.is_relayed for stream in [*streams, *accepted])
    for near in streams:
        await near.write(b"x")
    for far in accepted:
        await far.read_exactly_into(memoryview(bytearray(1)))
    assert trio.dialler.metrics.punches_failed == {}
    await going_on


@simulated
async def test_both_sides_begin_at_the_same_time(trio: Trio) -> None:
    await trio.punch()
    await asyncio.sleep(ROUND)
    near, far = transport_of(trio.dialler), transport_of(trio.target)
    assert near.began_at == pytest.approx(far.began_at, abs=1e-6)
    # By way of the relay, everything takes twice as long as between two peers.
    assert near.round_trip == pytest.approx(2 * ROUND)
    assert far.round_trip == pytest.approx(2 * ROUND)


@simulated
async def test_time_to_a_direct_connection(trio: Trio) -> None:
    began_at = now()
    [future], _ = await trio.punch()
    await future
    # Sessions one after the other, exchange, the first packets, the handshake.
    assert now() - began_at < 2 * 3 * ONE_WAY + 3 * ROUND + ROUND + 3 * ROUND
    assert trio.dialler.metrics.seconds_to_direct == pytest.approx(now() - began_at - 6 * ONE_WAY)


@simulated
async def test_a_success_is_remembered_by_both(trio: Trio) -> None:
    trio.dialler.puncher.policy.note_failure(trio.target.peer_id, ("memory", "memory"))
    trio.target.puncher.policy.note_failure(trio.dialler.peer_id, ("memory", "memory"))
    [future], going_on = await trio.punch()
    await future
    await going_on
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    assert trio.target.puncher.is_worth_it(trio.dialler.peer_id)


@simulated
async def test_the_target_ends_as_soon_as_the_dialler_has_what_it_wants(trio: Trio) -> None:
    [future], going_on = await trio.punch()
    await future
    began_at = now()
    await going_on
    assert now() - began_at < PUNCH_SECONDS / 2


@simulated
async def test_a_port_on_which_nothing_comes_about(trio: Trio) -> None:
    transport_of(trio.dialler).is_walled = transport_of(trio.target).is_walled = True
    [future], going_on = await trio.punch()
    began_at = now()
    with pytest.raises(DialError, match="no direct connection"):
        await future
    assert now() - began_at == pytest.approx(PUNCH_SECONDS, abs=0.01)
    await going_on
    assert trio.dialler.metrics.punches_failed == {"no connection": 1}
    assert not trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    await asyncio.sleep(FIRST_PAUSE)
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)


@simulated
async def test_nobody_waits_for_a_second_punch_while_a_first_one_brings_nothing(trio: Trio) -> None:
    transport_of(trio.dialler).is_walled = True
    [future], _ = await trio.punch()
    await asyncio.sleep(HEAD_START / 2)
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)  # so dials at the same time all punch
    await asyncio.sleep(HEAD_START)
    assert not trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    assert trio.dialler.puncher.is_worth_it(trio.relay.identity.peer_id)
    future.cancel()
    await asyncio.wait([future])
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)


@simulated
async def test_a_punch_may_take_longer_where_everything_does(trio: Trio) -> None:
    transport_of(trio.dialler).is_walled = True
    before = 2.0
    [future], _ = await trio.punch(before=before)
    await asyncio.sleep(2 * HEAD_START)
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    await asyncio.sleep(HEAD_START_SHARE * (before + 1.0) - 2 * HEAD_START)
    assert not trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    future.cancel()
    await asyncio.wait([future])


@simulated
async def test_who_was_reached_before_is_worth_another_punch_whatever_the_present_one_brings(trio: Trio) -> None:
    [future], _ = await trio.punch()
    (await future).abort()
    transport_of(trio.dialler).is_walled = True
    [future], _ = await trio.punch()
    await asyncio.sleep(2 * HEAD_START)
    assert not future.done()
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    future.cancel()
    await asyncio.wait([future])


@simulated
async def test_one_port_that_works_is_a_success(trio: Trio) -> None:
    futures, _ = await trio.punch(2)
    futures[0].cancel()
    assert (await futures[1]).remote == trio.target.peer_id
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)
    assert trio.dialler.metrics.punches_failed == {}


@simulated
async def test_who_gives_up_says_nothing_about_the_way(trio: Trio) -> None:
    transport_of(trio.dialler).is_walled = True
    futures, _ = await trio.punch(2)
    await asyncio.sleep(0.1)
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    assert trio.dialler.metrics.punches_failed == {}
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)


@simulated
async def test_a_direct_connection_ends_if_the_dial_is_given_up_at_the_last_moment(trio: Trio) -> None:
    transport_of(trio.dialler).closes_slowly = ROUND
    [future], going_on = await trio.punch()
    accepted = await trio.target.accepted.get()
    await accepted.write(b"x")  # so the dialler has proven who it is, and gives up the port
    assert not future.done()
    future.cancel()
    await asyncio.wait([future])
    await asyncio.sleep(ROUND)
    assert accepted.closed
    await going_on


@simulated
async def test_more_circuits_than_ports_of_a_punch(trio: Trio) -> None:
    futures, _ = await trio.punch(MAX_AT_ONCE + 1)
    assert len(futures) == MAX_AT_ONCE + 1
    for future in futures[:-1]:
        await future
    with pytest.raises(DialError, match="no address"):
        await futures[-1]


@simulated
async def test_two_hard_sides_do_not_punch(trio: Trio) -> None:
    trio.dialler.reach = trio.target.reach = HARD
    futures, going_on = await trio.punch(reach=HARD)
    assert futures == []
    await going_on
    # The circuit is as good as new.
    trio.target.transport.receive(trio.far[0].session, trio.target.accepted.put_nowait)
    await trio.dialler.transport.authenticate(trio.near[0].session, trio.target.peer_id)
    await asyncio.sleep(1e5)
    assert not trio.dialler.puncher.is_worth_it(trio.target.peer_id)


@simulated
async def test_after_the_exchange_the_circuit_is_for_the_handshake(trio: Trio) -> None:
    transport_of(trio.dialler).is_walled = transport_of(trio.target).is_walled = True
    await trio.punch()
    trio.target.transport.receive(trio.far[0].session, trio.target.accepted.put_nowait)
    await trio.dialler.transport.authenticate(trio.near[0].session, trio.target.peer_id)
    assert (await trio.target.accepted.get()).remote == trio.dialler.peer_id


@simulated
async def test_both_sides_begin_when_they_hear_of_each_other(trio: Trio) -> None:
    """That is one trip through the relay after it has joined them, though nobody waits for the other one to speak."""
    near, far = await trio.circuits()
    joined_at = now()
    target = trio.target.puncher.as_target(trio.dialler.peer_id, EASY, far)
    [direct], going_on = await asyncio.gather(
        trio.dialler.puncher.as_dialler(trio.target.peer_id, EASY, near, joined_at), target
    )
    await asyncio.gather(direct, going_on)
    for side in (trio.dialler, trio.target):
        assert transport_of(side).began_at - joined_at == pytest.approx(2 * ONE_WAY)
        assert transport_of(side).round_trip == pytest.approx(4 * ONE_WAY)


@simulated
async def test_a_side_that_comes_later_holds_up_nobody_any_longer(trio: Trio) -> None:
    near, far = await trio.circuits()
    late, joined_at = 20 * ONE_WAY, now()

    async def come_late() -> None:
        await asyncio.sleep(late)
        await (await trio.target.puncher.as_target(trio.dialler.peer_id, EASY, far))

    coming = asyncio.ensure_future(come_late())
    [direct] = await trio.dialler.puncher.as_dialler(trio.target.peer_id, EASY, near, joined_at)
    assert (await direct).remote == trio.target.peer_id
    assert transport_of(trio.dialler).began_at - joined_at == pytest.approx(late + 2 * ONE_WAY)
    await coming


@simulated
async def test_closing_ends_what_goes_on(trio: Trio) -> None:
    transport_of(trio.dialler).is_walled = True
    [future], going_on = await trio.punch()
    await trio.dialler.puncher.close()
    assert future.cancelled()
    going_on.cancel()
    await asyncio.wait([going_on])
    assert await trio.punch() == ([], ANY)


# --- somebody is not --------------------------------------------------------------------------------------------------


@simulated
async def test_somebody_else_at_the_port_is_not_taken_for_the_target(trio: Trio) -> None:
    near, far = await trio.circuits()
    impostor = Side(trio.relay)
    trio.relay.receive(far[0].session, impostor.accepted.put_nowait)
    transport_of(trio.dialler).instead = near[0].session
    [future], _ = await trio.punch()
    assert (await future).remote == trio.target.peer_id


@simulated
async def test_nobody_but_somebody_else(trio: Trio) -> None:
    near, far = await trio.circuits()
    trio.relay.receive(far[0].session, lambda stream: None)
    transport_of(trio.dialler).instead, transport_of(trio.dialler).is_walled = near[0].session, True
    [future], _ = await trio.punch()
    with pytest.raises(IdentityMismatchError):
        await future
    assert trio.dialler.metrics.punches_failed == {"not that peer": 1}


@simulated
async def test_a_silent_target_does_not_hold_up_the_dialler(trio: Trio) -> None:
    near, _ = await trio.circuits()
    began_at = now()
    assert await trio.dialler.puncher.as_dialler(trio.target.peer_id, EASY, near, now()) == []
    assert now() - began_at == pytest.approx(EXCHANGE_SECONDS)
    assert trio.dialler.metrics.punches_failed == {"no exchange": 1}
    assert trio.dialler.puncher.is_worth_it(trio.target.peer_id)  # this was not the fault of any router


@simulated
async def test_a_silent_dialler_does_not_hold_up_the_target(trio: Trio) -> None:
    _, far = await trio.circuits()
    began_at = now()
    await (await trio.target.puncher.as_target(trio.dialler.peer_id, EASY, far))
    assert now() - began_at == pytest.approx(EXCHANGE_SECONDS)


LIES = [
    CandidateHost("192.168.7.7", [4000]),
    CandidateHost("127.0.0.1", [4000]),
    CandidateHost("224.0.0.1", [4000]),
    CandidateHost("8.8.4.4", [22]),
]


@simulated
async def test_lies_about_addresses_cause_no_attempts(trio: Trio) -> None:
    near, far = await trio.circuits()
    seen, other = Multiaddr("/ip4/9.9.9.9/tcp/5000"), Multiaddr("/ip4/8.8.4.4/tcp/5000")
    near = [Circuit(near[0].session, near[0].relay, seen, other)]

    async def lie() -> None:
        await send_frame(far[0].session, Candidates(LIES))
        await receive_frame(far[0].session, Candidates)

    futures, _ = await asyncio.gather(trio.dialler.puncher.as_dialler(trio.target.peer_id, EASY, near, now()), lie())
    assert futures == []
    assert trio.dialler.metrics.punches_failed == {"no candidates": 1}
    assert not hasattr(trio.dialler.transport, "asked")


@simulated
async def test_of_lies_about_global_addresses_only_a_few_are_tried(trio: Trio) -> None:
    near, far = await trio.circuits()
    lies = [CandidateHost(f"8.8.4.{number}", [4000 + number] * MAX_AT_ONCE) for number in range(4)]

    async def lie() -> None:
        await receive_frame(near[0].session, Candidates)
        await send_frame(near[0].session, Candidates(lies))

    transport_of(trio.target).is_walled = True
    going_on, _ = await asyncio.gather(trio.target.puncher.as_target(trio.dialler.peer_id, EASY, far), lie())
    await going_on
    assert transport_of(trio.target).asked == [Multiaddr(f"/ip4/8.8.4.{n}/tcp/{4000 + n}") for n in range(4)]


frames = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([pack_frame(Candidates()), pack_frame(Candidates(LIES))]),
    st.dictionaries(st.text(max_size=5) | st.just("hosts"), st.integers(-9, 9) | st.lists(st.text()), max_size=3).map(
        lambda fields: len(msgspec.msgpack.encode(fields)).to_bytes(2, "big") + msgspec.msgpack.encode(fields)
    ),
)


@given(st.lists(frames, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_comes_over_the_circuit_ends_well(said: list[bytes], is_dialler: bool) -> None:
    async def hear(trio: Trio) -> None:
        near, far = await trio.circuits()
        own, other = (near, far) if is_dialler else (far, near)
        await other[0].session.write(b"".join(said))
        if is_dialler:
            for future in await trio.dialler.puncher.as_dialler(trio.target.peer_id, EASY, own, now()):
                with pytest.raises(DialError):
                    await future
        else:
            going_on = await trio.target.puncher.as_target(trio.dialler.peer_id, EASY, own)
            await going_on

    simulated(hear)()


# --- over real sockets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
async def test_over_tcp_on_this_machine(count: int) -> None:
    trio = Trio(lambda: TcpTransport(Identity.generate()))
    await trio.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
    try:
        async with asyncio.timeout(PATIENCE):
            futures, going_on = await trio.punch(count)
            streams = await asyncio.gather(*futures)
            accepted = [await trio.target.accepted.get() for _ in streams]
            await going_on
        ports = {str(each.session.local_address) for each in trio.near}
        assert {str(each.remote_address) for each in accepted} <= ports
        assert {stream.remote for stream in accepted} == {trio.dialler.peer_id}
        for stream in [*streams, *accepted]:
            stream.abort()
        for circuit in [*trio.near, *trio.far]:
            circuit.session.abort()
    finally:
        await trio.close()


async def test_a_port_that_cannot_be_shared_is_not_punched_from() -> None:
    trio = Trio(lambda: TcpTransport(Identity.generate()))
    await trio.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
    try:
        session = await trio.dialler.transport.open_session(trio.address, bytes(COOKIE_BYTES))
        with pytest.raises(ValueError, match="punchable=True"):
            await anext(trio.dialler.transport.punch(session, [], 1.0))
        session.abort()
    finally:
        await trio.close()
