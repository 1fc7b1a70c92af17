"""The state of a shared pass: read from the DHT for archives, and written back when a run is revived."""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from typing import Any

import msgspec

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.data.chunks import (
    CHUNKS_PER_BLOCK,
    MOST_CHUNKS,
    BlockRecord,
    PassName,
    PassRecord,
    PassState,
    join_blocks,
    pack_bits,
    pass_key,
    unpack_bits,
)
from shoal.data.leases import RECORD_SECONDS, records_under
from shoal.dht import DHTNode
from shoal.dht.crypto import tag_of

logger = logging.getLogger(__name__)

# The most blocks to read. Chosen: all peers work in the first block with free chunks, so later ones have no records.
_MOST_READ = 64
_ALL_OF_A_BLOCK = (1 << CHUNKS_PER_BLOCK) - 1


async def read_pass(node: DHTNode, run_id: str) -> dict[str, Any] | None:
    """The state of a run's shared pass, as :meth:`SharedPass.state_dict` returns it.

    Returns:
        ``None`` if the run has no shared pass. If there are several data sets, the state of the one that most peers
        have.
    """
    warn = Seldom(logger.warning)
    told = [record for _, record in await records_under(node, pass_key(run_id), PassRecord, warn)]
    if not told:
        return None
    [((size, chunk, order), _)] = Counter((each.size, each.chunk, each.order) for each in told).most_common(1)
    same = [each for each in told if (each.size, each.chunk, each.order) == (size, chunk, order)]
    number = max(each.number for each in same)
    name = PassName(run_id, number, size, chunk, order)
    finished = 0
    for each in same:
        if each.number == number:
            finished |= unpack_bits(each.finished)
    others = dict[int, int]()
    unfinished = (block for block in range(finished.bit_length() + 1) if not finished >> block & 1)
    for block in itertools.islice(itertools.chain(unfinished, itertools.count(finished.bit_length() + 1)), _MOST_READ):
        records = await records_under(node, name.block_key(block), BlockRecord, warn)
        if not records and block >= finished.bit_length():
            break
        others[block] = functools.reduce(int.__or__, (unpack_bits(record.done) for _, record in records), 0)
    done = join_blocks(finished, others)
    done &= (1 << (MOST_CHUNKS if size is None else -(-size // chunk))) - 1
    return {"number": number, "samples": size, "chunk": chunk, "done": pack_bits(done), "order": order}


async def tell_pass(node: DHTNode, run_id: str, state: PassState) -> None:
    """Tell all peers what is done, for as long as records last. It writes only a record of this peer."""
    done, finished, tag = unpack_bits(state.done), 0, tag_of(node.peer_id)
    name = PassName(run_id, state.number, state.samples, state.chunk, state.order)
    expiration = get_dht_time() + RECORD_SECONDS
    for block in range(-(-done.bit_length() // CHUNKS_PER_BLOCK)):
        bits = done >> block * CHUNKS_PER_BLOCK & _ALL_OF_A_BLOCK
        if bits == _ALL_OF_A_BLOCK:
            finished |= 1 << block
        elif bits:
            record = msgspec.to_builtins(BlockRecord(pack_bits(bits), [], 0.0), builtin_types=(bytes,))
            await node.store(name.block_key(block), record, expiration, subkey=tag)
    samples, is_stream = (-1, True) if state.samples is None else (state.samples, False)
    told = PassRecord(state.number, samples, state.chunk, pack_bits(finished), state.order, is_stream)
    await node.store(pass_key(run_id), msgspec.to_builtins(told, builtin_types=(bytes,)), expiration, subkey=tag)
