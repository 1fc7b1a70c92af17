"""How a peer with ``stage="auto"`` finds its stage, and later another one.

The decisions are in :mod:`shoal.stages.placement`. Here they are declared, and made again when all others know that.
Then a peer that moves finishes what it has (:func:`finish`). The rest is up to the caller::

    take_place ─► download ─► serve ─► next_move ─► finish ─► leave ─► download ─► serve
"""

from __future__ import annotations

import asyncio
import math
import random

from shoal.base.clock import get_dht_time
from shoal.base.tasks import wait_at_most
from shoal.p2p import PeerID
from shoal.stages.compute import StageCompute
from shoal.stages.directory import LIFETIME, StageDirectory, StageRecord, seconds_between_looks
from shoal.stages.host import StageHost
from shoal.stages.placement import SETTLING_SECONDS, Move, may_move, move_of, rates_of, stage_for_newcomer

# Seconds until all others have seen what was declared, and have declared theirs. Chosen: a few times what a store and a
# reading take over slow lines. A newcomer waits for less, because its choice can still be mended by a move.
PAUSE_OF_NEWCOMER, PAUSE_OF_MOVER = 2.0, 5.0
# The most stages that a newcomer declares before it stays (chosen): in each turn, one more of those that come together
# is content.
MOST_TURNS = 8
# The longest wait for a step that takes the gradients of a peer that moves, in seconds. Chosen: the rest of the time in
# which others count on it is for the download.
STEP_SECONDS = SETTLING_SECONDS / 2


async def take_place(directory: StageDirectory, me: PeerID) -> int:
    """Choose the stage that a newcomer holds, and declare that it joins there; returns the stage."""
    declared, since = None, math.inf
    for _ in range(MOST_TURNS):
        stage = stage_for_newcomer(await directory.read_all(), me, since)
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


async def wait_for_first(directory: StageDirectory, me: PeerID, stage: int) -> None:
    """If nobody serves a stage yet, wait for the peer that joined it first: all others begin with its parameters."""
    since, until = directory.peers_of(stage)[me].since, get_dht_time() + LIFETIME
    while get_dht_time() < until:
        await directory.read(stage)
        others = {peer: record for peer, record in directory.peers_of(stage).items() if peer != me}
        earlier = [peer for peer, record in others.items() if (record.since, peer) < (since, me) and record.is_joining]
        if any(record.serves for record in others.values()) or not earlier:
            return
        await asyncio.sleep(PAUSE_OF_NEWCOMER)


async def decide_move(directory: StageDirectory, me: PeerID, step: int) -> Move | None:
    """Find out whether this peer moves to another stage, by the step with this number.

    If it does, its record says so when this returns, and others count it in its new stage. It goes on serving until it
    declares that it is leaving. Another peer of its stage has shown since then that it is alive.

    Args:
        step: the same at all peers, such as the number of the present period.
    """
    move = move_of(await directory.read_all(), step)
    if move is None or move.peer != me:
        return None
    since = get_dht_time()
    await directory.mark(move.source, serves_auto=True, moves_to=move.target, since=since)
    while get_dht_time() < since + LIFETIME:
        await asyncio.sleep(PAUSE_OF_MOVER)
        if not may_move(await directory.read_all(), move, step):
            break
        others = [record for peer, record in directory.peers_of(move.source).items() if peer != me]
        if any(each.serves and each.moves_to is None and each.time > since for each in others):
            return move
    await directory.mark(move.source, serves_auto=True)
    return None


async def next_move(directory: StageDirectory, me: PeerID, every: float, rng: random.Random) -> Move:
    """Wait until this peer is to move to another stage; see :func:`decide_move`.

    All peers decide once in each half of the period. While a stage has no peer, they decide whenever they look.

    Args:
        every: the seconds of a period: within about this time, the richest stage helps the poorest.
        rng: spreads the looks of all peers.
    """
    period = every / 2
    pause, decided = min(seconds_between_looks(directory.count), period / 2), get_dht_time() // period
    while True:
        await asyncio.sleep(pause * rng.uniform(0.5, 1.5))
        rates = rates_of(await directory.read_all())
        step = get_dht_time() // period
        if step > decided or not all(rates.values()):
            decided = step
            if move := await decide_move(directory, me, int(step)):
                return move


async def finish(directory: StageDirectory, host: StageHost, compute: StageCompute, move: Move, patience: float) -> int:
    """Finish what a peer has that is about to leave its stage: the microbatches under way, and then the step to which
    its gradients belong.

    No step can be made while a stage has no peer. So a peer that moves to such a stage does not wait for one.

    Args:
        host, compute: of the stage that it leaves.
        patience: the seconds that a microbatch may take.

    Returns:
        The samples whose gradients are lost.
    """
    is_urgent = not any(record.serves for record in directory.peers_of(move.target).values())
    host.is_leaving = True
    await directory.declare(host.record())
    await host.drain(0.0 if is_urgent else patience)
    epoch, now = host.epoch, asyncio.get_running_loop().time
    until = now() + (0.0 if is_urgent else STEP_SECONDS)
    await compute.flush()
    while compute.samples and host.epoch == epoch and now() < until:
        await wait_at_most(host.changes.next, until - now())
    if not is_urgent:
        await compute.end_step()
    return compute.samples
