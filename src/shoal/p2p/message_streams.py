"""Calls in which a side may send any number of messages: asynchronous iterators at both ends of a :class:`Call`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from shoal.errors import P2PDaemonError, ProtocolError, StreamClosedError
from shoal.p2p.connection import Call
from shoal.p2p.wire import Header
from shoal.tasks import cancel_and_wait

if TYPE_CHECKING:
    from shoal.p2p.servicer import Handler, Method, P2PContext


class Messages(AsyncIterator[Header]):
    """What the other side of a call sends, until it ends its side."""

    def __init__(self, call: Call, message_type: type[Header]) -> None:
        self._call, self._type = call, message_type

    async def __anext__(self) -> Header:
        message = await self._call.receive(self._type)
        if message is None:
            raise StopAsyncIteration
        if self._call.payload_size:
            raise ProtocolError("a message with a payload, in a call that has none")
        return message


async def receive_only(call: Call, message_type: type[Header], name: str) -> Header:
    """The one message that the other side sends."""
    message = await call.receive(message_type)
    if message is None or call.payload_size or not call.received_end:
        raise ProtocolError(f"{name} takes exactly one message without a payload")
    return message


async def serve_streams(handler: Handler, call: Call, context: P2PContext) -> None:
    """Serve one call of a method that takes a stream, gives one, or both.

    A stream is given by an asynchronous generator, or by a coroutine that returns an asynchronous iterator.
    """
    method = handler.method
    assert method.request_type is not None
    request: Header | Messages = (
        Messages(call, method.request_type)
        if method.takes_stream
        else await receive_only(call, method.request_type, context.handle_name)
    )
    result: Any = handler.function(request, context)
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        raise P2PDaemonError(f"{context.handle_name} does not answer this peer")
    if not method.gives_stream:
        await call.send(result, end=True)
        return
    async with AsyncExitStack() as stack:
        if hasattr(result, "aclose"):
            await stack.enter_async_context(aclosing(result))  # also if the caller leaves while an item is being sent
        async for response in result:
            await call.send(response)
    await call.send_end()


class Responses(AsyncIterator[Header]):
    """What a method that gives a stream answers; the call begins with the first item that is asked for.

    To close it, or to drop it, ends the call. It may be awaited first, as some programs do; that changes nothing.
    """

    def __init__(
        self, open_call: Callable[[], AbstractAsyncContextManager[Call]], method: Method, requests: Any
    ) -> None:
        self._exchange = _exchange(open_call, method, requests)

    def __await__(self) -> Generator[Any, Any, Responses]:
        yield from ()
        return self

    async def __anext__(self) -> Header:
        return await self._exchange.__anext__()

    async def aclose(self) -> None:
        """End the call."""
        await self._exchange.aclose()

    async def only(self, timeout: float | None) -> Header:
        """The answer of a method that gives one.

        Raises:
            ProtocolError: there is none, or more than one.
            TimeoutError: it does not come within ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout), aclosing(self._exchange):
            answers = [answer async for answer in self._exchange]
        if len(answers) != 1:
            raise ProtocolError(f"expected one answer, got {len(answers)}")
        return answers[0]


async def _exchange(
    open_call: Callable[[], AbstractAsyncContextManager[Call]], method: Method, requests: Any
) -> AsyncGenerator[Header, None]:
    assert method.response_type is not None
    async with open_call() as call:
        if not method.takes_stream:
            await call.send(requests, end=True)
            async for response in Messages(call, method.response_type):
                yield response
            return
        await call.connection.flush()  # the opening of the call: what follows is sent and received by two tasks
        sending = asyncio.ensure_future(_send_all(call, requests))
        try:
            async for response in Messages(call, method.response_type):
                yield response
        except StreamClosedError:
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                raise error from None  # which has ended the call
            raise
        finally:
            await cancel_and_wait(sending)


async def _send_all(call: Call, messages: AsyncIterable[Header]) -> None:
    try:
        async for message in messages:
            await call.send(message)
        await call.send_end()
    except Exception:
        call.connection.abort()  # or the other side would wait for more
        raise
