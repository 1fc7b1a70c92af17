"""Slots: when peers exchange which fragment, and how they agree that a slot is over.

The exchanges of a run are numbered. Each of them, a *slot*, is for one fragment: slot k for fragment ``k % fragments``.
The number is agreed in the swarm, so a peer that hears of a later slot goes there and skips those between. To the
progress tracker, slots are epochs. They are counted in samples of all peers; or in inner steps, which nobody adds up:
then the first peer that has made all of them ends the slot (:class:`StepRule`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.optim.progress.board import EpochRule
from shoal.optim.progress.records import GlobalTrainingProgress, LocalTrainingProgress

if TYPE_CHECKING:
    pass

# Later than all slots.
ANY_SLOT = 2**62


def group_of(own: bytes, others: Iterable[bytes], slot: int, size: int) -> tuple[str, set[bytes]]:
    """Whom a peer meets in a slot if peers meet in groups.

    Groups are drawn again for each slot, in the same way by all peers that know the same others. Otherwise fast peers
    would only meet each other, and two halves of a run would hardly mix.

    Args:
        own: this peer.
        others: all other peers, in any order.
        slot: number of the slot.
        size: of a group; the last one may be smaller.

    Returns:
        The bits under which the group meets, and its other members.
    """
    order = sorted({own, *others}, key=lambda peer: hashlib.sha256(slot.to_bytes(8) + peer).digest())
    number = order.index(own) // size
    return f"{slot % 2**8:08b}{number % 2**16:016b}", set(order[number * size : (number + 1) * size]) - {own}


@dataclass(frozen=True)
class Schedule:
    """Says how long each slot is. Exactly one of ``sync_every`` and ``target_batch_size`` is given.

    Raises:
        ValueError: both or none of them are given, or there are more fragments than steps between two exchanges.
    """

    fragments: int = 1
    """How many fragments the parameters have."""
    sync_every: int | None = None
    """Inner steps from one exchange of a fragment to the next one. Slots are evenly spread over these steps."""
    target_batch_size: int | None = None
    """Samples of all peers together in each slot."""

    def __post_init__(self) -> None:
        if (self.sync_every is None) == (self.target_batch_size is None):
            raise ValueError(
                "give either sync_every, the inner steps between two exchanges, or target_batch_size, the samples of "
                f"all peers between two exchanges: got {self.sync_every} and {self.target_batch_size}"
            )
        if self.fragments < 1:
            raise ValueError(f"there must be at least 1 fragment, got {self.fragments}")
        if self.sync_every is not None and self.sync_every < self.fragments:
            raise ValueError(
                f"{self.fragments} fragments do not fit into sync_every={self.sync_every} inner steps, one step each: "
                "use fewer fragments or exchange less often"
            )

    def fragment_of(self, slot: int) -> int:
        """The fragment that is exchanged at the end of a slot."""
        return slot % self.fragments

    def due_at(self, slot: int) -> int:
        """After how many inner steps of the run a slot ends; 0 for the slot before the first one.

        Only with ``sync_every``. A fragment is exchanged every ``sync_every`` steps exactly, whether or not the number
        of fragments divides that.
        """
        assert self.sync_every is not None, "with target_batch_size nobody knows how many steps a slot has"
        if slot < 0:
            return 0
        period, fragment = divmod(slot, self.fragments)
        return period * self.sync_every + (fragment + 1) * self.sync_every // self.fragments

    def steps_of(self, slot: int) -> int:
        """How many inner steps a slot has. Only with ``sync_every``."""
        return self.due_at(slot) - self.due_at(slot - 1)


class SlotCounter:
    """Where one peer is in the run: the slot, and what the peer has done in it.

    Args:
        schedule: says how long slots are.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.slot = 0
        self.steps = 0
        """Inner steps of this peer in this slot."""
        self.samples = 0
        """Samples of this peer in this slot."""

    def count(self, samples: int) -> None:
        """This peer has made an inner step with this many samples."""
        self.steps += 1
        self.samples += samples

    @property
    def is_full(self) -> bool:
        """Whether this peer has made all the steps of the slot. With ``target_batch_size`` it cannot tell by itself."""
        return self.schedule.sync_every is not None and self.steps >= self.schedule.steps_of(self.slot)

    def go_to(self, slot: int) -> None:
        """The slot is over, or the swarm is at a later one. What is done from now on belongs to ``slot``."""
        if slot != self.slot:
            self.slot, self.steps, self.samples = slot, 0, 0

    @property
    def position(self) -> int:
        """Where a learning rate schedule stands, the same in all peers at the same point of the run.

        With ``sync_every`` this is the number of inner steps of the run. It moves with this peer's steps, but not
        beyond the end of the slot. With ``target_batch_size`` it is the number of slots.
        """
        if self.schedule.sync_every is None:
            return self.slot
        begins, ends = self.schedule.due_at(self.slot - 1), self.schedule.due_at(self.slot)
        return min(begins + self.steps, ends)


# --- the end of a slot that is counted in inner steps -----------------------------------------------------------------


class StepRule(EpochRule):
    """Ends a slot when the first peer has made all its inner steps. The others may complete theirs, but not for longer
    than the patience of the first one.

    Args:
        patience: how long others are waited for, in seconds.
        overlaps: whether others may be at the next slot although this peer has missed nothing.
    """

    adds_up = False

    def __init__(self, patience: float, *, overlaps: bool = False) -> None:
        self._patience, self._overlaps = patience, overlaps
        self.is_late = False
        """Whether the latest round failed here. Others may have met without this peer, and need not wait for it."""
        # Of the slot with this number: until when this peer may continue, by what it has heard so far.
        self._deadline: tuple[int, float] = (-1, math.inf)

    def share(self, target: int, num_peers: int) -> float:
        return target  # what matters is when a peer will have made all steps

    def summary(
        self, progress: GlobalTrainingProgress, records: Collection[LocalTrainingProgress], now: float
    ) -> GlobalTrainingProgress:
        target, ends = progress.target_batch_size, [math.inf]
        for record in records:
            left = target - record.samples_accumulated
            if left <= 0:
                ends.append(now)
            elif record.samples_per_second > 0:
                ends.append(max(now, record.time + left / record.samples_per_second))
        most = max((record.samples_accumulated for record in records), default=0)
        return replace(progress, samples_accumulated=most, eta_next_epoch=min(*ends, now + FAR_AHEAD))

    def end(
        self,
        progress: GlobalTrainingProgress,
        own: LocalTrainingProgress,
        called_end: Callable[[float], float],
        now: float,
    ) -> float:
        ahead = progress.epoch - own.epoch
        if own.samples_accumulated >= progress.target_batch_size or (ahead > 0 and not (self._overlaps and ahead == 1)):
            return now
        called = called_end(progress.eta_next_epoch)
        if ahead > 0:  # others are training on already, and may wait in the background
            called = min(called, now + self._patience)
        if self.is_late:  # with fewer steps it meets them; with all of them it would be late again
            called = min(called, progress.eta_next_epoch)
        slot, known = self._deadline
        self._deadline = own.epoch, min(called, known if slot == own.epoch else math.inf)
        return max(now, self._deadline[1])

    def declared_end(self, end: float, own: LocalTrainingProgress, target: int, now: float, patience: float) -> float:
        return now + patience if own.samples_accumulated >= target else end


# A slot whose end nobody knows is over in some thirty years: messages have no room for infinity.
FAR_AHEAD = 1e9
