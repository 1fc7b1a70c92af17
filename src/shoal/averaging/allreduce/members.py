"""The members of a round, and how each one fares as far as this one knows.

The exchange of parts and the coordinator report what they see. What follows from it is decided here: who failed, who is
late, whom the round waits for. Each member has one standing::

      ACTIVE ── its connection broke, it was silent, or broke the protocol ──► FAILED
        │ │                                                                       │
        │ └── the round has gone on without it, or it says itself ──► LATE ◄──────┘ it came back after all, too late
        │     that it is late                                                       for this round
        └── it has left, because the round was committed ──► GONE

Nobody waits for the parts of a member that failed, but that does not mean that it is dead: two members may not reach
each other, while both reach the coordinator. One that failed and has no link to the coordinator counts as dead, and its
parts are reduced again. One that is late gets the result when the round is over.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from shoal.averaging.control import AveragingMode, GroupInfo
from shoal.averaging.messages import SharedCall
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


class Standing(enum.Enum):
    """How a member stands in a round."""

    ACTIVE = enum.auto()
    FAILED = enum.auto()
    LATE = enum.auto()
    GONE = enum.auto()


@dataclass(eq=False)
class Link:
    """The call of a member that takes this one for the coordinator."""

    shared: SharedCall
    handler: asyncio.Task[Any]
    weight: float
    # How many averages of each reducer it has reported; None while it is still busy.
    held: list[int] | None = None
    # Parts that it sends belong to an assignment that was called off.
    obsolete: bool = False
    # It has sent all its parts.
    delivered: bool = False


@dataclass(eq=False)
class Member:
    """One member of a round."""

    index: int
    peer_id: PeerID
    mode: AveragingMode
    standing: Standing = Standing.ACTIVE
    # Why it failed.
    reason: str = ""
    # Set when it was asked whether it lives, and did not answer.
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    # At the coordinator.
    link: Link | None = None

    @property
    def failed(self) -> bool:
        """Nobody waits for its parts."""
        return self.standing in (Standing.FAILED, Standing.LATE)

    @property
    def late(self) -> bool:
        """The round has gone on without it."""
        return self.standing is Standing.LATE


class Roster:
    """All members of one round.

    Args:
        group: as agreed.
        own_index: this member's position.
        reducers: positions of the members that reduce something.
        quorum: how many members have to deliver their parts; ``None``: all.
    """

    def __init__(self, group: GroupInfo, own_index: int, reducers: Collection[int], quorum: int | None) -> None:
        self.members = [
            Member(index, peer_id, AveragingMode(mode))
            for index, (peer_id, mode) in enumerate(zip(group.peer_ids, group.modes, strict=True))
        ]
        self.own, self.quorum = self.members[own_index], quorum
        self.on_failure: list[Callable[[Member], object]] = []
        """Called with each member that failed, and again whenever that is confirmed."""
        self.closed_early = False
        """The round goes on without members that may come later, for the result."""
        self.seen_not_finite: set[int] = set()
        """Members that have sent this one values that are not finite."""
        self.told_not_finite: set[int] = set()
        """Members of which others say so."""
        self.delivered = asyncio.Event()
        """This member has sent its parts to all members, or with a quorum, to all but as many as may be late."""
        self.received = asyncio.Event()
        """No further averages will come from others."""
        self.all_complete = asyncio.Event()
        """All senders hold all averages; known to those that reduce."""
        # Reducers to which something is still to be sent.
        self._undelivered = set(reducers) - {own_index} if self.is_sender else set()
        # Reducers from which averages are still to come.
        self._unreceived = set(self._undelivered)
        # Senders that are not known to hold all averages.
        self._incomplete, self._reduces = set(self.senders), own_index in reducers
        self._check_exchanged()

    # --- roles --------------------------------------------------------------------------------------------------------

    @property
    def is_sender(self) -> bool:
        """Whether this member has tensors."""
        return self.own.mode is not AveragingMode.AUX

    @property
    def senders(self) -> list[int]:
        """Positions of the members that have tensors."""
        return [member.index for member in self.members if member.mode is not AveragingMode.AUX]

    @property
    def coordinators(self) -> list[int]:
        """Positions of the members that can coordinate the end of the round, in the order in which they would."""
        return [member.index for member in self.members if member.mode is not AveragingMode.CLIENT]

    @property
    def has_successor(self) -> bool:
        """Whether somebody can coordinate the round if this member does not."""
        later = self.coordinators[self.coordinators.index(self.own.index) + 1 :]
        return any(not self.members[index].failed for index in later)

    # --- how the exchange of parts goes -------------------------------------------------------------------------------

    def note_delivery(self, index: int) -> None:
        """Nothing more is to be sent to a member."""
        self._undelivered.discard(index)
        self._check_exchanged()

    def note_received(self, index: int) -> None:
        """Nothing more will come from a reducer."""
        self._unreceived.discard(index)
        self._check_exchanged()

    def _check_exchanged(self) -> None:
        may_be_late = 0 if self.quorum is None else max(0, len(self.members) - self.quorum)
        if len(self._undelivered) <= may_be_late:
            self.delivered.set()
        if not self._unreceived:
            self.received.set()

    def note_complete(self, index: int) -> None:
        """A sender holds all averages."""
        self._incomplete.discard(index)
        if not self._incomplete and self._reduces:
            self.all_complete.set()

    def note_told_not_finite(self, indices: Collection[int], reporter: int) -> None:
        """Somebody says that others have sent values that are not finite."""
        self.told_not_finite |= set(indices) & set(range(len(self.members))) - {self.own.index, reporter}

    # --- failure and lateness -----------------------------------------------------------------------------------------

    @property
    def failed(self) -> list[Member]:
        """Other members that are not waited for."""
        return [member for member in self.members if member.failed and member is not self.own]

    @property
    def dead(self) -> set[int]:
        """Positions of those that cannot be reached either."""
        return {member.index for member in self.failed if member.link is None or member.late}

    def fail(self, index: int, reason: str, standing: Standing = Standing.FAILED) -> None:
        """A member is not to be waited for any more."""
        member = self.members[index]
        if not member.failed:
            member.reason = reason
            logger.info("group member %s failed: %s", member.peer_id, reason)
        if not member.late:
            member.standing = standing
        for notify in self.on_failure:
            notify(member)

    def forgive(self) -> None:
        """This member is late: what it believes of the others, who have gone on, counts no more."""
        for member in self.failed:
            member.standing = Standing.ACTIVE

    # --- at the coordinator -------------------------------------------------------------------------------------------

    @property
    def links(self) -> dict[int, Link]:
        """Connected members."""
        return {member.index: member.link for member in self.members if member.link is not None}

    @property
    def punctual(self) -> dict[int, Link]:
        """Connected members that the round waits for."""
        return {index: link for index, link in self.links.items() if not self.members[index].late}

    @property
    def absent(self) -> set[int]:
        """Members that are expected, and not connected."""
        return {
            member.index
            for member in self.members
            if member is not self.own and member.link is None and member.standing is Standing.ACTIVE
        }

    @property
    def has_quorum(self) -> bool:
        """Whether so many members have sent all their parts that the others are not waited for much longer."""
        delivered = self.delivered.is_set() + sum(link.delivered for link in self.links.values())
        return self.quorum is not None and delivered >= min(self.quorum, len(self.members))

    def close_early(self) -> set[int]:
        """Go on without those that have not delivered their parts; returns their positions."""
        late = self.absent | {index for index, link in self.punctual.items() if not link.delivered}
        self.closed_early = self.closed_early or bool(late)
        return late
