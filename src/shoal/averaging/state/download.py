"""Downloading one version of a state from all donors that have it, chunk by chunk.

Every donor is asked for the next chunk that nobody has been asked for. What a donor that fails has left undone goes to
the others. In the end, when nothing is left to ask for, donors that are done are asked for what others still owe. A
chunk counts when its hash is right.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shoal.averaging.messages import ChunkRequest, StateChunk, StateHeader
from shoal.averaging.state.snapshot import HASH_BYTES, Chunks, State, chunk_bytes_of, hash_of, version_of
from shoal.compression import deserialize_torch_tensor
from shoal.compression.base import SerializedTensor, bytes_of, mapped
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.serializer import MSGPackSerializer
from shoal.tasks import run_in_worker

MAX_TENSORS = 2**20
MIN_WINDOW = 2
MAX_WINDOW_BYTES = 2**26
# A donor is asked for what it delivers in this time; for less in the end, so that all donors are done together.
WINDOW_SECONDS, LAST_WINDOW_SECONDS = 0.5, 0.125

_RATE_MEMORY = 0.8
_PAGE_BYTES = 4096


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
