"""When peers exchange which fragment of the parameters.

The exchanges of a run are numbered. Each of them, a *slot*, is for one fragment: slot k for fragment ``k % fragments``.
The number is agreed in the swarm, so a peer that hears of a later slot goes there and skips those between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


def group_of(own: bytes, others: Iterable[bytes], slot: int, size: int) -> tuple[str, set[bytes]]:
    """Whom a peer meets in a slot if peers meet in groups.

    Groups are drawn anew for each slot, in the same way by all peers that know the same others. Else fast peers would
    meet none but each other, and two halves of a run would hardly mix.

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
        """This peer has made an inner step with so many samples."""
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
