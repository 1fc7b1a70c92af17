"""What is known of the chunks of a data set: which ones are done, and who passes over which of the others.

Chunks are counted in blocks of 4096, each with a key of its own in the table. A block's record of a peer has one bit
for each chunk that is done by anybody, as far as the peer knows, and the chunks that the peer holds at the moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.base.logs import one_line

CHUNKS_PER_BLOCK = 4096
_FINISHED_BYTES = 2**13
MOST_CHUNKS = CHUNKS_PER_BLOCK * 8 * _FINISHED_BYTES
"""Of a data set: each block has a bit in the record of the pass."""
LONGEST_CHUNK = 2**31 - 1
MAX_HELD = 128
"""Most chunks of one block that a peer may hold at a time."""
# A lease that is said to last longer than this many times the usual life is not believed.
_LONGEST_LEASE = 4

_Number = Annotated[int, Meta(ge=0, lt=CHUNKS_PER_BLOCK)]


class BlockRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a peer says of one block."""

    done: Annotated[bytes, Meta(max_length=CHUNKS_PER_BLOCK // 8)]
    """One bit for each chunk, the lowest bit of the first byte for the first chunk."""
    held: Annotated[list[_Number], Meta(max_length=MAX_HELD)]
    """Numbers within the block, of the chunks that the peer holds."""
    until: Annotated[float, Meta(ge=0, lt=1e11)]
    """DHT time at which the lease ends."""


class PassRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a peer says of the passes of its run."""

    number: Annotated[int, Meta(ge=0, lt=2**31)]
    """The pass that it is at; all before it are over."""
    samples: Annotated[int, Meta(ge=-1, lt=2**53)]
    """Size of the data set; -1 for a stream whose end is not known yet."""
    chunk: Annotated[int, Meta(ge=1, le=LONGEST_CHUNK)]
    """Samples of a chunk."""
    finished: Annotated[bytes, Meta(max_length=_FINISHED_BYTES)]
    """One bit for each block of which all chunks are done."""
    order: Annotated[str, Meta(max_length=32)] = ""
    """Tells in which order the samples are, by :func:`order_of`."""
    is_stream: bool = False

    def __post_init__(self) -> None:
        _check_chunks(self.samples, self.chunk)

    @property
    def size(self) -> int | None:
        """As in the keys of its blocks: ``None`` for a stream, whether or not its end is known."""
        return None if self.is_stream or self.samples < 0 else self.samples


class PassState(msgspec.Struct, frozen=True):
    """What a checkpoint has of a pass."""

    number: Annotated[int, Meta(ge=0, lt=2**31)]
    samples: Annotated[int, Meta(ge=0, lt=2**53)] | None
    chunk: Annotated[int, Meta(ge=1, le=LONGEST_CHUNK)]
    done: Annotated[bytes, Meta(max_length=MOST_CHUNKS // 8)]
    """One bit for each chunk."""
    order: Annotated[str, Meta(max_length=32)] = ""

    def __post_init__(self) -> None:
        _check_chunks(self.samples or 0, self.chunk)


def _check_chunks(samples: int, chunk: int) -> None:
    """Refuse a size that no data set has: this peer makes a bit for each chunk."""
    if -(-samples // chunk) > MOST_CHUNKS:
        raise ValueError(f"{samples} samples in chunks of {chunk} are more than {MOST_CHUNKS} chunks")


def parse_state(state: object, samples: int | None, chunk: int, order: str) -> PassState:
    """Check a saved state.

    Raises:
        ValueError: it is none, or that of another data set, or of one in another order.
    """
    try:
        found = msgspec.convert(state, PassState, builtin_types=(bytes,))
    except msgspec.ValidationError as e:
        raise ValueError(f"this is not the state_dict() of a SharedPass: {one_line(str(e))}") from None
    if found.chunk != chunk or (samples is not None and found.samples not in {samples, None}):
        raise ValueError(
            f"this state is of {found.samples} samples in chunks of {found.chunk}, and the data set has "
            f"{samples} in chunks of {chunk}: load it with the same data set and the same `chunk`"
        )
    if found.order != order:
        raise ValueError(
            "this state is of the same data in another order, so other samples are done: load it with the same run_id, "
            "`seed` and `shuffle`"
        )
    return found


def order_of(run_id: str, seed: object) -> str:
    """A short text that is the same where samples are in the same order."""
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
        finished: the blocks of which all chunks are done, as bits. The last one counts as a whole one.
        others: by the number of the block, what is done of others, as bits.
    """
    whole = b"\xff" * (CHUNKS_PER_BLOCK // 8)
    count = max([finished.bit_length(), *(number + 1 for number in others)])
    flags = f"{finished:0{count}b}"[::-1]
    return unpack_bits(
        b"".join(whole if flags[n] == "1" else others.get(n, 0).to_bytes(len(whole), "little") for n in range(count))
    )


def rank(owner: bytes, chunk: int) -> bytes:
    """Who has the smallest one of all that claim a chunk keeps it. Nobody can choose it for many chunks."""
    return hashlib.blake2b(chunk.to_bytes(8, "little") + owner, digest_size=16).digest()


class Block:
    """What this peer knows of one block.

    Args:
        size: number of its chunks.
        owner: this peer's tag; its own records are not news.
        lease_seconds: how long leases last.
    """

    def __init__(self, size: int, owner: bytes, lease_seconds: float) -> None:
        self.size = size
        self.done = 0
        self._owner, self._lease_seconds = owner, lease_seconds
        self._held: dict[bytes, tuple[frozenset[int], float]] = {}

    @property
    def is_finished(self) -> bool:
        """Whether every chunk is done."""
        return self.done == (1 << self.size) - 1

    def learn(self, owner: bytes, record: BlockRecord) -> None:
        """Add what a peer says. What is done stays done."""
        self.done |= unpack_bits(record.done) & ((1 << self.size) - 1)
        if owner != self._owner:
            self._held[owner] = frozenset(record.held), record.until

    def holders(self, now: float) -> list[bytes]:
        """Other peers that hold chunks."""
        return [owner for owner, (held, until) in self._held.items() if held and self._lasts(until, now)]

    def free(self, mine: Collection[int], now: float) -> list[int]:
        """Chunks that are neither done nor held by anybody."""
        taken = {chunk for owner in self.holders(now) for chunk in self._held[owner][0]}
        left = ((1 << self.size) - 1) & ~self.done
        return [chunk for chunk in numbers_in(left) if chunk not in taken and chunk not in mine]

    def is_lost(self, chunk: int, number: int, now: float) -> bool:
        """Whether a chunk that this peer holds is done, or kept by somebody else who claims it too.

        Args:
            chunk: its number within the block.
            number: its number within the data set.
        """
        if self.done >> chunk & 1:
            return True
        own = rank(self._owner, number)
        return any(chunk in self._held[owner][0] and rank(owner, number) < own for owner in self.holders(now))

    def _lasts(self, until: float, now: float) -> bool:
        return now < until <= now + _LONGEST_LEASE * self._lease_seconds


def shuffler(size: int, key: str) -> Callable[[int], int]:
    """A permutation of ``range(size)`` that takes no memory and is the same everywhere.

    It is a Feistel network of four rounds over the next larger power of four; numbers outside of the range go round
    once more (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    seeds = [
        int.from_bytes(hashlib.blake2b(f"{key}/{turn}".encode(), digest_size=8).digest(), "little") for turn in range(4)
    ]

    def once(index: int) -> int:
        left, right = index >> half, index & mask
        for seed in seeds:
            left, right = right, left ^ (_mixed(right ^ seed) & mask)
        return left << half | right

    def permuted(index: int) -> int:
        index = once(index)
        while index >= size:
            index = once(index)
        return index

    return permuted


def _mixed(value: int) -> int:
    """Bits that all depend on all bits (the finalizer of SplitMix64)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
