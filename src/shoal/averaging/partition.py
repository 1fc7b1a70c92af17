"""Cutting a list of tensors into parts, and saying who reduces which part.

Each tensor is cut into parts of a size that is good for the network. Tensors of one type whose codec treats each value
by itself are cut as if they were one: models have many small tensors, and each part costs more than its bytes. The
values are assigned to members by consecutive ranges (their shares); a part that crosses the border between two ranges
goes wholly to the member that has more of it. All members derive the same parts from the same agreed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import SerializedTensor
from shoal.errors import AllreduceException, BannedException

DEFAULT_PART_SIZE_BYTES = 2**19
PARTS_PER_MEMBER = 4
"""At least, for each member that reduces, of tensors that are cut as one: so that shares come out even."""
MIN_EVEN_BYTES = 2**14
"""But no smaller parts than this: fewer members reduce a small vector."""

__all__ = [
    "DEFAULT_PART_SIZE_BYTES",
    "AllreduceException",
    "BannedException",
    "Part",
    "part_length",
    "split_into_parts",
]


class Segment(NamedTuple):
    """A range of values of one flattened tensor."""

    tensor_index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """What is averaged as a whole, by one member: a piece of a tensor, or of several that are cut as one."""

    segments: tuple[Segment, ...]
    """Where its values are, in order."""
    length: int
    """How many values."""
    reducer: int
    """Position of the member in the group."""
    codec: CompressionBase
    info: CompressionInfo
    """What the codec may know about this part."""

    def pieces_of(self, flat_tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of this part, as a view of each tensor that has some."""
        return [flat_tensors[tensor_index][start:stop] for tensor_index, start, stop in self.segments]

    def of(self, flat_tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of this part: a view if they are of one tensor, else a copy."""
        pieces = self.pieces_of(flat_tensors)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @cached_property
    def nbytes(self) -> float:
        """How many bytes it takes on the way; ``inf``: the codec cannot tell before it has the values."""
        nbytes = self.codec.compressed_nbytes((self.length,), self.info)
        return math.inf if nbytes is None else nbytes

    def compress(self, values: torch.Tensor) -> SerializedTensor:
        """Values in the place of this part's, ready to be sent."""
        return self.codec.compress(values, self.info)


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
    reducers = sum(share > 0 for share in shares)
    parts: list[Part] = []
    offset = 0
    for own_codec, indices in _cut_as_one(infos, codec):
        lengths = [infos[index].descriptor.numel() for index in indices]
        info, total = infos[indices[0]], sum(lengths)
        if len(indices) > 1:
            info = replace(info, descriptor=replace(info.descriptor, size=(total,)))
        length = part_length(info, own_codec, part_size_bytes)
        if own_codec.elementwise and total:
            evenly = math.ceil(total / (PARTS_PER_MEMBER * reducers))
            length = min(length, max(evenly, part_length(info, own_codec, MIN_EVEN_BYTES)))
        segments = _Segments(indices, lengths)
        for part_index, start in enumerate(range(0, total, length)):
            stop = min(start + length, total)
            reducer = borders.owner(offset + start, offset + stop)
            part_info = info.get_part(part_index, length)
            parts.append(Part(segments.next(stop - start), stop - start, reducer, own_codec, part_info))
        offset += total
    return parts


def _cut_as_one(
    infos: Sequence[CompressionInfo], codec: CompressionBase
) -> Iterable[tuple[CompressionBase, list[int]]]:
    """Indices of tensors in groups, with the codec of each; the role matters when a part is averaged."""
    groups: dict[object, tuple[CompressionBase, list[int]]] = {}
    for index, info in enumerate(infos):
        own_codec = codec.for_tensor(info)
        kind = (own_codec.fingerprint, info.descriptor.dtype, info.role) if own_codec.elementwise else index
        groups.setdefault(kind, (own_codec, []))[1].append(index)
    return groups.values()


class _Segments:
    """Cuts tensors of some lengths as if they were one."""

    def __init__(self, indices: Sequence[int], lengths: Sequence[int]) -> None:
        whole = [Segment(index, 0, length) for index, length in zip(indices, lengths, strict=True) if length]
        self._left = whole[::-1]

    def next(self, length: int) -> tuple[Segment, ...]:
        """Where the next so many values are."""
        segments: list[Segment] = []
        while length:
            tensor_index, start, end = self._left.pop()
            stop = min(start + length, end)
            length -= stop - start
            segments.append(Segment(tensor_index, start, stop))
            if stop < end:
                self._left.append(Segment(tensor_index, stop, end))
        return tuple(segments)


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
