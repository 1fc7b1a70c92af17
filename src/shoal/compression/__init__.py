"""Turns tensors into bytes and back.

Each codec is a :class:`CompressionBase`. It turns a tensor into a :class:`SerializedTensor`: metadata for a message
header, and a buffer. The metadata has the code of the codec, so a receiver can decode any tensor by itself.

- :mod:`~.base`: the base class, the description of a tensor for a codec, and the codec that changes nothing.
- :mod:`~.floating`: 16 bits per value. :mod:`~.quantization`: 8 or 4 bits. :mod:`~.topk`: only the largest values.
- :mod:`~.adaptive`: another codec for each tensor. :mod:`~.statistics`: the codecs that optimizer states can bear.
- :mod:`~.one_result`: averages with the same bits at all members.
- :mod:`~.serialization`: any codec by its code; and tensors in pieces.
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.compression.adaptive import PerTensorCompression, RoleAdaptiveCompression, SizeAdaptiveCompression
from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    CompressionType,
    NoCompression,
    SerializedTensor,
    TensorDescriptor,
    TensorMetadata,
    TensorRole,
)
from shoal.compression.floating import BFloat16Compression, Float16Compression, ScaledFloat16Compression
from shoal.compression.quantization import (
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
)
from shoal.compression.serialization import (
    deserialize_tensor_stream,
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from shoal.compression.topk import SparseTensor, TopKCompression

__all__ = [
    "BFloat16Compression",
    "Blockwise4BitQuantization",
    "BlockwiseQuantization",
    "CompressionBase",
    "CompressionInfo",
    "CompressionType",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SerializedTensor",
    "SizeAdaptiveCompression",
    "SparseTensor",
    "TensorDescriptor",
    "TensorMetadata",
    "TensorRole",
    "TopKCompression",
    "Uniform8BitQuantization",
    "deserialize_tensor_stream",
    "deserialize_torch_tensor",
    "serialize_torch_tensor",
]
