"""One peer's search for one group, as a state machine without I/O: events and the time in, actions out.

:class:`GroupSearch` decides which peer to follow, which peers to invite, how long to wait, and when to start. The shell
(:mod:`~.matchmaking`) performs the actions and reports their results as further events. The same events at the same
times always give the same actions.

Peers are ordered by (promised time, peer id), and the smallest one leads. A peer only ever follows a smaller one, so
peers cannot wait for each other in a circle::

    LOOKS ── Ask ──> ASKS ── Accepts ──> FOLLOWS ── Answers (the group) ──> OVER
      ^                │ refused, failed            │ failed, disbanded        ^
      └────────────────┴────────────────────────────┘                          │
      └── complete, full, or promised time over ── Start ──────────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from shoal.averaging.control import Absence, AveragingMode, GroupInfo, StepControl
from shoal.averaging.groups.memory import NO_GROUP, RefusedPeer
from shoal.averaging.groups.settings import MatchmakingSettings, Trust, difference_of
from shoal.averaging.messages import Code, JoinRequest
from shoal.dht.validation import SHORT_LIFETIME_SECONDS
from shoal.p2p import PeerID

# A leader waits at most this long for a follower whose connection broke. Derived: time to notice, to dial twice and to
# ask again, on a line with round trips of 300 ms.
MAX_RETURN_SECONDS = 2.0
# It also waits at most this part of ``request_timeout`` (chosen): followers give up that long after its promise.
RETURN_SHARE = 2 / 3
# Backoff in seconds for a candidate that could not be reached; it doubles with each failure up to the second value.
# Chosen: peers that can reach the candidate follow it within a few round trips, and then name it again.
RETRY_PAUSE, MAX_RETRY_PAUSE = 0.5, 2.0
# After this many answers without a group, a candidate rests for ``min_matchmaking_time``. Chosen: an honest one has
# news two or three times (a new promise, another leader, a lost leader).
MOST_ANSWERS = 4
# A proven leader may start later than this peer's own promise, by this many times ``min_matchmaking_time`` (chosen): it
# may be in the middle of a batch.
PATIENCE_FACTOR = 4
# A peer that sees enough others for a group polls the table less often, by this factor (chosen): 16 peers then cost the
# table as much as 4.
PATIENCE_IN_COMPANY = 4
# The largest group without a target size (chosen): its description with short addresses fits into one message.
MAX_GROUP_SIZE = 4096
# The description of a group must fit into one message of 1 MiB (see ``shoal.net.transport``); a quarter is left free.
MAX_GROUP_BYTES = 3 * 2**18
# The most peers that a search remembers: a full group, and as many that will not be members.
MAX_CANDIDATES = 2 * MAX_GROUP_SIZE
# Former members are called only if the table has not shown enough peers after this many seconds (twice as many if it
# has shown some). Chosen: a healthy table shows most peers in the first lookups.
SECONDS_FOR_TABLE = 1.0
# The most former members that are called at once (chosen).
ASKED_AT_ONCE = 4
# A peer that cannot lead asks a former member without knowing its promised time. It assumes this many seconds from now
# (chosen), and asks again after that.
SUPPOSED_SECONDS = 2.0


class AskFailure(Enum):
    """How a call to a candidate failed."""

    NONSENSE = auto()
    """It sent something that is no valid answer."""
    UNTRUE = auto()
    """Its last answer was an impossible group."""
    SILENT = auto()
    BROKEN = auto()
    """The connection broke, perhaps not by its fault."""
    UNREACHABLE = auto()


class Outcall(Enum):
    """The invitation of this peer to another one."""

    NONE = auto()
    PENDING = auto()
    """No answer yet. The group waits a moment for one."""
    UNSEEN = auto()
    """No answer yet, from a peer that may not look for a group. The group does not wait for it."""
    UNREACHED = auto()
    """The invitation did not arrive, and may be sent again."""


class Offering(Enum):
    """The invitation of another peer to this one."""

    NONE = auto()
    OPEN = auto()
    """Its call is held until this peer has decided."""
    USED = auto()
    """This peer has asked to join on that call."""


class Cause(NamedTuple):
    """Why a peer does not lead this one: the kind of reason, and the peer's own words."""

    absence: Absence
    words: str = ""


@dataclass
class Follower:
    """A peer that this one leads."""

    request: JoinRequest
    nbytes: int
    """The size of its entry in the description of the group."""
    is_proven: bool
    """It has taken part in rounds, so it may reduce."""
    lost_at: float | None = None
    """When its connection broke. It is no member until it returns."""


@dataclass
class Candidate:
    """What a search knows of one other peer."""

    promised: float | None = None
    """DHT time by which it starts if it leads. ``None``: it is not known to look for a group."""
    is_guess: bool = False
    """The promise is a guess: this peer cannot lead, and asks a member of a recent group."""
    asked: float | None = None
    """Its promise when it last declined to lead. It is not asked again until it promises another time."""
    answers: int = 0
    """How often it has answered without a group. It could name another time, or another leader, each time."""
    failures: int = 0
    """Failed calls to it since it last accepted or called this peer."""
    rests_until: float = -math.inf
    """Backoff: others come first until then."""
    has_accepted: bool = False
    """It has accepted this peer. If the connection broke, it is asked again, even past its promise."""
    outcall: Outcall = Outcall.NONE
    invited: tuple[float, float] | None = None
    """This peer's promise in its last invitation, and when the first invitation with that promise was sent."""
    offer: Offering = Offering.NONE
    follower: Follower | None = None
    """It follows this peer, or did until its connection broke. Never while this peer follows another one."""
    refused: RefusedPeer | None = None
    """Why this peer refuses it, and whether others count it as an expected member. A refused peer is neither asked nor
    invited, and cannot follow."""
    is_outbid: bool = False
    """This peer has moved its own promise ahead of this unfit leader's."""
    cause: Cause | None = None
    """Why the last attempt to follow it failed."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost if this peer is forgotten."""
        is_busy = self.outcall in (Outcall.PENDING, Outcall.UNSEEN) or self.offer is not Offering.NONE
        return not is_busy and self.follower is None and self.refused is None

    def explain(self, absence: Absence, words: str = "") -> None:
        """Note why it does not lead this peer. The outcome of a later call does not replace its own words."""
        if words or self.cause is None or not self.cause.words:
            self.cause = Cause(absence, words)


@dataclass
class Asking:
    """This peer asks a leader, or follows it."""

    leader: PeerID
    promised: float
    """The promise with which the leader is asked."""
    is_guess: bool
    is_sent: bool = False
    """The leader has the request, or has to get it on an established connection."""
    starts_by: float | None = None
    """The time by which the leader starts; ``None``: it has not accepted yet."""
    accepted_at: float = math.inf

    @property
    def follows(self) -> bool:
        return self.starts_by is not None


class Terms(NamedTuple):
    """What the step currently wants."""

    expected: int | None
    awaited: Collection[PeerID] | None
    """The peers that ``expected`` counts, besides this one; ``None``: any."""
    keep_open: bool
    released_at: float
    """When ``keep_open`` ended; minus infinity: never."""
    scheduled: float
    deadline: float
    gathered_bytes: int

    @classmethod
    def of(cls, control: StepControl) -> Terms:
        released_at = -math.inf if control.released_at is None else control.released_at
        counted = control.expected_group_size, control.awaited, control.keep_open, released_at
        return cls(*counted, control.scheduled_time, control.deadline, len(control.data_for_gather))

    def promise(self, now: float, window: float) -> float:
        """The time by which this peer promises to start."""
        return min(max(self.scheduled, now + window), self.deadline, now + SHORT_LIFETIME_SECONDS)


# --- events -----------------------------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """Time has passed, or the terms have changed."""


class Seen(NamedTuple):
    """A lookup has shown these peers, with their promises, and those that have withdrawn."""

    found: Collection[tuple[PeerID, float]]
    gone: Collection[tuple[PeerID, float]] = ()


class Remembered(NamedTuple):
    """Members of recent groups. The first of them are called."""

    peers: Collection[PeerID]


class Joins(NamedTuple):
    """A peer joins, which :meth:`GroupSearch.refusal_of` does not refuse. It gets one last :class:`Reply`."""

    peer: PeerID
    request: JoinRequest
    nbytes: int


class Leaves(NamedTuple):
    """A follower leaves on purpose and will not come back. Compare :class:`Breaks`."""

    peer: PeerID


class Breaks(NamedTuple):
    """The connection of a follower broke."""

    peer: PeerID


class Offers(NamedTuple):
    """A peer offers to lead this one. Its call is held until :class:`Release`, or an :class:`Ask` uses it."""

    peer: PeerID
    promised: float


class OfferEnds(NamedTuple):
    """The call of an offer is over."""

    peer: PeerID


class InvitationEnds(NamedTuple):
    """An invitation has its answer, which may name a leader that the other peer follows instead."""

    peer: PeerID
    leader: PeerID | None = None
    promised: float = 0.0
    arrived: bool = True
    """``False``: no answer came. The time of the first call is kept, so the group does not wait a second time."""


class Sent(NamedTuple):
    """The candidate is connected and gets the request."""

    peer: PeerID


class Accepts(NamedTuple):
    """The candidate leads this peer, and starts by then."""

    peer: PeerID
    promised: float


class Answers(NamedTuple):
    """The candidate's last answer: a group, or that it does not lead this peer."""

    peer: PeerID
    code: int
    words: str = ""
    group: GroupInfo | None = None
    leader: PeerID | None = None
    """The leader that it names instead."""
    promised: float = 0.0


class Fails(NamedTuple):
    """The call to the candidate failed."""

    peer: PeerID
    failure: AskFailure


Event = (
    Tick
    | Seen
    | Remembered
    | Joins
    | Leaves
    | Breaks
    | Offers
    | OfferEnds
    | InvitationEnds
    | Sent
    | Accepts
    | Answers
    | Fails
)


# --- actions ----------------------------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """Ask a peer to lead this one. It ends with :class:`Answers` or :class:`Fails`."""

    peer: PeerID
    on_offer: bool
    """Whether to ask on the call of its offer."""


class StopAsking(NamedTuple):
    """End the call to the candidate, which has not accepted yet."""


class Invite(NamedTuple):
    """Call a peer. It ends with :class:`InvitationEnds`."""

    peer: PeerID


class Release(NamedTuple):
    """Release the call of an offer, and name the leader that this peer follows instead, if any."""

    peer: PeerID
    leader: PeerID | None = None
    promised: float = 0.0


class Reply(NamedTuple):
    """Answer a peer that asks to join."""

    peer: PeerID
    code: Code
    promised: float = 0.0
    leader: PeerID | None = None
    words: str = ""


class Declare(NamedTuple):
    """Publish this peer's promise in the table again."""


class Judge(NamedTuple):
    """Report whether a leader that accepted this peer started the group, and the seconds that this peer lost."""

    leader: PeerID
    seconds: float
    started: bool
    in_vain: bool = False
    """It started late although all members were peers that this one expected, so it waited in vain."""


class Waste(NamedTuple):
    """Report a leader that accepted this peer but did not start the group by this peer's own promised time."""

    leader: PeerID
    seconds: float


class Start(NamedTuple):
    """Start the group with these followers, and announce it to them."""

    followers: Mapping[PeerID, Follower]


class Adopt(NamedTuple):
    """The leader has started this group."""

    group: GroupInfo


Action = Ask | StopAsking | Invite | Release | Reply | Declare | Judge | Waste | Start | Adopt

# --- the machine ------------------------------------------------------------------------------------------------------

_ABSENCE_OF_CODE: dict[int, Absence] = {
    Code.NOT_LOOKING_FOR_GROUP: Absence.NOT_LOOKING,
    Code.SETTINGS_DIFFER: Absence.OTHER_SETTINGS,
    Code.OTHER_MODEL: Absence.OTHER_SETTINGS,
    Code.REFUSED: Absence.REFUSES,
    Code.GROUP_IS_FULL: Absence.FULL,
    Code.NOT_A_LEADER: Absence.FOLLOWS_ANOTHER,
    Code.GROUP_DISBANDED: Absence.DISBANDED,
}
_ABSENCE_OF_FAILURE = {
    AskFailure.SILENT: Absence.SILENT,
    AskFailure.BROKEN: Absence.BROKEN,
    AskFailure.UNREACHABLE: Absence.UNREACHABLE,
}


@dataclass
class GroupSearch:
    """The state of one search for a group."""

    own: PeerID
    settings: MatchmakingSettings
    trust: Trust
    """Whether there is time for others, and which of them are proven."""
    may_lead: Callable[[PeerID], bool]
    """Whether a peer is fit to lead. An unfit one is followed only if there is no other."""
    key: str
    """The key of the table under which this peer looks. It changes only while this peer neither leads nor follows."""
    terms: Terms
    """The terms at the last event."""
    promise: float
    """DHT time by which this peer starts if it leads. It moves back only to outbid others."""
    began_at: float
    peers: dict[PeerID, Candidate] = field(default_factory=dict)
    """All other peers that it has heard of, at most :data:`MAX_CANDIDATES`. Never this peer itself."""
    asking: Asking | None = None
    """At most one leader at a time."""
    leader_lost_at: float = -math.inf
    """When a leader was lost or did not answer. Its other followers then look for another leader."""
    starts_at: float = -math.inf
    """The earliest start of this peer's group, even if it has moved its promise ahead of this to outbid others."""
    is_over: bool = False
    """No action follows any more, except the answers from :meth:`end`."""

    def on(self, event: Event, now: float) -> list[Action]:
        """Handle an event at a DHT time that never decreases; returns the actions that follow, in order."""
        if self.is_over:
            return []
        actions = list(self._take_up(event, now))
        actions += self._decide(now)
        self._forget()
        return actions

    def _take_up(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case Seen(found, gone):
                self._note_candidates(found, gone)
                yield from self._invite(now)
            case Remembered(peers):
                yield from self._call_former_members(peers, now)
            case Joins(peer, request, nbytes):
                self._at(peer).follower = Follower(request, nbytes, self.trust.is_proven(peer))
                yield Reply(peer, Code.ACCEPTED, self.promise)
            case Leaves(peer):
                yield from self._let_leave(peer)
            case Breaks(peer):
                if (follower := self._at(peer).follower) is not None:
                    follower.lost_at = now
            case Offers(peer, promised):
                yield from self._note_offer(peer, promised)
            case OfferEnds(peer):
                self._at(peer).offer = Offering.NONE
            case InvitationEnds(peer, leader, promised, arrived):
                self._at(peer).outcall = Outcall.NONE if arrived else Outcall.UNREACHED
                if leader is not None:
                    self._note_candidate(leader, promised)
            case Sent(peer) if self._asks(peer) and self.asking is not None:
                self.asking.is_sent = True
            case Accepts(peer, promised) if self._asks(peer) and self.asking is not None:
                yield from self._follow(self.asking, promised, now)
            case Answers(peer) | Fails(peer) if self._asks(peer) and self.asking is not None:
                asking, self.asking = self.asking, None
                yield from self._judge(asking, event, now)
                yield from self._learn_from(asking, event, now)

    def _at(self, peer: PeerID) -> Candidate:
        return self.peers.setdefault(peer, Candidate())

    def _asks(self, peer: PeerID) -> bool:
        """Whether an event belongs to the current call. A call that this peer ended may already have had its answer."""
        return self.asking is not None and self.asking.leader == peer

    def _forget(self) -> None:
        """Drop the peers that were heard of first, unless they are still needed."""
        if len(self.peers) > MAX_CANDIDATES:
            idle = [peer for peer, each in self.peers.items() if each.is_idle and not self._asks(peer)]
            for peer in idle[: len(self.peers) - MAX_CANDIDATES]:
                del self.peers[peer]

    # --- which peers there are ----------------------------------------------------------------------------------------

    def looking(self) -> dict[PeerID, float]:
        """The peers that seem to look for a group, and their promises."""
        return {
            peer: each.promised
            for peer, each in self.peers.items()
            if each.promised is not None and each.refused is None
        }

    @property
    def followers(self) -> dict[PeerID, Follower]:
        """The peers that would be members if the group started now."""
        return {peer: f for peer, each in self.peers.items() if (f := each.follower) is not None and f.lost_at is None}

    def _pending(self) -> list[Candidate]:
        return [each for each in self.peers.values() if each.outcall is Outcall.PENDING]

    def refuse(self, peer: PeerID, refusal: RefusedPeer) -> None:
        """Refuse a peer for the rest of this search."""
        self._at(peer).refused = refusal

    def _note_candidate(self, peer: PeerID, promised: float) -> None:
        """Note that a peer looks for a group. A known candidate replaces guesses."""
        if peer == self.own:
            return
        for each in () if self.settings.leads else self.peers.values():  # a peer that leads never guesses
            if each.is_guess:
                each.promised, each.is_guess = None, False
        self._at(peer).promised = promised

    def _note_candidates(self, found: Collection[tuple[PeerID, float]], gone: Collection[tuple[PeerID, float]]) -> None:
        """Note the peers that the table shows, which may include this one, and those that have withdrawn.

        Peers whose groups have started had the earliest promises. Without the withdrawals, they would be asked first,
        one by one, and no peer would be invited meanwhile.
        """
        for peer, withdrawn_until in gone:
            each = self.peers.get(peer)
            if each is None or each.promised is None or each.offer is not Offering.NONE:
                continue
            if each.promised <= withdrawn_until:
                each.promised = None
                each.explain(Absence.NOT_LOOKING)
        for peer, promised in found:
            self._note_candidate(peer, promised)

    def sees_group(self, now: float) -> bool:
        """Whether this peer sees enough others for a full group."""
        target = self.settings.target_group_size
        return target is not None and sum(promised > now for promised in self.looking().values()) >= target

    def longest_pause(self, usual: float, now: float) -> float:
        """Seconds between two lookups in the table. A peer that sees a full group looks less often."""
        return PATIENCE_IN_COMPANY * usual if self.sees_group(now) else usual

    def may_move(self, key: str) -> bool:
        """Whether this peer may move to another key that has more peers: it must neither follow nor lead."""
        is_free = self.asking is None or not self.asking.follows
        return key != self.key and is_free and not self.followers and not self.is_over

    def _counts(self, peer: PeerID) -> bool:
        """Whether this peer expects another one. Others may join as well, but do not replace an expected one."""
        awaited = self.terms.awaited
        return awaited is None or peer == self.own or peer in awaited

    def _has_seen_enough(self, now: float) -> bool:
        """Whether this peer has seen as many peers that look for a group as it expects."""
        known = {peer for peer, promised in self.looking().items() if promised > now} | self.followers.keys()
        return self.terms.expected is not None and 1 + sum(map(self._counts, known)) >= self.terms.expected

    def absences(self, members: Collection[PeerID], now: float) -> dict[PeerID, Cause]:
        """Why peers that this one has seen or expected are not among these members.

        If the group is as large as expected, other groups form beside it. Then peers in other groups are left out.
        """
        wanted = self.settings.target_group_size if self.terms.expected is None else self.terms.expected
        found = {}
        for peer, each in self.peers.items():
            cause = None if peer in members else self._absence_of(each, now)
            if cause is not None and not (cause.absence.is_usual and len(members) >= (wanted or 0)):
                found[peer] = cause
        for peer in self.terms.awaited or ():
            if peer not in members and peer != self.own:
                found.setdefault(peer, Cause(Absence.DID_NOT_COME))
        return found

    def _absence_of(self, each: Candidate, now: float) -> Cause | None:
        if each.refused is not None:
            return None if each.promised is None else Cause(Absence.REFUSED)
        if each.follower is not None:
            return None if each.follower.lost_at is None else Cause(Absence.BROKEN)
        if each.cause is not None:
            return each.cause
        if each.outcall is Outcall.UNREACHED:
            return Cause(Absence.UNREACHABLE)
        if each.promised is None or each.is_guess:
            return None
        return Cause(Absence.BACKED_OFF if each.rests_until > now else Absence.DID_NOT_JOIN)

    # --- calling others -----------------------------------------------------------------------------------------------

    def _invite(self, now: float) -> Iterator[Action]:
        """Invite all peers that should follow this one and have not joined, as far as there is room.

        Only a peer that sees no other that should lead it does so.
        """
        follows = self.asking is not None and self.asking.follows
        if not self.settings.leads or follows or self.best_candidate(now) is not None:
            return
        room = (self.settings.target_group_size or MAX_GROUP_SIZE) - 1 - len(self.followers) - len(self._pending())
        fitting = sorted(
            (promised, peer.to_bytes(), peer)
            for peer, promised in self.looking().items()
            if promised > now and self._may_invite(self.peers[peer]) and self._leads_before(peer, promised)
        )
        for _, _, peer in fitting[: max(0, room)]:
            yield self._call(peer, Outcall.PENDING, now)

    def _may_invite(self, each: Candidate) -> bool:
        is_member = each.follower is not None and each.follower.lost_at is None
        is_news = each.invited is None or each.invited[0] != self.promise
        return not is_member and each.outcall is not Outcall.PENDING and (is_news or each.outcall is Outcall.UNREACHED)

    def _call(self, peer: PeerID, kind: Outcall, now: float) -> Invite:
        each = self._at(peer)
        each.outcall = kind
        if each.invited is None or each.invited[0] != self.promise:
            each.invited = self.promise, now
        return Invite(peer)

    def _call_former_members(self, peers: Collection[PeerID], now: float) -> Iterator[Action]:
        """Call some members of recent groups that this search has not seen, if members are still missing."""
        patience = SECONDS_FOR_TABLE * (2 if self.looking() else 1)
        follows = self.asking is not None and self.asking.follows
        if now < self.began_at + patience or follows or self._has_seen_enough(now):
            return
        # A peer that cannot lead asks one peer at a time, and first those that are known to look for a group.
        if not self.settings.leads and self.best_candidate(now) is not None:
            return
        for peer in [peer for peer in peers if self._may_call_unseen(peer, now)][:ASKED_AT_ONCE]:
            if self.settings.leads:
                yield self._call(peer, Outcall.UNSEEN, now)
            else:
                each = self._at(peer)
                each.promised, each.is_guess = now + SUPPOSED_SECONDS, True

    def _may_call_unseen(self, peer: PeerID, now: float) -> bool:
        each = self.peers.get(peer)
        if each is None:
            return peer != self.own
        is_news = each.invited is None or each.invited[0] != self.promise
        is_seen = each.promised is not None and each.promised > now
        return each.is_idle and not is_seen and is_news

    def _note_offer(self, peer: PeerID, promised: float) -> Iterator[Action]:
        """Take up a peer's offer to lead this one. The peer is alive, so its past failures no longer count."""
        self._note_candidate(peer, promised)
        each = self._at(peer)
        each.rests_until, each.failures, each.asked = -math.inf, 0, None
        if each.cause is not None and not each.cause.words:
            each.cause = None
        each.offer = Offering.OPEN
        if each.refused is not None:
            yield self._release(peer, None)
        elif self.asking is not None and self.asking.follows:
            yield self._release(peer, self.asking)
        elif self.settings.leads and self._leads_before(peer, promised):
            each.offer = Offering.NONE
            yield Release(peer, self.own, self.promise)

    def _release(self, peer: PeerID, asking: Asking | None) -> Release:
        """Release the call of an offer, and name the leader that this peer follows, unless it is the same one."""
        self._at(peer).offer = Offering.NONE
        if asking is None or asking.starts_by is None or asking.leader == peer:
            return Release(peer)
        return Release(peer, asking.leader, asking.starts_by)

    # --- which peer to follow -----------------------------------------------------------------------------------------

    def _leads_before(self, peer: PeerID, promised: float) -> bool:
        """Whether this peer comes before another one: the earlier promise leads, then the smaller id."""
        return (self.promise, self.own.to_bytes()) < (promised, peer.to_bytes())

    def best_candidate(self, now: float) -> PeerID | None:
        """The peer that this one should ask to lead it; ``None``: there is none."""
        possible = self._possible_leaders(now)
        usable = [each for each in possible if self.may_lead(each[2]) and self.trust.has_time_for(each[2])]
        # A peer that cannot lead has no choice, nor have two that refuse to follow each other and see no other peer.
        if not usable and (not self.settings.leads or self._is_left_with(possible)):
            usable = possible
        return min(usable)[2] if usable else None

    def _possible_leaders(self, now: float) -> list[tuple[float, bytes, PeerID]]:
        return [
            (promised, peer.to_bytes(), peer)
            for peer, promised in self.looking().items()
            if self._may_be_asked(peer, self.peers[peer], promised, now)
        ]

    def _may_be_asked(self, peer: PeerID, each: Candidate, promised: float, now: float) -> bool:
        if promised + self._patience_with(each) <= now or each.asked == promised or each.rests_until > now:
            return False
        if each.follower is not None and each.follower.lost_at is None:
            return False
        # A peer for which this one has no time could not join as a follower either.
        is_after = self._leads_before(peer, promised) or not self.trust.has_time_for(peer)
        return not (self.settings.leads and is_after)

    def _is_left_with(self, unfit: list[tuple[float, bytes, PeerID]]) -> bool:
        """Whether the only candidates are unfit leaders that this peer has outbid without success."""
        has_others = bool(self.followers) or any(map(self.may_lead, self.looking()))
        return not has_others and all(self.peers[peer].is_outbid for *_, peer in unfit)

    def _outbid_unfit_leaders(self, now: float) -> bool:
        """Promise an earlier time than leaders that this peer does not follow, so that they may follow this peer.

        The earliest promise still decides which peer leads, so peers cannot follow each other in a circle. Two peers
        that refuse to follow each other outbid each other once.
        """
        unfit = [each for each in self._possible_leaders(now) if not self.peers[each[2]].is_outbid]
        if not self.settings.leads or not unfit:
            return False
        for *_, peer in unfit:
            self.peers[peer].is_outbid = True
        first = min(unfit)[0]
        latest = first + self.settings.request_timeout * RETURN_SHARE
        self.starts_at = max(self.starts_at, min(self.promise, latest))
        self.promise = math.nextafter(min(self.promise, first), -math.inf)
        return True

    def _patience_with(self, each: Candidate) -> float:
        """How many seconds past its promised time a peer may still start."""
        if each.has_accepted:
            return self.settings.request_timeout
        return 0.0 if math.isinf(self.leader_lost_at) else self.return_seconds

    def _ask(self, peer: PeerID) -> Ask:
        each = self.peers[peer]
        assert each.promised is not None
        on_offer = each.offer is Offering.OPEN
        each.offer = Offering.USED if on_offer else each.offer
        self.asking = Asking(peer, each.promised, each.is_guess)
        return Ask(peer, on_offer)

    def _has_shorter_way(self, now: float) -> bool:
        """Whether the best candidate has called, while this peer is still trying to connect to it or to another one."""
        if self.asking is None or self.asking.is_sent:
            return False
        best = self.best_candidate(now)
        return best is not None and self.peers[best].offer is Offering.OPEN

    def _follow(self, asking: Asking, promised: float, now: float) -> Iterator[Action]:
        """Follow a leader that has accepted. It may promise any time, so the wait is limited."""
        more = PATIENCE_FACTOR * self.settings.min_matchmaking_time if self.trust.is_proven(asking.leader) else 0.0
        asking.starts_by, asking.accepted_at = min(promised, max(self.promise, now) + more), now
        for each in self.peers.values():
            each.has_accepted = False
        leader = self._at(asking.leader)
        leader.has_accepted, leader.failures, leader.answers, leader.cause = True, 0, 0, None
        yield from self._send_away(asking)
        for peer, each in list(self.peers.items()):
            if each.offer is Offering.OPEN:
                yield self._release(peer, asking)

    def _judge(self, asking: Asking, event: Event, now: float) -> Iterator[Action]:
        """Report whether a leader that had accepted started the group, and the seconds lost if it did not."""
        is_untrue = isinstance(event, Fails) and event.failure is AskFailure.UNTRUE  # refused for that elsewhere
        if not asking.follows or asking.starts_by is None or is_untrue:
            return
        lost = self.seconds_lost(asking.accepted_at, now)
        if isinstance(event, Answers):
            has_started, is_late = event.code == Code.GROUP_STARTS, now >= asking.starts_by and lost > 0
            # With this peer it has a group of two, but it may still wait for a third one that never comes.
            if has_started or (is_late and self.settings.min_group_size <= 2 and event.leader is None):
                yield Judge(asking.leader, lost, has_started, is_late and self._waited_for_nobody(asking, event))
            if event.group is not None:
                return
        elif isinstance(event, Fails) and event.failure is not AskFailure.NONSENSE and lost > 0:
            yield Judge(asking.leader, lost, started=False)
        # Waiting costs nothing before this peer's own promised time.
        if self.promise < now:
            yield Waste(asking.leader, now - asking.accepted_at)

    def _waited_for_nobody(self, asking: Asking, event: Answers) -> bool:
        """Whether all members of the group are peers that this one expected."""
        if event.group is None or self.terms.awaited is None:
            return False
        return {*self.terms.awaited, asking.leader, self.own} == {*event.group.peer_ids}

    def seconds_lost(self, since: float, now: float) -> float:
        """The seconds since ``since`` in which this peer could only wait. Before it is ready itself, it loses none.

        So a leader is not to blame if the group cannot start because its followers are in the middle of a batch.
        """
        return 0.0 if self.terms.keep_open else max(0.0, now - max(since, self.terms.released_at))

    def _learn_from(self, asking: Asking, event: Event, now: float) -> Iterator[Action]:
        """Note the end of a call to a candidate."""
        each = self._at(asking.leader)
        match event:
            case Fails(_, AskFailure.UNTRUE):
                self.refuse(asking.leader, RefusedPeer(NO_GROUP))
            case Fails(_, AskFailure.NONSENSE):
                each.asked = asking.promised
                each.explain(Absence.BROKEN)
            case Fails(_, failure):
                self._note_failure(each, asking, failure, now)
            case Answers(_, Code.GROUP_STARTS, _, GroupInfo() as group):
                self.is_over = True
                yield Adopt(group)
            case Answers():
                self._note_answer(each, asking, event, now)

    def _note_failure(self, each: Candidate, asking: Asking, failure: AskFailure, now: float) -> None:
        """Back off from a candidate that could not be reached or whose connection broke: others come first for a while.

        If the candidate is alive, those others follow it and redirect this peer to it. Two kinds of candidates are
        asked again at once: one that has accepted this peer, because it may be about to start, and one whose connection
        probably did not break by its fault.
        """
        each.explain(_ABSENCE_OF_FAILURE[failure])
        if asking.follows or failure is AskFailure.SILENT:
            self.leader_lost_at = now
        each.failures += 1
        if each.failures == 1 and (each.has_accepted or failure is AskFailure.BROKEN):
            return
        pause = min(RETRY_PAUSE * 2 ** (each.failures - 1), MAX_RETRY_PAUSE)
        each.rests_until = now + (MAX_RETRY_PAUSE if failure is AskFailure.SILENT else pause)

    def _note_answer(self, each: Candidate, asking: Asking, answer: Answers, now: float) -> None:
        """Note an answer without a group. The candidate is not asked again as long as it promises the same time."""
        each.asked = asking.promised
        each.answers += 1
        if (absence := _ABSENCE_OF_CODE.get(answer.code)) is not None:
            each.explain(absence, answer.words)
        if each.answers % MOST_ANSWERS == 0:
            each.rests_until = now + self.settings.min_matchmaking_time
        if answer.code == Code.NOT_LOOKING_FOR_GROUP:
            each.promised = None
        if answer.leader is not None and answer.leader != self.own:
            named = self._at(answer.leader)
            # The peer that names it follows it, so it can probably be reached after all.
            is_silent = named.cause is not None and named.cause.absence is Absence.SILENT
            if not is_silent and named.answers < MOST_ANSWERS:
                named.rests_until = -math.inf
            self._note_candidate(answer.leader, answer.promised)
        elif answer.code == Code.BAD_EXPIRATION_TIME:
            self._note_candidate(asking.leader, answer.promised)

    # --- leading ------------------------------------------------------------------------------------------------------

    def refusal_of(self, peer: PeerID, request: JoinRequest, nbytes: int) -> Reply | None:
        """Why a peer cannot join now; ``None``: it can.

        Args:
            peer: the peer that asks to join.
            request: its request.
            nbytes: the size of its entry in the description of the group.
        """
        each = self.peers.get(peer, Candidate())
        if not self.settings.leads:
            return Reply(peer, Code.PROTOCOL_VIOLATION)
        if self.is_over or request.group_key != self.key:
            return Reply(peer, Code.NOT_LOOKING_FOR_GROUP)
        if each.refused is not None:
            return Reply(peer, Code.REFUSED, words=each.refused.reason)
        if difference := difference_of(self.settings.agreed, request.settings):
            return Reply(peer, Code.SETTINGS_DIFFER, words=difference)
        if self.asking is not None and self.asking.starts_by is not None:
            return Reply(peer, Code.NOT_A_LEADER, self.asking.starts_by, self.asking.leader)
        if self.promise > request.expiration:
            return Reply(peer, Code.BAD_EXPIRATION_TIME, self.promise)
        if peer == self.own or (each.follower is not None and each.follower.lost_at is None):
            return Reply(peer, Code.DUPLICATE_PEER_ID)
        if not self._has_room_for(peer, nbytes, self.followers):
            return Reply(peer, Code.GROUP_IS_FULL)
        return None

    def _has_room_for(self, peer: PeerID, nbytes: int, followers: Mapping[PeerID, Follower]) -> bool:
        """Whether there is room, by the number of members and by the size of the group's description."""
        if not self.trust.has_time_for(peer) or 1 + len(followers) >= self._most_members():
            return False
        taken = self.terms.gathered_bytes + sum(follower.nbytes for follower in followers.values())
        return taken + nbytes <= MAX_GROUP_BYTES

    def _most_members(self) -> int:
        return self.settings.target_group_size or MAX_GROUP_SIZE

    def _let_leave(self, peer: PeerID) -> Iterator[Action]:
        each = self._at(peer)
        if each.follower is not None and each.follower.lost_at is None:
            each.follower = None
            each.explain(Absence.LEFT)
            yield Reply(peer, Code.GROUP_DISBANDED)

    def _send_away(self, asking: Asking | None = None) -> Iterator[Action]:
        """Release all followers, also those whose connection broke, and name the new leader to them if one is given."""
        for peer, each in self.peers.items():
            follower, each.follower = each.follower, None
            if follower is not None and follower.lost_at is None:
                if asking is None or asking.starts_by is None:
                    yield Reply(peer, Code.GROUP_DISBANDED)
                else:
                    yield Reply(peer, Code.GROUP_DISBANDED, asking.starts_by, asking.leader)

    def is_complete(self) -> bool:
        """Whether all members that this peer expects are here. Auxiliaries do not count.

        Only a leader that expects no number itself, such as an auxiliary, waits for the number that its followers
        expect; otherwise any of them could make the others wait. A refused peer that looks for a group counts as
        present: the others expect it, but it will never join.
        """
        followers = self.followers
        modes = {self.own: self.settings.mode, **{peer: f.request.mode for peer, f in followers.items()}}
        here = [peer for peer, mode in modes.items() if mode != AveragingMode.AUX]
        here += [peer for peer, each in self.peers.items() if each.refused and each.refused.counts and each.promised]
        others = (f.request.expected_group_size for f in followers.values())
        wanted = self.terms.expected or max((expected for expected in others if expected is not None), default=None)
        return wanted is not None and sum(map(self._counts, here)) >= wanted

    @property
    def return_seconds(self) -> float:
        """The seconds that this peer waits for followers whose connection broke."""
        return min(MAX_RETURN_SECONDS, self.settings.request_timeout * RETURN_SHARE)

    def start_time(self) -> float:
        """When this peer starts with the members that it has: as promised, or a little later if others may still join.

        It waits for followers whose connection broke, for peers that it has just invited, and, if it lost its own
        leader, for that leader's other followers. When ``keep_open`` ends, peers that learn of this get a moment to
        join, too.
        """
        called = [each.invited[1] for each in self._pending() if each.invited is not None]
        followers = [each.follower for each in self.peers.values() if each.follower is not None]
        losses = [follower.lost_at for follower in followers if follower.lost_at is not None]
        last_loss = min(max([self.leader_lost_at, *called, *losses]), self.promise)
        return max(self.promise, self.starts_at, max(self.terms.released_at, last_loss) + self.return_seconds)

    def may_start(self, now: float) -> bool:
        """Whether this peer may start its group now, as the leader."""
        size = 1 + len(self.followers)
        if not self.settings.leads or size < self.settings.min_group_size:
            return False
        is_full = self.settings.target_group_size is not None and size >= self.settings.target_group_size
        return is_full or self.is_complete() or (not self.terms.keep_open and now >= self.start_time())

    def _start(self, now: float) -> Start:
        """Start with all followers, and with those whose connections have just broken if there is room for them."""
        members = self.followers
        for peer, each in self.peers.items():
            follower, each.follower = each.follower, None
            if follower is None or follower.lost_at is None:
                continue
            if follower.lost_at + self.return_seconds > now and self._has_room_for(peer, follower.nbytes, members):
                members[peer] = follower
            else:
                each.explain(Absence.BROKEN)
        self.is_over = True
        return Start(members)

    # --- what to do now -----------------------------------------------------------------------------------------------

    def _decide(self, now: float) -> Iterator[Action]:
        if self.is_over or (self.asking is not None and self.asking.follows):
            return
        may_start = self.may_start(now)
        if self.asking is not None:
            if not may_start and not self._has_shorter_way(now):
                return
            self.asking = None
            yield StopAsking()
        if may_start:
            yield self._start(now)
            return
        candidate = self.best_candidate(now)
        if candidate is None and self._outbid_unfit_leaders(now):
            yield from self._invite(now)
            candidate = self.best_candidate(now)
        if candidate is not None:
            yield self._ask(candidate)
        elif self.settings.leads and now >= self.start_time():
            yield from self._promise_anew(now)

    def _promise_anew(self, now: float) -> Iterator[Action]:
        """Promise a new time, because too few peers joined by the old one."""
        yield from self._send_away()
        self.promise = max(self.promise, self.terms.promise(now, self.settings.min_matchmaking_time))
        yield Declare()

    def next_moment(self, now: float) -> float | None:
        """The next time at which there is something to do without any event; ``None``: never."""
        if self.is_over or (self.asking is not None and self.asking.follows):
            return None
        moments = [each.rests_until for each in self.peers.values() if each.rests_until > now]
        if self.settings.leads and (self.asking is None or self.start_time() > now):
            moments.append(self.start_time())
        return min(moments) if moments else None

    def end(self) -> list[Action]:
        """End the search, with a group or without. Returns the actions that answer all peers that wait for this one."""
        self.is_over, self.asking = True, None
        open_offers = [peer for peer, each in self.peers.items() if each.offer is Offering.OPEN]
        return [*self._send_away(), *(self._release(peer, None) for peer in open_offers)]
