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

import torch

from shoal.base.logs import quoted
from shoal.base.tasks import cancel_and_wait, run_in_worker
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
from shoal.net.transport import Header

# The values of one piece. A multiple of the blocks of all codecs. Chosen: a fraction of a second on a slow line.
PIECE_VALUES = 2**18
# Pieces share a message up to this size in bytes. Chosen: beyond it, a message of its own costs next to nothing.
MESSAGE_BYTES = 2**16
# The most tensors and plain values of a structure, and its depth. Chosen: far more than a module has.
MAX_LEAVES, MAX_DEPTH = 1024, 16
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
    left, leaves = iter(tensors), 0

    def walk(form: Any, depth: int) -> Any:
        nonlocal leaves
        leaves += 1
        if leaves > 2 * MAX_LEAVES or depth > MAX_DEPTH:
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


def messages_of(tensors: Sequence[TensorMetadata]) -> Iterator[list[Slice]]:
    """The pieces of each message. The first one may have none."""
    message: list[Slice] = []
    room = MESSAGE_BYTES
    for piece in cut(tensors):
        nbytes = _nbytes(piece, tensors[piece.tensor])
        if nbytes > room and message:
            yield message
            message, room = [], MESSAGE_BYTES
        message.append(piece)
        room -= nbytes
    yield message


def _nbytes(piece: Slice, metadata: TensorMetadata) -> int:
    """The bytes of a piece in memory."""
    dtype, _ = metadata.checked()
    return (piece.stop - piece.start) * dtype.itemsize


def _encode(flat: torch.Tensor, codec: CompressionBase) -> Buffer:
    if type(codec) is NoCompression:
        return bytes_of(flat)
    return codec.compress(flat, CompressionInfo.from_tensor(flat)).buffer


async def send_tensors(
    call: Call,
    structure: Any,
    codec_for: CodecFor | None = None,
    *,
    before: Header | None = None,
    end: bool = False,
    silence: float | None = None,
) -> int:
    """Send a structure of tensors.

    Args:
        structure: its tensors may be on any device.
        codec_for: chooses the codec of each floating-point tensor; default: none is rounded.
        before: a message that goes ahead of them, if they can be sent.
        end: this is the last thing that this side sends.
        silence: how many seconds the other side may not read; ``None``: any number.

    Returns:
        The bytes of the values on the wire.

    Raises:
        TypeError, ValueError: it cannot be sent.
        TimeoutError: the other side does not read.
        StreamClosedError: the connection ended.
    """
    form, tensors = form_of(structure)
    if len(tensors) > MAX_LEAVES:
        raise ValueError(f"{len(tensors)} tensors are too many to be sent at once: possible are {MAX_LEAVES}")
    codecs = [codec_for(each) if codec_for is not None and each.is_floating_point() else EXACT for each in tensors]
    listed = tuple(
        TensorMetadata(int(codec.compression_type), dtype_name(each.dtype), tuple(each.shape), each.requires_grad)
        for codec, each in zip(codecs, tensors, strict=True)
    )
    flats = [plain(each).reshape(-1) for each in tensors]

    def encode(pieces: Sequence[Slice]) -> list[Buffer]:
        return [_encode(flats[index][start:stop], codecs[index]) for index, start, stop in pieces]

    async def encoded(pieces: Sequence[Slice]) -> list[Buffer]:
        is_heavy = any(codecs[index] is not EXACT and stop - start > _INLINE_VALUES for index, start, stop in pieces)
        return await run_in_worker(encode, pieces) if is_heavy else encode(pieces)

    messages, total = list(messages_of(listed)), 0
    buffers = await encoded(messages[0])
    if before is not None:
        call.put(before)
    for number in range(len(messages)):
        is_last = number + 1 == len(messages)
        # The next pieces are encoded while these are on their way.
        encoding = None if is_last else asyncio.ensure_future(encoded(messages[number + 1]))
        try:
            sizes = tuple(map(len, buffers))
            header: Header = Pieces(sizes) if number else TensorList(form, listed, sizes)
            async with asyncio.timeout(silence):
                await call.send(header, *buffers, end=end and is_last)
            total += sum(sizes)
            if encoding is not None:
                buffers = await encoding
        except BaseException:
            if encoding is not None:
                await cancel_and_wait(encoding)
            raise
    return total


class TensorsTooLargeError(ValueError):
    """Tensors would take more memory than is allowed. Nothing of them has been received."""


class _Arriving:
    """Tensors whose values are on their way.

    Args:
        max_bytes: the most memory that they may take.

    Raises:
        TensorsTooLargeError: they take more.
        ProtocolError: there can be no such tensors.
    """

    def __init__(self, listed: TensorList, max_bytes: int) -> None:
        if len(listed.tensors) > MAX_LEAVES:
            raise ProtocolError(f"{len(listed.tensors)} tensors at once, allowed are {MAX_LEAVES}")
        try:
            kinds = [each.checked() for each in listed.tensors]
            self._codecs = [codec_of(each.compression) for each in listed.tensors]
        except ValueError as e:
            raise ProtocolError(str(e)) from None
        nbytes = sum(dtype.itemsize * count for dtype, count in kinds)
        if nbytes > max_bytes:
            raise TensorsTooLargeError(f"tensors of {nbytes} bytes are too large: allowed are {max_bytes}")
        self._metadata = listed.tensors
        self.tensors = [empty(each.size, dtype) for each, (dtype, _) in zip(listed.tensors, kinds, strict=True)]
        self._flats = [each.view(-1) for each in self.tensors]

    def room_for(self, pieces: Sequence[Slice], sizes: Sequence[int]) -> list[memoryview]:
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

    def is_encoded(self, piece: Slice) -> bool:
        """Whether the bytes of a piece must be decoded."""
        return type(self._codecs[piece.tensor]) is not NoCompression

    def decode(self, pieces: Sequence[Slice], room: Sequence[memoryview]) -> None:
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
        listed = await receive_list(call)
    return await receive_listed(call, listed, max_bytes, silence)


async def receive_list(call: Call) -> TensorList:
    """Receive what announces tensors; then :func:`receive_listed` or :func:`skip_listed`.

    Raises:
        ProtocolError, StreamClosedError, P2PHandlerError: as for :func:`receive_tensors`.
    """
    listed = await call.receive(TensorList)
    if listed is None:
        raise ProtocolError("the call ended where tensors were expected")
    return listed


async def skip_listed(call: Call, listed: TensorList) -> None:
    """Receive tensors, and forget them.

    Raises:
        ProtocolError, StreamClosedError, P2PHandlerError: as for :func:`receive_tensors`.
    """
    try:
        for number, _ in enumerate(messages_of(listed.tensors)):
            if number and await call.receive(Pieces) is None:
                raise ProtocolError("the call ended in the middle of tensors")
            await call.skip_payload()
    except ValueError as e:
        raise ProtocolError(f"a malformed tensor: {e}") from e


async def receive_listed(
    call: Call, listed: TensorList, max_bytes: int, silence: float | None = None
) -> tuple[Any, int]:
    """Receive the tensors of a list; see :func:`receive_tensors`."""
    arriving, total = _Arriving(listed, max_bytes), 0
    message: TensorList | Pieces | None = listed
    decoding: asyncio.Future[None] | None = None
    try:
        for number, pieces in enumerate(messages_of(listed.tensors)):
            async with asyncio.timeout(silence):
                if number:
                    message = await call.receive(Pieces)
                if message is None:
                    raise ProtocolError("the call ended in the middle of tensors")
                room = arriving.room_for(pieces, message.sizes)
                await call.read_payload_into(*room)
            total += sum(message.sizes)
            if not any(map(arriving.is_encoded, pieces)):
                continue
            # These pieces are decoded while the next ones arrive.
            if decoding is not None:
                await decoding
            decoding = asyncio.ensure_future(run_in_worker(arriving.decode, pieces, room))
        if decoding is not None:
            await decoding
    except (ValueError, RuntimeError) as e:
        raise ProtocolError(f"a malformed tensor: {e}") from e
    finally:
        if decoding is not None:
            await cancel_and_wait(decoding)
    for tensor, metadata in zip(arriving.tensors, listed.tensors, strict=True):
        tensor.requires_grad_(metadata.requires_grad)
    return with_form(listed.form, arriving.tensors), total
