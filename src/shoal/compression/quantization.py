"""Codecs with 8 or 4 bits per value: a codebook per tensor, or fixed levels and a scale per block.

A codebook has 256 levels. Each level is the average of the values that it stands for.

Blockwise codecs have fixed levels between -1 and 1. The scale of a block is its value of largest magnitude, including
the sign. So that value is always level 1, and 4 bits need no level -1. Every value takes exactly the nearest level.

NaN counts as 0, and an infinity as the largest finite magnitude of the tensor or block. So restored values are always
finite, and a single non-finite value does not spoil the others.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch

from shoal.compression.base import CompressionType, typed
from shoal.compression.floating import CHUNK, FP32_MAX, FloatingPointCompression, finite, in_chunks, saturate, scratch

LEVELS = 256  # derived: one byte per value
CODEBOOK_NBYTES = LEVELS * torch.float32.itemsize

# If a larger share of the values has the same code (chosen), most values are equal, or small compared with the rest.
# Then the sum of each code must be exact, which takes two passes.
MOST_IN_ONE_PASS = 0.125

# 8-bit levels are the cubes of this many equal steps to either side of 0. They reach from 5e-7 to 1. Their relative
# precision halves with each power of ten, like that of the dynamic 8-bit type (Dettmers et al., arXiv 2110.02861), but
# smoothly, and they are computed rather than looked up. docs/compression.md compares the two.
STEPS_8BIT = 127

# Levels with the least squared error (Lloyd's algorithm) on blocks of 64 values with signed scales. The values are a
# mixture of normal, Laplace, Student-t and row-scaled ones and of gradients of a small network; docs/compression.md
# compares other tables. Half of the first negative level is the border to 0; :class:`LevelTable` needs it to be exact.
POSITIVE_4BIT = [0.0610, 0.1394, 0.2310, 0.3346, 0.4531, 0.5912, 0.7644, 1.0]
NEGATIVE_4BIT = [-250 / 4096, -0.1391, -0.2350, -0.3467, -0.4779, -0.6374, -0.8430]


class CodebookQuantization(FloatingPointCompression):
    """Base class: 256 float32 numbers, then one byte per value."""

    def _nbytes(self, size: Sequence[int]) -> int:
        count = math.prod(size)
        return CODEBOOK_NBYTES + count if count else 0

    def _encode(self, values: torch.Tensor, size: Sequence[int], payload: np.ndarray) -> None:
        codes = typed(payload[CODEBOOK_NBYTES:], torch.uint8)
        averages = self._quantize(values, codes)
        if averages is None:
            averages = self._quantize(finite(values), codes)
            assert averages is not None, "finite values have averages"
        if values.dtype == torch.float64:
            averages.clip(-FP32_MAX, FP32_MAX, out=averages)
        payload[:CODEBOOK_NBYTES].view(np.float32)[:] = averages

    def _decode(self, payload: np.ndarray, size: Sequence[int], values: torch.Tensor) -> None:
        codebook = typed(payload[:CODEBOOK_NBYTES], torch.float32).to(values.dtype)
        codes = typed(payload[CODEBOOK_NBYTES:], torch.uint8)
        for some, part in zip(in_chunks(codes), in_chunks(values), strict=True):
            index = scratch("index", torch.int32, some.numel()).copy_(some)
            torch.index_select(codebook, 0, index, out=part)

    @abstractmethod
    def _quantize(self, values: torch.Tensor, codes: torch.Tensor) -> np.ndarray | None:
        """Choose a code for each value.

        Returns:
            The average of the values of each code. ``None`` if values are not finite, or so large or small that the
            arithmetic needs float64.
        """


def _averages(
    chunks: Iterable[tuple[torch.Tensor, torch.Tensor]], offset: float, largest_sum: float = 0.0
) -> np.ndarray:
    """Mean of the values of each code.

    Args:
        chunks: codes, each with its value minus the offset.
        offset: added to all averages.
        largest_sum: an upper bound for the sum of any values of one chunk. It saves a pass if that is exact enough.
    """
    unit = math.ldexp(1.0, math.frexp(largest_sum)[1] + 2) if largest_sum else 0.0
    total = None
    for codes, values in chunks:
        found = (_in_one_pass(codes, values, unit) if unit else None) or _in_two_passes(codes, values)
        total = found if total is None else (total[0] + found[0], total[1] + found[1])
    assert total is not None, "there are values"
    counts, sums = total
    averages: np.ndarray = sums / np.maximum(counts, 1)
    return averages + offset if offset else averages


def _in_one_pass(codes: torch.Tensor, values: torch.Tensor, unit: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Count and sum the values of each code in one pass: add a large unit to each value before summing.

    No sum of values reaches half of the unit. So the sum, rounded to units, is the count. ``None`` if this would not be
    exact enough.
    """
    weights = scratch("weights", torch.float64, len(values)).copy_(values).add_(unit)
    found = torch.bincount(codes, weights, LEVELS).numpy()
    counts = np.rint(found / unit)
    if np.maximum.reduce(counts) > MOST_IN_ONE_PASS * len(values):
        return None
    return counts, found - counts * unit


def _in_two_passes(codes: torch.Tensor, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    weights = scratch("weights", torch.float64, len(values)).copy_(values)
    return torch.bincount(codes, minlength=LEVELS).numpy(), torch.bincount(codes, weights, LEVELS).numpy()


def _readable(values: torch.Tensor) -> Iterable[torch.Tensor]:
    """The values chunk by chunk in their working type, in their own memory where possible."""
    dtype, parts = _working_type(values), in_chunks(values)
    return parts if dtype == values.dtype else (scratch("values", dtype, len(part)).copy_(part) for part in parts)


def _centred(values: torch.Tensor, centre: float) -> Iterable[torch.Tensor]:
    """The distance of the values from the centre, chunk by chunk."""
    parts = _readable(values)
    if not centre:
        return parts
    return (torch.sub(part, centre, out=scratch("centred", part.dtype, len(part))) for part in parts)


def _working_type(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _mean_and_deviation(values: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation. The mean is a number of the working type, so it can be subtracted exactly."""
    total = squares = 0.0
    for part in _readable(values):
        total += float(part.sum())
        squares += float(torch.dot(part, part))
    count = values.numel()
    mean, square = total / count, squares / count
    if values.dtype != torch.float64:
        mean = float(np.float32(mean))
    # If the mean makes up nearly all of the squares, the difference loses most of the precision.
    if square - mean * mean < 0.01 * square:
        return mean, math.sqrt(sum(float(torch.dot(part, part)) for part in _centred(values, mean)) / count)
    return mean, math.sqrt(square - mean * mean)


def _centre(mean: float, deviation: float) -> float:
    """The number to subtract from the values to keep their precision; usually 0, which is fastest."""
    return mean if abs(mean) > deviation / 2 else 0.0


def _largest_sum(values: torch.Tensor, mean: float, deviation: float, centre: float) -> float:
    """Upper bound for the sum of the distances of any of a chunk's values from the centre (Cauchy-Schwarz)."""
    count = values.numel()
    return math.hypot(deviation, mean - centre) * math.sqrt(count * min(count, CHUNK))


def _is_safe(magnitude: float, values: torch.Tensor) -> bool:
    """Whether the working type can hold squares and sums of values of this magnitude; ``False`` for NaN."""
    if values.dtype == torch.float64:
        return math.isfinite(magnitude)
    return 1e-15 < magnitude < 1e15


class Uniform8BitQuantization(CodebookQuantization):
    """256 bins of equal width, of which 255 cover six standard deviations around the mean.

    Values further out fall into the outermost bins. The bins are shifted so that 0, which is frequent in gradients, is
    the centre of one; this takes the 256th bin.
    """

    compression_type = CompressionType.UNIFORM_8BIT

    def _quantize(self, values: torch.Tensor, codes: torch.Tensor) -> np.ndarray | None:
        mean, deviation = _mean_and_deviation(values)
        if not _is_safe(deviation, values):
            return None
        centre = _centre(mean, deviation)
        bins_per_unit = (LEVELS - 1) / (6 * deviation) if deviation else 0.0
        shift = torch.full((), _BIN_ZERO + LEVELS // 2 - round((mean - centre) * bins_per_unit), device="cpu")
        chunks = self._chunks(_centred(values, centre), codes, shift, bins_per_unit)
        return _averages(chunks, centre, _largest_sum(values, mean, deviation, centre))

    def _chunks(
        self, distances: Iterable[torch.Tensor], codes: torch.Tensor, shift: torch.Tensor, bins_per_unit: float
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Fill in the codes, and yield them with their values chunk by chunk."""
        for distance, some in zip(distances, in_chunks(codes), strict=True):
            bins = scratch("bins", torch.float32, len(some))
            torch.add(shift, distance, alpha=bins_per_unit, out=bins).clamp_(_BIN_ZERO, _BIN_ZERO + LEVELS - 1)
            yield some.copy_(bins.view(torch.int32)), distance


# From 2**23 on, float32 holds only whole numbers: adding this rounds a number and leaves it in the lowest bits.
_BIN_ZERO = 2.0**23


class Quantile8BitQuantization(CodebookQuantization):
    """256 levels that follow the values: bins hold about equally many, and each value takes the nearest bin average.

    To find the quantiles, the values are centred and scaled, and each of the 65,536 numbers of float16 is counted.
    """

    compression_type = CompressionType.QUANTILE_8BIT

    def _quantize(self, values: torch.Tensor, codes: torch.Tensor) -> np.ndarray | None:
        mean, deviation = _mean_and_deviation(values)
        centre = _centre(mean, deviation)
        largest = max(max(float(part.amax()), -float(part.amin())) for part in _centred(values, centre))
        if not _is_safe(largest, values) or not math.isfinite(deviation):
            return None
        scale = 2.0**15 / largest if largest else 0.0
        # A single chunk stays valid in the scratch memory, so the second pass can use it again.
        kept = list(_cells(values, centre, scale)) if values.numel() <= CHUNK else []
        counts = None
        for _, cells in kept or _cells(values, centre, scale):
            found = torch.bincount(cells, minlength=CELLS)
            counts = found if counts is None else counts.add_(found)
        assert counts is not None
        code_of_cell = _codes_of_cells(counts)
        chunks = zip(kept or _cells(values, centre, scale), in_chunks(codes), strict=True)
        return _averages(
            ((torch.index_select(code_of_cell, 0, cells, out=some), distance) for (distance, cells), some in chunks),
            centre,
        )


# The number of bit patterns of float16.
CELLS = 2**16

# The rounds of Lloyd's algorithm (chosen).
_REFINEMENTS = 2


def _cells(values: torch.Tensor, centre: float, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunk by chunk: distances of the values from the centre, and the rank of each, scaled, among all of float16."""
    for distance in _centred(values, centre):
        count = distance.numel()
        short, ranks = scratch("short", torch.float16, count), scratch("ranks", torch.int16, count)
        short.copy_(torch.mul(distance, scale, out=scratch("scaled", distance.dtype, count)))
        # Flip all bits but the sign of negative numbers, so that the bits sort like the numbers.
        bits = short.view(torch.int16)
        torch.bitwise_right_shift(bits, 15, out=ranks).bitwise_and_(CELLS // 2 - 1).bitwise_xor_(bits)
        yield distance, scratch("cells", torch.int32, count).copy_(ranks).add_(CELLS // 2)


@cache
def cell_values() -> torch.Tensor:
    """All of float16, ascending. The ends stand for infinities and NaN, which never occur here."""
    positive = torch.arange(CELLS // 2, dtype=torch.int16, device="cpu").view(torch.float16).double()
    positive = torch.where(positive.isfinite(), positive, 2.0**16)
    return torch.cat([-positive.flip(0), positive])


def _codes_of_cells(counts: torch.Tensor) -> torch.Tensor:
    """The code of each cell, given how many values are in each cell."""
    below, sums = scratch("below", torch.int64, CELLS + 1), scratch("sums", torch.float64, CELLS + 1)
    below[0] = sums[0] = 0
    torch.cumsum(counts, 0, out=below[1:])
    torch.mul(counts, cell_values(), out=sums[1:]).cumsum_(0)
    edges = _refined(below.numpy(), sums.numpy(), cell_values().numpy())
    starts = torch.zeros(CELLS + 1, dtype=torch.uint8, device="cpu").index_add_(
        0, torch.from_numpy(edges[1:-1]), torch.ones(LEVELS - 1, dtype=torch.uint8, device="cpu")
    )
    return starts[:CELLS].cumsum(0, dtype=torch.uint8)


def _refined(below: np.ndarray, sums: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The first cell of each code, and the end. Numpy is faster than torch with a few hundred numbers.

    Args:
        below: for each cell, the number of values in the cells before it; the last entry counts all.
        sums: the sums of these values.
        values: the value of each cell, ascending.
    """
    edges = np.zeros(LEVELS + 1, dtype=np.int64)
    edges[-1] = CELLS
    edges[1:-1] = np.searchsorted(below[1:], below[-1] * np.arange(1, LEVELS) // LEVELS)
    # Lloyd's algorithm: move each value to the nearest average.
    for _ in range(_REFINEMENTS):
        inside = np.diff(below[edges])
        averages = np.where(
            inside > 0, np.diff(sums[edges]) / np.maximum(inside, 1), values[np.minimum(edges[:-1], CELLS - 1)]
        )
        edges[1:-1] = np.searchsorted(values, (averages[1:] + averages[:-1]) / 2, side="right")
    return edges


class LevelTable:
    """Finds the nearest level with one table lookup, whatever the spacing of the levels.

    The upper 16 bits of a float32 (sign, exponent and 7 bits of precision) select an interval so narrow that at most
    one border between two levels lies in it. For each interval the table holds the code of its lower end and, in the
    lower half of the word, the distance of the border from the upper end. Adding the lower 16 bits of the number then
    carries into the code exactly if the number is beyond the border.

    Args:
        positive: levels above 0, by magnitude; their codes start at 1.
        negative: levels below 0, by magnitude; their codes follow.
        zeros: how many codes stand for 0. With 2, negative numbers that round to 0 get the code just before those of
            the negative levels, and the border there is exact for any level.
    """

    def __init__(self, positive: Sequence[float], negative: Sequence[float], zeros: int = 1) -> None:
        levels = [0.0, *positive, *[-0.0] * (zeros - 1), *negative]
        self.levels = torch.tensor(levels, dtype=torch.float32, device="cpu")
        """By code."""
        first_negative = len(self.levels) - len(negative)
        zero = 0 if zeros == 1 else first_negative - 1
        self._carries = torch.cat([_carries(positive, 0, 1), _carries(negative, zero, first_negative)])

    def nearest(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Store the code of each float32 value; the values are overwritten."""
        bits = values.view(torch.int32)
        index = scratch("index", torch.int32, bits.numel())
        torch.bitwise_right_shift(bits, 16, out=index).bitwise_and_(2**16 - 1)
        found = torch.index_select(self._carries, 0, index, out=scratch("found", torch.int32, bits.numel()))
        codes.copy_(found.add_(bits.bitwise_and_(2**16 - 1)).bitwise_right_shift_(16))


def _carries(levels: Sequence[float], zero: int, first: int) -> torch.Tensor:
    """The table for the numbers of one sign, given the levels of this sign and the codes of 0 and the first level.

    If the two codes are not consecutive, a carry cannot lead from one to the other: whole intervals round to 0.
    """
    magnitudes = torch.tensor([0.0, *levels], dtype=torch.float32, device="cpu").double().abs()
    borders = ((magnitudes[1:] + magnitudes[:-1]) / 2).float().view(torch.int32).long()
    starts = torch.arange(2**15, device="cpu") << 16
    rank = torch.searchsorted(borders, starts, right=True)
    following = torch.cat([borders, torch.tensor([2**31], device="cpu")])[rank]
    carry = torch.where(following < starts + 2**16, starts + 2**16 - following, 0)
    if first != zero + 1:
        carry[rank == 0] = 0
    code = torch.where(rank == 0, zero, rank - 1 + first)
    return ((code << 16) + carry).to(torch.int32)


class BlockwiseCompression(FloatingPointCompression):
    """Base class. The bytes are the scales of all blocks, then the codes, one or two per byte."""

    block_size: int
    scale_type: torch.dtype
    codes_per_byte: int

    @property
    def block(self) -> int:
        return self.block_size

    @staticmethod
    @abstractmethod
    def table() -> LevelTable:
        """The levels."""

    @abstractmethod
    def _write_codes(self, scaled: torch.Tensor, packed: torch.Tensor) -> None:
        """Store the codes of some values, which are overwritten. Surplus values at the end are ignored."""

    @abstractmethod
    def _read_levels(self, packed: torch.Tensor, levels: torch.Tensor) -> None:
        """Store the levels that the packed codes stand for."""

    def _nbytes(self, size: Sequence[int]) -> int:
        count = math.prod(size)
        return self._scales_nbytes(count) + -(-count // self.codes_per_byte)

    def _scales_nbytes(self, count: int) -> int:
        return -(-count // self.block_size) * self.scale_type.itemsize

    def _sections(self, payload: np.ndarray, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        border = self._scales_nbytes(count)
        return typed(payload[:border], self.scale_type), typed(payload[border:], torch.uint8)

    def _chunks(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
        """Chunk by chunk: the values, their scales, their bytes, and the number of values in these blocks when full.

        A last block that is not full is a chunk of its own; otherwise its whole chunk would have to be copied.
        """
        count = values.numel()
        full = count - count % self.block_size
        if full == count <= CHUNK:  # without the cut it is faster
            yield values, scales, codes, count
            return
        for start, stop in itertools.pairwise(sorted({*range(0, full, CHUNK), full, count})):
            own = scales[start // self.block_size : -(-stop // self.block_size)]
            packed = codes[start // self.codes_per_byte : -(-stop // self.codes_per_byte)]
            yield values[start:stop], own, packed, own.numel() * self.block_size

    def _encode(self, values: torch.Tensor, size: Sequence[int], payload: np.ndarray) -> None:
        for part, scales, codes, padded in self._chunks(values, *self._sections(payload, values.numel())):
            if part.dtype != torch.float32 or part.numel() < padded:
                whole = scratch("values", torch.float32, padded)
                whole[: len(part)].copy_(part)
                whole[len(part) :].zero_()
                part = whole
            rows = self._write_scales(part.view(-1, self.block_size), scales)
            factors = scales.float().reciprocal().nan_to_num_(posinf=0.0, neginf=0.0)
            scaled = scratch("scaled", torch.float32, padded)
            torch.mul(rows, factors.unsqueeze(1), out=scaled.view_as(rows))
            self._write_codes(scaled, codes)

    def _write_scales(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Store the scale of each block, and return the blocks with all values finite."""
        low, high = rows.amin(1), rows.amax(1)
        extremes = torch.where(-low > high, low, high)
        if not bool(extremes.abs().amax() < torch.inf):  # true for NaN as well
            return self._write_scales(finite(rows).float(), scales)
        largest = torch.finfo(self.scale_type).max
        scales.copy_(extremes.clamp_(-largest, largest))
        return rows

    def _decode(self, payload: np.ndarray, size: Sequence[int], values: torch.Tensor) -> None:
        for part, scales, codes, padded in self._chunks(values, *self._sections(payload, values.numel())):
            in_place = part.dtype == torch.float32 and part.numel() == padded
            whole = part if in_place else scratch("values", torch.float32, padded)
            if codes.numel() * self.codes_per_byte < padded:
                some, codes = codes, scratch("codes", torch.uint8, padded // self.codes_per_byte)
                codes[: len(some)].copy_(some)
            self._read_levels(codes, whole)
            whole.view(-1, self.block_size).mul_(scales.float().unsqueeze(1))
            if not in_place:
                saturate(part, whole[: len(part)])


class BlockwiseQuantization(BlockwiseCompression):
    """8 bits per value, and a float32 scale per block of 4096 values. Levels are the cubes of equal steps.

    The levels are dense near 0, so this codec is best for heavy tails.
    """

    compression_type = CompressionType.BLOCKWISE_8BIT
    keeps_small_values = True
    block_size = 4096
    scale_type = torch.float32
    codes_per_byte = 1

    @staticmethod
    @cache
    def table() -> LevelTable:
        levels = _cubes(torch.arange(1.0, STEPS_8BIT + 1, device="cpu")).tolist()
        return LevelTable(levels, [-level for level in levels], zeros=2)

    def _write_codes(self, scaled: torch.Tensor, packed: torch.Tensor) -> None:
        self.table().nearest(scaled[: len(packed)], packed)
        # A code is a sign bit and a number of steps; the wire has the signed number instead.
        codes = packed.view(torch.int8)
        signs = torch.sign(codes, out=scratch("signs", torch.int8, len(codes)))
        codes.bitwise_and_(STEPS_8BIT).mul_(signs)

    def _read_levels(self, packed: torch.Tensor, levels: torch.Tensor) -> None:
        _cubes(levels.copy_(packed.view(torch.int8)))


def _cubes(steps: torch.Tensor) -> torch.Tensor:
    """The levels at these numbers of steps from 0, in place."""
    return steps.mul_(1 / STEPS_8BIT).pow_(3)


class Blockwise4BitQuantization(BlockwiseCompression):
    """4 bits per value, and a bfloat16 scale per block of 64 (4.25 bits in total). The levels suit gradients.

    It is coarse: the error is about a tenth of a typical value. Use it with error feedback.
    """

    compression_type = CompressionType.BLOCKWISE_4BIT
    keeps_small_values = True
    block_size = 64
    scale_type = torch.bfloat16
    codes_per_byte = 2

    @staticmethod
    @cache
    def table() -> LevelTable:
        return LevelTable(POSITIVE_4BIT, NEGATIVE_4BIT)

    def _write_codes(self, scaled: torch.Tensor, packed: torch.Tensor) -> None:
        codes = scratch("codes", torch.uint8, len(scaled))
        self.table().nearest(scaled, codes)
        pairs = codes.view(torch.int16)  # a pair has its second code in the upper byte
        shifted = torch.bitwise_right_shift(pairs, 4, out=scratch("pairs", torch.int16, len(pairs)))
        packed.copy_(shifted.bitwise_or_(pairs)[: len(packed)])

    def _read_levels(self, packed: torch.Tensor, levels: torch.Tensor) -> None:
        index = scratch("index", torch.int32, len(packed)).copy_(packed)
        # Each table entry is two float32 levels, moved as one 64-bit word.
        torch.index_select(pairs_of_levels(), 0, index, out=levels.view(torch.float64))


@cache
def pairs_of_levels() -> torch.Tensor:
    """The two levels of each possible byte; the lower 4 bits are the first code."""
    levels = Blockwise4BitQuantization.table().levels
    first, second = torch.meshgrid(levels, levels, indexing="xy")
    return torch.stack([first, second], dim=-1).view(torch.float64).flatten()
