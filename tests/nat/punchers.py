"""Two hosts of a laboratory and a public one between them, as far as it takes to punch: transports, without peers.

Each runs in a thread of this process, whose sockets belong to the namespace in which the thread has started.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from shoal.base.tasks import cancel_and_wait
from shoal.errors import DialError
from shoal.metrics import Metrics
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import COOKIE_BYTES, Session, Splice, Stream, Throttle, send_frame
from shoal.peers.identity import Identity, PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.punching import Puncher
from shoal.reach.relay.circuits import open_circuits
from shoal.reach.relay.messages import Reach, Ready
from tests.computers import inside
from tests.nat.laboratory import Host
from tests.nat.sockets import LIMIT_SECONDS

RELAY_PORT = 4001
T = TypeVar("T")


class Unlimited(Throttle):
    def take(self, nbytes: int) -> float:
        return 0.0


class Place:
    """A thread with an event loop at a host, and a transport in it."""

    def __init__(self, host: Host) -> None:
        self.host, self.metrics = host, Metrics()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._live, name=host.namespace, daemon=True)
        self._thread.start()
        assert self._is_up.wait(LIMIT_SECONDS)

    def _live(self) -> None:
        with inside(self.host.namespace):
            self._loop = asyncio.new_event_loop()
            self._loop.call_soon(self._is_up.set)
            self._loop.run_forever()
            self._loop.close()

    async def begin(self) -> None:
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()
        self.transport = TcpTransport(Identity.generate(), self.metrics)
        self.peer_id: PeerID = self.transport.identity.peer_id
        listening = ["/ip4/0.0.0.0/tcp/0", *(["/ip6/::/tcp/0"] if self.host.address_6 else [])]
        for address in listening:
            await self.transport.listen(Multiaddr(address), Stream.abort)
        self.transport.addresses(latest=True)
        self.puncher = Puncher(
            self.transport,
            self.metrics,
            self.accepted.put_nowait,
            lambda: Reach.EASY,
        )

    async def end(self) -> None:
        await self.puncher.close()
        while not self.accepted.empty():
            self.accepted.get_nowait().abort()
        await self.transport.close()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run something here."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something here until it is over."""
        return self.start(work).result(LIMIT_SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_SECONDS)


@dataclass
class Punch:
    """What has come of one."""

    seconds: list[float] = field(default_factory=list)
    """From nothing to each direct stream, for which the other side has proven who it is."""
    remotes: list[str] = field(default_factory=list)
    """Where those lead."""
    failed: int = 0
    """Ports without one."""


class Punchers:
    """Makes punches between two hosts, by way of a third one."""

    def __init__(self, relay: Host, dialler: Host, target: Host) -> None:
        self._places = [Place(host) for host in (relay, dialler, target)]
        self.relay, self.dialler, self.target = self._places
        for place in self._places:
            place.run(place.begin())
        self.address = Multiaddr(f"/ip4/{relay.address}/tcp/{RELAY_PORT}")
        self.relay.run(self.relay.transport.listen(Multiaddr(f"/ip4/0.0.0.0/tcp/{RELAY_PORT}"), Stream.abort))
        self._joining: list[asyncio.Task[None]] = []

    def __enter__(self) -> Punchers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.relay.run(self._part())
        for place in self._places:
            place.run(place.end())
            place.close()

    def punch(self, count: int = 1, *, late: float = 0.0) -> Punch:
        """Let both sides open circuits and punch; the target is late by some seconds."""
        pairs = [(secrets.token_bytes(COOKIE_BYTES), secrets.token_bytes(COOKIE_BYTES)) for _ in range(count)]
        expected = [self.relay.run(self._expect(*pair)) for pair in pairs]
        self.relay.run(self._begin_to_join(expected))
        answering = self.target.start(self._answer([pair[1] for pair in pairs], late))
        try:
            return self.dialler.run(self._dial([pair[0] for pair in pairs]))
        finally:
            answering.result(LIMIT_SECONDS)

    async def _expect(self, *cookies: bytes) -> list[asyncio.Future[Session]]:
        return [self.relay.transport.expect_session(cookie) for cookie in cookies]

    async def _begin_to_join(self, expected: Sequence[Sequence[asyncio.Future[Session]]]) -> None:
        self._joining += [asyncio.ensure_future(self._join(*each)) for each in expected]

    async def _part(self) -> None:
        await cancel_and_wait(*self._joining)

    async def _join(self, *expected: asyncio.Future[Session]) -> None:
        first, second = [await each for each in expected]
        seen = [str(first.remote_address), str(second.remote_address)]
        await send_frame(first, Ready(seen_at=seen[0], other_seen_at=seen[1]))
        await send_frame(second, Ready(seen_at=seen[1], other_seen_at=seen[0]))
        await Splice(first, second, Unlimited(), 100.0).run()

    async def _dial(self, cookies: Sequence[bytes]) -> Punch:
        loop, place, came = asyncio.get_running_loop(), self.dialler, Punch()
        began = loop.time()
        circuits = await open_circuits(place.transport, self.relay.peer_id, [self.address], cookies, punchable=True)
        futures = await place.puncher.as_dialler(self.target.peer_id, Reach.EASY, circuits, began)
        for future in futures:
            future.add_done_callback(lambda _: came.seconds.append(loop.time() - began))
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(each, Stream | DialError) for each in results), results
        streams = [each for each in results if isinstance(each, Stream)]
        came.failed = len(circuits) - len(streams)
        for stream in streams:
            came.remotes.append(str(stream.remote_address))
            stream.abort()
        for circuit in circuits:
            circuit.session.abort()
        return came

    async def _answer(self, cookies: Sequence[bytes], late: float) -> None:
        place = self.target
        circuits = await open_circuits(place.transport, self.relay.peer_id, [self.address], cookies, punchable=True)
        going_on = await place.puncher.as_target(self.dialler.peer_id, Reach.EASY, circuits)
        await asyncio.sleep(late)
        await going_on
        for circuit in circuits:
            circuit.session.abort()
