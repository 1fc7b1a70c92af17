"""Serializes tensors with the codec of a given code, whole or in pieces small enough for a message."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from shoal.base.logs import one_line, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.compression.base import (
    DTYPES,
    MAX_DIMENSIONS,
    Buffer,
    CompressionBase,
    CompressionInfo,
    CompressionType,
    NoCompression,
    SerializedTensor,
    TensorDescriptor,
    TensorMetadata,
    check_codec,
    dtype_name,
)
from shoal.compression.floating import BFloat16Compression, Float16Compression, ScaledFloat16Compression
from shoal.compression.quantization import (
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
)
from shoal.compression.statistics import NonNegative16BitCompression
from shoal.compression.topk import TopKCompression

STREAMING_CHUNK_SIZE_BYTES = 2**16  # chosen: the default size of a piece


@dataclass(frozen=True)
class TensorChunk:
    """A piece of a serialized tensor."""

    buffer: Buffer
    metadata: TensorMetadata | None = None
    """Metadata of the whole tensor; in the first piece only."""
    chunks: int = 0
    """How many pieces there are; in the first piece only."""


def split_for_streaming(
    serialized_tensor: SerializedTensor, chunk_size_bytes: int = STREAMING_CHUNK_SIZE_BYTES
) -> Iterator[TensorChunk]:
    """Split a serialized tensor into pieces without a copy. An empty tensor makes one piece.

    Args:
        chunk_size_bytes: size of each piece but the last.

    Raises:
        ValueError: the size is not positive.
    """
    if chunk_size_bytes < 1:
        raise ValueError(f"chunk_size_bytes must be at least 1, got {chunk_size_bytes}")
    view = memoryview(serialized_tensor.buffer).cast("B")
    count = max(1, math.ceil(len(view) / chunk_size_bytes))
    yield TensorChunk(view[:chunk_size_bytes], serialized_tensor.metadata, count)
    for start in range(chunk_size_bytes, len(view), chunk_size_bytes):
        yield TensorChunk(view[start : start + chunk_size_bytes])


class _Assembly:
    """A tensor whose first piece has arrived."""

    def __init__(self, first: TensorChunk) -> None:
        if first.metadata is None or first.chunks < 1:
            raise RuntimeError("expected the first piece of a tensor, got a later one")
        self._metadata, self._missing = first.metadata, first.chunks
        self._pieces: list[Buffer] = []
        self.add(first)

    def add(self, chunk: TensorChunk) -> None:
        self._pieces.append(chunk.buffer)
        self._missing -= 1

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def result(self) -> SerializedTensor:
        if not self.is_complete:
            raise RuntimeError(f"{self._missing} of {self._missing + len(self._pieces)} pieces of a tensor are missing")
        # Writable, so that a tensor over these bytes needs no copy.
        return SerializedTensor(self._metadata, bytearray().join(self._pieces))


def combine_from_streaming(stream: Iterable[TensorChunk]) -> SerializedTensor:
    """The opposite of :func:`split_for_streaming`.

    Raises:
        RuntimeError: pieces are missing, or there are too many.
    """
    tensors = list(combine_all(stream))
    if len(tensors) != 1:
        raise RuntimeError(f"expected the pieces of one tensor, got those of {len(tensors)}")
    return tensors[0]


def combine_all(stream: Iterable[TensorChunk]) -> Iterator[SerializedTensor]:
    """Like :func:`combine_from_streaming` for the pieces of any number of tensors."""
    assembly: _Assembly | None = None
    for chunk in stream:
        if assembly is None:
            assembly = _Assembly(chunk)
        elif chunk.metadata is not None:
            # A new tensor starts before this one is complete: this raises an error that tells what is missing.
            assembly.result()
        else:
            assembly.add(chunk)
        if assembly.is_complete:
            yield assembly.result()
            assembly = None
    if assembly is not None:
        assembly.result()


_CODECS: dict[int, CompressionBase] = {
    int(codec.compression_type): codec
    for codec in (
        NoCompression(),
        ScaledFloat16Compression(),
        Float16Compression(),
        Quantile8BitQuantization(),
        Uniform8BitQuantization(),
        BlockwiseQuantization(),
        BFloat16Compression(),
        Blockwise4BitQuantization(),
        TopKCompression(bits=2),
        TopKCompression(bits=8),
        NonNegative16BitCompression(),
    )
}


def codec_of(compression: int) -> CompressionBase:
    """The codec with this code.

    Raises:
        ValueError: the code is unknown.
    """
    codec = _CODECS.get(compression)
    if codec is None:
        raise ValueError(f"unknown compression code {quoted(compression)}; this peer knows {sorted(_CODECS)}")
    return codec


def check_nbytes(metadata: TensorMetadata, nbytes: int) -> None:
    """Check that a serialized tensor with this description can take this many bytes, before they arrive.

    Raises:
        ValueError: it cannot, its codec is unknown, or the tensor is impossible.
    """
    codec, (dtype, count) = codec_of(metadata.compression), metadata.checked()
    info = CompressionInfo(None, TensorDescriptor(metadata.size, dtype))
    expected = codec.compressed_nbytes(metadata.size, info)
    # Peers may send bfloat16 as float32, see USE_LEGACY_BFLOAT16.
    is_wide = type(codec) is NoCompression and dtype == torch.bfloat16 and nbytes in (2 * count, 4 * count)
    if expected is not None and nbytes != expected and not is_wide:
        raise ValueError(f"serialized tensor of shape {quoted(metadata.size)} takes {expected} bytes, got {nbytes}")


def is_sparse(compression: int) -> bool:
    """Whether the codec with this code leaves out most values; ``False`` if there is no such codec."""
    codec = _CODECS.get(compression)
    return codec is not None and codec.sparse


def check_state_codec(option: str, codec: object) -> None:
    """Check that an option for the state codec holds a codec that sends every value, or ``None``.

    Raises:
        TypeError: it holds something else, such as a codec class.
        ValueError: the codec leaves values out.
    """
    check_codec(option, codec)
    if isinstance(codec, CompressionBase) and codec.sparse:
        raise ValueError(f"{option} must send every value, {codec.fingerprint} does not: use Float16Compression()")


def serialize_torch_tensor(
    tensor: torch.Tensor,
    compression_type: int = CompressionType.NONE,
    info: CompressionInfo | None = None,
    allow_inplace: bool = False,
    **kwargs: Any,
) -> SerializedTensor:
    """Turn a CPU tensor into bytes.

    Args:
        tensor: the tensor to serialize.
        compression_type: code of the codec, see :class:`CompressionType`.
        info: what the codec may need to know; made from the tensor and ``kwargs`` if not given.
        allow_inplace: the codec may overwrite the tensor's values.

    Raises:
        AssertionError: the tensor is not on the CPU.
        ValueError: unknown code, or the codec cannot represent such a tensor.
    """
    assert tensor.device.type == "cpu", f"only CPU tensors can be serialized, got one on {tensor.device}"
    if info is None:
        info = CompressionInfo.from_tensor(tensor, **kwargs)
    return codec_of(compression_type).compress(tensor, info, allow_inplace)


def deserialize_torch_tensor(serialized_tensor: SerializedTensor) -> torch.Tensor:
    """Restore a tensor from bytes; it may share memory with them.

    Raises:
        ValueError: unknown code, or malformed metadata.
        RuntimeError: the bytes are truncated or do not fit the metadata.
    """
    return codec_of(serialized_tensor.metadata.compression).extract(serialized_tensor)


async def deserialize_tensor_stream(stream: AsyncIterable[Iterable[TensorChunk]]) -> list[torch.Tensor]:
    """Restore tensors that arrive in pieces, several pieces at a time.

    Raises:
        RuntimeError: pieces are missing, or the bytes do not fit the metadata.
        ValueError: the metadata is malformed.
    """
    chunks = [chunk async for several in stream for chunk in several]
    return [deserialize_torch_tensor(serialized) for serialized in combine_all(chunks)]


DUMMY_BATCH_SIZE = 3
"""The size of the batch with which users try out a module that takes batches of any size."""


@MSGPackSerializer.ext_serializable(0x51)
class BatchTensorDescriptor(TensorDescriptor):
    """A tensor whose first dimension, the batch, is unknown: it is ``None`` in ``size`` and ``shape``.

    Args:
        instance_size: sizes of one item of the batch, also as one list or tuple.
        kwargs: the other fields of :class:`TensorDescriptor`.
    """

    def __init__(self, *instance_size: int | Sequence[int], **kwargs: Any) -> None:
        if len(instance_size) == 1 and isinstance(instance_size[0], list | tuple):
            instance_size = tuple(instance_size[0])
        if kwargs.get("dtype") is None:
            kwargs.pop("dtype", None)
        super().__init__((cast("int", None), *cast("tuple[int, ...]", instance_size)), **kwargs)

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, compression: CompressionType = CompressionType.NONE
    ) -> BatchTensorDescriptor:
        """Describe batches like this tensor; the codec is for floating-point numbers only."""
        compression = compression if tensor.is_floating_point() else CompressionType.NONE
        whole = TensorDescriptor.from_tensor(tensor, compression)
        fields = ("dtype", "layout", "device", "requires_grad", "pin_memory", "compression")
        return cls(*whole.size[1:], **{name: getattr(whole, name) for name in fields})

    @property
    def shape(self) -> Any:
        """Same as ``size``; ``None`` stands for the length of the batch."""
        return self.size

    def numel(self) -> int:
        raise ValueError("a batch of unknown length has no number of values")

    def make_zeros(self, *batch_size: int, device: torch.device | str | None = None, **overrides: Any) -> torch.Tensor:
        """A batch of zeros.

        Args:
            batch_size: the length of the batch, or several dimensions in its place.
            overrides: other fields of :class:`TensorDescriptor` to use instead.
        """
        assert batch_size, "the size of the batch must be given"
        fields = {name: getattr(self, name) for name in ("dtype", "layout", "device", "requires_grad", "pin_memory")}
        return TensorDescriptor((*batch_size, *self.size[1:]), **{**fields, **overrides}).make_zeros(device=device)

    def packb(self) -> bytes:
        """The wire form.

        Raises:
            ValueError: such tensors cannot be sent.
        """
        if self.layout is not torch.strided:
            raise ValueError(f"only dense tensors can be sent, got {self.layout}")
        device = None if self.device is None else str(self.device)
        instance_size = list(self.size[1:])
        fields = [instance_size, dtype_name(self.dtype), device, self.requires_grad, self.pin_memory]
        return MSGPackSerializer.dumps([*fields, int(self.compression)])

    @classmethod
    def unpackb(cls, data: bytes) -> BatchTensorDescriptor:
        """Read what :meth:`packb` made.

        Raises:
            ValueError: the bytes are not such a description.
        """
        fields = MSGPackSerializer.loads(data)
        if not isinstance(fields, list) or len(fields) != 6:
            raise ValueError("not a description of a batch of tensors")
        size, dtype, device, requires_grad, pin_memory, compression = fields
        is_valid = (
            isinstance(size, list)
            and len(size) < MAX_DIMENSIONS
            and all(isinstance(length, int) and 0 <= length < 2**48 for length in size)
            and isinstance(dtype, str)
            and dtype in DTYPES
            and (device is None or isinstance(device, str))
            and isinstance(requires_grad, bool)
            and isinstance(pin_memory, bool)
        )
        if not is_valid:
            raise ValueError(f"not a description of a batch of tensors: {quoted(fields)}")
        return cls(
            *size,
            dtype=DTYPES[dtype],
            device=None if device is None else _device(device),
            requires_grad=requires_grad,
            pin_memory=pin_memory,
            compression=CompressionType(compression),
        )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as e:
        raise ValueError(f"not a device: {quoted(name)}: {one_line(str(e))}") from None
