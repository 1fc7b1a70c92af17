"""Tensors in pieces, under the import path that users know."""

from shoal.compression.streaming import combine_from_streaming, split_for_streaming

__all__ = ["combine_from_streaming", "split_for_streaming"]
