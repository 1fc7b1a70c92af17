"""Codecs for floating point numbers: their common base class, and the codecs with 16 bits per value."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from shoal.base.logs import quoted
from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    CompressionType,
    SerializedTensor,
    TensorMetadata,
    array_over,
    empty,
    plain,
    ratio_of,
    typed,
)

FLOATING_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# The values processed at a time (chosen): few enough for the processor's cache, many enough that Python costs little.
# With an 8-bit codec they fill a part of 512 KiB.
CHUNK = 2**19

_FP16_MAX = torch.finfo(torch.float16).max
FP32_MAX = torch.finfo(torch.float32).max


def in_chunks(values: torch.Tensor, length: int = CHUNK) -> Sequence[torch.Tensor]:
    """Views of consecutive parts of a one-dimensional tensor."""
    # Skip the split of a single piece, because it costs time.
    return torch.split(values, length) if values.numel() > length else (values,)


class _Scratch(threading.local):
    """Each thread's memory for the intermediate results of a chunk: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __call__(self, purpose: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        """At most :data:`CHUNK` values, valid until the same purpose is asked for again."""
        kept = self._kept.get((purpose, dtype))
        if kept is None or kept.numel() != count:
            # A tensor made in inference mode cannot be used outside of it.
            with torch.inference_mode(False):
                memory = torch.empty(CHUNK, dtype=dtype, device="cpu") if kept is None else kept
                kept = self._kept[purpose, dtype] = memory.as_strided((count,), (1,), 0)
        return kept


scratch = _Scratch()


def finite(values: torch.Tensor) -> torch.Tensor:
    """Copy the rows to float64; NaN becomes 0, and an infinity the largest finite magnitude of its row.

    Magnitudes are clamped to the largest value of float32.
    """
    wide = values.double().clamp(-FP32_MAX, FP32_MAX)
    known = values.isfinite()
    largest = torch.where(known, wide.abs(), 0).amax(-1, keepdim=True)
    return torch.where(known, wide, torch.where(values.isnan(), 0, wide.sign() * largest))


def saturate(values: torch.Tensor, wide: torch.Tensor) -> None:
    """Copy ``wide`` into a tensor of another type, clamped to its largest value; ``wide`` is overwritten."""
    largest = min(torch.finfo(values.dtype).max, FP32_MAX)
    values.copy_(wide.clamp_(-largest, largest))


def check_type(codec: CompressionBase, dtype: torch.dtype) -> None:
    """Check that a codec for floating point numbers gets floating point numbers.

    Raises:
        ValueError: it gets another type.
    """
    if dtype not in FLOATING_TYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in FLOATING_TYPES)
        raise ValueError(
            f"{type(codec).__name__} takes tensors of {names}, got {dtype}: "
            "use NoCompression for such tensors, for example by PerTensorCompression"
        )


class FloatingPointCompression(CompressionBase):
    """Base class of codecs whose bytes depend only on the floating point values and the shape."""

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        metadata, payload = self._compress(tensor)
        return SerializedTensor(metadata, memoryview(payload))

    def compress_and_decode(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> tuple[SerializedTensor, torch.Tensor]:
        metadata, payload = self._compress(tensor)
        decoded = self._restored(metadata, tensor.dtype, payload)
        return SerializedTensor(metadata, memoryview(payload)), decoded.to(tensor.device)

    def _compress(self, tensor: torch.Tensor) -> tuple[TensorMetadata, np.ndarray]:
        check_type(self, tensor.dtype)
        metadata = self._metadata_of(tensor)
        payload = np.empty(self._nbytes(metadata.size), dtype=np.uint8)
        if len(payload):
            self._encode(_flat(plain(tensor)), metadata.size, payload)
        return metadata, payload

    def _restored(self, metadata: TensorMetadata, dtype: torch.dtype, payload: np.ndarray) -> torch.Tensor:
        values = empty(metadata.size, dtype)
        if len(payload):
            self._decode(payload, metadata.size, _flat(values))
        return values.requires_grad_() if metadata.requires_grad else values

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        dtype, _ = self._read_metadata(serialized_tensor)
        metadata = serialized_tensor.metadata
        if dtype not in FLOATING_TYPES:
            raise ValueError(f"{type(self).__name__} cannot have made a tensor of type {quoted(metadata.dtype)}")
        payload = array_over(serialized_tensor.buffer, self._nbytes(metadata.size))
        return self._restored(metadata, dtype, payload)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return ratio_of(self._nbytes(info.size), info)

    def compressed_nbytes(self, size: Sequence[int], info: CompressionInfo) -> int:
        return self._nbytes(size)

    @abstractmethod
    def _nbytes(self, size: Sequence[int]) -> int:
        """Bytes of a tensor of this size; 0 if it has no values."""

    @abstractmethod
    def _encode(self, values: torch.Tensor, size: Sequence[int], payload: np.ndarray) -> None:
        """Write the flattened values into the bytes."""

    @abstractmethod
    def _decode(self, payload: np.ndarray, size: Sequence[int], values: torch.Tensor) -> None:
        """Read the flattened values from the bytes."""


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values if values.dim() == 1 else values.view(-1)  # skipping the view is faster


class Float16Compression(FloatingPointCompression):
    """Half precision. Infinities and values beyond the range of float16 become its largest value; NaN stays NaN."""

    compression_type = CompressionType.FLOAT16
    keeps_small_values = True
    _wire = torch.float16

    @property
    def elementwise(self) -> bool:
        # Other subclasses may do anything.
        return type(self) in (Float16Compression, BFloat16Compression)

    def _nbytes(self, size: Sequence[int]) -> int:
        return math.prod(size) * self._wire.itemsize

    def _encode(self, values: torch.Tensor, size: Sequence[int], payload: np.ndarray) -> None:
        short, largest = typed(payload, self._wire), torch.finfo(self._wire).max
        for some, part in zip(in_chunks(short), in_chunks(values), strict=True):
            some.copy_(part).clamp_(-largest, largest)

    def _decode(self, payload: np.ndarray, size: Sequence[int], values: torch.Tensor) -> None:
        values.copy_(typed(payload, self._wire))
        # BFloat16Compression may have rounded a value up, beyond the range of float16.
        if values.dtype == torch.float16:
            values.clamp_(-_FP16_MAX, _FP16_MAX)


class BFloat16Compression(Float16Compression):
    """The upper half of float32: its full range with 8 bits of precision. Finite bfloat16 values stay exact.

    Infinities and values that would round to infinity become the largest value; NaN stays NaN.
    """

    compression_type = CompressionType.BFLOAT16
    _wire = torch.bfloat16


class ScaledFloat16Compression(FloatingPointCompression):
    """Sends each value's distance from the mean, in standard deviations, in half precision.

    Mean and standard deviation are taken along the last axis. This suits rows whose values are far from 0 or outside
    of float16's range. NaN stays NaN; an infinity becomes the largest finite magnitude of its row; neither spoils the
    rest of the row.
    """

    compression_type = CompressionType.MEANSTD_16BIT

    def _nbytes(self, size: Sequence[int]) -> int:
        count = math.prod(size)
        return count * 2 + count // _row_length(size) * 8 if count else 0

    def _encode(self, values: torch.Tensor, size: Sequence[int], payload: np.ndarray) -> None:
        rows, (means, deviations, short) = values.view(-1, _row_length(size)), self._sections(payload, size)
        at_once = max(1, CHUNK // rows.shape[1])
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            self._encode_rows(rows[some], means[some], deviations[some], short[some])

    def _encode_rows(
        self, rows: torch.Tensor, means: torch.Tensor, deviations: torch.Tensor, short: torch.Tensor
    ) -> None:
        spoiled = None
        centred = _standardise(rows if rows.dtype == torch.float64 else rows.float(), means, deviations)
        # Written so that NaN takes this branch, too. Squares overflow float32 at about 1e38.
        if not bool(deviations.sum() < 1e30):
            spoiled = rows.isnan()
            centred = _standardise(finite(rows), means, deviations)
        short.copy_(centred)
        if spoiled is not None:
            short[spoiled] = torch.nan

    def _decode(self, payload: np.ndarray, size: Sequence[int], values: torch.Tensor) -> None:
        means, deviations, short = self._sections(payload, size)
        rows = values.view(short.shape)
        at_once = max(1, CHUNK // rows.shape[1])
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            for part, columns in zip(
                torch.split(rows[some], CHUNK, 1), torch.split(short[some], CHUNK, 1), strict=True
            ):
                saturate(part, torch.addcmul(means[some], columns.float(), deviations[some]))

    def _sections(self, payload: np.ndarray, size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length = _row_length(size)
        count = math.prod(size) // length
        means, deviations, short = payload[: 4 * count], payload[4 * count : 8 * count], payload[8 * count :]
        return (
            typed(means, torch.float32).unsqueeze(1),
            typed(deviations, torch.float32).unsqueeze(1),
            typed(short, torch.float16).view(count, length),
        )


def _row_length(size: Sequence[int]) -> int:
    return size[-1] if size else 1


def _standardise(rows: torch.Tensor, means: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """Store the mean and standard deviation of each row, and return the standardised rows."""
    means.copy_(rows.mean(1, keepdim=True))
    centred = rows - means
    spread = torch.linalg.vector_norm(centred, dim=1, keepdim=True) / math.sqrt(rows.shape[1])
    deviations.copy_(spread.clamp_(min=torch.finfo(torch.float32).eps))
    return centred.div_(deviations)
