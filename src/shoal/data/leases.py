"""Leases of chunks through the DHT: the part of a shared pass that runs in the background loop.

A peer claims chunks by writing their numbers into its own record, and then reads the block's records once more. If
several peers claim the same chunk, the one with the lowest rank keeps it. Leases are renewed at half of their lifetime,
so the chunks of a peer that is gone are free after :data:`LEASE_SECONDS`. The set of done chunks only grows: every peer
publishes the union of what it knows, so nothing is lost when peers leave.

All peers work in the first block that has free chunks. Each finished block has one bit in the record of the whole pass,
which tells newcomers where the others are.
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
    LEASE_SECONDS,
    MAX_HELD,
    BlockRecord,
    DataChunks,
    PassName,
    PassRecord,
    pack_bits,
    pass_key,
    unpack_bits,
)
from shoal.dht import DHTNode
from shoal.dht.crypto import peer_of, tag_of
from shoal.errors import ShoalError

logger = logging.getLogger(__name__)
RecordT = TypeVar("RecordT", BlockRecord, PassRecord)

# All of these are chosen; tests in virtual time check the consequences.
# The chunks of a training loop that has not asked for a batch for this long are given to others: it may hang, or its
# program may have left it without notice.
PATIENCE_SECONDS = 600.0
# Records outlive leases, so that the work of a peer is known after it is gone.
RECORD_SECONDS = 3600.0
# Least time between two records of one block. If a peer is killed, others repeat what it had done but not published.
PUBLISH_SECONDS = 0.5
# Time between claiming and reading again: another peer may have read before this one's claim, and claim after it.
SETTLE_SECONDS = 0.3
# Work that a peer holds in advance, in seconds at its own pace.
AHEAD_SECONDS = 5.0
# How often an idle peer looks for free chunks, and how often every peer looks at which pass the others are.
POLL_SECONDS, LOOK_SECONDS = 2.0, 30.0

WAITING: Final = -1
"""Returned by :meth:`Leases.next` instead of a chunk if others hold all that are left."""


class _Loop:
    """The training loop as seen from the background: its chunks, its pace, and whether it makes progress."""

    def __init__(self, now: float) -> None:
        self.ready: deque[int] = deque()
        """Chunks that are held but not begun."""
        self.claimed: list[int] = []
        """Chunks that are claimed but not held yet: others may claim them, too."""
        self.begun: set[int] = set()
        self.signs = 0
        """The number of signs of life; each batch is one."""
        self.is_asking = False
        """Whether it waits for a chunk."""
        self.is_abandoned = False
        """Whether it seems to be gone, so that its chunks are given to others."""
        self.pace = 0.0
        """Chunks per second, smoothed."""
        self._last_done = math.nan
        self._seen = 0, now

    @property
    def held(self) -> set[int]:
        """The chunks that others must not take."""
        return {*self.claimed, *self.ready, *(() if self.is_abandoned else self.begun)}

    @property
    def blocks(self) -> set[int]:
        """The blocks of these chunks."""
        return {chunk // CHUNKS_PER_BLOCK for chunk in self.held}

    def finish(self, chunks: list[int], now: float) -> None:
        """The loop has finished these chunks."""
        if not math.isnan(self._last_done):
            momentary = len(chunks) / max(now - self._last_done, 1e-3)
            self.pace = momentary if not self.pace else 0.8 * self.pace + 0.2 * momentary
        self._last_done = now
        self.begun.difference_update(chunks)

    def begin_again(self) -> None:
        """What was begun and is not done comes again."""
        self.ready.extendleft(sorted(self.begun, reverse=True))
        self.begun.clear()

    def drop(self) -> None:
        """Release all chunks."""
        self.claimed.clear()
        self.ready.clear()
        self.begun.clear()

    def drop_from(self, end: int) -> None:
        """There are no chunks from this number on."""
        self.begun = {chunk for chunk in self.begun if chunk < end}
        self.ready = deque(chunk for chunk in self.ready if chunk < end)

    def look(self, now: float) -> set[int]:
        """Check for progress; after too long without any, release its chunks once, and return their blocks."""
        signs, since = self._seen
        if self.signs != signs or self.is_asking:
            self._seen, self.is_abandoned = (self.signs, now), False
        elif now - since > PATIENCE_SECONDS and not self.is_abandoned and self.held:
            blocks = self.blocks
            self.is_abandoned = True
            self.ready.clear()
            return blocks
        return set()


class _Records:
    """The records of a pass in the DHT, of this peer and of others.

    Args:
        node: this peer's node.
        name: of the pass.
    """

    def __init__(self, node: DHTNode, name: PassName) -> None:
        self.tag = tag_of(node.peer_id)
        self.node, self._name = node, name
        self.warn_seldom = Seldom(logger.warning)
        self.unpublished: set[int] = set()
        """Blocks with news that others do not know yet."""
        self.written: dict[int, float] = {}
        """When each block was last written."""
        self._expiration = 0.0  # of the last record
        self._told: tuple[PassRecord, float] | None = None

    @property
    def are_silent(self) -> bool:
        """Whether this peer has written nothing yet."""
        return not self._expiration

    async def of_block(self, number: int) -> list[tuple[bytes, BlockRecord]]:
        """The records of a block."""
        return await records_under(self.node, self._name.block_key(number), BlockRecord, self.warn_seldom)

    async def of_pass(self) -> list[tuple[bytes, PassRecord]]:
        """Other peers' records of the pass that they are at."""
        found = await records_under(self.node, pass_key(self._name.run_id), PassRecord, self.warn_seldom)
        return [(owner, record) for owner, record in found if owner != self.tag]

    def is_due(self, number: int, now: float, *, is_held: bool, has_done: bool) -> bool:
        """Whether a block must be written: to renew leases, to publish news, or to keep the record alive."""
        age = now - self.written.get(number, -math.inf)
        return (
            (is_held and age >= LEASE_SECONDS / 2)
            or (number in self.unpublished and age >= PUBLISH_SECONDS)
            or (has_done and age >= RECORD_SECONDS / 2)
        )

    async def write_block(self, number: int, done: int, held: set[int]) -> bool:
        """Write the record of a block: what is done, and what this peer holds. Returns whether the DHT stored it."""
        indices = sorted(chunk % CHUNKS_PER_BLOCK for chunk in held if chunk // CHUNKS_PER_BLOCK == number)
        record = BlockRecord(pack_bits(done), indices, get_dht_time() + LEASE_SECONDS)
        self.unpublished.discard(number)
        self.written[number] = asyncio.get_running_loop().time()
        is_stored = False
        try:
            is_stored = await self._store(self._name.block_key(number), record)
        finally:
            if not is_stored:  # also if the DHT has failed
                self.unpublished.add(number)
        if not is_stored:
            self.warn_seldom("the DHT did not take the record of this peer's share of the data; it tries again")
        return is_stored

    async def write_pass(self, record: PassRecord) -> None:
        """Write the pass that this peer is at, unless that is already known."""
        now = asyncio.get_running_loop().time()
        if self._told is None or record != self._told[0] or now > self._told[1] + RECORD_SECONDS / 2:
            self._told = record, now
            if not await self._store(pass_key(self._name.run_id), record):
                self._told = None

    async def _store(self, key: str, record: BlockRecord | PassRecord) -> bool:
        # If two records have the same expiration, the DHT keeps the first.
        self._expiration = max(get_dht_time() + RECORD_SECONDS, math.nextafter(self._expiration, math.inf))
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        return await self.node.store(key, value, self._expiration, subkey=self.tag)

    def forget(self, number: int) -> None:
        """Forget a finished block, which no longer needs a record of its own."""
        self.unpublished.discard(number)
        self.written.pop(number, None)


class Leases:
    """The chunks of one pass that this peer holds, and those that all peers have done.

    Args:
        node: this peer's DHT node.
        name: of the pass.
        rng: decides which chunks this peer claims.
    """

    def __init__(self, node: DHTNode, name: PassName, rng: random.Random) -> None:
        self.name = name
        self.position = 0
        """For a stream: chunks before this one can only be reached by starting it again."""
        self.is_over = False
        """Whether all chunks are done."""
        self.found_at = name.number
        """The pass that the others were at when this peer joined."""
        self._rng, self._records = rng, _Records(node, name)
        self._chunks = DataChunks(name.samples, name.chunk, self._records.tag)
        self._loop = _Loop(asyncio.get_running_loop().time())
        self._next_look = 0.0
        self._is_idle = False  # others hold all that is left
        self._wake, self._news = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self.keeping = asyncio.ensure_future(self._keep())
        """Renews leases and takes new ones; cancelling it releases nothing."""

    # --- for the training loop ----------------------------------------------------------------------------------------

    @property
    def samples(self) -> int | None:
        """Size of the data set; ``None`` = a stream whose end is not known yet."""
        return self._chunks.samples

    def note_life(self) -> None:
        """The training loop is making progress."""
        self._loop.signs += 1

    async def next(self, wait: bool) -> int | None:
        """The next chunk to work on; ``None`` when all are done.

        Args:
            wait: wait while others hold all that are left; otherwise return :data:`WAITING`.
        """
        loop = self._loop
        self.note_life()
        while True:
            while loop.ready:
                chunk = loop.ready.popleft()
                if not self._chunks.is_lost(chunk, get_dht_time()):
                    loop.begun.add(chunk)
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
            loop.is_asking = True
            try:
                await self._news.wait()
            finally:
                loop.is_asking = False
                self.note_life()

    def finish(self, *chunks: int) -> None:
        """Note that these chunks are done. Pass all that end with one batch together, which makes one message."""
        self.note_life()
        done = [chunk for chunk in chunks if chunk < self._chunks.count]  # a stream may have ended before
        if not done:
            return
        self._loop.finish(done, asyncio.get_running_loop().time())
        for chunk in done:
            number, index = divmod(chunk, CHUNKS_PER_BLOCK)
            self._chunks.block(number).done |= 1 << index
            self._records.unpublished.add(number)
        self._wake.set()

    def begin_again(self) -> None:
        """What was begun and is not done comes again."""
        self._loop.begin_again()

    def end_at(self, samples: int) -> None:
        """The stream has ended after this many samples."""
        if self.samples is not None and samples != self.samples:
            self._records.warn_seldom(
                "the stream of this peer ended after %d samples, but others say %d: the rest counts as done. Streams "
                "must have the same samples at each peer.", samples, self.samples,
            )  # fmt: skip
        if self.samples is not None:
            return
        self._chunks.end_at(samples)
        self._loop.drop_from(self._chunks.count)
        self._next_look = 0.0
        self._wake.set()

    @property
    def done(self) -> int:
        """The chunks that are done, as bits."""
        return self._chunks.done

    def add_done(self, bits: int) -> None:
        """Add chunks that are known to be done, such as those of an archive."""
        self._records.unpublished |= self._chunks.add_done(bits)
        self._wake.set()

    async def close(self) -> None:
        """Release all chunks, so that others can take them at once."""
        await cancel_and_wait(self.keeping)
        self._loop.drop()
        if self._records.node.is_alive and self.is_over:
            await self._look_at_pass()  # publishes that the pass is over
        if self._records.node.is_alive:
            blocks = [number for number in self._chunks.blocks if number in self._records.written]
            await asyncio.gather(*map(self._write, blocks))

    # --- the background -----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            while not self.is_over:
                try:
                    pause = await self._turn()
                except ShoalError as e:
                    if not self._records.node.is_alive:
                        raise
                    # A cable may be unplugged: keep the held chunks, and continue when the DHT is back.
                    self._loop.claimed, pause = [], POLL_SECONDS
                    self._records.warn_seldom("the DHT cannot be used, so no more data are leased for now: %s", e)
                await wait_at_most(self._wake, pause)
                self._wake.clear()
        except Exception as e:  # raised in the training loop, which waits for chunks
            self._failure = e
        finally:
            self._news.set()

    async def _turn(self) -> float:
        """Do what is due; returns the seconds until the next step."""
        now, records, loop = asyncio.get_running_loop().time, self._records, self._loop
        if now() >= self._next_look:
            await self._look_at_pass()
        if released := loop.look(now()):
            records.warn_seldom(
                "the loop over the data of run %r has asked for no batch for %.0f minutes, so others get its chunks. "
                "If it is over, shut its SharedPass down", self.name.run_id, PATIENCE_SECONDS / 60,
            )  # fmt: skip
            records.unpublished |= released
            self._is_idle = False
        held = loop.blocks
        for number, block in list(self._chunks.blocks.items()):
            if records.is_due(number, now(), is_held=number in held, has_done=bool(block.done)):
                await self._write(number)
        wanted = max(1, min(MAX_HELD // 2, math.ceil(loop.pace * AHEAD_SECONDS)))
        took = True
        if len(loop.ready) <= wanted // 2 and not self.is_over and not loop.is_abandoned:
            took = await self._take(wanted)
            self._is_idle = not took and not loop.ready
            self._news.set()
        self._retire()
        if self.is_over:
            await self._look_at_pass()
            return 0.0
        ends = (records.written[number] + LEASE_SECONDS / 2 for number in loop.blocks & records.written.keys())
        waits = [min([self._next_look, *ends]) - now()]
        if records.unpublished:
            waits.append(PUBLISH_SECONDS)
        if not took:
            waits.append(POLL_SECONDS * self._rng.uniform(0.5, 1.0))
        return max(0.01, min(waits))

    async def _take(self, wanted: int) -> bool:
        """Claim up to this many chunks of the first block that has free ones; returns whether it got some."""
        unfinished, read = self._chunks.unfinished(self.position), set[int]()
        # For a stream, take chunks ahead of the position first, and start again only when none is left there.
        for first in dict.fromkeys((self.position if self._is_stream else 0, 0)):
            for number in unfinished:
                if (number + 1) * CHUNKS_PER_BLOCK <= first:
                    continue
                if number not in read:  # usually the first block has free chunks, and no other one is read
                    await self._read(number)
                    read.add(number)
                claimed = self._choose(number, first, wanted, get_dht_time())
                if not claimed:
                    continue
                self._loop.claimed = claimed
                is_stored = await self._write(number)
                await asyncio.sleep(SETTLE_SECONDS)
                await self._read(number)
                self._loop.claimed = []
                now = get_dht_time()
                got = [chunk for chunk in claimed if is_stored and not self._chunks.is_lost(chunk, now)]
                self._loop.ready.extend(got)
                if len(got) < len(claimed):
                    self._records.unpublished.add(number)
                return bool(got)
        return False

    def _choose(self, number: int, first: int, wanted: int, now: float) -> list[int]:
        """Some free chunks of a block, at random, so that two peers that choose at once rarely choose the same."""
        block, start = self._chunks.block(number), number * CHUNKS_PER_BLOCK
        mine = {chunk - start for chunk in self._loop.held}
        free = [start + index for index in block.free(mine, now) if start + index >= first]
        others = len(block.holders(now))
        # The last chunks are divided among all present peers, so that they do not all wait for one straggler.
        fair = max(1, len(free) // (2 * (others + 1)))
        count = min(wanted, fair, MAX_HELD - sum(0 <= index < CHUNKS_PER_BLOCK for index in mine), len(free))
        if self._is_stream:
            free = free[: max(count, 2 * count * others)]
        return sorted(self._rng.sample(free, count)) if count > 0 else []

    @property
    def _is_stream(self) -> bool:
        return self.name.samples is None

    def _retire(self) -> None:
        """Drop the records of finished blocks, and check whether all blocks are finished."""
        for number in self._chunks.retire(self._records.unpublished):
            self._records.forget(number)
            self._next_look = 0.0
        if self.samples is not None and not self._chunks.unfinished(0):
            self.is_over = True
            self._news.set()

    async def _read(self, number: int) -> None:
        block = self._chunks.block(number)
        for owner, record in await self._records.of_block(number):
            block.learn(owner, record)
        ready, now = self._loop.ready, get_dht_time()
        self._loop.ready = deque(chunk for chunk in ready if not self._chunks.is_lost(chunk, now))
        if len(self._loop.ready) < len(ready):
            self._records.unpublished.add(number)

    async def _write(self, number: int) -> bool:
        return await self._records.write_block(number, self._chunks.block(number).done, self._loop.held)

    async def _look_at_pass(self) -> None:
        """Exchange with others which pass each is at, and which blocks are finished."""
        self._next_look = asyncio.get_running_loop().time() + LOOK_SECONDS * self._rng.uniform(0.7, 1.0)
        name, warn_seldom = self.name, self._records.warn_seldom
        for owner, record in await self._records.of_pass():
            if record.chunk != name.chunk or (record.samples != self.samples and not self._is_stream):
                warn_seldom(
                    "peer %s passes over %d samples in chunks of %d, this peer over %s in chunks of %d: no work is "
                    "shared. Give both the same data and `chunk`",
                    peer_of(owner), record.samples, record.chunk, self.samples, name.chunk, about=owner,
                )  # fmt: skip
            elif record.order != name.order:
                warn_seldom(
                    "peer %s passes over the same data in another order: the two share no work. Give both the same "
                    "`seed` and `shuffle`, or another run_id", peer_of(owner), about=owner,
                )  # fmt: skip
            elif record.number > name.number:
                self.is_over = True
                if self._records.are_silent:
                    self.found_at = max(self.found_at, record.number)
            elif record.number == name.number:
                self._chunks.finished |= unpack_bits(record.finished)
                if self._is_stream and self.samples is None and record.samples >= 0:
                    self.end_at(record.samples)
        for number in self._chunks.retire(self._chunks.blocks):  # only blocks that others say are finished
            self._records.forget(number)
        samples = -1 if self.samples is None else self.samples
        packed = pack_bits(0 if self.is_over else self._chunks.finished)
        at = name.number + self.is_over
        await self._records.write_pass(PassRecord(at, samples, name.chunk, packed, name.order, self._is_stream))


async def records_under(
    node: DHTNode, key: str, kind: type[RecordT], warn_seldom: Seldom
) -> list[tuple[bytes, RecordT]]:
    """The well-formed records of one kind under a key, each with the tag of its owner."""
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
