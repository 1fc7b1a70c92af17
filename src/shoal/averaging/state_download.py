"""Downloading one version of a state from all donors that have it, chunk by chunk.

Every donor is asked for the next chunk that nobody has been asked for. What a donor that fails has left undone goes to
the others. In the end, when nothing is left to ask for, donors that are done are asked for what others still owe. A
chunk counts when its hash is right.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence

import torch

from shoal.averaging.protocol import ChunkRequest, StateChunk, StateHeader
from shoal.averaging.snapshot import CHUNK_BYTES, HASH_BYTES, ChunkLayout, State, hash_of, version_of
from shoal.clock import timeout
from shoal.compression import deserialize_torch_tensor
from shoal.compression.base import SerializedTensor, bytes_of
from shoal.errors import ProtocolError
from shoal.p2p import Call
from shoal.serializer import MSGPackSerializer

MAX_TENSORS = 2**20
MIN_WINDOW, MAX_WINDOW = 2, 64
"""How many chunks a donor is asked for at a time."""
WINDOW_SECONDS = 0.5
"""Their number is what the donor delivers in this time."""
_RATE_MEMORY = 0.8


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
        self._layout = ChunkLayout(header.tensor_bytes)
        self._buffers = [bytes_of(torch.empty(size, dtype=torch.uint8)) for size in header.tensor_bytes]
        self._todo = list(range(self._layout.count))
        """Chunks that nobody is asked for, as a heap."""
        self._asked: dict[int, int] = {}
        """Chunks that have not come yet, and how many donors are asked for them; the earliest request first."""
        self._writing: set[int] = set()
        self._missing = self._layout.count
        self._changed = asyncio.Event()
        self.finished = asyncio.Event()
        self._note_progress()

    @property
    def total_bytes(self) -> int:
        return self._layout.total_bytes

    def result(self) -> State:
        """The state, when all of it is here. Its memory is handed over.

        Raises:
            ValueError, RuntimeError: what the donors agree on is no state.
        """
        buffers, self._buffers = deque(self._buffers), []
        tensors = [
            deserialize_torch_tensor(SerializedTensor(metadata, buffers.popleft())) for metadata in self._header.tensors
        ]
        return State(MSGPackSerializer.loads(self._header.metadata), tensors)

    async def fetch_from(self, call: Call) -> None:
        """Take chunks from one donor until all are here.

        Raises:
            ProtocolError: what it sends is not what was asked for.
            TimeoutError: it is silent.
        """
        requested: deque[int] = deque()
        rate, window, loop = 0.0, MIN_WINDOW, asyncio.get_running_loop()
        try:
            while not self.finished.is_set():
                await self._ask(call, requested, window)
                if not requested:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                started = loop.time()
                async with timeout(self._chunk_timeout):
                    await self._take_chunk(call, requested[0])
                self._answered(requested.popleft())
                newest = 1 / max(loop.time() - started, 1e-9)
                rate = newest if not rate else _RATE_MEMORY * rate + (1 - _RATE_MEMORY) * newest
                window = max(MIN_WINDOW, min(MAX_WINDOW, int(rate * WINDOW_SECONDS)))
        finally:
            for index in requested:
                self._answered(index)

    async def _ask(self, call: Call, requested: deque[int], window: int) -> None:
        while len(requested) < window:
            index = self._next_for(requested)
            if index is None:
                return
            self._asked[index] = self._asked.get(index, 0) + 1
            requested.append(index)
            await call.send(ChunkRequest(index=index))

    def _next_for(self, requested: Sequence[int]) -> int | None:
        if self._todo:
            return heapq.heappop(self._todo)
        if requested:  # first what this donor owes itself
            return None
        return min(self._asked, key=lambda index: self._asked[index], default=None)

    def _answered(self, index: int) -> None:
        """A donor has delivered a chunk, or never will."""
        if index not in self._asked:  # another one has delivered it
            return
        self._asked[index] -= 1
        if self._asked[index] == 0:
            del self._asked[index]
            heapq.heappush(self._todo, index)
            self._note_progress()

    async def _take_chunk(self, call: Call, index: int) -> None:
        chunk = await call.receive(StateChunk)
        if chunk is None or chunk.index != index:
            raise ProtocolError(f"sent {chunk} where chunk {index} of the state is due")
        target = self._layout.pieces(index, self._buffers)
        is_first = index in self._asked and index not in self._writing
        pieces = target if is_first else [memoryview(bytearray(sum(map(len, target))))]
        if is_first:
            self._writing.add(index)
        try:
            await call.read_payload_into(*pieces)
            if hash_of(pieces) != self._hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]:
                raise ProtocolError(f"chunk {index} of the state does not match its hash")
        finally:
            if is_first:
                self._writing.discard(index)
        if index in self._asked and (is_first or index not in self._writing):
            if not is_first:
                _copy(pieces[0], target)
            del self._asked[index]
            self._missing -= 1
            self._note_progress()

    def _note_progress(self) -> None:
        if not self._missing:
            self.finished.set()
        self._changed.set()


def _copy(source: memoryview, targets: Sequence[memoryview]) -> None:
    for target in targets:
        target[:], source = source[: len(target)], source[len(target) :]


async def open_state(call: Call, max_bytes: int, chunk_timeout: float) -> tuple[StateHeader, bytes]:
    """What a donor answers to a request for its state, checked, with the hashes of the chunks.

    Raises:
        ProtocolError: it makes no sense, or is larger than ``max_bytes``.
        TimeoutError: there is no answer.
    """
    async with timeout(chunk_timeout):
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
        hashes = bytearray(HASH_BYTES * -(-sum(sizes) // CHUNK_BYTES))
        await call.read_payload_into(memoryview(hashes))
    return header, bytes(hashes)
