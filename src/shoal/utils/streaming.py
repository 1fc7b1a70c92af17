"""Tensors in pieces, under the import path that users know."""

from shoal.compression.streaming import (
    STREAMING_CHUNK_SIZE_BYTES,
    TensorChunk,
    combine_from_streaming,
    split_for_streaming,
)

__all__ = ["STREAMING_CHUNK_SIZE_BYTES", "TensorChunk", "combine_from_streaming", "split_for_streaming"]
