"""A stream that carries calls, one after another: greeting, framing, and the state of the call in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.base.logs import one_line
from shoal.errors import (
    DialError,
    NotAMemberError,
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
    StreamClosedError,
)
from shoal.metrics import Metrics
from shoal.net.limits import HeaderMemory
from shoal.net.transport import (
    MOST,
    PREFIX_BYTES,
    READ_STEP_BYTES,
    Amount,
    Buffer,
    Count,
    H,
    Header,
    Kind,
    Moment,
    Prefix,
    Stream,
    decode_header,
    pack,
    parse_prefix,
    pieces_of,
    read_new,
)
from shoal.peers.identity import Name

# Seconds that a side that has finished waits for the other side to end. Chosen.
DRAIN_TIMEOUT = 10.0

_ALIVE = pack(Kind.ALIVE, None)


class Hello(Header):
    """What each side tells about itself before its first message."""

    addresses: list[str] = msgspec.field(default_factory=list)
    """Where the sender can be dialled, without ``/p2p``; empty if it cannot."""
    agent: str = ""
    time: Moment = 0.0
    """The sender's DHT time."""
    clock_offset: Annotated[float, Meta(ge=-float(MOST), le=float(MOST))] = 0.0
    """Seconds by which the clock of the sender's machine is ahead of ``time``."""
    waited: Amount | None = None
    """Seconds between the arrival of the other side's greeting and this one, if this is an answer."""
    revocations: Count = 0
    """The serial number of the newest list of revoked keys that the sender knows; 0 if it knows none."""
    reach: Annotated[int, Meta(ge=0, le=255)] = 0
    """How others call the sender: see :class:`~shoal.reach.reachability.Reach`."""
    instance: bytes = b""
    """Random, chosen when the sender starts: tells two processes with the same identity apart."""
    relay: bool = False
    """The sender grants reservations to peers that cannot be called otherwise."""
    name: Name = ""
    """The sender's name, for people to read; empty if it has none."""


class Open(Header):
    """Start of a call."""

    handler: str


NO_HANDLER = "no handler"
REFUSED = "refused"
NOT_A_MEMBER = "not a member"


class CallFailure(Header):
    """Why a call failed on the other side."""

    code: str = "handler"
    type: str = ""
    text: str = ""
    is_final: bool = False
    """The sender closes the connection; it carries no more calls."""

    @classmethod
    def of_error(cls, error: Exception, *, is_final: bool = False) -> CallFailure:
        """What the other side may know about an error: its type and its text, not where it happened."""
        # The text is for people, and may quote what strangers have sent.
        text = str(error)[:2000].encode(errors="backslashreplace").decode()
        return cls(type=type(error).__name__, text=text, is_final=is_final)


class Connection:
    """One authenticated stream, the greetings on it, and the messages of the current call.

    This is one object, because greeting and call take turns on the stream and every message passes here.

    Args:
        stream: the stream; from now on only this object uses it.
        make_hello: makes this side's greeting, sent along with its first message.
        on_hello: called with the other side's greeting.
        memory: grants memory for large headers.
    """

    def __init__(
        self,
        stream: Stream,
        metrics: Metrics,
        make_hello: Callable[[], Hello],
        on_hello: Callable[[Connection, Hello], None],
        memory: HeaderMemory,
    ) -> None:
        self.stream = stream
        self.metrics = metrics
        self.remote = stream.remote
        self.instance: bytes | None = None
        """The reach in the other side's greeting; ``None`` until that has arrived. The rest of it is not kept."""
        self.round_trip: float | None = None
        """Seconds that the greetings spent on the network, if this side greeted first."""
        self.writing_since = 0.0
        """When the write in progress began, in the loop's time; 0 if there is none."""
        self.header_since = 0.0
        """When the header that is still arriving began, in the loop's time; 0 if there is none."""
        self.is_member = False
        """Whether both sides have proven that they are members."""
        self.handler = ""
        """The handler of the latest call; only names that are served here or called from here."""
        self._make_hello: Callable[[], Hello] | None = make_hello
        self._on_hello = on_hello
        self._memory = memory
        self._now = asyncio.get_running_loop().time
        self.opened_at = self._now()
        self._greeted_at: float | None = None
        self._was_greeted_at: float | None = None
        self._unsent = b""

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def open_call(self, handler: str) -> Call:
        """Begin a call; the opening message leaves together with the first item."""
        self.handler = handler
        self.put(Kind.OPEN, Open(handler=handler))
        return Call(self)

    def put(self, kind: Kind, header: Header) -> None:
        """Send a message together with the next one."""
        self._unsent += pack(kind, header)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent along with the next message."""
        return bool(self._unsent)

    def _take_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        if self._make_hello is not None:
            unsent, self._make_hello = pack(Kind.HELLO, self._greeting(self._make_hello())) + unsent, None
        return unsent

    def _greeting(self, hello: Hello) -> Hello:
        if self._was_greeted_at is None:
            self._greeted_at = self._now()
        else:
            hello.waited = self._now() - self._was_greeted_at
        return hello

    async def send(self, kind: Kind, header: Header | None, *payload: Buffer, end: bool = False) -> None:
        """Send one message; without a header it only says that this side has finished."""
        size = sum(map(len, payload)) if payload else 0
        message = pack(kind, header, size, end=end)
        await self._write(self._take_unsent() + message, payload, size)

    def show_life(self) -> None:
        """Let the other side know that the connection works, unless a message is on its way already."""
        if self.writing_since:
            return
        self._unsent = self._take_unsent()
        if self.stream.write_if_free(self._unsent + _ALIVE):
            self._count_sent(len(self._unsent) + len(_ALIVE))
            self._unsent = b""

    async def flush(self) -> None:
        """Send what waits for the first item, such as the opening of a call in which this side listens first."""
        unsent = self._take_unsent()
        if unsent:
            await self._write(unsent)

    async def _write(self, head: bytes, payload: tuple[Buffer, ...] = (), payload_bytes: int = 0) -> None:
        try:
            self.writing_since = self._now()
            if not payload:
                await self.stream.write(head)
            else:
                for piece in pieces_of(head, payload):
                    self.writing_since = self._now()
                    await self.stream.write(*piece)
        except BaseException:
            # Half a message may have left, so the other side could not parse what follows.
            self.abort()
            raise
        finally:
            self.writing_since = 0.0
        self._count_sent(len(head) + payload_bytes)

    def _count_sent(self, size: int) -> None:
        self.metrics.bytes_sent += size
        if self.stream.via is not None:
            self.metrics.bytes_relayed += size
        self.metrics.bytes_sent_by_handler[self.handler] += size

    async def receive(self) -> tuple[Prefix, bytearray]:
        """The next message's prefix and header; the caller still has to read its payload, if any."""
        while True:
            stream = self.stream
            raw = stream.take(PREFIX_BYTES)
            if raw is None:
                raw = bytearray(PREFIX_BYTES)
                await stream.read_exactly_into(memoryview(raw))
            prefix = parse_prefix(raw)
            raw = stream.take(prefix.header_bytes)
            if raw is None:
                raw = await self._receive_header(prefix.header_bytes)
            size = PREFIX_BYTES + len(raw) + prefix.payload_bytes
            self.metrics.bytes_received += size
            if stream.via is not None:
                self.metrics.bytes_relayed += size
            if prefix.kind is Kind.ALIVE and not (raw or prefix.payload_bytes):
                continue
            if prefix.kind is not Kind.HELLO:
                return prefix, raw
            if prefix.payload_bytes or self.instance is not None:
                raise ProtocolError("a greeting with a payload, or a second one")
            hello = decode_header(raw, Hello)
            self.instance = hello.instance
            self._was_greeted_at = self._now()
            if self._greeted_at is not None and hello.waited is not None:
                self.round_trip = self._was_greeted_at - self._greeted_at - hello.waited
            self._on_hello(self, hello)

    async def _receive_header(self, size: int) -> bytearray:
        self.header_since, taken = self._now(), 0

        def take_memory(more: int) -> None:
            nonlocal taken
            if not self._memory.take(self.remote, more):
                raise ProtocolError(f"a header of {size} bytes, too much with the others that are still arriving")
            taken += more

        try:
            return await read_new(self.stream, size, take_memory)
        finally:
            self.header_since = 0.0
            if taken:
                self._memory.give_back(self.remote, taken)

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
        """Unread bytes of the payload that follows the last header."""
        self.has_received = False
        """The other side has sent a message."""
        self.is_premature = False
        """Whether the call is about something that does not exist here yet, and perhaps never will."""
        self.sent_end = False
        self.received_end = False
        self._is_final = False

    @property
    def clean(self) -> bool:
        """Whether both sides have ended, so that the connection may carry another call."""
        ended = self.sent_end and self.received_end and not self.payload_size
        return ended and not self._is_final and not self.connection.closed

    @property
    def yields(self) -> bool:
        """Whether the call may lose its place to another one if all places are taken."""
        return not self.has_received or self.is_premature

    async def send(self, header: Header, *payload: Buffer, end: bool = False) -> None:
        """Send one message, waiting while the other side is slow to take it.

        Args:
            header: a small typed header.
            payload: raw buffers of format ``B`` that follow the header; the caller may reuse them once this returns.
            end: this is the last message of this side.

        Raises:
            StreamClosedError: the connection ended.
            ValueError: the message is too large.
        """
        if self.sent_end:
            raise RuntimeError("this side of the call has ended already")
        await self.connection.send(Kind.ITEM, header, *payload, end=end)
        self.sent_end = end

    def put(self, header: Header) -> None:
        """Send a message without a payload together with the next one, which wakes the other side only once.

        Raises:
            ValueError: the message is too large.
        """
        if self.sent_end:
            raise RuntimeError("this side of the call has ended already")
        self.connection.put(Kind.ITEM, header)

    async def send_end(self) -> None:
        """Say that nothing more will come from this side. Idempotent."""
        if not self.sent_end:
            await self.connection.send(Kind.ITEM, None, end=True)
            self.sent_end = True

    async def send_failure(self, failure: CallFailure) -> None:
        """End this side with the reason why the call failed."""
        if not self.sent_end:
            await self.connection.send(Kind.ERROR, failure, end=True)
            self.sent_end = True

    async def receive(self, header_type: type[H]) -> H | None:
        """The next message's header, or ``None`` when the other side has ended.

        Raises:
            P2PHandlerError: the other side's handler raised.
            P2PDaemonError: the other side has no such handler.
            DialError: the other side refuses this peer, and says why.
            NotAMemberError: the other side refuses this peer because of its badge.
            ProtocolError: the message is not of this type.
            StreamClosedError: the connection ended in the middle.
        """
        if self.received_end:
            return None
        if self.payload_size:
            raise RuntimeError(f"{self.payload_size} bytes of payload are unread: read them before the next message")
        if self.connection.has_unsent:
            await self.connection.flush()
        prefix, raw = await self.connection.receive()
        self.has_received, self.received_end = True, prefix.is_end
        self.payload_size = prefix.payload_bytes
        if prefix.kind is Kind.ERROR:
            failure = decode_header(raw, CallFailure)
            self._is_final = failure.is_final
            raise self._as_exception(failure)
        if prefix.kind is not Kind.ITEM:
            raise ProtocolError(f"expected the next message of a call, got {prefix.kind.name}")
        if prefix.is_end and not raw and not prefix.payload_bytes:
            return None
        return decode_header(raw, header_type)

    async def ask(self, request: Header, response_type: type[H]) -> H:
        """Send the only message of this side, and receive the only message of the other side.

        Raises:
            ProtocolError: the other side ended without an answer, or the answer is of another type.
            P2PHandlerError, P2PDaemonError, StreamClosedError: as for :meth:`receive`.
        """
        await self.send(request, end=True)
        response = await self.receive(response_type)
        if response is None:
            raise ProtocolError(f"peer {self.remote} ended {self.connection.handler} without an answer")
        return response

    def _as_exception(self, failure: CallFailure) -> Exception:
        kind, text = one_line(failure.type), one_line(failure.text)
        if failure.code == NO_HANDLER:
            return P2PDaemonError(f"peer {self.remote} has no handler for this call: {text}")
        if failure.code == REFUSED:
            return DialError(f"peer {self.remote} refuses this connection: {text}")
        if failure.code == NOT_A_MEMBER:
            refusal = f"peer {self.remote} does not let this peer in"
            return NotAMemberError(f"{refusal}: {text}", reason=kind[:32])  # it is counted by its name
        return P2PHandlerError(f"peer {self.remote}: {kind}: {text}")

    async def read_payload_into(self, *buffers: memoryview, arrived: Callable[[int], object] | None = None) -> None:
        """Receive the payload straight into buffers that together have exactly its size.

        Args:
            arrived: called with the size of each buffer as it fills up.

        Raises:
            ProtocolError: the payload has another size.
            StreamClosedError: the connection ended in the middle.
        """
        size = sum(map(len, buffers))
        if size != self.payload_size:
            raise ProtocolError(f"peer {self.remote} sent a payload of {self.payload_size} bytes, not {size}")
        self.payload_size = 0
        for buffer in buffers:
            if len(buffer):
                await self.connection.stream.read_exactly_into(buffer)
                if arrived is not None:
                    arrived(len(buffer))

    async def read_payload(self, max_bytes: int) -> bytearray:
        """Receive the payload into new memory.

        Raises:
            ProtocolError: it is larger than ``max_bytes``.
        """
        if self.payload_size > max_bytes:
            raise ProtocolError(f"peer {self.remote} sent a payload of {self.payload_size} bytes, over {max_bytes}")
        size, self.payload_size = self.payload_size, 0
        return await read_new(self.connection.stream, size)

    async def skip_payload(self) -> None:
        """Receive the payload, and forget it."""
        scratch = memoryview(bytearray(min(self.payload_size, READ_STEP_BYTES)))
        while self.payload_size:
            piece = min(len(scratch), self.payload_size)
            await self.connection.stream.read_exactly_into(scratch[:piece])
            self.payload_size -= piece

    async def drain(self) -> None:
        """Discard what the other side still sends, for a short while, so that it can read why the call failed."""
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT):
                await self.skip_payload()
                while not self.received_end:
                    prefix, _ = await self.connection.receive()
                    self.received_end, self.payload_size = prefix.is_end, prefix.payload_bytes
                    await self.skip_payload()
        except (TimeoutError, StreamClosedError):
            return
