"""How a peer with ``stage="auto"`` finds its stage, and later another one.

The decisions are in :mod:`shoal.stages.placement`. Here they are declared, and made again when all others know that.
Both procedures only settle which stage it is. The caller does the rest: it finishes what the peer still has, downloads
the state of the new stage, and serves.
"""

from __future__ import annotations

import asyncio
import math

from shoal.base.clock import get_dht_time
from shoal.p2p import PeerID
from shoal.stages.directory import StageDirectory, StageRecord
from shoal.stages.placement import Move, may_move, move_of, stage_for_newcomer

# Seconds until all others have seen what was declared, and have declared theirs. Chosen: a few times what a store and a
# reading take over slow lines. A newcomer waits for less, because its choice can still be mended by a move.
PAUSE_OF_NEWCOMER, PAUSE_OF_MOVER = 2.0, 5.0
# The most stages that a newcomer declares before it stays (chosen): in each turn, one more of those that come together
# is content.
MOST_TURNS = 8


async def take_place(directory: StageDirectory, me: PeerID) -> int:
    """Choose the stage that a newcomer holds, and declare that it joins there; returns the stage."""
    declared, since = None, math.inf
    for _ in range(MOST_TURNS):
        await directory.read_all()
        stage = stage_for_newcomer(directory.all_peers(), me, since)
        if stage == declared:
            break
        # Not before the reading: those that others have seen for longer come first.
        since = min(since, get_dht_time())
        await directory.mark(stage, is_joining=True, since=since, serves_auto=True)
        await directory.declare(StageRecord(stage=stage, epoch=0, rate=0.0))
        if declared is not None:
            await directory.withdraw(declared)
        declared = stage
        await asyncio.sleep(PAUSE_OF_NEWCOMER)
    assert declared is not None
    return declared


async def decide_move(directory: StageDirectory, me: PeerID, step: int) -> Move | None:
    """Find out whether this peer moves to another stage, by the step with this number.

    If it does, its record says so when this returns, and others count it in its new stage. It goes on serving until the
    caller declares that it is leaving.

    Args:
        step: the same at all peers, such as the number of the present period.
    """
    await directory.read_all()
    move = move_of(directory.all_peers(), step)
    if move is None or move.peer != me:
        return None
    await directory.mark(move.source, moves_to=move.target, since=get_dht_time())
    await asyncio.sleep(PAUSE_OF_MOVER)
    await directory.read_all()
    if may_move(directory.all_peers(), move, step):
        return move
    await directory.mark(move.source)
    return None
