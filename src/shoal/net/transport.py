"""The interface of every transport, and the messages on it.

A transport makes authenticated, ordered, reliable, flow-controlled byte streams between two peers. Everything else
uses only :class:`Stream` and :class:`Transport`, so a new way to reach a peer (QUIC, a simulated network) is one more
implementation and no change elsewhere.

A message is a fixed prefix, a small typed header, and a payload that is never parsed::

    version  kind  flags   header length  payload length
    u8       u8    u16     u32            u32              big-endian, 12 bytes
    header: msgpack map, decoded into a typed struct; unknown fields are ignored. Zero bytes: only an end
    payload: raw bytes, such as a part of a tensor, sent from and received into the caller's memory

Sizes are checked before memory is allocated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar, Union

import msgspec

from shoal.base.logs import one_line
from shoal.base.tasks import cancel_and_wait, has_succeeded
from shoal.errors import ProtocolError, StreamClosedError
from shoal.peers.identity import MAX_PEER_ID_BYTES, Identity, PeerID
from shoal.peers.multiaddr import Multiaddr

if TYPE_CHECKING:
    from shoal.access.badges import Badge
    from shoal.access.membership import Membership

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Bytes to send. A memoryview must be contiguous and of format ``B``."""

VERSION = 2
# Chosen, like the sizes below. A header is decoded in one piece from memory, so it is small; a payload goes straight to
# its destination.
MAX_HEADER_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**31
# Payloads go to the stream in pieces of this size: a slow reader holds up the writer early, and caches stay warm.
WRITE_PIECE_BYTES = 2**18
# Memory beyond this grows with the bytes that have arrived, not with what the other side claims to send.
READ_STEP_BYTES = 2**16

_PREFIX = struct.Struct(">BBHII")
PREFIX_BYTES = _PREFIX.size


class Stream(ABC):
    """One two-way byte pipe to a peer whose identity has been proven. One task may read while another one writes."""

    remote: PeerID
    remote_address: Multiaddr | None
    """Where the other side is seen from here, as far as the transport knows."""
    shown_badge: bytes = b""
    """The badge that the other side has shown, if it has dialled; not checked yet."""
    badge: Badge | None = None
    """The other side's badge, once it was checked; ``None`` in an open run."""
    local_address: Multiaddr | None = None
    """This end's address and port as this machine sees them, as far as the transport knows."""
    received = 0
    """How many bytes have arrived: it shows a waiting reader whether more are coming."""
    via: PeerID | None = None
    """The relay that carries it, which sees only the number of bytes; ``None`` = a direct connection."""

    is_arranged = False
    """Whether it is direct, but was arranged by a relay: without a relay it cannot be replaced."""

    @property
    def is_relayed(self) -> bool:
        """Whether its bytes pass through a relay."""
        return self.via is not None

    @property
    def is_awaited(self) -> bool:
        """Whether a reader here waits for bytes that have not arrived."""
        return False

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the connection is over: nothing can be written, and only bytes that have arrived can be read."""

    @abstractmethod
    async def write(self, *buffers: Buffer) -> None:
        """Send buffers, waiting while the other side is slow. The caller may change them as soon as this returns.

        Raises:
            StreamClosedError: the connection ended.
        """

    def write_if_free(self, data: bytes) -> bool:
        """Send a few bytes unless that would have to wait for earlier ones; returns whether they were sent.

        Do not call it while another task writes.
        """
        return False

    @abstractmethod
    async def read_exactly_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer (format ``B``, writable) with the next bytes.

        Raises:
            StreamClosedError: the connection ended before the buffer was full.
        """

    def take(self, size: int) -> bytearray | None:
        """The next bytes if all of them have arrived; otherwise ``None``, and nothing is taken.

        A small message that came in one piece is read this way without the cost of waiting.
        """
        return None

    def limit_backlog(self, nbytes: int | None) -> None:  # noqa: B027
        """Let at most about this many bytes wait unsent while the other side is slow; ``None`` restores the default.

        This is for work shared among several streams: no other stream can take over bytes that wait here.
        """

    @abstractmethod
    def on_closed(self, callback: Callable[[], object] | None) -> None:
        """Set a callback for the end of the connection, called once; replaces the previous one.

        It is called soon if the connection has ended already. It is not called if the connection ends because a reader
        of this side was cancelled: otherwise a time limit for the reader would look like a broken connection.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection after what was written has been sent."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now; unsent data is dropped."""


OnStream = Callable[[Stream], None]

HANDSHAKE_TIMEOUT = 5.0
"""Seconds to connect and prove both identities; also how long a listener waits for an unproven dialler. Chosen."""
COOKIE_BYTES = 32  # 256 bits, which nobody can guess
COOKIE_SECONDS = 10.0
"""How long the listener waits for the session that a cookie announces. Chosen."""


ROUND_TRIP = 0.1
"""Assumed seconds where it was not measured. Chosen: between two continents."""


class Session(ABC):
    """A raw two-way byte pipe on which nobody has proven anything yet.

    It is opened to an ordinary listening port with a cookie that the listener has given out before, or results from a
    punch. Later it becomes a stream (:meth:`Transport.authenticate`, :meth:`Transport.receive`) or is joined to another
    session (:class:`Splice`); each of these takes it over.
    """

    local_address: Multiaddr | None
    """This end's address and port, as this machine sees them."""
    remote_address: Multiaddr | None
    """Where the other end is seen from here, behind a router the router's address and port."""
    look_seconds: float = math.inf
    """How often to ask :meth:`is_broken_off` while nobody reads."""

    @abstractmethod
    async def write(self, data: Buffer) -> None:
        """Send some bytes.

        Raises:
            StreamClosedError: the connection ended.
        """

    def write_some(self, data: Buffer) -> int:
        """Send as much as goes without waiting; returns the number of bytes sent."""
        return 0

    @abstractmethod
    async def read_exactly(self, size: int) -> bytes:
        """The next bytes. No more are taken off the wire, because what follows may be for another reader.

        Raises:
            StreamClosedError: the connection ended before.
        """

    @abstractmethod
    async def read_some(self) -> Buffer:
        """The next bytes, as many as have arrived together; none at the end.

        Raises:
            StreamClosedError: this side has ended the connection, or it has broken.
        """

    def is_broken_off(self) -> bool:
        """Whether the other side has reset the connection, as far as can be seen while nobody reads."""
        return False

    @abstractmethod
    def abort(self) -> None:
        """End the connection now. Does nothing once the session was taken over."""


class ExpectedSessions:
    """Cookies that this peer has given out, and the futures that wait for their sessions."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, asyncio.Future[Session]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, cookie: bytes) -> asyncio.Future[Session]:
        """A future for the session with this cookie; it is cancelled when the time is up."""
        if len(cookie) != COOKIE_BYTES:
            raise ValueError(f"a cookie has {COOKIE_BYTES} bytes, not {len(cookie)}: take os.urandom({COOKIE_BYTES})")
        if cookie in self._waiting:
            raise ValueError("this cookie is in use already: make a new one for each session")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Session] = loop.create_future()
        self._waiting[cookie] = future
        expiry = loop.call_later(COOKIE_SECONDS, future.cancel)

        def forget(_: asyncio.Future[Session]) -> None:
            expiry.cancel()
            if self._waiting.get(cookie) is future:
                del self._waiting[cookie]

        future.add_done_callback(forget)
        return future

    def take(self, cookie: bytes) -> asyncio.Future[Session] | None:
        """The future that waits for this cookie, or ``None``. A cookie is taken once."""
        future = self._waiting.pop(cookie, None)
        return None if future is None or future.done() else future

    def meet(self, cookie: bytes, session: Session) -> None:
        """Hand a session to the future that waits for it; end it if there is none."""
        future = self.take(cookie)
        if future is None:
            session.abort()
        else:
            future.set_result(session)

    def close(self) -> None:
        """Stop waiting for all sessions."""
        for future in [*self._waiting.values()]:
            future.cancel()


def abort_late(future: asyncio.Future[Stream]) -> None:
    """End a stream that comes late: another one was faster, or nobody waits any more."""
    if has_succeeded(future):
        future.result().abort()


def _ignore() -> None:
    """Do nothing."""


ON_ANSWER: ContextVar[Callable[[], object]] = ContextVar("ON_ANSWER", default=_ignore)
"""Called by :meth:`Transport.dial` when a machine has answered at the address, so that only the handshake is left."""


MAY_CONNECT: ContextVar[Callable[[Multiaddr], bool] | None] = ContextVar("MAY_CONNECT", default=None)
"""Asked by :meth:`Transport.dial` and :meth:`Transport.open_session` about each IP address, resolved ones included;
``None`` = connect to any address."""


class Throttle(ABC):
    """The rate that several joined pairs of sessions share; see :class:`Splice`."""

    @abstractmethod
    def take(self, nbytes: int) -> float:
        """Count bytes that have arrived on one half; returns the seconds for which that half must pause reading."""


class Splice:
    """Joins two sessions: each sends what arrives on the other one.

    Bytes are neither inspected nor stored: while one side takes none, the other one is not read. When either side ends,
    both end.

    Args:
        throttle: limits how fast bytes may arrive on each.
        idle_seconds: it also ends when nothing has moved for this long.
    """

    def __init__(self, first: Session, second: Session, throttle: Throttle, idle_seconds: float) -> None:
        self._ends = (first, second)
        self._throttle, self._idle_seconds = throttle, idle_seconds
        self._now = asyncio.get_running_loop().time
        self._moved_at = self._now()

    async def run(self) -> None:
        """Copy until one side ends."""
        first, second = self._ends
        ways = [asyncio.ensure_future(self._copy(*ends)) for ends in ((first, second), (second, first))]
        look_seconds = min(first.look_seconds, second.look_seconds)
        try:
            while (left := self._moved_at + self._idle_seconds - self._now()) > 0:
                done, _ = await asyncio.wait(ways, timeout=min(left, look_seconds), return_when=asyncio.FIRST_COMPLETED)
                if done or first.is_broken_off() or second.is_broken_off():
                    break
        finally:
            await cancel_and_wait(*ways)
            for end in self._ends:
                end.abort()

    async def _copy(self, source: Session, target: Session) -> None:
        with contextlib.suppress(StreamClosedError):
            while data := await source.read_some():
                self._moved_at = self._now()
                pause = self._throttle.take(len(data))
                sent = target.write_some(data)
                if sent < len(data):
                    await target.write(memoryview(data)[sent:])
                if pause > 0:
                    await asyncio.sleep(pause)


class Transport(ABC):
    """A way to reach peers, on behalf of one identity."""

    identity: Identity
    membership: Membership | None = None
    """The private run that this peer takes part in; ``None`` for an open one."""
    is_behind_routers = False
    """Whether it uses real networks, whose routers may be asked to forward a port."""
    is_proxied = False
    """Whether connections to the outside go through a proxy, so that punching is impossible."""
    arrivals = 0
    """How many connections others have made to this peer, proven or not."""
    on_addresses_changed: Callable[[], object] | None = None
    """Called when the addresses of this peer have changed, so that others know outdated ones."""

    @abstractmethod
    def supports(self, address: Multiaddr) -> bool:
        """Whether this transport understands such addresses."""

    def listens_by_default(self) -> list[str]:
        """The addresses to listen on if the user gives none."""
        return ["/ip4/0.0.0.0/tcp/0"]

    @abstractmethod
    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        """Accept streams from other peers; ``on_stream`` gets each one after the dialler has proven who it is.

        Returns:
            The addresses where others may reach this peer, without ``/p2p``.

        Raises:
            P2PDaemonError: this peer cannot listen there; the text says why.
        """

    @abstractmethod
    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        """Where others may reach this peer at present, the best first, without ``/p2p``; empty if it does not listen.

        Args:
            latest: look at the networks now; otherwise a recent look is good enough.
        """

    def is_inside(self, address: Multiaddr) -> bool:
        """Whether an address belongs to this machine or to one of its own networks. Peers there cannot tell what hosts
        elsewhere can reach."""
        return True

    def is_here(self, address: Multiaddr) -> bool:
        """Whether an address is one of this machine itself."""
        return True

    def is_elsewhere(self, address: Multiaddr) -> bool:
        """Whether an address is a private one in a network that this machine is not part of."""
        return False

    def worth_dialling(self, addresses: Sequence[Multiaddr], *, have_others: bool = False) -> list[Multiaddr]:
        """The addresses of another peer that may work from here, in the order to try them.

        Args:
            have_others: whether there are other ways to that peer, so that unlikely addresses can be left out.
        """
        return [address for address in addresses if self.supports(address)]

    @abstractmethod
    async def dial(self, address: Multiaddr, expected_peer: PeerID | None) -> Stream:
        """Connect to a peer and check that it is the expected one.

        Args:
            expected_peer: ``None``: any peer; the stream says which one has proven to be there.

        Raises:
            IdentityMismatchError: another peer answered.
            DialError: the peer could not be reached, or is no shoal peer; the text says why.
        """

    # --- sessions -----------------------------------------------------------------------------------------------------

    def new_cookie(self) -> bytes:
        """A cookie that nobody can guess."""
        return secrets.token_bytes(COOKIE_BYTES)

    @abstractmethod
    def expect_session(self, cookie: bytes) -> asyncio.Future[Session]:
        """From now on, accept one session with this cookie. Cancelling the future ends that.

        A cookie is good for one session. The future is cancelled after :data:`COOKIE_SECONDS`.
        """

    @abstractmethod
    async def open_session(
        self, address: Multiaddr, cookie: bytes, *, punchable: bool = False, beside: Session | None = None
    ) -> Session:
        """Open a session to the listening port of the peer that has given out this cookie.

        Args:
            punchable: open it from a fresh local port, which :meth:`punch` can use at the same time.
            beside: open it from the local port of this punchable session.

        Raises:
            DialError: nobody answers there.
        """

    @abstractmethod
    async def authenticate(self, session: Session, expected_peer: PeerID) -> Stream:
        """Shake hands as the dialler, on a session whose other end calls :meth:`receive`.

        A failure ends the session, and is raised as by :meth:`dial`.
        """

    @abstractmethod
    def receive(self, session: Session, on_stream: OnStream) -> None:
        """Shake hands as the listener on this session, as if its other end had connected to a listening port."""

    @abstractmethod
    def punch(
        self, session: Session, candidates: Sequence[Multiaddr], seconds: float, round_trip: float = ROUND_TRIP
    ) -> AsyncGenerator[Session, None]:
        """Try to connect to candidates from the local port of a punchable session, and listen there meanwhile.

        Args:
            session: gives the port; it may have been taken over by now.
            seconds: how long to try.
            round_trip: seconds to the other side and back through the relay; pauses between attempts depend on it.

        Yields:
            Each connection, whose other side has proven nothing yet. It ends after ``seconds``, or when closed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and drop every connection that is still being made."""


class Kind(IntEnum):
    """The kind of a message."""

    HELLO = 1  # facts about the sender; the first message of each side
    OPEN = 2  # start of a call; names the handler
    ITEM = 3  # one message of the call
    ERROR = 4  # the call has failed; ends the sender's side
    ALIVE = 5  # heartbeat: shows that the connection works


_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Flag(IntEnum):
    NONE = 0
    END = 1  # the sender's last message of this call


_END = int(Flag.END)  # arithmetic with members of an enum is slow


class Prefix(NamedTuple):
    kind: Kind
    is_end: bool
    header_bytes: int
    payload_bytes: int


class Header(msgspec.Struct):
    """Base class of everything typed that peers send each other.

    Fields may be added later, with defaults: an older peer ignores fields that it does not know. A message of several
    kinds has a base class with a tag, and one subclass for each kind.
    """


# Types of fields: decoding refuses values that no honest peer can mean, NaN and infinity among them. Above this number
# a float cannot represent every integer.
MOST = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=float(MOST))]
Moment = Amount
"""DHT time."""
PeerIDBytes = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_PEER_ID_BYTES)]

H = TypeVar("H", bound=Header)
_encoder = msgspec.msgpack.Encoder()


@functools.cache
def _decoder(header_type: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    kinds = header_type.__subclasses__() if header_type.__struct_config__.tag is not None else ()
    return msgspec.msgpack.Decoder(Union[tuple(kinds)] if kinds else header_type)  # noqa: UP007 - a tuple of types


def decode_header(data: bytes | bytearray, header_type: type[H]) -> H:
    """Parse a header.

    Raises:
        ProtocolError: the data is not such a header.
    """
    try:
        header: H = _decoder(header_type).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"invalid {header_type.__name__}: {one_line(str(e))}") from None
    return header


def pack(kind: Kind, header: Header | None, payload_bytes: int = 0, *, end: bool = False) -> bytes:
    """Prefix and header of a message; the payload follows. Without a header, the message is only an end.

    Raises:
        ValueError: the message is too large to send.
    """
    encoded = b"" if header is None else _encoder.encode(header)
    if len(encoded) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a message of {len(encoded)} + {payload_bytes} bytes is over the limit of {MAX_HEADER_BYTES} for its "
            f"header or {MAX_PAYLOAD_BYTES} for its payload: send it in parts"
        )
    return _PREFIX.pack(VERSION, kind, Flag.END if end else Flag.NONE, len(encoded), payload_bytes) + encoded


def pieces_of(head: bytes, payload: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """The pieces to write one by one: the head and small buffers together, large buffers in parts."""
    waiting: list[Buffer] = [head]
    room = WRITE_PIECE_BYTES
    for buffer in payload:
        view = memoryview(buffer)
        while len(view):
            piece, view = view[:room], view[room:]
            waiting.append(piece)
            room -= len(piece)
            if not room:
                yield waiting
                waiting, room = [], WRITE_PIECE_BYTES
    if waiting:
        yield waiting


def parse_prefix(raw: bytes | bytearray) -> Prefix:
    """Check a prefix.

    Raises:
        ProtocolError: the bytes are no message of this protocol.
    """
    version, kind, flags, header_bytes, payload_bytes = _PREFIX.unpack(raw)
    if version != VERSION:
        raise ProtocolError(f"message of protocol version {version}, this peer speaks version {VERSION}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"message of unknown kind {kind}")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"message of {header_bytes} + {payload_bytes} bytes is over the limits")
    # Prefix(...) takes three times as long, which adds up over all messages.
    return tuple.__new__(Prefix, (known, bool(flags & _END), header_bytes, payload_bytes))


async def read_new(stream: Stream, size: int, take_memory: Callable[[int], object] | None = None) -> bytearray:
    """Receive bytes into new memory, which grows only as they arrive.

    Args:
        take_memory: called with the size before memory beyond the first step is allocated, never for more than has
            arrived already. It raises if that is too much.
    """
    data = bytearray(min(size, READ_STEP_BYTES))
    filled = 0
    while True:
        with memoryview(data) as whole, whole[filled:] as rest:
            await stream.read_exactly_into(rest)
        filled = len(data)
        if filled == size:
            return data
        more = min(filled, size - filled)
        if take_memory is not None:
            take_memory(more)
        data.extend(bytes(more))


# --- frames: messages on a session before it becomes a stream or is joined to another one -----------------------------

# They are sent in the clear by a peer that has proven nothing, so they are small: a few addresses. Chosen.
MAX_FRAME_BYTES = 2048
_LENGTH = struct.Struct(">H")


def pack_frame(header: Header) -> bytes:
    """A frame as bytes: its length (u16, big-endian) and a msgpack map, like the headers of messages.

    Raises:
        ValueError: it is too large.
    """
    encoded = _encoder.encode(header)
    if len(encoded) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a {type(header).__name__} of {len(encoded)} bytes is over the limit of {MAX_FRAME_BYTES} for a frame: "
            "say less in it"
        )
    return _LENGTH.pack(len(encoded)) + encoded


async def send_frame(session: Session, header: Header) -> None:
    """Send a frame.

    Raises:
        StreamClosedError: the connection ended.
        ValueError: the frame is too large.
    """
    await session.write(pack_frame(header))


async def receive_frame(session: Session, header_type: type[H]) -> H:
    """Receive a frame of a certain type; nothing after it is read.

    Raises:
        ProtocolError: something else arrived.
        StreamClosedError: the connection ended.
    """
    (length,) = _LENGTH.unpack(await session.read_exactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a frame of {length} bytes instead of a {header_type.__name__}: the limit is {MAX_FRAME_BYTES}"
        )
    return decode_header(await session.read_exactly(length), header_type)
