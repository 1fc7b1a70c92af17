"""What is known about the chunks of a data set: which are done, and which peers hold others.

Chunks are grouped into blocks of 4096, each with a key of its own in the DHT. A peer's record of a block has one bit
for each chunk that the peer knows to be done, by any peer, and the numbers of the chunks that it holds at the moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.base.logs import one_line

CHUNKS_PER_BLOCK = 4096
"""Chosen: with one bit for each, a record takes half a kilobyte."""
_FINISHED_BYTES = 2**13  # chosen
MOST_CHUNKS = CHUNKS_PER_BLOCK * 8 * _FINISHED_BYTES
"""The most chunks of a data set: each block has one bit in the record of the pass, which has at most 8 kilobytes."""
LONGEST_CHUNK = 2**31 - 1  # chosen: more samples than any chunk has; bounds a field of records
MAX_HELD = 128
"""The most chunks of one block that a peer may hold at a time. Chosen: 128 numbers take a quarter of a kilobyte."""
LEASE_SECONDS = 30.0
"""How long a lease lasts, and so how long the chunks of a dead peer stay taken. Chosen."""
# A lease that claims to last longer than this is ignored: it is a lie, or its clock is far off. Chosen.
_LONGEST_LEASE_SECONDS = 4 * LEASE_SECONDS


@dataclass(frozen=True)
class PassName:
    """Identifies a pass. Peers with equal names share the pass."""

    run_id: str
    number: int
    samples: int | None
    """Size of the data set; ``None`` = a stream, whether or not its end is known."""
    chunk: int
    """Samples of a chunk."""
    order: str
    """Identifies the order of the samples, by :func:`order_of`; empty = not shuffled."""

    def block_key(self, block: int) -> str:
        """The key of one block's records."""
        size = "stream" if self.samples is None else self.samples
        return f"{pass_key(self.run_id)}.{self.number}.{size}.{self.chunk}.{self.order}.{block}"


def pass_key(run_id: str) -> str:
    """The key under which the peers of a run publish the pass that they are at."""
    return f"{run_id}_data"


_Number = Annotated[int, Meta(ge=0, lt=CHUNKS_PER_BLOCK)]


class BlockRecord(msgspec.Struct, frozen=True, array_like=True):
    """A peer's record of one block."""

    done: Annotated[bytes, Meta(max_length=CHUNKS_PER_BLOCK // 8)]
    """One bit for each chunk, the lowest bit of the first byte for the first chunk."""
    held: Annotated[list[_Number], Meta(max_length=MAX_HELD)]
    """The chunks that the peer holds, by their numbers within the block."""
    until: Annotated[float, Meta(ge=0, lt=1e11)]
    """DHT time at which the lease ends."""


class PassRecord(msgspec.Struct, frozen=True, array_like=True):
    """A peer's record of the passes of its run."""

    number: Annotated[int, Meta(ge=0, lt=2**31)]
    """The pass that it is at; all before it are over."""
    samples: Annotated[int, Meta(ge=-1, lt=2**53)]
    """Size of the data set; -1 for a stream whose end is not known yet."""
    chunk: Annotated[int, Meta(ge=1, le=LONGEST_CHUNK)]
    """Samples of a chunk."""
    finished: Annotated[bytes, Meta(max_length=_FINISHED_BYTES)]
    """One bit for each finished block."""
    order: Annotated[str, Meta(max_length=32)] = ""
    """As in :class:`PassName`."""
    is_stream: bool = False

    def __post_init__(self) -> None:
        _check_chunks(self.samples, self.chunk)

    @property
    def size(self) -> int | None:
        """As in :class:`PassName`."""
        return None if self.is_stream or self.samples < 0 else self.samples


class PassState(msgspec.Struct, frozen=True):
    """The state of a pass in a checkpoint."""

    number: Annotated[int, Meta(ge=0, lt=2**31)]
    samples: Annotated[int, Meta(ge=0, lt=2**53)] | None
    chunk: Annotated[int, Meta(ge=1, le=LONGEST_CHUNK)]
    done: Annotated[bytes, Meta(max_length=MOST_CHUNKS // 8)]
    """One bit for each chunk."""
    order: Annotated[str, Meta(max_length=32)] = ""

    def __post_init__(self) -> None:
        _check_chunks(self.samples or 0, self.chunk)


def _check_chunks(samples: int, chunk: int) -> None:
    """Refuse a size that no data set has, because this peer keeps a bit for each chunk."""
    if -(-samples // chunk) > MOST_CHUNKS:
        raise ValueError(f"{samples} samples in chunks of {chunk} are more than {MOST_CHUNKS} chunks")


def parse_state(state: object, samples: int | None, chunk: int, order: str) -> PassState:
    """Check a saved state.

    Raises:
        ValueError: it is malformed, or is of another data set or of another order.
    """
    try:
        found = msgspec.convert(state, PassState, builtin_types=(bytes,))
    except msgspec.ValidationError as e:
        raise ValueError(f"this is not the state_dict() of a SharedPass: {one_line(str(e))}") from None
    if found.chunk != chunk or (samples is not None and found.samples not in {samples, None}):
        raise ValueError(
            f"this state is of {found.samples} samples in chunks of {found.chunk}, but the data set has "
            f"{samples} in chunks of {chunk}: load it with the same data set and the same `chunk`"
        )
    if found.order != order:
        raise ValueError(
            "this state is of the same data in another order, so other samples are done: load it with the same run_id, "
            "`seed` and `shuffle`"
        )
    return found


def order_of(run_id: str, seed: object) -> str:
    """A short text that is equal for equal orders of samples."""
    return hashlib.blake2b(f"{run_id}/{seed}".encode(), digest_size=8).hexdigest()


def pack_bits(bits: int) -> bytes:
    """A set of numbers, given as the bits of an integer, in as few bytes as possible."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_bits(packed: bytes) -> int:
    """The reverse of :func:`pack_bits`."""
    return int.from_bytes(packed, "little")


def numbers_in(bits: int) -> Iterator[int]:
    """The numbers whose bits are set, in order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def join_blocks(finished: int, others: Mapping[int, int]) -> int:
    """The chunks that are done, as bits of their numbers within the data set.

    Args:
        finished: the finished blocks, as bits. The last one counts as a whole block.
        others: the chunks that are done in other blocks, as bits, by the number of the block.
    """
    whole = b"\xff" * (CHUNKS_PER_BLOCK // 8)
    count = max([finished.bit_length(), *(number + 1 for number in others)])
    flags = f"{finished:0{count}b}"[::-1]
    return unpack_bits(
        b"".join(whole if flags[n] == "1" else others.get(n, 0).to_bytes(len(whole), "little") for n in range(count))
    )


def rank(owner: bytes, chunk: int) -> bytes:
    """If several peers claim a chunk, the one with the smallest rank keeps it. No peer can choose its ranks."""
    return hashlib.blake2b(chunk.to_bytes(8, "little") + owner, digest_size=16).digest()


class Block:
    """What this peer knows about one block.

    Args:
        size: the number of its chunks.
        owner: this peer's tag; its own records are ignored.
    """

    def __init__(self, size: int, owner: bytes) -> None:
        self.size = size
        self.done = 0
        self._owner = owner
        self._held: dict[bytes, tuple[frozenset[int], float]] = {}

    @property
    def all(self) -> int:
        """Every chunk, as bits."""
        return (1 << self.size) - 1

    @property
    def is_finished(self) -> bool:
        """Whether every chunk is done."""
        return self.done == self.all

    def learn(self, owner: bytes, record: BlockRecord) -> None:
        """Add a peer's record. Chunks that are done stay done."""
        self.done |= unpack_bits(record.done) & self.all
        if owner != self._owner:
            self._held[owner] = frozenset(record.held), record.until

    def holders(self, now: float) -> list[bytes]:
        """Other peers that hold chunks."""
        latest = now + _LONGEST_LEASE_SECONDS
        return [owner for owner, (held, until) in self._held.items() if held and now < until <= latest]

    def free(self, mine: Collection[int], now: float) -> list[int]:
        """Chunks that are neither done nor held by any peer."""
        taken = {chunk for owner in self.holders(now) for chunk in self._held[owner][0]}
        return [chunk for chunk in numbers_in(self.all & ~self.done) if chunk not in taken and chunk not in mine]

    def is_lost(self, chunk: int, number: int, now: float) -> bool:
        """Whether a chunk that this peer holds is done, or goes to another peer that claims it too.

        Args:
            chunk: its number within the block.
            number: its number within the data set.
        """
        if self.done >> chunk & 1:
            return True
        own = rank(self._owner, number)
        return any(chunk in self._held[owner][0] and rank(owner, number) < own for owner in self.holders(now))


class DataChunks:
    """What this peer knows about all chunks of a pass. A finished block shrinks to one bit.

    Args:
        samples: size of the data set; ``None`` = a stream whose end is not known yet.
        chunk: samples of a chunk.
        owner: this peer's tag.
    """

    def __init__(self, samples: int | None, chunk: int, owner: bytes) -> None:
        self.samples = samples
        self.finished = 0
        """The finished blocks, as bits."""
        self.blocks: dict[int, Block] = {}
        """Unfinished blocks about which something is known, by number."""
        self._chunk, self._owner = chunk, owner

    @property
    def count(self) -> int:
        """The number of chunks, as far as known."""
        return 2**53 if self.samples is None else -(-self.samples // self._chunk)

    def block(self, number: int) -> Block:
        """What is known about a block."""
        block = self.blocks.get(number)
        if block is None:
            block = self.blocks[number] = Block(self._size_of(number), self._owner)
            if self.finished >> number & 1:
                block.done = block.all
        return block

    def _size_of(self, number: int) -> int:
        return max(0, min(CHUNKS_PER_BLOCK, self.count - number * CHUNKS_PER_BLOCK))

    @property
    def done(self) -> int:
        """The chunks that are done, as bits."""
        bits = join_blocks(self.finished, {number: block.done for number, block in self.blocks.items()})
        return bits if self.samples is None else bits & ((1 << self.count) - 1)

    def add_done(self, bits: int) -> set[int]:
        """Note chunks that are done; returns the blocks in which some of them are new."""
        news = set[int]()
        for number in range(-(-bits.bit_length() // CHUNKS_PER_BLOCK)):
            block = self.block(number)
            done = bits >> number * CHUNKS_PER_BLOCK & block.all
            if done & ~block.done:
                block.done |= done
                news.add(number)
        return news

    def end_at(self, samples: int) -> None:
        """A stream has ended: there are no chunks after its end."""
        self.samples = samples
        for number, block in self.blocks.items():
            block.size = self._size_of(number)
            block.done &= block.all

    def is_lost(self, chunk: int, now: float) -> bool:
        """Whether a chunk that this peer holds is done, or another peer keeps it."""
        number, index = divmod(chunk, CHUNKS_PER_BLOCK)
        return self.finished >> number & 1 == 1 or self.block(number).is_lost(index, chunk, now)

    def unfinished(self, position: int) -> list[int]:
        """The unfinished blocks. For a stream without a known end, the first new block is among them.

        Args:
            position: for a stream, where this peer is.
        """
        if self.samples is not None:
            blocks = -(-self.count // CHUNKS_PER_BLOCK)
        else:
            blocks = 2 + max(position // CHUNKS_PER_BLOCK, *self.blocks, self.finished.bit_length(), 0)
        return [number for number in range(blocks) if not self.finished >> number & 1]

    def retire(self, unpublished: Collection[int]) -> list[int]:
        """Shrink blocks that others know to be finished to one bit each; returns their numbers."""
        finished = [
            number
            for number, block in self.blocks.items()
            if self.finished >> number & 1 or (block.size and block.is_finished and number not in unpublished)
        ]
        for number in finished:
            self.finished |= 1 << number
            del self.blocks[number]
        return finished
