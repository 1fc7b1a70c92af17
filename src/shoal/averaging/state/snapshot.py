"""A state that stands still while it is sent: tensors as one row of bytes, cut into chunks, each with a hash.

Donors that have the same tensors and the same codec have the same chunks, so a newcomer can take some from each and
check every one of them. The hash of all the hashes names the version.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3

from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import Buffer, SerializedTensor, TensorMetadata, copied
from shoal.serializer import MSGPackSerializer
from shoal.tasks import run_in_worker

MOST_CHUNKS = 128
# A state is cut into about a hundred chunks: enough to share them among donors, few enough to cost little each.
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 2**18, 2**22

HASH_BYTES = 32
HASHING_THREADS = 4
# A chunk of more pieces than this is copied together before it is sent.
_MAX_PIECES = 64


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


def chunk_bytes_of(total_bytes: int) -> int:
    """The size of the chunks of a state."""
    return min(max(1 << (total_bytes // MOST_CHUNKS).bit_length(), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


class Chunks:
    """Buffers in a row, cut into chunks of equal size, and a smaller last one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._ends = list(itertools.accumulate(map(len, buffers)))
        self.total_bytes = self._ends[-1] if self._ends else 0
        self.chunk_bytes = chunk_bytes_of(self.total_bytes)
        self.count = -(-self.total_bytes // self.chunk_bytes)

    def pieces(self, index: int) -> list[memoryview]:
        """The memory of a chunk."""
        start, stop = index * self.chunk_bytes, min((index + 1) * self.chunk_bytes, self.total_bytes)
        pieces = []
        for position in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            buffer = self._buffers[position]
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


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state, encoded and hashed. Takes as much memory as the state, once."""

    metadata: bytes
    tensors: list[TensorMetadata]
    tensor_bytes: list[int]
    chunks: Chunks
    hashes: bytes
    """Of all chunks."""

    @classmethod
    async def take(cls, get_state: GetState, codec: CompressionBase) -> Snapshot:
        """Encode and hash a state, in worker threads.

        Args:
            get_state: gives the state.
            codec: how tensors travel.
        """
        metadata, encoded = await run_in_worker(_encode, get_state, codec)
        buffers = [memoryview(tensor.buffer) for tensor in encoded]
        chunks = Chunks(buffers)
        share = max(1, -(-chunks.count // HASHING_THREADS))
        starts = range(0, chunks.count, share)
        hashes = await asyncio.gather(*(run_in_worker(_hash, chunks, start, start + share) for start in starts))
        return cls(metadata, [t.metadata for t in encoded], list(map(len, buffers)), chunks, b"".join(hashes))

    def chunk(self, index: int) -> list[Buffer]:
        """The bytes of a chunk, in a few pieces."""
        pieces = self.chunks.pieces(index)
        return [b"".join(pieces)] if len(pieces) > _MAX_PIECES else list(pieces)


def _encode(get_state: GetState, codec: CompressionBase) -> tuple[bytes, list[SerializedTensor]]:
    """A state's metadata, and the bytes of its tensors in memory that nobody else changes."""
    state = get_state()
    metadata, tensors, infos = (*state, None)[:3]
    infos = infos or [CompressionInfo.from_tensor(tensor) for tensor in tensors]
    may_keep, waiting, encoded = isinstance(state, OwnedState), deque(zip(tensors, infos, strict=True)), []
    del state, tensors  # what is encoded need not be kept beside its bytes
    while waiting:
        tensor, info = waiting.popleft()
        if not may_keep:
            tensor = copied(tensor).requires_grad_(tensor.requires_grad)
        encoded.append(codec.compress(tensor, info))
    return MSGPackSerializer.dumps(metadata), encoded


def _hash(chunks: Chunks, start: int, end: int) -> bytes:
    return b"".join(hash_of(chunks.pieces(index)) for index in range(start, min(end, chunks.count)))
