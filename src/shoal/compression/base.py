"""How tensors become bytes and back: the base class of all codecs, and the codec that changes nothing.

A codec returns a :class:`SerializedTensor`: a few typed fields for a message header, and a buffer that can be written
to a stream as it is. The exact codec returns a view of the tensor's own memory. Bytes from a peer are decoded only
after shape, type and number of bytes have been checked against each other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.base.logs import quoted

Buffer = bytes | bytearray | memoryview

MAX_DIMENSIONS = 64  # chosen: far more than any tensor has
# Smaller tensors do not gain from huge pages. numpy, too, asks for them from this size on.
HUGE_FROM_BYTES = 2**22
# Each copy starts at a multiple of this many bytes: a cache line.
_ALIGNMENT = 64
# The bytes that a thread copies at a time, and the number of threads that copy a large state (chosen).
COPY_BYTES, _COPY_THREADS = 2**25, 4

# The element types that can be sent, by their name on the wire.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}

# Whether :class:`NoCompression` sends bfloat16 as float32, in twice the bytes; a receiver reads both forms.
#
# Turned on by setting the environment variable of this name to 1. All peers of a swarm must agree on it.
USE_LEGACY_BFLOAT16 = (os.environ.get("USE_LEGACY_BFLOAT16") or "0").lower() not in ("0", "false")

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CompressionType(IntEnum):
    """Which codec made the bytes. The numbers go over the wire, so they never change."""

    NONE = 0
    MEANSTD_16BIT = 1
    FLOAT16 = 2
    QUANTILE_8BIT = 3
    UNIFORM_8BIT = 4
    BLOCKWISE_8BIT = 5
    BFLOAT16 = 6
    BLOCKWISE_4BIT = 7
    TOPK_2BIT = 8
    TOPK_8BIT = 9
    NON_NEGATIVE_16BIT = 10

    @classmethod
    def values(cls) -> list[int]:
        """All codes."""
        return [int(code) for code in cls]

    @classmethod
    def Name(cls, code: int) -> str:
        """Name of a code."""
        return cls(code).name


@dataclass(frozen=True)
class TensorDescriptor:
    """Shape, type and device of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided
    device: torch.device | None = None
    requires_grad: bool = False
    pin_memory: bool = False
    compression: CompressionType = CompressionType.NONE

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, compression: CompressionType = CompressionType.NONE) -> TensorDescriptor:
        """Describe an existing tensor."""
        pinned = tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad, pinned, compression
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size)

    def numel(self) -> int:
        """Number of values."""
        return self.shape.numel()

    def make_zeros(self, *, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor of zeros that fits this description, on ``device`` or else on the described device."""
        return torch.zeros(
            self.size,
            dtype=self.dtype,
            layout=self.layout,
            device=self.device if device is None else device,
            requires_grad=self.requires_grad,
            pin_memory=self.pin_memory,
        )


def plain_name(name: str) -> str:
    """The name of a tensor in the original module, so that peers with and without ``torch.compile`` use the same names.

    ``torch.compile`` wraps a module in another one, which adds a part to the names of its tensors.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class TensorRole(Enum):
    """The use of a tensor in training. Some codecs treat roles differently."""

    ACTIVATION = auto()
    PARAMETER = auto()
    GRADIENT = auto()
    OPTIMIZER = auto()
    UNSPECIFIED = auto()
    COUNTER = auto()
    """Numbers that must not be rounded, such as counts and flags."""


@dataclass(frozen=True)
class CompressionInfo:
    """What a codec may need to know about a tensor besides its values."""

    key: Any
    """Name or index of the tensor among its siblings, the same on all peers."""
    descriptor: TensorDescriptor
    """Describes the whole tensor, even when only a part of it is being compressed."""
    role: TensorRole = TensorRole.UNSPECIFIED
    part_index: int = 0
    part_size: int | None = None
    """Number of values in each part but the last; ``None`` if the tensor is not split."""

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, key: Any = None, descriptor: TensorDescriptor | None = None, **kwargs: Any
    ) -> CompressionInfo:
        """Describe an existing tensor; further fields are given by keyword."""
        return cls(key, descriptor or TensorDescriptor.from_tensor(tensor), **kwargs)

    def get_part(self, part_index: int, part_size: int | None) -> CompressionInfo:
        """The description of one part of the tensor."""
        return replace(self, part_index=part_index, part_size=part_size)

    @property
    def size(self) -> tuple[int, ...]:
        """The shape to compress: the whole tensor, or one part of its flattened values."""
        if self.part_size is None:
            return self.descriptor.size
        left = self.descriptor.numel() - self.part_index * self.part_size
        return (max(0, min(self.part_size, left)),)


class TensorMetadata(msgspec.Struct, frozen=True, array_like=True):
    """The data that a reader of a serialized tensor needs besides its bytes; small enough for any message header."""

    compression: int
    """Code of the codec, see :class:`CompressionType`."""
    dtype: str
    size: tuple[int, ...]
    requires_grad: bool = False

    def checked(self) -> tuple[torch.dtype, int]:
        """Check that such a tensor can exist, and return its element type and number of values.

        Raises:
            ValueError: it cannot exist.
        """
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise ValueError(f"serialized tensor has unknown element type {quoted(self.dtype)}")
        if len(self.size) > MAX_DIMENSIONS:
            raise ValueError(f"serialized tensor has {len(self.size)} dimensions, possible are {MAX_DIMENSIONS}")
        if min(self.size, default=0) < 0 or max(self.size, default=0) >= 2**48:
            raise ValueError(f"serialized tensor has impossible size {quoted(self.size)}")
        count = math.prod(self.size)
        if count >= 2**48 or (count == 0 and math.prod(filter(None, self.size)) >= 2**48):
            raise ValueError(f"serialized tensor of size {quoted(self.size)} is too large")
        if self.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"serialized tensor of type {self.dtype} cannot require gradients")
        return dtype, count


@dataclass(frozen=True)
class SerializedTensor:
    """A tensor that is ready to be sent or has just been received."""

    metadata: TensorMetadata
    buffer: Buffer
    """The bytes; a contiguous view of format ``B`` where no copy was needed."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name of an element type on the wire.

    Raises:
        ValueError: such tensors cannot be sent.
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"tensors of type {dtype} cannot be sent; possible are {', '.join(DTYPES)}")
    return name


def empty(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a CPU tensor. A large one fills three times as fast as with torch: numpy asks for huge pages."""
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < HUGE_FROM_BYTES:
        return torch.empty(tuple(size), dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(dtype).view(tuple(size))


def mapped(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a CPU tensor. When freed, the memory of a large one returns to the system: no allocator keeps it."""
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < HUGE_FROM_BYTES:
        return torch.empty(tuple(size), dtype=dtype, device="cpu")
    return torch.frombuffer(map_memory(nbytes), dtype=torch.uint8).view(dtype).view(tuple(size))


def map_memory(nbytes: int) -> mmap.mmap:
    """Fresh private memory, in huge pages where the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    # Private: a forked child must not write into it, and shared memory gets no huge pages by default.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    huge: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
    if huge is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(huge)
    return memory


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from any device to a contiguous CPU tensor outside of autograd, in memory of its own."""
    return mapped(tensor.shape, tensor.dtype).copy_(tensor.detach())


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Like :func:`copied` for several tensors; uses threads if there is enough data to make up for starting them."""
    copies = room_for(tensors)
    pairs = list(zip(copies, (tensor.detach() for tensor in tensors), strict=True))
    if sum(copy.nbytes for copy in copies) < COPY_BYTES * 2:
        for copy, original in pairs:
            copy.copy_(original)
        return copies
    with ThreadPoolExecutor(_COPY_THREADS) as pool:
        for _ in pool.map(lambda pair: pair[0].copy_(pair[1]), (piece for pair in pairs for piece in _cut(*pair))):
            pass
    return copies


def room_for(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for copies, which returns to the system when freed: each large tensor has its own, small ones share it."""
    is_small = [tensor.nbytes < HUGE_FROM_BYTES for tensor in tensors]
    sizes = [
        -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT if small else 0
        for tensor, small in zip(tensors, is_small, strict=True)
    ]
    shared = mapped((sum(sizes),), torch.uint8)
    return [
        shared[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if small
        else mapped(tensor.shape, tensor.dtype)
        for tensor, small, start in zip(tensors, is_small, itertools.accumulate(sizes, initial=0), strict=False)
    ]


def zeros_like_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros of the same shapes and types, in memory like that of :func:`room_for`."""
    zeros = room_for(tensors)
    for tensor in zeros:
        tensor.zero_()
    return zeros


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor that has a shape but hardly any memory, to replace one whose memory is not needed now.

    It is read-only, and its values are NaN, so that they are not mistaken for real ones.
    """
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device="cpu").expand(tuple(shape))


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a :func:`stand_in`, unless it has a single value, or none."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() < tensor.nbytes


def _cut(copy: torch.Tensor, original: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Matching pieces of a copy and its original."""
    if copy.nbytes > COPY_BYTES and original.is_contiguous():
        length, flat, flat_original = COPY_BYTES // copy.itemsize, copy.view(-1), original.view(-1)
        for start in range(0, len(flat), length):
            yield flat[start : start + length], flat_original[start : start + length]
    else:
        yield copy, original


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor as writable bytes (format ``B``), without a copy."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # a single value, of an expanded tensor
        flat = flat.as_strided(flat.shape, (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a contiguous CPU tensor outside of autograd, in the tensor's own memory where possible."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"only dense tensors can be sent, got layout {tensor.layout}, type {tensor.dtype}")
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def array_over(buffer: Buffer, nbytes: int) -> np.ndarray:
    """Received bytes as an array of ``uint8``: a view if the memory is writable, otherwise a copy.

    Raises:
        RuntimeError: there are not ``nbytes`` of them.
    """
    view = memoryview(buffer)
    if view.nbytes != nbytes:
        raise RuntimeError(f"the serialized tensor takes {nbytes} bytes, got {view.nbytes}")
    array = np.frombuffer(view, dtype=np.uint8)
    return array.copy() if view.readonly else array


def typed(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Read bytes (at least one) as numbers: a view if they are aligned, otherwise a copy."""
    numbers = torch.frombuffer(array, dtype=dtype)
    return numbers if numbers.data_ptr() % dtype.itemsize == 0 else torch.frombuffer(array.copy(), dtype=dtype)


def tensor_over(buffer: Buffer, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    """A tensor over received bytes: a view if the memory is writable and aligned, otherwise a copy.

    Raises:
        RuntimeError: the number of bytes does not fit such a tensor.
    """
    array = array_over(buffer, math.prod(size) * dtype.itemsize)
    if not len(array):
        return torch.empty(tuple(size), dtype=dtype, device="cpu")
    return typed(array, dtype).view(tuple(size))


class CompressionBase(ABC):
    """A way to turn tensors into bytes and back.

    A codec of your own needs ``compression_type``, :meth:`compress`, :meth:`extract` and
    :meth:`estimate_compression_ratio`. Averages are sent with it as differences unless it sets ``lossy`` to ``False``.
    """

    compression_type: CompressionType
    lossy: bool = True
    """Whether the restored tensor may differ from the original one."""
    sparse: bool = False
    """Whether most values are left out and read as 0."""
    keeps_small_values: bool = False
    """Whether no value changes by more than its own magnitude, however large others are."""

    @property
    def fingerprint(self) -> str:
        """Two peers may average together only if their codecs have equal fingerprints."""
        return self.compression_type.name

    @property
    def elementwise(self) -> bool:
        """Whether each value is encoded independently, so that several tensors of one type can be encoded as one."""
        return False

    @property
    def for_averages(self) -> CompressionBase | None:
        """The codec of averages, if all members must get the same bits, see
        :class:`~shoal.compression.one_result.OneResult`; ``None``: each member gets the difference between the average
        and its own values."""
        return None

    def for_tensor(self, info: CompressionInfo) -> CompressionBase:
        """The codec that encodes this tensor: this one, unless it chooses among others."""
        return self

    @property
    def block(self) -> int | None:
        """A tensor that is cut at multiples of this number reads like the whole one; ``None``: there is none."""
        return 1 if self.elementwise else None

    @abstractmethod
    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        """Turn a tensor into bytes.

        Args:
            tensor: on any device; it is copied to the CPU if it is not there.
            info: what the codec may need to know about the tensor.
            allow_inplace: the codec may overwrite the tensor's values if that saves memory.

        Returns:
            Metadata and bytes; the bytes may be a view of the tensor's memory.

        Raises:
            ValueError: the codec cannot represent such a tensor.
        """

    @abstractmethod
    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        """Restore a tensor. It may share memory with the given bytes: copy it before you keep or change it.

        Raises:
            ValueError: the metadata is malformed.
            RuntimeError: the bytes are truncated, too many, or do not fit the metadata.
        """

    def compress_and_decode(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> tuple[SerializedTensor, torch.Tensor]:
        """Turn a tensor into bytes, and also return the values that the receiver will see, on the tensor's own device.

        For error feedback: add ``tensor - decoded`` to the tensor that is sent next time. The values equal those of
        :meth:`extract` bit by bit, and may also share memory with the bytes.
        """
        serialized = self.compress(tensor, info, allow_inplace)
        return serialized, self.extract(serialized).to(tensor.device)

    @abstractmethod
    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes after compression over bytes before, for the tensor or part that ``info`` describes.

        Exact for the codecs of this package, except that zeros may take fewer; 1 for a tensor without values.
        """

    def compressed_nbytes(self, size: Sequence[int], info: CompressionInfo) -> int | None:
        """Bytes of a compressed part of this size and type ``info.descriptor.dtype``; ``None``: depends on values."""
        return None

    def _read_metadata(self, serialized_tensor: SerializedTensor) -> tuple[torch.dtype, int]:
        metadata = serialized_tensor.metadata
        if metadata.compression != self.compression_type:
            raise ValueError(
                f"bytes were made by codec {quoted(metadata.compression)}, they cannot be read by "
                f"{type(self).__name__} ({self.compression_type:d}): peers must use the same compression"
            )
        return metadata.checked()

    def _metadata_of(self, tensor: torch.Tensor) -> TensorMetadata:
        return TensorMetadata(
            int(self.compression_type), dtype_name(tensor.dtype), tuple(tensor.shape), tensor.requires_grad
        )


def ratio_of(nbytes: int, info: CompressionInfo) -> float:
    """Bytes after compression over bytes before."""
    before = math.prod(info.size) * info.descriptor.dtype.itemsize
    return nbytes / before if before else 1.0


class NoCompression(CompressionBase):
    """Sends the tensor as it is in memory (little-endian), without a copy on either side.

    While :data:`USE_LEGACY_BFLOAT16` is set, bfloat16 is sent as float32, which is exact too.
    """

    compression_type = CompressionType.NONE
    lossy = False
    keeps_small_values = True

    @property
    def fingerprint(self) -> str:
        return "NONE, bfloat16 as float32" if USE_LEGACY_BFLOAT16 else "NONE"

    @property
    def elementwise(self) -> bool:
        return type(self) is NoCompression  # a subclass may do anything

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        metadata, values = self._metadata_of(tensor), plain(tensor)
        if values.dtype == torch.bfloat16 and USE_LEGACY_BFLOAT16:
            values = values.float()
        return SerializedTensor(metadata, bytes_of(values))

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        dtype, count = self._read_metadata(serialized_tensor)
        metadata, buffer = serialized_tensor.metadata, serialized_tensor.buffer
        if dtype == torch.bfloat16 and memoryview(buffer).nbytes == count * torch.float32.itemsize:
            tensor = tensor_over(buffer, torch.float32, metadata.size).to(dtype)
        else:
            tensor = tensor_over(buffer, dtype, metadata.size)
        return tensor.requires_grad_(metadata.requires_grad)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return ratio_of(self.compressed_nbytes(info.size, info), info)

    def compressed_nbytes(self, size: Sequence[int], info: CompressionInfo) -> int:
        dtype = info.descriptor.dtype
        if dtype == torch.bfloat16 and USE_LEGACY_BFLOAT16:
            dtype = torch.float32
        return math.prod(size) * dtype.itemsize


def check_codec(option: str, codec: object) -> None:
    """Check that an option for a codec holds a codec or ``None``.

    Raises:
        TypeError: it holds something else, such as a codec class.
    """
    if codec is None or isinstance(codec, CompressionBase):
        return
    if isinstance(codec, type) and issubclass(codec, CompressionBase):
        raise TypeError(f"{option} must be a codec, got the class {codec.__name__}: write {codec.__name__}()")
    raise TypeError(f"{option} must be a codec such as shoal.Float16Compression(), got {codec!r}")
