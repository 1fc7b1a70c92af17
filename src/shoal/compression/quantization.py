"""8-bit codecs with one codebook per tensor: 256 levels, each the average of the values that it stands for.

NaN counts as 0 and an infinity as the largest finite magnitude of the tensor: what is restored is always finite, and
one broken value does not spoil the others.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch

from shoal.compression.base import CompressionType, typed
from shoal.compression.blockwise import BlockwiseQuantization as BlockwiseQuantization
from shoal.compression.floating import CHUNK, FloatingPointCompression, finite, in_chunks, scratch

LEVELS = 256
CODEBOOK_NBYTES = LEVELS * torch.float32.itemsize

# If more of the values have the same code, most are small beside the rest, or equal: then their sum must be exact.
MOST_IN_ONE_PASS = 0.125

_FP32_MAX = torch.finfo(torch.float32).max


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
            averages.clip(-_FP32_MAX, _FP32_MAX, out=averages)
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
            The average of the values of each code; ``None``: they are not finite, or too large or small for float32,
            which float64 is not.
        """


def _averages(
    chunks: Iterable[tuple[torch.Tensor, torch.Tensor]], offset: float, largest_sum: float = 0.0
) -> np.ndarray:
    """Mean of the values of each code.

    Args:
        chunks: codes, and their values without the offset.
        offset: to be added to all averages.
        largest_sum: no sum of values of one chunk is larger. It saves a pass, where that is exact enough.
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
    """How many values each code has, and their sum, from one sum: each value weighs more than itself, by a unit.

    That is so large that no sum of values makes up for half of one: the number of units is that of the values.
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
    """The values chunk by chunk, in a type that one can calculate with: in their own memory where possible."""
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
    """Both as numbers; the mean is one of the working type, so that it can be taken off and put back exactly."""
    total = squares = 0.0
    for part in _readable(values):
        total += float(part.sum())
        squares += float(torch.dot(part, part))
    count = values.numel()
    mean, square = total / count, squares / count
    if values.dtype != torch.float64:
        mean = float(np.float32(mean))
    # Nearly all of it is the mean, and little of the precision is left.
    if square - mean * mean < 0.01 * square:
        return mean, math.sqrt(sum(float(torch.dot(part, part)) for part in _centred(values, mean)) / count)
    return mean, math.sqrt(square - mean * mean)


def _centre(mean: float, deviation: float) -> float:
    """What to take off the values so that little precision is lost: mostly nothing, which is fastest."""
    return mean if abs(mean) > deviation / 2 else 0.0


def _largest_sum(values: torch.Tensor, mean: float, deviation: float, centre: float) -> float:
    """What no sum of distances from the centre exceeds, whichever of a chunk's values it takes (Cauchy and Schwarz)."""
    count = values.numel()
    return math.hypot(deviation, mean - centre) * math.sqrt(count * min(count, CHUNK))


def _is_safe(magnitude: float, values: torch.Tensor) -> bool:
    """Whether the working type holds squares and sums of values of this magnitude; not if it is NaN."""
    if values.dtype == torch.float64:
        return math.isfinite(magnitude)
    return 1e-15 < magnitude < 1e15


class Uniform8BitQuantization(CodebookQuantization):
    """256 bins of equal width, 255 over six standard deviations around the mean; values further out take the last ones.

    The bin to spare is there because all are shifted, so that 0, of which gradients have many, is amid one.
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
        """Fill in the codes, and give them chunk by chunk with their values."""
        for distance, some in zip(distances, in_chunks(codes), strict=True):
            bins = scratch("bins", torch.float32, len(some))
            torch.add(shift, distance, alpha=bins_per_unit, out=bins).clamp_(_BIN_ZERO, _BIN_ZERO + LEVELS - 1)
            yield some.copy_(bins.view(torch.int32)), distance


# From here on float32 holds only whole numbers, so that adding it rounds and leaves the number in the last bits.
_BIN_ZERO = 2.0**23


class Quantile8BitQuantization(CodebookQuantization):
    """256 levels where the values are: bins hold about equally many, then every value takes the nearest bin's average.

    Quantiles are found by counting how often each of the 65,536 numbers of float16 occurs, after centring and scaling.
    """

    compression_type = CompressionType.QUANTILE_8BIT

    def _quantize(self, values: torch.Tensor, codes: torch.Tensor) -> np.ndarray | None:
        mean, deviation = _mean_and_deviation(values)
        centre = _centre(mean, deviation)
        largest = max(max(float(part.amax()), -float(part.amin())) for part in _centred(values, centre))
        if not _is_safe(largest, values) or not math.isfinite(deviation):
            return None
        scale = 2.0**15 / largest if largest else 0.0
        # One: it stays valid.
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


# Numbers that float16 can tell apart.
CELLS = 2**16

_REFINEMENTS = 2


def _cells(values: torch.Tensor, centre: float, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The distance of the values from the centre, and the rank of that among all float16, scaled; chunk by chunk."""
    for distance in _centred(values, centre):
        count = distance.numel()
        short, ranks = scratch("short", torch.float16, count), scratch("ranks", torch.int16, count)
        short.copy_(torch.mul(distance, scale, out=scratch("scaled", distance.dtype, count)))
        # Of negative numbers, all but the sign have to be turned over.
        bits = short.view(torch.int16)
        torch.bitwise_right_shift(bits, 15, out=ranks).bitwise_and_(CELLS // 2 - 1).bitwise_xor_(bits)
        yield distance, scratch("cells", torch.int32, count).copy_(ranks).add_(CELLS // 2)


@cache
def _cell_values() -> torch.Tensor:
    """Each float16, ascending; the ends of the range stand for what is not a finite number, which never occurs."""
    positive = torch.arange(CELLS // 2, dtype=torch.int16, device="cpu").view(torch.float16).double()
    positive = torch.where(positive.isfinite(), positive, 2.0**16)
    return torch.cat([-positive.flip(0), positive])


def _codes_of_cells(counts: torch.Tensor) -> torch.Tensor:
    """Which code each cell takes, given how many values are in it."""
    below, sums = scratch("below", torch.int64, CELLS + 1), scratch("sums", torch.float64, CELLS + 1)
    below[0] = sums[0] = 0
    torch.cumsum(counts, 0, out=below[1:])
    torch.mul(counts, _cell_values(), out=sums[1:]).cumsum_(0)
    edges = _refined(below.numpy(), sums.numpy(), _cell_values().numpy())
    starts = torch.zeros(CELLS + 1, dtype=torch.uint8, device="cpu").index_add_(
        0, torch.from_numpy(edges[1:-1]), torch.ones(LEVELS - 1, dtype=torch.uint8, device="cpu")
    )
    return starts[:CELLS].cumsum(0, dtype=torch.uint8)


def _refined(below: np.ndarray, sums: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The first cell of each code, and the end; with numpy, which is faster than torch with a few hundred numbers.

    Args:
        below: how many values are in the cells before each one, and in all.
        sums: of these values.
        values: what each cell stands for, ascending.
    """
    edges = np.zeros(LEVELS + 1, dtype=np.int64)
    edges[-1] = CELLS
    edges[1:-1] = np.searchsorted(below[1:], below[-1] * np.arange(1, LEVELS) // LEVELS)
    # Every value to the nearest average, as in Lloyd's algorithm.
    for _ in range(_REFINEMENTS):
        inside = np.diff(below[edges])
        averages = np.where(
            inside > 0, np.diff(sums[edges]) / np.maximum(inside, 1), values[np.minimum(edges[:-1], CELLS - 1)]
        )
        edges[1:-1] = np.searchsorted(values, (averages[1:] + averages[:-1]) / 2, side="right")
    return edges
