"""Targets that talk with a stranger: the handshake, the frames of calls, and a node that answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shoal.access.membership import judge_listener
from shoal.dht import DHTNode
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import FindResponse, NewRecord, PingResponse, StoreResponse
from shoal.dht.routing import DHTID
from shoal.dht.validation import PLAIN_VALUE
from shoal.errors import DialError, P2PDaemonError, P2PHandlerError, ProtocolError, StreamClosedError, ValidationError
from shoal.metrics import Metrics
from shoal.net.connection import Connection, Hello
from shoal.net.limits import DEFAULT_LIMITS, HeaderMemory
from shoal.net.memory import MemoryNetwork
from shoal.net.server import CallServer
from shoal.net.tcp.handshake import ALPN, PROOF_BYTES, proof_message, prove_to_listener, verify_dialler, with_badge
from shoal.net.tcp.stream import TcpStream
from shoal.net.transport import Session, decode_header, receive_frame
from shoal.p2p import P2P, Call, Header, Identity, Multiaddr
from tests.fuzz.fuzzing import Target, check_text
from tests.fuzz.mutation import Mutator
from tests.fuzz.samples import BADGES, IDENTITY, KEYS, PACKED_HEADERS, RUN, calls, messages, validator
from tests.p2p.peers import ScriptedStream

LISTENER = Identity.generate()
CERTIFICATE = x509.load_pem_x509_certificate(LISTENER.certificate_pem()[0]).public_bytes(Encoding.DER)
ADDRESS = Multiaddr("/ip4/127.0.0.1/tcp/1")
MESSAGES = messages([])
JUDGE = functools.partial(judge_listener, None)
SOMEBODY = Identity.generate().peer_id
LISTENS_SECONDS = 0.05
"""A node that reads nothing more for so long waits for something else, as one does that has given a reservation."""


def _connection(script: bytes, memory: HeaderMemory) -> Connection:
    return Connection(ScriptedStream(script, SOMEBODY), Metrics(), Hello, lambda *_: None, memory)


async def _opening(script: bytes) -> str:
    """What a listener makes of the beginning of a connection."""
    memory = HeaderMemory(DEFAULT_LIMITS)
    try:
        await _connection(script, memory).receive_open()
    except (ProtocolError, StreamClosedError) as e:
        check_text(e)
        return type(e).__name__
    finally:
        assert memory.total == 0
    return "opened"


async def _answers(script: bytes) -> str:
    """What a caller makes of the answers."""
    memory = HeaderMemory(DEFAULT_LIMITS)
    call = Call(_connection(script, memory))
    try:
        while await call.receive(FindResponse) is not None:
            await call.read_payload(1000)
    except (ProtocolError, StreamClosedError, P2PHandlerError, P2PDaemonError) as e:
        check_text(e)
        return type(e).__name__
    finally:
        assert memory.total == 0
    return "read"


# --- the handshake ----------------------------------------------------------------------------------------------------


async def _proof_to_listener(proof: bytes) -> str:
    stream = cast("TcpStream", ScriptedStream(proof, SOMEBODY))
    try:
        found = await verify_dialler(stream, LISTENER.peer_id, CERTIFICATE)
    except StreamClosedError as e:
        check_text(e)
        return "StreamClosedError"
    assert found is None, "a proof that nobody made"
    return "refused"


def _make_proof(mutator: Mutator) -> bytes:
    """Right but for the nonce, and then changed."""
    badge = mutator.one_of([b"", *BADGES])
    signature = IDENTITY.sign(proof_message(LISTENER.peer_id, CERTIFICATE, bytes(32), badge))
    return mutator.bytes(with_badge(IDENTITY.public_key + signature, badge), [IDENTITY.public_key, *BADGES])


async def _listener_to_dialler(hostile: tuple[str | None, bytes, bytes]) -> str:
    protocol, certificate, script = hostile
    stream = cast("Any", ScriptedStream(script, SOMEBODY))
    stream.ssl_object = lambda: SimpleNamespace(
        selected_alpn_protocol=lambda: protocol, getpeercert=lambda binary_form: certificate
    )
    try:
        expected = LISTENER.peer_id if len(script) % 2 else None  # where the address does not say who is there
        await prove_to_listener(stream, IDENTITY, ADDRESS, expected, JUDGE)
    except (DialError, StreamClosedError) as e:
        check_text(e)
        assert not stream.written, "nothing is told to a listener that is refused"
        return type(e).__name__
    assert bytes(CERTIFICATE) == certificate or len(stream.written) == PROOF_BYTES
    return "proven"


def _make_listener(mutator: Mutator) -> tuple[str | None, bytes, bytes]:
    protocol = mutator.one_of([ALPN] * 8 + [None, "h2"])
    certificate = mutator.bytes(CERTIFICATE) if mutator.rng.random() < 0.7 else CERTIFICATE
    return protocol, certificate, mutator.bytes(with_badge(bytes(32), mutator.one_of([b"", *BADGES])), BADGES)


# --- frames of sessions -----------------------------------------------------------------------------------------------


class ScriptedSession(Session):
    """The other side has sent some bytes and left."""

    local_address: Multiaddr | None = None
    remote_address: Multiaddr | None = None

    def __init__(self, script: bytes) -> None:
        self.script = script

    async def write(self, data: bytes) -> None:
        raise StreamClosedError("the other side has left")

    async def read_exactly(self, size: int) -> bytes:
        if size > len(self.script):
            raise StreamClosedError("the script is over")
        taken, self.script = self.script[:size], self.script[size:]
        return taken

    async def read_some(self) -> bytes:
        taken, self.script = self.script, b""
        return taken

    def abort(self) -> None:
        self.script = b""


def _make_frame(mutator: Mutator) -> tuple[type[Header], bytes]:
    header_type = mutator.one_of(list(PACKED_HEADERS))
    packed = PACKED_HEADERS[mutator.one_of(list(PACKED_HEADERS)) if mutator.rng.random() < 0.1 else header_type]
    if mutator.rng.random() < 0.5:
        packed = mutator.packed(packed)
    frame = min(len(packed), 2**16 - 1).to_bytes(2) + packed
    return header_type, frame if mutator.rng.random() < 0.5 else mutator.bytes(frame)


async def _frame(hostile: tuple[type[Header], bytes]) -> str:
    header_type, script = hostile
    session = ScriptedSession(script)
    try:
        await receive_frame(session, header_type)
    except (ProtocolError, StreamClosedError) as e:
        check_text(e)
        return type(e).__name__
    assert len(script) - len(session.script) == 2 + int.from_bytes(script[:2]), "what follows a frame stays"
    return "read"


# --- a node -----------------------------------------------------------------------------------------------------------


async def _serve(server: CallServer, stream: ScriptedStream) -> None:
    """Let it serve a stranger, who leaves when the node listens no more."""
    server.accept(stream)
    while tasks := server.tasks():
        left = stream.left
        await asyncio.wait(tasks, timeout=LISTENS_SECONDS)
        if stream.left == left:
            stream.close()


class Victim:
    """A node of the table in memory, made anew now and then, because it keeps what it accepts."""

    def __init__(self) -> None:
        self.node: DHTNode | None = None
        self.answers: list[Header] = []
        self.private = PrivatePeer()

    async def start_afresh(self) -> None:
        await self.end()
        p2p = await P2P.create(transport=MemoryNetwork().transport())
        self.node = await DHTNode.create(p2p=p2p, record_validator=validator())

    async def end(self) -> None:
        await self.private.end()
        if self.node is not None:
            await self.node.shutdown()
            await self.node.p2p.shutdown()
            assert not self.node.p2p.server.tasks()
            assert self.node.p2p.header_memory.total == 0
            self.node = None

    @property
    def protocol(self) -> DHTProtocol:
        assert self.node is not None
        return self.node.protocol

    @property
    def handlers(self) -> list[str]:
        assert self.node is not None
        return sorted(self.node.p2p.server.handlers)

    async def converse(self, script: bytes) -> str:
        """Serve a stranger who says all this and leaves."""
        assert self.node is not None
        server, dropped = self.node.p2p.server, self.node.p2p.metrics.connections_dropped
        before = dropped.copy()
        await _serve(server, ScriptedStream(script, SOMEBODY))
        [reason, *more] = (dropped - before) or ["left"]
        assert not more
        return reason

    async def ask(self, header: tuple[str, bytes]) -> str:
        """Let it ask somebody who answers this."""
        kind, data = header
        response_type = {"ping": PingResponse, "store": StoreResponse, "find": FindResponse}[kind]
        try:
            answer = decode_header(data, response_type)
        except ProtocolError as e:
            check_text(e)
            return "ProtocolError"
        protocol = self.protocol

        async def call(*_: object, **__: object) -> Header:
            return answer

        protocol._call = call  # type: ignore[assignment, method-assign]
        if kind == "ping":
            try:
                await protocol.ping(SOMEBODY, validate=True)
            except ValidationError as e:
                check_text(e)
                return "ValidationError"
            return "believed"
        if kind == "store":
            record = NewRecord(DHTID.from_bytes(KEYS[0]), PLAIN_VALUE, b"", 1.0)
            return "refused" if await protocol.call_store(SOMEBODY, [record] * 7) is None else "believed"
        found = await protocol.call_find(SOMEBODY, map(DHTID.from_bytes, KEYS))
        if found is None:
            return "refused"
        return "found" if any(each.value is not None for each in found.records.values()) else "nothing found"


class PrivatePeer:
    """A peer of a private run, and strangers with badges that nobody has granted them."""

    def __init__(self) -> None:
        self.p2p: P2P | None = None

    async def start_afresh(self) -> None:
        await self.end()
        self.p2p = await P2P.create(transport=MemoryNetwork().transport(), token=RUN.text)

    async def end(self) -> None:
        if self.p2p is not None:
            await self.p2p.shutdown()

    async def converse(self, hostile: tuple[bytes, bytes]) -> str:
        """Let a stranger show a badge, and say all this."""
        assert self.p2p is not None
        badge, script = hostile
        server, refused = self.p2p.server, self.p2p.metrics.members_refused
        before = refused.copy()
        stream = ScriptedStream(script, SOMEBODY)
        stream.shown_badge = badge
        await _serve(server, stream)
        [reason] = refused - before
        assert self.p2p.metrics.calls_served == 0
        assert SOMEBODY not in self.p2p.address_book
        return reason


def _make_badge(mutator: Mutator) -> bytes:
    """None, a good one of somebody else, or one that was tampered with."""
    badge = mutator.one_of([b"", *BADGES])
    return mutator.one_of([badge, mutator.bytes(badge, BADGES)])


def _make_answer(mutator: Mutator) -> tuple[str, bytes]:
    kind, header_type = mutator.one_of([("ping", PingResponse), ("store", StoreResponse), ("find", FindResponse)])
    return kind, mutator.packed(PACKED_HEADERS[header_type])


def _make_call(mutator: Mutator, seeds: Sequence[tuple[bytes, bytes]]) -> bytes:
    opening, request = mutator.one_of(seeds)
    return opening + mutator.message(request, MESSAGES)


def targets(victim: Victim) -> list[Target]:
    handlers = victim.handlers
    whole_calls, parts = calls(handlers), messages(handlers)
    return [
        Target("handshake, listener's side", _make_proof, _proof_to_listener),
        Target("handshake, dialler's side", _make_listener, _listener_to_dialler),
        Target("frames of sessions", _make_frame, _frame),
        Target("frames, opening of a call", lambda m: m.messages(parts), _opening),
        Target("frames, answers", lambda m: m.messages(MESSAGES), _answers),
        Target("node, any conversation", lambda m: m.messages(parts), victim.converse, victim.start_afresh),
        Target("node, nearly right calls", lambda m: _make_call(m, whole_calls), victim.converse, victim.start_afresh),
        Target("node, answers to its questions", _make_answer, victim.ask, victim.start_afresh),
        Target(
            "private run, strangers",
            lambda m: (_make_badge(m), m.messages(parts)),
            victim.private.converse,
            victim.private.start_afresh,
        ),
    ]
