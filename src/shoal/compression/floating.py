"""Codecs that shorten floating point numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    SerializedTensor,
    TensorMetadata,
    bytes_of,
    dtype_name,
    plain,
    tensor_over,
)
from shoal.compression.descriptor import CompressionType

_FP16 = torch.finfo(torch.float16)
_COMPRESSIBLE = (torch.float64, torch.float32, torch.float16)


class Float16Compression(CompressionBase):
    """Half precision: values beyond the range of fp16 become its largest value."""

    compression_type = CompressionType.FLOAT16
    lossy = True

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        if tensor.dtype not in _COMPRESSIBLE:
            raise ValueError(f"{type(self).__name__} takes tensors of float64, float32 or float16, got {tensor.dtype}")
        values = plain(tensor)
        if values.dtype != torch.float16:
            values = values.clamp_(_FP16.min, _FP16.max) if allow_inplace else values.clamp(_FP16.min, _FP16.max)
        metadata = TensorMetadata(
            int(self.compression_type), dtype_name(tensor.dtype), tuple(tensor.shape), tensor.requires_grad
        )
        return SerializedTensor(metadata, bytes_of(values.to(torch.float16)))

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        dtype, _ = self._read_metadata(serialized_tensor)
        metadata = serialized_tensor.metadata
        if dtype not in _COMPRESSIBLE:
            raise ValueError(f"{type(self).__name__} cannot have made a tensor of type {metadata.dtype}")
        values = tensor_over(serialized_tensor.buffer, torch.float16, metadata.size)
        return values.to(dtype).requires_grad_(metadata.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return _FP16.bits / (8 * info.descriptor.dtype.itemsize)

    def compressed_nbytes(self, size: Sequence[int], info: CompressionInfo) -> int:
        return math.prod(size) * torch.float16.itemsize
