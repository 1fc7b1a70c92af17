"""Descriptions of tensors, under the import path that users know."""

from shoal.compression.batch_descriptor import BatchTensorDescriptor
from shoal.compression.descriptor import TensorDescriptor

__all__ = ["BatchTensorDescriptor", "TensorDescriptor"]
