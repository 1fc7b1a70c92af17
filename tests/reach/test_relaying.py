"""Relays: who gets what from them, how much of it, and what they say to who gets nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.access.badges import ROLES_BY_NAME
from shoal.base.clock import TOLERANCE_SECONDS
from shoal.errors import DialError, NoRoomError, StreamClosedError
from shoal.net.limits import RelayLimits
from shoal.net.transport import COOKIE_BYTES, receive_frame
from shoal.p2p import P2P
from shoal.reach.reachability import Reach
from shoal.reach.relay.messages import (
    MEETING_SECONDS,
    Connected,
    Observe,
    Observed,
    OpenObservation,
    Ready,
    RelayCode,
    Reserved,
)
from shoal.reach.relay.server import IDLE_SECONDS, OBSERVATION_BURST, SILENT_SECONDS, UNUSED_SECONDS, RelayServer
from shoal.testing import run
from tests.access.test_membership import SECRET, TRAIN, Clock, invitation, revoke, set_clock
from tests.p2p.peers import KINDS, Number, stub, until
from tests.reach.relays import Relayed, connect, introduce, reserve, reserving, square, tell

both_kinds = pytest.mark.parametrize("kind", KINDS)


async def crowd(peers: Relayed, relay: P2P, count: int) -> list[P2P]:
    """Several guests of one relay."""
    return [await peers.guest([relay]) for _ in range(count)]


def target_of(peer: P2P) -> dict[str, Any]:
    return {"target": peer.peer_id.to_bytes()}


# --- reservations -----------------------------------------------------------------------------------------------------


@pytest.mark.once  # which guest a relay gives up does not depend on the system
@both_kinds
async def test_a_full_relay_gives_the_place_of_who_has_another_one_to_who_has_none(kind: str) -> None:
    async with Relayed(kind) as peers:
        other, relay = await peers.relay(), await peers.relay(relay_limits=RelayLimits(reservations=3))
        called = await peers.guest([other, relay])
        second = await peers.guest([other, relay])
        (only,) = await crowd(peers, relay, 1)
        caller, newcomer = await peers.caller(), await peers.caller()
        introduce(caller, relay)
        caller.add_addresses(called.peer_id, called.reservations.addresses()[-1:])
        assert await square(caller, called) == 9, "a circuit is in use, so its peer keeps its place"
        introduce(newcomer, relay)
        answer = await reserve(newcomer, relay, others=1)
        assert (answer.code, answer.text) == (RelayCode.BUSY, "3 reservations"), "it can be reached already"
        # The newcomer keeps the place meanwhile: as soon as it is free, the second one comes back.
        async with reserving(newcomer, relay) as answer:
            assert isinstance(answer, Reserved)
            assert set(relay.relay.guests) == {called.peer_id, only.peer_id, newcomer.peer_id}
            assert other.peer_id in second.reservations.held


def test_who_has_no_other_relay_makes_room_when_it_was_not_called_for_minutes() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay(relay_limits=RelayLimits(reservations=2))
            first, second = await crowd(peers, relay, 2)
            newcomer, caller = await peers.caller(), await peers.caller()
            introduce(newcomer, relay)
            tell(caller, first)
            await asyncio.sleep(UNUSED_SECONDS / 2)
            assert (await reserve(newcomer, relay)).code == RelayCode.BUSY
            (await caller.dial(first.peer_id)).abort()
            await asyncio.sleep(UNUSED_SECONDS / 2 + 5.0)
            assert isinstance(await reserve(newcomer, relay), Reserved)
            await until(lambda: second.peer_id not in relay.relay.guests)
            assert first.peer_id in relay.relay.guests

    run(main())


async def test_a_crowded_relay_sends_newcomers_elsewhere_if_they_have_not_been_there() -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay(relay_limits=RelayLimits(reservations=4))
        await crowd(peers, relay, 2)
        newcomer = await peers.caller()
        introduce(newcomer, relay)
        answer = await reserve(newcomer, relay, may_go_elsewhere=True)
        assert (answer.code, answer.text) == (RelayCode.BUSY, "others may need the place: ask elsewhere first")
        assert isinstance(await reserve(newcomer, relay), Reserved)


async def test_no_place_is_taken_from_who_is_called() -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay(relay_limits=RelayLimits(reservations=1))
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        assert await square(caller, guest) == 9
        other = await peers.caller()
        introduce(other, relay)
        refused = relay.metrics.circuits_refused["no room"]
        answer = await reserve(other, relay)
        assert (answer.code, answer.text) == (RelayCode.BUSY, "1 reservations")
        assert relay.metrics.circuits_refused == {"no room": refused + 1}


async def test_one_host_has_so_many_reservations() -> None:
    async with Relayed("tcp") as peers:
        relay = await peers.relay(relay_limits=RelayLimits(reservations_per_host=2))
        await crowd(peers, relay, 2)
        third = await peers.caller()
        introduce(third, relay)
        answer = await reserve(third, relay)
        assert (answer.code, answer.text) == (RelayCode.BUSY, "2 reservations of one host")
        assert third.peer_id not in relay.relay.guests


async def test_roles_decide_who_may_reserve_and_who_may_be_a_relay() -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay(token=SECRET.text)
        watching = await peers.relay(token=invitation(ROLES_BY_NAME["monitor"]))
        assert relay.relay.serves
        assert not watching.relay.serves
        guest = await peers.guest([relay], token=SECRET.text)
        caller = await peers.caller(token=invitation(ROLES_BY_NAME["monitor"]))
        introduce(caller, relay)
        assert (await reserve(caller, relay)).code == RelayCode.REFUSED
        assert relay.metrics.circuits_refused == {"wrong role": 1}
        tell(caller, guest)
        assert (await caller.dial(guest.peer_id)).stream.is_relayed, "it may call others"


async def test_a_reservation_through_another_relay_is_refused() -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay()
        inner = await peers.guest([relay], relay=True)
        inner.client_mode = False  # so that it would be a relay
        other = await peers.caller()
        tell(other, inner)
        answer = await reserve(other, inner)
        assert answer.code == RelayCode.REFUSED
        assert "direct connection" in answer.text


@both_kinds
async def test_who_is_expelled_loses_reservation_and_circuits(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay(token=SECRET.text)
        expelled, guest = [await peers.guest(token=SECRET.text) for _ in range(2)]
        caller = await peers.caller(token=SECRET.text)
        for each in (expelled, guest):
            tell(caller, each)
            assert await square(caller, each) == 9
        tell(expelled, guest)
        assert await square(expelled, guest) == 9
        assert relay.relay.circuit_count == 3
        assert relay.members is not None
        relay.members.learn(revoke(relay, expelled.identity.public_key).to_bytes(), None)
        await until(lambda: relay.relay.circuit_count == 1)
        assert relay.relay.guests == [guest.peer_id]
        assert await square(caller, guest) == 9


def test_circuits_end_with_the_badge_of_either_side() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay(token=SECRET.text)
            guest = await peers.guest(token=SECRET.text)
            caller = await peers.caller(token=invitation(TRAIN))
            tell(caller, guest)
            assert caller.membership is not None
            left = 100.0
            set_clock(relay, Clock(caller.membership.own.expires + TOLERANCE_SECONDS - left))
            for _ in range(9):
                assert await square(caller, guest) == 9
                await asyncio.sleep(left / 10)
            assert caller.metrics.dials_relayed == relay.relay.circuit_count == 1
            await asyncio.sleep(left / 5)
            assert relay.relay.circuit_count == 0

    run(main())


# --- circuits ---------------------------------------------------------------------------------------------------------


async def with_two_callers(peers: Relayed, limits: RelayLimits) -> tuple[P2P, P2P, P2P, P2P]:
    """A relay with these limits, its guest, and two others that know the guest's address."""
    relay = await peers.relay(relay_limits=limits)
    guest, caller, other = await peers.guest(), await peers.caller(), await peers.caller()
    tell(caller, guest)
    tell(other, guest)
    return relay, guest, caller, other


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (RelayLimits(circuits=3), "3 circuits"),
        (RelayLimits(circuits_per_peer=3), "3 circuits of one peer"),
        (RelayLimits(circuits_per_pair=3), "3 circuits between the same two peers"),
    ],
)
async def test_limits_of_circuits(limits: RelayLimits, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.reach.relay.server.SILENT_SECONDS", 1e9)
    async with Relayed("memory") as peers:
        relay, guest, caller, other = await with_two_callers(peers, limits)
        (address,) = guest.reservations.addresses()
        streams = await caller.circuits.dial(address, guest.peer_id, 2)
        assert len(streams) == 2
        streams += await caller.circuits.dial(address, guest.peer_id, 8)
        assert len(streams) == relay.relay.circuit_count == 3, "as many as there is room for"
        with pytest.raises(NoRoomError, match=f"relay {relay.peer_id} has no room: '{text}'. Run 'shoal dht' on a pub"):
            await square(caller, guest)
        assert relay.metrics.circuits_refused == {"no room": 1}
        assert relay.metrics.circuits_carried == 3
        if text != "3 circuits":
            assert await square(other, guest) == 9
        for stream in streams:
            stream.abort()
        await until(lambda: relay.relay.circuit_count <= 1)
        assert await square(caller, guest) == 9


@pytest.mark.parametrize("limits", [RelayLimits(circuits_per_peer=3), RelayLimits(circuits_per_pair=3)])
def test_silent_circuits_make_room_for_others_between_the_same_peers(limits: RelayLimits) -> None:
    """A router that forgets its connections leaves them behind, and then the peers dial each other anew."""

    async def main() -> None:
        async with Relayed("memory") as peers:
            relay, guest, caller, other = await with_two_callers(peers, limits)
            (address,) = guest.reservations.addresses()
            beside = await other.circuits.dial(address, guest.peer_id, 1)
            before = await caller.circuits.dial(address, guest.peer_id, 3)
            await asyncio.sleep(SILENT_SECONDS / 2)
            with pytest.raises(NoRoomError):
                await caller.circuits.dial(address, guest.peer_id, 1)
            await before[0].write(b"news")
            await asyncio.sleep(SILENT_SECONDS * 3 / 4)
            after = await caller.circuits.dial(address, guest.peer_id, 8)
            assert len(after) == 2, "the third one is in use"
            assert relay.relay.circuit_count == 4
            for stream in (*beside, *before, *after):
                stream.abort()

    run(main())


def test_new_identities_of_one_host_do_not_take_all_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a relay may be used by one host, if nobody else is there; the rest is for others, too."""

    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay(relay_limits=RelayLimits(circuits=8, circuits_per_peer=3))
            guest, other = await peers.guest(), await peers.caller()
            monkeypatch.setattr(relay, "host_seen_of", lambda peer: peer if peer == other.peer_id else "8.8.8.0/24")
            given = []
            for _ in range(4):
                greedy = await peers.caller()
                introduce(greedy, relay)
                answer = await connect(greedy, relay, count=3, **target_of(guest))
                given.append(len(answer.cookies) if isinstance(answer, Connected) else answer.text)
            refused = "3 circuits of one host"
            assert given == [3, 3, refused, refused]
            introduce(other, relay)
            assert len((await connect(other, relay, count=3, **target_of(guest))).cookies) == 2
            await until(lambda: relay.relay.circuit_count == 0)
            assert len((await connect(greedy, relay, count=3, **target_of(guest))).cookies) == 3

    run(main())


async def test_calls_from_one_host_are_limited() -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay(relay_limits=RelayLimits(connects_per_second=0.001, connect_burst=2))
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        for _ in range(2):
            assert (await caller.dial(guest.peer_id)).stream.is_relayed
        with pytest.raises(NoRoomError, match="too many calls from one host"):
            await caller.dial(guest.peer_id)
        assert relay.metrics.circuits_refused == {"no room": 1}


async def test_codes_of_who_is_not_there_and_who_is_no_relay() -> None:
    async with Relayed("memory") as peers:
        relay, no_relay = await peers.relay(), await peers.start(relay=False)
        guest, caller = await peers.guest(), await peers.caller()
        introduce(caller, relay, no_relay)
        assert (await connect(caller, relay, target=b"x" * 30)).code == RelayCode.NO_RESERVATION
        assert (await connect(caller, no_relay, **target_of(guest))).code == RelayCode.NOT_A_RELAY
        assert relay.metrics.circuits_refused == {"no reservation": 1}


@both_kinds
async def test_a_guest_whose_router_is_another_kind_than_it_thought_says_so(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        guest, caller = await peers.private(), await peers.caller()
        introduce(caller, relay)
        await until(lambda: relay.book.find(guest.peer_id).reach == Reach.EASY)
        assert (await connect(caller, relay, **target_of(guest))).reach == Reach.EASY
        guest.outlook.is_hard = True
        guest.outlook.update()
        await until(lambda: relay.book.find(guest.peer_id).reach == Reach.HARD)
        assert (await connect(caller, relay, **target_of(guest))).reach == Reach.HARD
        assert relay.relay.guests == [guest.peer_id], "with the same reservation"


def test_a_side_that_does_not_come_ends_the_other() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest, caller = await peers.guest(), await peers.caller()
            introduce(caller, relay)
            guest.reservations.answer = lambda *what: None
            (place,) = relay.get_addresses(relay.peer_id)
            answer = await connect(caller, relay, count=2, **target_of(guest))
            assert len(answer.cookies) == relay.relay.circuit_count == 2
            session = await caller.transport.open_session(place, answer.cookies[0])
            began = asyncio.get_running_loop().time()
            with pytest.raises(StreamClosedError):
                await receive_frame(session, Ready)
            assert asyncio.get_running_loop().time() - began == pytest.approx(MEETING_SECONDS, abs=0.1)
            await until(lambda: relay.relay.circuit_count == 0)
            assert relay.metrics.circuits_refused == {"nobody came": 2}
            assert not relay.metrics.circuits_carried
            late = await caller.transport.open_session(place, answer.cookies[1])
            with pytest.raises(StreamClosedError):
                await late.read_exactly(1)

    run(main())


def test_an_idle_circuit_ends() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest, caller = await peers.guest(), await peers.caller(idle_timeout=1000)
            tell(caller, guest)
            assert await square(caller, guest) == 9
            await asyncio.sleep(IDLE_SECONDS - 10)
            assert await square(caller, guest) == 9
            await asyncio.sleep(IDLE_SECONDS - 10)
            assert relay.relay.circuit_count == 1
            await asyncio.sleep(20)
            assert relay.relay.circuit_count == 0
            assert caller.pool.idle_count == 1, "the connection to the relay"

    run(main())


def test_all_circuits_share_the_rate() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay(relay_limits=RelayLimits(rate=1e6))
            loop = asyncio.get_running_loop()
            guests, callers = await crowd(peers, relay, 4), [await peers.caller() for _ in range(4)]
            size = 2 * 10**6

            async def send(caller: P2P, guest: P2P) -> float:
                tell(caller, guest)
                began = loop.time()
                async with stub(caller, guest).rpc_echo() as call:
                    for number in range(size // 50_000):
                        await call.send(Number(value=number), bytes(50_000), end=number == size // 50_000 - 1)
                        await call.receive(Number)
                        await call.read_payload(2**20)
                return loop.time() - began

            times = await asyncio.gather(*map(send, callers, guests))
            assert max(times) == pytest.approx(16.0, rel=0.1), "four times two megabytes, there and back"
            assert min(times) > 0.85 * max(times)
            assert relay.metrics.bytes_carried == pytest.approx(8 * size, rel=0.01)

    run(main())


# --- observing --------------------------------------------------------------------------------------------------------


@both_kinds
async def test_a_peer_is_told_at_which_address_a_session_comes(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay, caller = await peers.relay(), await peers.caller()
        introduce(caller, relay)
        observer: OpenObservation = await RelayServer.get_stub(caller, relay.peer_id).rpc_observe(Observe())
        place = relay.get_addresses(relay.peer_id)[0]
        session = await caller.transport.open_session(place, observer.cookie)
        assert (await receive_frame(session, Observed)).seen_at == str(session.local_address)
        session.abort()
        again = await caller.transport.open_session(place, observer.cookie)
        with pytest.raises((StreamClosedError, DialError)):
            await again.read_exactly(1)


def test_observations_are_limited_and_end() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay, caller = await peers.relay(), await peers.caller()
            introduce(caller, relay)
            observe = RelayServer.get_stub(caller, relay.peer_id).rpc_observe
            cookies = {(await observe(Observe())).cookie for _ in range(OBSERVATION_BURST)}
            assert len(cookies) == OBSERVATION_BURST
            assert {len(cookie) for cookie in cookies} == {COOKIE_BYTES}
            with pytest.raises(Exception, match="BusyError: enough has been observed"):
                await observe(Observe())
            await asyncio.sleep(MEETING_SECONDS + 1)
            assert not relay.relay.observation_count

    run(main())


@both_kinds
async def test_a_relay_that_shuts_down_leaves_nothing_behind(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        async with stub(caller, guest).rpc_echo() as call:
            await call.send(Number(value=1))
            await call.receive(Number)
            await relay.shutdown()
            with pytest.raises(StreamClosedError):
                await call.receive(Number)
        assert not relay.relay.circuit_count
        assert not relay.relay.guests
        assert not relay.relay.serves
        await until(lambda: not guest.server.connections_of(caller.peer_id))
        assert relay.peer_id not in guest.reservations.held
