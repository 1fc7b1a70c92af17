"""A codec for averages of which all members of a group must have the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, SerializedTensor


class OneResult(CompressionBase):
    """Members send their values with one codec, and each average comes back in one encoding for all.

    Elsewhere a lossy codec encodes for each member the difference between the average and what that member has sent.
    That loses less, but leaves members with different averages. Here the reducer encodes the average itself, once, and
    takes what the others decode. Its own values count as if they had been sent, too.

    Args:
        out: codec of what members send.
        back: codec of averages; default: the same. What it has decoded, it must restore exactly if it is
            encoded again.
    """

    def __init__(self, out: CompressionBase, back: CompressionBase | None = None) -> None:
        self._out, self._back = out, out if back is None else back
        self.compression_type = out.compression_type
        self.lossy = self._out.lossy or self._back.lossy

    @property
    def fingerprint(self) -> str:
        return f"{self._out.fingerprint}, averages {self._back.fingerprint}"

    @property
    def elementwise(self) -> bool:
        return self._out.elementwise and self._back.elementwise

    @property
    def block(self) -> int | None:
        out, back = self._out.block, self._back.block
        return None if out is None or back is None else math.lcm(out, back)

    @property
    def for_averages(self) -> CompressionBase:
        return self._back

    def for_tensor(self, info: CompressionInfo) -> CompressionBase:
        return OneResult(self._out.for_tensor(info), self._back.for_tensor(info))

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        return self._out.compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        return self._out.extract(serialized_tensor)

    def compress_and_decode(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> tuple[SerializedTensor, torch.Tensor]:
        return self._out.compress_and_decode(tensor, info, allow_inplace)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self._out.estimate_compression_ratio(info)

    def compressed_nbytes(self, size: Sequence[int], info: CompressionInfo) -> int | None:
        return self._out.compressed_nbytes(size, info)
