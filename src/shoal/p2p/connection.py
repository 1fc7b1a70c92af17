"""A stream that carries calls, one after another: greeting, framing, and the state of the call in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shoal.clock import get_dht_time, timeout
from shoal.errors import P2PDaemonError, P2PHandlerError, ProtocolError, StreamClosedError
from shoal.metrics import Metrics
from shoal.p2p.peer_id import PeerID
from shoal.p2p.transport import Buffer, Stream
from shoal.p2p.wire import Header, Kind, Prefix, decode_header, pack, read_header_bytes, read_prefix, write_message

H = TypeVar("H", bound=Header)

DRAIN_TIMEOUT = 2.0
_DISCARD_BYTES = 2**16


class Hello(Header):
    """What each side tells about itself before its first message."""

    addresses: list[str] = msgspec.field(default_factory=list)
    """Where the sender can be dialled, without ``/p2p``; empty if it cannot."""
    agent: str = ""
    time: float = 0.0
    """The sender's DHT time."""


class Open(Header):
    """Start of a call."""

    handler: str


class Failure(Header):
    """Why a call failed on the other side."""

    code: str = "handler"
    type: str = ""
    text: str = ""


class Nothing(Header):
    """A header without content, for a bare end or a payload that explains itself."""


class Connection:
    """One authenticated stream and who greets whom on it.

    Args:
        stream: the stream; from now on only this object uses it.
        make_hello: makes this side's greeting, sent along with its first message.
        on_hello: called with the other side's greeting.
    """

    def __init__(
        self,
        stream: Stream,
        metrics: Metrics,
        make_hello: Callable[[], Hello],
        on_hello: Callable[[PeerID, Hello], None],
    ) -> None:
        self.stream = stream
        self.metrics = metrics
        self.remote = stream.remote
        self._make_hello: Callable[[], Hello] | None = make_hello
        self._on_hello = on_hello
        self._unsent = b""

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def open_call(self, handler: str) -> Call:
        """Begin a call; the opening message leaves together with the first item."""
        self._unsent += pack(Kind.OPEN, Open(handler=handler))
        return Call(self)

    def _take_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        if self._make_hello is not None:
            unsent, self._make_hello = pack(Kind.HELLO, self._make_hello()) + unsent, None
        return unsent

    async def send(self, kind: Kind, header: Header, *payload: Buffer, end: bool = False) -> None:
        sent = await write_message(self.stream, kind, header, *payload, end=end, before=self._take_unsent())
        self.metrics.bytes_sent += sent

    async def flush(self) -> None:
        """Send what waits for a first item, such as the opening of a call that begins with listening."""
        unsent = self._take_unsent()
        if unsent:
            await self.stream.write(unsent)
            self.metrics.bytes_sent += len(unsent)

    async def receive(self) -> tuple[Prefix, bytearray]:
        """The next message's prefix and header; its payload, if any, is still to be read."""
        while True:
            prefix = await read_prefix(self.stream)
            raw = await read_header_bytes(self.stream, prefix)
            self.metrics.bytes_received += 12 + len(raw) + prefix.payload_bytes
            if prefix.kind is not Kind.HELLO:
                return prefix, raw
            if prefix.payload_bytes:
                raise ProtocolError("a greeting with a payload")
            self._on_hello(self.remote, decode_header(raw, Hello))

    async def receive_open(self) -> str:
        """The handler that the other side wants to call."""
        prefix, raw = await self.receive()
        if prefix.kind is not Kind.OPEN or prefix.payload_bytes:
            raise ProtocolError(f"expected the opening of a call, got {prefix.kind.name}")
        return decode_header(raw, Open).handler

    def close(self) -> None:
        self.stream.on_closed(None)
        self.stream.close()

    def abort(self) -> None:
        self.stream.on_closed(None)
        self.stream.abort()


class Call:
    """One call in progress, seen from either side: messages go both ways until both sides have ended."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.remote = connection.remote
        self.payload_size = 0
        """Bytes of payload that follow the header received last and are still unread."""
        self.sent_end = False
        self.received_end = False

    @property
    def clean(self) -> bool:
        """Both sides have said their last word, so the connection may carry another call."""
        return self.sent_end and self.received_end and not self.payload_size and not self.connection.closed

    async def send(self, header: Header, *payload: Buffer, end: bool = False) -> None:
        """Send one message; waits while the other side is slow to take it.

        Args:
            header: a small typed header.
            payload: raw buffers that follow it, of format ``B``; free for reuse as soon as this returns.
            end: this is the last message of this side.

        Raises:
            StreamClosedError: the connection ended.
        """
        if self.sent_end:
            raise RuntimeError("this side of the call has ended already")
        self.sent_end = end
        await self.connection.send(Kind.ITEM, header, *payload, end=end)

    async def send_end(self) -> None:
        """Say that nothing more will come from this side. Idempotent."""
        if not self.sent_end:
            await self.send(Nothing(), end=True)

    async def send_failure(self, failure: Failure) -> None:
        """End this side by telling why the call failed."""
        if not self.sent_end:
            self.sent_end = True
            await self.connection.send(Kind.ERROR, failure, end=True)

    async def receive(self, header_type: type[H]) -> H | None:
        """The next message's header, or ``None`` when the other side has ended.

        Raises:
            P2PHandlerError: the other side's handler raised.
            P2PDaemonError: the other side has no such handler.
            ProtocolError: not such a message.
            StreamClosedError: the connection ended in the middle.
        """
        if self.received_end:
            return None
        if self.payload_size:
            raise RuntimeError(f"{self.payload_size} bytes of payload are unread: read them before the next message")
        if self.connection._unsent:
            await self.connection.flush()
        prefix, raw = await self.connection.receive()
        self.received_end = prefix.is_end
        self.payload_size = prefix.payload_bytes
        if prefix.kind is Kind.ERROR:
            raise self._as_exception(decode_header(raw, Failure))
        if prefix.kind is not Kind.ITEM:
            raise ProtocolError(f"expected the next message of a call, got {prefix.kind.name}")
        if prefix.is_end and len(raw) == 1 and not prefix.payload_bytes:  # an empty map: a bare end
            return None
        return decode_header(raw, header_type)

    def _as_exception(self, failure: Failure) -> Exception:
        if failure.code == "no handler":
            return P2PDaemonError(f"peer {self.remote} has no handler for this call: {failure.text}")
        return P2PHandlerError(f"peer {self.remote}: {failure.type}: {failure.text}")

    async def read_payload_into(self, buffer: memoryview) -> None:
        """Receive the payload straight into a buffer of exactly its size.

        Raises:
            ProtocolError: the payload has another size.
            StreamClosedError: the connection ended in the middle.
        """
        if len(buffer) != self.payload_size:
            raise ProtocolError(f"peer {self.remote} sent a payload of {self.payload_size} bytes, not {len(buffer)}")
        self.payload_size = 0
        if len(buffer):
            await self.connection.stream.read_exactly_into(buffer)

    async def read_payload(self, max_bytes: int) -> bytearray:
        """Receive the payload into new memory.

        Raises:
            ProtocolError: it is larger than ``max_bytes``.
        """
        if self.payload_size > max_bytes:
            raise ProtocolError(f"peer {self.remote} sent a payload of {self.payload_size} bytes, over {max_bytes}")
        buffer = bytearray(self.payload_size)
        await self.read_payload_into(memoryview(buffer))
        return buffer

    async def drain(self) -> None:
        """Discard what the other side still sends, for a short while, so that it can read why the call failed."""
        scratch = memoryview(bytearray(_DISCARD_BYTES))
        try:
            async with timeout(DRAIN_TIMEOUT):
                while self.payload_size or not self.received_end:
                    if not self.payload_size:
                        prefix, _ = await self.connection.receive()
                        self.received_end, self.payload_size = prefix.is_end, prefix.payload_bytes
                    piece = min(len(scratch), self.payload_size)
                    await self.connection.stream.read_exactly_into(scratch[:piece])
                    self.payload_size -= piece
        except (asyncio.TimeoutError, TimeoutError, StreamClosedError):
            return


def make_hello(addresses: list[Any], agent: str) -> Hello:
    """This side's greeting."""
    return Hello(addresses=[str(address) for address in addresses], agent=agent, time=get_dht_time())
