"""Messages on a session that is not a stream yet: the length in two bytes, then a header."""

from __future__ import annotations

import struct

import msgspec

from shoal.errors import ProtocolError
from shoal.p2p.transport import H, Header, Session, decode_header

MAX_FRAME_BYTES = 2048
_LENGTH = struct.Struct(">H")
_encoder = msgspec.msgpack.Encoder()


async def send_frame(session: Session, header: Header) -> None:
    """Send a header.

    Raises:
        StreamClosedError: the session ended.
        ValueError: the header is too large.
    """
    data = _encoder.encode(header)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}: send less")
    await session.write(_LENGTH.pack(len(data)) + data)


async def receive_frame(session: Session, header_type: type[H]) -> H:
    """The next header.

    Raises:
        StreamClosedError: the session ended.
        ProtocolError: it is too large, or no such header.
    """
    (size,) = _LENGTH.unpack(await session.read_exactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes, over the limit of {MAX_FRAME_BYTES}")
    return decode_header(await session.read_exactly(size), header_type)
