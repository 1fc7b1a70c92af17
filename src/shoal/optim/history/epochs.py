"""How far apart the epochs of peers that train together may be: pure functions, the same in all peers of a run.

An epoch ends with a global step of two rounds, one for gradients and one for parameters; with local updates there is
only the second. A peer announces the next epoch as soon as its step is made. When that is depends on which rounds run
in the background::

    nothing                  gradients ─► parameters ─► next epoch
    the second round         gradients ─► next epoch, parameters meanwhile
    both: rounds overlap     next epoch, gradients ─► parameters meanwhile
"""

from __future__ import annotations

# Where rounds overlap with training, a peer may be this many epochs ahead of another one.
EPOCHS_AHEAD = 2


def usual_lag(*, overlaps: bool) -> int:
    """How many epochs a peer may be behind the swarm without having missed anything.

    Where rounds overlap with training, others are an epoch ahead now and then. They also are after this peer has
    downloaded a state: a donor gives the state from before the round under way, and this peer then joins that round.
    """
    return 1 if overlaps else 0


def last_epoch_in_first_round(epoch: int, *, overlaps: bool) -> int:
    """A peer beyond this epoch does not come to the first round of the global step that ends ``epoch``.

    Where rounds overlap with training, a peer already announces its next epoch while it looks for a group. A peer that
    is an epoch ahead of this one then announces the epoch after that, and still comes. If this peer did not expect it,
    it would give up, others would wait for it in vain, and it would stay behind.
    """
    return epoch + EPOCHS_AHEAD if overlaps else epoch


def last_epoch_in_second_round(epoch: int, *, overlaps: bool, delay_state_averaging: bool) -> int:
    """A peer that began its global step at ``epoch`` and is beyond this epoch has finished the round for parameters.

    Peers that average gradients with each other need not be at the same epoch. Each goes on to its own next one.
    """
    return epoch + (2 if overlaps else 1 if delay_state_averaging else 0)


def takes_part(their_epoch: int, epoch: int, last_epoch: int, *, is_finishing: bool) -> bool:
    """Whether a peer can be expected in the first round of the global step that ends ``epoch``.

    Args:
        their_epoch: the epoch that it announced last.
        last_epoch: a peer beyond this epoch has finished the round.
        is_finishing: it was in the previous step and may still be busy with it.
    """
    return epoch <= their_epoch <= last_epoch or (their_epoch == epoch - 1 and is_finishing)
