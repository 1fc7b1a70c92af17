"""What the tests of codecs share."""

from __future__ import annotations

import torch

from shoal.compression import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TopKCompression,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)

SHORT = [Float16Compression(), BFloat16Compression(), ScaledFloat16Compression()]
CODEBOOK = [Uniform8BitQuantization(), Quantile8BitQuantization()]
BLOCKWISE = [BlockwiseQuantization(), Blockwise4BitQuantization()]
LOSSY: list[CompressionBase] = [*SHORT, *CODEBOOK, *BLOCKWISE]
ALL: list[CompressionBase] = [NoCompression(), *LOSSY]
SPARSE = [TopKCompression(), TopKCompression(bits=8)]
"""They lose most of the values, which is no error of theirs."""
EVERY: list[CompressionBase] = [*ALL, *SPARSE]

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0), (2, 3, 4), (5, 1), (67, 129)]


def name_of(codec: CompressionBase) -> str:
    return type(codec).__name__


def info_of(tensor: torch.Tensor, **kwargs) -> CompressionInfo:
    return CompressionInfo.from_tensor(tensor, **kwargs)


def compressed(codec: CompressionBase, tensor: torch.Tensor) -> bytes:
    return bytes(codec.compress(tensor, info_of(tensor)).buffer)


def restored(codec: CompressionBase, tensor: torch.Tensor) -> torch.Tensor:
    return deserialize_torch_tensor(codec.compress(tensor, info_of(tensor)))


def relative_error(codec: CompressionBase, tensor: torch.Tensor) -> float:
    """Mean squared error over mean square."""
    difference = restored(codec, tensor).double() - tensor.double()
    return float(difference.square().mean() / tensor.double().square().mean())
