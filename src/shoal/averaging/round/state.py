"""The status of a round's members, and how the round ends: a state machine without a network, a clock or tensors.

:func:`on` takes an event and returns the actions that follow from it. Two thin shells perform them: the exchange of
parts (:mod:`~.exchange`) and the coordinator (:mod:`~.coordinator`). Every member has one status::

      ACTIVE ── its connection broke, it was silent, or broke the protocol ──► FAILED
        │ │                                                                       │
        │ └── the round continues without it, or it says ──► LATE ◄───────────────┘ it came back, but too late
        │     itself that it is late                                                for this round
        └── it has left, because the round was committed ──► GONE

A failed member need not be dead: two members may fail to reach each other while both reach the coordinator. No member
waits for the parts of a failed one. A failed member without a link to the coordinator counts as dead, and its parts are
reduced again. A late member gets the result when the round is over.

How a coordinator ends a round::

    Coordinate ─► all expected members are linked, dead or gone; all punctual ones have reported
                      │                                   ▲
                      ├─ something is missing ─► Attempt ─┘ filled, or called off after a death
                      └─ nothing is missing ──► CommitRound
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.averaging.control import AveragingMode, GroupInfo, LossCause
from shoal.averaging.messages import Late, Loss, MembersLost, PartKey, Ranges, Resigns, Restart, RoundMessage
from shoal.averaging.messages import RoundStatus as Status
from shoal.p2p import PeerID


class MemberStatus(enum.Enum):
    """The status of a member in a round."""

    ACTIVE = enum.auto()
    FAILED = enum.auto()
    LATE = enum.auto()
    GONE = enum.auto()


@dataclass(eq=False, slots=True)
class MemberLink:
    """The call of a member that follows this one as its coordinator. A member that comes back has a new one."""

    weight: float
    held: list[int] | None = None
    """The number of averages that it holds from each reducer; ``None`` until it reports, and again when an attempt
    starts."""
    obsolete: bool = False
    """Its assignment was called off, and parts that still come belong to that one. Ends with its next report."""
    delivered: bool = False
    """It has sent all its parts. Never taken back."""


# It has many fields because each is one independent thing that a member did wrong or still has to do.
@dataclass(eq=False, slots=True)
class RoundMember:
    """One member of a round, and everything that this peer knows about its status."""

    index: int
    peer_id: PeerID
    mode: AveragingMode
    status: MemberStatus = MemberStatus.ACTIVE
    loss: Loss | None = None
    """The first reason why it was given up. Set if the status is ``FAILED`` or ``LATE``."""
    seen_failing: bool = False
    """This peer has seen the failure itself. False if the status is ``ACTIVE`` or ``GONE``."""
    withheld_at: float | None = None
    """Loop time at which it failed as a reducer that still owed averages. Implies ``seen_failing``."""
    cut_off: bool = False
    """It still owed averages when the exchange with it was cancelled, for any reason."""
    holds_up: bool = False
    """This peer waited for its parts when the round was cut short."""
    sent_not_finite: bool = False
    """It has sent this peer values that are not finite."""
    told_not_finite: bool = False
    """Another member accuses it of sending values that are not finite."""
    left_out: bool = False
    """Some parts were averaged without its values, here or, as others say, elsewhere."""
    needs_parts: bool = False
    """It reduces, and has not got all parts of this peer. Never becomes true again."""
    owes_averages: bool = False
    """It reduces, and has not sent all averages to this peer. Never becomes true again."""
    lacks_averages: bool = False
    """It has tensors, and may still lack averages. Never becomes true again."""
    link: MemberLink | None = None
    """Its call to this peer. Only a coordinator has links."""
    left: bool = False
    """It has left on purpose, so it will not come back for the result."""
    unconfirmed: bool = False
    """The commit was sent to it and may still be in flight."""

    @property
    def failed(self) -> bool:
        """Whether the others no longer wait for its parts."""
        return self.status in (MemberStatus.FAILED, MemberStatus.LATE)

    @property
    def late(self) -> bool:
        """Whether the round continues without it."""
        return self.status is MemberStatus.LATE

    @property
    def is_sender(self) -> bool:
        """Whether it has tensors."""
        return self.mode is not AveragingMode.AUX


@dataclass
class Plan:
    """How to fill the gaps of living members."""

    sources: dict[PartKey, int] = field(default_factory=dict)
    """By part: a member that holds its average."""
    again: list[PartKey] = field(default_factory=list)
    """Parts to reduce again, from all living senders."""
    missing: dict[int, Ranges] = field(default_factory=dict)
    """By member: the averages that it lacks."""

    def parts_missing(self, member: int) -> list[PartKey]:
        return [(r, k) for r, start, stop in self.missing.get(member, []) for k in range(start, stop)]


def make_plan(parts: Sequence[int], held: Mapping[int, Sequence[int]], own: int, *, may_reduce: bool = True) -> Plan:
    """Plan which averages living senders lack, and from which members to get them.

    Args:
        parts: the number of parts of each reducer.
        held: by living sender, how many parts of each reducer it holds, from the first one on.
        own: the member that plans; it is preferred as a source.
        may_reduce: whether parts that no member holds are reduced again; otherwise local values stay.
    """
    plan = Plan()
    if len(held) < 2:  # there is no other member to average with
        return plan
    for reducer, count in enumerate(parts):
        counts = {member: held[member][reducer] for member in sorted(held)}
        lacking = [member for member, there in counts.items() if there < count]
        if not lacking:
            continue
        # Averages are held in order, so the member with the most holds all that any member holds.
        most = max(counts.values())
        best = own if counts.get(own) == most else max(counts, key=lambda member: counts[member])
        for index in range(min(counts[member] for member in lacking), count):
            if index < most:
                plan.sources[reducer, index] = best
            elif may_reduce:
                plan.again.append((reducer, index))
        for member in lacking:
            plan.missing.setdefault(member, []).append((reducer, counts[member], count))
    return plan


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lost:
    """A member has failed; ``is_hearsay``: only according to another one."""

    index: int
    loss: Loss
    is_hearsay: bool = False


@dataclass(frozen=True, slots=True)
class PartsSent:
    """Nothing is left to send to a reducer."""

    index: int


@dataclass(frozen=True, slots=True)
class AveragesCame:
    """Nothing more will come from a reducer."""

    index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """A sender holds all averages."""

    index: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """This peer has exchanged all that it will; ``held``: how many averages of each reducer it holds."""

    held: Sequence[int]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """This peer coordinates from now on.

    ``waits``: it waits for all members. Otherwise another coordinator has committed the round, and this one only serves
    members that could not reach that one.
    """

    waits: bool


@dataclass(frozen=True, slots=True)
class Linked:
    """A member follows this one."""

    index: int
    link: MemberLink
    is_late: bool = False
    missed: bool = False


@dataclass(frozen=True, slots=True)
class LinkBroke:
    """The connection of a link broke; the member may come back."""

    index: int
    link: MemberLink


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link has ended before the commit, and the member has not come back in time."""

    index: int
    link: MemberLink
    loss: Loss


@dataclass(frozen=True, slots=True)
class Reported:
    """A member reports how many averages of each reducer it holds."""

    index: int
    link: MemberLink
    held: list[int]


@dataclass(frozen=True, slots=True)
class HasDelivered:
    """A member has sent all its parts."""

    link: MemberLink


@dataclass(frozen=True, slots=True)
class Left:
    """A member has left on purpose."""

    index: int


@dataclass(frozen=True, slots=True)
class StatusKnown:
    """A member without a link has answered a question about the round.

    ``too_late``: with this status it is late by now. ``never_began``: it has sent this peer nothing.
    """

    index: int
    status: Status
    too_late: bool
    never_began: bool


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The grace period after the quorum is over."""


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """Members have not reported in time, and there was no progress meanwhile."""

    busy: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt has filled all gaps, or was called off."""

    completed: bool
    held: Sequence[int]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A member has got the commit."""

    index: int


Event = (
    Lost | PartsSent | AveragesCame | Complete | Exchanged | Coordinate | Linked | LinkBroke | LinkLost | Reported
    | HasDelivered | Left | StatusKnown | GraceOver | PatienceOver | AttemptEnded | Confirmed
)  # fmt: skip


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopExchange:
    """Stop the exchange with a member; ``is_new``: it had not failed before."""

    index: int
    loss: Loss
    is_new: bool


@dataclass(frozen=True, slots=True)
class TellMembers:
    """Send a message on these links."""

    links: Sequence[MemberLink]
    message: RoundMessage


@dataclass(frozen=True, slots=True)
class CutLink:
    """End a link; ``is_replaced``: the member has made another one."""

    link: MemberLink
    is_replaced: bool


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Send ``GraceOver`` after the grace period."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Fill gaps with the help of the linked members, then send ``AttemptEnded``."""

    plan: Plan
    links: Mapping[int, MemberLink]


@dataclass(frozen=True, slots=True)
class CallOff:
    """End the attempt: a member that takes part in it is dead."""


@dataclass(frozen=True, slots=True)
class CommitRound:
    """Tell these members that the round is over; ``keeps``: keep the result for others."""

    links: Mapping[int, MemberLink]
    keeps: bool


@dataclass(frozen=True, slots=True)
class Resign:
    """Stop coordinating, because this peer is late itself."""


Action = StopExchange | TellMembers | CutLink | StartGrace | Attempt | CallOff | CommitRound | Resign


# --- state ------------------------------------------------------------------------------------------------------------


class RoundState:
    """All members of one round, and how far its completion has got.

    Args:
        group: as agreed.
        own_index: this member's position.
        parts: the number of parts of each reducer.
        quorum: the number of members that have to deliver their parts; ``None``: all.
        passes_on: whether a result can be passed on to late members. If not, a member that comes back too late keeps
            its values. A result cannot be passed on if members mix averages with their own values, nor by an auxiliary,
            which has no averages.
    """

    def __init__(
        self, group: GroupInfo, own_index: int, parts: Sequence[int], quorum: int | None, *, passes_on: bool = True
    ) -> None:
        self.members = [
            RoundMember(index, peer_id, AveragingMode(mode))
            for index, (peer_id, mode) in enumerate(zip(group.peer_ids, group.modes, strict=True))
        ]
        self.own, self.parts, self.quorum = self.members[own_index], parts, quorum
        self.passes_on = passes_on and self.own.is_sender
        for member in self.members:
            is_reducer = member is not self.own and self.own.is_sender and parts[member.index] > 0
            member.needs_parts = member.owes_averages = is_reducer
            member.lacks_averages = member.is_sender
        self.closed_early = False
        """The round continues without members that may come for the result later. Stays true."""
        self.missed = False
        """Others have committed the round without this peer, so it cannot compute the same averages. Stays true."""
        self.held: Sequence[int] | None = None
        """By reducer: how many averages this peer holds; ``None`` until its exchange is over."""
        self.coordinates: Coordinate | None = None
        """Set while this peer coordinates; ``None`` before, and after it has resigned."""
        self.has_filled_gaps = False
        """Parts were averaged again without failed members, or another coordinator may have done that. A failed member
        that comes back may hold other averages of the same parts, so it is late from then on. Stays true."""
        self.grace_began = False
        self.resigned = False
        """This peer has coordinated and has resigned. Stays true."""
        self.attempt: Attempt | None = None
        """The attempt in progress. Only before the commit, while this peer coordinates."""
        self.committed = False
        """The round is committed, and no member can be lost any more. Stays true."""
        # Dead members that the linked members were told about.
        self._told: set[int] = set()

    # --- roles --------------------------------------------------------------------------------------------------------

    @property
    def senders(self) -> list[int]:
        """Positions of the members that have tensors."""
        return [member.index for member in self.members if member.is_sender]

    @property
    def reducers(self) -> list[int]:
        """Positions of the members that reduce parts."""
        return [index for index, count in enumerate(self.parts) if count]

    @property
    def coordinators(self) -> list[int]:
        """Positions of the members that can coordinate the end of the round, first choice first.

        A member in client mode cannot, because no member can call it.
        """
        return [member.index for member in self.members if member.mode is not AveragingMode.CLIENT]

    @property
    def has_successor(self) -> bool:
        """Whether another member can coordinate the round after this one."""
        later = self.coordinators[self.coordinators.index(self.own.index) + 1 :]
        return any(not self.members[index].failed for index in later)

    # --- the exchange of parts ----------------------------------------------------------------------------------------

    @property
    def has_delivered(self) -> bool:
        """This peer has sent its parts to all reducers; with a quorum, to all except as many as may be late."""
        may_be_late = 0 if self.quorum is None else max(0, len(self.members) - self.quorum)
        return sum(member.needs_parts for member in self.members) <= may_be_late

    @property
    def has_received(self) -> bool:
        """No further averages will come from others."""
        return not any(member.owes_averages for member in self.members)

    @property
    def all_complete(self) -> bool:
        """All senders hold all averages. Only a member that reduces can know this."""
        return not self.own.late and self.parts[self.own.index] > 0 and not any(m.lacks_averages for m in self.members)

    # --- which members are there --------------------------------------------------------------------------------------

    @property
    def failed(self) -> list[RoundMember]:
        """Other members that have failed: no member waits for their parts."""
        return [member for member in self.members if member.failed and member is not self.own]

    @property
    def dead(self) -> set[int]:
        """Positions of failed members without a link to this coordinator, and of all late ones."""
        return {member.index for member in self.failed if member.link is None or member.late}

    @property
    def punctual(self) -> dict[int, MemberLink]:
        """Links of the members that the round waits for."""
        return {each.index: each.link for each in self.members if each.link is not None and not each.late}

    @property
    def absent(self) -> list[int]:
        """Members that are expected but have no link."""
        return [
            member.index
            for member in self.members
            if member is not self.own and member.link is None and member.status is MemberStatus.ACTIVE
        ]

    @property
    def has_quorum(self) -> bool:
        """Whether enough members have sent all their parts; the others then get only the grace period."""
        links = [member.link for member in self.members if member.link is not None]
        delivered = self.has_delivered + sum(link.delivered for link in links)
        return self.quorum is not None and delivered >= min(self.quorum, len(self.members))

    @property
    def busy(self) -> list[int]:
        """Members whose reports are missing; empty while anything else is missing, too."""
        is_waiting = self.coordinates is not None and self.held is not None and self.attempt is None
        if not is_waiting or self.committed or self._waits_for_absent():
            return []
        return [index for index, link in self.punctual.items() if link.held is None]

    def _waits_for_absent(self) -> bool:
        return self.coordinates is not None and self.coordinates.waits and bool(self.absent)

    def may_lack_averages(self, member: RoundMember) -> bool:
        """Whether a failed member may hold fewer averages than the others, or different ones."""
        return member.failed and not self.all_complete

    def is_too_late(self, member: RoundMember) -> bool:
        """Whether a member that comes back cannot finish the round with the others."""
        return (self.closed_early or self.has_filled_gaps) and self.may_lack_averages(member)

    def is_over_for(self, member: RoundMember) -> bool:
        """Whether there is nothing here for a member that calls: no result, or none that it may get."""
        is_lost = self.is_too_late(member) and self.quorum is None and not self.passes_on
        return is_lost or (self.committed and not self.closed_early)

    @property
    def some_may_return(self) -> bool:
        """Whether a failed member may come back: its connection is gone, but it has not left on purpose.

        It must then get the same result as the others. If the result cannot be passed on, it keeps its values.
        """
        missing = [self.members[index] for index in self.dead]
        return self.passes_on and any(m.seen_failing and not m.left and self.may_lack_averages(m) for m in missing)

    # --- what others say ----------------------------------------------------------------------------------------------

    def note_told(self, not_finite: Collection[int], left_out: Collection[int], reporter: int) -> None:
        """Note which members a report or a commit names: those with values that are not finite, and those left out.

        In ``not_finite``, this member and the reporter itself are ignored.
        """
        for member in self.members:
            member.told_not_finite |= member.index in not_finite and member.index not in (self.own.index, reporter)
            member.left_out |= member.index in left_out and member.is_sender

    def forgive(self) -> None:
        """Do not blame the others: to this late peer they look failed, although they only continued without it."""
        self.own.status = MemberStatus.LATE
        for member in self.failed:
            member.status, member.loss = MemberStatus.ACTIVE, None
        for member in self.members:
            member.seen_failing = member.cut_off = False
            member.withheld_at = None


def on(state: RoundState, event: Event) -> list[Action]:
    """Handle an event; returns the actions that follow, in order."""
    actions = _take(state, event)
    if state.coordinates is not None and not state.committed:
        actions += _continue(state)
    return actions


def _take(state: RoundState, event: Event) -> list[Action]:
    match event:
        case Lost(index, loss, is_hearsay):
            return _lose(state, index, loss, is_hearsay=is_hearsay)
        case PartsSent(index):
            state.members[index].needs_parts = False
        case AveragesCame(index):
            state.members[index].owes_averages = False
        case Complete(index):
            state.members[index].lacks_averages = False
        case Exchanged(held):
            state.held = held
        case Coordinate():
            return _begin(state, event)
        case Linked():
            return _link(state, event)
        case LinkBroke(index, link) if state.members[index].link is link and not state.committed:
            # So the round is not committed without it meanwhile. What it had to send will not come.
            link.held = None
            return _call_off(state, index)
        case LinkLost(index, link, loss) if state.members[index].link is link and not state.committed:
            state.members[index].link = None
            return _lose(state, index, loss)
        case Reported(index, link, held) if not state.members[index].late:
            link.held, link.obsolete = held, False
        case HasDelivered(link):
            link.delivered = True
        case Left(index):
            state.members[index].left = True
        case StatusKnown():
            return _judge(state, event)
        case GraceOver():
            return _close(state)
        case PatienceOver(busy):
            silent = Loss(LossCause.SILENT, "did not report in time")
            return [action for index in busy for action in _drop(state, index, silent)]
        case AttemptEnded(completed, held):
            return _end_attempt(state, held, completed=completed)
        case Confirmed(index):
            state.members[index].unconfirmed = False
    return []


def _lose(
    state: RoundState, index: int, loss: Loss, status: MemberStatus = MemberStatus.FAILED, *, is_hearsay: bool = False
) -> list[Action]:
    member = state.members[index]
    member.seen_failing |= not is_hearsay
    stop: list[Action] = [StopExchange(index, loss, is_new=not member.failed)]
    if not member.failed:
        member.loss = loss
    if not member.late:
        member.status = status
    return stop + (_call_off(state, index) if index in state.dead else [])


def _call_off(state: RoundState, index: int) -> list[Action]:
    return [CallOff()] if state.attempt is not None and index in state.attempt.links else []


def _leave_behind(state: RoundState, late: Collection[int]) -> list[Action]:
    """Continue without these members, which may get the result later."""
    state.closed_early |= bool(late)
    actions: list[Action] = []
    for index in sorted(late):
        actions += _lose(state, index, Loss(LossCause.LATE, "late"), MemberStatus.LATE)
        if (link := state.members[index].link) is not None:
            link.obsolete = True
            actions.append(TellMembers([link], Late()))
    return actions


def _drop(state: RoundState, index: int, loss: Loss) -> list[Action]:
    link, state.members[index].link = state.members[index].link, None
    cut: list[Action] = [] if link is None else [CutLink(link, is_replaced=False)]
    return cut + _lose(state, index, loss)


def _begin(state: RoundState, event: Coordinate) -> list[Action]:
    state.coordinates = event
    if event.waits:
        return []
    # The result of another coordinator may differ from what the members that it lost hold.
    state.has_filled_gaps = True
    lost = [index for index in state.punctual if state.may_lack_averages(state.members[index])]
    if state.passes_on:
        return _leave_behind(state, lost)
    loss = Loss(LossCause.OTHER, "was lost by the coordinator")
    return [action for index in sorted(lost) for action in _drop(state, index, loss)]


def _link(state: RoundState, event: Linked) -> list[Action]:
    member = state.members[event.index]
    state.missed |= event.missed
    actions: list[Action] = [] if member.link is None else [CutLink(member.link, is_replaced=True)]
    member.link = event.link
    if state.is_too_late(member) or event.is_late:
        actions += _leave_behind(state, [event.index])
    elif state.resigned:  # its connection broke before it was told
        actions.append(TellMembers([event.link], Resigns()))
    elif state.committed:  # while it was greeted
        member.unconfirmed = True
        actions.append(CommitRound({event.index: event.link}, keeps=False))
    elif known := state.dead & state._told:  # the others know of these
        actions.append(_tell_of_deaths(state, [event.link], known))
    return actions


def _tell_of_deaths(state: RoundState, links: Sequence[MemberLink], dead: Collection[int]) -> TellMembers:
    """Tell all members of deaths, so that none has to wait for a time limit to find out."""
    lost = {index: loss.cause for index in sorted(dead) if (loss := state.members[index].loss) is not None}
    return TellMembers(links, MembersLost(lost))


def _judge(state: RoundState, event: StatusKnown) -> list[Action]:
    member = state.members[event.index]
    if member.link is not None:
        return []
    is_over = event.status is Status.FINISHED
    if event.status is Status.LEFT or (is_over and event.never_began):
        member.left = True
        return _lose(state, event.index, Loss(LossCause.LEFT, "has left the round"))
    if is_over:
        if member.status is MemberStatus.ACTIVE:
            member.status = MemberStatus.GONE
    elif event.too_late:
        # It may be running the round, but it has not found this coordinator.
        return _lose(state, event.index, Loss(LossCause.LATE, "did not come to the coordinator in time"))
    return []


def _close(state: RoundState) -> list[Action]:
    """End the grace period: continue without the members that have not delivered their parts."""
    if state.coordinates is None or state.committed:
        return []
    if not state.has_delivered and state.has_successor:
        # The others would have to wait for this peer's own parts, so the next coordinator takes over.
        state.coordinates, state.resigned = None, True
        return [TellMembers([*state.punctual.values()], Resigns()), Resign()]
    if state.all_complete:
        return []
    return _leave_behind(state, {*state.absent, *(i for i, link in state.punctual.items() if not link.delivered)})


def _end_attempt(state: RoundState, held: Sequence[int], *, completed: bool) -> list[Action]:
    attempt, state.attempt, state.held = state.attempt, None, held
    if completed or attempt is None:
        return []
    for link in attempt.links.values():
        link.held, link.obsolete = None, True
    return [TellMembers([*state.punctual.values()], Restart())]


def _continue(state: RoundState) -> list[Action]:
    """The coordinator's next actions, after any event."""
    actions: list[Action] = []
    if news := state.dead - state._told:
        state._told |= news
        actions.append(_tell_of_deaths(state, [*state.punctual.values()], news))
    waits = state.coordinates is not None and state.coordinates.waits
    if waits and state.has_quorum and not state.grace_began:
        state.grace_began = True
        actions.append(StartGrace())
    punctual = state.punctual
    is_blocked = state.attempt is not None or state.held is None or state._waits_for_absent()
    if is_blocked or any(link.held is None for link in punctual.values()):
        return actions
    plan = _plan(state)
    if plan.missing:
        for link in punctual.values():
            link.held = None
        state.attempt, state.has_filled_gaps = Attempt(plan, punctual), True
        return [*actions, state.attempt]
    state.committed = True
    for index in punctual:
        state.members[index].unconfirmed = True
    # If it does not wait, another coordinator has committed, and knows which members may come back.
    state.closed_early |= waits and state.some_may_return
    return [*actions, CommitRound(punctual, keeps=state.closed_early)]


def _plan(state: RoundState) -> Plan:
    held = {index: link.held or [] for index, link in state.punctual.items()} | {state.own.index: state.held or []}
    living = {index: counts for index, counts in held.items() if state.members[index].is_sender}
    return make_plan(state.parts, living, state.own.index, may_reduce=not state.missed)
