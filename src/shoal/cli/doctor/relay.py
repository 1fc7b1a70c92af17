"""Checks whether a peer is a relay for others, and how good the way through it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from shoal.access.badges import ANY_ROLE
from shoal.base.logs import one_line
from shoal.cli.doctor.findings import Finding, fail, ok, unknown, warn
from shoal.cli.doctor.peer import ANSWER_SECONDS, NO_ANSWER, measure, milliseconds
from shoal.errors import P2PHandlerError
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.peers.identity import circuit_address
from shoal.reach.relay.messages import NotReserved, RelayCode, Reserve, ReserveAnswer, Reserved
from shoal.reach.relay.server import RelayServer

RESERVE_SECONDS = 10.0
RUN_ONE = "run 'shoal dht' on a machine that others can call"


async def ask_for_reservation(p2p: P2P, peer: PeerID) -> ReserveAnswer | None:
    """What a peer answers to the request for a reservation, which is given back at once; ``None``: nothing.

    Raises:
        ShoalError, OSError: it cannot be asked.
    """
    async with (
        asyncio.timeout(ANSWER_SECONDS),
        p2p.open_call(peer, RelayServer.handle_name("rpc_reserve", None), roles=ANY_ROLE) as call,
    ):
        await call.send(Reserve(), end=True)
        return await call.receive(ReserveAnswer)


async def is_relay(p2p: P2P, peer: PeerID) -> bool:
    """Whether a peer takes a reservation now."""
    try:
        answer = await ask_for_reservation(p2p, peer)
    except NO_ANSWER:
        return False
    return isinstance(answer, Reserved)


async def look_at_relay(
    p2p: P2P, address: Multiaddr, peer: PeerID, round_trip: float, token: str | None
) -> AsyncIterator[Finding]:
    """Ask a peer for a reservation; if it takes one, let this machine call itself through it.

    Args:
        p2p: the peer of this machine, connected to the other one.
        address: where the other one is, without ``/p2p``.
        round_trip: seconds to the other one and back, as measured.
        token: of the run.
    """
    try:
        answer = await ask_for_reservation(p2p, peer)
    except P2PHandlerError as error:
        yield warn("relay", f"that peer knows nothing of relays: {error}", "update shoal there")
        return
    except NO_ANSWER as error:
        yield warn("relay", str(error) or "no answer", "try again")
        return
    finding = _judged(answer, round_trip)
    yield finding
    if isinstance(answer, Reserved):
        yield await _through(address, peer, token)


def _judged(answer: ReserveAnswer | None, round_trip: float) -> Finding:
    if isinstance(answer, Reserved):
        values = {"code": 0, "rate": answer.rate, "circuits": answer.circuits, "seen_at": answer.seen_at}
        rate = f"{answer.rate * 8e-6:.0f} Mbit/s for all together" if answer.rate else "no limit to their rate"
        text = f"it takes reservations, up to {answer.circuits} circuits, {rate}, {milliseconds(round_trip)} away"
        return ok("relay", text, **values)
    if not isinstance(answer, NotReserved):
        return warn("relay", "it ends the call without an answer", "look at that peer's own log")
    values = {"code": answer.code, "rate": 0.0, "circuits": 0, "seen_at": ""}
    if answer.code == RelayCode.NOT_A_RELAY:
        text = "it is none: others cannot call it, or it does not want to be one"
        return ok("relay", text, **values)
    if answer.code == RelayCode.BUSY:
        return warn("relay", f"it is full: {one_line(answer.text)}", f"use another one, or {RUN_ONE}", **values)
    return warn("relay", f"it refuses: {one_line(answer.text)}", "use a token whose role may train", **values)


async def _through(address: Multiaddr, relay: PeerID, token: str | None) -> Finding:
    """Call from one temporary peer of this machine to another one, through the relay."""
    try:
        guest = await P2P.create(client_mode=True, token=token)
    except NO_ANSWER as error:  # the token is for one identity
        return unknown("circuit", f"not tried, it takes a second identity: {error}")
    caller = await P2P.create(client_mode=True, token=token)
    try:
        async with asyncio.timeout(RESERVE_SECONDS):
            reserved = asyncio.Event()
            guest.reservations.on_change = reserved.set
            guest.reservations.trusted = [(address, relay)]
            guest.reservations.want(True)
            await reserved.wait()
        caller.circuits.punching = None  # it is the relay that is to be measured
        caller.add_addresses(guest.peer_id, [circuit_address(address, relay)])
        began = time.perf_counter()
        async with asyncio.timeout(RESERVE_SECONDS):
            await caller.prepare(guest.peer_id, 1)
            connection = await caller.dial(guest.peer_id)
        caller.pool.add(connection)
        seconds = time.perf_counter() - began
        megabits = await measure(caller, guest.peer_id, 0.0, upwards=True)
    except TimeoutError:
        fix = "try again; if it stays so, that relay does not do its work: restart it"
        return fail("circuit", f"nothing came through that relay within {RESERVE_SECONDS:g} s", fix)
    except NO_ANSWER as error:
        return fail("circuit", str(error) or "it broke", "try again, or use another relay")
    finally:
        await asyncio.gather(caller.shutdown(), guest.shutdown())
    text = f"this machine called itself through it: ready after {milliseconds(seconds)}, {megabits:.0f} Mbit/s"
    return ok("circuit", text, seconds=seconds, megabits=megabits)
