"""What a stage peer knows of each microbatch that passes it: a table of works, and the life of one work.

Decisions only: no network, no clock, no tensors. :mod:`~shoal.stages.host` acts on them. A work lives like this::

                    tensors                    gradient                 counted
    RESERVED ─────────► FORWARD ──► WAITING ─────────► BACKWARD ──────────► DONE
        │                  └────────────┴──────────────────┴──► FAILED       │
        ▼ the caller leaves                                                  ▼ released by its callers, or nobody
      nothing                                                                  asked for it in time: nothing

Callers come and go: a call that breaks is made again, perhaps by a substitute of the peer that made it. It names the
same work, and attaches to it. So a work is computed once, and its samples count once, however often it is asked for.
A work without callers is kept for a while, with its result. What has counted here is remembered when the work is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from shoal.base.bounded import Bounded


class MicrobatchID(NamedTuple):
    """Names a microbatch. At one stage it names a work."""

    driver: bytes
    sequence: int


class Phase(Enum):
    """How far a work is."""

    RESERVED = "reserved"
    FORWARD = "forward"
    WAITING = "waiting"
    BACKWARD = "backward"
    DONE = "done"
    FAILED = "failed"


UNDER_WAY = (Phase.FORWARD, Phase.WAITING, Phase.BACKWARD)


class Acceptance(IntEnum):
    """The answer to a caller that asks for a work."""

    ACCEPTED = 1
    """Send the tensors."""
    KNOWN = 2
    """The tensors are here already: wait for the result."""
    BUSY = 3
    """There is no room at the moment."""
    LATE = 4
    """The step of the microbatch is over here."""
    BEHIND = 5
    """This peer has not come that far: it has to catch up first."""
    GONE = 6
    """It has counted here, and the result is not kept any more."""


class Door(NamedTuple):
    """Which steps a stage peer works on."""

    epoch: int
    """The step whose parameters it has."""
    closed: int = -1
    """The last step that has been closed by a driver."""
    max_staleness: int | None = None
    """``None``: each microbatch meets the parameters of its own step, and waits for them at most one step long."""

    def verdict(self, step: int) -> Acceptance:
        """Whether a microbatch of this step may come in."""
        if self.max_staleness is None:
            is_late, is_behind = step < self.epoch or step <= self.closed, step > self.epoch + 1
        else:
            soon = self.epoch + (self.closed >= self.epoch)  # when it counts, the step may have been made
            is_late, is_behind = step < soon - self.max_staleness, step > self.epoch + self.max_staleness + 1
        return Acceptance.LATE if is_late else Acceptance.BEHIND if is_behind else Acceptance.ACCEPTED


@dataclass
class Work:
    """One microbatch at one stage."""

    identity: MicrobatchID
    step: int
    trains: bool
    """Not for an evaluation, which belongs to no step and never counts."""
    nbytes: int = 0
    """Memory that is kept for it."""
    phase: Phase = Phase.RESERVED
    callers: int = 0
    """How many calls wait for its result."""
    left_at: float | None = None
    """Since when there are none; ``None`` while there are."""

    @property
    def counts(self) -> bool:
        """Whether its samples have been counted here, or are being counted."""
        return self.trains and self.phase in (Phase.BACKWARD, Phase.DONE)


class Works:
    """The works of one stage.

    Args:
        max_bytes: the most memory for all of them. A single work may take more.
        patience: seconds for which a work without callers is kept.
    """

    def __init__(self, max_bytes: int, patience: float) -> None:
        self.max_bytes, self.patience = max_bytes, patience
        self.most_waiting = 2
        """The most works whose forward pass is not done. Others would be done sooner elsewhere."""
        self.is_last = False
        """Whether this is the last stage, which computes both ways in one pass."""
        self._works: dict[MicrobatchID, Work] = {}
        # Those that have counted here and are gone. Bounded: an identity comes back only soon, after a repair.
        self._counted: Bounded[MicrobatchID, None] = Bounded()
        self._largest = 0

    def __iter__(self) -> Iterator[Work]:
        return iter([*self._works.values()])

    def __len__(self) -> int:
        return len(self._works)

    @property
    def nbytes(self) -> int:
        """The memory that is kept for all works."""
        return sum(work.nbytes for work in self._works.values())

    @property
    def room(self) -> int:
        """How many more works would be accepted now."""
        # Results that nobody fetches, because a driver is dead, do not keep all others out.
        is_idle = all(work.phase in (Phase.DONE, Phase.FAILED) for work in self._works.values())
        if not is_idle and self.nbytes + self._largest > self.max_bytes:
            return 0
        phases = {Phase.RESERVED, Phase.FORWARD} | ({Phase.BACKWARD} if self.is_last else set())
        return max(0, self.most_waiting - sum(work.phase in phases for work in self._works.values()))

    def holds(self, step: int) -> bool:
        """Whether a microbatch of this step, or of an earlier one, is under way and will count here."""
        return any(work.trains and work.step <= step and work.phase in UNDER_WAY for work in self._works.values())

    # --- callers ------------------------------------------------------------------------------------------------------

    def ask(self, identity: MicrobatchID, step: int, trains: bool, door: Door) -> tuple[Acceptance, Work | None]:
        """A caller asks for a work. If it is accepted or known, the caller is attached until it leaves."""
        work = self._works.get(identity)
        if work is not None and work.phase is Phase.FAILED:
            self.remove(work)
            work = None
        if work is None and identity in self._counted:
            return Acceptance.GONE, None
        if work is None and trains and (verdict := door.verdict(step)) is not Acceptance.ACCEPTED:
            return verdict, None
        if work is None and not self.room:
            return Acceptance.BUSY, None
        if work is None:
            # What it will take is not known before its tensors come.
            work = self._works[identity] = Work(identity, step, trains, self._largest)
        work.callers += 1
        work.left_at = None
        return (Acceptance.ACCEPTED if work.phase is Phase.RESERVED else Acceptance.KNOWN), work

    def leave(self, work: Work, now: float, *, is_served: bool) -> bool:
        """A caller leaves.

        Args:
            is_served: it said goodbye: it has the result and has passed on what follows from it, or wants it no more.

        Returns:
            Whether the work is of no use any more; then end and :meth:`remove` it.
        """
        work.callers -= 1
        if work.callers:
            return False
        work.left_at = now
        return is_served or work.phase in (Phase.RESERVED, Phase.FAILED)

    def expired(self, now: float) -> list[Work]:
        """Works that nobody has asked for in time; end and :meth:`remove` them."""
        return [each for each in self if each.left_at is not None and each.left_at + self.patience <= now]

    # --- progress -----------------------------------------------------------------------------------------------------

    def receive(self, work: Work, nbytes: int) -> bool:
        """Its tensors have come; returns whether they are the first, so that the work begins."""
        if work.phase is not Phase.RESERVED or self._works.get(work.identity) is not work:
            return False
        self._largest = max(self._largest, nbytes)
        self.advance(work, Phase.FORWARD, nbytes)
        return True

    def advance(self, work: Work, phase: Phase, nbytes: int | None = None) -> None:
        """The work is further; ``nbytes`` is the memory that is kept for it from now on."""
        work.phase = phase
        work.nbytes = work.nbytes if nbytes is None else nbytes

    def remove(self, work: Work) -> None:
        """The work is over, and nothing is kept but the memory that it has counted."""
        if self._works.get(work.identity) is work:
            del self._works[work.identity]
        if work.counts:
            self._counted[work.identity] = None
