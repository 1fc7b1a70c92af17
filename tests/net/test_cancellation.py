"""Cancellation at every await: whatever is given up half-way leaves nothing behind, and the next call works.

A coroutine is run again and again, each time cancelled one suspension later, until it gets through. It is cancelled
in two ways: while it waits, and in the moment between the end of the wait and its waking up, when a result that nobody
will take is there already.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from shoal.base.tasks import cancel_and_wait
from shoal.errors import ShoalError, StreamClosedError
from shoal.net.server import CallServer
from shoal.net.tcp import stream as tcp_stream
from shoal.net.tcp.listener import UnauthenticatedLimits
from shoal.net.tcp.sessions import TcpSession
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import COOKIE_BYTES, Session, Splice, Stream
from shoal.p2p import P2P, Identity, Multiaddr
from tests.net.test_sessions import NO_IDLING, Circle, Count
from tests.p2p.peers import KINDS, Empty, Number, Peers, assert_clean, end_of, serving, stub, until

WAYS = ["while waiting", "when the wait is over"]
MOST_SUSPENSIONS = 300


class CancelAt:
    """Awaits a coroutine and cancels the running task at the given suspension of it."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], suspension: int, way: str) -> None:
        self._coroutine = coroutine
        self._suspension = suspension
        self._way = way
        self.reached = False
        self.place: list[str] = []
        """The functions that waited when it was cancelled, from the outermost to the innermost."""

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._coroutine.__await__()
        count, thrown = 0, None
        while True:
            try:
                waits_for = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as result:
                return result.value
            if count == self._suspension:
                self.reached = True
                self.place = _functions_of(self._coroutine)
                if waits_for is None or self._way == "while waiting":
                    asyncio.get_running_loop().call_soon(task.cancel)
                else:
                    waits_for.add_done_callback(lambda _: task.cancel())
            count += 1
            try:
                thrown = None
                yield waits_for
            except BaseException as e:
                thrown = e


def _functions_of(coroutine: Any) -> list[str]:
    """What a coroutine that waits is inside of, as far as it can be looked into."""
    names = []
    while coroutine is not None:
        names.append(getattr(coroutine, "__qualname__", type(coroutine).__name__))
        coroutine = getattr(coroutine, "cr_await", None)
    return names


async def every_suspension(
    way: str, start: Callable[[], Coroutine[Any, Any, Any]], places: set[str] | None = None
) -> AsyncIterator[tuple[bool, Any]]:
    """Run a coroutine until it gets through, cancelled a little later each time.

    Args:
        places: gets the names of the functions that were cancelled.

    Yields:
        Whether it was cancelled, and its result if not.
    """
    for suspension in range(MOST_SUSPENSIONS):
        attempt = CancelAt(start(), suspension, way)
        task = asyncio.ensure_future(_await(attempt))
        error = await end_of(task)
        if isinstance(error, asyncio.CancelledError):
            assert attempt.reached
            if places is not None:
                places.update(attempt.place)
            yield True, None
        else:
            assert error is None, f"cancelled at suspension {suspension}, but it ended with {error!r}"
            yield False, task.result()
            if not attempt.reached:
                return
    pytest.fail(f"not through after {MOST_SUSPENSIONS} suspensions")


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def only_this_task() -> None:
    """All other tasks end soon."""
    me = {asyncio.current_task()}
    await until(lambda: asyncio.all_tasks() == me)


async def nothing_left(*peers: P2P) -> None:
    """Counters are back at zero, and the only tasks left serve idle connections."""
    for p2p in peers:
        await until(lambda: not p2p.dialler.tasks and not p2p.pool.dialling_count)  # noqa: B023
        assert_clean(p2p)


pytestmark = pytest.mark.parametrize("way", WAYS)


# --- the parts, over real sockets -------------------------------------------------------------------------------------


async def test_dial(way: str) -> None:
    identity = Identity.generate()
    listening, dialling = TcpTransport(identity), TcpTransport(Identity.generate())
    accepted: list[Stream] = []
    try:
        for address in await listening.listen(Multiaddr("/dns4/localhost/tcp/0"), accepted.append):
            target = Multiaddr(f"/dns4/localhost/tcp/{address['tcp']}")
        own_sockets = set(tcp_stream.OwnSocket.open)
        places: set[str] = set()
        async for was_cancelled, stream in every_suspension(
            way, lambda: dialling.dial(target, identity.peer_id), places
        ):
            if not was_cancelled:
                stream.abort()
        assert places >= {"_resolve", "connect", "prove_to_listener", "TcpStream.read_exactly_into"}
        await until(lambda: all(stream.closed for stream in accepted))
        await until(lambda: len(listening.strangers.shaking_hands) == len(listening.strangers.silent) == 0)
        await until(lambda: set(tcp_stream.OwnSocket.open) == own_sockets)
    finally:
        await listening.close()
    await only_this_task()


async def test_handshake_of_the_listener(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the room for handshakes is full, or the peer is shut down."""
    original = UnauthenticatedLimits.shake_hands
    attempts: list[CancelAt] = []

    async def shake_hands(self: UnauthenticatedLimits, *args: Any) -> None:
        attempts.append(CancelAt(original(self, *args), len(attempts), way))
        await attempts[-1]

    monkeypatch.setattr(UnauthenticatedLimits, "shake_hands", shake_hands)
    identity = Identity.generate()
    listening = TcpTransport(identity)
    accepted: list[Stream] = []
    dialled: list[Stream] = []
    try:
        [address] = await listening.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), accepted.append)
        while not attempts or attempts[-1].reached:
            try:
                dialled.append(await TcpTransport(Identity.generate()).dial(address, identity.peer_id))
            except ShoalError:
                assert attempts[-1].reached
            await until(lambda: len(listening.strangers.shaking_hands) == 0)
        places = {place for attempt in attempts for place in attempt.place}
        assert places >= {"verify_dialler", "TcpStream.read_exactly_into"}
        assert len(attempts) > 2
        assert len(accepted) == listening.metrics.connections_accepted
        await until(lambda: sum(not stream.closed for stream in dialled) == sum(not s.closed for s in accepted))
    finally:
        await listening.close()
        for stream in (*accepted, *dialled):
            stream.abort()
    await until(lambda: not tcp_stream.OwnSocket.open)
    await only_this_task()


# --- sessions ---------------------------------------------------------------------------------------------------------


async def test_opening_a_session(way: str) -> None:
    async with Circle() as circle:
        own_sockets = set(tcp_stream.OwnSocket.open)
        places: set[str] = set()
        cookies: list[bytes] = []

        async def open_session() -> Any:
            cookies.append(os.urandom(COOKIE_BYTES))
            return await circle.near.open_session(circle.address, cookies[-1], punchable=True)

        async for was_cancelled, session in every_suspension(way, open_session, places):
            expected = circle.relay.strangers.expected
            assert len(expected) == 0
            if not was_cancelled:
                session.abort()
            assert not circle.near.strangers.sessions
        assert places >= {"connect", "TcpSession.write"}
        await until(lambda: len(circle.relay.strangers.shaking_hands) == len(circle.relay.strangers.silent) == 0)
        await until(lambda: set(tcp_stream.OwnSocket.open) == own_sockets)
        assert await circle.session(circle.near)
    await only_this_task()


async def test_using_a_session(way: str) -> None:
    async with Circle() as circle:
        near, inner = await circle.session(circle.near)

        async def echo() -> bool:
            for size in (1, 1000):
                await near.write(bytes(size))
                await inner.write(await inner.read_exactly(size))
                assert await near.read_exactly(size) == bytes(size)
            return True

        places: set[str] = set()
        async for was_cancelled, _ in every_suspension(way, echo, places):
            assert was_cancelled == (near.closed or inner.closed)
            near.abort()
            inner.abort()
            near, inner = await circle.session(circle.near)
        assert places >= {"TcpSession.read_exactly", "TcpSession.write"}
    await only_this_task()


async def test_a_session_that_arrives(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the room for strangers is full in the middle of a cookie."""
    original = UnauthenticatedLimits.take_session
    attempts: list[CancelAt] = []

    async def take_session(self: UnauthenticatedLimits, *args: Any) -> None:
        attempts.append(CancelAt(original(self, *args), len(attempts), way))
        await attempts[-1]

    monkeypatch.setattr(UnauthenticatedLimits, "take_session", take_session)
    async with Circle() as circle:
        while not attempts or attempts[-1].reached:
            cookie = os.urandom(COOKIE_BYTES)
            expected = circle.relay.expect_session(cookie)
            session = await circle.near.open_session(circle.address, cookie)
            await until(lambda: len(circle.relay.strangers.shaking_hands) == len(circle.relay.strangers.silent) == 0)
            if expected.done():
                (await expected).abort()
            else:
                expected.cancel()
            with pytest.raises(StreamClosedError):
                await session.read_exactly(1)
        assert len(attempts) > 1
        assert not circle.relay.strangers.sessions
    await only_this_task()


async def test_a_handshake_on_a_session(way: str) -> None:
    async with Circle() as circle:
        accepted: list[Stream] = []
        sessions: list[Session] = []

        async def authenticate() -> Stream:
            return await circle.near.authenticate(sessions.pop(), circle.far.identity.peer_id)

        async def prepare() -> None:
            near, far = await circle.circuit()
            circle.far.receive(far, accepted.append)
            sessions[:] = [near]

        await prepare()
        places: set[str] = set()
        async for was_cancelled, stream in every_suspension(way, authenticate, places):
            if not was_cancelled:
                assert stream.remote == circle.far.identity.peer_id
                stream.abort()
            await asyncio.gather(*circle.joining)
            await until(lambda: all(stream.closed for stream in accepted))
            await prepare()
        assert places >= {"prove_to_listener", "TcpStream.read_exactly_into"}
        sessions.pop().abort()
        await asyncio.gather(*circle.joining)
        await until(lambda: len(circle.far.strangers.shaking_hands) == len(circle.far.strangers.silent) == 0)
    await only_this_task()


async def test_joining_two_sessions(way: str) -> None:
    async with Circle() as circle:
        ends: list[TcpSession] = []
        before = set(tcp_stream.OwnSocket.open)

        async def prepare() -> None:
            ends[:] = [*await circle.session(circle.near), *await circle.session(circle.far)]

        async def talk() -> None:
            await ends[0].write(bytes(300_000))
            await ends[2].read_exactly(300_000)
            ends[2].abort()

        async def join() -> None:
            talking = asyncio.ensure_future(talk())
            try:
                await Splice(ends[1], ends[3], Count(), NO_IDLING).run()
            finally:
                await cancel_and_wait(talking)

        await prepare()
        places: set[str] = set()
        async for _ in every_suspension(way, join, places):
            for session in ends:
                session.abort()  # does nothing to those that were taken over
            await until(lambda: set(tcp_stream.OwnSocket.open) == before)
            await prepare()
        assert "Splice.run" in places
    await only_this_task()


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("connected", [False, True], ids=["dialling", "connected"])
async def test_unary_call(way: str, kind: str, connected: bool) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)

        async def call() -> Any:
            return await stub(caller, server).rpc_square(Number(value=3), timeout=30)

        async for was_cancelled, answer in every_suspension(way, call):
            assert was_cancelled or answer == Number(value=9)
            await nothing_left(caller)
            if connected:
                await call()
            else:
                caller.pool.renew()  # closes what is idle
        assert await call() == Number(value=9)
        await until(lambda: server.server.connection_count == caller.pool.idle_count)
    await only_this_task()


@pytest.mark.parametrize("kind", KINDS)
async def test_stream_with_payloads(way: str, kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        payload = bytes(range(256)) * 4000

        async def echo() -> Any:
            async with stub(caller, server).rpc_echo() as call:
                for value in range(3):
                    await call.send(Number(value=value), payload)
                    assert await call.receive(Number) == Number(value=value)
                    assert await call.read_payload(2**24) == payload
                await call.send_end()
                assert await call.receive(Number) is None
            return "done"

        places: set[str] = set()
        async for was_cancelled, answer in every_suspension(way, echo, places):
            assert was_cancelled or answer == "done"
            await nothing_left(caller)
        assert "Connection.receive" in places
        assert kind == "memory" or "Call.read_payload" in places
        assert await echo() == "done"
        await until(lambda: server.server.connection_count == caller.pool.idle_count)
        await nothing_left(server)
    await only_this_task()


@pytest.mark.parametrize("kind", KINDS)
async def test_more_than_the_network_takes(way: str, kind: str) -> None:
    """Cancelled in the middle of a message: half of it has left, so nothing else may follow on this connection."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        payload = bytes(16_000_000)

        async def send() -> Any:
            async with stub(caller, server).rpc_take() as call:
                await call.send(Number(value=len(payload)), payload, end=True)
                assert await call.receive(Number) == Number(value=0)
                assert await call.receive(Number) is None
            return "done"

        places: set[str] = set()
        async for was_cancelled, answer in every_suspension(way, send, places):
            assert was_cancelled or answer == "done"
            await nothing_left(caller)
        assert places >= {"Connection.send", "TcpStream.write" if kind == "tcp" else "PipeEnd.write"}
        assert await send() == "done"
        await until(lambda: server.server.connection_count == caller.pool.idle_count)
        await nothing_left(server)
    await only_this_task()


@pytest.mark.parametrize("kind", KINDS)
async def test_call_that_waits_for_its_turn(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives up in the queue passes its turn on."""
    monkeypatch.setattr("shoal.net.connection_pool.MAX_DIALLED_PER_PEER", 2)
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)

        async def call() -> Any:
            return await stub(caller, server).rpc_square(Number(value=3))

        others: list[asyncio.Task[Any]] = []

        async def call_in_a_crowd() -> Any:
            others[:] = [asyncio.ensure_future(call()) for _ in range(4)]
            await asyncio.sleep(0)
            return await call()

        async for _ in every_suspension(way, call_in_a_crowd):
            assert await asyncio.gather(*others) == [Number(value=9)] * 4
            await nothing_left(caller)
            assert caller.pool.idle_count <= 2
    await only_this_task()


@pytest.mark.parametrize("kind", KINDS)
async def test_everybody_in_a_queue_gives_up(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.net.connection_pool.MAX_DIALLED_PER_PEER", 1)
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        for iterations in range(30):
            tasks = [asyncio.ensure_future(stub(caller, server).rpc_hang(Empty())) for _ in range(5)]
            for _ in range(iterations):
                await asyncio.sleep(0)
            for task in tasks if way == "while waiting" else reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await nothing_left(caller)
        await until(lambda: service.running == 0)
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9
    await only_this_task()


@pytest.mark.parametrize("kind", KINDS)
async def test_serving(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side of a call: the task that serves it is cancelled, as by the end of its connection."""
    original = CallServer.serve
    attempts: list[CancelAt] = []

    async def serve(self: CallServer, connection: Any) -> None:
        attempts.append(CancelAt(original(self, connection), len(attempts), way))
        await attempts[-1]

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        monkeypatch.setattr(CallServer, "serve", serve)

        async def echo() -> None:
            async with stub(caller, server).rpc_echo() as call:
                await call.send(Number(value=1), bytes(1_000_000))
                await call.receive(Number)
                await call.read_payload(2**24)
                await call.send_end()
                assert await call.receive(Number) is None
            assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9

        while not attempts or attempts[-1].reached:
            error = await end_of(echo())
            assert error is None or isinstance(error, ShoalError), error
            assert error is None or attempts[-1].reached
            caller.pool.renew()  # closes what is idle
            await until(lambda: server.server.connection_count == 0)
            await nothing_left(caller, server)
            assert server.server.peers == []
            assert server.server.idle_count == 0
        assert len(attempts) > 3
        assert service.running == 0
    await only_this_task()


# --- a peer's life ----------------------------------------------------------------------------------------------------


async def test_start(way: str, tmp_path: Path) -> None:
    async with Peers("tcp") as peers:
        first = await peers.start()
        identity_path = tmp_path / "id"
        Identity.load_or_create(identity_path)
        addresses = await first.get_visible_maddrs()
        async for was_cancelled, p2p in every_suspension(
            way, lambda: P2P.create(initial_peers=addresses, identity_path=identity_path)
        ):
            if not was_cancelled:
                await p2p.shutdown()
            await until(lambda: first.server.connection_count == 0)
        await nothing_left(first)
    await until(lambda: not tcp_stream.OwnSocket.open)
    await only_this_task()


@pytest.mark.parametrize("kind", KINDS)
async def test_shutdown_that_is_cancelled_can_be_finished(way: str, kind: str) -> None:
    for suspension in range(20):
        async with Peers(kind) as peers:
            server, caller = await peers.two()
            await serving(server)
            await serving(caller)
            await stub(caller, server).rpc_square(Number(value=3))
            await stub(server, caller).rpc_square(Number(value=3))
            hanging = asyncio.ensure_future(stub(caller, server).rpc_hang(Empty()))
            await asyncio.sleep(0)
            attempt = CancelAt(caller.shutdown(), suspension, way)
            await end_of(asyncio.ensure_future(_await(attempt)))
            await caller.shutdown()
            assert isinstance(await end_of(hanging), ShoalError)
            await nothing_left(caller)
        await only_this_task()
        if not attempt.reached:
            return
    pytest.fail("shutdown suspends more often than expected")
