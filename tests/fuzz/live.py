"""Attacks on a node that listens, by strangers who connect: each must be dropped for a reason that is counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

import psutil

from shoal.access.badges import MAX_BADGE_BYTES
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import StreamClosedError
from shoal.net.limits import Limits
from shoal.net.memory import MemoryNetwork
from shoal.net.tcp.handshake import CHALLENGE_BYTES, PROOF_BYTES, dialler_context, with_badge
from shoal.net.tcp.sessions import SESSION_BYTE
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import COOKIE_BYTES, Stream, Transport
from shoal.p2p import P2P, Identity, Multiaddr
from tests.fuzz.conversations import Victim
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import calls, messages, validator

ATTACKERS = 16
"""Attacks at a time."""
PATIENCE_SECONDS = 60.0
FREE_HANDSHAKES = Limits(handshakes_per_second=1e9, handshake_burst=10**9)
"""All attacks come from this machine, and none is to be turned away for that reason alone."""
MAX_GROWTH_BYTES = 24 * 2**20


@dataclass
class Siege:
    """What an attacked node has counted, and how its honest callers fared meanwhile."""

    attacks: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    honest_seconds: list[float] = field(default_factory=list)
    grown_bytes: int = 0
    """Most that the second half of attacks of one kind has added to what the first half left."""


def hostile_conversations(count: int, rng: random.Random, victim: Victim) -> list[bytes]:
    """Conversations that break the protocol for sure, so that each has to be counted."""
    mutator, handlers = Mutator(rng), victim.handlers
    parts, whole_calls = messages(handlers), calls(handlers)
    found: list[bytes] = []
    while len(found) < count:
        opening, request = mutator.one_of(whole_calls)
        script = mutator.messages(parts) if rng.random() < 0.5 else opening + mutator.message(request, parts)
        found.append(script)
    return found


async def those_that_break_the_protocol(scripts: Sequence[bytes], victim: Victim) -> list[bytes]:
    """Tried out on a node in memory first."""
    return [script for script in scripts if await victim.converse(script) == "broke the protocol"]


# --- kinds of attacks -------------------------------------------------------------------------------------------------


async def read_to_the_end(read: Callable[[], Awaitable[bytes]]) -> None:
    with contextlib.suppress(OSError):  # dropped
        while await read():
            pass


async def speak_no_tls(address: Multiaddr, data: bytes) -> None:
    """Connect, perhaps as a session, say something, and hang up."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", int(str(address["tcp"]))))
        try:
            await loop.sock_sendall(connection, data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            return  # dropped while it was still speaking
        await read_to_the_end(lambda: loop.sock_recv(connection, 4096))


async def prove_nothing(address: Multiaddr, proof: bytes) -> None:
    """TLS, and then a wrong proof of identity, or half of one."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(str(address["tcp"])), ssl=dialler_context(), server_hostname=""
    )
    try:
        await reader.readexactly(CHALLENGE_BYTES)
        writer.write(proof)
        claimed = int.from_bytes(proof[PROOF_BYTES - 2 : PROOF_BYTES])
        if len(proof) >= PROOF_BYTES and (claimed > MAX_BADGE_BYTES or len(proof) >= PROOF_BYTES + claimed):
            await read_to_the_end(lambda: reader.read(4096))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def break_the_protocol(stream: Stream, script: bytes) -> None:
    """Say hostile things as somebody who has proven who he is, and listen until the connection ends."""
    ended = asyncio.Event()
    stream.on_closed(ended.set)
    try:
        await stream.write(script)
        byte = bytearray(1)
        while True:
            await stream.read_exactly_into(memoryview(byte))
    except StreamClosedError:
        await ended.wait()
    finally:
        stream.on_closed(None)
        stream.abort()


# --- the siege --------------------------------------------------------------------------------------------------------


class Fortress:
    """A node that is attacked, and an honest one that uses it."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng = kind, rng
        self.network = MemoryNetwork()
        self.siege = Siege()

    def _transport(self) -> Transport | None:
        return self.network.transport() if self.kind == "memory" else None

    async def __aenter__(self) -> Fortress:
        self.node = await self._node(limits=FREE_HANDSHAKES)
        self.friend = await self._node(initial_peers=await self.node.get_visible_maddrs())
        self.address = self.node.p2p.get_addresses(self.node.peer_id)[0]
        self.attacker = self._transport() or TcpTransport(Identity.generate())
        self.victim = Victim()
        await self.victim.start_afresh()
        return self

    async def _node(self, **options: object) -> DHTNode:
        names = {"limits"} & options.keys()
        p2p = await P2P.create(transport=self._transport(), **{name: options.pop(name) for name in names})  # type: ignore[arg-type]
        return await DHTNode.create(p2p=p2p, record_validator=validator(), wait_timeout=PATIENCE_SECONDS, **options)  # type: ignore[arg-type]

    async def __aexit__(self, *_: object) -> None:
        await self.victim.end()
        for node in (self.friend, self.node):
            await node.shutdown()
            await node.p2p.shutdown()
        await self.attacker.close()

    async def withstand(self, attacks: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Half of the attacks, and then the other half, with an honest call now and then."""
        before = self.node.p2p.metrics.connections_dropped.copy()
        half = len(attacks) // 2
        await self._attack(attacks[:half])
        held = _resident_bytes()
        await self._attack(attacks[half:])
        self.siege.grown_bytes = max(self.siege.grown_bytes, _resident_bytes() - held)
        self.siege.attacks += len(attacks)
        dropped = self.node.p2p.metrics.connections_dropped
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (dropped - before).total() < len(attacks):  # noqa: ASYNC110 - the last connections are still ending
                await asyncio.sleep(0.01)
        self.siege.reasons += dropped - before

    async def _attack(self, attacks: Sequence[Callable[[], Awaitable[None]]]) -> None:
        waiting = iter(attacks)

        async def attacker() -> None:
            for attack in waiting:
                await attack()

        attackers = [asyncio.ensure_future(attacker()) for _ in range(ATTACKERS)]
        while any(not each.done() for each in attackers):
            await self._honest_call()
            await asyncio.wait(attackers, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*attackers)
        await self._honest_call()

    async def _honest_call(self) -> None:
        began = time.perf_counter()
        number = len(self.siege.honest_seconds)
        key = f"honest {number % 10}"  # always the same ones, which take no more memory as time goes by
        assert await self.friend.store(key, number, get_dht_time() + 600 + number)
        assert self.node.protocol.storage
        found = await self.node.get(key, latest=True)
        assert found is not None
        assert found.value == number
        self.siege.honest_seconds.append(time.perf_counter() - began)

    async def hostile_streams(self, count: int) -> list[Callable[[], Awaitable[None]]]:
        """Attacks of proven strangers, each on a connection of its own."""
        scripts: list[bytes] = []
        while len(scripts) < count:
            await self.victim.start_afresh()
            scripts += await those_that_break_the_protocol(
                hostile_conversations(500, self.rng, self.victim), self.victim
            )

        def attack(script: bytes) -> Callable[[], Awaitable[None]]:
            async def connect_and_speak() -> None:
                await break_the_protocol(await self.attacker.dial(self.address, self.node.peer_id), script)

            return connect_and_speak

        return [attack(script) for script in scripts[:count]]

    def hostile_handshakes(self, count: int) -> list[Callable[[], Awaitable[None]]]:
        """Attacks of strangers who never prove who they are: a third with TLS, a third as sessions nobody expects."""
        mutator = Mutator(self.rng)
        greeting = client_greeting()

        def attack(number: int) -> Callable[[], Awaitable[None]]:
            kind = number % 3
            if kind == 0:
                proof = mutator.bytes(with_badge(self.rng.randbytes(96), self.rng.randbytes(9)))
                return lambda: prove_nothing(self.address, proof)
            data = mutator.bytes(greeting if kind == 1 else SESSION_BYTE + self.rng.randbytes(COOKIE_BYTES), [greeting])
            return lambda: speak_no_tls(self.address, data)

        return [attack(number) for number in range(count)]


def client_greeting() -> bytes:
    """What a dialler says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        dialler_context().wrap_bio(incoming, outgoing).do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("TLS without an answer")


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


async def besiege(kind: str, attacks: int, seed: int) -> Siege:
    """Attack a node: over real sockets its handshakes and its frames, in memory its frames alone."""
    rng = random.Random(seed)
    async with Fortress(kind, rng) as fortress:
        if kind == "tcp":
            await fortress.withstand(fortress.hostile_handshakes(attacks // 2))
            await fortress.withstand(await fortress.hostile_streams(attacks - attacks // 2))
        else:
            await fortress.withstand(await fortress.hostile_streams(attacks))
    assert fortress.siege.grown_bytes < MAX_GROWTH_BYTES, fortress.siege.grown_bytes
    return fortress.siege


def print_siege(kind: str, siege: Siege) -> None:
    """Reasons, and what is left of the attacks."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in siege.reasons.most_common())
    slowest = quantiles(siege.honest_seconds, n=100)[98]
    print(f"  {siege.attacks:,} attacks on a node, {kind}: dropped {siege.reasons.total():,}: {reasons}")
    print(f"    memory grown by {siege.grown_bytes / 2**20:.1f} MiB during the second half of each kind of attack")
    print(f"    {len(siege.honest_seconds)} honest stores and gets meanwhile, p99 {1e3 * slowest:.0f} ms, all well")
