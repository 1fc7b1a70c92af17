"""A state on its way from donors to a newcomer, in chunks with hashes.

While it is sent it stands still (:class:`Snapshot`): its tensors are one row of bytes, cut into chunks. Donors that
have the same tensors and the same codec have the same chunks, so a newcomer can take some from each and check every one
of them. The hash of all the hashes names the version.

Every donor is asked for the next chunk that nobody has been asked for. What a donor that fails has left undone goes to
the others. In the end, when nothing is left to ask for, donors that are done are asked for what others still owe. A
chunk counts when its hash is right.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3

from shoal.averaging.messages import ChunkRequest, StateChunk, StateHeader
from shoal.compression import CompressionBase, CompressionInfo, deserialize_torch_tensor
from shoal.compression.base import Buffer, SerializedTensor, TensorMetadata, bytes_of, copied, mapped
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.serializer import MSGPackSerializer
from shoal.tasks import run_in_worker

# A state that announces more is refused before any memory is taken for it.
MAX_TENSORS = 2**20
MIN_WINDOW = 2
MAX_WINDOW_BYTES = 2**26
# A donor is asked for what it delivers in this time; for less in the end, so that all donors are done together.
WINDOW_SECONDS, LAST_WINDOW_SECONDS = 0.5, 0.125

# How much of a donor's estimated speed comes from the estimate before; the rest is its latest chunk.
_RATE_MEMORY = 0.8
_PAGE_BYTES = 4096

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


class _Queue:
    """Chunks that a donor has been asked for, in the order in which they will come, and how fast they do."""

    def __init__(self, longest: int) -> None:
        self.chunks: deque[int] = deque()
        self._longest = longest
        self._rate = 0.0

    def delivered(self, seconds: float) -> None:
        """The first chunk has come, and has taken so long."""
        self.chunks.popleft()
        newest = 1 / max(seconds, 1e-9)
        self._rate = _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * newest if self._rate else newest

    def length_for(self, seconds: float) -> int:
        """How many chunks the donor delivers in this time, within limits."""
        return max(MIN_WINDOW, min(self._longest, int(self._rate * seconds)))

    def expected(self) -> Iterator[tuple[int, float]]:
        """Each chunk, and in how many seconds it will probably be here."""
        return ((chunk, position / max(self._rate, 1e-9)) for position, chunk in enumerate(self.chunks, 1))


class _Place(NamedTuple):
    """Where a chunk is received."""

    chunk: int
    pieces: list[memoryview]
    is_final: bool
    """It is part of the state's own memory; no other donor writes there at the same time."""


class Download:
    """One version of the state on its way here.

    Args:
        header: of the donor that was asked first; it gives the metadata.
        hashes: of all chunks, as it says.
        chunk_timeout: seconds without the next chunk after which a donor is given up.
    """

    def __init__(self, header: StateHeader, hashes: bytes, chunk_timeout: float) -> None:
        self._header, self._hashes, self._chunk_timeout = header, hashes, chunk_timeout
        self.version = version_of(header.tensors, header.tensor_bytes, hashes)
        self._buffers = [bytes_of(mapped((size,), torch.uint8)) for size in header.tensor_bytes]
        self._chunks = Chunks(self._buffers)
        # Chunks that nobody is asked for, as a heap.
        self._todo = list(range(self._chunks.count))
        # Chunks that have not come yet, and how many donors are asked for them; the earliest request first.
        self._asked: dict[int, int] = {}
        # The chunks of all donors.
        self._queues: list[_Queue] = []
        # Chunks of which bytes, or unverified ones, are in the state's own memory.
        self._writing: set[int] = set()
        # When the memory of a chunk has been provided.
        self._ready: dict[int, asyncio.Future[None]] = {}
        self._missing = self._chunks.count
        # Chunks that came while another donor, which is slower or stuck, was writing them to the state's memory.
        self._copies: dict[int, memoryview] = {}
        self.finished = asyncio.Event()
        self._check_finished()

    @property
    def total_bytes(self) -> int:
        return self._chunks.total_bytes

    def result(self) -> State:
        """The state, when all of it is here. Its memory is handed over.

        Raises:
            ValueError, RuntimeError: what the donors agree on is no state.
        """
        for index, copy in self._copies.items():
            _copy(copy, self._chunks.pieces(index))
        self._buffers.reverse()
        tensors = [
            deserialize_torch_tensor(SerializedTensor(metadata, self._buffers.pop()))
            for metadata in self._header.tensors
        ]
        return State(MSGPackSerializer.loads(self._header.metadata), tensors)

    async def fetch_from(self, call: Call) -> None:
        """Take chunks from one donor until all are here.

        Raises:
            ProtocolError: what it sends is not what was asked for.
            TimeoutError: it is silent.
        """
        queue, loop = _Queue(MAX_WINDOW_BYTES // self._chunks.chunk_bytes), asyncio.get_running_loop()
        self._queues.append(queue)
        try:
            while not self.finished.is_set():
                await self._ask(call, queue)
                started = loop.time()
                async with asyncio.timeout(self._chunk_timeout):
                    place = await self._receive(call, queue.chunks[0])
                queue.delivered(loop.time() - started)
                self._check(place)
        finally:
            self._queues.remove(queue)
            for index in queue.chunks:
                self._answered(index)

    async def _ask(self, call: Call, queue: _Queue) -> None:
        new = list(self._choose(queue))
        queue.chunks.extend(new)
        untouched = [index for index in new if index not in self._ready]
        if untouched:
            touching = asyncio.ensure_future(run_in_worker(self._touch, untouched))
            self._ready.update(dict.fromkeys(untouched, touching))
        for index in new:
            await call.send(ChunkRequest(index=index))

    def _choose(self, queue: _Queue) -> Iterator[int]:
        """What to ask a donor for next, if anything; one that owes nothing is asked for what others owe."""
        share = len(self._todo) // len(self._queues)
        longest = max(queue.length_for(LAST_WINDOW_SECONDS), min(queue.length_for(WINDOW_SECONDS), share))
        if len(queue.chunks) > longest // 2:
            return
        count = min(longest - len(queue.chunks), len(self._todo))
        for _ in range(count):
            index = heapq.heappop(self._todo)
            self._asked[index] = 1
            yield index
        if not count and not queue.chunks:
            yield from self._latest()

    def _latest(self) -> Iterator[int]:
        """The chunk that will be the last to come, among those that the fewest donors have been asked for."""
        expected: dict[int, float] = {}
        for queue in self._queues:
            for index, seconds in queue.expected():
                if index in self._asked:
                    expected[index] = min(seconds, expected.get(index, seconds))
        if expected:
            index = max(expected, key=lambda index: (-self._asked[index], expected[index]))
            self._asked[index] += 1
            yield index

    def _touch(self, chunks: Sequence[int]) -> None:
        """Let the system provide the memory of chunks that will be written: it takes as long as the writing itself."""
        for index in chunks:
            for piece in self._chunks.pieces(index):
                # Numpy would hold up other threads.
                torch.frombuffer(piece, dtype=torch.uint8)[::_PAGE_BYTES].zero_()

    def _answered(self, index: int) -> None:
        """A donor has delivered a chunk, or never will."""
        if index not in self._asked:  # it is here
            return
        self._asked[index] -= 1
        if self._asked[index] == 0:
            del self._asked[index]
            heapq.heappush(self._todo, index)

    async def _receive(self, call: Call, index: int) -> _Place:
        chunk = await call.receive(StateChunk)
        if chunk is None or chunk.index != index:
            raise ProtocolError(f"sent {chunk} where chunk {index} of the state is due")
        await asyncio.shield(self._ready[index])
        place = self._place_for(index)
        try:
            await call.read_payload_into(*place.pieces)
        except BaseException:
            self._release(place)
            raise
        return place

    def _place_for(self, index: int) -> _Place:
        pieces = self._chunks.pieces(index)
        if index in self._asked and index not in self._writing:
            self._writing.add(index)
            return _Place(index, pieces, is_final=True)
        return _Place(index, [memoryview(bytearray(sum(map(len, pieces))))], is_final=False)

    def _check(self, place: _Place) -> None:
        """Count a chunk that has arrived if its hash is right; found out at once, while it is in the cache."""
        index = place.chunk
        try:
            if hash_of(place.pieces) != self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]:
                raise ProtocolError(f"chunk {index} of the state does not match its hash")
            if index in self._asked:
                if not place.is_final:
                    self._copies[index] = place.pieces[0]
                del self._asked[index]
                self._missing -= 1
                self._check_finished()
        finally:
            self._release(place)
            self._answered(index)

    def _release(self, place: _Place) -> None:
        if place.is_final:
            self._writing.discard(place.chunk)

    def _check_finished(self) -> None:
        if not self._missing:
            self.finished.set()


def _copy(source: memoryview, targets: Sequence[memoryview]) -> None:
    for target in targets:
        target[:], source = source[: len(target)], source[len(target) :]


async def open_state(call: Call, max_bytes: int, chunk_timeout: float) -> tuple[StateHeader, bytes]:
    """What a donor answers to a request for its state, checked, with the hashes of the chunks.

    Raises:
        ProtocolError: it makes no sense, or is larger than ``max_bytes``.
        TimeoutError: there is no answer.
    """
    async with asyncio.timeout(chunk_timeout):
        header = await call.receive(StateHeader)
        if header is None:
            raise ProtocolError("ended without an answer")
        if not header.allowed:
            return header, b""
        sizes = header.tensor_bytes
        if len(sizes) != len(header.tensors) or len(sizes) > MAX_TENSORS or any(size < 0 for size in sizes):
            raise ProtocolError("the list of tensors is malformed")
        if sum(sizes) > max_bytes:
            raise ProtocolError(f"a state of {sum(sizes)} bytes is over the limit of {max_bytes}")
        hashes = bytearray(HASH_BYTES * -(-sum(sizes) // chunk_bytes_of(sum(sizes))))
        await call.read_payload_into(memoryview(hashes))
    return header, bytes(hashes)
