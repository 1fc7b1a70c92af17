"""A crowd of strangers leaves half of the files of a process to its user, whatever they do with their connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.net.connection import Hello, Open
from shoal.net.tcp.sessions import SESSION_BYTE
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Kind, Stream, pack
from shoal.p2p import P2P, Identity, Multiaddr, PeerID
from shoal.peers.identity import circuit_address
from shoal.reach.relay.messages import MAX_AT_ONCE, Connected
from tests.hostile.few_files import Squares
from tests.p2p.peers import Number, until
from tests.reach.relays import connect
from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

pytestmark = [
    pytest.mark.xdist_group("systems"),
    pytest.mark.skipif(sys.platform != "linux", reason="counts the files of a process as Linux shows them"),
]
PROGRAM = Path(__file__).parent / "few_files.py"
FILES, CROWD, AT_ONCE = 256, 300, 32
STRANGERS, REQUESTS = 8, 4
"""Of a relay, which takes four requests for eight circuits from each of them."""


@pytest.fixture
def victim() -> Iterator[Peer]:
    peer = Peer(PROGRAM, FILES)
    try:
        yield peer
    finally:
        peer.close()


class Crowd:
    """Strangers of one machine, each with an identity of its own, that hold on to what they get."""

    def __init__(self, address: str) -> None:
        place, _, peer = address.rpartition("/p2p/")
        self.place, self.peer = Multiaddr(place), PeerID.from_base58(peer)
        self.streams: list[Stream] = []
        self.sockets: list[socket.socket] = []
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def call_and_say_nothing(self, number: int) -> None:
        with contextlib.suppress(ShoalError, ConnectionError):
            stream = await TcpTransport(Identity.generate()).dial(self.place, self.peer)
            self.streams.append(stream)
            await stream.write(pack(Kind.HELLO, Hello()), pack(Kind.OPEN, Open(handler="Squares.rpc_square")))

    async def connect_and_say_nothing(self, number: int) -> None:
        await self._connect(b"")

    async def begin_a_handshake(self, number: int) -> None:
        await self._connect(b"\x16\x03\x01\x02\x00\x01")

    async def begin_a_session(self, number: int) -> None:
        await self._connect(SESSION_BYTE + b"x")

    async def do_all_of_this(self, number: int) -> None:
        kinds = (self.call_and_say_nothing, self.connect_and_say_nothing, self.begin_a_handshake, self.begin_a_session)
        await kinds[number % len(kinds)](number)

    async def _connect(self, first_bytes: bytes) -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        self.sockets.append(stranger)
        host, port = self.place["ip4"], int(self.place["tcp"] or 0)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_connect(stranger, (host, port))
            await asyncio.get_running_loop().sock_sendall(stranger, first_bytes)

    async def come(self, act: Callable[[int], Awaitable[None]]) -> None:
        async def in_turn(number: int) -> None:
            async with self._turns:
                await act(number)

        await asyncio.gather(*(in_turn(number) for number in range(CROWD)))

    def leave(self) -> None:
        for stream in self.streams:
            stream.abort()
        for stranger in self.sockets:
            stranger.close()


@pytest.mark.parametrize("kind", ["call_and_say_nothing", "do_all_of_this"])
async def test_half_of_the_files_are_the_users(victim: Peer, kind: str) -> None:
    ready = await asyncio.to_thread(victim.wait_for, "address", START_LIMIT_SECONDS)
    crowd = Crowd(ready["address"])
    honest = await P2P.create(client_mode=True)
    honest.add_addresses(crowd.peer, [crowd.place])
    try:
        await crowd.come(getattr(crowd, kind))
        answer = await Squares.get_stub(honest, crowd.peer).rpc_square(Number(value=3), timeout=30)
        assert answer.value == 9, "the crowd keeps nobody out"
        found: Event = await asyncio.to_thread(_end, victim)
    finally:
        crowd.leave()
        await honest.shutdown()
    print(kind, found)
    assert found["failed"] == 0, "the user of the peer could not open a file"
    assert found["most"] <= FILES // 2
    assert "cannot accept" not in victim.errors()


async def test_nor_do_those_take_them_who_come_through_a_relay() -> None:
    """They ask for circuits, and do not come: meanwhile the victim keeps its ends open."""
    relay = await P2P.create(relay=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    place = relay.get_addresses(relay.peer_id)[0]
    honest, *strangers = [await P2P.create(no_listen=True) for _ in range(STRANGERS + 1)]
    victim = Peer(PROGRAM, FILES, f"{place}/p2p/{relay.peer_id}")
    try:
        address = (await asyncio.to_thread(victim.wait_for, "address", START_LIMIT_SECONDS))["address"]
        target = PeerID.from_base58(address.rpartition("/p2p/")[2])
        await until(lambda: relay.relay.guests == [target])
        for each in (honest, *strangers):
            each.add_addresses(relay.peer_id, [place])
        wanted = [
            connect(stranger, relay, target=target.to_bytes(), count=MAX_AT_ONCE)
            for stranger in strangers
            for _ in range(REQUESTS)
        ]
        answers = await asyncio.gather(*wanted)
        assert sum(len(answer.cookies) for answer in answers if isinstance(answer, Connected)) > FILES // 2, (
            "the relay has room for so many"
        )
        honest.add_addresses(target, [circuit_address(place, relay.peer_id)])
        answer = await Squares.get_stub(honest, target).rpc_square(Number(value=3), timeout=30)
        assert answer.value == 9, "the crowd keeps nobody out"
        found: Event = await asyncio.to_thread(_end, victim)
    finally:
        victim.close()
        await asyncio.gather(*(each.shutdown() for each in [honest, *strangers, relay]))
    print(found)
    assert found["failed"] == 0, "the user of the peer could not open a file"
    assert found["most"] <= FILES // 2


def _end(victim: Peer) -> Event:
    victim.tell("")
    return victim.wait_for("most", 60)
