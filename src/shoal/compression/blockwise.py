"""Codecs with one scale per block and fixed levels between -1 and 1: 8 and 4 bits per value.

The scale of a block is its value of largest magnitude, with its sign, so that this value is always restored as level 1
and 4 bits need no level -1. Every value takes the nearest level, exactly.

NaN counts as 0 and an infinity as the largest finite magnitude of the block: what is restored is always finite, and
one broken value does not spoil the others.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from shoal.compression.base import CompressionType, typed
from shoal.compression.floating import CHUNK, FloatingPointCompression, finite, saturate, scratch

# Levels of 8 bits are the cubes of so many equal steps to either side of 0.
#
# They reach from 5e-7 to 1, and their relative precision falls to about half with each power of ten, like that of the
# dynamic 8-bit type (Dettmers et al., arXiv 2110.02861), but smoothly, and they are calculated, not looked up;
# docs/compression.md compares the two.
STEPS_8BIT = 127

POSITIVE_4BIT = [0.0610, 0.1394, 0.2310, 0.3346, 0.4531, 0.5912, 0.7644, 1.0]
# Levels of least squared error (Lloyd's algorithm) on blocks of 64 signed-scaled values: a mixture of normal, Laplace,
# Student-t and row-scaled values and of gradients of a small network; docs/compression.md compares other tables. The
# first negative one is such that half of it, the border to 0, is exact in :class:`LevelTable`.
NEGATIVE_4BIT = [-250 / 4096, -0.1391, -0.2350, -0.3467, -0.4779, -0.6374, -0.8430]


class LevelTable:
    """Finds the nearest of some levels by one look at a table, whatever their spacing.

    The upper 16 bits of a float32 (sign, exponent and 7 bits of precision) name an interval so narrow that at most
    one border between two levels lies in it. For each interval the table holds the code of its lower end and, in the
    lower half of the word, how far the border is from the upper end: adding the lower 16 bits of the number carries
    into the code exactly if the number is beyond the border.

    Args:
        positive: levels above 0, by magnitude; their codes are 1 and so on.
        negative: levels below 0, by magnitude; their codes follow.
        zeros: how many codes stand for 0: with 2, numbers below it that round to it have the code before those of the
            negative levels, and the border there is exact for any level.
    """

    def __init__(self, positive: Sequence[float], negative: Sequence[float], zeros: int = 1) -> None:
        levels = [0.0, *positive, *[-0.0] * (zeros - 1), *negative]
        self.levels = torch.tensor(levels, dtype=torch.float32, device="cpu")
        """By code."""
        first_negative = len(self.levels) - len(negative)
        zero = 0 if zeros == 1 else first_negative - 1
        self._carries = torch.cat([_carries(positive, 0, 1), _carries(negative, zero, first_negative)])

    def nearest(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Write down the code of each of some float32 numbers, which are spoilt."""
        bits = values.view(torch.int32)
        index = scratch("index", torch.int32, bits.numel())
        torch.bitwise_right_shift(bits, 16, out=index).bitwise_and_(2**16 - 1)
        found = torch.index_select(self._carries, 0, index, out=scratch("found", torch.int32, bits.numel()))
        codes.copy_(found.add_(bits.bitwise_and_(2**16 - 1)).bitwise_right_shift_(16))


def _carries(levels: Sequence[float], zero: int, first: int) -> torch.Tensor:
    """The table for the numbers of one sign, given the levels of this sign, and the codes of 0 and the first of them.

    If one does not follow the other, numbers round to 0 by whole intervals.
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
    """Base class: the scales of all blocks, then the codes, one or two in a byte."""

    block_size: int
    scale_type: torch.dtype
    codes_per_byte: int

    @staticmethod
    @abstractmethod
    def table() -> LevelTable:
        """The levels."""

    @abstractmethod
    def _write_codes(self, scaled: torch.Tensor, packed: torch.Tensor) -> None:
        """Fill the bytes of some values, which are spoilt, and of which the last ones may be too many."""

    @abstractmethod
    def _read_levels(self, packed: torch.Tensor, levels: torch.Tensor) -> None:
        """Fill in the levels that some bytes stand for."""

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
        """Values, their scales and their bytes chunk by chunk; and the values in these blocks if all are full.

        A last block that is not full comes by itself, or the whole chunk would have to be copied.
        """
        count = values.numel()
        full = count - count % self.block_size
        if full == count <= CHUNK:  # not to cut is faster
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
        """Write down the scale of each block, and return the blocks without what is not finite."""
        low, high = rows.amin(1), rows.amax(1)
        extremes = torch.where(-low > high, low, high)
        if not bool(extremes.abs().amax() < torch.inf):  # also if it is NaN
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
    """8 bits per value and a float32 for each 4096 of them; levels are the cubes of equal steps.

    Fine where values are small: best for heavy tails.
    """

    compression_type = CompressionType.BLOCKWISE_8BIT
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
        # A sign bit and the number of steps; what is sent is the number with its sign.
        codes = packed.view(torch.int8)
        signs = torch.sign(codes, out=scratch("signs", torch.int8, len(codes)))
        codes.bitwise_and_(STEPS_8BIT).mul_(signs)

    def _read_levels(self, packed: torch.Tensor, levels: torch.Tensor) -> None:
        _cubes(levels.copy_(packed.view(torch.int8)))


def _cubes(steps: torch.Tensor) -> torch.Tensor:
    """The levels that are so many steps from 0, in place."""
    return steps.mul_(1 / STEPS_8BIT).pow_(3)


class Blockwise4BitQuantization(BlockwiseCompression):
    """4 bits per value and a bfloat16 for each 64 of them (4.25 bits in all), with levels that suit gradients.

    Coarse: the error is about a tenth of a typical value. Meant to be used with error feedback.
    """

    compression_type = CompressionType.BLOCKWISE_4BIT
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
        pairs = codes.view(torch.int16)  # the second code is in the upper byte
        shifted = torch.bitwise_right_shift(pairs, 4, out=scratch("pairs", torch.int16, len(pairs)))
        packed.copy_(shifted.bitwise_or_(pairs)[: len(packed)])

    def _read_levels(self, packed: torch.Tensor, levels: torch.Tensor) -> None:
        index = scratch("index", torch.int32, len(packed)).copy_(packed)
        # This type has 64 bits, whatever its name says.
        torch.index_select(_pairs_of_levels(), 0, index, out=levels.view(torch.float64))


@cache
def _pairs_of_levels() -> torch.Tensor:
    """Two levels of 4 bits for each byte, of which the first is in the lower bits."""
    levels = Blockwise4BitQuantization.table().levels
    first, second = torch.meshgrid(levels, levels, indexing="xy")
    return torch.stack([first, second], dim=-1).view(torch.float64).flatten()
