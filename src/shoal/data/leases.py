"""Leases of chunks, through the table: the part of a shared pass that runs in the background loop.

A peer claims chunks by writing their numbers into its own record, and reads the record of the block once more. Of
several peers that claim the same chunk, the one with the smallest hash keeps it. Leases are renewed at half of their
life, so the chunks of a peer that is gone are free after :data:`LEASE_SECONDS`. What is done is a set that only grows:
every peer publishes the union of what it knows, and so nothing is lost when peers leave.

All peers work in the first block that has free chunks. Blocks that are finished have one bit each in the record of the
whole pass, which tells newcomers where the others are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from typing import Final, TypeVar

import msgspec

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, one_line
from shoal.base.tasks import cancel_and_wait, wait_at_most
from shoal.data.chunks import (
    CHUNKS_PER_BLOCK,
    MAX_HELD,
    Block,
    BlockRecord,
    PassRecord,
    join_blocks,
    pack_bits,
    unpack_bits,
)
from shoal.dht import DHTNode
from shoal.dht.crypto import peer_of, tag_of
from shoal.errors import ShoalError

logger = logging.getLogger(__name__)
RecordT = TypeVar("RecordT", BlockRecord, PassRecord)

LEASE_SECONDS = 30.0
# Chunks of a loop that has not come on for so long, not even by a batch, are given to others. It may hang, or its
# program may have left it without a goodbye.
PATIENCE_SECONDS = 600.0
# Records outlive leases, so that what a peer had done is known when it is gone.
RECORD_SECONDS = 3600.0
# Least time between two records of one block: others repeat what is done and not published when a peer is killed.
PUBLISH_SECONDS = 0.5
# Between claiming and reading once more: another peer may have read before this one's claim, and claim after it.
SETTLE_SECONDS = 0.3
# Work that a peer holds ahead, in seconds of its own pace.
AHEAD_SECONDS = 5.0
# How often a peer that has nothing to do looks whether there is something, and all look at which pass the others are.
POLL_SECONDS, LOOK_SECONDS = 2.0, 30.0

WAITING: Final = -1
"""What :meth:`Leases.next` returns instead of a chunk if others hold all that are left."""


class Leases:
    """The chunks of one pass that this peer holds, and what all peers have done.

    Args:
        node: its node of the table.
        run_id: name of the run; with the number of the pass and the sizes it makes the keys.
        number: which pass it is, from 0.
        samples: size of the data set; ``None``: a stream, whose end is not known yet.
        chunk: samples of a chunk.
        in_order: take chunks in the order of their numbers, as a stream needs it; otherwise any.
        order: see :func:`~shoal.data.chunks.order_of`; empty: samples are not shuffled.
    """

    def __init__(
        self,
        node: DHTNode,
        run_id: str,
        *,
        number: int,
        samples: int | None,
        chunk: int,
        in_order: bool,
        rng: random.Random,
        order: str = "",
    ) -> None:
        self.number, self.samples, self.chunk = number, samples, chunk
        self.position = 0
        """Of a stream: chunks before this one can only be had by starting it again."""
        self.is_over = False
        """Whether all chunks are done."""
        self.signs = 0
        """Of life of the training loop, which counts them up with each batch."""
        self.found_at = number
        """At which pass the others were when this peer came."""
        self._node, self._rng, self._in_order, self._order = node, rng, in_order, order
        self._tag = tag_of(node.peer_id)
        self._run_id, self._is_stream = run_id, samples is None
        self._warn_seldom = Seldom(logger.warning)
        self._blocks: dict[int, Block] = {}
        self._finished = 0  # bits of blocks
        self._ready: deque[int] = deque()  # chunks that are held and were not begun
        self._claimed: list[int] = []  # not yet held: others may claim them, too
        self._begun: set[int] = set()
        self._to_publish: set[int] = set()  # blocks
        self._written: dict[int, float] = {}  # when each block was written last
        self._next_look = 0.0
        self._told: tuple[PassRecord, float] | None = None
        self._expiration = 0.0  # of the last record
        self._pace, self._last_done = 0.0, math.nan  # chunks per second
        self._is_idle = False  # others hold all that is left
        self._seen = self.signs, asyncio.get_running_loop().time()
        self._is_asked = self._is_abandoned = False  # by the loop: it waits for a chunk; it has gone, as it seems
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self.keeping = asyncio.ensure_future(self._keep())
        """Renews leases and takes others; cancelled, nothing is let go."""

    # --- for the training loop ----------------------------------------------------------------------------------------

    async def next(self, wait: bool) -> int | None:
        """The next chunk to pass over, ``None`` when all are done.

        Args:
            wait: wait while others hold all that are left; otherwise return :data:`WAITING`.
        """
        self.signs += 1
        while True:
            while self._ready:
                chunk = self._ready.popleft()
                if not self._is_lost(chunk):
                    self._begun.add(chunk)
                    self._wake.set()  # it may be time to claim more
                    return chunk
            if self.is_over:
                return None
            if self._failure is not None:
                raise self._failure
            if self._is_idle and not wait:
                return WAITING
            if not self._is_idle:
                self._wake.set()
            self._news.clear()
            self._is_asked = True
            try:
                await self._news.wait()
            finally:
                self._is_asked = False
                self.signs += 1

    def finish(self, *chunks: int) -> None:
        """These chunks are done; those that end with one batch are told at once."""
        self.signs += 1
        done = [chunk for chunk in chunks if chunk < self._chunks()]  # a stream may have ended before
        if not done:
            return
        now = asyncio.get_running_loop().time()
        if not math.isnan(self._last_done):
            momentary = len(done) / max(now - self._last_done, 1e-3)
            self._pace = momentary if not self._pace else 0.8 * self._pace + 0.2 * momentary
        self._last_done = now
        for chunk in done:
            self._begun.discard(chunk)
            number, index = divmod(chunk, CHUNKS_PER_BLOCK)
            self._block(number).done |= 1 << index
            self._to_publish.add(number)
        self._wake.set()

    def begin_again(self) -> None:
        """Whatever was begun and is not done comes once more."""
        self._ready.extendleft(sorted(self._begun, reverse=True))
        self._begun.clear()

    def end_at(self, samples: int) -> None:
        """A stream ends after so many samples."""
        if self.samples is not None and samples != self.samples:
            self._warn_seldom(
                "the stream of this peer ended after %d samples, and others say %d: the rest counts as done. Streams "
                "must have the same samples at each peer.", samples, self.samples,
            )  # fmt: skip
        if self.samples is not None:
            return
        self.samples = samples
        chunks = self._chunks()
        self._begun = {chunk for chunk in self._begun if chunk < chunks}
        self._ready = deque(chunk for chunk in self._ready if chunk < chunks)
        for number, block in self._blocks.items():
            self._resize(number, block)
        self._next_look = 0.0
        self._wake.set()

    @property
    def done(self) -> int:
        """The chunks that are done, as bits."""
        bits = join_blocks(self._finished, {number: block.done for number, block in self._blocks.items()})
        return bits if self.samples is None else bits & ((1 << self._chunks()) - 1)

    def add_done(self, bits: int) -> None:
        """Add chunks that are known to be done, such as those of an archive."""
        for number in range(-(-bits.bit_length() // CHUNKS_PER_BLOCK)):
            block = self._block(number)
            news = bits >> number * CHUNKS_PER_BLOCK & ((1 << block.size) - 1)
            if news & ~block.done:
                block.done |= news
                self._to_publish.add(number)
        self._wake.set()

    async def close(self) -> None:
        """Let go of everything: others take it at once."""
        await cancel_and_wait(self.keeping)
        self._claimed.clear()
        self._ready.clear()
        self._begun.clear()
        if self._node.is_alive and self.is_over:
            await self._look_at_pass()  # tells that it is
        if self._node.is_alive:
            await asyncio.gather(*(self._write(number) for number in list(self._blocks) if number in self._written))

    # --- the background -----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            while not self.is_over:
                try:
                    pause = await self._turn()
                except ShoalError as e:
                    if not self._node.is_alive:
                        raise
                    # Such as a cable that is out: what is held goes on, and the rest when the table is back.
                    self._claimed, pause = [], POLL_SECONDS
                    self._warn_seldom("the table cannot be used, so no more data are leased for now: %s", e)
                await wait_at_most(self._wake, pause)
                self._wake.clear()
        except Exception as e:  # it reaches the training loop, which waits for chunks
            self._failure = e
        finally:
            self._news.set()

    async def _turn(self) -> float:
        """Do what is due; returns the seconds until something else may be."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_look:
            await self._look_at_pass()
        self._look_at_loop(loop.time())
        held = self._blocks_held()
        for number, block in list(self._blocks.items()):
            age = loop.time() - self._written.get(number, -math.inf)
            if (
                (number in held and age >= LEASE_SECONDS / 2)
                or (number in self._to_publish and age >= PUBLISH_SECONDS)
                or (block.done and age >= RECORD_SECONDS / 2)
            ):
                await self._write(number)
        wanted = max(1, min(MAX_HELD // 2, math.ceil(self._pace * AHEAD_SECONDS)))
        took = True
        if len(self._ready) <= wanted // 2 and not self.is_over and not self._is_abandoned:
            took = await self._take(wanted)
            self._is_idle = not took and not self._ready
            self._news.set()
        self._note_finished()
        if self.is_over:
            await self._look_at_pass()
            return 0.0
        ends = (self._written[number] + LEASE_SECONDS / 2 for number in self._blocks_held() & self._written.keys())
        waits = [min([self._next_look, *ends]) - loop.time()]
        if self._to_publish:
            waits.append(PUBLISH_SECONDS)
        if not took:
            waits.append(POLL_SECONDS * self._rng.uniform(0.5, 1.0))
        return max(0.01, min(waits))

    def _look_at_loop(self, now: float) -> None:
        """Let go of everything if the training loop stands still."""
        signs, since = self._seen
        if self.signs != signs or self._is_asked:
            self._seen, self._is_abandoned = (self.signs, now), False
        elif now - since > PATIENCE_SECONDS and not self._is_abandoned and self._held():
            self._warn_seldom(
                "the loop over the data of run %r has not come on for %.0f minutes, so others get its chunks. If it is "
                "over, shut its SharedPass down", self._run_id, PATIENCE_SECONDS / 60,
            )  # fmt: skip
            self._to_publish |= self._blocks_held()
            self._is_abandoned, self._is_idle = True, False
            self._ready.clear()

    async def _take(self, wanted: int) -> bool:
        """Claim up to so many chunks of the first block that has free ones; returns whether some were got."""
        unfinished, read = self._unfinished(), set[int]()
        # A stream goes on first, and begins again when nothing is left ahead.
        for first in dict.fromkeys((self.position if self._in_order else 0, 0)):
            for number in unfinished:
                if (number + 1) * CHUNKS_PER_BLOCK <= first:
                    continue
                if number not in read:  # mostly the first one has free chunks, and no other is read
                    await self._read(number)
                    read.add(number)
                claimed = self._choose(number, first, wanted, get_dht_time())
                if not claimed:
                    continue
                self._claimed = claimed
                is_stored = await self._write(number)
                await asyncio.sleep(SETTLE_SECONDS)
                await self._read(number)
                self._claimed = []
                got = [chunk for chunk in claimed if is_stored and not self._is_lost(chunk)]
                self._ready.extend(got)
                if len(got) < len(claimed):
                    self._to_publish.add(number)
                return bool(got)
        return False

    def _choose(self, number: int, first: int, wanted: int, now: float) -> list[int]:
        """Some free chunks of a block, at random: then two peers that choose at once hardly ever choose the same."""
        block, start = self._block(number), number * CHUNKS_PER_BLOCK
        mine = {chunk - start for chunk in self._held()}
        free = [start + index for index in block.free(mine, now) if start + index >= first]
        others = len(block.holders(now))
        # The last chunks are shared by all who are there, so that nobody waits for one peer in the end.
        fair = max(1, len(free) // (2 * (others + 1)))
        count = min(wanted, fair, MAX_HELD - sum(0 <= index < CHUNKS_PER_BLOCK for index in mine), len(free))
        if self._in_order:
            free = free[: max(count, 2 * count * others)]
        return sorted(self._rng.sample(free, count)) if count > 0 else []

    def _held(self) -> set[int]:
        return {*self._claimed, *self._ready, *(() if self._is_abandoned else self._begun)}

    def _blocks_held(self) -> set[int]:
        return {chunk // CHUNKS_PER_BLOCK for chunk in self._held()}

    def _is_lost(self, chunk: int) -> bool:
        number, index = divmod(chunk, CHUNKS_PER_BLOCK)
        return self._finished >> number & 1 == 1 or self._block(number).is_lost(index, chunk, get_dht_time())

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _chunks(self) -> int:
        """How many there are, as far as it is known."""
        return 2**53 if self.samples is None else -(-self.samples // self.chunk)

    def _size_of(self, number: int) -> int:
        return max(0, min(CHUNKS_PER_BLOCK, self._chunks() - number * CHUNKS_PER_BLOCK))

    def _block(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block(self._size_of(number), self._tag, LEASE_SECONDS)
            if self._finished >> number & 1:
                block.done = (1 << block.size) - 1
        return block

    def _resize(self, number: int, block: Block) -> None:
        block.size = self._size_of(number)
        block.done &= (1 << block.size) - 1

    def _unfinished(self) -> list[int]:
        """Numbers of the blocks in which something is left; of a stream without an end the first new one, too."""
        if self.samples is not None:
            blocks = -(-self._chunks() // CHUNKS_PER_BLOCK)
        else:
            blocks = 2 + max(self.position // CHUNKS_PER_BLOCK, *self._blocks, self._finished.bit_length(), 0)
        return [number for number in range(blocks) if not self._finished >> number & 1]

    def _note_finished(self) -> None:
        """Finished blocks become one bit each, and need no records of their own any more."""
        for number, block in list(self._blocks.items()):
            if block.is_finished and self._size_of(number) and number not in self._to_publish:
                self._finished |= 1 << number
                del self._blocks[number]
                self._written.pop(number, None)
                self._next_look = 0.0
        if self.samples is not None and not self._unfinished():
            self.is_over = True
            self._news.set()

    # --- the table ----------------------------------------------------------------------------------------------------

    def _key_of(self, number: int) -> str:
        samples = None if self._is_stream else self.samples
        return block_key(self._run_id, self.number, samples, self.chunk, self._order, number)

    async def _read(self, number: int) -> None:
        block = self._block(number)
        for owner, record in await records_under(self._node, self._key_of(number), BlockRecord, self._warn_seldom):
            block.learn(owner, record)
        before = len(self._ready)
        self._ready = deque(chunk for chunk in self._ready if not self._is_lost(chunk))
        if len(self._ready) < before:
            self._to_publish.add(number)

    async def _write(self, number: int) -> bool:
        block, loop = self._block(number), asyncio.get_running_loop()
        held = sorted(chunk % CHUNKS_PER_BLOCK for chunk in self._held() if chunk // CHUNKS_PER_BLOCK == number)
        now = get_dht_time()
        record = BlockRecord(pack_bits(block.done), held, now + LEASE_SECONDS)
        self._to_publish.discard(number)
        self._written[number] = loop.time()
        is_stored = False
        try:
            is_stored = await self._store(self._key_of(number), record)
        finally:
            if not is_stored:  # also if the table has failed
                self._to_publish.add(number)
        if not is_stored:
            self._warn_seldom("the table did not take the record of this peer's share of the data; it tries again")
        return is_stored

    async def _look_at_pass(self) -> None:
        """Learn at which pass the others are and which blocks are finished, and tell it."""
        loop = asyncio.get_running_loop()
        self._next_look = loop.time() + LOOK_SECONDS * self._rng.uniform(0.7, 1.0)
        for owner, record in await records_under(self._node, pass_key(self._run_id), PassRecord, self._warn_seldom):
            if owner == self._tag:
                continue
            if record.chunk != self.chunk or (record.samples != self.samples and not self._is_stream):
                self._warn_seldom(
                    "peer %s passes over %d samples in chunks of %d, this peer over %s in chunks of %d: no work is "
                    "shared. Give both the same data and `chunk`",
                    peer_of(owner), record.samples, record.chunk, self.samples, self.chunk, about=owner,
                )  # fmt: skip
            elif record.order != self._order:
                self._warn_seldom(
                    "peer %s passes over the same data in another order: the two share no work. Give both the same "
                    "`seed` and `shuffle`, or another run_id", peer_of(owner), about=owner,
                )  # fmt: skip
            elif record.number > self.number:
                self.is_over = True
                if not self._expiration:  # this peer has not told anything yet
                    self.found_at = max(self.found_at, record.number)
            elif record.number == self.number:
                self._finished |= unpack_bits(record.finished)
                if self._is_stream and self.samples is None and record.samples >= 0:
                    self.end_at(record.samples)
        for number in list(self._blocks):
            if self._finished >> number & 1:
                del self._blocks[number]
                self._to_publish.discard(number)
                self._written.pop(number, None)
        samples = -1 if self.samples is None else self.samples
        finished = 0 if self.is_over else self._finished
        number, packed = self.number + self.is_over, pack_bits(finished)
        told = PassRecord(number, samples, self.chunk, packed, self._order, self._is_stream)
        if self._told is None or told != self._told[0] or loop.time() > self._told[1] + RECORD_SECONDS / 2:
            self._told = told, loop.time()
            if not await self._store(pass_key(self._run_id), told):
                self._told = None

    async def _store(self, key: str, record: BlockRecord | PassRecord) -> bool:
        # Of two records with the same expiration, the table keeps the first.
        self._expiration = max(get_dht_time() + RECORD_SECONDS, math.nextafter(self._expiration, math.inf))
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        return await self._node.store(key, value, self._expiration, subkey=self._tag)


def pass_key(run_id: str) -> str:
    """Where peers tell at which pass they are."""
    return f"{run_id}_data"


def block_key(run_id: str, number: int, samples: int | None, chunk: int, order: str, block: int) -> str:
    """Where peers tell what they have done of one block of a pass, and what they hold.

    Args:
        samples: ``None``: of a stream.
    """
    size = "stream" if samples is None else samples
    return f"{pass_key(run_id)}.{number}.{size}.{chunk}.{order}.{block}"


async def records_under(
    node: DHTNode, key: str, kind: type[RecordT], warn_seldom: Seldom
) -> list[tuple[bytes, RecordT]]:
    """The records of one kind under a key that are well-formed, each with the tag of its owner."""
    found = await node.get(key, latest=True, keep_copies=False)
    if found is None or not isinstance(found.value, dict):
        return []
    records = []
    for owner, entry in found.value.items():
        try:
            peer_of(owner)
            records.append((owner, msgspec.convert(entry.value, kind)))
        except (TypeError, ValueError, msgspec.MsgspecError) as e:
            warn_seldom("skipped a malformed record under %s: %s", key, one_line(str(e)), about=owner)
    return records
