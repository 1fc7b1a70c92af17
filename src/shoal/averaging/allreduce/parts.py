"""Tensors as parts: how they are cut, who reduces which part, and which of them hold the average.

Each tensor is cut into parts of a size that is good for the network. Tensors of one type whose codec treats each value
by itself are cut as if they were one: models have many small tensors, and each part costs more than its bytes. The
values are assigned to members by consecutive ranges (their shares); a part that crosses the border between two ranges
goes wholly to the member that has more of it. All members derive the same parts from the same agreed numbers.

How large the shares should be: in a butterfly all-reduce of n peers, a peer with a share w of the vector (Σw = 1) sends
and receives its own vector once and serves n - 1 others for its share. In units of the vector its traffic each way is
1 - w + (n - 1)·w = 1 + (n - 2)·w. With bandwidth b it needs (1 + (n - 2)·w) / b. The slowest peer that has a share is
as fast as it can be when all of them need the same time T::

    w = max(0, (T·b - 1) / (n - 2))

Peers fill up like water over an uneven ground.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from shoal.averaging.finite import all_finite
from shoal.averaging.messages import PartHeader, PartStatus
from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import SerializedTensor, bytes_of, dtype_name
from shoal.errors import ProtocolError
from shoal.p2p import Call

# So large that a message costs little beside it, so small that reducing goes on while others are on their way.
DEFAULT_PART_SIZE_BYTES = 2**19
# Tensors that are cut as one give at least so many parts to each member that reduces, so that shares come out even.
PARTS_PER_MEMBER = 4
# Parts are not smaller than this: fewer members reduce a small vector.
MIN_EVEN_BYTES = 2**14


def load_balance_peers(vector_size: int, bandwidths: Sequence[float | None], min_size: int = 0) -> tuple[int, ...]:
    """Split a vector among peers so that the slowest one is done as early as possible.

    Args:
        vector_size: number of values.
        bandwidths: of each peer, in any unit; 0 = must not reduce; ``None`` = unknown, taken as the mean of the others.
        min_size: a peer that would get fewer values gets none, unless that leaves nobody.

    Returns:
        Number of values for each peer; their sum is ``vector_size``.

    Raises:
        AssertionError: nobody may reduce.
    """
    known = [b for b in bandwidths if b]
    default = sum(known) / len(known) if known else 1.0
    speeds = [default if b is None else float(b) for b in bandwidths]
    assert any(speed > 0 for speed in speeds), f"at least one peer must have a bandwidth above 0, got {bandwidths}"
    shares = _drop_small(_fill(speeds), min_size / max(vector_size, 1))
    return _to_integers(shares, vector_size)


def rescale_shares(shares: Sequence[int], vector_size: int) -> tuple[int, ...]:
    """The same split for a vector of another size, in exact arithmetic: all members get the same.

    Args:
        shares: number of values for each peer, as agreed for the whole vector.
        vector_size: number of values to split now.
    """
    total = sum(shares)
    if total == vector_size:
        return tuple(shares)
    if total == 0:
        raise ValueError(f"cannot split {vector_size} values in the proportion {tuple(shares)}")
    result, remainders = zip(*[divmod(share * vector_size, total) for share in shares], strict=True)
    most = sorted(range(len(shares)), key=lambda i: (-remainders[i], i))[: vector_size - sum(result)]
    return tuple(share + (i in most) for i, share in enumerate(result))


def _fill(speeds: Sequence[float]) -> list[float]:
    """Shares that give every peer with a share the same time."""
    count = len(speeds)
    if count <= 2:  # the time does not depend on the shares: split evenly
        able = sum(speed > 0 for speed in speeds)
        return [1 / able if speed > 0 else 0.0 for speed in speeds]
    active = sorted((speed for speed in speeds if speed > 0), reverse=True)
    while True:
        time = (count - 2 + len(active)) / sum(active)
        if time * active[-1] >= 1 or len(active) == 1:
            break
        # This peer would need longer for its own vector alone: the others reduce for it.
        active.pop()
    slowest = active[-1]
    return [max(0.0, (time * speed - 1) / (count - 2)) if speed >= slowest else 0.0 for speed in speeds]


def _drop_small(shares: list[float], min_share: float) -> list[float]:
    if max(shares) < min_share:
        return shares
    kept = [share if share >= min_share else 0.0 for share in shares]
    total = sum(kept)
    return [share / total for share in kept]


def _to_integers(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Round down, then give the rest one by one to whoever is furthest below its share (Jefferson's rule)."""
    result = [math.floor(share * total) for share in shares]
    for _ in range(total - sum(result)):
        best = max(
            range(len(shares)),
            key=lambda i: (round(shares[i] / (result[i] + 1), 12), -result[i], -i) if shares[i] else (-1.0, 0, 0),
        )
        result[best] += 1
    return tuple(result)


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


Averages = list[torch.Tensor | None]
"""Values of several parts; ``None`` = the local values stay."""


class _Average(NamedTuple):
    values: torch.Tensor | None
    is_delta: bool


class RoundVector:
    """The averaged tensors as parts, by the member that reduces them.

    Args:
        tensors: contiguous CPU tensors; they receive the averages.
        infos: one for each tensor.
        codec: how parts travel.
        part_size_bytes: about how large a part is on the way.
        shares: how many values each member reduces.
        alpha: local values move by this fraction of the way to the average.
        is_spoilt: some values of this member may be NaN or infinite.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        codec: CompressionBase,
        part_size_bytes: int,
        shares: Sequence[int],
        alpha: float,
        is_spoilt: bool = False,
    ) -> None:
        self.alpha, self.is_spoilt = alpha, is_spoilt
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._values_averaged = 0
        self.parts: list[list[Part]] = [[] for _ in shares]
        """Parts of each reducer, in the order in which they are averaged."""
        for part in split_into_parts(infos, codec, part_size_bytes, shares):
            self.parts[part.reducer].append(part)
        self.held = [0] * len(shares)
        """How many parts of each reducer, from the first one on, hold the average here."""
        # Parts that are held, but to which nobody has contributed, by reducer and index.
        self._without_average: set[tuple[int, int]] = set()
        # Averages that came before those of earlier parts, by reducer and index.
        self._early: list[dict[int, _Average]] = [{} for _ in shares]

    @property
    def share_averaged(self) -> float:
        """Which share of the values holds an average with others, from 0 to 1."""
        total = sum(flat.numel() for flat in self._flat)
        return self._values_averaged / total if total else 1.0

    @property
    def is_complete(self) -> bool:
        """Whether all parts hold the average."""
        return all(held == len(parts) for held, parts in zip(self.held, self.parts, strict=True))

    def restart(self) -> None:
        """Forget what has been averaged: all of it is going to come."""
        self.held = [0] * len(self.held)
        self._values_averaged = 0
        self._without_average.clear()
        self.drop_early()

    def drop_early(self) -> None:
        """Forget averages whose predecessors have not come."""
        for early in self._early:
            early.clear()

    def has_average(self, reducer: int, index: int) -> bool:
        """Whether there is one of a part, as far as this member knows: nobody may have contributed."""
        return (reducer, index) not in self._without_average

    def copy_values(self) -> list[torch.Tensor]:
        """The values of all tensors now, flat; :meth:`Part.of` finds a part in them."""
        return [flat.clone() for flat in self._flat]

    def values(self, part: Part) -> torch.Tensor:
        """The values of a part: a view if they are of one tensor, else a copy."""
        return part.of(self._flat)

    def sound_values(self, part: Part) -> torch.Tensor | None:
        """The same, or ``None`` if some of them are not finite."""
        values = self.values(part)
        return None if self.is_spoilt and not all_finite(values) else values

    def encode(self, part: Part) -> SerializedTensor | None:
        """The values of a part, ready to be sent; ``None`` if some of them are not finite."""
        values = self.sound_values(part)
        return None if values is None else part.compress(values)

    def take(self, reducer: int, index: int, values: torch.Tensor | None, *, is_delta: bool = False) -> None:
        """The average of a reducer's part is here; it is applied when those of all earlier parts are.

        Args:
            values: ``None`` = there is none, the local values stay.
            is_delta: what is given is the difference to the local values.
        """
        early = self._early[reducer]
        early[index] = _Average(values, is_delta)
        while self.held[reducer] in early:
            average = early.pop(self.held[reducer])
            part = self.parts[reducer][self.held[reducer]]
            if average.values is not None:
                self._values_averaged += part.length
                pieces = part.pieces_of(self._flat)
                for piece, values in zip(pieces, average.values.split_with_sizes([*map(len, pieces)]), strict=True):
                    self._apply(piece, values, is_delta=average.is_delta)
            else:
                self._without_average.add((reducer, self.held[reducer]))
            self.held[reducer] += 1

    def _apply(self, target: torch.Tensor, values: torch.Tensor, *, is_delta: bool) -> None:
        if is_delta:
            # What a codec has lost may carry the sum beyond the largest number.
            largest = torch.finfo(target.dtype).max
            target.add_(values.to(target.dtype), alpha=self.alpha).clamp_(-largest, largest)
        elif self.alpha == 1 or (self.is_spoilt and not all_finite(target)):
            target.copy_(values)
        elif target.is_floating_point() or target.is_complex():
            mixed = torch.lerp(target, values, self.alpha)
            # The difference of huge numbers may be too large, but not what is between them.
            if not all_finite(mixed):
                mixed = (target * (1 - self.alpha)).add_(values, alpha=self.alpha)
            target.copy_(mixed)
        else:
            target.copy_(torch.lerp(target.double(), values.double(), self.alpha).round_())

    async def receive(self, call: Call, headers: Sequence[PartHeader], parts: Sequence[Part]) -> Averages:
        """Receive the payload of a message, after checking that it holds the parts that are due.

        Returns:
            The values of each part, or ``None`` if there are none.

        Raises:
            ProtocolError: it holds something else.
        """
        for header, part in zip(headers, parts, strict=True):
            self.check(header, part)
        nbytes = sum(header.nbytes for header in headers)
        buffer = bytes_of(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        await call.read_payload_into(buffer)
        values, start = [], 0
        for header, part in zip(headers, parts, strict=True):
            values.append(self.decode(header, part, buffer[start : start + header.nbytes]))
            start += header.nbytes
        return values

    def check(self, header: PartHeader, part: Part) -> None:
        """Check that a part is announced as it has to be.

        Raises:
            ProtocolError: it is not.
        """
        metadata, nbytes, dtype = header.metadata, header.nbytes, part.info.descriptor.dtype
        if header.status == PartStatus.UNCHANGED and metadata is None and not nbytes:
            return
        if metadata is None or metadata.size != (part.length,) or metadata.dtype != dtype_name(dtype):
            raise ProtocolError(f"sent {metadata} for a part of {part.length} values of {dtype}")
        if header.status == PartStatus.DELTA and not dtype.is_floating_point:
            raise ProtocolError(f"sent a difference for a part of {dtype}")
        limit = 2 * part.length * dtype.itemsize + 2**16
        if nbytes != part.nbytes if math.isfinite(part.nbytes) else not 0 <= nbytes <= limit:
            raise ProtocolError(f"sent {nbytes} bytes for a part of {part.length} values")

    def decode(self, header: PartHeader, part: Part, buffer: memoryview) -> torch.Tensor | None:
        """The values of a part whose bytes are all here, after :meth:`check`; ``None`` if there are none."""
        if header.metadata is None:
            return None
        return part.codec.extract(SerializedTensor(header.metadata, buffer)).detach()
