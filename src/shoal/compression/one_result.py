"""Codecs for averages of which all members of a group must have the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression.base import CompressionBase, CompressionInfo, NoCompression, SerializedTensor


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


class Relayed(OneResult):
    """Like :class:`OneResult`, but where that takes fewer bytes, reducers pass on the members' messages as they are.

    Everybody then decodes the same messages and computes the mean itself, so no second codec loses anything. That pays
    if messages are short: with 4 bits among two members, with sparse messages among some dozens.

    Args:
        out: codec of what members send.
        back: codec of averages where messages are not passed on.
        sparse_mean: over whom the mean goes, see :mod:`shoal.averaging.message_means`.
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
    """The codec of averages of :class:`Relayed` messages, for members that get an average itself.

    What it writes is exact: an average that has been made of messages has no shorter encoding. It also reads what the
    codec for averages has made.

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
