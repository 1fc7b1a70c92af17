"""Cutting a list of tensors into parts, and saying who reduces which part.

Tensors are taken in order and each one is cut into parts of a size that is good for the network; a part never spans
tensors. The flat vector's values are assigned to members by consecutive ranges (their shares); a part that crosses the
border between two ranges goes wholly to the member that has more of it. All members derive the same parts from the
same agreed numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.compression import CompressionBase, CompressionInfo
from shoal.errors import AllreduceException, BannedException

DEFAULT_PART_SIZE_BYTES = 2**19

__all__ = [
    "DEFAULT_PART_SIZE_BYTES",
    "AllreduceException",
    "BannedException",
    "Part",
    "part_length",
    "split_into_parts",
]


@dataclass(frozen=True)
class Part:
    """A piece of one tensor, reduced by one member."""

    tensor_index: int
    part_index: int
    """Among the parts of the same tensor."""
    start: int
    stop: int
    """Range of values within the flattened tensor."""
    reducer: int
    """Position of the member in the group."""
    info: CompressionInfo
    """What the codec may know about this part."""

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, flat_tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of this part, as a view."""
        return flat_tensors[self.tensor_index][self.start : self.stop]


def part_length(info: CompressionInfo, codec: CompressionBase, part_size_bytes: int) -> int:
    """How many values of a tensor make a part of about this many bytes after compression."""
    bytes_per_value = info.descriptor.dtype.itemsize * codec.estimate_compression_ratio(info)
    return max(1, int(part_size_bytes / bytes_per_value))


def split_into_parts(
    infos: Sequence[CompressionInfo], codec: CompressionBase, part_size_bytes: int, shares: Sequence[int]
) -> list[Part]:
    """Cut tensors into parts and assign them to members.

    Args:
        infos: one for each tensor.
        shares: how many values each member should reduce; their sum is the number of values of all tensors.
    """
    borders = _Borders(shares)
    parts: list[Part] = []
    offset = 0
    for tensor_index, info in enumerate(infos):
        total, length = info.descriptor.numel(), part_length(info, codec, part_size_bytes)
        for part_index, start in enumerate(range(0, total, length)):
            stop = min(start + length, total)
            reducer = borders.owner(offset + start, offset + stop)
            parts.append(Part(tensor_index, part_index, start, stop, reducer, info.get_part(part_index, length)))
        offset += total
    return parts


class _Borders:
    """Who owns most of a range; ranges are asked for in ascending order."""

    def __init__(self, shares: Sequence[int]) -> None:
        self._owners: list[tuple[int, int, int]] = []  # member, start, stop
        start = 0
        for member, share in enumerate(shares):
            if share > 0:
                self._owners.append((member, start, start + share))
                start += share
        self._first = 0

    def owner(self, start: int, stop: int) -> int:
        while self._owners[self._first][2] <= start:
            self._first += 1
        best, best_overlap = self._owners[self._first][0], 0
        for member, low, high in self._owners[self._first :]:
            if low >= stop:
                break
            overlap = min(stop, high) - max(start, low)
            if overlap > best_overlap:
                best, best_overlap = member, overlap
        return best
