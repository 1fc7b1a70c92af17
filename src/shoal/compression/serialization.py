"""Tensors to bytes and back, with the codec named by its code."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Any

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, NoCompression, SerializedTensor
from shoal.compression.blockwise import Blockwise4BitQuantization, BlockwiseQuantization
from shoal.compression.descriptor import CompressionType
from shoal.compression.floating import BFloat16Compression, Float16Compression, ScaledFloat16Compression
from shoal.compression.quantization import Quantile8BitQuantization, Uniform8BitQuantization
from shoal.compression.streaming import TensorChunk, combine_all

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
    )
}


def codec_of(compression: int) -> CompressionBase:
    """The codec with this code.

    Raises:
        ValueError: there is none.
    """
    codec = _CODECS.get(compression)
    if codec is None:
        raise ValueError(f"unknown compression code {compression}; this peer knows {sorted(_CODECS)}")
    return codec


def serialize_torch_tensor(
    tensor: torch.Tensor,
    compression_type: int = CompressionType.NONE,
    info: CompressionInfo | None = None,
    allow_inplace: bool = False,
    **kwargs: Any,
) -> SerializedTensor:
    """Turn a CPU tensor into bytes.

    Args:
        tensor: what to serialize.
        compression_type: code of the codec, see :class:`CompressionType`.
        info: what the codec may want to know; made from the tensor and ``kwargs`` if not given.
        allow_inplace: the codec may spoil the tensor's values.

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
        ValueError: unknown code, or metadata that make no sense.
        RuntimeError: the bytes are truncated or do not fit the metadata.
    """
    return codec_of(serialized_tensor.metadata.compression).extract(serialized_tensor)


async def deserialize_tensor_stream(stream: AsyncIterable[Iterable[TensorChunk]]) -> list[torch.Tensor]:
    """Restore tensors that arrive in pieces, several pieces at a time.

    Raises:
        RuntimeError: pieces are missing, or the bytes do not fit the metadata.
        ValueError: the metadata make no sense.
    """
    chunks = [chunk async for several in stream for chunk in several]
    return [deserialize_torch_tensor(serialized) for serialized in combine_all(chunks)]
