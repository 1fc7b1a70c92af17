"""Methods that other peers can call: classes with ``rpc_*`` methods, and the stubs through which they are called.

The annotations of a method say what it sends and receives. There are three shapes::

    async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse   # unary
    async def rpc_download(self, call: Call, context: P2PContext) -> None                 # both sides send at will
    async def rpc_list(self, request: Query, context: P2PContext) -> AsyncIterator[Item]  # any number of messages

and the callers look like this::

    response = await stub.rpc_find(FindRequest(...), timeout=3.0)
    async with stub.rpc_download() as call: ...
    async for item in stub.rpc_list(Query(...)): ...

In the last shape the request, the response or both are iterators. Only the second shape carries payloads.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

from shoal.access.badges import ANY_ROLE, Roles
from shoal.base.tasks import cancel_and_wait
from shoal.errors import P2PDaemonError, ProtocolError, StreamClosedError
from shoal.net.connection import Call, Connection
from shoal.net.transport import H, Header
from shoal.peers.identity import PeerID


@dataclass(frozen=True)
class P2PContext:
    """The two sides of a call, and the caller's rights."""

    handle_name: str
    local_id: PeerID
    remote_id: PeerID
    """The caller; its identity has been proven."""
    roles: Roles = ANY_ROLE
    """What the caller may do. In an open run, everything."""


@dataclass(frozen=True)
class Method:
    """One remotely callable method."""

    name: str
    request_type: type[Header] | None
    """``None`` for a method that takes the :class:`Call` itself."""
    response_type: type[Header] | None
    takes_stream: bool = False
    """There may be any number of requests."""
    gives_stream: bool = False
    """There may be any number of responses."""
    is_patient: bool = False
    """The method has its own time limits for a silent caller, see :func:`patient`."""
    roles: Roles = Roles.TRAIN
    """In a private run, both caller and callee need one of these roles."""

    @property
    def is_streaming(self) -> bool:
        return self.takes_stream or self.gives_stream


@dataclass(frozen=True)
class Handler:
    """A method that is registered at a peer."""

    method: Method
    function: Callable[..., Any]


class Gate(Protocol):
    """Decides which peers may call which handlers, once per connection."""

    def guards(self, handle: str) -> bool:
        """Whether only members may call this handler."""

    async def enter(self, connection: Connection) -> None:
        """Prove to the other side that this peer is a member, and check the other side's proof.

        Raises:
            P2PDaemonError: one of the two is not a member.
        """


class Peer(Protocol):
    """The peer that serves methods, and calls those of others."""

    peer_id: PeerID

    async def call(
        self,
        peer: PeerID,
        handle: str,
        request: Header,
        response_type: type[H],
        timeout: float | None = None,
        *,
        roles: Roles = Roles.TRAIN,
    ) -> H:
        """Call a method that takes one message and returns one."""

    def open_call(self, peer: PeerID, handle: str, *, roles: Roles = Roles.TRAIN) -> AbstractAsyncContextManager[Call]:
        """Call a method with any number of messages."""

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """Serve methods by name."""

    def remove_handlers(self, names: Iterable[str]) -> None:
        """Stop serving these methods."""

    def round_trip_to(self, peer: PeerID) -> float:
        """The shortest measured round trip to a peer, in seconds; 0 if there is none."""

    def drop_idle(self, peer: PeerID) -> None:
        """Let the next call to a peer be made over a new connection."""

    def replace_arranged(self, peer: PeerID, count: int) -> None:
        """The same for connections that relays have arranged: make new ones at once, for all calls together."""

    def note_silence(self, peer: PeerID) -> None:
        """A connection to a peer has fallen silent."""


F = TypeVar("F", bound=Callable[..., Any])


def patient(method: F) -> F:
    """Mark an ``rpc_*`` method whose callers may be silent for long, because they wait for something themselves.

    Such a method has its own time limits. Any other method drops a caller that says nothing for a minute while the
    method waits for it, see ``seconds_of_silence`` of :class:`~shoal.net.limits.Limits`. The first message must always
    come soon.
    """
    method.is_patient = True  # type: ignore[attr-defined]
    return method


def open_to(roles: Roles) -> Callable[[F], F]:
    """Mark an ``rpc_*`` method that peers with other roles may call than the rest of its class."""

    def mark(method: F) -> F:
        method.roles = roles  # type: ignore[attr-defined]
        return method

    return mark


_methods: dict[type, tuple[Method, ...]] = {}


def methods_of(servicer: type) -> tuple[Method, ...]:
    """The remotely callable methods of a class.

    Raises:
        TypeError: a method's annotations are not one of the three shapes.
    """
    if servicer not in _methods:
        _methods[servicer] = _inspect_methods(servicer)
    return _methods[servicer]


def _inspect_methods(servicer: type) -> tuple[Method, ...]:
    found = []
    for name, function in inspect.getmembers(servicer, inspect.isfunction):
        if not name.startswith("rpc_"):
            continue
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters)[1:]
        request_type, takes_stream = _message_type(hints.get(parameters[0]) if parameters else None)
        response_type, gives_stream = _message_type(hints.get("return"))
        is_patient = getattr(function, "is_patient", False)
        roles = getattr(function, "roles", getattr(servicer, "roles", Roles.TRAIN))
        if request_type is Call and not takes_stream:
            found.append(Method(name, None, None, is_patient=is_patient, roles=roles))
        elif _is_header(request_type) and _is_header(response_type):
            found.append(Method(name, request_type, response_type, takes_stream, gives_stream, is_patient, roles))
        else:
            raise TypeError(
                f"{servicer.__name__}.{name} must be (self, request: Header, context) -> Header or (self, call: Call, "
                "context) -> None, with subclasses of shoal.p2p.Header; for any number of messages, with "
                "AsyncIterator[Header] for the request, the response or both"
            )
    return tuple(found)


def _message_type(annotation: Any) -> tuple[Any, bool]:
    """The type of a message, and whether there may be any number of them."""
    if get_origin(annotation) in (AsyncIterator, AsyncIterable, AsyncGenerator):
        return get_args(annotation)[0], True
    return annotation, False


def _is_header(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Header)


class StubBase:
    """Calls the methods of a servicer at another peer; made by :meth:`ServicerBase.get_stub`."""

    def __init__(self, p2p: Peer, peer: PeerID, servicer: type[ServicerBase], namespace: str | None) -> None:
        self._p2p = p2p
        self.peer = peer
        """The other peer."""
        self.servicer = servicer
        """The class whose methods are called."""
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        for method in methods_of(self.servicer):
            if method.name == name:
                # Not cached: a stub that refers to itself would wait for the garbage collector after each call.
                return self._make_caller(method)
        raise AttributeError(f"{self.servicer.__name__} has no remote method {name}")

    @property
    def round_trip(self) -> float:
        """The shortest measured round trip to the other peer, in seconds; 0 if there is none."""
        return self._p2p.round_trip_to(self.peer)

    def dial_anew(self) -> None:
        """Let the next call be made over a new connection: idle ones may have broken without a sign."""
        self._p2p.drop_idle(self.peer)

    def replace_arranged(self, count: int) -> None:
        """The same for connections that relays have arranged; ``count`` new ones are made at once."""
        self._p2p.replace_arranged(self.peer, count)

    def note_silence(self) -> None:
        """A connection to the other peer has fallen silent, so others to it, or to relays, may be broken, too."""
        self._p2p.note_silence(self.peer)

    def context_of(self, method: str) -> P2PContext:
        """The context of a call, seen from the caller."""
        return P2PContext(self.servicer.handle_name(method, self._namespace), self._p2p.peer_id, self.peer)

    def _make_caller(self, method: Method) -> Callable[..., Any]:
        handle = self.servicer.handle_name(method.name, self._namespace)

        def unary(request: Header, timeout: float | None = None) -> Awaitable[Header]:
            assert method.response_type is not None
            return self._p2p.call(self.peer, handle, request, method.response_type, timeout, roles=method.roles)

        if not method.is_streaming and method.request_type is not None:
            return unary

        def stream() -> AbstractAsyncContextManager[Call]:
            return self._p2p.open_call(self.peer, handle, roles=method.roles)

        def iterate(request: Header | AsyncIterable[Header]) -> Responses:
            return Responses(stream, method, request)

        def collect(requests: AsyncIterable[Header], timeout: float | None = None) -> Awaitable[Header]:
            return iterate(requests).only(timeout)

        if method.is_streaming:
            return iterate if method.gives_stream else collect
        return stream


class ServicerBase:
    """Base class of objects whose ``rpc_*`` methods other peers may call."""

    roles: ClassVar[Roles] = Roles.TRAIN
    """In a private run, both sides of a call need one of these roles; :func:`open_to` makes exceptions."""

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        """The name on the wire: ``[namespace::]Class.rpc_x``."""
        name = f"{cls.__name__}.{method}"
        return name if namespace is None else f"{namespace}::{name}"

    async def add_p2p_handlers(
        self, p2p: Peer, wrapper: Any = None, *, namespace: str | None = None, balanced: bool = False
    ) -> None:
        """Let other peers call this object.

        Args:
            p2p: the peer that serves.
            wrapper: object whose methods replace those of this one, such as an access check; a method that returns
                ``None`` refuses to answer.
            namespace: distinguishes this object from others of the same class.
            balanced: accepted for compatibility: one object serves all calls of a name.

        Raises:
            P2PDaemonError: an object of this class and namespace is served already.
        """
        target = self if wrapper is None else wrapper
        handlers = {
            self.handle_name(method.name, namespace): Handler(method, getattr(target, method.name))
            for method in methods_of(type(self))
        }
        p2p.add_handlers(handlers)

    async def remove_p2p_handlers(self, p2p: Peer, *, namespace: str | None = None) -> None:
        """Stop serving; calls in progress continue."""
        p2p.remove_handlers(self.handle_name(method.name, namespace) for method in methods_of(type(self)))

    @classmethod
    def get_stub(cls, p2p: Peer, peer: PeerID, *, namespace: str | None = None) -> StubBase:
        """An object that calls the methods of this class at ``peer``."""
        return StubBase(p2p, peer, cls, namespace)


class Messages(AsyncIterator[Header]):
    """The messages of the other side of a call, until it ends its side."""

    def __init__(self, call: Call, message_type: type[Header]) -> None:
        self._call, self._type = call, message_type

    async def __anext__(self) -> Header:
        message = await self._call.receive(self._type)
        if message is None:
            raise StopAsyncIteration
        if self._call.payload_size:
            raise ProtocolError("a message with a payload, in a call that has none")
        return message


async def receive_only(call: Call, message_type: type[H], name: str) -> H:
    """The only message that the other side sends."""
    message = await call.receive(message_type)
    if message is None or call.payload_size or not call.received_end:
        raise ProtocolError(f"{name} takes exactly one message without a payload")
    return message


async def serve_streams(handler: Handler, call: Call, context: P2PContext) -> None:
    """Serve one call of a method that takes a stream, returns one, or both.

    A method returns a stream if it is an asynchronous generator, or a coroutine that returns an asynchronous iterator.
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
            # Close it even if the caller leaves while an item is being sent.
            await stack.enter_async_context(aclosing(result))
        async for response in result:
            await call.send(response)
    await call.send_end()


class Responses(AsyncIterator[Header]):
    """The answers of a method that returns a stream; the call begins when the first item is requested.

    Closing or dropping this object ends the call. Some programs await it first, which changes nothing.
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
        """The answer of a method that returns exactly one.

        Raises:
            ProtocolError: there is no answer, or more than one.
            TimeoutError: the answer does not come within ``timeout`` seconds.
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
        # Send the opening of the call now: from here on two tasks use the connection, one to send and one to receive.
        await call.connection.flush()
        sending = asyncio.ensure_future(_send_all(call, requests))
        try:
            async for response in Messages(call, method.response_type):
                yield response
        except StreamClosedError:
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                raise error from None  # the failed sender has cut the connection, so its error is the cause
            raise
        finally:
            await cancel_and_wait(sending)


async def _send_all(call: Call, messages: AsyncIterable[Header]) -> None:
    try:
        async for message in messages:
            await call.send(message)
        await call.send_end()
    except Exception:
        call.connection.abort()  # otherwise the other side would wait for more
        raise
