"""Strangers use a relay, a process of its own, for themselves: peers that have been in rounds get their places."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import NoRoomError, NotAMemberError, ShoalError, StreamClosedError
from shoal.net.transport import COOKIE_BYTES, Session, receive_frame
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.reach.relay.messages import (
    Connect,
    ConnectAnswer,
    Connected,
    Incoming,
    Ready,
    Reserve,
    ReserveAnswer,
    Reserved,
)
from shoal.reach.relay.server import RelayServer
from tests.access.test_membership import SECRET
from tests.p2p.peers import Number, serving, stub, until
from tests.reach.relays import Told
from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the files of a process as Linux shows them")
PROGRAM = Path(__file__).parent / "relay.py"
CIRCUITS, CIRCUITS_PER_PEER, PER_CALL = 16, 8, 8
PATIENCE = 60.0


class Scene:
    """A relay, and the peers that use it."""

    def __init__(self, process: Peer, stack: AsyncExitStack) -> None:
        self._process, self._stack = process, stack
        place, _, peer = process.wait_for("address", START_LIMIT_SECONDS)["address"].rpartition("/p2p/")
        self.place, self.relay = Multiaddr(place), PeerID.from_base58(peer)
        self.ends: list[Session] = []
        """Of circuits of strangers, on both sides."""

    async def look(self) -> Event:
        """What the relay says of itself now."""
        looks = len(self._process.all("guests"))
        self._process.tell("look")
        await until(lambda: len(self._process.all("guests")) > looks)
        return self._process.all("guests")[-1]

    async def meet(self, *peers: P2P) -> None:
        """Let peers be in a round with the relay."""
        self._process.tell("meet " + " ".join(str(peer.peer_id) for peer in peers))
        await asyncio.to_thread(self._process.wait_for, "met", PATIENCE)

    async def peer(self) -> P2P:
        """A peer behind a router, without a relay."""
        p2p = await P2P.create(client_mode=True)
        self._stack.push_async_callback(p2p.shutdown)
        p2p.circuits.punching = None
        p2p.add_addresses(self.relay, [self.place])
        return p2p

    def want_reservation(self, p2p: P2P) -> None:
        p2p.directory = Told([self.relay])
        p2p.reservations.want(True)

    async def stranger(self) -> P2P:
        """A guest that takes its end of each circuit, and holds it."""
        p2p = await self.peer()

        def come(relay: PeerID, places: Sequence[Multiaddr], incoming: Incoming) -> None:
            coming.extend(asyncio.ensure_future(self._open(p2p, cookie)) for cookie in incoming.cookies)

        coming: list[asyncio.Future[None]] = []
        p2p.reservations.answer = come
        self.want_reservation(p2p)
        await until(lambda: bool(p2p.reservations.held))
        self._stack.push_async_callback(_end, coming)
        return p2p

    async def _open(self, p2p: P2P, cookie: bytes) -> None:
        session = await p2p.transport.open_session(self.place, cookie)
        await receive_frame(session, Ready)
        self.ends.append(session)

    async def take_all_circuits(self) -> None:
        """Let strangers open as many as there are, among themselves."""
        guests = [await self.stranger() for _ in range(2)]
        for guest in guests:
            dialler = await self.peer()
            request = Connect(target=guest.peer_id.to_bytes(), count=PER_CALL)
            answer: ConnectAnswer = await RelayServer.get_stub(dialler, self.relay).rpc_connect(request)
            assert isinstance(answer, Connected)
            for cookie in answer.cookies:
                await self._open(dialler, cookie)
        await until(lambda: len(self.ends) == 2 * CIRCUITS)


async def _end(tasks: list[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[Scene]:
    process = Peer(PROGRAM, json.dumps(options))
    try:
        async with AsyncExitStack() as stack:
            made = await asyncio.to_thread(Scene, process, stack)
            yield made
            for end in made.ends:
                end.abort()
    finally:
        await asyncio.to_thread(process.close)


async def reserve(p2p: P2P, relay: PeerID, stack: AsyncExitStack) -> bool:
    """Ask for a reservation, and hold it."""
    call = await stack.enter_async_context(RelayServer.get_stub(p2p, relay).rpc_reserve())
    await call.send(Reserve(), end=True)
    return isinstance(await call.receive(ReserveAnswer), Reserved)


async def test_a_crowd_of_one_host_gets_few_reservations() -> None:
    async with scene() as here, AsyncExitStack() as stack:
        crowd = [await here.peer() for _ in range(20)]
        granted = [await reserve(p2p, here.relay, stack) for p2p in crowd]
        found = await here.look()
        assert sum(granted) == found["guests"] == 16
        assert found["refused"] == {"no room": 4}


async def test_peers_that_were_in_rounds_get_circuits_and_reservations_of_strangers() -> None:
    limits = {"circuits": CIRCUITS, "circuits_per_peer": CIRCUITS_PER_PEER, "reservations": 2}
    async with scene(**limits) as here:
        before = await here.look()
        await here.take_all_circuits()
        taken = await here.look()
        assert (taken["guests"], taken["circuits"]) == (2, CIRCUITS)
        assert taken["files"] <= before["files"] + 2 * CIRCUITS + 4
        guest, caller = await here.peer(), await here.peer()
        await serving(guest)
        await here.meet(guest, caller)
        here.want_reservation(guest)
        await until(lambda: bool(guest.reservations.held))
        caller.add_addresses(guest.peer_id, guest.reservations.addresses())
        assert (await stub(caller, guest).rpc_square(Number(value=3), timeout=PATIENCE)).value == 9
        stranger = await here.peer()
        stranger.add_addresses(guest.peer_id, guest.reservations.addresses())
        with pytest.raises(NoRoomError, match=f"{CIRCUITS} circuits"):
            await stub(stranger, guest).rpc_square(Number(value=3), timeout=PATIENCE)
        assert (await here.look())["circuits"] == CIRCUITS


async def test_ends_that_read_nothing_take_no_memory() -> None:
    limits = {"circuits": CIRCUITS, "circuits_per_peer": CIRCUITS_PER_PEER, "rate": None}
    async with scene(**limits) as here:
        await here.take_all_circuits()
        before = await here.look()

        async def write(end: Session) -> None:
            with suppress(ShoalError):
                for _ in range(128):
                    await end.write(bytes(2**17))

        writing = [asyncio.ensure_future(write(end)) for end in here.ends]
        await asyncio.wait(writing, timeout=2.0)  # it never ends: a slow machine writes less meanwhile
        after = await here.look()
        for end in here.ends:
            end.abort()
        await asyncio.gather(*writing)
    assert after["circuits"] == CIRCUITS
    assert after["memory"] - before["memory"] < 2 * CIRCUITS * 2**20, "a few hundred kilobytes each"


async def test_a_private_relay_carries_nothing_for_strangers() -> None:
    async with scene(token=SECRET.text) as here, AsyncExitStack() as stack:
        stranger = await here.peer()
        with pytest.raises(NotAMemberError):
            await reserve(stranger, here.relay, stack)
        with pytest.raises(NotAMemberError):
            await RelayServer.get_stub(stranger, here.relay).rpc_connect(Connect(target=stranger.peer_id.to_bytes()))
        session = await stranger.transport.open_session(here.place, bytes(COOKIE_BYTES))
        with pytest.raises(StreamClosedError):
            await session.read_exactly(1)
        found = await here.look()
        assert (found["guests"], found["circuits"], found["carried"]) == (0, 0, 0)
