"""Who may be an epoch ahead of whom: rules that are the same in all peers of a run, as pure functions.

An epoch ends with a global step of two rounds, for gradients and for parameters; with local updates there is only the
latter. A peer tells the others that it is at the next epoch when its step is made, and that depends on what it leaves
to the background::

    nothing                  gradients ─► parameters ─► next epoch
    the second round         gradients ─► next epoch, parameters meanwhile
    both: rounds overlap     next epoch, gradients ─► parameters meanwhile
"""

from __future__ import annotations

# Where rounds overlap with training, some peers are so many epochs ahead of others.
EPOCHS_AHEAD = 2


def usual_lag(*, overlaps: bool) -> int:
    """How many epochs a peer may be behind the swarm without having missed anything.

    Where rounds overlap with training, others are an epoch ahead every now and then. So they are when this peer has
    downloaded a state: donors give what they had before the round under way, which it then joins.
    """
    return 1 if overlaps else 0


def last_epoch_in_first_round(epoch: int, *, overlaps: bool) -> int:
    """Whoever is beyond this epoch does not come to the first round of the global step that ends ``epoch``.

    Where rounds overlap with training, the others are at the next epoch when they look for a group, and those that are
    an epoch ahead of this peer are at the one after that. If it gave up then, they would wait for it in vain, and it
    would stay behind.
    """
    return epoch + EPOCHS_AHEAD if overlaps else epoch


def last_epoch_in_second_round(epoch: int, *, overlaps: bool, delay_state_averaging: bool) -> int:
    """A peer that began its global step at ``epoch`` and is beyond this one by now has made the round for parameters.

    Two peers that averaged gradients with each other need not have been at the same epoch: each goes on to its own
    next one.
    """
    return epoch + (2 if overlaps else 1 if delay_state_averaging else 0)


def takes_part(their_epoch: int, epoch: int, last_epoch: int, *, is_finishing: bool) -> bool:
    """Whether a peer can be expected in the first round of the global step that ends ``epoch``.

    Args:
        their_epoch: what it has said last.
        last_epoch: whoever is beyond this one has finished the round.
        is_finishing: it was in the step before, and may still be busy with it.
    """
    return epoch <= their_epoch <= last_epoch or (their_epoch == epoch - 1 and is_finishing)
