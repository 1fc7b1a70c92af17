"""Connections through relays, end to end: dialled, answered, called in reverse; and whatever may fail on the way."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Sequence

import pytest

from shoal.errors import DialError, IdentityMismatchError, NoRelayError, NoReservationError, StreamClosedError
from shoal.net.addresses import is_loopback
from shoal.net.connection_pool import CIRCUIT_SECONDS, CIRCUIT_STAGGER
from shoal.net.limits import Limits
from shoal.net.memory import MemoryNetwork, PipeEnd
from shoal.net.transport import COOKIE_BYTES, Splice, Stream
from shoal.p2p import P2P, Identity, Multiaddr, PeerID
from shoal.peers.identity import circuit_address
from shoal.reach.punching import FIRST_PAUSE, HEAD_START, Circuit, Puncher
from shoal.reach.relay.circuits import (
    ANSWER_SECONDS,
    MAX_ANSWERS,
    REVERSE_SECONDS,
    may_be_dialled,
    successes,
)
from shoal.reach.relay.messages import MAX_AT_ONCE, Connected, Incoming, IncomingReverse, Reach
from shoal.testing import run
from tests.p2p.peers import KINDS, Number, stub, until
from tests.reach.relays import HERE, Relayed, Told, connect, introduce, square, tell

both_kinds = pytest.mark.parametrize("kind", KINDS)
NOWHERE = Multiaddr("/ip4/127.0.0.1/tcp/9")


# --- through a relay --------------------------------------------------------------------------------------------------


@both_kinds
async def test_calls_go_through_a_relay_both_ways(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        first, second = await peers.guest(), await peers.guest()
        tell(first, second)
        tell(second, first)
        assert await square(first, second) == 9
        assert await square(second, first) == 9
        payload = secrets.token_bytes(3 * 2**20)
        async with stub(first, second).rpc_echo() as call:
            await call.send(Number(value=1), payload, end=True)
            await call.receive(Number)
            assert await call.read_payload(2**23) == payload
        for p2p, other in ((first, second), (second, first)):
            assert (p2p.metrics.dials_relayed, p2p.metrics.dials_direct) == (1, 2), "two to the relay"
            assert p2p.metrics.bytes_relayed > 6 * 2**20
            (accepted,) = p2p.server.connections_of(other.peer_id)
            assert accepted.stream.via == relay.peer_id
            assert p2p.address_seen_of(other.peer_id) == ""
            assert p2p.host_seen_of(other.peer_id) == other.peer_id
        assert relay.metrics.circuits_carried == 2
        assert relay.metrics.bytes_carried > 6 * 2**20


@both_kinds
async def test_several_at_once(kind: str) -> None:
    async with Relayed(kind) as peers:
        await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        await caller.prepare(guest.peer_id, 6)
        assert caller.metrics.dials_relayed == 6
        assert caller.metrics.calls_made == 1, "one call to the relay for all of them"
        assert caller.pool.count_of(guest.peer_id) == 6
        await caller.prepare(guest.peer_id, 7)
        assert caller.pool.count_of(guest.peer_id) == 7
        assert await square(caller, guest) == 9


async def test_several_at_once_to_who_seems_to_be_near() -> None:
    async with Relayed("memory") as peers:
        gone = await peers.start()
        [address] = gone.get_addresses(gone.peer_id)
        await gone.shutdown()
        await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        caller.add_addresses(guest.peer_id, [address])  # as homes do whose networks have the same number
        tell(caller, guest)
        await caller.prepare(guest.peer_id, 6)
        assert caller.metrics.dials_relayed == 6
        assert caller.metrics.calls_made == 2, "one for the first connection, which shows that it is not near"


@both_kinds
async def test_an_initial_peer_behind_a_relay(kind: str) -> None:
    async with Relayed(kind) as peers:
        await peers.relay()
        guest = await peers.private()
        address = (await guest.get_visible_maddrs())[-1]
        assert address.values()[-1] == str(guest.peer_id)
        assert "p2p-circuit" in address
        caller = await peers.caller(initial_peers=[address])
        assert await square(caller, guest) == 9


@both_kinds
async def test_nobody_else_can_answer_through_a_relay(kind: str) -> None:
    """A relay may lead to somebody else, who cannot prove to be the one that was asked for."""
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        liar, wanted, caller = await peers.guest(), Identity.generate().peer_id, await peers.caller()
        honest = relay.relay.connect
        relay.relay.connect = lambda request, dialler: honest(  # type: ignore[method-assign]
            _replace_target(request, liar.peer_id), dialler
        )
        caller.add_addresses(wanted, liar.reservations.addresses())
        with pytest.raises(IdentityMismatchError):
            await caller.dial(wanted)
        await until(lambda: relay.relay.circuit_count == 0)


def _replace_target(request, target: PeerID):  # type: ignore[no-untyped-def]
    request.target = target.to_bytes()
    return request


async def test_direct_addresses_come_first() -> None:
    async with Relayed("memory") as peers:
        await peers.relay()
        guest, caller = await peers.private(), await peers.caller()
        caller.add_addresses(guest.peer_id, reversed(guest.get_addresses(guest.peer_id)))
        assert caller.dialler.direct_addresses(guest.peer_id)
        assert await square(caller, guest) == 9
        assert (caller.metrics.dials_direct, caller.metrics.dials_relayed) == (1, 0)
        await caller.prepare(guest.peer_id, 3)
        assert caller.metrics.dials_relayed == 0


async def test_who_does_not_use_relays_dials_none() -> None:
    async with Relayed("memory") as peers:
        await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        caller.dialler.dial_circuit = None
        with pytest.raises(DialError, match="no address of peer"):
            await square(caller, guest)


# --- failures ---------------------------------------------------------------------------------------------------------


@both_kinds
async def test_only_relays_are_known_and_none_answers(kind: str) -> None:
    async with Relayed(kind) as peers:
        relays = [await peers.relay() for _ in range(2)]
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        for relay in relays:
            await relay.shutdown()
        expected = f"only relayed addresses of peer {guest.peer_id} are known, and no relay answers: .*; .*Wait"
        with pytest.raises(NoRelayError, match=expected) as found:
            await square(caller, guest)
        assert all(str(relay.peer_id) in str(found.value) for relay in relays)


async def test_a_relay_that_answers_nonsense_is_left_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Relayed("memory") as peers:
        liar, honest = await peers.relay(), await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        addresses = {address.get("p2p"): address for address in tell(caller, guest)}

        async def answer_nonsense(request: object, dialler: object) -> Connected:
            return Connected(cookies=[b"none"])

        monkeypatch.setattr(liar.relay, "connect", answer_nonsense)
        with pytest.raises(NoRelayError, match=f"{liar.peer_id}: invalid ConnectAnswer"):
            await caller.circuits.dial(addresses[str(liar.peer_id)], guest.peer_id)
        assert await square(caller, guest) == 9
        assert honest.metrics.circuits_carried == 1


@both_kinds
async def test_who_has_left_its_relays_is_looked_up_again(kind: str) -> None:
    async with Relayed(kind) as peers:
        old, new = await peers.relay(), await peers.relay()
        guest, caller = await peers.guest([old]), await peers.caller()
        tell(caller, guest)
        guest.reservations.want(False)
        await until(lambda: not old.relay.guests)
        with pytest.raises(
            NoReservationError, match=f"relay {old.peer_id} holds no reservation of peer {guest.peer_id}"
        ):
            await square(caller, guest)
        assert not caller.is_reachable(guest.peer_id), "that address is forgotten"
        introduce(guest, new)
        guest.reservations.want(True)
        await until(lambda: new.peer_id in guest.reservations.held)
        caller.add_addresses(guest.peer_id, [circuit_address(old.get_addresses(old.peer_id)[0], old.peer_id)])

        caller.directory = Told(find=lambda peer: tell(caller, guest))
        assert await square(caller, guest) == 9


def test_a_silent_relay_costs_a_moment_if_there_is_another_one() -> None:
    async def main() -> None:
        delays: dict[PeerID, float] = {}
        network = MemoryNetwork(lambda source, target, size: delays.get(source, 0.0) + delays.get(target, 0.0))
        async with Relayed("memory", network) as peers:
            relays = [await peers.relay() for _ in range(2)]
            guest, caller = await peers.guest(), await peers.caller()
            first, _ = tell(caller, guest)
            silent = next(relay.peer_id for relay in relays if str(relay.peer_id) in str(first))
            delays[silent] = 1e6
            began = asyncio.get_running_loop().time()
            assert await square(caller, guest) == 9
            assert asyncio.get_running_loop().time() - began == pytest.approx(CIRCUIT_STAGGER, abs=0.1)
            with pytest.raises(DialError, match=f"no connection to peer .* within {CIRCUIT_SECONDS:g} s"):
                await caller.circuits.dial(first, guest.peer_id)

    run(main())


def test_a_relay_is_asked_again_if_the_connection_to_it_has_broken_without_a_sign() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest, caller = await peers.guest(), await peers.caller()
            tell(caller, guest)
            assert await square(caller, guest) == 9
            caller.pool.end_idle(guest.peer_id)
            assert caller.pool.count_of(relay.peer_id)
            for connection in relay.server.connections_of(caller.peer_id):
                assert isinstance(connection.stream, PipeEnd)
                connection.stream.end()  # the other side does not hear of it
            began = asyncio.get_running_loop().time()
            assert await square(caller, guest) == 9
            assert asyncio.get_running_loop().time() - began == pytest.approx(ANSWER_SECONDS, abs=0.1)

    run(main())


def test_no_relay_is_reached_through_another_one() -> None:
    """Two peers that name each other as relays do not wait for each other for ever."""

    async def main() -> None:
        async with Relayed("memory") as peers:
            caller, one, other = await peers.caller(), *(Identity.generate().peer_id for _ in range(2))
            for peer, relay in ((one, other), (other, one)):
                caller.add_addresses(peer, [circuit_address(Multiaddr("/memory/999"), relay)])
            began = asyncio.get_running_loop().time()
            with pytest.raises(NoRelayError):
                await caller.dial(one)
            assert asyncio.get_running_loop().time() - began < 1.0

    run(main())


async def test_what_is_no_circuit_is_not_dialled_as_one() -> None:
    async with Relayed("memory") as peers:
        caller = await peers.caller()
        with pytest.raises(DialError, match=r"/ip4/127\.0\.0\.1/tcp/9 leads through no relay: give /ip4/"):
            await caller.circuits.dial(NOWHERE, Identity.generate().peer_id)


@both_kinds
async def test_nothing_is_left_of_a_dial_that_is_given_up(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        (address,) = tell(caller, guest)
        for pauses in range(40):
            dial = asyncio.ensure_future(caller.circuits.dial(address, guest.peer_id, 2))
            for _ in range(pauses):
                await asyncio.sleep(0)
            dial.cancel()
            for found in await asyncio.gather(dial, return_exceptions=True):
                if isinstance(found, list):
                    for stream in found:
                        stream.abort()
        await until(lambda: relay.relay.circuit_count == 0)
        await until(lambda: not guest.server.connections_of(caller.peer_id))
        assert await square(caller, guest) == 9


@pytest.mark.parametrize("turns", range(5))
async def test_nothing_is_left_of_several_attempts_that_are_given_up_twice(turns: int) -> None:
    """As when a dial takes too long, and whoever wanted it gives up at the same moment."""

    class Made:
        is_over = False

        def abort(self) -> None:
            self.is_over = True

    quick, slow = Made(), asyncio.Event()

    async def make() -> Made:
        return quick

    async def hang() -> Made:
        try:
            await slow.wait()
        finally:
            await asyncio.sleep(0)
        return Made()

    task = asyncio.ensure_future(successes([make(), hang()]))
    await asyncio.sleep(0.01)
    task.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert quick.is_over


# --- in reverse -------------------------------------------------------------------------------------------------------


@both_kinds
async def test_who_can_be_called_is_called_in_reverse(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        guest, caller = await peers.guest(), await peers.start(**HERE)
        caller.circuits.public_addresses = lambda: caller.transport.addresses()
        (address,) = tell(caller, guest)
        streams = await caller.circuits.dial(address, guest.peer_id, 4)
        assert len(streams) == 4
        assert not any(stream.is_relayed for stream in streams)
        assert await square(caller, guest) == 9
        assert (caller.metrics.dials_reversed, caller.metrics.dials_relayed) == (5, 0)
        assert relay.metrics.circuits_carried == relay.relay.circuit_count == 0
        for stream in streams:
            stream.abort()


@both_kinds
async def test_a_relay_calls_its_own_guests(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        guest = await peers.guest()
        tell(relay, guest)
        assert await square(relay, guest) == 9
        assert relay.metrics.dials_reversed == 1
        guest.reservations.want(False)
        await until(lambda: not relay.relay.guests)
        with pytest.raises(NoReservationError):
            await relay.dial(guest.peer_id)


def test_who_does_not_call_in_reverse_is_reached_through_the_relay() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            await peers.relay()
            guest, caller = await peers.guest(), await peers.start()
            caller.circuits.public_addresses = lambda: [Multiaddr("/memory/999")]
            (address,) = tell(caller, guest)
            loop = asyncio.get_running_loop()
            for seconds in (REVERSE_SECONDS, 0.0):
                began = loop.time()
                (stream,) = await caller.circuits.dial(address, guest.peer_id)
                assert stream.is_relayed
                assert loop.time() - began == pytest.approx(seconds, abs=0.1), "the second time it is not tried"
                stream.abort()
            await asyncio.sleep(FIRST_PAUSE)
            assert caller.circuits.reversals.is_due(guest.peer_id)

    run(main())


@both_kinds
async def test_a_relay_that_is_gone_says_nothing_about_calls_in_reverse(kind: str) -> None:
    async with Relayed(kind) as peers:
        gone, relay = await peers.relay(), await peers.relay()
        guest, caller = await peers.guest(), await peers.start(**HERE)
        caller.circuits.public_addresses = lambda: caller.transport.addresses()
        addresses = {address.get("p2p"): address for address in tell(caller, guest)}
        await gone.shutdown()
        with pytest.raises(NoRelayError, match=str(gone.peer_id)):
            await caller.circuits.dial(addresses[str(gone.peer_id)], guest.peer_id)
        assert caller.circuits.reversals.is_due(guest.peer_id)
        (stream,) = await caller.circuits.dial(addresses[str(relay.peer_id)], guest.peer_id)
        assert not stream.is_relayed
        assert caller.metrics.dials_reversed == 1
        stream.abort()


@pytest.mark.parametrize(
    ("address", "near", "expected"),
    [
        ("/ip4/8.8.8.8/tcp/4000", "/ip4/9.9.9.9/tcp/1", True),
        ("/ip4/8.8.8.8/tcp/443", "/ip4/9.9.9.9/tcp/1", True),
        ("/ip4/8.8.8.8/tcp/25", "/ip4/9.9.9.9/tcp/1", False),
        ("/ip6/2a00:1450::1/tcp/4000", "/ip4/9.9.9.9/tcp/1", True),
        ("/ip4/192.168.1.1/tcp/4000", "/ip4/9.9.9.9/tcp/1", False),
        ("/ip4/192.168.1.1/tcp/4000", "/ip4/192.168.1.7/tcp/1", True),
        ("/ip4/127.0.0.1/tcp/4000", "/ip4/192.168.1.7/tcp/1", False),
        ("/ip4/127.0.0.1/tcp/4000", "/ip4/127.0.0.1/tcp/1", True),
        ("/ip4/224.0.0.1/tcp/4000", "/ip4/127.0.0.1/tcp/1", False),
        ("/ip4/0.0.0.0/tcp/4000", "/ip4/127.0.0.1/tcp/1", False),
        ("/dns4/example.org/tcp/4000", "/ip4/9.9.9.9/tcp/1", False),
        (
            "/ip4/8.8.8.8/tcp/4000/p2p/12D3KooWHXWVfEx3jVqZEJ8dDFJ9cafPkgdPDT1Wg3FpmHHCCXXJ/p2p-circuit",
            "/memory/1",
            False,
        ),
    ],
)
def test_a_relay_cannot_make_others_dial_whatever_it_likes(address: str, near: str, expected: bool) -> None:
    assert may_be_dialled(Multiaddr(address), [Multiaddr(near)], is_loopback, is_loopback) is expected


async def test_a_relay_that_announces_crowds_is_answered_a_little(caplog: pytest.LogCaptureFixture) -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay()
        guest = await peers.guest()
        told = Incoming(peer=relay.peer_id.to_bytes(), cookies=[bytes(COOKIE_BYTES)])
        places = relay.get_addresses(relay.peer_id)
        for _ in range(10 * MAX_ANSWERS):
            guest.answering.answer(relay.peer_id, places, told)
        assert len(guest.answering.tasks) == MAX_ANSWERS
        assert len([message for message in caplog.messages if "more connections than this peer makes" in message]) == 1
        await until(lambda: not guest.answering.tasks)
        guest.answering.answer(relay.peer_id, places, Incoming(peer=b"?", cookies=[]))
        guest.answering.answer(
            relay.peer_id,
            places,
            IncomingReverse(peer=b"?", places=["nonsense", "/ip4/8.8.8.8/tcp/22"], cookies=[bytes(COOKIE_BYTES)]),
        )
        await until(lambda: not guest.answering.tasks)


async def test_a_relay_takes_few_of_the_files_of_its_guests(caplog: pytest.LogCaptureFixture) -> None:
    """Each announcement may ask for eight connections, which count beside those that others open to this peer."""
    async with Relayed("memory") as peers:
        relay = await peers.relay()
        guest = await peers.guest(limits=Limits(answered=20))
        greedy, quiet = Identity.generate().peer_id.to_bytes(), Identity.generate().peer_id.to_bytes()
        places = relay.get_addresses(relay.peer_id)
        guest.answering.answer(relay.peer_id, places, Incoming(peer=quiet, cookies=[bytes(COOKIE_BYTES)]))
        for _ in range(10):
            told = Incoming(peer=greedy, cookies=[bytes(COOKIE_BYTES)] * MAX_AT_ONCE)
            guest.answering.answer(relay.peer_id, places, told)
            assert guest.answering.connections <= 20
        assert [answer.peer for answer in guest.answering.tasks.values()] == [quiet, greedy, greedy]
        assert len([message for message in caplog.messages if "more connections than this peer makes" in message]) == 1
        await until(lambda: not guest.answering.tasks)


async def test_a_guest_with_few_files_is_still_reached() -> None:
    async with Relayed("memory") as peers:
        await peers.relay()
        guest, caller = await peers.guest(limits=Limits(answered=1)), await peers.caller()
        tell(caller, guest)
        await caller.prepare(guest.peer_id, MAX_AT_ONCE)
        assert await square(caller, guest) == 9
        assert caller.pool.count_of(guest.peer_id) == MAX_AT_ONCE


def test_strangers_who_do_not_come_keep_nobody_out() -> None:
    """They ask for as many circuits to a guest as it makes at the same time, and join none of them."""

    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest, caller = await peers.guest(), await peers.caller()
            tell(caller, guest)
            for _ in range(4):
                stranger = await peers.caller()
                introduce(stranger, relay)
                for _ in range(MAX_ANSWERS // 3):
                    await connect(stranger, relay, target=guest.peer_id.to_bytes())
            await until(lambda: len(guest.answering.tasks) == MAX_ANSWERS)
            assert await square(caller, guest) == 9
            await until(lambda: not guest.answering.tasks)

    run(main())


async def test_an_unexpected_error_of_an_answer_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Relayed("memory") as peers:
        relay = await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        addresses = tell(caller, guest)

        async def break_down(*args: object, **options: object) -> list[Circuit]:
            raise KeyError("no such thing")

        monkeypatch.setattr("shoal.reach.relay.circuits.open_circuits", break_down)
        told = Incoming(peer=caller.peer_id.to_bytes(), cookies=[bytes(COOKIE_BYTES)])
        for _ in range(3):
            guest.answering.answer(relay.peer_id, addresses, told)
        await until(lambda: not guest.answering.tasks)
        (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        for said in (caller.peer_id, relay.peer_id, "KeyError", "no such thing"):
            assert str(said) in line


# --- with direct connections on the way -------------------------------------------------------------------------------


class Punch(Puncher):
    """Finds direct connections after some time, or does not."""

    def __init__(self, after: float | None = None, *, works: bool = True) -> None:
        self.after, self.works, self.has_worked = after, works, False
        self.target: P2P | None = None
        self.caller: P2P | None = None
        self.circuits: list[Sequence[Circuit]] = []

    def expects_success(self, peer: PeerID) -> bool:
        return self.has_worked

    def is_worth_it(self, peer: PeerID) -> bool:
        return self.after is not None

    def note_unpunched(self, peer: PeerID, circuits: Sequence[Circuit]) -> None:
        pass

    async def as_dialler(
        self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit], since: float
    ) -> Sequence[asyncio.Future[Stream]]:
        self.circuits.append(circuits)
        return [asyncio.ensure_future(self._find()) for _ in circuits]

    async def _find(self) -> Stream:
        assert self.target is not None
        assert self.caller is not None
        await asyncio.sleep(self.after or 0.0)
        if not self.works:
            raise DialError("no way")
        (place,) = self.target.transport.addresses()
        return await self.caller.transport.dial(place, self.target.peer_id)

    async def as_target(self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit]) -> Awaitable[None]:
        self.circuits.append(circuits)
        return asyncio.sleep(0)


@pytest.mark.parametrize(
    ("after", "works", "takes", "found", "later"),
    [
        (0.0, True, 0.0, {"dials_punched": 2, "dials_relayed": 0}, 0),
        (HEAD_START - 0.1, True, HEAD_START - 0.1, {"dials_punched": 2, "dials_relayed": 0}, 0),
        (HEAD_START + 0.2, True, HEAD_START, {"dials_punched": 0, "dials_relayed": 2}, 2),
        (HEAD_START - 0.1, False, HEAD_START - 0.1, {"dials_punched": 0, "dials_relayed": 2}, 0),
        (5.0, False, HEAD_START, {"dials_punched": 0, "dials_relayed": 2}, 0),
    ],
)
def test_a_direct_connection_is_preferred_if_it_comes_soon(
    after: float, works: bool, takes: float, found: dict[str, int], later: int
) -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest, caller = await peers.private(), await peers.caller()
            punch = Punch(after, works=works)
            punch.caller, punch.target = caller, guest
            caller.circuits.punching, guest.circuits.punching = punch, Punch()
            (address,) = guest.reservations.addresses()
            began = asyncio.get_running_loop().time()
            streams = await caller.circuits.dial(address, guest.peer_id, 2)
            assert asyncio.get_running_loop().time() - began == pytest.approx(takes, abs=0.05)
            assert {name: getattr(caller.metrics, name) for name in found} == found
            assert all(stream.is_relayed == bool(found["dials_relayed"]) for stream in streams)
            assert all(circuit.seen_at != circuit.other_seen_at for circuit in punch.circuits[0])
            await asyncio.sleep(10.0)
            assert caller.pool.count_of(guest.peer_id) == later, "what comes late serves later calls"
            assert caller.metrics.dials_punched == found["dials_punched"] + later
            assert all(not stream.closed for stream in streams)
            for stream in streams:
                stream.abort()
            await until(lambda: relay.relay.circuit_count == 0)

    run(main())


@pytest.mark.parametrize(("after", "relayed"), [(HEAD_START - 0.1, 0), (HEAD_START + 0.1, 1)])
def test_a_relay_carries_nothing_while_the_direct_connection_of_before_is_expected(after: float, relayed: int) -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest, caller = await peers.private(), await peers.caller()
            punch = Punch(after)
            punch.caller, punch.target, punch.has_worked = caller, guest, True
            caller.circuits.punching, guest.circuits.punching = punch, Punch()
            (address,) = guest.reservations.addresses()
            [stream] = await caller.circuits.dial(address, guest.peer_id)
            assert caller.metrics.dials_relayed == relayed
            assert (relay.metrics.bytes_carried > 0) is bool(relayed)
            stream.abort()
            await until(lambda: relay.relay.circuit_count == 0)

    run(main())


@pytest.mark.parametrize(("moved", "is_worth_it"), [(False, False), (True, True)])
async def test_a_peer_that_was_not_worth_a_punch_is_when_it_has_moved(moved: bool, is_worth_it: bool) -> None:
    async with Relayed("memory") as peers:
        await peers.relay()
        guest, caller = await peers.guest(), await peers.caller()
        (address,) = tell(caller, guest)
        caller.circuits.punching = puncher = caller.punching
        puncher.policy.note_hopeless(guest.peer_id, ("memory", "9.9.9.9" if moved else "memory"))
        [stream] = await caller.circuits.dial(address, guest.peer_id)
        assert stream.is_relayed
        assert puncher.is_worth_it(guest.peer_id) is is_worth_it
        stream.abort()


@both_kinds
async def test_the_relay_is_killed_in_a_call(kind: str) -> None:
    async with Relayed(kind) as peers:
        relays = [await peers.relay() for _ in range(2)]
        guest, caller = await peers.guest(), await peers.caller()
        tell(caller, guest)
        async with stub(caller, guest).rpc_echo() as call:
            await call.send(Number(value=1))
            await call.receive(Number)
            via = call.connection.stream.via
            killed = next(relay for relay in relays if relay.peer_id == via)
            await killed.transport.close()
            await killed.relay.close()
            await killed.server.close()
            with pytest.raises(StreamClosedError):
                await call.receive(Number)
        assert await square(caller, guest) == 9


@both_kinds
@pytest.mark.parametrize("carried", [0, 100_000])
async def test_a_relay_that_ends_all_circuits_early_is_left_for_another_one(
    kind: str, carried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends each before, or long after, both ends know each other; nobody is reached but the target."""
    payload = secrets.token_bytes(2**20)
    async with Relayed(kind) as peers:
        liar, honest = await peers.relay(), await peers.relay()

        class EndsEarly(Splice):
            async def run(self) -> None:
                carrying = asyncio.ensure_future(super().run())
                if self._throttle._whole is liar.relay.rate:  # type: ignore[attr-defined]
                    before = liar.metrics.bytes_carried
                    await until(lambda: liar.metrics.bytes_carried - before >= carried or carrying.done())
                    carrying.cancel()
                await asyncio.wait([carrying])

        monkeypatch.setattr("shoal.reach.relay.server.Splice", EndsEarly)
        guest, caller = await peers.guest(), await peers.caller()

        def add_way(relay: P2P) -> None:
            place = relay.get_addresses(relay.peer_id)[0]
            caller.add_addresses(relay.peer_id, [place])
            caller.add_addresses(guest.peer_id, [circuit_address(place, relay.peer_id)])

        async def transfer() -> PeerID | None:
            """Through which relay this was."""
            async with stub(caller, guest).rpc_echo() as call:
                await call.send(Number(value=1), payload, end=True)
                await call.receive(Number)
                assert await call.read_payload(2**21) == payload
                return call.connection.stream.via

        add_way(liar)
        with pytest.raises((DialError, StreamClosedError)):
            await transfer()
        add_way(honest)
        assert await transfer() == honest.peer_id
        assert liar.metrics.circuits_carried
