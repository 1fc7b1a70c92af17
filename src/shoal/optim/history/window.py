"""How far apart two peers that train together may be: pure functions, the same in all peers of a run.

An epoch ends with a global step of two rounds, one for gradients and one for parameters; with local updates there is
only the second. A peer announces the next epoch as soon as its step is made. When that is depends on which rounds run
in the background::

    nothing                  gradients ─► parameters ─► next epoch
    the second round         gradients ─► next epoch, parameters meanwhile
    both: rounds overlap     next epoch, gradients ─► parameters meanwhile
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Relation(enum.Enum):
    """How a peer stands to another one, or to the swarm."""

    BEHIND = "behind"
    """It lacks something that the other has."""
    WITH = "with"
    """Both can train together."""
    AHEAD = "ahead"
    """The other lacks something that it has."""
    ELSEWHERE = "elsewhere"
    """Each lacks something that the other has: they train different models."""


@dataclass(frozen=True)
class Window:
    """How many epochs, rounds or versions two peers may be apart and still train together."""

    behind: float = 0
    ahead: float = 0


EXACT = Window()
"""No difference is allowed, because all wait for each other."""

# The window if rounds overlap with training. A peer announces its next epoch while it still looks for a group. If it is
# one epoch ahead of another, it announces the second next one, and still comes to the round of the other. One epoch
# behind, because a donor gives the state from before the round in flight, and the newcomer joins that round.
EPOCHS_AHEAD = 2
OVERLAPPING = Window(behind=1, ahead=EPOCHS_AHEAD)


def window_of(*, overlaps: bool) -> Window:
    """How far others may be from this peer if no peer has missed anything."""
    return OVERLAPPING if overlaps else EXACT


def relation(own: float, other: float, window: Window = EXACT, common: float | None = None) -> Relation:
    """How a peer stands to another one.

    Args:
        own: its epoch, its newest version, or the number of its rounds.
        other: that of the other peer.
        window: how far apart they may be.
        common: the last one that both have; default: the smaller of the two.
    """
    common = min(own, other) if common is None else common
    is_behind, is_ahead = other - common > window.behind, own - common > window.ahead
    if is_behind and is_ahead:
        return Relation.ELSEWHERE
    return Relation.BEHIND if is_behind else Relation.AHEAD if is_ahead else Relation.WITH


def is_behind(own: float, other: float, most: float = 0) -> bool:
    """Whether a peer is more than ``most`` epochs behind another one, or behind the swarm."""
    return relation(own, other, Window(most, math.inf)) is Relation.BEHIND


# --- which peers come to a round --------------------------------------------------------------------------------------


def last_epoch_in_first_round(epoch: int, *, overlaps: bool) -> int:
    """The last epoch of a peer that can come to the first round of the global step that ends ``epoch``."""
    return epoch + int(window_of(overlaps=overlaps).ahead)


def last_epoch_in_second_round(epoch: int, *, overlaps: bool, delay_state_averaging: bool) -> int:
    """The last epoch at which a peer that began its global step at ``epoch`` may still be in the round for parameters.

    Peers that average gradients with each other need not be at the same epoch. Each continues to its own next one.
    """
    return epoch + (EPOCHS_AHEAD if overlaps else 1 if delay_state_averaging else 0)


def takes_part(their_epoch: int, epoch: int, last_epoch: int, *, is_finishing: bool) -> bool:
    """Whether a peer can be expected in the first round of the global step that ends ``epoch``.

    Args:
        their_epoch: the epoch that it announced last.
        last_epoch: a peer beyond this epoch has finished the round.
        is_finishing: it was in the previous step and may still be busy with it.
    """
    return relation(epoch, their_epoch, Window(last_epoch - epoch, 1 if is_finishing else 0)) is Relation.WITH
