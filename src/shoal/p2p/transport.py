"""What every transport offers, and the messages on it.

A transport makes authenticated, ordered, reliable, flow-controlled byte streams between two peers. All else works on
:class:`Stream` and :class:`Transport` alone, so that a new way to reach a peer (a relay, QUIC, a simulated network) is
one more implementation and no change elsewhere.

A message is a fixed prefix, a small typed header, and a payload that is never parsed::

    version  kind  flags   header length  payload length
    u8       u8    u16     u32            u32              big-endian, 12 bytes
    header: msgpack map, decoded into a typed struct; unknown fields are ignored. Zero bytes of it: nothing but an end
    payload: raw bytes, such as a part of a tensor, sent from and received into the caller's memory

Sizes are checked before memory is taken for them.
"""

from __future__ import annotations

import functools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from shoal.errors import ProtocolError
from shoal.p2p.identity import MAX_PEER_ID_BYTES, Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Bytes to send. A memoryview must be contiguous and of format ``B``."""

VERSION = 1
# A header is decoded as a whole, from memory; a payload goes where it belongs as it arrives.
MAX_HEADER_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**31
# Payloads go to the stream in pieces of this size: a slow reader holds up the writer early, and caches stay warm.
WRITE_PIECE_BYTES = 2**18
# Memory for something larger grows with what has arrived, not with what the other side claims to send.
READ_STEP_BYTES = 2**16

_PREFIX = struct.Struct(">BBHII")
PREFIX_BYTES = _PREFIX.size


class Stream(ABC):
    """One two-way byte pipe to a peer whose identity has been proven. One task may read while another one writes."""

    remote: PeerID
    remote_address: Multiaddr | None
    """Where the other side is seen from here, as far as the transport knows."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """The connection is over: nothing more can be written, only what has arrived can be read."""

    @abstractmethod
    async def write(self, *buffers: Buffer) -> None:
        """Send buffers, waiting while the other side is slow. They may be changed as soon as this returns.

        Raises:
            StreamClosedError: the connection ended.
        """

    @abstractmethod
    async def read_exactly_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer (format ``B``, writable) with the next bytes.

        Raises:
            StreamClosedError: the connection ended before the buffer was full.
        """

    def take(self, size: int) -> bytearray | None:
        """The next bytes if all of them are here already; otherwise ``None``, and nothing is taken.

        Spares the small messages that came in one piece what waiting costs.
        """
        return None

    def limit_backlog(self, nbytes: int | None) -> None:  # noqa: B027
        """Let no more than about so many bytes wait here unsent while the other side is slow; ``None``: as usual.

        For work that is shared among several streams: what waits here, none of the others can take over.
        """

    @abstractmethod
    def on_closed(self, callback: Callable[[], object] | None) -> None:
        """Call this once when the connection ends; at once if it has. Replaces the previous callback."""

    @abstractmethod
    def close(self) -> None:
        """End the connection after what was written has been sent."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now; unsent data is dropped."""


OnStream = Callable[[Stream], None]


class Transport(ABC):
    """A way to reach peers, on behalf of one identity."""

    identity: Identity
    on_addresses_changed: Callable[[], object] | None = None
    """Called when this peer has become reachable elsewhere, so that what others were told is not true any more."""

    @abstractmethod
    def supports(self, address: Multiaddr) -> bool:
        """Whether this transport understands such addresses."""

    def listens_by_default(self) -> list[str]:
        """Where a peer listens that has not been told where."""
        return ["/ip4/0.0.0.0/tcp/0"]

    @abstractmethod
    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        """Accept streams from other peers; ``on_stream`` gets each one after the dialler has proven who it is.

        Returns:
            The addresses where others may reach this peer, without ``/p2p``.

        Raises:
            P2PDaemonError: it is not possible to listen there; the text says why.
        """

    @abstractmethod
    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        """Where others may reach this peer at present, the best first, without ``/p2p``; empty if it does not listen.

        Args:
            latest: look again; otherwise what was true a short while ago will do.
        """

    def worth_dialling(self, addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
        """Those addresses of another peer at which it may be reached from here, in the order to try them."""
        return [address for address in addresses if self.supports(address)]

    @abstractmethod
    async def dial(self, address: Multiaddr, expected_peer: PeerID) -> Stream:
        """Connect to a peer and check that it is the expected one.

        Raises:
            IdentityMismatchError: somebody else answered.
            DialError: the peer could not be reached, or is no shoal peer; the text says why.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and drop every connection that is still being made."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1  # facts about the sender, first message of each side
    OPEN = 2  # start of a call: which handler
    ITEM = 3  # one message of the call
    ERROR = 4  # the call has failed; ends the sender's side


_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Flag(IntEnum):
    NONE = 0
    END = 1  # the sender's last message of this call


class Prefix(NamedTuple):
    kind: Kind
    is_end: bool
    header_bytes: int
    payload_bytes: int


class Header(msgspec.Struct):
    """Base class of everything typed that peers send each other.

    Fields may be added later: an older peer ignores what it does not know, a newer one must give defaults.
    """


# Kinds of fields: what no honest peer can mean is refused while a message is decoded, also NaN and infinity. Beyond
# this, a float can no longer count.
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
    return msgspec.msgpack.Decoder(header_type)


def decode_header(data: bytes | bytearray, header_type: type[H]) -> H:
    """Parse a header.

    Raises:
        ProtocolError: not such a header.
    """
    try:
        return cast("H", _decoder(header_type).decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"invalid {header_type.__name__}: {e}") from None


def pack(kind: Kind, header: Header | None, payload_bytes: int = 0, *, end: bool = False) -> bytes:
    """Prefix and header of a message; the payload is to follow. Without a header: nothing but an end.

    Raises:
        ValueError: too large to send.
    """
    encoded = b"" if header is None else _encoder.encode(header)
    if len(encoded) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a message of {len(encoded)} + {payload_bytes} bytes is over the limit of {MAX_HEADER_BYTES} for its "
            f"header or {MAX_PAYLOAD_BYTES} for its payload: send it in parts"
        )
    return _PREFIX.pack(VERSION, kind, Flag.END if end else Flag.NONE, len(encoded), payload_bytes) + encoded


def pieces_of(head: bytes, payload: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
    """What to write at a time: the head and small buffers together, large ones in pieces."""
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


async def read_prefix(stream: Stream) -> Prefix:
    """Receive and check the next prefix.

    Raises:
        ProtocolError: not a message of this protocol.
        StreamClosedError: the connection ended.
    """
    raw = stream.take(PREFIX_BYTES)
    if raw is None:
        raw = bytearray(PREFIX_BYTES)
        await stream.read_exactly_into(memoryview(raw))
    version, kind, flags, header_bytes, payload_bytes = _PREFIX.unpack(raw)
    if version != VERSION:
        raise ProtocolError(f"message of protocol version {version}, this peer speaks version {VERSION}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"message of unknown kind {kind}")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"message of {header_bytes} + {payload_bytes} bytes is over the limits")
    return Prefix(known, bool(flags & Flag.END), header_bytes, payload_bytes)


async def read_new(stream: Stream, size: int) -> bytearray:
    """Receive a number of bytes into new memory, which is taken only as they arrive."""
    data = bytearray(min(size, READ_STEP_BYTES))
    filled = 0
    while True:
        with memoryview(data) as whole, whole[filled:] as rest:
            await stream.read_exactly_into(rest)
        filled = len(data)
        if filled == size:
            return data
        data.extend(bytes(min(filled, size - filled)))
