"""A state in flight from donors to a newcomer, in chunks with hashes.

A donor sends a fixed copy of its state (:class:`Snapshot`): the bytes of its tensors in a row, cut into chunks. Donors
with the same tensors and the same codec have the same chunks. So a newcomer can take some chunks from each donor and
check every one of them. The hash of all the hashes identifies the version.

Each donor is asked for the next chunks that no donor has been asked for. If a donor fails, the others are asked for its
chunks. At the end, donors that are done are asked for chunks that others still owe. A chunk counts only if its hash is
right.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3

from shoal.averaging.messages import ChunkRequest, StateAnswer, StateChunk, StateHeader
from shoal.base.logs import one_line, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import run_in_worker
from shoal.compression import CompressionBase, CompressionInfo, deserialize_torch_tensor
from shoal.compression.base import DTYPES, Buffer, SerializedTensor, TensorMetadata, bytes_of, copied, mapped
from shoal.compression.serialization import check_nbytes, is_sparse
from shoal.compression.statistics import codec_for_download
from shoal.errors import ProtocolError
from shoal.p2p import Call, PeerID

# A state that announces more tensors is refused before any memory is taken for it (chosen).
MAX_TENSORS = 2**20
# The chunks in flight from a donor take it this many seconds (chosen); less at the end, so all donors end together.
WINDOW_SECONDS, LAST_WINDOW_SECONDS = 0.5, 0.125
# The least chunks and the most bytes in flight. With two chunks, the second is in flight while the first arrives. The
# most are derived: 1 Gbit/s for ``WINDOW_SECONDS``.
MIN_WINDOW, MAX_WINDOW_BYTES = 2, 2**26

# The weight of the earlier estimate in a donor's estimated speed (chosen); the rest comes from its latest chunk.
_RATE_MEMORY = 0.8

# A state is cut into about a hundred chunks (chosen): enough to share among donors, few enough for little overhead.
MOST_CHUNKS, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 128, 2**18, 2**22

# Arriving bytes are counted in pieces of this size (chosen). They are small while a donor is slow or its speed unknown,
# so that it does not look silent.
SMALL_PIECE_BYTES, PIECE_BYTES = 2**14, 2**18
HASH_BYTES = 32  # of BLAKE3
HASHING_THREADS = 4  # chosen: few, because a donor still trains meanwhile
# A chunk of more pieces than this is copied together before it is sent (chosen), because each piece has overhead.
_MAX_PIECES = 64

# The speed of a download is measured over this many seconds (chosen): enough for a few windows and a lost packet.
SPEED_SECONDS = 10.0
# Above this share of the rate limit (chosen), the limit and not the donors decides the speed of the download.
_SHARE_OF_LIMIT = 0.7
# A limited download takes from so few donors at once that each of them hears from it this often, in seconds (chosen). A
# donor that hears nothing takes the newcomer for dead (SILENCE_SECONDS in donor.py).
_SECONDS_BETWEEN_REQUESTS = 10.0
# After a pause of the donors, the bytes of this many seconds may come at once (chosen).
_BURST_SECONDS = 1.0


class UnusableStateError(ProtocolError):
    """A donor offers a state that this peer can never use. The donor is left out for a while."""


class State(NamedTuple):
    """The state that a newcomer gets."""

    metadata: Any
    """Plain values."""
    tensors: list[torch.Tensor]


class GivenState(State):
    """A state and its origin."""

    donor: PeerID
    """The donor that has described the state and given the metadata. Others may have sent some of the chunks."""
    version: bytes


class OwnedState(NamedTuple):
    """A state for newcomers with tensors that will not change any more, so that they need not be copied."""

    metadata: Any
    tensors: Sequence[torch.Tensor]
    infos: Sequence[CompressionInfo] | None = None


StateTuple = tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo]]
GetState = Callable[[], "StateTuple | OwnedState"]


def chunk_bytes_of(total_bytes: int) -> int:
    """The size of the chunks of a state of this size: a power of two."""
    return min(max(1 << (total_bytes // MOST_CHUNKS).bit_length(), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


class Chunks:
    """Buffers in a row, cut into chunks of equal size; the last one may be smaller."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._ends = list(itertools.accumulate(map(len, buffers)))
        self.total_bytes = self._ends[-1] if self._ends else 0
        self.chunk_bytes = chunk_bytes_of(self.total_bytes)
        self.count = -(-self.total_bytes // self.chunk_bytes)

    def pieces(self, index: int) -> list[memoryview]:
        """The memory of a chunk, as pieces of the buffers."""
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
    """The BLAKE3 hash of some memory: a cryptographic hash that is as fast as memory can be read."""
    digest = blake3()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def version_of(tensors: Sequence[TensorMetadata], sizes: Sequence[int], hashes: bytes) -> bytes:
    """The id of a state's version: two donors with the same id have the same tensors. Metadata do not count."""
    return hash_of([msgspec.msgpack.encode([list(tensors), list(sizes)]), hashes])


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A copy of a state, encoded and hashed. It takes as much memory as the encoded state."""

    metadata: bytes
    tensors: list[TensorMetadata]
    tensor_bytes: list[int]
    chunks: Chunks
    hashes: bytes
    """The hashes of all chunks in a row, ``HASH_BYTES`` each."""

    @classmethod
    async def take(cls, get_state: Callable[[], Any], codec: CompressionBase) -> Snapshot | None:
        """Encode and hash a state, in worker threads.

        Args:
            get_state: returns the state, as :data:`GetState` does, or ``None``.
            codec: compresses the tensors.

        Returns:
            ``None`` if there is no state.
        """
        if (found := await run_in_worker(_encode, get_state, codec)) is None:
            return None
        metadata, encoded = found
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


def _encode(get_state: Callable[[], Any], codec: CompressionBase) -> tuple[bytes, list[SerializedTensor]] | None:
    """Encode a state's metadata, and its tensors into memory of their own."""
    if (state := get_state()) is None:
        return None
    metadata, tensors, infos = (*state, None)[:3]
    infos = infos or [CompressionInfo.from_tensor(tensor) for tensor in tensors]
    may_keep, waiting, encoded = isinstance(state, OwnedState), deque(zip(tensors, infos, strict=True)), []
    del state, tensors  # so that the memory of each tensor can be freed as soon as it is encoded
    while waiting:
        tensor, info = waiting.popleft()
        if not may_keep:
            tensor = copied(tensor).requires_grad_(tensor.requires_grad)
        encoded.append(codec_for_download(codec, tensor, info).compress(tensor, info))
    return MSGPackSerializer.dumps(metadata), encoded


def _hash(chunks: Chunks, start: int, end: int) -> bytes:
    return b"".join(hash_of(chunks.pieces(index)) for index in range(start, min(end, chunks.count)))


class RateMeter:
    """Measures and limits how fast bytes arrive.

    Args:
        now: loop time in seconds.
        rate: the limit in bytes per second.
    """

    def __init__(self, now: float, rate: float = math.inf) -> None:
        self.began_at = now
        self.total = 0
        self._rate, self._enough_until = rate, now
        # Marks of the last seconds: a time, and the bytes that had arrived before it.
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])

    def anew(self, now: float) -> RateMeter:
        """Start a new measurement with the same limit."""
        return RateMeter(now, self._rate)

    def add(self, nbytes: int, now: float) -> None:
        """Note that bytes have just arrived."""
        if now - self._marks[-1][0] >= SPEED_SECONDS / 16:
            self._marks.append((now, self.total))
            self._forget(now)
        self.total += nbytes
        self._enough_until = max(self._enough_until, now - _BURST_SECONDS) + nbytes / self._rate

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= now - SPEED_SECONDS:
            self._marks.popleft()

    def recent(self, now: float) -> float:
        """Bytes per second, over the last ``SPEED_SECONDS``."""
        self._forget(now)
        since, before = self._marks[0]
        return (self.total - before) / max(now - since, 1e-9)

    def seconds_to_rest(self, now: float) -> float:
        """The seconds for which no more bytes should be taken."""
        return max(0.0, self._enough_until - now)

    def is_at_limit(self, now: float) -> bool:
        """Whether the limit decides the speed, so that more or other donors would not help."""
        # At a low rate there are long pauses between the chunks, in which nothing comes.
        return self.seconds_to_rest(now) > 0 or self.recent(now) >= _SHARE_OF_LIMIT * self._rate


class _Queue:
    """The chunks that a donor has been asked for, in the order in which they will come; and the donor's speed."""

    def __init__(self, longest: int) -> None:
        self.chunks: deque[int] = deque()
        self._longest = longest
        self._rate = 0.0  # in chunks per second

    def is_quick(self, chunk_bytes: int) -> bool:
        """Whether the donor delivers a large piece in a quarter of a second."""
        return self._rate * chunk_bytes >= 4 * PIECE_BYTES

    def delivered(self, seconds: float) -> None:
        """Note that the first chunk has arrived, and how long it took."""
        self.chunks.popleft()
        newest = 1 / max(seconds, 1e-9)
        self._rate = _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * newest if self._rate else newest

    def length_for(self, seconds: float) -> int:
        """The number of chunks that the donor delivers in this time, within limits."""
        return max(MIN_WINDOW, min(self._longest, int(self._rate * seconds)))

    def expected(self) -> Iterator[tuple[int, float]]:
        """Each chunk, and the seconds after which it is expected."""
        return ((chunk, position / max(self._rate, 1e-9)) for position, chunk in enumerate(self.chunks, 1))


class _ChunkMemory(NamedTuple):
    """The memory into which a chunk is received."""

    chunk: int
    pieces: list[memoryview]
    is_final: bool
    """Whether this is the state's own memory. No other donor writes there at the same time."""


class Download:
    """The download of one version of the state.

    Each chunk is in one of four states, for which there are fields: to be asked for, asked for, being written, arrived.

    Args:
        header: the description by the chosen donor, which also gives the metadata.
        hashes: the hashes of all chunks, from the same donor.
        chunk_timeout: the most seconds that a donor may send no new bytes.
        rate: the most bytes to take per second.
    """

    def __init__(self, header: StateHeader, hashes: bytes, chunk_timeout: float, rate: float = math.inf) -> None:
        self._header, self._hashes, self._chunk_timeout = header, hashes, chunk_timeout
        self.version = version_of(header.tensors, header.tensor_bytes, hashes)
        self._buffers = [bytes_of(mapped((size,), torch.uint8)) for size in header.tensor_bytes]
        self._chunks = Chunks(self._buffers)
        # Chunks that no donor is asked for at the moment, as a heap.
        self._todo = list(range(self._chunks.count))
        # By chunk that has not arrived: how many donors are asked for it. The earliest request is first.
        self._asked: dict[int, int] = {}
        # One queue for each donor that delivers.
        self._queues: list[_Queue] = []
        # Chunks that a donor is writing into the state's own memory, or whose bytes there are not verified yet.
        self._writing: set[int] = set()
        # By chunk: done when the system has provided its memory.
        self._ready: dict[int, asyncio.Future[None]] = {}
        self._missing = self._chunks.count
        # Chunks that arrived while another donor, slower or stuck, was still writing them into the state's own memory.
        self._copies: dict[int, memoryview] = {}
        self._arrivals = RateMeter(asyncio.get_running_loop().time(), rate)
        self.most_donors = max(1.0, rate * _SECONDS_BETWEEN_REQUESTS / self._chunks.chunk_bytes)
        """From how many donors chunks should come at once. There is always one; others are of no use at a low rate."""
        self.finished = asyncio.Event()
        self._check_finished()

    @property
    def total_bytes(self) -> int:
        return self._chunks.total_bytes

    @property
    def missing_bytes(self) -> int:
        """An upper limit for the bytes of all chunks that have not arrived completely."""
        return min(self._missing * self._chunks.chunk_bytes, self._chunks.total_bytes)

    def resume(self, header: StateHeader) -> None:
        """Resume the download with the metadata of this donor, and measure its speed again."""
        self._header = header
        self._arrivals = self._arrivals.anew(asyncio.get_running_loop().time())

    def seconds_left(self) -> float:
        """The seconds until the state is expected to arrive; 0 if it is too early to tell, or no donor could help."""
        now = asyncio.get_running_loop().time()
        if now - self._arrivals.began_at < SPEED_SECONDS or self._arrivals.is_at_limit(now):
            return 0.0
        return self.missing_bytes / max(self._arrivals.recent(now), 1e-9)

    def result(self) -> State:
        """The state. Call this once, when the download is finished: the memory is handed over.

        Raises:
            ValueError, RuntimeError: the data that the donors agree on is not a state.
        """
        for index, copy in self._copies.items():
            _copy(copy, self._chunks.pieces(index))
        self._buffers.reverse()
        tensors = [
            deserialize_torch_tensor(SerializedTensor(metadata, self._buffers.pop()))
            for metadata in self._header.tensors
        ]
        return State(read_metadata(self._header.metadata), tensors)

    async def fetch_from(self, call: Call, arrivals: RateMeter) -> None:
        """Take chunks from one donor until all have arrived.

        Args:
            call: the call to the donor.
            arrivals: counts the bytes from this donor.

        Raises:
            ProtocolError: the donor sends something that it was not asked for.
            TimeoutError: the donor is silent.
        """
        queue, loop = _Queue(MAX_WINDOW_BYTES // self._chunks.chunk_bytes), asyncio.get_running_loop()
        self._queues.append(queue)
        try:
            while not self.finished.is_set():
                await self._ask(call, queue)
                started = loop.time()
                piece = PIECE_BYTES if queue.is_quick(self._chunks.chunk_bytes) else SMALL_PIECE_BYTES
                place = await self._receive(call, queue.chunks[0], piece, arrivals)
                if rest := self._arrivals.seconds_to_rest(loop.time()):
                    await asyncio.sleep(rest)
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
        """The next chunks to ask a donor for, if any. A donor that owes nothing is asked for one that others owe."""
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
        """Among the chunks that the fewest donors have been asked for, the one that is expected last."""
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
        """Make the system provide the memory of chunks now, in a worker, because this takes as long as writing them."""
        for index in chunks:
            for piece in self._chunks.pieces(index):
                # torch releases the GIL while it writes; numpy would hold up other threads.
                torch.frombuffer(piece, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()

    def _answered(self, index: int) -> None:
        """Note that a donor has delivered a chunk, or never will."""
        if index not in self._asked:  # the chunk has arrived
            return
        self._asked[index] -= 1
        if self._asked[index] == 0:
            del self._asked[index]
            heapq.heappush(self._todo, index)

    async def _receive(self, call: Call, index: int, piece_bytes: int, arrivals: RateMeter) -> _ChunkMemory:
        """Receive the next chunk. A donor is not given up while bytes arrive, however slowly."""
        async with asyncio.timeout(self._chunk_timeout):
            chunk = await call.receive(StateChunk)
        if chunk is None or chunk.index != index:
            raise ProtocolError(f"sent {quoted(chunk)} where chunk {index} of the state is due")
        await asyncio.shield(self._ready[index])
        place, loop = self._place_for(index), asyncio.get_running_loop()

        def arrived(nbytes: int) -> None:
            now = loop.time()
            silence.reschedule(now + self._chunk_timeout)
            self._arrivals.add(nbytes, now)
            arrivals.add(nbytes, now)

        try:
            async with asyncio.timeout(self._chunk_timeout) as silence:
                await call.read_payload_into(*_cut(place.pieces, piece_bytes), arrived=arrived)
        except BaseException:
            self._release(place)
            raise
        return place

    def _place_for(self, index: int) -> _ChunkMemory:
        pieces = self._chunks.pieces(index)
        if index in self._asked and index not in self._writing:
            self._writing.add(index)
            return _ChunkMemory(index, pieces, is_final=True)
        return _ChunkMemory(index, [memoryview(bytearray(sum(map(len, pieces))))], is_final=False)

    def _check(self, place: _ChunkMemory) -> None:
        """Count an arrived chunk if its hash is right. It is checked at once, while it is in the processor's cache.

        Raises:
            ProtocolError: the hash is wrong.
        """
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

    def _release(self, place: _ChunkMemory) -> None:
        if place.is_final:
            self._writing.discard(place.chunk)

    def _check_finished(self) -> None:
        if not self._missing:
            self.finished.set()


def _cut(buffers: Sequence[memoryview], piece_bytes: int) -> list[memoryview]:
    """The same memory in pieces of at most this size."""
    return [each[start : start + piece_bytes] for each in buffers for start in range(0, len(each), piece_bytes)]


def _copy(source: memoryview, targets: Sequence[memoryview]) -> None:
    for target in targets:
        target[:], source = source[: len(target)], source[len(target) :]


async def open_state(
    call: Call, max_bytes: int, chunk_timeout: float, check: Callable[[Sequence[TensorMetadata]], object] | None = None
) -> tuple[StateAnswer, bytes]:
    """Receive and check a donor's answer to a request for its state, and the hashes of the chunks.

    Args:
        max_bytes: the tensors may take this many bytes, encoded as well as decoded.
        check: raises ``ValueError`` if tensors with these descriptions are of no use to this peer.

    Raises:
        UnusableStateError: this peer can never use the donor's state.
        ProtocolError: the answer is malformed.
        TimeoutError: there is no answer.
    """
    async with asyncio.timeout(chunk_timeout):
        header = await call.receive(StateAnswer)
        if header is None:
            raise ProtocolError("ended without an answer")
        if not isinstance(header, StateHeader):
            return header, b""
        try:
            _check_tensors(header, max_bytes)
            if check is not None:
                check(header.tensors)
            await run_in_worker(read_metadata, header.metadata)
        except ValueError as e:
            raise UnusableStateError(str(e)) from None
        total = sum(header.tensor_bytes)
        hashes = bytearray(HASH_BYTES * -(-total // chunk_bytes_of(total)))
        await call.read_payload_into(memoryview(hashes))
    return header, bytes(hashes)


def read_metadata(packed: bytes) -> Any:
    """The plain values of a state.

    Raises:
        ValueError: they cannot be read.
    """
    try:
        return MSGPackSerializer.loads(packed)
    except Exception as e:  # a user's class that unpacks its own values may raise anything
        raise ValueError(f"its plain values cannot be read: {type(e).__name__}: {one_line(str(e))}") from None


def _check_tensors(header: StateHeader, max_bytes: int) -> None:
    """Check a donor's description of its tensors before any memory is taken for them.

    Raises:
        ValueError: the tensors are impossible or too large.
    """
    sizes = header.tensor_bytes
    if len(sizes) != len(header.tensors) or len(sizes) > MAX_TENSORS:
        raise ValueError("the list of tensors is malformed")
    # A few bytes of a sparse message could claim any amount of memory, and omitted values are no parameters.
    if any(is_sparse(metadata.compression) for metadata in header.tensors):
        raise ValueError("the state was compressed by a codec that leaves values out")
    decoded = 0
    for metadata, nbytes in zip(header.tensors, sizes, strict=True):
        dtype, count = metadata.checked()
        check_nbytes(metadata, nbytes)
        decoded += count * dtype.itemsize
        if decoded > max_bytes:
            break
    if max(decoded, sum(sizes)) > max_bytes:
        raise ValueError(f"a state of {max(decoded, sum(sizes))} bytes is over the limit of {max_bytes}")


Layout = Sequence[tuple[Sequence[int], torch.dtype]]
"""The shape and the type of each tensor of a state."""


def layout_of(tensors: Iterable[torch.Tensor]) -> Layout:
    """The shapes and types of tensors."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def check_fit(given: Sequence[TensorMetadata], own: Layout) -> None:
    """Check that a donor's tensors can replace this peer's own, before they are downloaded.

    Floating point types of any size can replace each other. A tensor without dimensions can replace any other tensor
    and be replaced by it, because some optimizers keep a single zero for a tensor of zeros.

    Args:
        given: descriptions of valid tensors.

    Raises:
        ValueError: their number, shapes or types differ.
    """
    if len(given) != len(own):
        raise ValueError(f"it has {len(given)} tensors, and this peer has {len(own)}")
    largest = max((math.prod(shape) for shape, _ in own), default=0)
    for index, (theirs, (shape, dtype)) in enumerate(zip(given, own, strict=True)):
        is_single = not theirs.size or (not shape and math.prod(theirs.size) <= largest)
        if theirs.size != tuple(shape) and not is_single:
            raise ValueError(f"its tensor {index} has shape {quoted(theirs.size)}, expected {tuple(shape)}")
        given_dtype = DTYPES[theirs.dtype]
        if (given_dtype.is_complex, given_dtype.is_floating_point) != (dtype.is_complex, dtype.is_floating_point):
            raise ValueError(f"its tensor {index} is of type {given_dtype}, expected {dtype}")


def check_bytes(given: Sequence[TensorMetadata], most: int) -> None:
    """Check that the tensors of a donor take at most this many bytes here, before they are downloaded.

    Args:
        given: descriptions of valid tensors.

    Raises:
        ValueError: they are larger.
    """
    total = sum(math.prod(each.size) * DTYPES[each.dtype].itemsize for each in given)
    if total > most:
        raise ValueError(f"it has {total} bytes, and this peer can use at most {most}")
