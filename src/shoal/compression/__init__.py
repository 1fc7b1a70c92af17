"""Tensors to bytes and back."""

from shoal.compression.adaptive import PerTensorCompression, RoleAdaptiveCompression, SizeAdaptiveCompression
from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    SerializedTensor,
    TensorMetadata,
    TensorRole,
)
from shoal.compression.descriptor import CompressionType, TensorDescriptor
from shoal.compression.floating import Float16Compression
from shoal.compression.serialization import deserialize_torch_tensor, serialize_torch_tensor

__all__ = [
    "CompressionBase",
    "CompressionInfo",
    "CompressionType",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "RoleAdaptiveCompression",
    "SerializedTensor",
    "SizeAdaptiveCompression",
    "TensorDescriptor",
    "TensorMetadata",
    "TensorRole",
    "deserialize_torch_tensor",
    "serialize_torch_tensor",
]
