"""Tensors as parts: how they are cut, which member reduces which part, and which parts hold the average already.

Tensors are cut into parts of a size that suits the network. Models have many small tensors, and each part has overhead.
So tensors of one type are cut as if they were one, if their codec treats each value by itself. Each member gets a
consecutive range of the values, its share. If a part crosses the border between two shares, the member that has more of
it reduces all of it. All members derive the same parts from the same agreed numbers.

*How large the shares are.* Take a butterfly all-reduce of n peers, and a peer with a share w of the vector (Σw = 1). It
sends and receives its own vector once, and serves n - 1 others for its share. In units of the vector, its traffic each
way is 1 - w + (n - 1)·w = 1 + (n - 2)·w. With bandwidth b this takes the time (1 + (n - 2)·w) / b. The all-reduce is
fastest when all peers that have a share need the same time T::

    w = max(0, (T·b - 1) / (n - 2))

T follows from Σw = 1 (water filling). A peer that needs longer than T for its own vector alone gets no share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from shoal.averaging.finite import all_finite
from shoal.averaging.message_means import checked, unpack
from shoal.averaging.messages import PartHeader, PartStatus
from shoal.base.logs import quoted
from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import SerializedTensor, bytes_of, dtype_name
from shoal.compression.one_result import Averages as ExactAverages
from shoal.compression.one_result import Relayed
from shoal.compression.statistics import codec_for_average
from shoal.errors import ProtocolError
from shoal.p2p import Call

# Chosen: large enough that the overhead of a message is small, small enough that some parts are reduced while others
# are still in flight.
DEFAULT_PART_SIZE_BYTES = 2**19
# Tensors that are cut as one give each reducer at least this many parts (chosen). With fewer, rounding would make the
# shares uneven.
PARTS_PER_MEMBER = 4
# Parts that are cut to even out shares are not smaller than this (chosen). So fewer members reduce a small vector.
MIN_EVEN_BYTES = 2**14
# A part that travels as a short message takes much memory once decoded, so it has at most this many values (chosen).
MOST_RELAYED_VALUES = 2**20


def load_balance_peers(vector_size: int, bandwidths: Sequence[float | None], min_size: int = 0) -> tuple[int, ...]:
    """Split a vector among peers so that the slowest one is done as early as possible.

    Args:
        vector_size: number of values.
        bandwidths: one for each peer, in any unit. 0: the peer must not reduce. ``None``: unknown, taken as the mean of
            the known ones.
        min_size: a peer that would get fewer values gets none, unless no peer would be left.

    Returns:
        Number of values for each peer; their sum is ``vector_size``.

    Raises:
        AssertionError: no peer may reduce.
    """
    known = [b for b in bandwidths if b]
    default = sum(known) / len(known) if known else 1.0
    speeds = [default if b is None else float(b) for b in bandwidths]
    assert any(speed > 0 for speed in speeds), f"at least one peer must have a bandwidth above 0, got {bandwidths}"
    shares = _drop_small(_fill(speeds), min_size / max(vector_size, 1))
    return _to_integers(shares, vector_size)


def rescale_shares(shares: Sequence[int], vector_size: int) -> tuple[int, ...]:
    """The same split for a vector of another size. Exact arithmetic gives all members the same numbers.

    Args:
        shares: number of values for each peer, as agreed for the whole vector.
        vector_size: number of values to split now.

    Raises:
        ValueError: all shares are 0, but there are values to split.
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
    """Shares such that all peers that have one need the same time."""
    count = len(speeds)
    if count <= 2:  # the time does not depend on the shares: split evenly
        able = sum(speed > 0 for speed in speeds)
        return [1 / able if speed > 0 else 0.0 for speed in speeds]
    active = sorted((speed for speed in speeds if speed > 0), reverse=True)
    while True:
        time = (count - 2 + len(active)) / sum(active)
        if time * active[-1] >= 1 or len(active) == 1:
            break
        # This peer needs longer for its own vector alone, so the others reduce everything.
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
    """Round down, then hand out the rest one by one, each to the peer furthest below its share (Jefferson's rule)."""
    result = [math.floor(share * total) for share in shares]
    for _ in range(total - sum(result)):
        best = max(
            range(len(shares)),
            # Rounded, so that shares which differ only by floating point errors count as equal.
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
    """The unit of averaging, reduced by one member: a piece of a tensor, or of several that are cut as one."""

    segments: tuple[Segment, ...]
    """Where its values are, in order."""
    length: int
    """The number of values."""
    reducer: int
    """The position in the group of the member that reduces it."""
    codec: CompressionBase
    info: CompressionInfo
    """The description of this part for the codec."""

    @cached_property
    def lengths(self) -> list[int]:
        """The number of values in each segment."""
        return [stop - start for _, start, stop in self.segments]

    def pieces_of(self, flat_tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of this part, as one view into each tensor that holds some of them."""
        return [flat_tensors[tensor_index][start:stop] for tensor_index, start, stop in self.segments]

    def of(self, flat_tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of this part: a view if they lie in one tensor, else a copy."""
        pieces = self.pieces_of(flat_tensors)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @cached_property
    def nbytes(self) -> float:
        """The size on the wire in bytes; ``inf``: the codec cannot tell before it has the values."""
        nbytes = self.codec.compressed_nbytes((self.length,), self.info)
        return math.inf if nbytes is None else nbytes

    @cached_property
    def returned(self) -> Part:
        """This part on the way back, with the codec of its average."""
        codec = self.codec.for_averages
        return self if codec is None else replace(self, codec=codec)

    def compress(self, values: torch.Tensor) -> SerializedTensor:
        """Encode values for the wire: those of this part, or others of the same length."""
        return self.codec.compress(values, self.info)


def part_length(info: CompressionInfo, codec: CompressionBase, part_size_bytes: int) -> int:
    """The number of values in a part that is about ``part_size_bytes`` long after compression; at least 1."""
    bytes_per_value = info.descriptor.dtype.itemsize * codec.estimate_compression_ratio(info)
    return max(1, int(part_size_bytes / bytes_per_value))


def split_into_parts(
    infos: Sequence[CompressionInfo], codec: CompressionBase, part_size_bytes: int, shares: Sequence[int]
) -> list[Part]:
    """Cut tensors into parts and assign them to members.

    Args:
        infos: one for each tensor.
        codec: compresses the parts.
        part_size_bytes: the approximate size of a part on the wire.
        shares: how many values each member should reduce; their sum is the number of values in all tensors.
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
        is_on_grid = own_codec.for_averages is not None and own_codec.block is not None
        if (own_codec.elementwise or is_on_grid) and total:
            evenly = math.ceil(total / (PARTS_PER_MEMBER * reducers))
            length = min(length, max(evenly, part_length(info, own_codec, MIN_EVEN_BYTES)))
        if isinstance(own_codec, Relayed):
            length = min(length, MOST_RELAYED_VALUES)
        if is_on_grid:
            # Cut at block borders, so that encoding the whole vector gives the same blocks.
            length = max(1, length // (block := own_codec.block or 1)) * block
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
    """Indices of tensors in groups that are cut as one, with the codec of each group."""
    groups: dict[object, tuple[CompressionBase, list[int]]] = {}
    for index, info in enumerate(infos):
        own_codec = codec_for_average(codec, info)
        # The role matters because PartReducer averages gradients and parameters differently.
        kind = (own_codec.fingerprint, info.descriptor.dtype, info.role) if own_codec.elementwise else index
        groups.setdefault(kind, (own_codec, []))[1].append(index)
    return groups.values()


class _Segments:
    """Cuts tensors one after another, as if they were a single one."""

    def __init__(self, indices: Sequence[int], lengths: Sequence[int]) -> None:
        whole = [Segment(index, 0, length) for index, length in zip(indices, lengths, strict=True) if length]
        self._left = whole[::-1]

    def next(self, length: int) -> tuple[Segment, ...]:
        """Where the next ``length`` values are."""
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
    """Tells which member owns most of a range. Ranges must be asked for in ascending order."""

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
"""Values of several parts; ``None``: there is no average, and the local values stay."""


class _Average(NamedTuple):
    values: torch.Tensor | None
    is_delta: bool


class RoundVector:
    """The averaged tensors as parts, grouped by the member that reduces them.

    Args:
        tensors: contiguous CPU tensors; the averages are written into them.
        infos: one for each tensor.
        codec: compresses the parts for the wire.
        part_size_bytes: the approximate size of a part on the wire.
        shares: how many values each member reduces.
        alpha: local values move by this fraction of the way to the average.
        is_spoilt: whether some values of this member may be NaN or infinite.
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
        self.flat = [tensor.detach().view(-1) for tensor in tensors]
        """The tensors, each in one dimension."""
        self._total_values, self._values_averaged = sum(flat.numel() for flat in self.flat), 0
        self.parts: list[list[Part]] = [[] for _ in shares]
        """Parts of each reducer, in the order in which they are averaged."""
        for part in split_into_parts(infos, codec, part_size_bytes, shares):
            self.parts[part.reducer].append(part)
        self.held = [0] * len(shares)
        """By reducer: how many of its parts, from the first one on, hold the average here."""
        # Parts, by reducer and index, that count as held but have no average, because no member has contributed.
        self._without_average: set[tuple[int, int]] = set()
        # By reducer and index: averages that wait for those of earlier parts. Parts are applied in order, so one number
        # per reducer tells which are held.
        self._early: list[dict[int, _Average]] = [{} for _ in shares]

    @property
    def share_averaged(self) -> float:
        """The share of the values that holds an average with others, from 0 to 1."""
        return self._values_averaged / self._total_values if self._total_values else 1.0

    @property
    def is_complete(self) -> bool:
        """Whether all parts hold the average."""
        return all(held == len(parts) for held, parts in zip(self.held, self.parts, strict=True))

    def restart(self) -> None:
        """Forget which parts have been averaged, because all averages will come again."""
        self.held = [0] * len(self.held)
        self._values_averaged = 0
        self._without_average.clear()
        self.drop_early()

    def drop_early(self) -> None:
        """Forget averages that still wait for those of earlier parts."""
        for early in self._early:
            early.clear()

    def let_go(self) -> None:
        """Release the tensors, because the round is over for all members."""
        self.flat = []
        self.drop_early()

    def has_average(self, reducer: int, index: int) -> bool:
        """Whether a held part has an average. It has none if no member has contributed."""
        return (reducer, index) not in self._without_average

    def copy_values(self) -> list[torch.Tensor]:
        """A copy of the current values of all tensors, flat; :meth:`Part.of` finds a part in them."""
        return [flat.clone() for flat in self.flat]

    def values(self, part: Part) -> torch.Tensor:
        """The values of a part: a view if they lie in one tensor, else a copy."""
        return part.of(self.flat)

    def sound_values(self, part: Part) -> torch.Tensor | None:
        """The values of a part, or ``None`` if some of them are not finite."""
        values = self.values(part)
        return None if self.is_spoilt and not all_finite(values) else values

    def encode(self, part: Part) -> SerializedTensor | None:
        """The values of a part, encoded for the wire; ``None`` if some of them are not finite."""
        values = self.sound_values(part)
        return None if values is None else part.compress(values)

    def take(self, reducer: int, index: int, values: torch.Tensor | None, *, is_delta: bool = False) -> None:
        """Take the average of a part. It is applied after those of all earlier parts of the same reducer.

        Args:
            reducer: the member that reduces the part.
            index: the part's position among those of the reducer.
            values: the average; ``None``: it has none, and the local values stay.
            is_delta: whether ``values`` is the difference to the local values.
        """
        early = self._early[reducer]
        early[index] = _Average(values, is_delta)
        while self.held[reducer] in early:
            average = early.pop(self.held[reducer])
            part = self.parts[reducer][self.held[reducer]]
            if average.values is not None:
                self._values_averaged += part.length
                pieces = part.pieces_of(self.flat)
                for piece, values in zip(pieces, average.values.split_with_sizes([*map(len, pieces)]), strict=True):
                    self._apply(piece, values, is_delta=average.is_delta)
            else:
                self._without_average.add((reducer, self.held[reducer]))
            self.held[reducer] += 1

    def _apply(self, target: torch.Tensor, values: torch.Tensor, *, is_delta: bool) -> None:
        if is_delta:
            # The codec's error may push the sum beyond the largest number of the type.
            largest = torch.finfo(target.dtype).max
            target.add_(values.to(target.dtype), alpha=self.alpha).clamp_(-largest, largest)
        elif self.alpha == 1 or (self.is_spoilt and not all_finite(target)):
            target.copy_(values)
        elif target.is_floating_point() or target.is_complex():
            mixed = torch.lerp(target, values, self.alpha)
            # lerp takes the difference of the two, which overflows for huge numbers. The result itself does not.
            if not all_finite(mixed):
                mixed = (target * (1 - self.alpha)).add_(values, alpha=self.alpha)
            target.copy_(mixed)
        else:
            target.copy_(torch.lerp(target.double(), values.double(), self.alpha).round_())

    async def receive(self, call: Call, headers: Sequence[PartHeader], parts: Sequence[Part]) -> Averages:
        """Check that a message announces the expected parts, then receive its payload.

        Returns:
            The values of each part; ``None`` for a part without values.

        Raises:
            ProtocolError: the message announces something else.
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
        """Check the announcement of a part: its status, type, length and size in bytes.

        Raises:
            ProtocolError: it does not fit the part.
        """
        metadata, nbytes, dtype = header.metadata, header.nbytes, part.info.descriptor.dtype
        if header.status == PartStatus.UNCHANGED and metadata is None and not nbytes:
            return
        if metadata is None or metadata.size != (part.length,) or metadata.dtype != dtype_name(dtype):
            raise ProtocolError(f"sent {quoted(metadata)} for a part of {part.length} values of {dtype}")
        if header.status == PartStatus.DELTA and not dtype.is_floating_point:
            raise ProtocolError(f"sent a difference for a part of {dtype}")
        if header.status == PartStatus.MESSAGES and not isinstance(part.codec, ExactAverages):
            raise ProtocolError("sent members' messages for a part that is not sent as messages")
        # If the codec cannot tell the size beforehand, this bounds the memory that the other side can claim.
        limit = 2 * part.length * dtype.itemsize + 2**16
        if nbytes != part.nbytes if math.isfinite(part.nbytes) else not 0 <= nbytes <= limit:
            raise ProtocolError(f"sent {nbytes} bytes for a part of {part.length} values")

    def decode(self, header: PartHeader, part: Part, buffer: memoryview) -> torch.Tensor | None:
        """Decode a part whose bytes have all arrived and whose header has passed :meth:`check`; ``None``: no values.

        A message that may be passed on is kept as bytes.
        """
        if header.metadata is None:
            return None
        serialized = SerializedTensor(header.metadata, buffer)
        if header.status == PartStatus.MESSAGES and isinstance(part.codec, ExactAverages):
            relayed = part.codec.of
            # Until the average is applied, the vector holds what this member has sent.
            return unpack(relayed, serialized, lambda: relayed.compress(self.values(part), part.info).buffer)
        if isinstance(part.codec, Relayed):
            return checked(part.codec, serialized)
        return part.codec.extract(serialized).detach()
