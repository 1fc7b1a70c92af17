"""Calls between two peers, over real sockets and in memory: shapes, errors, cancellation, payloads, names."""

from __future__ import annotations

import asyncio
import gc
import logging
import os

import pytest

from shoal.base.tasks import all_of
from shoal.errors import DialError, P2PDaemonError, P2PHandlerError, ProtocolError, StreamClosedError
from shoal.net.connection import Connection
from shoal.p2p import P2P, Call, Header, Identity, P2PContext, PeerID, ServicerBase
from tests.p2p.peers import (
    KINDS,
    PATIENCE,
    Empty,
    Number,
    Pair,
    Peers,
    Service,
    Text,
    assert_clean,
    end_of,
    serving,
    stub,
    until,
)

pytestmark = [pytest.mark.oldest, pytest.mark.parametrize("kind", KINDS)]


# --- unary ------------------------------------------------------------------------------------------------------------


async def test_unary(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        assert await stub(caller, server).rpc_square(Number(value=12)) == Number(value=144)
        assert service.contexts == [
            P2PContext(handle_name="Service.rpc_square", local_id=server.peer_id, remote_id=caller.peer_id)
        ]
        assert (caller.metrics.calls_made, caller.metrics.calls_failed, server.metrics.calls_served) == (1, 0, 1)
        assert caller.metrics.bytes_sent == server.metrics.bytes_received > 0
        assert caller.metrics.bytes_received == server.metrics.bytes_sent > 0
        assert_clean(server, caller)


async def test_messages_without_fields_are_messages(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        assert await stub(caller, server).rpc_nothing(Empty()) == Empty()


async def test_one_connection_serves_call_after_call(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        for value in range(50):
            assert (await stub(caller, server).rpc_square(Number(value=value))).value == value**2
        assert server.server.connection_count == 1
        assert caller.pool.idle_count == 1


async def test_connections_are_ready_before_they_are_needed(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        await caller.prepare(server.peer_id, 3)
        await asyncio.gather(*[caller.prepare(server.peer_id, 3) for _ in range(3)])
        assert caller.pool.idle_count == 3
        calls = [stub(caller, server).rpc_square(Number(value=value)) for value in range(3)]
        assert [answer.value for answer in await asyncio.gather(*calls)] == [0, 1, 4]
        assert caller.pool.idle_count == 3
        with pytest.raises(DialError):
            await caller.prepare(Identity.generate().peer_id, 1)
        assert_clean(server, caller)


async def test_calls_in_parallel(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        calls = [stub(caller, server).rpc_square(Number(value=value)) for value in range(300)]
        assert [answer.value for answer in await asyncio.gather(*calls)] == [value**2 for value in range(300)]
        await until(lambda: not caller.pool.dialling_count)  # calls may end before the dials that were made for them
        assert_clean(server, caller)


async def test_both_sides_call_each_other(kind: str) -> None:
    async with Peers(kind) as peers:
        first, second = await peers.two()
        await serving(first)
        await serving(second)
        await stub(second, first).rpc_square(Number(value=1))  # its greeting tells where to call back
        assert first.get_addresses(second.peer_id) == second.get_addresses(second.peer_id)
        assert (await stub(first, second).rpc_square(Number(value=5))).value == 25


async def test_a_client_is_not_callable(kind: str) -> None:
    async with Peers(kind) as peers:
        server = await peers.start()
        await serving(server)
        client = await peers.start(client_mode=True)
        assert client.client_mode
        assert await client.get_visible_maddrs() == []
        assert (await stub(client, server).rpc_square(Number(value=5))).value == 25
        with pytest.raises(DialError, match="client mode"):
            await stub(server, client).rpc_square(Number(value=1))


async def test_calling_oneself(kind: str) -> None:
    async with Peers(kind) as peers:
        peer = await peers.start()
        await serving(peer)
        with pytest.raises(P2PDaemonError, match="cannot call itself"):
            await stub(peer, peer).rpc_square(Number(value=1))


async def test_calling_a_stranger(kind: str) -> None:
    async with Peers(kind) as peers:
        caller = await peers.start()
        stranger = Identity.generate().peer_id
        with pytest.raises(P2PDaemonError, match=f"no address of peer {stranger} is known"):
            await Service.get_stub(caller, stranger).rpc_square(Number(value=1))
        assert_clean(caller)


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_stream_from_the_server(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        async with stub(caller, server).rpc_count() as call:
            await call.send(Number(value=100), end=True)
            values = []
            while (number := await call.receive(Number)) is not None:
                values.append(number.value)
            assert await call.receive(Number) is None, "an end stays an end"
        assert values == list(range(100))
        assert caller.pool.idle_count == 1


async def test_stream_to_the_server(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        async with stub(caller, server).rpc_add() as call:
            for value in range(100):
                await call.send(Number(value=value))
            await call.send_end()
            await call.send_end()
            assert await call.receive(Number) == Number(value=4950)
            assert await call.receive(Number) is None
        assert caller.pool.idle_count == 1


async def test_messages_back_and_forth_at_the_same_time(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        payloads = [os.urandom(size) for size in (0, 1, 100_000, 7, 3_000_000)]
        async with stub(caller, server).rpc_echo() as call:

            async def send() -> None:
                for index, payload in enumerate(payloads):
                    await call.send(Number(value=index), payload)
                await call.send_end()

            sending = asyncio.ensure_future(send())
            for index, payload in enumerate(payloads):
                assert await call.receive(Number) == Number(value=index)
                assert await call.read_payload(2**24) == payload
            assert await call.receive(Number) is None
            await sending
        assert_clean(server, caller)


async def test_messages_that_leave_with_the_next_one(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        async with stub(caller, server).rpc_echo() as call:
            await call.send(Number(value=0))
            assert await call.receive(Number) == Number(value=0)
            sent = caller.metrics.bytes_sent
            call.put(Number(value=1))
            call.put(Number(value=2))
            await asyncio.sleep(0)
            assert caller.metrics.bytes_sent == sent, "they wait for another one"
            await call.send(Number(value=3), b"payload")
            for value in range(1, 3):
                assert await call.receive(Number) == Number(value=value)
            assert await call.receive(Number) == Number(value=3)
            assert await call.read_payload(7) == b"payload"
            call.put(Number(value=4))
            assert await call.receive(Number) == Number(value=4), "they do not wait while this side listens"
            await call.send_end()
            with pytest.raises(RuntimeError, match="ended already"):
                call.put(Number(value=5))
        assert_clean(server, caller)


async def test_a_call_that_begins_with_listening(kind: str) -> None:
    class Talker(ServicerBase):
        async def rpc_talk(self, call: Call, context: P2PContext) -> None:
            await call.send(Text(text="hello"), end=True)

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Talker().add_p2p_handlers(server)
        async with Talker.get_stub(caller, server.peer_id).rpc_talk() as call:
            assert await call.receive(Text) == Text(text="hello")
            await call.send_end()
        assert caller.pool.idle_count == 1


async def test_handler_that_reads_nothing(kind: str) -> None:
    """It may end early; what is still sent to it is discarded, and the connection serves the next call."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        async with stub(caller, server).rpc_ignore() as call:
            for value in range(20):
                await call.send(Number(value=value), bytes(100_000))
            await call.send_end()
            assert await call.receive(Number) is None
        assert caller.pool.idle_count == 1
        assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        assert server.server.connection_count == 1


async def test_misuse_of_a_call(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        async with stub(caller, server).rpc_echo() as call:
            await call.send(Number(value=1), b"payload")
            await call.receive(Number)
            with pytest.raises(RuntimeError, match="7 bytes of payload are unread"):
                await call.receive(Number)
            with pytest.raises(ProtocolError, match="7 bytes, over 6"):
                await call.read_payload(6)
            with pytest.raises(ProtocolError, match="7 bytes, not 8"):
                await call.read_payload_into(memoryview(bytearray(8)))
            assert await call.read_payload(7) == b"payload"
            await call.send_end()
            with pytest.raises(RuntimeError, match="ended already"):
                await call.send(Number(value=1))


# --- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [5, pytest.param(40, marks=pytest.mark.slow)])
async def test_large_payload_straight_into_a_buffer(kind: str, megabytes: int) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        payload = os.urandom(megabytes * 1_000_000)
        async with stub(caller, server).rpc_take() as call:
            await call.send(Number(value=len(payload)), payload, end=True)
            assert await call.receive(Number) == Number(value=sum(payload))
            assert await call.receive(Number) is None
        assert service.received == payload
        assert caller.pool.idle_count == 1


async def test_payload_of_several_buffers(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        buffers = [b"", b"a", bytearray(600_000), memoryview(b"bc" * 200_000)[1:], b""]
        async with stub(caller, server).rpc_take() as call:
            await call.send(Number(value=sum(map(len, buffers))), *buffers, end=True)
            await call.receive(Number)
        assert service.received == b"".join(buffers)


async def test_buffers_may_be_changed_once_they_are_sent(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        buffer = bytearray(b"x" * 1_000_000)
        async with stub(caller, server).rpc_take() as call:
            await call.send(Number(value=len(buffer)), buffer, end=True)
            buffer[:] = b"y" * len(buffer)
            await call.receive(Number)
        assert service.received == b"x" * 1_000_000


async def test_a_slow_reader_holds_up_the_writer(kind: str) -> None:
    """Memory for what nobody reads stays small; the writer goes on when the reader does."""
    go_on = asyncio.Event()

    class Slow(ServicerBase):
        async def rpc_take(self, call: Call, context: P2PContext) -> None:
            await go_on.wait()
            while await call.receive(Number) is not None:
                await call.read_payload(2**20)
            await call.send_end()

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Slow().add_p2p_handlers(server)
        sent = 0
        async with Slow.get_stub(caller, server.peer_id).rpc_take() as call:

            async def send() -> None:
                nonlocal sent
                for _ in range(64):
                    await call.send(Number(value=0), bytes(2**20))
                    sent += 1
                await call.send_end()

            sending = asyncio.ensure_future(send())
            before = -1
            while sent != before:  # until nothing goes any more
                before = sent
                await asyncio.wait([sending], timeout=0.2)
            assert not sending.done()
            assert sent < 32
            go_on.set()
            await sending
            assert await call.receive(Number) is None


async def test_oversized_messages_are_refused_before_they_leave(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        with pytest.raises(ValueError, match="send it in parts"):
            await stub(caller, server).rpc_fail(Text(text="x" * 2**20))
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9
        assert_clean(server, caller)


async def test_oversized_answer(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    class Verbose(ServicerBase):
        async def rpc_talk(self, request: Empty, context: P2PContext) -> Text:
            return Text(text="x" * 2**20)

    caplog.set_level(logging.CRITICAL, "shoal.net.server")
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Verbose().add_p2p_handlers(server)
        with pytest.raises(P2PHandlerError, match="send it in parts"):
            await Verbose.get_stub(caller, server.peer_id).rpc_talk(Empty(), timeout=PATIENCE)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The warning that a handler failed is expected."""
    caplog.set_level(logging.ERROR, "shoal.net.server")
    return caplog


@pytest.mark.usefixtures("quiet")
async def test_error_of_a_handler_reaches_the_caller(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        with pytest.raises(P2PHandlerError, match="RuntimeError: boom") as error:
            await stub(caller, server).rpc_fail(Text(text="boom"))
        assert str(server.peer_id) in str(error.value)
        assert "Traceback" not in str(error.value)
        assert "peers.py" not in str(error.value)
        assert caller.metrics.calls_failed == 1
        assert caller.pool.idle_count == 1, "the connection is as good as before"
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9


async def test_error_of_a_handler_is_logged_where_it_happened(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        with pytest.raises(P2PHandlerError):
            await stub(caller, server).rpc_fail(Text(text="boom"))
        assert any("boom" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("text", ["", "x" * 100_000, "\udc80 is half a character", "line\nline", "\x1b[31mred"])
async def test_odd_texts_of_errors(kind: str, text: str) -> None:
    class Odd(ServicerBase):
        async def rpc_fail(self, request: Empty, context: P2PContext) -> Empty:
            raise RuntimeError(text)

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Odd().add_p2p_handlers(server)
        with pytest.raises(P2PHandlerError, match="RuntimeError") as error:
            await Odd.get_stub(caller, server.peer_id).rpc_fail(Empty(), timeout=PATIENCE)
        assert len(str(error.value)) < 3000
        assert str(error.value).isprintable(), "it ends up in a log, where it must not look like a line of its own"


@pytest.mark.usefixtures("quiet")
async def test_error_in_the_middle_of_a_stream(kind: str) -> None:
    """What came before the error is received first; the server goes on serving."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        values = []

        async def read_all() -> None:
            async with stub(caller, server).rpc_fail_after() as call:
                await call.send(Number(value=500), end=True)
                while (number := await call.receive(Number)) is not None:
                    values.append(number.value)

        with pytest.raises(P2PHandlerError, match="boom"):
            await read_all()
        assert values == list(range(500))
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9


@pytest.mark.usefixtures("quiet")
async def test_error_while_the_caller_still_sends(kind: str) -> None:
    """The caller reads why, although it had much more to say."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)

        async def send_much() -> None:
            async with stub(caller, server).rpc_fail_after() as call:
                await call.send(Number(value=0))
                for value in range(30):
                    await call.send(Number(value=value), bytes(2**20))
                await call.receive(Number)

        with pytest.raises(P2PHandlerError, match="boom"):
            await send_much()


async def test_missing_handler(kind: str) -> None:
    class Unknown(Service):
        pass

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        missing = Unknown.get_stub(caller, server.peer_id)
        with pytest.raises(P2PDaemonError, match=r"has no handler .*Unknown\.rpc_square") as error:
            await missing.rpc_square(Number(value=1))
        assert not isinstance(error.value, (DialError, StreamClosedError)), "the peer is there"
        with pytest.raises(P2PDaemonError, match="has no handler"):
            async with missing.rpc_echo() as call:
                await call.receive(Number)
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9


async def test_removed_handlers(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        hanging = asyncio.ensure_future(stub(caller, server).rpc_hang(Empty()))
        await service.entered.wait()
        await service.remove_p2p_handlers(server)
        with pytest.raises(P2PDaemonError, match="has no handler"):
            await stub(caller, server).rpc_square(Number(value=1))
        assert not hanging.done(), "calls in progress go on"
        hanging.cancel()
        await end_of(hanging)
        await service.add_p2p_handlers(server)
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9


async def test_duplicate_handlers(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        with pytest.raises(P2PDaemonError, match=r"Service\.rpc_\w+ is registered already"):
            await serving(server)
        await serving(server, namespace="other")
        for namespace in (None, "other"):
            answer = await Service.get_stub(caller, server.peer_id, namespace=namespace).rpc_square(Number(value=2))
            assert answer.value == 4
        with pytest.raises(P2PDaemonError, match=r"third::Service\.rpc_square"):
            await Service.get_stub(caller, server.peer_id, namespace="third").rpc_square(Number(value=2))


async def test_wrapper_stands_in_for_the_servicer(kind: str) -> None:
    class Guard:
        def __init__(self, service: Service) -> None:
            self._service = service

        def __getattr__(self, name: str) -> object:
            return getattr(self._service, name)

        async def rpc_square(self, request: Number, context: P2PContext) -> Number:
            if request.value < 0:
                raise P2PDaemonError("not allowed")
            return await self._service.rpc_square(request, context)

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = Service()
        await service.add_p2p_handlers(server, Guard(service))
        assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4
        with pytest.raises(P2PHandlerError, match="not allowed"):
            await stub(caller, server).rpc_square(Number(value=-2))


async def test_request_of_another_type(kind: str) -> None:
    """A newer or hostile peer: the handler does not even run, and the connection is dropped and counted."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        with pytest.raises(P2PHandlerError, match="invalid Number"):
            await caller.call(server.peer_id, "Service.rpc_square", Text(text="two"), Number)
        assert service.contexts == []
        await until(lambda: server.metrics.connections_dropped["broke the protocol"] == 1)
        assert server.server.connection_count == 0
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9


async def test_answer_of_another_type(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        with pytest.raises(ProtocolError, match="invalid Pair"):
            await caller.call(server.peer_id, "Service.rpc_square", Number(value=2), Pair, timeout=PATIENCE)
        assert caller.metrics.connections_dropped["broke the protocol"] == 1
        assert_clean(caller)


async def test_unknown_fields_are_ignored(kind: str) -> None:
    class Newer(Header):
        value: int
        precision: str = "high"

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        answer = await caller.call(server.peer_id, "Service.rpc_square", Newer(value=4), Newer)
        assert answer == Newer(value=16)


async def test_unary_handler_refuses_payloads_and_second_messages(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)

        async def attempt(*messages: tuple[Number, bytes, bool]) -> None:
            async with caller.open_call(server.peer_id, "Service.rpc_square") as call:
                for header, payload, end in messages:
                    await call.send(header, payload, end=end)
                if not messages:
                    await call.send_end()
                await call.receive(Number)

        for messages in ([(Number(value=1), b"payload", True)], [(Number(value=1), b"", False)], []):
            with pytest.raises(P2PHandlerError, match="exactly one message without a payload"):
                await attempt(*messages)
        assert server.metrics.connections_dropped["broke the protocol"] == 3


# --- time limits and cancellation -------------------------------------------------------------------------------------


async def test_time_limit_of_a_call(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        limit = 0.05
        while not service.entered.is_set():  # on a busy machine the first limits may be over before it is called
            with pytest.raises(TimeoutError):
                await stub(caller, server).rpc_hang(Empty(), timeout=limit)
            limit *= 2
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE)
        assert service.running == 0
        assert_clean(caller)


@pytest.mark.parametrize("shape", ["unary", "stream"])
async def test_cancelling_a_call_cancels_its_handler(kind: str, shape: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)

        async def hang() -> None:
            if shape == "unary":
                await stub(caller, server).rpc_hang(Empty())
            else:
                async with stub(caller, server).rpc_hang_stream() as call:
                    await call.receive(Number)

        calling = asyncio.ensure_future(hang())
        await service.entered.wait()
        calling.cancel()
        assert isinstance(await end_of(calling), asyncio.CancelledError)
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE)
        await until(lambda: server.server.connection_count == 0)
        assert_clean(server, caller)


async def test_leaving_the_block_cancels_the_handler(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        async with stub(caller, server).rpc_hang_stream() as call:
            await call.send(Number(value=1))
            await service.entered.wait()
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE)


async def test_shutdown_of_the_server_ends_calls(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        calling = asyncio.ensure_future(stub(caller, server).rpc_hang(Empty()))
        await service.entered.wait()
        await server.shutdown()
        assert isinstance(await end_of(calling), StreamClosedError)
        assert service.running == 0
        with pytest.raises(DialError, match="refused"):
            await stub(caller, server).rpc_square(Number(value=1))


async def test_shutdown_of_the_caller_ends_calls(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        calling = asyncio.ensure_future(stub(caller, server).rpc_hang(Empty()))
        await service.entered.wait()
        await caller.shutdown()
        await caller.shutdown()
        assert isinstance(await end_of(calling), StreamClosedError)
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE)
        with pytest.raises(P2PDaemonError, match="shut down"):
            await stub(caller, server).rpc_square(Number(value=1))


async def test_nothing_follows_half_a_message(kind: str) -> None:
    """A caller that stops in the middle of a payload cannot go on as if nothing had been."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        async with stub(caller, server).rpc_hang_stream() as call:
            sending = asyncio.ensure_future(call.send(Number(value=1), bytes(50_000_000)))
            await service.entered.wait()
            assert not sending.done()
            sending.cancel()
            assert isinstance(await end_of(sending), asyncio.CancelledError)
            with pytest.raises(StreamClosedError):
                await call.send_end()
        await asyncio.wait_for(service.cancelled.wait(), PATIENCE)


async def test_a_bulk_transfer_does_not_hold_up_small_calls(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        async with stub(caller, server).rpc_hang_stream() as call:
            stuck = asyncio.ensure_future(call.send(Number(value=1), bytes(50_000_000)))
            await service.entered.wait()
            assert (await stub(caller, server).rpc_square(Number(value=3), timeout=PATIENCE)).value == 9
            assert not stuck.done()
            stuck.cancel()
            await end_of(stuck)


@pytest.mark.parametrize("where", ["reading", "reading and writing"])
async def test_the_time_limit_of_a_handler_is_no_broken_connection(kind: str, where: str) -> None:
    ends = asyncio.get_running_loop().create_future()

    class Impatient(ServicerBase):
        async def rpc_take(self, call: Call, context: P2PContext) -> None:
            try:
                if where == "reading":
                    await self.read(call)
                else:
                    await all_of(self.read(call), call.send(Number(value=1), bytes(50_000_000)))
            except BaseException as e:
                ends.set_result(e)
                raise

        async def read(self, call: Call) -> None:
            await call.receive(Empty)
            async with asyncio.timeout(0.01):
                await call.receive(Empty)

    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Impatient().add_p2p_handlers(server)
        async with Impatient.get_stub(caller, server.peer_id).rpc_take() as call:
            await call.send(Empty())
            assert isinstance(await asyncio.wait_for(ends, PATIENCE), TimeoutError)


# --- what a method looks like -----------------------------------------------------------------------------------------


async def test_malformed_servicers(kind: str) -> None:
    class NoHints(ServicerBase):
        async def rpc_x(self, request, context):
            return request

    class ForeignTypes(ServicerBase):
        async def rpc_x(self, request: int, context: P2PContext) -> int:
            return request

    class NoAnswer(ServicerBase):
        async def rpc_x(self, request: Number, context: P2PContext) -> None:
            return None

    async with Peers(kind) as peers:
        peer = await peers.start()
        for servicer in (NoHints, ForeignTypes, NoAnswer):
            with pytest.raises(TypeError, match=rf"{servicer.__name__}\.rpc_x must be"):
                await servicer().add_p2p_handlers(peer)
        with pytest.raises(AttributeError, match="no remote method rpc_missing"):
            _ = Service.get_stub(peer, PeerID(b"x")).rpc_missing


@pytest.mark.slow
async def test_nothing_refers_to_ended_calls(kind: str) -> None:
    """Connections and calls go with their last reference: a long life must not fill the memory."""
    before = _count_alive(Call, Connection)  # what earlier tests have left, such as in the exceptions they keep
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        for _ in range(3):
            async with caller.open_call(server.peer_id, "Service.rpc_echo") as call:
                await call.send(Number(value=1))
        del call
        await until(lambda: _count_alive(Call, Connection) <= before)


def _count_alive(*types: type) -> int:
    gc.collect()
    return sum(type(each) in types for each in gc.get_objects())


async def test_peer_in_use_is_found_by_its_own_id_only(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        assert isinstance(server, P2P)
        with pytest.raises(ValueError, match="not an address of peer"):
            caller.add_addresses(caller.peer_id, [f"/ip4/127.0.0.1/tcp/1/p2p/{server.peer_id}"])
