"""Bytes from a hostile peer: every decoder ends with ProtocolError or StreamClosedError, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import P2PDaemonError, P2PHandlerError, ProtocolError, StreamClosedError
from shoal.metrics import Metrics
from shoal.net.connection import CallFailure, Connection, Hello, Open
from shoal.net.limits import DEFAULT_LIMITS, HeaderMemory
from shoal.net.memory import MemoryNetwork
from shoal.net.transport import (
    MAX_HEADER_BYTES,
    READ_STEP_BYTES,
    WRITE_PIECE_BYTES,
    Kind,
    decode_header,
    pack,
    parse_prefix,
    pieces_of,
    read_new,
)
from shoal.p2p import P2P, Call, Header, Identity
from tests.p2p.peers import Empty, Number, Pair, ScriptedStream, Text, serving, until

pytestmark = pytest.mark.once

T = TypeVar("T")
EXAMPLES = int(os.environ.get("SHOAL_FUZZ_EXAMPLES", "300"))
"""More of them make the tests with hostile bytes a fuzzer."""
SOMEBODY = Identity.generate().peer_id
ALLOWED = (ProtocolError, StreamClosedError)
fuzzed = settings(max_examples=EXAMPLES, deadline=None)

for room in (
    "dht.records",
    "averaging.messages",
    "optim.progress.exchange",
    "reach.punching",
    "reach.checkup",
    "reach.presence",
    "reach.relay.messages",
):
    importlib.import_module(f"shoal.{room}")  # the tests below cover what travels there, too


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def all_headers(base: type[Header] = Header) -> Iterator[type[Header]]:
    for each in base.__subclasses__():
        yield each
        yield from all_headers(each)


HEADERS = sorted(set(all_headers()), key=lambda each: (each.__module__, each.__qualname__))
messages = st.one_of(
    st.builds(Hello, st.lists(st.text(max_size=20), max_size=3), instance=st.binary(max_size=4)).map(
        lambda hello: pack(Kind.HELLO, hello)
    ),
    st.sampled_from(["Service.rpc_square", "Service.rpc_add", "Service.rpc_echo", "nobody"]).map(
        lambda name: pack(Kind.OPEN, Open(handler=name))
    ),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 40), st.booleans()).map(
        lambda item: pack(Kind.ITEM, Number(value=item[0]), item[1], end=item[2]) + bytes(item[1])
    ),
    st.builds(CallFailure, text=st.text(max_size=20)).map(lambda failure: pack(Kind.ERROR, failure, end=True)),
    st.just(pack(Kind.ITEM, None, end=True)),
    st.just(pack(Kind.ALIVE, None)),
)


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Nearly right: messages in any order, some bytes changed, cut anywhere."""
    data = bytearray(b"".join(draw(st.lists(messages, max_size=6))))
    for _ in range(draw(st.integers(0, 4))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=8))


hostile = st.binary(max_size=200) | conversations()


def connection_to(script: bytes, memory: HeaderMemory) -> Connection:
    return Connection(ScriptedStream(script, SOMEBODY), Metrics(), Hello, lambda *_: None, memory)


# --- round trips ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(list(Kind)), st.integers(0, 2**31), st.booleans(), st.text(max_size=50))
def test_prefix_round_trip(kind: Kind, payload_bytes: int, end: bool, text: str) -> None:
    message = pack(kind, Text(text=text), payload_bytes, end=end)
    prefix = parse_prefix(message[:12])
    assert prefix == (kind, end, len(message) - 12, payload_bytes)
    assert decode_header(message[12:], Text) == Text(text=text)


@given(st.lists(st.binary(max_size=3).map(lambda each: each * 200_000), max_size=4))
@settings(max_examples=30, deadline=None)
def test_pieces_are_the_whole(payload: list[bytes]) -> None:
    pieces = list(pieces_of(b"head", payload))
    assert b"".join(b"".join(piece) for piece in pieces) == b"head" + b"".join(payload)
    sizes = [sum(map(len, piece)) for piece in pieces]
    assert all(size == 4 * (index == 0) + WRITE_PIECE_BYTES for index, size in enumerate(sizes[:-1]))
    assert sizes[-1] <= 4 + WRITE_PIECE_BYTES


@pytest.mark.parametrize("size", [0, 1, READ_STEP_BYTES - 1, READ_STEP_BYTES, READ_STEP_BYTES + 1, 5 * READ_STEP_BYTES])
def test_read_new(size: int) -> None:
    data = os.urandom(size)
    assert run(read_new(ScriptedStream(data, SOMEBODY), size)) == data
    with pytest.raises(StreamClosedError):
        run(read_new(ScriptedStream(data, SOMEBODY), size + 1))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("030300000000000000000000", "version 3"),
        ("020000000000000000000000", "unknown kind 0"),
        ("020600000000000000000000", "unknown kind 6"),
        ("020300000010000100000000", "over the limits"),
        ("020300000000000080000001", "over the limits"),
    ],
)
def test_malformed_prefixes(prefix: str, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        parse_prefix(bytes.fromhex(prefix))


def test_too_much_to_send() -> None:
    with pytest.raises(ValueError, match="send it in parts"):
        pack(Kind.ITEM, Text(text="x" * MAX_HEADER_BYTES))
    with pytest.raises(ValueError, match="send it in parts"):
        pack(Kind.ITEM, Empty(), 2**31 + 1)


# --- hostile bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header_type", HEADERS, ids=lambda each: each.__qualname__)
@given(data=st.binary(max_size=100) | st.binary(max_size=10).map(lambda each: each * 300))
@settings(max_examples=max(30, EXAMPLES // 10), deadline=None)
def test_headers(header_type: type[Header], data: bytes) -> None:
    try:
        header = decode_header(data, header_type)
    except ProtocolError:
        return
    assert isinstance(header, header_type)


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1x", b"\x81\xa6labels\x81\xa1x\x91"])
def test_deep_headers(nest: bytes) -> None:
    for header_type in (Pair, Hello, Text):
        with pytest.raises(ProtocolError):
            decode_header(nest * 100_000, header_type)


@given(hostile)
@fuzzed
def test_reading_a_call(data: bytes) -> None:
    """What a caller makes of the answers."""
    memory = HeaderMemory(DEFAULT_LIMITS)

    async def read_all() -> None:
        call = Call(connection_to(data, memory))
        while await call.receive(Number) is not None:
            await call.read_payload(1000)

    try:
        run(read_all())
    except (*ALLOWED, P2PHandlerError, P2PDaemonError):
        pass
    assert memory.total == 0


@given(hostile)
@fuzzed
def test_opening_a_call(data: bytes) -> None:
    memory = HeaderMemory(DEFAULT_LIMITS)

    async def read_open() -> str:
        return await connection_to(data, memory).receive_open()

    with contextlib.suppress(*ALLOWED):
        assert isinstance(run(read_open()), str)
    assert memory.total == 0


@given(st.lists(hostile, min_size=1, max_size=3))
@fuzzed
def test_serving(scripts: list[bytes]) -> None:
    """A whole server: no task fails, nothing is left, and every connection is over."""

    async def serve() -> list[dict[str, Any]]:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        server = await P2P.create(transport=MemoryNetwork().transport())
        await serving(server)
        for script in scripts:
            server.server.accept(ScriptedStream(script, SOMEBODY))
        await until(lambda: not server.server.tasks())
        assert server.server.connection_count == 0
        assert server.server.peers == []
        assert server.header_memory.total == 0
        await server.shutdown()
        return failures

    assert run(serve()) == []


@given(st.lists(st.text(max_size=40) | st.sampled_from(["/ip4/127.0.0.1/tcp/1", "/ip4/1.2.3.4/tcp/2"]), max_size=20))
@fuzzed
def test_addresses_in_a_greeting(addresses: list[str]) -> None:
    """What is no address here may be one in a newer version: it is skipped, and the others count."""

    async def greet() -> None:
        server = await P2P.create(transport=MemoryNetwork().transport())
        server.server.accept(ScriptedStream(pack(Kind.HELLO, Hello(addresses=addresses)), SOMEBODY))
        await until(lambda: not server.server.tasks())
        known = {str(address) for address in server.get_addresses(SOMEBODY)}
        assert known >= set(addresses[:8]) & {"/ip4/127.0.0.1/tcp/1", "/ip4/1.2.3.4/tcp/2"}
        assert len(known) <= 8
        assert server.metrics.connections_dropped == {}
        await server.shutdown()

    run(greet())


def test_one_greeting_is_enough() -> None:
    twice = pack(Kind.HELLO, Hello()) * 2
    with pytest.raises(ProtocolError, match="second one"):
        run(_receive(twice))


async def _receive(data: bytes) -> None:
    await connection_to(data, HeaderMemory(DEFAULT_LIMITS)).receive()


def test_signs_of_life_are_no_messages() -> None:
    """They may stand between any two, and nobody reads them; one that says something breaks the protocol."""

    async def main() -> None:
        alive = pack(Kind.ALIVE, None)
        script = alive + pack(Kind.HELLO, Hello()) + alive + pack(Kind.OPEN, Open(handler="nobody")) + alive * 2
        connection = connection_to(script + pack(Kind.ITEM, Number(value=1)), HeaderMemory(DEFAULT_LIMITS))
        assert await connection.receive_open() == "nobody"
        call = Call(connection)
        assert await call.receive(Number) == Number(value=1)
        stream = connection.stream
        assert isinstance(stream, ScriptedStream)
        connection.show_life()
        assert not stream.written
        await connection.flush()
        assert stream.written[1] == Kind.HELLO, "it was kept for the first message that can be sent"

        for bad in (pack(Kind.ALIVE, Number(value=1)), pack(Kind.ALIVE, None, 3) + b"abc"):
            with pytest.raises(ProtocolError, match="ALIVE"):
                await Call(connection_to(bad, HeaderMemory(DEFAULT_LIMITS))).receive(Number)

    run(main())
