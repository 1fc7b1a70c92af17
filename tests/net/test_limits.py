"""What strangers and greedy peers may take, what happens to who takes more, and that honest peers do not suffer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median, quantiles
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.averaging.node import AveragerNode
from shoal.dht.authorization import MembersOnly
from shoal.dht.protocol import DHTProtocol
from shoal.errors import DialError, P2PDaemonError, ShoalError, StreamClosedError
from shoal.net.addresses import subscriber_of
from shoal.net.connection import Call, Connection, Open
from shoal.net.limits import HeaderMemory, Limits, RelayLimits, more_files
from shoal.net.service import methods_of
from shoal.net.tcp.listener import WaitingRoom
from shoal.net.tcp.stream import OwnSocket
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import MAX_HEADER_BYTES, READ_STEP_BYTES, Kind, Stream, pack
from shoal.p2p import P2P, Identity, Multiaddr
from shoal.reach.checkup import Checkup
from shoal.testing import Network, run, start_peers
from tests.drills import mostly_drills
from tests.net.test_tcp import Listening
from tests.p2p.peers import KINDS, Empty, Number, Pair, Peers, Service, assert_clean, end_of, serving, stub, until


def resource_limits() -> ModuleType:
    """The module that knows the limits of a process; skips the test where there is none."""
    try:
        import resource
    except ImportError:
        pytest.skip("this system has no such limits")
    return resource


both_kinds = pytest.mark.parametrize("kind", KINDS)


# --- the waiting room -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stranger:
    host: str


def test_the_oldest_of_the_largest_crowd_has_to_leave() -> None:
    room: WaitingRoom[Stranger] = WaitingRoom(4)
    honest, *crowd = Stranger("a"), Stranger("b"), Stranger("b"), Stranger("b")
    for stranger in (honest, *crowd):
        room.enter(stranger)
    assert room.one_too_many() is None
    late = Stranger("c")
    room.enter(late)
    assert room.one_too_many() is crowd[0]
    room.leave(crowd[0])
    room.leave(crowd[0])
    assert room.one_too_many() is None
    assert len(room) == 4
    assert honest in room
    assert crowd[0] not in room
    assert sorted(map(id, room.guests())) == sorted(map(id, (honest, *crowd[1:], late)))


def test_an_empty_room() -> None:
    room: WaitingRoom[Stranger] = WaitingRoom(0)
    assert room.least_welcome() is None
    assert room.one_too_many() is None
    assert len(room) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())), st.integers(0, 5))
def test_a_room_never_holds_more_than_it_may(steps: list[tuple[str, bool]], capacity: int) -> None:
    room: WaitingRoom[Stranger] = WaitingRoom(capacity)
    inside: list[Stranger] = []
    for host, leaves in steps:
        if leaves and inside:
            room.leave(inside.pop())
        else:
            inside.append(Stranger(host))
            room.enter(inside[-1])
            victim = room.one_too_many()
            if victim is not None:
                most = max(sum(each.host == h for each in inside) for h in "abc")
                assert sum(each.host == victim.host for each in inside) == most
                assert next(each for each in inside if each.host == victim.host) is victim
                room.leave(victim)
                inside.remove(victim)
        assert len(room) == len(inside) <= capacity
        assert set(room.guests()) == set(inside)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_counts_as_one_host(address: str, host: str) -> None:
    assert subscriber_of(address) == host


# --- strangers at the door --------------------------------------------------------------------------------------------


async def test_too_many_silent_strangers() -> None:
    async with Listening(Limits(handshakes_in_flight=3)) as listening:
        strangers = [await asyncio.open_connection("127.0.0.1", listening.port) for _ in range(5)]
        await until(lambda: listening.dropped["too many handshakes at once"] == 2)
        for reader, _ in strangers[:2]:
            assert await reader.read() == b"", "the oldest leave"
        dialled = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        assert not dialled.closed
        for _, writer in strangers:
            writer.transport.abort()


async def test_too_many_handshakes_at_once() -> None:
    async with Listening(Limits(handshakes_in_flight=3)) as listening:
        strangers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
            writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
            strangers.append((reader, writer))
        await until(lambda: listening.dropped["too many handshakes at once"] == 2)
        with contextlib.suppress(ConnectionError):
            assert await strangers[0][0].read() == b""
        dialled = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        assert not dialled.closed
        for _, writer in strangers:
            writer.transport.abort()


async def test_too_many_handshakes_of_one_host() -> None:
    """The dialler is told."""
    async with Listening(Limits(handshakes_per_second=0.001, handshake_burst=3)) as listening:
        dialler = TcpTransport(Identity.generate())
        for _ in range(3):
            await dialler.dial(listening.address, listening.peer_id)
        with pytest.raises(DialError, match="takes no new connections from this host for now"):
            await dialler.dial(listening.address, listening.peer_id)
        assert await listening.drop_reason() == "too many handshakes of one host"


async def test_no_sockets_left() -> None:
    """The process has run out of them: strangers go first, and the listener goes on when there are some again."""
    resource = resource_limits()
    async with Listening() as listening:
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        await until(lambda: len(listening.transport.strangers.silent) == 1)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = socket.socket()
        free = spare.fileno()
        client = socket.socket()
        client.setblocking(False)
        spare.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(free, before[0]), before[1]))
        try:
            client.connect_ex(("127.0.0.1", listening.port))
            await until(lambda: listening.dropped["no sockets left"] == 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.transport.abort()
        await until(lambda: len(listening.transport.strangers.silent) == 1)
        client.close()


async def test_no_files_left_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """While unproven connections can give way, the oldest does; otherwise a newcomer is closed at once."""
    async with Listening(Limits(files=2)) as listening:
        proven = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        old, old_writer = await asyncio.open_connection("127.0.0.1", listening.port)
        _, new_writer = await asyncio.open_connection("127.0.0.1", listening.port)
        assert await old.read() == b""
        assert not proven.closed
        new_writer.transport.abort()
        old_writer.transport.abort()
        # It ends with a failed handshake; until then it takes a place, and only the next caller could give way.
        await until(lambda: len(OwnSocket.accepted) == 1)
        second = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        for _ in range(3):
            late, late_writer = await asyncio.open_connection("127.0.0.1", listening.port)
            assert await late.read() == b""
            late_writer.transport.abort()
        assert not second.closed
        assert listening.dropped["no files left"] == 4
    await until(lambda: not OwnSocket.accepted)
    lines = [record.getMessage() for record in caplog.records if record.name == "shoal.net.tcp.listener"]
    assert len(lines) == 1
    assert f"connections of others take 3 of this process. {more_files()}" in lines[0]


async def test_strangers_that_come_at_once_find_no_more_places_than_there_are() -> None:
    """A connection that has given way is still closing when the next one comes. It cannot give way twice."""
    async with Peers("tcp") as peers:
        server = await peers.start(limits=Limits(connections=4))
        held: list[Stream] = []
        [place] = await server.transport.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), held.append)
        callers = [TcpTransport(Identity.generate()) for _ in range(16)]
        await asyncio.gather(*(caller.dial(place, server.peer_id) for caller in callers))
        await until(lambda: len(held) == 16)
        for stream in held[:3]:
            server.server.accept(stream)
        await until(lambda: server.server.idle_count == 3)
        for stream in held[3:]:
            server.server.accept(stream)
        dropped = server.metrics.connections_dropped
        assert dropped["idle while others wanted to connect"] == 3
        assert dropped["too many connections"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("crowd", mostly_drills([2_000, 10_000]))
async def test_thousands_of_strangers_do_not_keep_honest_peers_out(crowd: int) -> None:
    """Some say nothing at all, some begin a handshake and go on byte by byte; all from the host of the honest peers.

    ``pytest -s`` shows how long honest peers wait meanwhile, with strangers and server in one process.
    """
    resource = resource_limits()
    crowd = min(crowd, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1_500)
    strangers: list[socket.socket] = []
    slow: list[socket.socket] = []
    seconds: dict[str, list[float]] = {"call of a newcomer": [], "call on a known connection": []}
    loop = asyncio.get_running_loop()
    async with Peers("tcp") as peers:
        server, friend = await peers.two()
        await serving(server)
        assert (await stub(friend, server).rpc_square(Number(value=3))).value == 9
        target = ("127.0.0.1", int(server.get_addresses(server.peer_id)[0]["tcp"] or 0))

        async def attack() -> None:
            for number in range(crowd):
                stranger = socket.socket()
                strangers.append(stranger)
                stranger.setblocking(False)
                with contextlib.suppress(OSError):
                    await loop.sock_connect(stranger, target)
                    if number % 50 == 0:
                        await loop.sock_sendall(stranger, b"\x16\x03\x01\x02\x00\x01")
                        slow.append(stranger)
                if number % 500 == 0:
                    for each in slow:
                        with contextlib.suppress(OSError):
                            each.send(b"\0")

        async def timed(caller: P2P, kind: str) -> None:
            began = time.perf_counter()
            assert (await stub(caller, server).rpc_square(Number(value=3), timeout=50)).value == 9
            seconds[kind].append(time.perf_counter() - began)

        try:
            attacking = asyncio.ensure_future(attack())
            while not attacking.done():
                newcomer = await P2P.create(client_mode=True)
                newcomer.add_addresses(server.peer_id, server.get_addresses(server.peer_id))
                await timed(newcomer, "call of a newcomer")
                await newcomer.shutdown()
                await timed(friend, "call on a known connection")
                await asyncio.wait([attacking], timeout=0.02)
            await attacking
        finally:
            for stranger in strangers:
                stranger.close()
        for kind, measured in seconds.items():
            figures = f"median {1e3 * median(measured):.1f} ms, p99 {1e3 * quantiles(measured, n=100)[98]:.1f} ms"
            print(f"{crowd} strangers, {len(measured)} times {kind}: {figures}, worst {1e3 * max(measured):.1f} ms")
        assert len(seconds["call of a newcomer"]) >= 3
        dropped = server.metrics.connections_dropped
        assert dropped["too many handshakes at once"] > crowd // 2
        assert server.server.connection_count <= 2
        transport = server.transport
        assert isinstance(transport, TcpTransport)
        await until(lambda: len(transport.strangers.silent) == len(transport.strangers.shaking_hands) == 0)


# --- greedy peers -----------------------------------------------------------------------------------------------------


async def hang(caller: P2P, server: P2P, service: Service, count: int) -> list[asyncio.Task[object]]:
    """Calls that keep their connections."""
    running = service.running
    tasks: list[asyncio.Task[object]] = []
    for number in range(1, count + 1):
        tasks.append(asyncio.ensure_future(stub(caller, server).rpc_hang(Empty())))
        await until(lambda: service.running == running + number)  # noqa: B023
    return tasks


async def cancel(tasks: list[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@both_kinds
async def test_too_many_connections_of_one_peer(kind: str) -> None:
    async with Peers(kind) as peers:
        server, greedy = await peers.two(limits=Limits(connections_per_peer=3))
        service = await serving(server)
        other = await peers.start()
        hanging = await hang(greedy, server, service, 3)
        reason = "too many connections of one peer: the limit is 3"
        with pytest.raises(DialError, match=f"refuses this connection: {reason}"):
            await stub(greedy, server).rpc_square(Number(value=1), timeout=5)
        with pytest.raises(DialError, match=reason):
            await _send_much(greedy, server)
        assert server.metrics.connections_dropped["too many connections of one peer"] == 2
        assert (await stub(other, server).rpc_square(Number(value=2))).value == 4
        assert not any(task.done() for task in hanging)
        await cancel(hanging)
        await until(lambda: len(server.server.connections_of(greedy.peer_id)) == 0)
        assert (await stub(greedy, server).rpc_square(Number(value=2))).value == 4
        assert_clean(greedy, server)


async def _send_much(caller: P2P, server: P2P) -> None:
    async with stub(caller, server).rpc_take() as call:
        await call.send(Number(value=10**7), bytes(10**7))
        await call.receive(Number)


@both_kinds
async def test_too_many_connections_in_total(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Peers(kind) as peers:
        server, first = await peers.two(limits=Limits(connections=2))
        service = await serving(server)
        second, third = await peers.start(), await peers.start()
        assert (await stub(first, server).rpc_square(Number(value=2))).value == 4
        assert (await stub(second, server).rpc_square(Number(value=2))).value == 4
        hanging = await hang(second, server, service, 1)
        hanging += await hang(third, server, service, 1)
        assert server.metrics.connections_dropped == {"idle while others wanted to connect": 1}
        await until(lambda: first.pool.idle_count == 0)
        for _ in range(2):
            with pytest.raises(DialError, match="too many connections: the limit is 2, and all are in use"):
                await stub(first, server).rpc_square(Number(value=2), timeout=5)
        lines = [record.getMessage() for record in caplog.records if record.name == "shoal.net.server"]
        assert [line.partition(":")[0] for line in lines] == [f"no place for a connection of peer {first.peer_id}"]
        assert server.metrics.troubles == {"no place for a connection": 2}
        taken = server.metrics.strangers[str(first.peer_id)]
        assert (taken.connections, taken.dropped) == pytest.approx((3, 3), abs=0.5)
        assert taken.nbytes > 50, "of the call that was over"
        assert server.metrics.strangers[str(second.peer_id)].dropped == 0
        await cancel(hanging)
        await until(lambda: server.server.connection_count < 2)
        assert (await stub(first, server).rpc_square(Number(value=2))).value == 4


@both_kinds
async def test_strangers_leave_places_for_peers_that_are_called_from_here(kind: str) -> None:
    async with Peers(kind) as peers:
        server, friend = await peers.two(limits=Limits(connections=4))
        service, friends_service = await serving(server), Service()
        await friends_service.add_p2p_handlers(friend)
        server.add_addresses(friend.peer_id, friend.get_addresses(friend.peer_id))
        hanging: list[asyncio.Task[object]] = []
        for _ in range(3):
            hanging += await hang(await peers.start(), server, service, 1)
        stranger = await peers.start()
        with pytest.raises(DialError, match="too many connections: the limit is 3, and all are in use"):
            await stub(stranger, server).rpc_square(Number(value=2), timeout=5)
        assert (await stub(server, friend).rpc_square(Number(value=3))).value == 9
        assert (await stub(friend, server).rpc_square(Number(value=2))).value == 4
        await cancel(hanging)


@both_kinds
async def test_who_was_of_use_keeps_its_place(kind: str) -> None:
    """A peer that trains with this one is closed last, and gets one of the places that strangers leave."""
    async with Peers(kind) as peers:
        server, friend = await peers.two(limits=Limits(connections=4))
        service = await serving(server)
        server.behaviour.note_round([friend.peer_id], failed=[], reducers=[], withheld={}, seconds=1.0)
        strangers = [await peers.start() for _ in range(3)]
        for caller in (friend, *strangers):
            assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        await until(lambda: strangers[0].pool.idle_count == 0)
        assert server.server.connections_of(friend.peer_id), "it has been idle for longest"
        hanging: list[asyncio.Task[object]] = []
        for stranger in strangers:
            hanging += await hang(stranger, server, service, 1)
        assert not server.server.connections_of(friend.peer_id)
        with pytest.raises(DialError, match="too many connections: the limit is 3, and all are in use"):
            await stub(await peers.start(), server).rpc_square(Number(value=2), timeout=5)
        assert (await stub(friend, server).rpc_square(Number(value=2))).value == 4
        await cancel(hanging)


def test_connections_of_others_leave_files_to_the_user() -> None:
    resource = resource_limits()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        limits, circuits = Limits().that_fit(), RelayLimits().that_fit().circuits
        assert (limits.files, limits.answered) == (300 - 18, 18)
        others = limits.connections + 2 * limits.handshakes_in_flight + limits.refusals + 2 * circuits
        assert others + limits.answered <= 300
        assert limits.connections > 100
        assert min(limits.handshakes_in_flight, limits.refusals, circuits) > 5
        assert Limits(connections=20).that_fit().connections == 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2**13, soft), hard))
        assert Limits().that_fit() == Limits(files=2**12 - 2**8, answered=2**8)
        assert RelayLimits().that_fit() == RelayLimits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@both_kinds
async def test_more_refusals_than_can_be_told(kind: str) -> None:
    async with Peers(kind) as peers:
        server, greedy = await peers.two(limits=Limits(connections_per_peer=1, refusals=1))
        service = await serving(server)
        hanging = await hang(greedy, server, service, 1)
        told = await greedy.dial(server.peer_id)
        await until(lambda: server.server.refusal_count == 1)
        not_told = await greedy.dial(server.peer_id)
        with pytest.raises(StreamClosedError):
            await not_told.receive()
        with pytest.raises(DialError, match="too many connections"):
            await Call(told).receive(Number)
        told.abort()
        await until(lambda: server.server.refusal_count == 0)
        await cancel(hanging)


async def test_own_connections_to_one_peer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest peer stays within what others grant, and its calls wait for their turn."""
    monkeypatch.setattr("shoal.net.connection_pool.MAX_DIALLED_PER_PEER", 3)
    async with Peers("tcp") as peers:
        server, caller = await peers.two(limits=Limits(connections_per_peer=3))
        service = await serving(server)
        hanging = await hang(caller, server, service, 3)
        waiting = asyncio.ensure_future(stub(caller, server).rpc_square(Number(value=2)))
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        assert caller.pool.waiting_count == 1
        await cancel(hanging[:1])
        assert await waiting == Number(value=4)
        await cancel(hanging)


def test_default_limits_fit_together() -> None:
    from shoal.net.limits import MAX_DIALLED_PER_PEER

    limits = Limits()
    assert MAX_DIALLED_PER_PEER < limits.connections_per_peer < limits.connections
    assert limits.header_bytes_per_peer < limits.header_bytes


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_for_headers() -> None:
    memory = HeaderMemory(Limits(header_bytes_per_peer=100, header_bytes=150))
    first, second = Identity.generate().peer_id, Identity.generate().peer_id
    assert memory.take(first, 100)
    assert not memory.take(first, 1)
    assert not memory.take(second, 51)
    assert memory.take(second, 50)
    memory.give_back(first, 100)
    memory.give_back(second, 50)
    assert memory.total == 0
    assert not memory.by_peer
    assert memory.take(first, 100)


@both_kinds
async def test_large_headers_that_never_arrive(kind: str) -> None:
    """Each takes the memory of what has arrived; when that is too much, the next one is dropped."""
    size = 4 * READ_STEP_BYTES
    begun = pack(Kind.OPEN, Open(handler="x" * size))[: size // 2]
    async with Peers(kind) as peers:
        server, greedy = await peers.two(limits=Limits(header_bytes_per_peer=2 * READ_STEP_BYTES))
        other = await peers.start()
        await serving(server)
        connections = []
        for number in range(1, 3):
            connections.append(await greedy.dial(server.peer_id))
            await connections[-1].stream.write(begun)
            # The first step is everybody's.
            await until(lambda: server.header_memory.total == READ_STEP_BYTES * number)  # noqa: B023
        connections.append(await greedy.dial(server.peer_id))
        await connections[-1].stream.write(begun)
        await until(lambda: server.metrics.connections_dropped["broke the protocol"] == 1)
        assert (await stub(other, server).rpc_square(Number(value=2))).value == 4
        for connection in connections:
            connection.abort()
        await until(lambda: server.header_memory.total == 0)


@both_kinds
async def test_announcements_hold_nobody_up(kind: str) -> None:
    """A crowd announces more than all that others may take, and sends nothing: large calls are answered at once."""
    limits = Limits(header_bytes_per_peer=MAX_HEADER_BYTES, header_bytes=MAX_HEADER_BYTES)
    announcement = pack(Kind.OPEN, Open(handler="x" * (MAX_HEADER_BYTES - 100)))[:20]
    async with Peers(kind) as peers:
        server, honest = await peers.two(limits=limits)
        await serving(server)
        strangers = []
        for _ in range(4):
            crowd = await peers.start()
            for _ in range(4):
                strangers.append(await crowd.dial(server.peer_id))
                await strangers[-1].stream.write(announcement)
        await until(lambda: sum(each.header_since > 0 for each in server.server.connections()) == len(strangers))
        large = Pair(left=1, right=2, labels={"": [bytes(MAX_HEADER_BYTES - 1000)]})
        assert await stub(honest, server).rpc_swap(large) == Pair(left=2, right=1)
        assert server.metrics.connections_dropped == {}
        for each in server.server.connections():
            if each.header_since > 0:
                each.header_since -= limits.seconds_for_header  # as if so much time had passed
        await until(lambda: server.metrics.connections_dropped == {"too slow with a header": len(strangers)})
        assert (await stub(honest, server).rpc_square(Number(value=2))).value == 4


@both_kinds
async def test_memory_grows_with_what_arrives(kind: str) -> None:
    """Announcing a megabyte takes no megabyte."""
    async with Peers(kind) as peers:
        server, greedy = await peers.two()
        await serving(server)
        connection = await greedy.dial(server.peer_id)
        await connection.stream.write(pack(Kind.OPEN, Open(handler="x" * 10**6))[:100_000])
        await until(lambda: server.header_memory.total > 0)
        [task] = server.server.tasks()
        await asyncio.sleep(0.01)
        assert _bytearrays_in(task) < 300_000
        connection.abort()


def _bytearrays_in(task: asyncio.Task[None]) -> int:
    """Bytes held by the coroutines of a task."""
    total, coroutine = 0, task.get_coro()
    while coroutine is not None and hasattr(coroutine, "cr_frame"):
        if coroutine.cr_frame is not None:
            total += sum(len(each) for each in coroutine.cr_frame.f_locals.values() if isinstance(each, bytearray))
        coroutine = coroutine.cr_await
    return total


# --- patience ---------------------------------------------------------------------------------------------------------


@both_kinds
async def test_slow_header(kind: str) -> None:
    async with Peers(kind) as peers:
        server, slow = await peers.two(limits=Limits(seconds_for_header=0.2))
        await serving(server)
        connection = await slow.dial(server.peer_id)
        ended = asyncio.Event()
        connection.stream.on_closed(ended.set)
        message = pack(Kind.OPEN, Open(handler="Service.rpc_square"))
        for byte in message[:-1]:
            if ended.is_set():
                break
            with contextlib.suppress(ShoalError):
                await connection.stream.write(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.03)
        await asyncio.wait_for(ended.wait(), 5)
        assert server.metrics.connections_dropped == {"too slow with a header": 1}


async def _open_silently(caller: P2P, server: P2P, handler: str = "Service.rpc_square") -> Connection:
    """A call that nothing is said about."""
    connection = await caller.dial(server.peer_id)
    connection.open_call(handler)
    await connection.flush()
    return connection


@both_kinds
async def test_calls_about_nothing_yield_their_places(kind: str) -> None:
    """One stranger after another opens all the calls that it may; a newcomer is served at once."""
    async with Peers(kind) as peers:
        server = await peers.start(limits=Limits(connections=8, connections_per_peer=3))
        service = await serving(server)
        busy = await peers.start()
        hanging = await hang(busy, server, service, 1)
        silent = []
        for _ in range(3):
            stranger = await peers.start()
            silent += [await _open_silently(stranger, server) for _ in range(3)]
        await until(lambda: server.metrics.connections_dropped == {"idle while others wanted to connect": 4})
        await until(lambda: server.server.connection_count == 6)
        newcomer = await peers.start()
        assert (await stub(newcomer, server).rpc_square(Number(value=2), timeout=50)).value == 4
        assert not hanging[0].done(), "a call that is being served is not idle"
        await cancel(hanging)
        for connection in silent:
            connection.abort()


@both_kinds
async def test_calls_about_what_does_not_exist_yield_their_places(kind: str) -> None:
    async with Peers(kind) as peers:
        server, stranger = await peers.two(limits=Limits(connections=4))
        service = await serving(server)
        calls = [stub(stranger, server).rpc_wait_in_vain() for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            for number, each in enumerate(calls):
                call = await stack.enter_async_context(each)
                await call.send(Number(value=number))
            await until(lambda: service.running == 3)
            newcomer = await peers.start()
            assert (await stub(newcomer, server).rpc_square(Number(value=2), timeout=50)).value == 4
            await until(lambda: service.running == 2)
        assert server.metrics.connections_dropped == {"idle while others wanted to connect": 1}


@both_kinds
async def test_calls_begin_with_a_message_in_time(kind: str) -> None:
    async with Peers(kind) as peers:
        server, silent = await peers.two(limits=Limits(seconds_for_first_message=0.2))
        service = await serving(server)
        honest = await peers.start()
        hanging = await hang(honest, server, service, 1)
        ended = asyncio.Event()
        for handler in ("Service.rpc_square", "Service.rpc_echo"):
            connection = await _open_silently(silent, server, handler)
            ended.clear()
            connection.stream.on_closed(ended.set)
            for byte in pack(Kind.ITEM, Number(value=3)):
                if ended.is_set():
                    break
                with contextlib.suppress(ShoalError):
                    await connection.stream.write(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.1)
            await asyncio.wait_for(ended.wait(), 50)
        assert server.metrics.connections_dropped == {"silent in a call": 2}
        assert not hanging[0].done(), "it has said what it wants"
        await cancel(hanging)


def test_silence_inside_a_call() -> None:
    """A caller that is waited for must say something within a minute, unless the handler is patient."""

    async def main() -> tuple[dict[str, float], Counter[str]]:
        server, caller = await start_peers(Network(), 2)
        await serving(server)
        caller.add_addresses(server.peer_id, server.get_addresses(server.peer_id))
        lasted: dict[str, float] = {}

        async def hold(method: str, pause: float) -> None:
            began = asyncio.get_running_loop().time()
            async with getattr(stub(caller, server), method)() as call:
                ended = asyncio.Event()
                call.connection.stream.on_closed(ended.set)
                # A payload that never comes to its end.
                await call.connection.stream.write(pack(Kind.OPEN, Open(handler=f"Service.{method}")))
                await call.connection.stream.write(pack(Kind.ITEM, Number(value=1000), 1000))
                while not ended.is_set() and asyncio.get_running_loop().time() < began + 500:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), pause)
                    with contextlib.suppress(StreamClosedError):
                        await call.connection.stream.write(bytes(1))
            lasted[f"{method}, a byte in {pause:.0f} s"] = asyncio.get_running_loop().time() - began

        await asyncio.gather(hold("rpc_take", 30), hold("rpc_take", 1000), hold("rpc_take_patiently", 400))
        return lasted, server.metrics.connections_dropped

    lasted, dropped = run(main())
    assert 60 < lasted.pop("rpc_take, a byte in 1000 s") < 70
    assert list(lasted) == ["rpc_take, a byte in 30 s", "rpc_take_patiently, a byte in 400 s"]
    assert min(lasted.values()) >= 500
    assert dropped == {"silent in a call": 1}


def test_who_waits_long_on_purpose_says_so() -> None:
    """Handlers that take part in a conversation, and limit its pauses themselves."""
    patient = {method.name for method in methods_of(AveragerNode) if method.is_patient}
    conversations = {method.name for method in methods_of(AveragerNode) if method.request_type is None}
    assert patient == conversations
    for servicer in (DHTProtocol, Checkup, MembersOnly):
        assert not any(method.is_patient for method in methods_of(servicer))


@both_kinds
async def test_caller_that_does_not_read(kind: str) -> None:
    async with Peers(kind) as peers:
        server, slow = await peers.two(limits=Limits(seconds_for_write=0.3))
        await serving(server)
        async with stub(slow, server).rpc_echo() as call:
            for value in range(40):
                if call.connection.closed:
                    break
                with contextlib.suppress(ShoalError, TimeoutError):
                    await asyncio.wait_for(call.send(Number(value=value), bytes(2**20)), 5)
            await until(lambda: server.metrics.connections_dropped["does not read"] == 1)
            await until(lambda: server.server.connection_count == 0)


@both_kinds
async def test_idle_connections_of_others(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two(limits=Limits(seconds_idle=0.2))
        service = await serving(server)
        hanging = await hang(caller, server, service, 1)
        assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        await until(lambda: server.metrics.connections_dropped == {"idle for too long": 1})
        await until(lambda: caller.pool.idle_count == 0)
        assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        assert not hanging[0].done(), "a call in progress is not idle"
        await cancel(hanging)


@both_kinds
async def test_own_idle_connections(kind: str) -> None:
    async with Peers(kind) as peers:
        server = await peers.start()
        await serving(server)
        caller = await peers.start(idle_timeout=0.1)
        assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        assert caller.pool.idle_count == 1
        await until(lambda: caller.pool.idle_count == 0)
        await until(lambda: server.server.connection_count == 0)
        assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        assert server.metrics.connections_dropped == {}


@both_kinds
async def test_connection_that_is_accepted_while_shutting_down(kind: str) -> None:
    """Its task may be cancelled before it has begun."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        connection = await caller.dial(server.peer_id)
        await server.shutdown()
        error = await end_of(connection.receive())
        assert isinstance(error, StreamClosedError)
        with pytest.raises(P2PDaemonError):
            await stub(caller, server).rpc_square(Number(value=1))
