"""Short typed messages on a session, before it becomes a stream or is joined to another one.

A frame is its length (u16, big-endian) and a msgpack map, like the headers of messages. It is sent in the clear and by
somebody who has proven nothing, so it is small, and nothing but addresses and beginnings is told in it.
"""

from __future__ import annotations

import struct

import msgspec

from shoal.errors import ProtocolError
from shoal.net.transport import H, Header, Session, decode_header

MAX_FRAME_BYTES = 2048
_LENGTH = struct.Struct(">H")
_encoder = msgspec.msgpack.Encoder()


def pack_frame(header: Header) -> bytes:
    """A frame as bytes.

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
    """Receive a frame of a certain type; nothing behind it is read.

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
