"""Tells the guard what members bring to rounds, and who was expected and did not come.

Two things are claimed. With its progress a peer tells how many steps of a slot it has made, or how many samples; a peer
that claims some is expected in the round at the end of the slot. And each member tells what its message weighs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.clock import get_dht_time
from shoal.optim.diloco.in_flight import ExpectedMembers, Flight
from shoal.optim.history.fork_choice import weights_of

if TYPE_CHECKING:
    from shoal.optim.diloco.slot_tracker import OuterBoard


def note_outer_round(board: OuterBoard, flight: Flight, expected: ExpectedMembers | None) -> None:
    """A round has ended.

    Args:
        board: has the guard.
        expected: who was; ``None``: it has failed.
    """
    result, now = flight.result, get_dht_time()
    if expected is None:
        board.note_failed_round(flight.slot, now)
    elif result is None:
        board.note_outer_round({}, now, expected)
    else:
        weights = weights_of(result)
        done = {peer.to_bytes(): each for peer, each in zip(result.peers, flight.done, strict=True)}
        board.guard.note_failures([peer.to_bytes() for peer in result.seen_failing], result.duration, now)
        board.note_outer_round({p: done[p] if weight else 0 for p, weight in weights.items()}, now, expected)
        board.guard.note_weights(weights)
