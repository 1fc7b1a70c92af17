"""Methods that take or give any number of messages, as asynchronous iterators."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from shoal.errors import P2PHandlerError, ProtocolError
from shoal.p2p import P2P, Header, P2PContext, ServicerBase
from tests.p2p.peers import KINDS, Empty, Number, Peers, Text, assert_clean, until

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Streams(ServicerBase):
    """Handlers of every shape."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def rpc_powers(self, request: Number, context: P2PContext) -> AsyncIterator[Number]:
        try:
            for exponent in range(5):
                yield Number(value=request.value**exponent)
        finally:
            self.ended.append("powers")

    async def rpc_powers_of_old(self, request: Number, context: P2PContext) -> AsyncIterator[Number]:
        """Returns an iterator instead of being one."""
        return Streams.rpc_powers(self, request, context)

    async def rpc_sum(self, stream: AsyncIterator[Number], context: P2PContext) -> Number:
        return Number(value=sum([number.value async for number in stream]))

    async def rpc_squares(self, stream: AsyncIterator[Number], context: P2PContext) -> AsyncIterator[Number]:
        try:
            async for number in stream:
                if number.value == 13:
                    raise RuntimeError("boom")
                yield Number(value=number.value**2)
        finally:
            self.ended.append("squares")

    async def rpc_first(self, stream: AsyncIterator[Number], context: P2PContext) -> Number:
        """Does not read on."""
        return await stream.__anext__()

    async def rpc_no_end(self, request: Empty, context: P2PContext) -> AsyncIterator[Number]:
        try:
            value = 0
            while True:
                yield Number(value=value)
                value += 1
                await asyncio.sleep(0)  # it would fill the buffers of the system before anything else has its turn
        finally:
            self.ended.append("no end")

    async def rpc_hang(self, request: Empty, context: P2PContext) -> AsyncIterator[Number]:
        try:
            yield Number(value=1)
            await asyncio.Event().wait()
        finally:
            self.ended.append("hang")


async def numbers(*values: int) -> AsyncIterator[Number]:
    for value in values:
        yield Number(value=value)


async def serve(peers: Peers) -> tuple[P2P, P2P, Streams]:
    server, caller = await peers.two()
    service = Streams()
    await service.add_p2p_handlers(server)
    return server, caller, service


@pytest.mark.parametrize("method", ["rpc_powers", "rpc_powers_of_old"])
async def test_a_stream_of_answers(kind: str, method: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)
        call = getattr(Streams.get_stub(caller, server.peer_id), method)
        assert [answer.value async for answer in call(Number(value=3))] == [1, 3, 9, 27, 81]
        assert [answer.value async for answer in await call(Number(value=2))] == [1, 2, 4, 8, 16]
        await until(lambda: caller.pool.in_use_count == 0)
        assert caller.pool.idle_count == 1, "the connection is used again"
        assert caller.metrics.calls_failed == 0
        assert_clean(server, caller)


async def test_a_stream_of_requests(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)
        stub = Streams.get_stub(caller, server.peer_id)
        assert await stub.rpc_sum(numbers(1, 2, 3)) == Number(value=6)
        assert await stub.rpc_sum(numbers(), timeout=10) == Number(value=0)
        assert_clean(server, caller)


async def test_each_answer_may_come_before_the_next_request(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)
        answered: asyncio.Queue[int] = asyncio.Queue()

        async def requests() -> AsyncIterator[Number]:
            value = 2
            while value < 300:
                yield Number(value=value)
                value = await answered.get()

        found = []
        async for answer in Streams.get_stub(caller, server.peer_id).rpc_squares(requests()):
            found.append(answer.value)
            answered.put_nowait(answer.value)
        assert found == [4, 16, 256, 65536]
        assert_clean(server, caller)


async def test_a_handler_fails_in_the_middle(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, service = await serve(peers)
        answers = Streams.get_stub(caller, server.peer_id).rpc_squares(numbers(1, 2, 13, 4))
        assert [(await answers.__anext__()).value, (await answers.__anext__()).value] == [1, 4]
        with pytest.raises(P2PHandlerError, match="boom"):
            await answers.__anext__()
        await until(lambda: service.ended == ["squares"])
        assert await Streams.get_stub(caller, server.peer_id).rpc_sum(numbers(5)) == Number(value=5)


async def test_requests_fail_in_the_middle(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, service = await serve(peers)

        async def requests() -> AsyncIterator[Number]:
            yield Number(value=1)
            raise ValueError("no more of them")

        stub = Streams.get_stub(caller, server.peer_id)
        with pytest.raises(ValueError, match="no more of them"):
            [answer async for answer in stub.rpc_squares(requests())]
        with pytest.raises(ValueError, match="no more of them"):
            await stub.rpc_sum(requests())
        await until(lambda: service.ended == ["squares"])
        assert_clean(server, caller)


async def test_an_answer_before_all_requests_are_read(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)
        assert await Streams.get_stub(caller, server.peer_id).rpc_first(numbers(7, 8, 9)) == Number(value=7)


@pytest.mark.parametrize("method", ["rpc_no_end", "rpc_hang"])
@pytest.mark.parametrize("way", ["close", "drop"])
async def test_who_has_heard_enough_ends_the_handler(kind: str, method: str, way: str) -> None:
    async with Peers(kind) as peers:
        server, caller, service = await serve(peers)
        answers = getattr(Streams.get_stub(caller, server.peer_id), method)(Empty())
        await answers.__anext__()
        if way == "close":
            await answers.aclose()
        del answers
        gc.collect()
        await until(lambda: service.ended == [method.removeprefix("rpc_").replace("_", " ")])
        await until(lambda: caller.pool.in_use_count == 0)


async def test_a_time_limit(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)

        async def requests() -> AsyncIterator[Number]:
            await asyncio.Event().wait()
            yield Number(value=1)

        with pytest.raises(TimeoutError):
            await Streams.get_stub(caller, server.peer_id).rpc_sum(requests(), timeout=0.05)
        await until(lambda: caller.pool.in_use_count == 0)


async def test_what_is_no_message_is_refused(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)
        for payload, message in ((b"payload", Number(value=1)), (b"", Text(text="no number"))):
            async with caller.open_call(server.peer_id, "Streams.rpc_sum") as call:
                await call.send(message, payload, end=True)
                with pytest.raises(P2PHandlerError, match="ProtocolError"):
                    await call.receive(Number)


async def test_one_answer_is_one(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller, _ = await serve(peers)

        class Other(ServicerBase):
            async def rpc_sum(self, stream: AsyncIterator[Number], context: P2PContext) -> AsyncIterator[Number]:
                yield Number(value=1)
                yield Number(value=2)

        Other.__name__ = "Streams"
        await Streams().remove_p2p_handlers(server)
        await Other().add_p2p_handlers(server)
        with pytest.raises(ProtocolError, match="expected one answer, got 2"):
            await Streams.get_stub(caller, server.peer_id).rpc_sum(numbers(1))


async def test_how_to_write_one_is_said(kind: str) -> None:
    class Bare(ServicerBase):
        async def rpc_bare(self, stream, context: P2PContext) -> AsyncIterator[Header]:  # type: ignore[no-untyped-def]
            yield Empty()

    with pytest.raises(TypeError, match=r"Bare.rpc_bare must be .* with AsyncIterator\[Header\] for the request"):
        await Bare().add_p2p_handlers(None)  # type: ignore[arg-type]
