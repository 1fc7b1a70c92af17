"""One peer on the network: its identity, where it listens, whom it can call and what it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shoal.clock import get_dht_time
from shoal.clock import timeout as time_limit
from shoal.errors import BootstrapError, DialError, P2PDaemonError, ProtocolError, ShoalError, StreamClosedError
from shoal.metrics import Metrics
from shoal.p2p.addresses import AddressBook
from shoal.p2p.connection import Call, Connection, Failure, Hello
from shoal.p2p.identity import Identity
from shoal.p2p.limits import DEFAULT_LIMITS, HeaderMemory
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.peer_id import PeerID, PeerInfo, split_peer_address
from shoal.p2p.pool import ConnectionPool
from shoal.p2p.servicer import Handler, P2PContext
from shoal.p2p.tcp import TcpTransport
from shoal.p2p.transport import Stream, Transport
from shoal.p2p.wire import Header
from shoal.reactor import cancel_and_wait

logger = logging.getLogger(__name__)
H = TypeVar("H", bound=Header)

AGENT = "shoal"
DIAL_STAGGER = 0.25
"""Seconds after which the next address of a peer is tried beside the one that has not answered yet."""
_WITHOUT_EFFECT = {
    "auto_nat": True,
    "conn_manager": True,
    "dht_mode": "server",
    "force_reachability": None,
    "nat_port_map": True,
    "relay_hop_limit": 0,
    "tls": True,
    "use_auto_relay": False,
    "use_ipfs": False,
    "use_relay": True,
    "persistent_conn_max_msg_size": 4 * 2**20,
    "quic": None,
    "use_relay_hop": None,
    "use_relay_discovery": None,
    "trusted_relays": None,
}


def parse_peer_addresses(initial_peers: Sequence[Multiaddr | str]) -> list[tuple[Multiaddr, PeerID]]:
    """Check addresses that users give.

    Raises:
        TypeError: not a sequence of addresses.
        ValueError: one of them is not a multiaddr that ends with a peer id.
    """
    if isinstance(initial_peers, (str, bytes, Multiaddr)) or not isinstance(initial_peers, Iterable):
        raise TypeError(
            f"initial_peers must be a list of addresses, got {initial_peers!r}: write [{str(initial_peers)!r}] for one"
        )
    for address in initial_peers:
        if not isinstance(address, (str, Multiaddr)):
            raise TypeError(f"initial_peers must contain str or Multiaddr, got {address!r}")
    return [split_peer_address(Multiaddr(address)) for address in initial_peers]


class P2P:
    """A peer. Made by :meth:`create`; lives in one event loop."""

    def __init__(self, transport: Transport, rng: random.Random, metrics: Metrics, idle_timeout: float) -> None:
        self.identity = transport.identity
        self.peer_id = transport.identity.peer_id
        self.transport = transport
        self.rng = rng
        self.metrics = metrics
        self.client_mode = False
        self.is_alive = True
        self._announced: list[Multiaddr] = []
        self._addresses = AddressBook()
        self._header_memory = HeaderMemory(DEFAULT_LIMITS)
        self._handlers: dict[str, Handler] = {}
        self._serving: dict[asyncio.Task[None], None] = {}  # in order, so that simulations can be repeated
        self._pool = ConnectionPool(self._connect, idle_timeout)

    @classmethod
    async def create(
        cls,
        initial_peers: Sequence[Multiaddr | str] | None = None,
        *,
        announce_maddrs: Sequence[Multiaddr | str] | None = None,
        auto_nat: bool = True,
        conn_manager: bool = True,
        dht_mode: str = "server",
        force_reachability: str | None = None,
        host_maddrs: Sequence[Multiaddr | str] | None = ("/ip4/127.0.0.1/tcp/0",),
        identity_path: str | os.PathLike[str] | None = None,
        idle_timeout: float = 30,
        nat_port_map: bool = True,
        relay_hop_limit: int = 0,
        startup_timeout: float = 15,
        tls: bool = True,
        use_auto_relay: bool = False,
        use_ipfs: bool = False,
        use_relay: bool = True,
        persistent_conn_max_msg_size: int = 4 * 2**20,
        quic: bool | None = None,
        use_relay_hop: bool | None = None,
        use_relay_discovery: bool | None = None,
        check_if_identity_free: bool = True,
        no_listen: bool = False,
        trusted_relays: Sequence[Multiaddr | str] | None = None,
        transport: Transport | None = None,
        rng: random.Random | None = None,
    ) -> P2P:
        """Start a peer.

        Args:
            initial_peers: addresses that end with ``/p2p/<peer id>``; at least one of them must answer.
            announce_maddrs: what others are told instead of the addresses where this peer listens, such as the public
                side of a forwarded port.
            host_maddrs: where to listen; loopback only by default.
            identity_path: file that keeps this peer's key; made if missing. Without it every start is a new peer.
            idle_timeout: seconds after which an unused connection is closed.
            startup_timeout: seconds for reaching the first initial peer.
            no_listen: only call others, never be called.
            transport: another way to reach peers than TLS over TCP; it brings the identity.
            rng: source of every random choice, for reproducible simulations.

        The other parameters belong to transports that need a libp2p daemon: they are accepted so that existing calls
        work, and a warning says when one of them would ask for something that does not happen.

        Raises:
            BootstrapError: no initial peer could be reached; it says why for each address.
            P2PDaemonError: cannot listen, or the identity file is unusable.
            ValueError, TypeError: an address is malformed.
        """
        _warn_without_effect(locals())
        assert not (initial_peers and use_ipfs), "initial_peers and use_ipfs exclude each other"
        targets = parse_peer_addresses(initial_peers or ())
        announced = [_checked_announcement(Multiaddr(address)) for address in announce_maddrs or ()]
        metrics = Metrics()
        if transport is None:
            identity = Identity.generate() if identity_path is None else Identity.load_or_create(identity_path)
            transport = TcpTransport(identity, metrics)
        p2p = cls(transport, rng or random.Random(), metrics, idle_timeout)
        p2p.client_mode = no_listen
        try:
            if not no_listen:
                await p2p._listen([Multiaddr(address) for address in host_maddrs or ()], announced)
            if targets:
                await p2p._bootstrap(targets, startup_timeout)
        except BaseException:
            await p2p.shutdown()
            raise
        return p2p

    async def _listen(self, hosts: Sequence[Multiaddr], announced: list[Multiaddr]) -> None:
        usable = [address for address in hosts if self.transport.supports(address)]
        for address in hosts:
            if address not in usable:
                logger.warning(
                    "cannot listen on %s: there is no transport for it yet, other addresses are used", address
                )
        if not usable:
            raise P2PDaemonError(
                f"no usable address to listen on in {[str(a) for a in hosts]}: give /ip4/0.0.0.0/tcp/0"
            )
        listening = [found for address in usable for found in await self.transport.listen(address, self._on_stream)]
        self._announced = announced or listening

    async def _bootstrap(self, targets: list[tuple[Multiaddr, PeerID]], limit: float) -> None:
        """Return as soon as one of the peers is connected; the others are reached when they are needed."""
        for address, peer in targets:
            if peer != self.peer_id:
                self.add_addresses(peer, [address])
        peers = list(dict.fromkeys(peer for _, peer in targets))
        tasks = {asyncio.ensure_future(self._check_reachable(peer)): peer for peer in peers}
        verdicts: dict[str, str] = {}
        deadline = asyncio.get_running_loop().time() + limit
        pending = set(tasks)
        try:
            while pending:
                left = deadline - asyncio.get_running_loop().time()
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() is None for task in done):
                    return
                if not done:
                    break
        finally:
            await cancel_and_wait(*(task for task in tasks if task in pending))
        for task, peer in tasks.items():
            error = None if task.cancelled() else task.exception()
            for address in (a for a, p in targets if p == peer):
                verdicts[f"{address}/p2p/{peer}"] = _verdict(error, address, limit)
        raise BootstrapError(verdicts)

    async def _check_reachable(self, peer: PeerID) -> None:
        self._pool.release(await self._pool.acquire(peer), reusable=True)

    # --- addresses ----------------------------------------------------------------------------------------------------

    def add_addresses(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember where a peer can be dialled, as told by a third party."""
        self._addresses.add(peer, addresses)

    def get_addresses(self, peer: PeerID) -> list[Multiaddr]:
        """Where a peer can be dialled, as far as known, without ``/p2p``."""
        return list(self._announced) if peer == self.peer_id else self._addresses.get(peer)

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses to give to others, each with ``/p2p/<peer id>``; none for a peer that does not listen."""
        return [address.encapsulate(f"/p2p/{self.peer_id}") for address in self._announced]

    async def list_peers(self) -> list[PeerInfo]:
        """Peers whose addresses are known."""
        return [PeerInfo(peer, addresses) for peer, addresses in self._addresses._known.items()]

    def _hello(self) -> Hello:
        return Hello(addresses=[str(address) for address in self._announced], agent=AGENT, time=get_dht_time())

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        if not hello.addresses:
            return
        try:
            self._addresses.replace(
                connection.remote, [address for address in hello.addresses[:8] if len(address) < 512]
            )
        except ValueError as e:
            raise ProtocolError(f"greeting with invalid addresses: {e}") from None

    # --- calling ------------------------------------------------------------------------------------------------------

    async def _connect(self, peer: PeerID) -> Connection:
        if not self.is_alive:
            raise P2PDaemonError("this peer is shut down")
        if peer == self.peer_id:
            raise P2PDaemonError("a peer cannot call itself over the network")
        addresses = [address for address in self.get_addresses(peer) if self.transport.supports(address)]
        if not addresses:
            raise DialError(f"no address of peer {peer} is known: it may be in client mode, or it has left")
        stream = await self._dial_first(peer, addresses)
        return Connection(stream, self.metrics, self._hello, self._on_hello, self._header_memory)

    async def _dial_first(self, peer: PeerID, addresses: list[Multiaddr]) -> Stream:
        """Dial addresses one after another, each a little later than the one before; the first success wins."""
        tasks: dict[asyncio.Task[Stream], Multiaddr] = {}
        waiting = list(addresses)
        errors: list[BaseException] = []
        try:
            while waiting or tasks:
                if waiting:
                    address = waiting.pop(0)
                    tasks[asyncio.ensure_future(self.transport.dial(address, peer))] = address
                done, _ = await asyncio.wait(
                    tasks, timeout=DIAL_STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in tasks if task in done]:  # in the order of dialling
                    address = tasks.pop(task)
                    error = task.exception()
                    if error is None:
                        self._addresses.prefer(peer, address)
                        return task.result()
                    errors.append(error)
        finally:
            for task in tasks:
                task.add_done_callback(_abort_late)
                task.cancel()
        if len(errors) == 1:
            raise errors[0]
        raise DialError(f"cannot reach peer {peer}: " + "; ".join(map(str, errors)))

    async def call(
        self, peer: PeerID, handle: str, request: Header, response_type: type[H], timeout: float | None = None
    ) -> H:
        """Call a unary handler at another peer.

        Args:
            timeout: seconds for everything, dialling included; ``None`` = as long as the connection lives.

        Raises:
            P2PHandlerError: the handler raised.
            P2PDaemonError: the peer cannot be reached, the connection broke, or it has no such handler.
            asyncio.TimeoutError: no answer in time.
        """
        async with time_limit(timeout), self.open_call(peer, handle) as call:
            await call.send(request, end=True)
            response = await call.receive(response_type)
            if response is None:
                raise ProtocolError(f"peer {peer} ended {handle} without an answer")
            return response

    @asynccontextmanager
    async def open_call(self, peer: PeerID, handle: str) -> AsyncIterator[Call]:
        """Call a handler that takes and sends any number of messages.

        Leaving the block before both sides have ended cuts the connection, which cancels the handler.
        """
        connection = await self._pool.acquire(peer)
        self.metrics.calls_made += 1
        call = connection.open_call(handle)
        try:
            yield call
        except BaseException as e:
            self.metrics.calls_failed += 1
            if isinstance(e, ProtocolError):
                self.metrics.connections_dropped["broke the protocol"] += 1
                connection.abort()
            raise
        finally:
            self._pool.release(connection, reusable=call.clean)

    # --- serving ------------------------------------------------------------------------------------------------------

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve handlers by name.

        Raises:
            P2PDaemonError: one of the names is taken.
        """
        for name in handlers:
            if name in self._handlers:
                raise P2PDaemonError(f"handler {name} is registered already: use another namespace or prefix")
        self._handlers.update(handlers)

    def remove_handlers(self, names: Iterable[str]) -> None:
        """Stop serving these handlers; calls in progress go on."""
        for name in names:
            self._handlers.pop(name, None)

    def _on_stream(self, stream: Stream) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._serving[task] = None
        task.add_done_callback(self._serving.pop)
        stream.on_closed(task.cancel)

    async def _serve(self, stream: Stream) -> None:
        """Serve calls on one connection until it ends. Its end cancels this task, and with it a handler at work."""
        connection = Connection(stream, self.metrics, self._hello, self._on_hello, self._header_memory)
        try:
            while await self._serve_call(connection, await connection.receive_open()):
                pass
        except ProtocolError as e:
            self.metrics.connections_dropped["broke the protocol"] += 1
            logger.debug("dropped the connection of %s: %s", connection.remote, e)
        except (StreamClosedError, asyncio.CancelledError):
            connection.abort()
        finally:
            connection.close()

    async def _serve_call(self, connection: Connection, name: str) -> bool:
        """Serve one call; returns whether the connection may carry another one."""
        call = Call(connection)
        handler = self._handlers.get(name)
        if handler is None:
            await call.send_failure(Failure(code="no handler", text=name[:200]))
            await call.drain()
            return call.clean
        self.metrics.calls_served += 1
        context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=connection.remote)
        try:
            await _run_handler(handler, call, context)
        except ProtocolError as e:
            await call.send_failure(Failure(type=type(e).__name__, text=str(e)))
            raise  # what follows on this connection can no longer be understood
        except Exception as e:
            if connection.closed:
                raise StreamClosedError("the caller has left") from e
            _log_handler_error(name, connection.remote, e)
            await call.send_failure(Failure(type=type(e).__name__, text=str(e)[:2000]))
            await call.drain()
        return call.clean

    async def shutdown(self) -> None:
        """Leave the network: stop listening, cut connections, cancel handlers. Idempotent."""
        self.is_alive = False
        await self.transport.close()
        self._pool.close()
        tasks = [task for task in self._serving if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_handler(handler: Handler, call: Call, context: P2PContext) -> None:
    method = handler.method
    if method.request_type is None:
        await handler.function(call, context)
        await call.send_end()
        return
    request = await call.receive(method.request_type)
    if request is None:
        raise ProtocolError("ended before the request")
    if call.payload_size or not call.received_end:
        raise ProtocolError(f"{context.handle_name} takes exactly one message without a payload")
    response = await handler.function(request, context)
    await call.send(response, end=True)


def _log_handler_error(name: str, caller: PeerID, error: Exception) -> None:
    """What shoal raises on purpose is the caller's news; anything else is a defect on this side."""
    expected = isinstance(error, ShoalError)
    logger.log(logging.DEBUG if expected else logging.WARNING, "%s, called by %s: %r", name, caller, error)
    if not expected:
        logger.debug("traceback of %s", name, exc_info=error)


def _abort_late(task: asyncio.Task[Stream]) -> None:
    """Another address was faster."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


def _verdict(error: BaseException | None, address: Multiaddr, limit: float) -> str:
    if error is None:
        return f"no answer within {limit:g} s"
    text = str(error)
    return text.removeprefix(f"{address}: ")


def _checked_announcement(address: Multiaddr) -> Multiaddr:
    if "0" in (address.get("tcp"), address.get("udp")):
        raise ValueError(f"cannot announce {address}: others need a real port, not 0; fix the port in host_maddrs too")
    return address


def _warn_without_effect(arguments: Mapping[str, Any]) -> None:
    asked = [name for name, default in _WITHOUT_EFFECT.items() if arguments[name] != default]
    if asked:
        logger.warning("%s: no effect here, there is no libp2p daemon underneath", ", ".join(asked))
