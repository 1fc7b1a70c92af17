"""Sessions over TCP: cookies, who may have one, the handshake inside, and pairs that a relay joins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tracemalloc
from types import TracebackType

import msgspec
import pytest

from shoal.errors import DialError, IdentityMismatchError, InterruptedDialError, ProtocolError, StreamClosedError
from shoal.net import transport as transport_module
from shoal.net.limits import DEFAULT_LIMITS, Limits
from shoal.net.memory import MemoryNetwork
from shoal.net.tcp import listener as strangers_module
from shoal.net.tcp import stream as tcp_stream
from shoal.net.tcp.connect import share_port
from shoal.net.tcp.sessions import SESSION_BYTE, TcpSession
from shoal.net.tcp.stream import OwnSocket
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import (
    COOKIE_BYTES,
    COOKIE_SECONDS,
    MAX_FRAME_BYTES,
    Session,
    Splice,
    Stream,
    Throttle,
    pack_frame,
    receive_frame,
    send_frame,
)
from shoal.p2p import Header, Identity, Multiaddr
from tests.net.test_tcp import Listening, dial_in_vain, read
from tests.p2p.peers import Number, end_of, until

pytestmark = pytest.mark.oldest

NO_IDLING = 1000.0


class Count(Throttle):
    """Counts, and pauses as told.

    Args:
        pause: seconds after each piece.
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.taken = 0
        self.pieces = 0

    def take(self, nbytes: int) -> float:
        self.taken += nbytes
        self.pieces += 1
        return self.pause


class Circle:
    """Two peers that dial nobody but a relay, and the relay."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.relay = TcpTransport(Identity.generate(), limits=limits)
        self.near, self.far = TcpTransport(Identity.generate()), TcpTransport(Identity.generate())
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.joining: list[asyncio.Task[None]] = []
        self.dropped = self.relay.metrics.connections_dropped

    async def __aenter__(self) -> Circle:
        [self.address] = await self.relay.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), self.streams.put_nowait)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for joining in self.joining:
            joining.cancel()
        await asyncio.gather(*self.joining, return_exceptions=True)
        for transport in (self.near, self.far, self.relay):
            await transport.close()
        while not self.streams.empty():
            self.streams.get_nowait().abort()
        if kind is None:
            await until(lambda: not tcp_stream.OwnSocket.open)

    async def session(self, transport: TcpTransport, *, punchable: bool = False) -> tuple[TcpSession, TcpSession]:
        """One that a peer has opened to the relay, and the relay's end of it."""
        cookie = os.urandom(COOKIE_BYTES)
        expected = self.relay.expect_session(cookie)
        outer = await transport.open_session(self.address, cookie, punchable=punchable)
        inner = await expected
        assert isinstance(outer, TcpSession)
        assert isinstance(inner, TcpSession)
        return outer, inner

    async def circuit(
        self, throttle: Throttle | None = None, idle_seconds: float = NO_IDLING
    ) -> tuple[TcpSession, TcpSession]:
        """The outer ends of two sessions that the relay has joined."""
        (near, one), (far, two) = await self.session(self.near), await self.session(self.far)
        joining = Splice(one, two, throttle or Count(), idle_seconds).run()
        self.joining.append(asyncio.ensure_future(joining))
        return near, far

    async def streams_through(self, near: Session, far: Session) -> tuple[Stream, Stream]:
        """Handshakes on the two ends of a circuit."""
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self.far.receive(far, accepted.set_result)
        return await self.near.authenticate(near, self.far.identity.peer_id), await accepted


async def has_ended(session: Session) -> bool:
    """Wait until nothing can arrive any more."""
    with contextlib.suppress(StreamClosedError):
        await session.read_exactly(2**30)
    return True


def raw(session: TcpSession) -> socket.socket:
    """The socket of a session, which belongs to the test from now on."""
    return session.detach()


# --- cookies ----------------------------------------------------------------------------------------------------------


async def test_a_session_is_a_pipe_in_both_directions() -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        assert (near.local_address, near.remote_address) == (inner.remote_address, inner.local_address)
        assert near.remote_address == circle.address
        await near.write(b"to and")
        await inner.write(b"fro")
        assert (await inner.read_exactly(6), await near.read_exactly(3)) == (b"to and", b"fro")
        assert await near.read_exactly(0) == b""


async def test_bytes_that_nobody_has_asked_for_stay_on_the_wire() -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        await near.write(b"frame, and what follows")
        assert await inner.read_exactly(5) == b"frame"
        with raw(inner) as rest:
            assert await asyncio.get_running_loop().sock_recv(rest, 100) == b", and what follows"


async def test_a_cookie_is_good_once() -> None:
    async with Circle() as circle:
        cookie = os.urandom(COOKIE_BYTES)
        expected = circle.relay.expect_session(cookie)
        first = await circle.near.open_session(circle.address, cookie)
        await (await expected).write(b"welcome")
        assert await first.read_exactly(7) == b"welcome"
        second = await circle.near.open_session(circle.address, cookie)
        assert await has_ended(second)
        assert circle.dropped == {"unknown session": 1}
        assert not len(circle.relay.strangers.expected)


async def test_a_cookie_is_good_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COOKIE_SECONDS == 10.0
    monkeypatch.setattr(transport_module, "COOKIE_SECONDS", 0.01)
    async with Circle() as circle:
        cookie = os.urandom(COOKIE_BYTES)
        expected = circle.relay.expect_session(cookie)
        assert isinstance(await end_of(expected), asyncio.CancelledError)
        late = await circle.near.open_session(circle.address, cookie)
        assert await has_ended(late)
        assert circle.dropped == {"unknown session": 1}


async def test_whoever_no_longer_waits_gets_nothing() -> None:
    async with Circle() as circle:
        cookie = os.urandom(COOKIE_BYTES)
        circle.relay.expect_session(cookie).cancel()
        assert await has_ended(await circle.near.open_session(circle.address, cookie))
        assert circle.dropped == {"unknown session": 1}


async def test_a_session_that_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "COOKIE_SECONDS", 0.01)
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        assert await has_ended(near)
        with pytest.raises(StreamClosedError, match="nobody has used this session in time"):
            await inner.read_exactly(1)


async def test_a_session_that_somebody_uses_does_not_end() -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)

        async def use() -> bytes:
            inner.use_within(0.0)
            return await inner.read_exactly(1)

        reading = asyncio.ensure_future(use())
        await near.write(b"it may take a while")
        assert await reading == b"i"
        assert not inner.closed


@pytest.mark.parametrize("cookie", [b"", bytes(COOKIE_BYTES - 1), bytes(COOKIE_BYTES + 1)])
async def test_cookies_of_another_size_are_mistakes(cookie: bytes) -> None:
    transport = TcpTransport(Identity.generate())
    with pytest.raises(ValueError, match=f"{COOKIE_BYTES} bytes, not {len(cookie)}"):
        transport.expect_session(cookie)
    transport.expect_session(bytes(COOKIE_BYTES))
    with pytest.raises(ValueError, match="in use already"):
        transport.expect_session(bytes(COOKIE_BYTES))
    await transport.close()


# --- strangers --------------------------------------------------------------------------------------------------------


async def test_guesses_are_charged_to_their_host_and_right_cookies_are_not() -> None:
    async with Circle(Limits(handshakes_per_second=0.001, handshake_burst=3)) as circle:
        for _ in range(5):
            await circle.session(circle.near)
        for _ in range(3):
            assert await has_ended(await circle.far.open_session(circle.address, os.urandom(COOKIE_BYTES)))
        assert circle.dropped == {"unknown session": 3}
        with pytest.raises(DialError, match="takes no new connections from this host"):
            await circle.near.dial(circle.address, circle.relay.identity.peer_id)
        cookie = os.urandom(COOKIE_BYTES)
        expected = circle.relay.expect_session(cookie)
        turned_away = await circle.near.open_session(circle.address, cookie)
        with pytest.raises(ProtocolError, match="a frame of 5379 bytes"):  # the alert for those who speak TLS
            await receive_frame(turned_away, Number)
        assert circle.dropped == {"unknown session": 3, "too many handshakes of one host": 2}
        assert not expected.done()


async def test_sessions_and_streams_share_a_port() -> None:
    async with Circle() as circle:
        await circle.session(circle.near)
        near = await circle.near.dial(circle.address, circle.relay.identity.peer_id)
        far = await circle.streams.get()
        await near.write(b"TLS")
        assert await read(far, 3) == b"TLS"
        near.abort()
        far.abort()
        assert not circle.dropped


@pytest.mark.parametrize("first", [0, 4, 6, 0x15, 0xFF])
async def test_any_other_first_byte_begins_no_session(first: int) -> None:
    async with Circle() as circle:
        cookie = os.urandom(COOKIE_BYTES)
        expected = circle.relay.expect_session(cookie)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(circle.address["tcp"] or 0))
        writer.write(bytes([first]) + cookie)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        await until(lambda: circle.dropped == {"no TLS": 1})
        assert not expected.done()


async def test_a_cookie_may_come_in_pieces() -> None:
    async with Circle() as circle:
        cookie = os.urandom(COOKIE_BYTES)
        expected = circle.relay.expect_session(cookie)
        _, writer = await asyncio.open_connection("127.0.0.1", int(circle.address["tcp"] or 0))
        writer.write(SESSION_BYTE)
        await until(lambda: len(circle.relay.strangers.shaking_hands) == 1)
        for byte in cookie + b"!":
            writer.write(bytes([byte]))
            await writer.drain()
        assert await (await expected).read_exactly(1) == b"!"
        writer.transport.abort()


@pytest.mark.parametrize("ending", ["leaves", "stays"])
async def test_half_a_cookie(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    if ending == "stays":
        monkeypatch.setattr(strangers_module, "HANDSHAKE_TIMEOUT", 0.1)
    async with Circle() as circle:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(circle.address["tcp"] or 0))
        writer.write(SESSION_BYTE + bytes(COOKIE_BYTES - 1))
        await until(lambda: len(circle.relay.strangers.shaking_hands) == 1)
        if ending == "stays":
            assert await reader.read() == b""
        writer.transport.abort()
        reason = {"leaves": "closed before the cookie", "stays": "no cookie in time"}[ending]
        await until(lambda: circle.dropped == {reason: 1})


async def test_a_crowd_of_half_cookies_leaves_room_for_others() -> None:
    async with Circle(Limits(handshakes_in_flight=3)) as circle:
        crowd = [await asyncio.open_connection("127.0.0.1", int(circle.address["tcp"] or 0)) for _ in range(5)]
        for _, writer in crowd:
            writer.write(SESSION_BYTE)
        await until(lambda: circle.dropped["too many handshakes at once"] == 2)
        await circle.session(circle.near)
        for _, writer in crowd:
            writer.transport.abort()


# --- opening and ending -----------------------------------------------------------------------------------------------


async def test_nobody_answers() -> None:
    transport = TcpTransport(Identity.generate())
    with socket.socket() as silent:  # which has the port, but does not listen
        silent.bind(("127.0.0.1", 0))
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}")
        with pytest.raises(DialError, match="connection refused"):
            await transport.open_session(address, bytes(COOKIE_BYTES))
    with pytest.raises(DialError, match="is not supported"):
        await transport.open_session(Multiaddr("/memory/1"), bytes(COOKIE_BYTES))
    assert transport.metrics.dials_failed == 1
    assert "connection refused" in await dial_in_vain(address)


async def test_the_port_of_a_punchable_session_can_be_used_again() -> None:
    async with Circle() as circle:
        sessions = [(await circle.session(circle.near, punchable=True))[0] for _ in range(4)]
        ports = {int(session.local_address["tcp"] or 0) for session in sessions}
        assert len(ports) == 4
        assert all(session.is_punchable for session in sessions)
        for port in ports:
            with OwnSocket(socket.AF_INET) as another:
                share_port(another)
                another.bind(("", port))
                another.listen()
        ordinary, _ = await circle.session(circle.near)
        assert not ordinary.is_punchable


@pytest.mark.parametrize("end", ["near", "inner"])
async def test_an_end_is_seen_on_both_sides(end: str) -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        ending, other = (near, inner) if end == "near" else (inner, near)
        reading = asyncio.ensure_future(ending.read_exactly(1))
        await ending.write(b"last words")
        ending.abort()
        ending.abort()
        with pytest.raises(StreamClosedError, match="this side closed"):
            await reading
        with pytest.raises(StreamClosedError, match="this side closed"):
            await ending.write(b"")
        assert await other.read_exactly(10) == b"last words"
        with pytest.raises(StreamClosedError, match="the other side closed"):
            await other.read_exactly(1)
        assert ending.closed
        assert other.closed


async def test_whoever_is_held_up_is_let_go_at_the_end() -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        writing = asyncio.ensure_future(near.write(bytes(2**26)))
        await inner.read_exactly(2**16)
        near.abort()
        assert isinstance(await end_of(writing), StreamClosedError)
        assert await has_ended(inner)


async def test_closing_a_transport_ends_its_sessions_and_what_it_expects() -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        expected = circle.relay.expect_session(bytes(COOKIE_BYTES))
        await circle.relay.close()
        assert expected.cancelled()
        assert inner.closed
        assert await has_ended(near)


# --- handshakes -------------------------------------------------------------------------------------------------------


async def test_the_handshake_on_a_session_without_a_relay_in_between() -> None:
    """As in a call in reverse: whoever has connected is the one who is called."""
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        circle.near.receive(near, accepted.set_result)
        calling = await circle.relay.authenticate(inner, circle.near.identity.peer_id)
        called = await accepted
        assert called.remote == circle.relay.identity.peer_id
        near.abort()  # it belongs to the stream now
        await calling.write(b"hello")
        assert await read(called, 5) == b"hello"
        assert not calling.is_relayed
        calling.close()
        called.abort()


async def test_a_stream_through_a_relay() -> None:
    async with Circle() as circle:
        throttle = Count()
        near, far = await circle.streams_through(*await circle.circuit(throttle))
        assert (near.remote, far.remote) == (circle.far.identity.peer_id, circle.near.identity.peer_id)
        payload = os.urandom(5_000_000)
        there, back, _, _ = await asyncio.gather(
            read(far, len(payload)), read(near, len(payload)), near.write(payload), far.write(payload)
        )
        assert there == back == payload
        assert throttle.taken > 2 * len(payload)
        await far.write(b"bye")
        far.close()
        assert await read(near, 3) == b"bye"
        with pytest.raises(StreamClosedError):
            await read(near, 1)
        await asyncio.gather(*circle.joining)


async def test_another_peer_than_the_expected_one_is_not_taken() -> None:
    async with Circle() as circle:
        near, far = await circle.circuit()
        circle.far.receive(far, lambda stream: pytest.fail("it has proven nothing"))
        with pytest.raises(IdentityMismatchError, match="wrong identity"):
            await circle.near.authenticate(near, circle.relay.identity.peer_id)
        await asyncio.gather(*circle.joining)
        await until(lambda: circle.far.metrics.connections_dropped.total() == 1)


async def test_handshakes_that_fail() -> None:
    async with Circle() as circle:
        near, far = await circle.circuit()
        far.abort()
        with pytest.raises(InterruptedDialError):
            await circle.near.authenticate(near, circle.far.identity.peer_id)
        with pytest.raises(InterruptedDialError):
            await circle.near.authenticate(near, circle.far.identity.peer_id)
        circle.far.receive(far, lambda stream: pytest.fail("it has ended"))
        near, far = await circle.circuit()
        circle.far.receive(far, lambda stream: pytest.fail("it has proven nothing"))
        await near.write(SESSION_BYTE + bytes(COOKIE_BYTES))  # a session in a session is none
        assert await has_ended(near)
        assert circle.far.metrics.connections_dropped == {"no TLS": 1}


async def test_sessions_of_other_transports_are_mistakes() -> None:
    async with Circle() as circle:
        network = MemoryNetwork()
        [address] = await (listening := network.transport()).listen(network.new_address(), lambda stream: None)
        expected = listening.expect_session(bytes(COOKIE_BYTES))
        other = await network.transport().open_session(address, bytes(COOKIE_BYTES))
        with pytest.raises(TypeError, match="no session of this transport"):
            await circle.near.authenticate(other, circle.far.identity.peer_id)
        for session in (other, await expected):
            session.abort()


# --- pairs ------------------------------------------------------------------------------------------------------------


async def test_what_was_sent_before_the_pair_was_made_arrives() -> None:
    async with Circle() as circle:
        (near, one), (far, two) = await circle.session(circle.near), await circle.session(circle.far)
        await near.write(b"early")
        await far.write(b"bird")
        circle.joining.append(asyncio.ensure_future(Splice(one, two, Count(), NO_IDLING).run()))
        assert (await far.read_exactly(5), await near.read_exactly(4)) == (b"early", b"bird")


@pytest.mark.parametrize("end", ["near", "far"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_an_end_of_either_side_ends_both(end: str, how: str) -> None:
    async with Circle() as circle:
        near, far = await circle.circuit()
        ending, other = (near, far) if end == "near" else (far, near)
        await ending.write(b"last words")
        assert await other.read_exactly(5) == b"last "
        with raw(ending) as connection:
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "close":
            assert await other.read_exactly(5) == b"words"
        assert await has_ended(other)
        await asyncio.gather(*circle.joining)


async def test_the_rest_is_sent_before_the_end() -> None:
    async with Circle() as circle:
        near, far = await circle.circuit()
        payload = os.urandom(3_000_000)
        loop = asyncio.get_running_loop()
        with raw(near) as connection:
            arriving = asyncio.ensure_future(far.read_exactly(len(payload)))
            await loop.sock_sendall(connection, payload)
        assert await arriving == payload
        assert await has_ended(far)
        await asyncio.gather(*circle.joining)


async def test_one_that_has_ended_before_is_joined_to_nothing() -> None:
    async with Circle() as circle:
        (near, one), (far, two) = await circle.session(circle.near), await circle.session(circle.far)
        one.abort()
        await Splice(one, two, Count(), NO_IDLING).run()
        assert await has_ended(near)
        assert await has_ended(far)
        (near, one), (far, two) = await circle.session(circle.near), await circle.session(circle.far)
        near.abort()
        await Splice(one, two, Count(), NO_IDLING).run()
        assert await has_ended(far)


async def test_a_pair_that_idles_ends() -> None:
    async with Circle() as circle:
        near, far = await circle.circuit(idle_seconds=0.05)
        assert await has_ended(near)
        assert await has_ended(far)
        await asyncio.gather(*circle.joining)


async def test_the_throttle_halts_the_half_that_has_no_credit_left() -> None:
    """And not the other one."""
    async with Circle() as circle:
        throttle = Count(pause=NO_IDLING)
        near, far = await circle.circuit(throttle)
        await near.write(b"some")
        assert await far.read_exactly(4) == b"some"
        await near.write(b"more")
        await far.write(b"answer")
        assert await near.read_exactly(6) == b"answer"
        assert throttle.taken == 10
        reading = asyncio.ensure_future(far.read_exactly(4))
        await asyncio.wait([reading], timeout=0.05)
        assert not reading.done()
        assert throttle.taken == 10
        far.abort()
        await end_of(reading)


async def test_the_throttle_lets_a_half_go_on() -> None:
    async with Circle() as circle:
        throttle = Count(pause=0.001)
        near, far = await circle.circuit(throttle)
        payload = os.urandom(1_000_000)
        arrived, _ = await asyncio.gather(far.read_exactly(len(payload)), near.write(payload))
        assert arrived == payload
        assert throttle.taken == len(payload)
        assert throttle.pieces > 1


async def test_who_is_gone_is_noticed_although_it_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpSession, "look_seconds", 0.01)
    async with Circle() as circle:
        near, far = await circle.circuit(Count(pause=NO_IDLING))
        await near.write(b"some")
        assert await far.read_exactly(4) == b"some"
        await near.write(b"more")
        with raw(near) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert await has_ended(far)
        await asyncio.gather(*circle.joining)


async def test_a_slow_reader_takes_no_memory_of_the_relay() -> None:
    loop = asyncio.get_running_loop()
    total = 2**26
    async with Circle() as circle:
        near, far = await circle.circuit()
        with raw(near) as sending, raw(far) as taking:
            buffer, payload = memoryview(bytearray(2**16)), bytes(total)
            tracemalloc.start()
            try:
                writing = asyncio.ensure_future(loop.sock_sendall(sending, payload))
                received = 0
                while received < total:
                    received += await loop.sock_recv_into(taking, buffer)
                    for _ in range(3):  # the relay may run ahead
                        await asyncio.sleep(0)
                await writing
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < 4 * 2**20


async def test_a_cancelled_relay_leaves_nobody_waiting() -> None:
    async with Circle() as circle:
        near, far = await circle.circuit()
        await near.write(b"!")
        assert await far.read_exactly(1) == b"!"
        circle.joining[0].cancel()
        assert await has_ended(near)
        assert await has_ended(far)


# --- frames -----------------------------------------------------------------------------------------------------------


class Big(Header):
    data: bytes = b""


async def test_frames_one_after_another() -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        for value in range(3):
            await send_frame(near, Number(value=value))
        await near.write(b"and what follows")
        assert [(await receive_frame(inner, Number)).value for _ in range(3)] == [0, 1, 2]
        assert await inner.read_exactly(16) == b"and what follows"


async def test_frames_have_a_limit() -> None:
    room = MAX_FRAME_BYTES - len(pack_frame(Big(data=bytes(1000)))) + 2 + 1000
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        await send_frame(near, Big(data=bytes(room)))
        assert len((await receive_frame(inner, Big)).data) == room
        with pytest.raises(ValueError, match=f"Big of {MAX_FRAME_BYTES + 1} bytes is over the limit"):
            await send_frame(near, Big(data=bytes(room + 1)))
        await near.write(struct.pack(">H", MAX_FRAME_BYTES + 1))
        with pytest.raises(ProtocolError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes instead of a Big"):
            await receive_frame(inner, Big)


@pytest.mark.parametrize("encoded", [b"", b"\xc1", msgspec.msgpack.encode({"value": "no number"}), b"\x81\xa5value"])
async def test_other_frames_than_the_expected_one(encoded: bytes) -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)
        await near.write(struct.pack(">H", len(encoded)) + encoded)
        with pytest.raises(ProtocolError, match="invalid Number"):
            await receive_frame(inner, Number)
        await near.write(b"\0\5abc")
        near.abort()
        with pytest.raises(StreamClosedError):
            await receive_frame(inner, Number)


async def test_dials_find_a_listener_that_expects_sessions() -> None:
    async with Listening() as listening:
        listening.transport.expect_session(bytes(COOKIE_BYTES))
        stream = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        stream.abort()
