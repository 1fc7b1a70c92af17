"""The choice of a codec for a tensor, so that no codec spoils values that it cannot represent.

Parameters and gradients tolerate the errors of any codec. Integers and counters tolerate none. An optimizer divides by
the square roots of its second moments. If one vanishes, or is small relative to its first moment, the step is many
times too large. So optimizer statistics are sent with a small relative error of each value, or with none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    CompressionType,
    NoCompression,
    TensorRole,
    typed,
)
from shoal.compression.floating import FLOATING_TYPES, BFloat16Compression, FloatingPointCompression, in_chunks

# The number of values to look at first (chosen): they tell most other tensors from counters.
_FIRST_LOOK = 4096
# Derived: float32 without the sign and the lowest 15 of 23 bits of the mantissa has 16 bits.
_SHIFT = 15
_LARGEST_CODE = 0x7F7FFFFF >> _SHIFT


class NonNegative16BitCompression(FloatingPointCompression):
    """Sends non-negative values, such as second moments, in 16 bits over the full range of float32.

    They are float32 numbers without the sign and with 8 bits of mantissa: the relative error is at most 1/512, and that
    of the square root 1/1024. Only 0 reads as 0. A negative value or NaN becomes 0; infinity the largest value.
    """

    compression_type = CompressionType.NON_NEGATIVE_16BIT

    def _nbytes(self, size: Sequence[int]) -> int:
        return math.prod(size) * 2

    def _encode(self, values: torch.Tensor, size: Sequence[int], payload: np.ndarray) -> None:
        codes = typed(payload, torch.int16)
        for some, part in zip(in_chunks(codes), in_chunks(values), strict=True):
            bits = part.float().clamp(0, torch.finfo(torch.float32).max).nan_to_num_(0.0).view(torch.int32)
            rounded = ((bits + (1 << (_SHIFT - 1))) >> _SHIFT).clamp_(max=_LARGEST_CODE)
            # Values above 0 stay above 0, even if they are too small for float32.
            some.copy_(rounded.clamp_(min=(part > 0).int()))

    def _decode(self, payload: np.ndarray, size: Sequence[int], values: torch.Tensor) -> None:
        codes, largest = typed(payload, torch.int16), torch.finfo(values.dtype).max
        least = torch.finfo(values.dtype).smallest_normal * torch.finfo(values.dtype).eps
        for some, part in zip(in_chunks(codes), in_chunks(values), strict=True):
            bits = (some.int() & 0xFFFF).clamp_(max=_LARGEST_CODE) << _SHIFT
            wide = bits.view(torch.float32)
            part.copy_(torch.where(bits == 0, wide, wide.clamp(least, min(largest, torch.finfo(torch.float32).max))))


def codec_for_average(codec: CompressionBase, info: CompressionInfo) -> CompressionBase:
    """The codec for a tensor that is averaged: lossy ones only for parameters, gradients and the like.

    All members must choose the same codec, so the choice does not depend on the values. Averages travel as differences,
    which can be negative and of any size, so statistics are sent exactly.
    """
    own = codec.for_tensor(info)
    return NoCompression() if own.lossy and (_is_exact(info) or info.role is TensorRole.OPTIMIZER) else own


def codec_for_download(codec: CompressionBase, tensor: torch.Tensor, info: CompressionInfo) -> CompressionBase:
    """The codec for a tensor of a state that a newcomer downloads."""
    own = codec.for_tensor(info)
    if not own.lossy:
        return own
    if _is_exact(info):
        return NoCompression()
    if info.role is not TensorRole.OPTIMIZER:
        return own
    if _counts(tensor):
        return NoCompression()
    if bool((tensor >= 0).all()):
        return NonNegative16BitCompression()
    return own if own.keeps_small_values else BFloat16Compression()


def _is_exact(info: CompressionInfo) -> bool:
    """Whether a tensor must be sent exactly."""
    return info.role is TensorRole.COUNTER or info.descriptor.dtype not in FLOATING_TYPES


def _counts(tensor: torch.Tensor) -> bool:
    """Whether a statistic is a single number, or consists of whole numbers that are not all 0, as counters do."""
    if tensor.numel() == 1:
        return True
    first = tensor.reshape(-1)[:_FIRST_LOOK]
    return bool((first == first.round()).all()) and bool(tensor.any()) and bool((tensor == tensor.round()).all())
