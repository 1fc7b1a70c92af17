"""Reservations: at which relays a peer has them, for how long, and what it does when one is over."""

from __future__ import annotations

import asyncio

import pytest

from shoal.net.limits import RelayLimits
from shoal.net.memory import MemoryNetwork
from shoal.net.service import P2PContext, ServicerBase, patient
from shoal.p2p import P2P, Call, Multiaddr
from shoal.reach.relay.client import (
    DOUBTED_SECONDS,
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    RECENT_SECONDS,
    SILENCE_SECONDS,
)
from shoal.reach.relay.messages import Alive, Notice, NotReserved, RelayCode, Reserve, ReserveAnswer, Reserved
from shoal.reach.relay.server import ALIVE_SECONDS, CROWDED_SHARE, RESERVATION_SECONDS, SUCCESSION_SECONDS, RelayServer
from shoal.testing import run
from tests.p2p.peers import KINDS, until
from tests.reach.relays import HERE, Relayed, introduce, reserve, square, tell

pytestmark = pytest.mark.once

both_kinds = pytest.mark.parametrize("kind", KINDS)


@both_kinds
async def test_two_relays_are_held_and_left(kind: str) -> None:
    async with Relayed(kind) as peers:
        relays = [await peers.relay() for _ in range(3)]
        changes: list[int] = []
        guest = await peers.caller()
        introduce(guest, *relays)
        reservations = guest.reservations
        reservations.on_change = lambda: changes.append(len(reservations.held))
        assert not reservations.is_wanted
        reservations.want(True)
        reservations.want(True)
        await until(lambda: len(reservations.held) == 2)
        assert changes == [1, 2]
        # Whichever relay answers first comes first.
        addresses = {
            relay.peer_id: Multiaddr(f"{relay.get_addresses(relay.peer_id)[0]}/p2p/{relay.peer_id}/p2p-circuit")
            for relay in relays
        }
        assert reservations.addresses() == [addresses[held] for held in reservations.held]
        holders = [relay for relay in relays if guest.peer_id in relay.relay.guests]
        assert len(holders) == 2
        if kind == "tcp":
            assert all(held.seen_at.startswith("/ip4/127.0.0.1/tcp/") for held in reservations.held.values())
        reservations.want(False)
        await until(lambda: not any(relay.relay.guests for relay in relays))
        assert not reservations.addresses()
        assert not reservations.is_wanted


@both_kinds
async def test_another_relay_takes_the_place_of_one_that_shuts_down(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal.reach.relay.client")
    async with Relayed(kind) as peers:
        relays = [await peers.relay() for _ in range(3)]
        guest = await peers.guest()
        caller = await peers.caller()
        gone = next(relay for relay in relays if relay.peer_id in guest.reservations.held)
        await gone.shutdown()
        await until(lambda: len(guest.reservations.held) == 2 and gone.peer_id not in guest.reservations.held)
        assert any("is over: 'this relay shuts down'" in message for message in caplog.messages)
        tell(caller, guest)
        assert await square(caller, guest) == 9


def test_a_relay_that_can_no_longer_be_called_tells_its_guests() -> None:
    """Else they would rely on it for up to an hour, and be taken for dead."""

    async def main() -> None:
        async with Relayed("memory") as peers:
            relays = [await peers.relay(relay=None) for _ in range(3)]
            guest, caller = await peers.guest(), await peers.caller()
            lost = next(relay for relay in relays if relay.peer_id in guest.reservations.held)
            lost.relay.is_public = False
            await asyncio.sleep(ALIVE_SECONDS + 1.0)
            assert not lost.relay.guests
            others = {relay.peer_id for relay in relays if relay is not lost}
            assert set(guest.reservations.held) == others
            tell(caller, guest)
            assert await square(caller, guest) == 9

    run(main())


@both_kinds
async def test_a_relay_that_breaks_the_protocol_is_left(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Chatty(Silent):
        """Says more than a relay has to say."""

        @patient
        async def rpc_reserve(self, call: Call, context: P2PContext) -> None:
            await call.receive(Reserve)
            await call.send(Reserved(), b"more")
            await call.send(Alive())

    async with Relayed(kind) as peers:
        liar, guest = await peers.relay(), await peers.caller()
        await liar.relay.remove_p2p_handlers(liar)
        await Chatty([]).add_p2p_handlers(liar)
        introduce(guest, liar)
        guest.reservations.want(True)
        await until(lambda: guest.metrics.connections_dropped["broke the protocol"] > 0)
        assert not [each for each in caplog.records if each.levelname == "WARNING"]


@both_kinds
async def test_a_newer_reservation_of_the_same_peer_replaces_the_older(kind: str) -> None:
    async with Relayed(kind) as peers:
        relay = await peers.relay()
        guest = await peers.guest()
        guest.add_addresses(relay.peer_id, relay.get_addresses(relay.peer_id))
        answer = await reserve(guest, relay)
        assert isinstance(answer, Reserved)
        assert answer.circuits == 256
        assert answer.rate == 6_250_000.0
        await until(lambda: guest.peer_id not in guest.reservations.held)


def test_who_is_no_relay_is_not_asked_again() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            stranger = await peers.start(relay=False)
            guest = await peers.caller()
            introduce(guest, stranger)
            answer = await reserve(guest, stranger)
            assert answer.code == RelayCode.NOT_A_RELAY
            assert not stranger.hello().relay
            guest.reservations.want(True)
            await asyncio.sleep(600)
            assert stranger.metrics.circuits_refused == {"not a relay": 1}, "its greeting has told that it is none"

    run(main())


@both_kinds
async def test_who_cannot_be_called_tells_of_its_relays(kind: str) -> None:
    async with Relayed(kind) as peers:
        for _ in range(2):
            await peers.relay()
        guest = await peers.private()
        circuits = [str(address) for address in guest.reservations.addresses()]
        assert guest.hello().addresses[-2:] == circuits
        visible = [str(address) for address in await guest.get_visible_maddrs()]
        assert visible[-2:] == [f"{address}/p2p/{guest.peer_id}" for address in circuits]


async def test_public_peers_are_relays_unless_they_do_not_want_to() -> None:
    async with Relayed("memory") as peers:
        by_default, never = await peers.start(), await peers.start(relay=False)
        client = await peers.caller(relay=True)
        assert [p2p.hello().relay for p2p in (by_default, never, client)] == [True, False, False]
        by_default.relay.is_public = False
        assert not by_default.hello().relay


def test_pauses_double_from_a_second_to_five_minutes() -> None:
    class Refuser(ServicerBase):
        """A relay that is always full."""

        def __init__(self) -> None:
            self.asked_at: list[float] = []

        @classmethod
        def handle_name(cls, method: str, namespace: str | None) -> str:
            return RelayServer.handle_name(method, namespace)

        async def rpc_reserve(self, request: Reserve, context: P2PContext) -> ReserveAnswer:
            self.asked_at.append(asyncio.get_running_loop().time())
            return NotReserved(code=RelayCode.BUSY, text="full")

    async def main() -> list[float]:
        async with Relayed("memory") as peers:
            full = await peers.start()
            await full.relay.remove_p2p_handlers(full)
            refuser = Refuser()
            await refuser.add_p2p_handlers(full)
            full.hello = lambda hello=full.hello: _as_relay(hello())  # type: ignore[method-assign,misc]
            guest = await peers.caller()
            introduce(guest, full)
            guest.reservations.want(True)
            await asyncio.sleep(2000)
            return [b - a for a, b in zip(refuser.asked_at, refuser.asked_at[1:], strict=False)]

    pauses = run(main())
    assert pauses[:4] == pytest.approx([FIRST_PAUSE_SECONDS * 2**number for number in range(4)], abs=0.1)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_SECONDS, abs=0.1)


def _as_relay(hello: object) -> object:
    hello.relay = True  # type: ignore[attr-defined]
    return hello


def test_the_nearest_of_eight_and_trusted_ones_first() -> None:
    async def main() -> None:
        distances: dict[object, float] = {}
        network = MemoryNetwork(lambda source, target, size: distances.get(source, 0.0) + distances.get(target, 0.0))
        async with Relayed("memory", network) as peers:
            relays = [await peers.relay() for _ in range(5)]
            guest = await peers.caller()
            introduce(guest, *relays)
            for number, relay in enumerate(relays):
                distances[relay.peer_id] = 0.1 - 0.01 * number
                await guest.connect(relay.peer_id, relay.get_addresses(relay.peer_id)[0])
                await reserve(guest, relay)
            trusted = relays[0]
            guest.reservations.trusted = [(trusted.get_addresses(trusted.peer_id)[0], trusted.peer_id)]
            guest.reservations.want(True)
            await until(lambda: len(guest.reservations.held) == 2)
            assert set(guest.reservations.held) == {trusted.peer_id, relays[-1].peer_id}

    run(main())


def test_relays_on_different_hosts_are_preferred_but_one_host_is_better_than_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relays = [await peers.relay() for _ in range(3)]
            hosts = {relays[0].peer_id: "one", relays[1].peer_id: "one", relays[2].peer_id: "two"}
            monkeypatch.setattr(P2P, "host_of", lambda self, peer: hosts.get(peer, peer))
            guest = await peers.guest()
            assert relays[2].peer_id in guest.reservations.held
            await relays[2].shutdown()
            await until(lambda: set(guest.reservations.held) == {relay.peer_id for relay in relays[:2]})

    run(main())


def test_a_reservation_lasts_an_hour_and_its_successor_begins_before() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            relay = await peers.relay()
            guest = await peers.guest()
            (first,) = guest.reservations.held.values()
            await asyncio.sleep(RESERVATION_SECONDS - SUCCESSION_SECONDS - 60)
            assert list(guest.reservations.held.values()) == [first], "signs of life keep it"
            await asyncio.sleep(60 + 2 * FIRST_PAUSE_SECONDS)
            (second,) = guest.reservations.held.values()
            assert second.since - first.since == pytest.approx(
                RESERVATION_SECONDS - SUCCESSION_SECONDS, abs=2 * FIRST_PAUSE_SECONDS
            )
            await asyncio.sleep(2 * SUCCESSION_SECONDS)
            assert list(guest.reservations.held.values()) == [second]
            assert relay.relay.guests == [guest.peer_id]
            guest.reservations.want(False)
            await until(lambda: not relay.relay.guests)

    run(main())


@pytest.mark.parametrize("relays", [1, 2, 3, 5])
def test_a_peer_can_be_called_while_its_reservations_become_an_hour_old(relays: int) -> None:
    """By those, too, who have not heard of it for a while."""
    heard_before_seconds = 30

    async def main() -> None:
        async with Relayed("memory") as peers:
            for _ in range(relays):
                await peers.relay()
            guest, caller = await peers.guest(), await peers.caller()
            introduce(caller, *peers.relays)
            heard: list[list[Multiaddr]] = []
            began = asyncio.get_running_loop().time()
            used = set(guest.reservations.held)
            while asyncio.get_running_loop().time() < began + RESERVATION_SECONDS + 2 * SUCCESSION_SECONDS:
                heard.append(guest.reservations.addresses())
                if len(heard) > RESERVATION_SECONDS - 2 * SUCCESSION_SECONDS:
                    caller.address_book.replace(guest.peer_id, heard[-heard_before_seconds])
                    connection = await caller.dial(guest.peer_id)
                    connection.abort()
                used.update(guest.reservations.held)
                await asyncio.sleep(1.0)
            assert len(used) == min(relays, 2), "nothing speaks against the same ones"
            assert len(guest.reservations.held) == min(relays, 2)
            assert sum(guest.peer_id in relay.relay.guests for relay in peers.relays) == min(relays, 2)

    run(main())


@pytest.mark.parametrize("has_others", [True, False])
def test_guests_of_a_crowded_relay_look_for_another_one_after_an_hour(has_others: bool) -> None:
    """And none is without a reservation meanwhile, even if there is no other one."""

    async def main() -> None:
        async with Relayed("memory") as peers:
            crowded, *others = [
                await peers.relay(relay_limits=RelayLimits(reservations=reservations))
                for reservations in ([8, 100, 100] if has_others else [8])
            ]
            guests = [await peers.guest([crowded, *others[:1]]) for _ in range(7)]
            for guest in guests:
                introduce(guest, crowded, *others)
            await asyncio.sleep(RESERVATION_SECONDS - 2 * SUCCESSION_SECONDS)
            assert len(crowded.relay.guests) == 7
            for _ in range(3 * round(SUCCESSION_SECONDS)):
                await asyncio.sleep(1.0)
                assert all(guest.reservations.held for guest in guests)
            assert len(crowded.relay.guests) == (4 if has_others else 7)
            assert [len(other.relay.guests) for other in others] == ([7, 3] if has_others else [])

    run(main())


def test_guests_spread_over_relays_that_come_and_go_and_none_loses_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal.reach.relay.client")
    limits = RelayLimits(reservations=8)
    count, guest_count, changes = 10, 12, 15

    async def main() -> int:
        most = 0
        async with Relayed("memory") as peers:
            living = [await peers.relay(relay_limits=limits) for _ in range(count)]
            guests = [await peers.guest(living) for _ in range(guest_count)]
            for _ in range(changes):
                await living.pop(0).shutdown()
                living.append(await peers.relay(relay_limits=limits))
                for guest in guests:
                    introduce(guest, *living)
                for _ in range(20):
                    await asyncio.sleep(1.0)
                    most = max(most, *(len(relay.relay.guests) for relay in living))
                    assert all(guest.reservations.held for guest in guests), "all can be called all the time"
        return most

    assert run(main()) <= limits.reservations * CROWDED_SHARE
    assert not any("need the place" in message for message in caplog.messages)


def test_relays_of_the_table_come_before_those_that_were_heard_of_long_ago() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            full = [await peers.relay(relay_limits=RelayLimits(reservations_per_host=0)) for _ in range(4)]
            first, second, new = [await peers.relay() for _ in range(3)]
            guest = await peers.guest([first, second])
            for relay in full:
                guest.add_addresses(relay.peer_id, relay.get_addresses(relay.peer_id))
                assert (await reserve(guest, relay)).code == RelayCode.BUSY
            await asyncio.sleep(RECENT_SECONDS + 1.0)
            introduce(guest, second, new)
            await first.shutdown()
            await until(lambda: set(guest.reservations.held) == {second.peer_id, new.peer_id})
            assert all(relay.metrics.circuits_refused == {"no room": 1} for relay in full)

    run(main())


class Silent(ServicerBase):
    """A relay that gives a reservation and then falls silent."""

    def __init__(self, says: list[Notice]) -> None:
        self.says = says
        self.asked_at: list[float] = []

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        return RelayServer.handle_name(method, namespace)

    @patient
    async def rpc_reserve(self, call: Call, context: P2PContext) -> None:
        await call.receive(Reserve)
        self.asked_at.append(asyncio.get_running_loop().time())
        await call.send(Reserved())
        for each in self.says:
            await asyncio.sleep(ALIVE_SECONDS)
            await call.send(each)
        await asyncio.Event().wait()


def test_a_silent_relay_counts_as_dead_and_what_goes_through_it_is_cut() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            dead = await peers.start(**HERE)
            await dead.relay.remove_p2p_handlers(dead)
            await Silent([Alive(), Alive()]).add_p2p_handlers(dead)
            other = await peers.relay()
            guest, caller = await peers.guest([other]), await peers.caller()
            tell(caller, guest)
            assert await square(caller, guest) == 9
            introduce(guest, other, dead)
            guest.reservations.look()
            await until(lambda: len(guest.reservations.held) == 2)
            began = asyncio.get_running_loop().time()
            (through,) = guest.server.connections_of(caller.peer_id)
            assert through.stream.via == other.peer_id
            through.stream.via = dead.peer_id
            await until(lambda: dead.peer_id not in guest.reservations.held, 60.0)
            passed = asyncio.get_running_loop().time() - began
            assert passed == pytest.approx(2 * ALIVE_SECONDS + SILENCE_SECONDS, abs=0.5)
            assert through.closed
            assert other.peer_id in guest.reservations.held

    run(main())


def test_when_connections_fall_silent_relays_have_less_time_to_show_that_they_live() -> None:
    async def main() -> None:
        async with Relayed("memory") as peers:
            dead = await peers.start(**HERE)
            await dead.relay.remove_p2p_handlers(dead)
            await Silent([]).add_p2p_handlers(dead)
            other = await peers.relay()
            guest = await peers.guest([other])
            introduce(guest, other, dead)
            guest.reservations.look()
            await until(lambda: len(guest.reservations.held) == 2)
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(1.0)
            guest.reservations.doubt()
            await until(lambda: dead.peer_id not in guest.reservations.held, 60.0)
            assert asyncio.get_running_loop().time() - began == pytest.approx(DOUBTED_SECONDS, abs=0.5)
            await asyncio.sleep(2 * ALIVE_SECONDS)
            guest.reservations.doubt()
            await asyncio.sleep(2 * ALIVE_SECONDS)
            assert other.peer_id in guest.reservations.held

    run(main())


@pytest.mark.parametrize("is_doubted", [True, False])
def test_relays_that_fell_silent_together_with_others_are_asked_again_soon(is_doubted: bool) -> None:
    """Then it is not the relay's fault, but that of a router that has forgotten all connections."""

    async def main() -> list[float]:
        async with Relayed("memory") as peers:
            dead = await peers.start(**HERE)
            await dead.relay.remove_p2p_handlers(dead)
            silent = Silent([])
            await silent.add_p2p_handlers(dead)
            guest = await peers.caller()
            introduce(guest, dead)
            guest.reservations.want(True)
            for _ in range(4):
                await until(lambda: dead.peer_id in guest.reservations.held, 60.0)
                await asyncio.sleep(1.0)
                if is_doubted:
                    guest.reservations.doubt()
                await until(lambda: dead.peer_id not in guest.reservations.held, 60.0)
            return [b - a for a, b in zip(silent.asked_at, silent.asked_at[1:], strict=False)]

    held = DOUBTED_SECONDS if is_doubted else SILENCE_SECONDS
    pauses = [gap - held for gap in run(main())]
    assert pauses == pytest.approx([FIRST_PAUSE_SECONDS * (1 if is_doubted else 2**n) for n in range(3)], abs=0.5)
