"""Codecs for averages that must have the same bits at all members of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, NoCompression, SerializedTensor


class OneResult(CompressionBase):
    """Members send their values with one codec, and each average comes back in one encoding for all.

    Without this class, a lossy codec encodes for each member the difference between the average and the member's sent
    values. That loses less, but leaves members with different averages. Here the reducer encodes the average itself,
    once, and takes the same decoded values as the others. Its own values count as if they had been sent, too.

    Args:
        out: the codec of members' values.
        back: the codec of averages; default: the same. Encoding its decoded values again must restore them exactly.
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


class Relayed(OneResult):
    """Like :class:`OneResult`, but reducers pass on the members' messages as they are if that takes fewer bytes.

    All members then decode the same messages and compute the mean themselves, so no second codec adds an error. This
    pays if messages are short: with 4 bits among two members, with sparse messages among a few dozen.

    Args:
        out: the codec of members' values.
        back: the codec of averages if messages are not passed on.
        sparse_mean: the members that the mean covers, see :mod:`shoal.averaging.message_means`.
    """

    def __init__(self, out: CompressionBase, back: CompressionBase, sparse_mean: str = "senders") -> None:
        super().__init__(out, back)
        self.out, self.back, self.sparse_mean = out, back, sparse_mean
        self._averages = Averages(self)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} or messages, mean over {self.sparse_mean}"

    @property
    def for_averages(self) -> Averages:
        return self._averages

    def for_tensor(self, info: CompressionInfo) -> CompressionBase:
        return Relayed(self.out.for_tensor(info), self.back.for_tensor(info), self.sparse_mean)


class Averages(CompressionBase):
    """The codec of averages of :class:`Relayed` messages, for members that get the average itself.

    It writes exact values, because an average of messages has no shorter encoding. It also reads the output of the
    codec for averages.

    Args:
        of: the codec of the messages.
    """

    lossy = False

    def __init__(self, of: Relayed) -> None:
        self.of, self._exact = of, NoCompression()
        self.compression_type = self._exact.compression_type

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        return self._exact.compress(tensor, info)

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        is_exact = serialized_tensor.metadata.compression == self.compression_type
        return (self._exact if is_exact else self.of.back).extract(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self.of.back.estimate_compression_ratio(info)
