"""Peers for tests, on real sockets or in memory, and a service that they offer each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import msgspec

from shoal.errors import StreamClosedError
from shoal.net.memory import MemoryNetwork
from shoal.net.transport import Buffer, Stream
from shoal.p2p import P2P, Call, Header, P2PContext, PeerID, ServicerBase, patient

KINDS = ["tcp", "memory"]
PATIENCE = 50.0
"""Seconds after which something that should have come makes a test fail, also on a machine that is very busy."""


class Peers:
    """Starts peers that know each other, and shuts them down at the end of the block."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork()
        self.started: list[P2P] = []

    async def start(self, **options: Any) -> P2P:
        if self.kind == "memory":
            options.setdefault("transport", self.network.transport())
        p2p = await P2P.create(**options)
        for other in self.started:
            p2p.add_addresses(other.peer_id, other.get_addresses(other.peer_id))
        self.started.append(p2p)
        return p2p

    async def two(self, **options: Any) -> tuple[P2P, P2P]:
        """One that serves and one that calls it."""
        server = await self.start(**options)
        return server, await self.start()

    async def __aenter__(self) -> Peers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(p2p.shutdown() for p2p in self.started))


class Number(Header):
    value: int


class Text(Header):
    text: str = ""


class Pair(Header):
    left: int
    right: int
    labels: dict[str, list[bytes]] = msgspec.field(default_factory=dict)


class Empty(Header):
    """No fields at all."""


class Service(ServicerBase):
    """Handlers of every kind."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()
        self.contexts: list[P2PContext] = []
        self.received = bytearray()

    async def rpc_square(self, request: Number, context: P2PContext) -> Number:
        self.contexts.append(context)
        return Number(value=request.value**2)

    async def rpc_nothing(self, request: Empty, context: P2PContext) -> Empty:
        return Empty()

    async def rpc_fail(self, request: Text, context: P2PContext) -> Text:
        raise RuntimeError(request.text)

    async def rpc_hang(self, request: Empty, context: P2PContext) -> Empty:
        await self._hang()
        return Empty()

    async def rpc_hang_stream(self, call: Call, context: P2PContext) -> None:
        await self._hang()

    async def _hang(self) -> None:
        self.running += 1
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def rpc_count(self, call: Call, context: P2PContext) -> None:
        """As many numbers as asked for."""
        request = await call.receive(Number)
        assert request is not None
        for value in range(request.value):
            await call.send(Number(value=value))

    async def rpc_add(self, call: Call, context: P2PContext) -> None:
        """The sum of all numbers sent."""
        total = 0
        while (number := await call.receive(Number)) is not None:
            total += number.value
        await call.send(Number(value=total), end=True)

    async def rpc_echo(self, call: Call, context: P2PContext) -> None:
        """Every message as it comes, payload included."""
        while (number := await call.receive(Number)) is not None:
            payload = await call.read_payload(2**30)
            await call.send(number, payload)

    async def rpc_take(self, call: Call, context: P2PContext) -> None:
        """Receive one payload into memory that is there already."""
        request = await call.receive(Number)
        assert request is not None
        self.received = bytearray(request.value)
        await call.read_payload_into(memoryview(self.received))
        await call.send(Number(value=sum(self.received)))

    @patient
    async def rpc_take_patiently(self, call: Call, context: P2PContext) -> None:
        """The same, however long it takes."""
        await self.rpc_take(call, context)

    @patient
    async def rpc_wait_in_vain(self, call: Call, context: P2PContext) -> None:
        """It is about something that does not exist."""
        await call.receive(Number)
        call.is_premature = True
        await self._hang()

    async def rpc_swap(self, request: Pair, context: P2PContext) -> Pair:
        """Numbers change their places, and what comes along is dropped."""
        return Pair(left=request.right, right=request.left)

    async def rpc_fail_after(self, call: Call, context: P2PContext) -> None:
        """Some messages, and then an error."""
        request = await call.receive(Number)
        assert request is not None
        for value in range(request.value):
            await call.send(Number(value=value))
        raise RuntimeError("boom")

    async def rpc_ignore(self, call: Call, context: P2PContext) -> None:
        """Ends without having read anything."""


async def serving(p2p: P2P, **options: Any) -> Service:
    """A service at a peer."""
    service = Service()
    await service.add_p2p_handlers(p2p, **options)
    return service


def stub(caller: P2P, server: P2P) -> Any:
    """A way to call the service of a peer."""
    return Service.get_stub(caller, server.peer_id)


async def until(condition: Callable[[], bool], limit: float = PATIENCE) -> None:
    """Let the loop go on until something holds that comes without an event of its own."""
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def assert_clean(*peers: P2P) -> None:
    """Nothing of a call is left at these peers but idle connections."""
    for p2p in peers:
        pool = p2p.pool
        assert (pool.in_use_count, pool.dialling_count, pool.waiting_count) == (0, 0, 0)
        assert p2p.header_memory.total == 0


async def end_of(task: Awaitable[Any]) -> BaseException | None:
    """How a task ended: with an exception or well."""
    try:
        await task
    except BaseException as e:
        return e
    return None


class ScriptedStream(Stream):
    """The other side has written some bytes and left; what is written to it is kept."""

    def __init__(self, script: bytes, remote: PeerID) -> None:
        self.remote = remote
        self.remote_address = None
        self.written = bytearray()
        self._script = memoryview(script)
        self._closed = False
        self._end = StreamClosedError("the script is over")
        self._callback: Callable[[], object] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def left(self) -> int:
        """Bytes of the script that nobody has read yet."""
        return len(self._script)

    async def write(self, *buffers: Buffer) -> None:
        if self._closed:
            raise self._end
        self.written += b"".join(buffers)

    async def read_exactly_into(self, buffer: memoryview) -> None:
        size = len(buffer)
        if len(self._script) < size:
            self.abort()
            raise self._end
        buffer[:] = self._script[:size]
        self._script = self._script[size:]

    def on_closed(self, callback: Callable[[], object] | None) -> None:
        self._callback = callback

    def close(self) -> None:
        self._closed = True
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    abort = close
