"""The distributed hash table for programs without coroutines: every method works from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from shoal.base.clock import DHTExpiration
from shoal.base.closeable import Facade, at_the_door, unknown_argument
from shoal.base.reactor import AwaitableFuture, Portal
from shoal.dht.get import GetResult
from shoal.dht.node import DEFAULT_NUM_WORKERS, DHTNode
from shoal.dht.routing import DHTKey
from shoal.dht.storage import DHTValue, Subkey
from shoal.dht.validation import CompositeValidator, GetReport, RecordValidatorBase, StoreReport
from shoal.errors import DHTError
from shoal.net.pasted import line_to_paste, split_addresses, wants_local
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.p2p.joining import parse_peer_addresses
from shoal.p2p.local_network import check_can_look_around
from shoal.peers.identity import checked_name, default_name
from shoal.reach.manager import Libp2pOptions

T = TypeVar("T")


class DHT(Facade):
    """A peer's access to the distributed hash table. A node in the background loop does the work.

    Use it in a ``with`` block, or call :meth:`shutdown` in the end.

    Args:
        initial_peers: addresses of peers of the swarm, as a list or in one string. A full address ends with
            ``/p2p/<peer id>``; at ``HOST:PORT`` any peer may answer. ``"local"`` stands for all peers in the local
            network, now or later (``pip install 'shoal[local]'``). None = start a new swarm.
        start: whether to start at once; otherwise call :meth:`run_in_background`.
        p2p: use this peer, made in the background loop, instead of a new one. :meth:`shutdown` leaves it running.
        daemon: accepted for compatibility; nothing here keeps a process alive.
        num_workers: most requests in flight of one search; ``None`` = the default.
        record_validators: decide which records may be stored and trusted; the same ones at every peer.
        shutdown_timeout: most seconds that :meth:`shutdown` waits.
        await_ready: wait until the node has joined, and raise the error if it could not.
        name: the name of this peer in the logs of others and in the monitor; default: the environment variable
            ``SHOAL_NAME``, or else the name of this machine with the number of this process. Others learn it, in a
            private run only its members. ``""`` tells them nothing; so does the default with an ``authorizer``.
        kwargs: settings of :meth:`DHTNode.create`, and through it of :meth:`P2P.create`, such as ``token`` of a private
            run: the text of a token or the path of a file with it.

    Raises:
        TypeError, ValueError: ``initial_peers`` is not a list of such addresses.
        BootstrapError: no initial peer could be reached; the text says why for each address.
        ValidationError: the initial peers do not agree about the time.
        ModuleNotFoundError: ``"local"`` needs a package that is not installed.
    """

    instead_of_a_copy = "give its addresses, get_visible_maddrs(), and make another DHT with them as initial_peers"

    @at_the_door
    def __init__(
        self,
        initial_peers: Sequence[Multiaddr | str] | str | None = None,
        *,
        start: bool,
        p2p: P2P | None = None,
        daemon: bool = True,
        num_workers: int | None = DEFAULT_NUM_WORKERS,
        record_validators: Iterable[RecordValidatorBase] = (),
        shutdown_timeout: float = 3,
        await_ready: bool = True,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        num_workers = DEFAULT_NUM_WORKERS if num_workers is None else num_workers
        known = _names_of_settings()
        for option in kwargs:
            if option not in known:
                raise unknown_argument("DHT", option, known)
        if name is not None:
            named = {"name": checked_name(name)}
        elif p2p is None and kwargs.get("authorizer") is None:
            named = {"name": default_name()}
        else:
            named = {}
        self.initial_peers = split_addresses(() if initial_peers is None else initial_peers)
        parse_peer_addresses(self.initial_peers)
        if wants_local(self.initial_peers):
            check_can_look_around()
        self.kwargs = kwargs
        self.daemon, self.num_workers = daemon, num_workers
        self.shutdown_timeout = shutdown_timeout
        self.pid = os.getpid()
        self._validator = CompositeValidator(record_validators)
        self._portal: Portal | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._service = _Service(
            DHTHandle(self),
            {
                **kwargs,
                **named,
                "initial_peers": self.initial_peers,
                "p2p": p2p,
                "num_workers": num_workers,
                "record_validator": self._validator,
            },
        )
        if start:
            self.run_in_background(await_ready=await_ready)

    # --- starting and ending ------------------------------------------------------------------------------------------

    @at_the_door
    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start the node.

        Args:
            await_ready: wait until it has joined.
            timeout: seconds to wait.

        Raises:
            TimeoutError: the node was not ready in time.
            RuntimeError: it has already been started.
        """
        if self._portal is not None:
            raise RuntimeError("this DHT is started already")
        self._portal = Portal("DHT")
        self._portal.on_close(self._service.stop)
        self._started = self._portal.submit(self._service.start())
        if await_ready:
            try:
                self.wait_until_ready(timeout)
            except BaseException:
                self._portal.begin_close()
                raise

    @at_the_door
    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the node has joined.

        Raises:
            TimeoutError: the node was not ready in time.
            BootstrapError, ValidationError: joining failed.
        """
        try:
            if not self._started.done():
                self.portal.call(self._service.ready.wait(), timeout)
            self._started.result()
        except concurrent.futures.CancelledError:
            raise DHTError("this DHT was shut down before it was ready") from None

    def is_alive(self) -> bool:
        """Whether the node is running in this process."""
        portal = self._portal
        if portal is None or portal.closed:
            return False
        return not self._started.done() or (not self._started.cancelled() and self._started.exception() is None)

    def shutdown(self) -> None:
        """Leave the swarm; operations in progress are cancelled. Idempotent, never hangs."""
        if self._portal is not None:
            self._portal.close(self.shutdown_timeout)

    terminate = shutdown

    def join(self, timeout: float | None = None) -> None:
        """Wait until the node has been shut down."""
        if self._portal is not None:
            self._service.stopped.wait(timeout)

    def __del__(self) -> None:
        portal: Portal | None = getattr(self, "_portal", None)
        if portal is not None and not portal.closed:
            portal.begin_close()

    # --- for other components -----------------------------------------------------------------------------------------

    @property
    def portal(self) -> Portal:
        """The access to the background loop, where the node runs."""
        if self._portal is None:
            raise RuntimeError("this DHT is not started: call run_in_background()")
        return self._portal

    def __repr__(self) -> str:
        """Its addresses and how many other peers it knows. Makes no calls, so it can be used at any time."""
        node, maddrs, state = self._service.node, self._service.visible_maddrs, ""
        if self._portal is None:
            state = "not started"
        elif self.pid != os.getpid():
            state = f"of process {self.pid}"
        elif self._portal.closed:
            state = "shut down"
        elif self._service.failure is not None:
            state = f"failed to start: {self._service.failure}"
        if maddrs is None or node is None:
            return f"<DHT {state or 'starting'}>"
        where = ", ".join(map(str, maddrs)) or f"client {node.peer_id}"
        known = len(node.protocol.routing_table)
        others = "1 other peer" if known == 1 else f"{known} other peers"
        return f"<DHT {where}, {state or f'knows {others}'}>"

    def check(self) -> None:
        """Check that it can be used.

        Raises:
            ReactorError: it is shut down, or belongs to the parent of this forked process.
            RuntimeError: it is not started.
        """
        self.portal.check_open()

    @property
    def node(self) -> DHTNode:
        """The node; its coroutines must run in the background loop."""
        self.portal.check()
        self.wait_until_ready()
        assert self._service.node is not None
        return self._service.node

    @property
    def p2p(self) -> P2P:
        """The node's peer, which other components of this process may use too."""
        return self.node.p2p

    async def replicate_p2p(self) -> P2P:
        """The node's peer, for other components."""
        return self.p2p

    def add_validators(self, record_validators: Iterable[RecordValidatorBase]) -> None:
        """Apply more rules to records from now on.

        Raises:
            RuntimeError: the node is not ready yet.
        """
        if not self._started.done():
            raise RuntimeError("validators can be added when the DHT is ready: wait_until_ready() first")
        portal = self.portal
        if portal.reactor.in_loop_thread():
            self._validator.extend(record_validators)
        else:
            portal.call(self._service.add_validators(self._validator, record_validators))

    # --- known after the start, also in forked children ---------------------------------------------------------------

    @property
    def peer_id(self) -> PeerID:
        """This peer's id on the network."""
        return self._started_node.peer_id

    @property
    def client_mode(self) -> bool:
        """Whether this peer only calls others and is never called."""
        return self._started_node.client_mode

    @property
    def _started_node(self) -> DHTNode:
        """The node, for facts that are known after the start."""
        if self._service.visible_maddrs is None:
            self.wait_until_ready()
        assert self._service.node is not None
        return self._service.node

    def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Addresses to give to others as initial peers, each ending with ``/p2p/<peer id>``.

        Args:
            latest: ask again, instead of returning the addresses from the start.
        """
        node = self._started_node
        if latest and not self.portal.closed:
            self._service.visible_maddrs = self.portal.call(node.get_visible_maddrs(latest=True))
        return list(self._service.visible_maddrs or ())

    @property
    def address(self) -> str:
        """One short address to give to others, such as ``203.0.113.7:31337``: the one that reaches furthest.

        It stands for any peer that answers there; :meth:`get_visible_maddrs` has addresses that also say which one.

        Raises:
            DHTError: no peer can call this one.
        """
        addresses = self.get_visible_maddrs(latest=True)
        if not addresses:
            raise DHTError("this peer has no address: in client mode it only calls others")
        return line_to_paste(addresses)

    # --- getting and storing ------------------------------------------------------------------------------------------

    @overload
    def get(
        self,
        key: DHTKey,
        latest: bool = False,
        return_future: Literal[False] = False,
        *,
        explain: Literal[False] = False,
        **kwargs: Any,
    ) -> GetResult: ...

    @overload
    def get(
        self,
        key: DHTKey,
        latest: bool = False,
        return_future: Literal[False] = False,
        *,
        explain: Literal[True],
        **kwargs: Any,
    ) -> GetReport: ...

    @overload
    def get(
        self, key: DHTKey, latest: bool = False, *, return_future: Literal[True], explain: bool = False, **kwargs: Any
    ) -> AwaitableFuture[Any]: ...

    def get(
        self,
        key: DHTKey,
        latest: bool = False,
        return_future: bool = False,
        *,
        explain: bool = False,
        **kwargs: Any,
    ) -> GetResult | GetReport | AwaitableFuture[Any]:
        """Get the value of a key with its expiration, or ``None``; a dictionary as ``{subkey: value with expiration}``.

        Args:
            key: the key under which the value was stored.
            latest: ask all nodes that may hold the latest value or the most complete dictionary; otherwise the first
                value that has not expired is returned.
            return_future: return at once. The future can be waited for in a thread or awaited in any event loop;
                cancelling it stops the search.
            explain: return a :class:`~shoal.dht.GetReport`, which has the value in ``found``, and in ``nodes`` what
                each node answered, or why it did not answer.
            kwargs: as for :meth:`DHTNode.get_many_by_id`.

        Raises:
            ReactorError: this DHT is shut down, belongs to the parent process, or a blocking call was made inside the
                background loop.
        """
        run = self.portal.submit if return_future else self.portal.call
        return run(self._service.call(DHTNode.get, key, latest, explain=explain, **kwargs))

    @overload
    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        return_future: Literal[False] = False,
        *,
        explain: Literal[False] = False,
        **kwargs: Any,
    ) -> bool: ...

    @overload
    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        return_future: Literal[False] = False,
        *,
        explain: Literal[True],
        **kwargs: Any,
    ) -> StoreReport: ...

    @overload
    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        *,
        return_future: Literal[True],
        explain: bool = False,
        **kwargs: Any,
    ) -> AwaitableFuture[Any]: ...

    def store(
        self,
        key: DHTKey,
        value: DHTValue,
        expiration_time: DHTExpiration,
        subkey: Subkey | None = None,
        return_future: bool = False,
        *,
        explain: bool = False,
        **kwargs: Any,
    ) -> bool | StoreReport | AwaitableFuture[Any]:
        """Store one value, or with a subkey one entry of a dictionary, until it expires.

        Args:
            key: the key to get it by.
            value: anything that msgpack can pack.
            expiration_time: DHT time, at most a day from now. A value replaces those that expire earlier; a tie is
                refused.
            subkey: the entry's key inside the dictionary.
            return_future: return at once.
            explain: return a :class:`~shoal.dht.StoreReport` instead of a bool. It is true in the same cases, and says
                for each node whether it keeps the value, or why not.
            kwargs: as for :meth:`DHTNode.store_many`.

        Returns:
            Whether most of the nodes that answered keep it now.

        Raises:
            ReactorError: as for :meth:`get`.
            TypeError, ValueError: the key or value cannot be packed or is too large, or the expiration is invalid.
        """
        run = self.portal.submit if return_future else self.portal.call
        return run(self._service.call(DHTNode.store, key, value, expiration_time, subkey, explain=explain, **kwargs))

    @overload
    def run_coroutine(
        self, coro: Callable[[Any, DHTNode], Awaitable[T]], return_future: Literal[False] = False
    ) -> T: ...

    @overload
    def run_coroutine(
        self, coro: Callable[[Any, DHTNode], Awaitable[T]], return_future: Literal[True]
    ) -> AwaitableFuture[T]: ...

    def run_coroutine(
        self, coro: Callable[[Any, DHTNode], Awaitable[T]], return_future: bool = False
    ) -> T | AwaitableFuture[T]:
        """Run ``await coro(dht, node)`` in the background loop.

        Args:
            coro: a coroutine function. Its first argument is a stand-in for this object: attributes set on it are kept
                for the next coroutine, but are not set on this object.
            return_future: return at once; cancelling the future cancels the coroutine.
        """
        run = self.portal.submit if return_future else self.portal.call
        return run(self._service.run(coro))


def _names_of_settings() -> set[str]:
    """All arguments that a DHT takes, including those that it passes on."""
    takers = (DHT.__init__, DHTNode.create, P2P.create)
    named = [inspect.signature(taker).parameters.values() for taker in takers]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = {each.name for parameters in named for each in parameters if each.kind not in variable}
    return (names - {"self"}) | Libp2pOptions.names()


def check_dht(dht: object) -> None:
    """Check that an argument is a DHT that can be used.

    Raises:
        TypeError: it is something else.
        RuntimeError: it is shut down, not started, or belongs to the parent of this forked process.
    """
    if not isinstance(dht, DHT):
        kind = "None" if dht is None else f"a {type(dht).__name__}"
        raise TypeError(f"dht must be a DHT, got {kind}: make one with shoal.DHT(initial_peers=[...], start=True)")
    dht.check()


class DHTHandle:
    """Stands in for a DHT inside :meth:`DHT.run_coroutine`: reads its attributes, but keeps written ones to itself."""

    def __init__(self, dht: DHT) -> None:
        self.__dict__["_dht"] = weakref.ref(dht)

    def __getattr__(self, name: str) -> Any:
        dht = self.__dict__["_dht"]()
        if dht is None:
            raise ReferenceError("the DHT object is gone")
        return getattr(dht, name)


class _Service:
    """The half of a DHT that lives in the loop. It holds no reference to the other half, so that can be collected."""

    def __init__(self, handle: DHTHandle, options: dict[str, Any]) -> None:
        self.node: DHTNode | None = None
        self.visible_maddrs: list[Multiaddr] | None = None
        """The latest known addresses; ``None`` until the node is ready."""
        self.stopped = threading.Event()
        self._handle = handle
        self._options = options
        self.ready = asyncio.Event()
        """Set when starting has succeeded or failed."""
        self._starting = False
        self.failure: BaseException | None = None

    async def start(self) -> None:
        self._starting = True
        try:
            self.node = await DHTNode.create(**self._options)
            self.visible_maddrs = await self.node.get_visible_maddrs()
        except BaseException as e:
            self.failure = e
            self.stopped.set()
            raise
        finally:
            self.ready.set()

    async def stop(self) -> None:
        try:
            if self._starting:  # start() was cancelled and cleans up after itself
                await self.ready.wait()
            if self.node is not None:
                await self.node.shutdown()
        finally:
            self.stopped.set()

    async def _when_ready(self) -> DHTNode:
        await self.ready.wait()
        if self.node is None:
            raise DHTError(f"this DHT could not start: {self.failure}")
        return self.node

    async def call(self, method: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Call a method of the node when it is ready."""
        return await method(await self._when_ready(), *args, **kwargs)

    async def run(self, function: Callable[[Any, DHTNode], Awaitable[T]]) -> T:
        return await function(self._handle, await self._when_ready())

    async def add_validators(self, composite: CompositeValidator, validators: Iterable[RecordValidatorBase]) -> None:
        composite.extend(validators)
