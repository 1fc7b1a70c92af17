"""Nested structures of tensors on a call: lists, tuples and dictionaries of tensors and plain values.

A :class:`TensorList` comes first: the form of the structure, and the type and shape of each tensor. The values follow
in *pieces*, cut where a codec may cut, so that one piece is encoded while the one before is on its way. Sender and
receiver cut alike. Several pieces share a message as long as they are small::

    TensorList + pieces ─► Pieces ─► Pieces ─► …

Tensors without a codec leave from their own memory, and are received into that of the result. Integers are always sent
as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.base.logs import quoted
from shoal.base.tasks import cancel_and_wait, mark_retrieved, run_in_worker
from shoal.compression.base import (
    Buffer,
    CompressionBase,
    CompressionInfo,
    NoCompression,
    SerializedTensor,
    TensorMetadata,
    bytes_of,
    dtype_name,
    empty,
    plain,
)
from shoal.compression.serialization import codec_of
from shoal.errors import ProtocolError
from shoal.net.connection import Call
from shoal.net.transport import Header, Kind, pack

# The values of one piece. A multiple of the blocks of all codecs. Chosen: a fraction of a second on a slow line.
PIECE_VALUES = 2**18
# More than a piece has on the wire.
PIECE_BYTES = 2**31
# Pieces share a message up to this size in bytes. Chosen: beyond it, a message of its own costs next to nothing.
MESSAGE_BYTES = 2**16
# The most tensors of a structure, its most places (tensors, plain values, lists, tuples and dictionaries), and its
# depth. Chosen: far more than a module has.
MAX_TENSORS, MAX_PLACES, MAX_DEPTH = 1024, 2048, 16
# Pieces of up to so many values are encoded in the loop. Chosen: that takes a fraction of a millisecond.
_INLINE_VALUES = 2**12
# The codec of everything that is not rounded.
EXACT = NoCompression()

CodecFor = Callable[[torch.Tensor], CompressionBase]
"""Chooses the codec of a tensor of floating-point numbers."""
Plain = None | bool | int | float | str
"""Values of a structure that are sent as they are."""


class TensorList(Header):
    """Announces tensors; the first pieces are its payload."""

    form: Any
    tensors: tuple[TensorMetadata, ...]
    sizes: tuple[int, ...] = ()
    """Bytes of each piece in this message."""


class Pieces(Header):
    """More pieces of the tensors that were announced."""

    sizes: tuple[int, ...]


# --- forms ------------------------------------------------------------------------------------------------------------


def form_of(structure: Any) -> tuple[Any, list[torch.Tensor]]:
    """Take a structure apart: its form, which msgpack can pack, and its tensors.

    Named tuples become plain ones.

    Raises:
        TypeError: it contains something that cannot be sent.
    """
    tensors: list[torch.Tensor] = []

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return "x"
        if isinstance(value, Plain):
            return ["v", value]
        if isinstance(value, list | tuple):
            return ["t" if isinstance(value, tuple) else "l", [walk(each) for each in value]]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return ["d", [[key, walk(each)] for key, each in value.items()]]
        raise TypeError(
            f"only tensors, numbers, strings, and lists, tuples and dictionaries of them can be sent, got "
            f"{type(value).__name__}: {quoted(value)}"
        )

    return walk(structure), tensors


def tensors_of(structure: Any) -> list[torch.Tensor]:
    """The tensors of a structure, in order.

    Raises:
        TypeError: as for :func:`form_of`.
    """
    return form_of(structure)[1]


def with_form(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put a structure together; the opposite of :func:`form_of`.

    Raises:
        ProtocolError: the form is not one, or not for this number of tensors.
    """
    left, places = iter(tensors), 0

    def walk(form: Any, depth: int) -> Any:
        nonlocal places
        places += 1
        if places > MAX_PLACES or depth > MAX_DEPTH:
            raise ProtocolError("a structure of tensors with too many places, or too deep")
        match form:
            case "x":
                return next(left)
            case ["v", value] if isinstance(value, Plain):
                return value
            case ["l", [*forms]]:
                return [walk(each, depth + 1) for each in forms]
            case ["t", [*forms]]:
                return tuple([walk(each, depth + 1) for each in forms])
            case ["d", [*items]] if all(isinstance(each, list) and len(each) == 2 for each in items):
                return {str(key): walk(each, depth + 1) for key, each in items}
        raise ProtocolError(f"not a form of a structure of tensors: {quoted(form)}")

    try:
        structure = walk(form, 0)
    except StopIteration:
        raise ProtocolError("a structure with more places than tensors") from None
    if next(left, None) is not None:
        raise ProtocolError("a structure with fewer places than tensors")
    return structure


# --- pieces -----------------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """Values ``start`` to ``stop`` of a flattened tensor."""

    tensor: int
    """Its place in the list of all tensors."""
    start: int
    stop: int


def cut(tensors: Sequence[TensorMetadata]) -> Iterator[Slice]:
    """The pieces of tensors, in the order in which they travel."""
    for index, each in enumerate(tensors):
        _, count = each.checked()
        for start in range(0, count, PIECE_VALUES):
            yield Slice(index, start, min(count, start + PIECE_VALUES))


def messages_of(tensors: Sequence[TensorMetadata]) -> list[list[Slice]]:
    """The pieces of each message. The first one may have none."""
    messages: list[list[Slice]] = [[]]
    room = MESSAGE_BYTES
    for piece in cut(tensors):
        nbytes = _nbytes(piece, tensors[piece.tensor])
        if nbytes > room and messages[-1]:
            messages.append([])
            room = MESSAGE_BYTES
        messages[-1].append(piece)
        room -= nbytes
    return messages


def _nbytes(piece: Slice, metadata: TensorMetadata) -> int:
    """The bytes of a piece in memory."""
    dtype, _ = metadata.checked()
    return (piece.stop - piece.start) * dtype.itemsize


def _encode(flat: torch.Tensor, codec: CompressionBase) -> Buffer:
    if type(codec) is NoCompression:
        return bytes_of(flat)
    return codec.compress(flat, CompressionInfo.from_tensor(flat)).buffer


class Departing:
    """Tensors that are being sent, one message after another.

    Args:
        structure: its tensors may be on any device.
        codec_for: chooses the codec of each floating-point tensor; default: none is rounded.

    Raises:
        TypeError, ValueError: it cannot be sent.
    """

    def __init__(self, structure: Any, codec_for: CodecFor | None = None) -> None:
        form, tensors = form_of(structure)
        if len(tensors) > MAX_TENSORS:
            raise ValueError(f"{len(tensors)} tensors are too many to be sent at once: possible are {MAX_TENSORS}")
        try:
            with_form(form, tensors)  # what the receiver would refuse
        except ProtocolError:
            text = f"only structures of up to {MAX_PLACES} places, {MAX_DEPTH} deep, can be sent at once"
            raise ValueError(text) from None
        codecs = [codec_for(each) if codec_for is not None and each.is_floating_point() else EXACT for each in tensors]
        listed = tuple(
            TensorMetadata(int(codec.compression_type), dtype_name(each.dtype), tuple(each.shape), each.requires_grad)
            for codec, each in zip(codecs, tensors, strict=True)
        )
        self._messages, self._next = messages_of(listed), 0
        self._list = TensorList(form, listed, (PIECE_BYTES,) * len(self._messages[0]))
        pack(Kind.ITEM, self._list)  # it must not turn out to be too large when part of it is on its way
        self._codecs, self._flats = codecs, [plain(each).reshape(-1) for each in tensors]
        self._encoding: asyncio.Future[list[Buffer]] | None = None
        self.nbytes = 0
        """Of the values that have been sent, as on the wire."""

    @property
    def has_begun(self) -> bool:
        """Whether a message has been sent, or is being sent."""
        return self._next > 0

    @property
    def has_left(self) -> bool:
        """Whether the last message has been sent, or is being sent."""
        return self._next == len(self._messages)

    async def send(self, call: Call, before: Header | None = None, *, end: bool = False) -> None:
        """Send one message.

        Args:
            before: a small message that goes ahead of it.
            end: if it is the last message, it is the last one of this side of the call.
        """
        encoding, self._encoding = self._encoding, None
        number, self._next = self._next, self._next + 1
        buffers = await (self._encoded(number) if encoding is None else encoding)
        if not self.has_left:  # the next pieces are encoded while these are on their way
            self._encoding = asyncio.ensure_future(self._encoded(self._next))
            self._encoding.add_done_callback(mark_retrieved)
        sizes = tuple(map(len, buffers))
        if before is not None:
            call.put(before)
        header: Header = Pieces(sizes) if number else msgspec.structs.replace(self._list, sizes=sizes)
        await call.send(header, *buffers, end=end and self.has_left)
        self.nbytes += sum(sizes)

    async def stop(self) -> None:
        """Send no more."""
        if self._encoding is not None:
            await cancel_and_wait(self._encoding)

    async def _encoded(self, number: int) -> list[Buffer]:
        pieces, codecs = self._messages[number], self._codecs
        is_heavy = any(codecs[index] is not EXACT and stop - start > _INLINE_VALUES for index, start, stop in pieces)
        return await run_in_worker(self._encode, pieces) if is_heavy else self._encode(pieces)

    def _encode(self, pieces: Sequence[Slice]) -> list[Buffer]:
        return [_encode(self._flats[index][start:stop], self._codecs[index]) for index, start, stop in pieces]


async def send_tensors(
    call: Call, structure: Any, codec_for: CodecFor | None = None, *, end: bool = False, silence: float | None = None
) -> int:
    """Send a structure of tensors.

    Args:
        structure: its tensors may be on any device.
        codec_for: chooses the codec of each floating-point tensor; default: none is rounded.
        end: this is the last thing that this side sends.
        silence: how many seconds the other side may not read; ``None``: any number.

    Returns:
        The bytes of the values on the wire.

    Raises:
        TypeError, ValueError: it cannot be sent.
        TimeoutError: the other side does not read.
        StreamClosedError: the connection ended.
    """
    departing = Departing(structure, codec_for)
    try:
        while not departing.has_left:
            async with asyncio.timeout(silence):
                await departing.send(call, end=end)
    finally:
        await departing.stop()
    return departing.nbytes


class TensorsTooLargeError(ValueError):
    """Tensors would take more memory than is allowed. None of them has been received."""


class Arriving:
    """Tensors that are being received, one message after another.

    Args:
        listed: announces them.
        max_bytes: the most memory that they may take.

    Raises:
        TensorsTooLargeError: they take more.
        ProtocolError: there can be no such tensors.
    """

    def __init__(self, listed: TensorList, max_bytes: int) -> None:
        if len(listed.tensors) > MAX_TENSORS:
            raise ProtocolError(f"{len(listed.tensors)} tensors at once, allowed are {MAX_TENSORS}")
        try:
            kinds = [each.checked() for each in listed.tensors]
            self._codecs = [codec_of(each.compression) for each in listed.tensors]
        except ValueError as e:
            raise ProtocolError(str(e)) from None
        nbytes = sum(dtype.itemsize * count for dtype, count in kinds)
        if nbytes > max_bytes:
            raise TensorsTooLargeError(f"tensors of {nbytes} bytes are too large: allowed are {max_bytes}")
        self._metadata = listed.tensors
        tensors = [empty(each.size, dtype) for each, (dtype, _) in zip(listed.tensors, kinds, strict=True)]
        self._structure = with_form(listed.form, tensors)
        self._tensors, self._flats = tensors, [each.view(-1) for each in tensors]
        self._messages = iter(messages_of(listed.tensors))
        self._pieces: list[Slice] | None = next(self._messages)
        self._decoding: asyncio.Future[None] | None = None
        self.nbytes = 0
        """Of the values that have been received, as on the wire."""

    @property
    def is_complete(self) -> bool:
        """Whether all has been received."""
        return self._pieces is None

    async def take(self, call: Call, message: TensorList | Pieces) -> None:
        """Receive the pieces of a message.

        Raises:
            ProtocolError: pieces of these sizes are impossible, or those before were malformed. If the call has a
                payload still, it is unread.
        """
        if self._pieces is None:
            raise ProtocolError("more pieces of tensors than were announced")
        pieces, sizes = self._pieces, message.sizes
        try:
            room = self._room_for(pieces, sizes)
        except (ValueError, RuntimeError) as e:
            raise ProtocolError(f"a malformed tensor: {e}") from e
        await call.read_payload_into(*room)
        self.nbytes += sum(sizes)
        self._pieces = next(self._messages, None)
        if any(type(self._codecs[piece.tensor]) is not NoCompression for piece in pieces):
            # These pieces are decoded while the next ones arrive.
            await self._until_decoded()
            self._decoding = asyncio.ensure_future(run_in_worker(self._decode, pieces, room))
            self._decoding.add_done_callback(mark_retrieved)

    async def structure(self) -> Any:
        """The structure, with tensors on the CPU, when all has been received.

        Raises:
            ProtocolError: a piece was malformed.
        """
        await self._until_decoded()
        for tensor, metadata in zip(self._tensors, self._metadata, strict=True):
            tensor.requires_grad_(metadata.requires_grad)
        return self._structure

    async def stop(self) -> None:
        """Receive no more."""
        if self._decoding is not None:
            await cancel_and_wait(self._decoding)

    async def _until_decoded(self) -> None:
        if self._decoding is not None:
            try:
                await self._decoding
            except (ValueError, RuntimeError) as e:
                raise ProtocolError(f"a malformed tensor: {e}") from e

    def _room_for(self, pieces: Sequence[Slice], sizes: Sequence[int]) -> list[memoryview]:
        """Where the bytes of these pieces go: into the tensors themselves, or into new memory if they must be decoded.

        Raises:
            ProtocolError: pieces of these sizes are impossible.
        """
        if len(pieces) != len(sizes):
            raise ProtocolError(f"{len(sizes)} pieces of tensors, expected {len(pieces)}")
        room = []
        for piece, size in zip(pieces, sizes, strict=True):
            flat, codec = self._flats[piece.tensor][piece.start : piece.stop], self._codecs[piece.tensor]
            if type(codec) is NoCompression:
                room.append(bytes_of(flat))
                possible = flat.nbytes
            else:
                info = CompressionInfo.from_tensor(flat)
                exact = codec.compressed_nbytes(tuple(flat.shape), info)
                # A codec of unknown size never takes much more than the values themselves.
                possible = min(size, 2 * flat.nbytes + 1024) if exact is None else exact
                room.append(memoryview(bytearray(possible)))
            if size != possible:
                raise ProtocolError(f"a piece of {size} bytes, expected {possible}")
        return room

    def _decode(self, pieces: Sequence[Slice], room: Sequence[memoryview]) -> None:
        """Put the values of encoded pieces into the tensors.

        Raises:
            ValueError, RuntimeError: the bytes are malformed.
        """
        for (index, start, stop), buffer in zip(pieces, room, strict=True):
            codec, metadata = self._codecs[index], self._metadata[index]
            if type(codec) is not NoCompression:
                one = TensorMetadata(metadata.compression, metadata.dtype, (stop - start,))
                self._flats[index][start:stop] = codec.extract(SerializedTensor(one, buffer))


async def receive_tensors(call: Call, max_bytes: int, silence: float | None = None) -> tuple[Any, int]:
    """Receive a structure of tensors.

    Args:
        max_bytes: the most memory that the tensors may take.
        silence: seconds within which each message must come; default: no limit.

    Returns:
        The structure, with tensors on the CPU, and the bytes of the values on the wire.

    Raises:
        TensorsTooLargeError: the tensors would take more memory. The sender can still be told.
        ProtocolError: the sender sends something else, or malformed tensors.
        TimeoutError: the sender was silent.
        StreamClosedError, P2PHandlerError: as for :meth:`Call.receive`.
    """
    async with asyncio.timeout(silence):
        listed = await call.receive(TensorList)
    if listed is None:
        raise ProtocolError("the call ended where tensors were expected")
    arriving = Arriving(listed, max_bytes)
    message: TensorList | Pieces | None = listed
    try:
        while message is not None:
            async with asyncio.timeout(silence):
                await arriving.take(call, message)
            if arriving.is_complete:
                return await arriving.structure(), arriving.nbytes
            async with asyncio.timeout(silence):
                message = await call.receive(Pieces)
        raise ProtocolError("the call ended in the middle of tensors")
    finally:
        await arriving.stop()
