"""A state that stands still while it is sent: tensors as one row of bytes, cut into chunks, each with a hash.

Donors that have the same tensors and the same codec have the same chunks, so a newcomer can take some from each and
check every one of them. The hash of all the hashes names the version.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3

from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import Buffer, SerializedTensor, TensorMetadata
from shoal.serializer import MSGPackSerializer

CHUNK_BYTES = 2**20
HASH_BYTES = 32
_MAX_PIECES = 64
"""A chunk of more pieces than this is copied together before it is sent."""


class State(NamedTuple):
    """What a newcomer gets."""

    metadata: Any
    """Plain values."""
    tensors: list[torch.Tensor]


class OwnedState(NamedTuple):
    """What an averager gives to newcomers, if nobody will change its tensors any more: they need not be copied."""

    metadata: Any
    tensors: Sequence[torch.Tensor]
    infos: Sequence[CompressionInfo] | None = None


StateTuple = tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo]]
GetState = Callable[[], "StateTuple | OwnedState"]


class ChunkLayout:
    """Which bytes of which buffers make up each chunk.

    Args:
        sizes: bytes of each buffer; all of them in a row are cut into chunks of equal size.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = list(itertools.accumulate(sizes))
        self.total_bytes = self._ends[-1] if self._ends else 0
        self.count = -(-self.total_bytes // CHUNK_BYTES)

    def pieces(self, index: int, buffers: Sequence[memoryview]) -> list[memoryview]:
        """The memory of a chunk."""
        start, stop = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.total_bytes)
        pieces = []
        for position in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            buffer = buffers[position]
            offset = self._ends[position] - len(buffer)
            if offset >= stop:
                break
            piece = buffer[max(0, start - offset) : stop - offset]
            if len(piece):
                pieces.append(piece)
        return pieces


def hash_of(pieces: Sequence[Buffer]) -> bytes:
    """BLAKE3 of some memory: a cryptographic hash that is as fast as the memory."""
    digest = blake3()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def version_of(tensors: Sequence[TensorMetadata], sizes: Sequence[int], hashes: bytes) -> bytes:
    """What tells whether two donors have the same tensors."""
    return hash_of([msgspec.msgpack.encode([list(tensors), list(sizes)]), hashes])


class Snapshot:
    """A state, encoded and hashed. Takes as much memory as the state, once.

    Args:
        get_state: gives the state.
        codec: how tensors travel.
    """

    def __init__(self, get_state: GetState, codec: CompressionBase) -> None:
        state = get_state()
        metadata, tensors, infos = (*state, None)[:3]
        infos = infos or [CompressionInfo.from_tensor(tensor) for tensor in tensors]
        may_keep = isinstance(state, OwnedState)
        encoded = [_encode(codec, *each, may_keep) for each in zip(tensors, infos, strict=True)]
        self.metadata: bytes = MSGPackSerializer.dumps(metadata)
        self.tensors = [tensor.metadata for tensor in encoded]
        self._buffers = [memoryview(tensor.buffer) for tensor in encoded]
        self.tensor_bytes = [len(buffer) for buffer in self._buffers]
        self._layout = ChunkLayout(self.tensor_bytes)
        self.count = self._layout.count
        """How many chunks there are."""
        self.hashes = b"".join(hash_of(self._layout.pieces(i, self._buffers)) for i in range(self.count))

    def chunk(self, index: int) -> list[Buffer]:
        """The bytes of a chunk, in a few pieces."""
        pieces = self._layout.pieces(index, self._buffers)
        return [b"".join(pieces)] if len(pieces) > _MAX_PIECES else list(pieces)


def _encode(codec: CompressionBase, tensor: torch.Tensor, info: CompressionInfo, may_keep: bool) -> SerializedTensor:
    """A tensor's bytes, in memory that nobody else changes."""
    if not may_keep:
        tensor = tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
    return codec.compress(tensor, info)
