"""The roster: the members of a round, and how each one does as far as this member knows.

The exchange of parts and the coordinator report what they see. The roster decides what follows: which members have
failed, which are late, and for which the round waits. Each member has one standing::

      ACTIVE ── its connection broke, it was silent, or broke the protocol ──► FAILED
        │ │                                                                       │
        │ └── the round has gone on without it, or it says itself ──► LATE ◄──────┘ it came back after all, too late
        │     that it is late                                                       for this round
        └── it has left, because the round was committed ──► GONE

A failed member need not be dead: two members may fail to reach each other while both reach the coordinator. No member
waits for the parts of a failed one. If a failed member has no link to the coordinator either, it counts as dead, and
its parts are reduced again. A late member gets the result when the round is over.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from shoal.averaging.control import AveragingMode, GroupInfo
from shoal.averaging.messages import RoundMessage, SharedCall
from shoal.averaging.round.waits import Waits
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)


class MemberStatus(enum.Enum):
    """How a member stands in a round."""

    ACTIVE = enum.auto()
    FAILED = enum.auto()
    LATE = enum.auto()
    GONE = enum.auto()


@dataclass(eq=False)
class FollowerCall:
    """The call of a member that follows this one as its coordinator."""

    shared: SharedCall
    handler: asyncio.Task[Any]
    weight: float
    # The number of averages that it holds from each reducer, as reported; None until it reports.
    held: list[int] | None = None
    # Its assignment was called off. Parts that still come belong to that one and do not count.
    obsolete: bool = False
    # It has sent all its parts.
    delivered: bool = False
    # Set when the member has come back with another link.
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class RoundMember:
    """One member of a round."""

    index: int
    peer_id: PeerID
    mode: AveragingMode
    standing: MemberStatus = MemberStatus.ACTIVE
    # Why it failed.
    reason: str = ""
    # Set when the member did not answer the question whether it lives.
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    # Its call to this member; only a coordinator has these.
    link: FollowerCall | None = None

    @property
    def failed(self) -> bool:
        """Whether no member waits for its parts any more."""
        return self.standing in (MemberStatus.FAILED, MemberStatus.LATE)

    @property
    def late(self) -> bool:
        """Whether the round has gone on without it."""
        return self.standing is MemberStatus.LATE


class Roster:
    """All members of one round.

    Args:
        group: as agreed.
        own_index: this member's position.
        reducers: positions of the members that reduce something.
        quorum: the number of members that have to deliver their parts; ``None``: all.
    """

    def __init__(self, group: GroupInfo, own_index: int, reducers: Collection[int], quorum: int | None) -> None:
        self.members = [
            RoundMember(index, peer_id, AveragingMode(mode))
            for index, (peer_id, mode) in enumerate(zip(group.peer_ids, group.modes, strict=True))
        ]
        self.own, self.quorum = self.members[own_index], quorum
        self.on_failure: list[Callable[[RoundMember], object]] = []
        """Called with each member that failed, and again each time its failure is reported again."""
        self.on_untrue: list[Callable[[int, str], object]] = []
        """Called with the position of a member that has lied, and what it has lied about."""
        self.on_stuck: Callable[[int, float], object] = lambda index, seconds: None
        """Called with the position of a coordinator that has not ended the round for so many seconds."""
        self.closed_early = False
        """The round goes on without members that may come for the result later."""
        self.missed = False
        """Others have committed the round without this member. It cannot compute the same averages itself."""
        self.seen_not_finite: set[int] = set()
        """Members that have sent this one values that are not finite."""
        self.told_not_finite: set[int] = set()
        """Members of which others say so."""
        self.left_out: set[int] = set()
        """Members without whose values some parts were averaged, here or, as others say, elsewhere."""
        self.seen_failing: set[int] = set()
        """Members whose failure this member has seen itself."""
        self.seen_withholding: dict[int, float] = {}
        """Reducers among these whose averages did not come, and the loop time at which they failed."""
        self.cut_off: set[int] = set()
        """Reducers whose averages had not come when the exchange with them was cancelled, for whatever reason."""
        self.held_up_by: set[int] = set()
        """Senders for whose parts this member waited when the round was cut short."""
        self.delivered = asyncio.Event()
        """This member has sent its parts to all reducers. With a quorum, to all but as many as may be late."""
        self.received = asyncio.Event()
        """No further averages will come from others."""
        self.all_complete = asyncio.Event()
        """All senders hold all averages. Only a member that reduces can know this."""
        # Reducers that have not got all parts of this member.
        self._undelivered = set(reducers) - {own_index} if self.is_sender else set()
        # Reducers whose averages have not all come.
        self._unreceived = set(self._undelivered)
        # Senders that may still lack averages, as far as this member knows.
        self._incomplete, self._reduces = set(self.senders), own_index in reducers
        self.waits = Waits(asyncio.get_running_loop().time)
        """How long this member waited for others, each alone."""
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
        """Positions of the members that can coordinate the end of the round, first choice first.

        A member in client mode cannot be one, because nobody can call it.
        """
        return [member.index for member in self.members if member.mode is not AveragingMode.CLIENT]

    @property
    def has_successor(self) -> bool:
        """Whether another member can coordinate the round after this one."""
        later = self.coordinators[self.coordinators.index(self.own.index) + 1 :]
        return any(not self.members[index].failed for index in later)

    # --- how the exchange of parts goes -------------------------------------------------------------------------------

    def note_delivery(self, index: int) -> None:
        """Note that nothing more is to be sent to a member."""
        self._undelivered.discard(index)
        self._check_exchanged()

    def note_received(self, index: int) -> None:
        """Note that nothing more will come from a reducer."""
        had_several = len(self._unreceived) > 1
        self._unreceived.discard(index)
        if had_several or not self._unreceived:
            self.waits.miss(self._unreceived, averages=True)
        self._check_exchanged()

    def _check_exchanged(self) -> None:
        may_be_late = 0 if self.quorum is None else max(0, len(self.members) - self.quorum)
        if len(self._undelivered) <= may_be_late:
            self.delivered.set()
        if not self._unreceived:
            self.received.set()

    def note_cancelled(self, index: int) -> None:
        """Note that the exchange with a reducer was cancelled."""
        if index in self._unreceived:
            self.cut_off.add(index)

    def note_complete(self, index: int) -> None:
        """Note that a sender holds all averages."""
        self._incomplete.discard(index)
        if not self._incomplete and self._reduces and not self.own.late:
            self.all_complete.set()

    def note_told(self, message: RoundMessage, reporter: int) -> None:
        """Note what a report or a commit says about members: whose values are not finite, and who was left out.

        Of the former, what is said about this member, or by the reporter about itself, is ignored.
        """
        self.told_not_finite |= set(message.not_finite) & set(range(len(self.members))) - {self.own.index, reporter}
        self.left_out |= set(message.left_out) & set(self.senders)

    @property
    def left_out_alive(self) -> list[int]:
        """Members that were left out of some averages, but have stayed to the end."""
        return [index for index in self.senders if index in self.left_out and not self.members[index].failed]

    # --- failure and lateness -----------------------------------------------------------------------------------------

    @property
    def failed(self) -> list[RoundMember]:
        """Other members for whose parts nobody waits."""
        return [member for member in self.members if member.failed and member is not self.own]

    @property
    def dead(self) -> set[int]:
        """Positions of failed members without a link to this coordinator, and of all late ones."""
        return {member.index for member in self.failed if member.link is None or member.late}

    def fail(
        self, index: int, reason: str, standing: MemberStatus = MemberStatus.FAILED, *, is_hearsay: bool = False
    ) -> None:
        """Stop waiting for a member.

        Args:
            index: its position.
            reason: why, in words for the log and for errors.
            standing: ``FAILED`` or ``LATE``.
            is_hearsay: another member says so; the failure does not count among those that this member has seen.
        """
        member = self.members[index]
        if not is_hearsay:
            self.seen_failing.add(index)
        if not member.failed:
            member.reason = reason
            logger.info("group member %s failed: %s", member.peer_id, reason)
        if not member.late:
            member.standing = standing
        for notify in self.on_failure:
            notify(member)

    def accuse(self, index: int, what: str) -> None:
        """Report that a member has lied. That alone does not end its part in the round."""
        for notify in self.on_untrue:
            notify(index, what)

    def forgive(self) -> None:
        """Forget all failures of others, because this member is late itself.

        To a late member the others look failed, although they have only gone on.
        """
        for member in self.failed:
            member.standing = MemberStatus.ACTIVE
        self.seen_failing.clear()
        self.seen_withholding.clear()
        self.cut_off.clear()

    # --- at the coordinator -------------------------------------------------------------------------------------------

    @property
    def links(self) -> dict[int, FollowerCall]:
        """Connected members."""
        return {member.index: member.link for member in self.members if member.link is not None}

    @property
    def punctual(self) -> dict[int, FollowerCall]:
        """Connected members for which the round waits."""
        return {index: link for index, link in self.links.items() if not self.members[index].late}

    @property
    def absent(self) -> set[int]:
        """Members that are expected but not connected."""
        return {
            member.index
            for member in self.members
            if member is not self.own and member.link is None and member.standing is MemberStatus.ACTIVE
        }

    @property
    def has_quorum(self) -> bool:
        """Whether enough members have sent all their parts; the others then get only the time of grace."""
        delivered = self.delivered.is_set() + sum(link.delivered for link in self.links.values())
        return self.quorum is not None and delivered >= min(self.quorum, len(self.members))

    def close_early(self) -> set[int]:
        """Go on without the members that have not delivered their parts; returns their positions."""
        late = self.absent | {index for index, link in self.punctual.items() if not link.delivered}
        self.closed_early = self.closed_early or bool(late)
        return late
