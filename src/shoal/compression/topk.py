"""The codec that sends few values: in each chunk of 4096, those of largest magnitude, with their positions.

The rest reads as 0. This suits a sender that keeps unsent values and adds them the next time (error feedback).

A chunk sends ``max(1, round(density * length))`` values; the last chunk may be shorter. Among equal magnitudes, those
at lower positions are sent. Magnitudes below 2**-24, the smallest of float16, count as 0, and zeros are never sent. In
2 bits, a magnitude is one of two levels of its chunk. The mean of all magnitudes that the chunk sends separates them:
one level is the mean of those above it, the other the mean of the rest. If one group is empty, both levels are equal.

The bytes are little-endian. The numbers of one kind are stored together, for all chunks in order, so that they can be
read without a loop over chunks:

=========  ============================================================================================================
bytes      content
=========  ============================================================================================================
2          for each chunk: how many values it sends, a whole number
4 or 2     for each chunk that sends any: in 2 bits the low and the high level, in 8 bits one scale; float16, above 0
1.5        for each value: its position in its chunk, ascending. Two take three bytes: the first byte and the lower half
           of the second one, low bits first; then the upper half and the third byte, low bits first
0.25 or 1  for each value. In 2 bits: the lower bit chooses the high level, the upper one is the sign; the first value
           is in the lowest bits of a byte. In 8 bits: m in a magnitude of (m + 1) / 128 of the scale; top bit: the sign
=========  ============================================================================================================

The last byte of the positions, and that of the values, is padded with zeros, which readers ignore.

All machines decode to the same bits, because decoding is exact. They also encode to the same bits, because no operation
here rounds in an order that depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shoal.compression.base import (
    Buffer,
    CompressionBase,
    CompressionInfo,
    CompressionType,
    SerializedTensor,
    empty,
    plain,
    ratio_of,
)
from shoal.compression.floating import CHUNK, check_type, finite, saturate, scratch

BLOCK = 4096
"""Values in a chunk: as many as 12 bits can count."""

# The smallest and the largest finite magnitude of float16 (IEEE 754).
_SMALLEST, _LARGEST = np.float32(2.0**-24), np.float32(65504)
_SMALLEST_BITS, _INFINITY_BITS = int(_SMALLEST.view(np.int32)), int(np.float32(np.inf).view(np.int32))
_STEPS_8BIT = 128  # derived: 8 bits without the sign


@dataclass(frozen=True)
class SparseTensor:
    """The values of a tensor that were sent."""

    size: tuple[int, ...]
    """The size of the whole tensor."""
    indices: torch.Tensor
    """The positions of the values in the flattened tensor, ascending; int64."""
    values: torch.Tensor
    """One value for each index, float32; none is 0."""

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole tensor; values that were not sent are 0."""
        whole = empty(self.size, dtype).zero_()
        values = self.values
        if dtype != torch.float32:
            values = torch.empty(len(values), dtype=dtype, device="cpu")
            saturate(values, self.values.clone())
        whole.view(-1)[self.indices] = values
        return whole


class TopKCompression(CompressionBase):
    """Sends the values of largest magnitude in each chunk of 4096, in 2 or 8 bits; all others read as 0.

    Use it with error feedback. With the default settings it takes 0.23 bits for each value of the tensor. NaN counts as
    0, an infinity as the largest finite magnitude of its chunk, and any magnitude above 65504 as 65504.

    Args:
        density: the share of the values to send, above 0 and at most 1.
        bits: 2: a sign, and one of two magnitudes for each chunk; 8: a sign, and one of 128 magnitudes.
    """

    sparse = True

    def __init__(self, density: float = 1 / 64, bits: int = 2) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {density}: 1/64 sends one value of 64")
        if bits not in (2, 8):
            raise ValueError(f"bits must be 2 or 8, got {bits}")
        self.density, self.bits = density, bits
        self.compression_type = CompressionType.TOPK_2BIT if bits == 2 else CompressionType.TOPK_8BIT

    @property
    def fingerprint(self) -> str:
        return f"{self.compression_type.name}, density {self.density!r}"

    @property
    def block(self) -> int:
        return BLOCK

    def most(self, length: int) -> int:
        """The most values that a chunk of this length sends."""
        return max(1, round(self.density * length))

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        check_type(self, tensor.dtype)
        metadata, values = self._metadata_of(tensor), plain(tensor).view(-1)
        found = [_Sent.of(rows, self.most(length)) for rows, length in _batches(values)]
        return SerializedTensor(metadata, memoryview(_packed(found, self.bits)))

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        dtype, _ = self._read_metadata(serialized_tensor)
        values = self.extract_sparse(serialized_tensor).dense(dtype)
        return values.requires_grad_() if serialized_tensor.metadata.requires_grad else values

    def extract_sparse(self, serialized_tensor: SerializedTensor) -> SparseTensor:
        """Like :meth:`extract`, but only the values that were sent. The sender's density does not matter.

        Raises:
            ValueError: the metadata is malformed.
            RuntimeError: the bytes are truncated, too many, or not those of this codec.
        """
        dtype, count = self._read_metadata(serialized_tensor)
        check_type(self, dtype)
        indices, values = _unpacked(serialized_tensor.buffer, count, self.bits)
        size = tuple(serialized_tensor.metadata.size)
        return SparseTensor(size, torch.from_numpy(indices), torch.from_numpy(values))

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """The exact ratio if no value that could be sent is 0; otherwise an upper limit."""
        full, rest = divmod(math.prod(info.size), BLOCK)
        sent, chunks = full * self.most(BLOCK), full
        if rest:
            sent, chunks = sent + self.most(rest), chunks + 1
        return ratio_of(2 * chunks + sum(_lengths(chunks, sent, self.bits)), info)


# --- what is sent -----------------------------------------------------------------------------------------------------


def _batches(values: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Chunks as rows of float32, many at a time, and their length. A shorter last chunk comes alone."""
    full = values.numel() // BLOCK * BLOCK
    for start in range(0, full, CHUNK):
        part = values[start : min(start + CHUNK, full)]
        if part.dtype != torch.float32:
            part = scratch("values", torch.float32, part.numel()).copy_(part)
        yield part.view(-1, BLOCK), BLOCK
    if rest := values[full:].numel():
        row = torch.zeros(1, BLOCK, dtype=torch.float32, device="cpu")
        row[0, :rest] = values[full:]
        yield row, rest


class _Sent(NamedTuple):
    """The values to send of some chunks, in order."""

    counts: np.ndarray
    """The number of values of each chunk."""
    positions: np.ndarray
    """The position of each value in its chunk."""
    values: np.ndarray

    @classmethod
    def of(cls, rows: torch.Tensor, most: int) -> _Sent:
        """Choose the values of largest magnitude in each row; among equal ones, those at lower positions."""
        # Magnitudes sort like their bits as integers.
        bits = scratch("bits", torch.int32, rows.numel()).view(rows.shape)
        torch.bitwise_and(rows.view(torch.int32), 2**31 - 1, out=bits)
        # Take the maximum of each of many groups of values. The ``most``-th largest maximum is a lower limit for all
        # values to send, and few other values are above it.
        groups = min(BLOCK, 2 ** (2 * most - 1).bit_length())
        largest = bits.view(len(rows), BLOCK // groups, groups).amax(1).numpy()
        if np.max(largest) >= _INFINITY_BITS:  # true for NaN as well
            return cls.of(finite(rows).float(), most)
        lowest = np.maximum(np.partition(largest, groups - most, axis=1)[:, groups - most], _SMALLEST_BITS)
        limits = torch.from_numpy(lowest).unsqueeze(1)
        is_large = torch.ge(bits, limits, out=scratch("mask", torch.bool, bits.numel()).view(rows.shape))
        indices = np.flatnonzero(is_large.numpy())
        indices = _largest(indices, bits.view(-1).numpy()[indices], len(rows), most)
        counts = np.bincount(indices // BLOCK, minlength=len(rows))
        return cls(counts, indices % BLOCK, rows.view(-1).numpy()[indices])


def _largest(indices: np.ndarray, bits: np.ndarray, rows: int, most: int) -> np.ndarray:
    """At most ``most`` indices of each row: those of the largest bits."""
    row, position = np.divmod(indices, BLOCK)
    counts = np.bincount(row, minlength=rows)
    width = int(counts.max(initial=0))
    if width <= most:
        return indices
    # No two keys of a row are equal, so exactly the right number of them is at or above the limit.
    keys = bits.astype(np.int64) * BLOCK + (BLOCK - 1 - position)
    table = _table(keys, counts, width)
    limits = np.partition(table, width - most, axis=1)[:, width - most]
    chosen: np.ndarray = indices[keys >= limits[row]]
    return chosen


def _table(values: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """Distribute values over rows, ``counts`` of them to each, from the left; the rest is 0."""
    table = np.zeros((len(counts), width), dtype=values.dtype)
    starts = np.cumsum(counts) - counts
    table.reshape(-1)[np.arange(len(values)) + np.repeat(np.arange(len(counts)) * width - starts, counts)] = values
    return table


def _means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of the values of each row; 0 for a row without any.

    Halves are added until one column is left, so that the result does not depend on how a processor sums a row.
    """
    width = 2 ** max(0, int(counts.max(initial=0)) - 1).bit_length()
    sums = _table(values, counts, width)
    while width > 1:
        width //= 2
        sums = sums[:, :width] + sums[:, width:]
    means: np.ndarray = sums[:, 0] / np.maximum(counts, 1).astype(np.float32)
    return means


# --- numbers and bytes ------------------------------------------------------------------------------------------------


def _lengths(chunks: int, sent: int, bits: int) -> tuple[int, int, int]:
    """The bytes of the scales (of all chunks that send values), of the positions, and of the values."""
    return chunks * (4 if bits == 2 else 2), -(-sent * 3 // 2), -(-sent * bits // 8)


def _packed(found: list[_Sent], bits: int) -> np.ndarray:
    if not found:
        return np.empty(0, dtype=np.uint8)
    counts = np.concatenate([each.counts for each in found])
    quantize = _in_2_bits if bits == 2 else _in_8_bits
    quantized = [quantize(each.values, each.counts) for each in found]
    scales = np.concatenate([scales for scales, _ in quantized])[counts > 0]
    codes = np.concatenate([codes for _, codes in quantized])
    positions = np.concatenate([each.positions for each in found])
    sections = (
        counts.astype("<u2").view(np.uint8),
        scales.astype("<f2").reshape(-1).view(np.uint8),
        _pack_positions(positions.astype(np.uint16)),
        _pack_pairs(codes) if bits == 2 else codes,
    )
    return np.concatenate(sections)


def _in_2_bits(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two levels of each chunk, and the code of each value."""
    magnitudes, row = np.minimum(np.abs(values), _LARGEST), np.repeat(np.arange(len(counts)), counts)
    is_high = magnitudes > _means(magnitudes, counts)[row]
    high_counts = np.bincount(row[is_high], minlength=len(counts))
    low_counts = counts - high_counts
    high, low = _means(magnitudes[is_high], high_counts), _means(magnitudes[~is_high], low_counts)
    # If all values are equal, none is above the mean, or all are if the mean was rounded down.
    levels = np.stack([np.where(low_counts > 0, low, high), np.where(high_counts > 0, high, low)], axis=1)
    return levels, is_high.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 1


def _in_8_bits(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each chunk, and the code of each value."""
    magnitudes, row = np.minimum(np.abs(values), _LARGEST), np.repeat(np.arange(len(counts)), counts)
    scales = _table(magnitudes, counts, max(1, int(counts.max()))).max(axis=1).astype(np.float16)
    steps = np.rint(magnitudes / scales.astype(np.float32)[row] * np.float32(_STEPS_8BIT))
    codes = steps.clip(1, _STEPS_8BIT).astype(np.uint8) - np.uint8(1)
    return scales, codes | np.signbit(values).astype(np.uint8) << 7


def _pack_positions(positions: np.ndarray) -> np.ndarray:
    first, second = positions[0::2], np.zeros((len(positions) + 1) // 2, dtype=np.uint16)
    second[: len(positions) // 2] = positions[1::2]
    packed = np.stack([first & 0xFF, first >> 8 | (second & 0xF) << 4, second >> 4], axis=1).astype(np.uint8)
    return packed.reshape(-1)[: -(-len(positions) * 3 // 2)]


def _unpack_positions(packed: np.ndarray, count: int) -> np.ndarray:
    padded = np.zeros((count + 1) // 2 * 3, dtype=np.int64)
    padded[: len(packed)] = packed
    low, middle, high = padded.reshape(-1, 3).T
    return np.stack([low | (middle & 0xF) << 8, middle >> 4 | high << 4], axis=1).reshape(-1)[:count]


def _pack_pairs(codes: np.ndarray) -> np.ndarray:
    padded = np.zeros((-(-len(codes) // 4), 4), dtype=np.uint8)
    padded.reshape(-1)[: len(codes)] = codes
    return padded[:, 0] | padded[:, 1] << 2 | padded[:, 2] << 4 | padded[:, 3] << 6


def _unpack_pairs(packed: np.ndarray, count: int) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
    return (packed[:, None] >> shifts & np.uint8(3)).reshape(-1)[:count]


def _unpacked(buffer: Buffer, count: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the values, and the values.

    Raises:
        RuntimeError: the bytes are not those of a tensor with this many values.
    """
    data = np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8)
    chunks = -(-count // BLOCK)
    if len(data) < 2 * chunks:
        raise RuntimeError(f"the serialized tensor takes at least {2 * chunks} bytes, got {len(data)}")
    counts = data[: 2 * chunks].view("<u2").astype(np.int64)
    sent = int(counts.sum())
    lengths = _lengths(int(np.count_nonzero(counts)), sent, bits)
    if len(data) != 2 * chunks + sum(lengths):
        raise RuntimeError(f"the serialized tensor takes {2 * chunks + sum(lengths)} bytes, got {len(data)}")
    scales, positions, codes = np.split(data[2 * chunks :], np.cumsum(lengths)[:2])
    indices = np.repeat(np.arange(0, count, BLOCK), counts) + _unpack_positions(positions, sent)
    # So no chunk sends more values than it has.
    if sent and (indices[-1] >= count or np.any(indices[1:] <= indices[:-1])):
        raise RuntimeError("the serialized tensor has positions that do not ascend, or lie beyond its end")
    patterns = scales.view("<u2")
    if np.any((patterns == 0) | (patterns >= 0x7C00)):
        raise RuntimeError("the serialized tensor has a scale that is not a positive finite number")
    own_scales = scales.view("<f2").astype(np.float32)
    row = np.repeat(np.arange(len(own_scales) // (2 if bits == 2 else 1)), counts[counts > 0])
    if bits == 2:
        levels = own_scales.reshape(-1, 2)
        found = _unpack_pairs(codes, sent)
        return indices, np.concatenate([levels, -levels], axis=1).reshape(-1)[row * 4 + found]
    steps = codes.astype(np.float32)
    steps = np.where(codes < 128, 1 + steps, 127 - steps)
    return indices, own_scales[row] * np.float32(1 / _STEPS_8BIT) * steps
