"""Which stage a peer holds: the one that a newcomer takes, and who moves from the richest to the poorest stage.

A stage is as rich as its peers are fast together, in microbatches per second. No more microbatches pass through the
whole model than through its poorest stage.

All peers decide from the same records, so all find the same one. But they may read them at different moments. Hence
nobody acts on its first decision: it declares what it is going to do, waits until all have seen that, and decides
again, with what was declared by those that come before it::

    newcomer    stage_for_newcomer ─► declare(is_joining) ─► pause ─► the same stage again? ─► download, serve
    mover       move_of(…) is me ─► declare(moves_to) ─► pause ─► may_move? ─► finish, leave, download, serve

Everything here is computed from records, without a clock or a network; :mod:`shoal.stages.moving` acts on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from statistics import median
from typing import NamedTuple

from shoal.p2p import PeerID
from shoal.stages.directory import StageRecord

# Peers move if that raises the rate of the poorer of two stages to more than this many times what it was. Specified. Of
# large stages no single peer makes such a difference. So it is what all moves between both stages could gain together,
# and each of them must bring more than SHARE of what a peer of the poorer stage does (chosen).
GAIN, SHARE = 1.1, 0.1
# The speed of a peer if no record tells one, in microbatches per second (chosen: all are alike).
UNKNOWN_RATE = 1.0
# A peer that is joining or moving for longer than this counts nowhere, and nobody waits for it (chosen: a large state
# may take this long on a slow line).
SETTLING_SECONDS = 900.0

Peers = Mapping[int, Mapping[PeerID, StageRecord]]
"""The records of the peers of each stage, also of stages without peers."""


class Move(NamedTuple):
    """A peer is to hold another stage."""

    peer: PeerID
    source: int
    target: int


def rank_of(peer: PeerID, step: int) -> bytes:
    """The peer with the smallest rank goes first. In another step the order is another."""
    return hashlib.blake2b(peer.to_bytes() + step.to_bytes(8, "big"), digest_size=8).digest()


def is_settling(record: StageRecord) -> bool:
    """Whether a peer is on its way to a stage: it joins or moves."""
    return (record.is_joining or record.moves_to is not None) and record.time - record.since < SETTLING_SECONDS


def _speeds(peers: Peers, ignored: Collection[PeerID] = ()) -> dict[int, dict[PeerID, float]]:
    """By stage, the speed of each peer that serves it, or is on its way there.

    Args:
        ignored: peers whose plans do not count: a newcomer is nowhere, and others stay where they are.
    """
    told = [record.rate for records in peers.values() for record in records.values() if record.rate > 0]
    usual = median(told) if told else UNKNOWN_RATE
    speeds = {stage: dict[PeerID, float]() for stage in peers}
    for stage, records in peers.items():
        for peer, record in records.items():
            if not is_settling(record):
                target = stage if record.serves else None
            elif record.is_joining:
                target = None if peer in ignored else stage
            else:
                target = stage if peer in ignored else record.moves_to
            if target in speeds:
                speeds[target][peer] = record.rate or usual
    return speeds


def _sums(speeds: Mapping[int, Mapping[PeerID, float]]) -> dict[int, float]:
    return {stage: sum(each.values()) for stage, each in speeds.items()}


def rates_of(peers: Peers) -> dict[int, float]:
    """Microbatches per second of each stage. A peer counts where it is going to be."""
    return _sums(_speeds(peers))


def stage_for_newcomer(peers: Peers, newcomer: PeerID, since: float) -> int:
    """The stage that a newcomer takes: the poorest. If there are several, the one that it has declared already, or else
    its peer id decides.

    Args:
        since: DHT time at which the newcomer first declared a stage; infinite before. Others that have begun to join
            later give way, so they count only between stages that are equally poor.
    """
    own = since, rank_of(newcomer, 0)
    later = {
        peer
        for records in peers.values()
        for peer, record in records.items()
        if record.is_joining and (record.since, rank_of(peer, 0)) >= own
    }
    rates, all_rates = (_sums(_speeds(peers, ignored)) for ignored in ({newcomer, *later}, {newcomer}))

    def order(stage: int) -> tuple[float, bool, float, bytes]:
        return rates[stage], newcomer not in peers[stage], all_rates[stage], rank_of(newcomer, stage)

    return min(rates, key=order)


def move_of(peers: Peers, step: int, ignored: Collection[PeerID] = ()) -> Move | None:
    """The peer that moves in this step: by rank, among those of the richest stage that may be moved and are of use.

    A peer is of use if the smaller rate of both stages rises enough. If there is none in the richest stage, the next
    ones follow. The last peer of a stage never moves.

    Args:
        step: the number of the decision, the same at all peers.
        ignored: peers whose plans do not count.

    Returns:
        ``None`` if nobody moves. Nobody does while another peer joins or moves, except to a stage without peers.
    """
    speeds = _speeds(peers, ignored)
    rates = _sums(speeds)
    target = min(rates, key=lambda stage: (rates[stage], stage))
    others = [record for records in peers.values() for peer, record in records.items() if peer not in ignored]
    if rates[target] > 0 and any(map(is_settling, others)):
        return None
    least = SHARE * rates[target] / max(1, len(speeds[target]))
    for source in sorted(rates, key=lambda stage: (-rates[stage], stage)):
        here = {peer: record for peer, record in peers[source].items() if peer in speeds[source] and record.serves}
        if rates[source] + rates[target] <= 2 * GAIN * rates[target] or len(here) < 2:
            continue
        movers = [
            peer
            for peer, record in here.items()
            if record.serves_auto
            and min(rates[source] - speeds[source][peer], rates[target] + speeds[source][peer]) - rates[target] > least
        ]
        if movers:
            return Move(min(movers, key=lambda peer: rank_of(peer, step)), source, target)
    return None


def may_move(peers: Peers, move: Move, step: int) -> bool:
    """Whether a peer that has declared a move, and has waited until others have seen that, may move.

    It may if it still should, and no peer of a smaller rank has declared a move. Otherwise it must take it back.
    """
    own = rank_of(move.peer, step)
    later = {peer for records in peers.values() for peer in records if rank_of(peer, step) >= own}
    joining = {peer for records in peers.values() for peer, record in records.items() if record.is_joining}
    return move_of(peers, step, later - joining) == move
