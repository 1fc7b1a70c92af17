"""One peer's search for one group: what it knows about other peers, and what follows from that.

The search answers the questions of :mod:`~.matchmaking`: which peer to follow, which peers to invite, how long to wait
for a follower, and when to start. It makes no calls itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.averaging.control import AveragingMode, GroupInfo, StepControl
from shoal.averaging.groups.settings import MatchmakingSettings as MatchmakingSettings
from shoal.averaging.groups.settings import Trust as Trust
from shoal.averaging.majorities import largest_but_for_liars
from shoal.averaging.messages import Code, JoinReply, JoinRequest
from shoal.base.clock import get_dht_time
from shoal.errors import InterruptedDialError, StreamClosedError
from shoal.net.transport import MOST
from shoal.p2p import Call, PeerID

# A leader waits at most so long for a follower whose connection broke: time to notice, connect and ask again.
MAX_RETURN_SECONDS = 2.0
# It also waits no longer than this part of ``request_timeout``, because followers give up that long after its promise.
RETURN_SHARE = 2 / 3
# A candidate that could not be reached is left alone for so many seconds; twice as long after each further failure.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 2.0
# A candidate that has given so many answers within ``min_matchmaking_time``, and led nobody, is left alone for as long.
MOST_ANSWERS = 4
# A proven leader may start later than this peer has promised itself, by so many times ``min_matchmaking_time``.
PATIENCE_FACTOR = 4
# A peer that sees enough others for a group looks for more of them less often, by this factor.
PATIENCE_IN_COMPANY = 4
# The largest group without a target size.
MAX_GROUP_SIZE = 4096


@dataclass
class Follower:
    """A peer that this one leads, and the future for its answer."""

    request: JoinRequest
    outcome: asyncio.Future[JoinReply]
    expected_group_size: int | None
    """The size of group that it expects, by its latest message."""
    nbytes: int
    """The bytes that it takes in the description of the group."""
    is_proven: bool = True
    """See :class:`Trust`."""
    has_left: bool = False
    """It has left on purpose. Unlike a follower whose connection broke, it will not come back."""


@dataclass
class Offer:
    """The call of a peer that offers to lead this one. It is held until this peer has decided."""

    call: Call
    outcome: asyncio.Future[tuple[PeerID, float] | None]
    """The leader that this peer follows instead, and when that one starts; ``None``: nothing more to say."""
    is_used: bool = False

    def close(self, better: tuple[PeerID, float] | None) -> None:
        """Release the call, with the leader to name instead."""
        if not self.outcome.done():
            self.outcome.set_result(better)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Call]:
        """Use the call to ask to be led. Leaving the block before both sides have ended cuts the connection."""
        self.is_used = True
        try:
            yield self.call
        finally:
            if not self.call.clean:
                self.call.connection.abort()
            self.close(None)


@dataclass
class GroupSearch:
    """The state of one search for a group."""

    own: PeerID
    settings: MatchmakingSettings
    control: StepControl
    key: str
    expiration: float
    """This peer's promised time: the DHT time at which it starts at the latest, if it leads."""
    group: asyncio.Future[GroupInfo]
    number: int = 0
    """Of this peer's searches, in order."""
    began_at: float = field(default_factory=get_dht_time)
    followers: dict[PeerID, Follower] = field(default_factory=dict)
    leader: tuple[PeerID, float] | None = None
    """The peer that this one follows at the moment, and the time at which it will start."""
    leader_lost_at: float = -math.inf
    """When a leader was lost or did not answer. Its other followers are going to look for another leader then."""
    accepted_by: PeerID | None = None
    """The peer that has accepted this one last. If the connection broke, it is asked again, even past its promise."""
    candidates: dict[PeerID, float] = field(default_factory=dict)
    """Peers that look for a group, and their promised times."""
    supposed: dict[PeerID, float] = field(default_factory=dict)
    """Candidates whose promised time is only a guess; they may not look for a group at all."""
    spent: dict[PeerID, float] = field(default_factory=dict)
    """By candidate: the promised time with which it was asked in vain."""
    is_outdated: bool = False
    """A candidate has been asked that no longer looks for a group: the table may show which others are gone, too."""
    failures: dict[PeerID, int] = field(default_factory=dict)
    """By candidate: how often the connection to it failed."""
    resting: dict[PeerID, float] = field(default_factory=dict)
    """By candidate that could not be reached: the time until which others come first."""
    answers: dict[PeerID, deque[float]] = field(default_factory=dict)
    """By candidate: when it gave its last answers. It could name another time, or another leader, each time."""
    silent: dict[PeerID, None] = field(default_factory=dict)
    """Candidates that did not answer in time."""
    invited: dict[PeerID, tuple[float, float]] = field(default_factory=dict)
    """By invited peer: this peer's promised time in the invitation, and the time of the first call."""
    uninvited: dict[PeerID, None] = field(default_factory=dict)
    """Peers that the invitation did not reach."""
    pending: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)
    """Invitations without an answer, to peers that are known to look for a group."""
    unseen: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)
    """Invitations without an answer, to peers that may not look for a group. Nobody waits for these."""
    offers: dict[PeerID, Offer] = field(default_factory=dict)
    """By peer: its invitation to this one."""
    asked: Call | None = None
    """The call on which this peer has asked a candidate to lead it."""
    told_expectation: int | None = None
    """The expected size of group that this candidate was told last."""
    lost: dict[PeerID, tuple[float, Follower]] = field(default_factory=dict)
    """Followers whose connection broke, and when."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By peer that has refused this one: its reason."""
    refused: Mapping[PeerID, bool] = field(default_factory=dict)
    """Peers that this one refuses, and whether others count each of them as an expected member."""
    turned_away: dict[PeerID, None] = field(default_factory=dict)
    """Refused peers that look for a group and that others count as expected members."""
    trust: Trust = field(default_factory=Trust)
    declared: asyncio.Event = field(default_factory=asyncio.Event)
    redeclare: asyncio.Event = field(default_factory=asyncio.Event)
    may_lead: Callable[[PeerID], bool] = lambda peer: True
    """Tells whether this peer is willing to follow another one."""
    outbid: dict[PeerID, None] = field(default_factory=dict)
    """Peers that this one does not follow, and before whose promised time it has moved its own."""
    starts_at: float = -math.inf
    """This peer does not start earlier, although it has moved its promised time forward to outbid others."""
    declared_until: float = -math.inf
    """The latest promised time of this peer that the table shows to others."""

    def note_candidate(self, peer: PeerID, expiration: float) -> None:
        """Note that a peer looks for a group."""
        for other, promised in self.supposed.items():
            if self.candidates.get(other) == promised:  # a known candidate is better than guesses
                del self.candidates[other]
        self.supposed.clear()
        if peer in self.refused:
            self.turn_away(peer)
        elif self.candidates.get(peer) != expiration:
            self.candidates[peer] = expiration
            self.control.changed.set()

    def note_candidates(self, found: Iterable[tuple[PeerID, float]], gone: Iterable[tuple[PeerID, float]] = ()) -> None:
        """Note the peers that the table shows, which may include this one, and those that have withdrawn.

        Those whose groups have started have promised the earliest times. They would be asked first, one by one, and
        nobody would be invited meanwhile.
        """
        for peer, withdrawn_until in gone:
            if peer not in self.offers and self.candidates.get(peer, math.inf) <= withdrawn_until:
                del self.candidates[peer]
                self.control.changed.set()
        for peer, expiration in found:
            if peer != self.own:
                self.note_candidate(peer, expiration)
        self.is_outdated = False

    def sees_group(self) -> bool:
        """Whether this peer sees enough others for a full group."""
        target, now = self.settings.target_group_size, get_dht_time()
        return target is not None and sum(promised > now for promised in self.candidates.values()) >= target

    def longest_pause(self, usual: float) -> float:
        """Seconds between two looks at the table. A peer that sees a full group need not look for more so soon."""
        return PATIENCE_IN_COMPANY * usual if self.sees_group() and not self.is_outdated else usual

    def move_to(self, key: str) -> None:
        """Look under another key that has more peers, unless this peer already follows or leads others."""
        if key != self.key and self.leader is None and not self.followers:
            self.key = key
            self.redeclare.set()
            self.control.changed.set()

    def turn_away(self, peer: PeerID) -> None:
        """Count a refused peer as present, so that the group does not wait for one member that will never join."""
        if self.refused[peer] and peer not in self.turned_away:
            self.turned_away[peer] = None
            self.control.changed.set()

    @property
    def group_bytes(self) -> int:
        """The bytes that the description of the group takes so far."""
        return len(self.control.data_for_gather) + sum(follower.nbytes for follower in self.followers.values())

    def is_complete(self) -> bool:
        """Whether as many members as anybody in this group expects are here, without those that only help."""
        modes = {self.own: self.settings.mode, **{peer: f.request.mode for peer, f in self.followers.items()}}
        here = [peer for peer, mode in modes.items() if mode != AveragingMode.AUX] + list(self.turned_away)
        own = self.control.expected_group_size
        others = [f.expected_group_size for f in self.followers.values() if f.is_proven]
        known = [number for number in others if number is not None]
        if own is None and not known:
            return False
        # Of five members one may expect others that do not exist.
        wanted = largest_but_for_liars([*known, own or 0])
        return sum(map(self._counts, here)) >= (own or 0) and len(here) >= wanted

    def _counts(self, peer: PeerID) -> bool:
        """Whether a peer is one of those that this one expects. Others may come as well, but not in their place."""
        awaited = self.control.awaited
        return awaited is None or peer == self.own or peer in awaited

    def seconds_lost(self, since: float) -> float:
        """For how many seconds since this DHT time this peer could only wait. Until it is ready itself, it loses none.

        So a leader is not to blame if its followers are in the middle of a batch, too, and the group cannot start.
        """
        if self.control.keep_open:
            return 0.0
        return max(0.0, get_dht_time() - max(since, self.control.released_at or -math.inf))

    def note_loss(self, peer: PeerID, follower: Follower) -> None:
        """Note that a follower is gone, perhaps by chance. Those that have had their time to return are forgotten."""
        now = get_dht_time()
        self.lost = {p: (at, f) for p, (at, f) in self.lost.items() if at + self.return_seconds > now}
        if not follower.has_left:
            self.lost[peer] = (now, follower)

    # --- which peers to invite ----------------------------------------------------------------------------------------

    def whom_to_invite(self) -> list[PeerID]:
        """Peers that should follow this one and have not joined, if this peer sees no other that should lead it."""
        if not self.settings.leads or self.leader is not None or self.best_candidate() is not None:
            return []
        now = get_dht_time()
        room = (self.settings.target_group_size or MAX_GROUP_SIZE) - 1 - len(self.followers) - len(self.pending)
        fitting = sorted(
            (expiration, peer.to_bytes(), peer)
            for peer, expiration in self.candidates.items()
            if expiration > now
            and peer not in self.followers
            and peer not in self.pending
            and (self._has_not_been_invited(peer) or peer in self.uninvited)
            and self.leads_before(peer, expiration)
        )
        return [peer for _, _, peer in fitting[: max(0, room)]]

    def has_seen_enough(self) -> bool:
        """Whether this peer has seen as many peers that look for a group as it expects."""
        expected, now = self.control.expected_group_size, get_dht_time()
        known = {peer for peer, promised in self.candidates.items() if promised > now} | self.followers.keys()
        return expected is not None and 1 + sum(map(self._counts, known)) >= expected

    def may_ask_unseen(self, peer: PeerID) -> bool:
        """Whether this search may call a peer that the table does not show: it has not done so yet."""
        if peer in self.refused or peer in self.followers or peer in self.offers or peer in self.unseen:
            return False
        if self.candidates.get(peer, -math.inf) > get_dht_time():
            return False
        return self._has_not_been_invited(peer)

    def suppose_candidate(self, peer: PeerID, expiration: float) -> None:
        """Make a peer a candidate on a guess: it may look for a group."""
        self.candidates[peer] = self.supposed[peer] = expiration
        self.control.changed.set()

    def _has_not_been_invited(self, peer: PeerID) -> bool:
        return peer not in self.invited or self.invited[peer][0] != self.expiration

    def note_invitation(self, peer: PeerID, task: asyncio.Task[None], *, is_seen: bool) -> None:
        """Note that a peer is being invited."""
        (self.pending if is_seen else self.unseen)[peer] = task
        self.uninvited.pop(peer, None)
        if self._has_not_been_invited(peer):
            self.invited[peer] = (self.expiration, get_dht_time())

    def end_invitation(self, peer: PeerID) -> None:
        """Note that an invitation has its answer, or will get none."""
        self.pending.pop(peer, None)
        self.unseen.pop(peer, None)

    def allow_invitation(self, peer: PeerID) -> None:
        """Let a peer be invited again that was not reached. The group does not wait for it a second time."""
        self.uninvited[peer] = None

    # --- offers of other peers ----------------------------------------------------------------------------------------

    def add_offer(self, peer: PeerID, offer: Offer, expiration: float) -> None:
        """Take up a peer's offer to lead this one."""
        previous = self.offers.get(peer)
        if previous is not None and previous.is_used:
            offer.close(None)
            return
        if previous is not None:
            previous.close(None)
        self.offers[peer] = offer
        # The peer is there after all, so its past failures do not count.
        for past in (self.resting, self.failures, self.silent, self.spent):
            past.pop(peer, None)
        self.note_candidate(peer, expiration)
        self.control.changed.set()
        if self.settings.leads and self.leads_before(peer, expiration):
            offer.close((self.own, self.expiration) if self.leader is None else self.leader)
        self._decline()

    def _decline(self) -> None:
        """Tell peers whose offers wait in vain which leader this peer follows."""
        for peer, offer in self.offers.items():
            if self.leader is not None and not offer.is_used:
                offer.close(None if peer == self.leader[0] else self.leader)

    def has_shorter_way(self) -> bool:
        """Whether the best candidate has called, while this peer is still trying to connect to it or to another one."""
        best = self.best_candidate() if self.asked is None else None
        offer = None if best is None else self.offers.get(best)
        return offer is not None and not offer.is_used and not offer.outcome.done()

    def request(self) -> JoinRequest:
        """This peer's request to a leader."""
        control, settings = self.control, self.settings
        return JoinRequest(
            group_key=self.key,
            settings=settings.agreed,
            expiration=self.expiration if settings.leads else min(control.deadline, MOST),
            mode=int(settings.mode),
            gathered=control.data_for_gather,
            bandwidth=settings.bandwidth,
            reach=int(settings.reach),
            relay_rate=settings.relay_rate,
            expected_group_size=control.expected_group_size,
            search=self.number,
        )

    # --- which peer to ask --------------------------------------------------------------------------------------------

    def leads_before(self, peer: PeerID, expiration: float) -> bool:
        """Whether this peer comes before another one: the earlier promised time leads, then the smaller id."""
        return (self.expiration, self.own.to_bytes()) < (expiration, peer.to_bytes())

    def has_time_for(self, peer: PeerID) -> bool:
        """Whether a peer may lead this one or join it, see :class:`Trust`."""
        return self.trust.has_time_for is None or self.trust.has_time_for(peer)

    def note_end_of_lead(self, leader: PeerID, reply: JoinReply | None, accepted_at: float | None) -> None:
        """Count the time as wasted if a leader had accepted this peer but has not started the group.

        It counts only once this peer's own promised time is over.
        """
        has_started, now = reply is not None and reply.group is not None, get_dht_time()
        if accepted_at is not None and not has_started and self.expiration < now and self.trust.note_waste is not None:
            self.trust.note_waste(leader, now - accepted_at)

    def _is_proven(self, peer: PeerID) -> bool:
        return self.trust.is_proven is None or self.trust.is_proven(peer)

    def best_candidate(self) -> PeerID | None:
        """The peer that this one should ask to lead it; ``None``: there is none."""
        possible = self._possible_leaders()
        usable = [each for each in possible if self.may_lead(each[2]) and self.has_time_for(each[2])]
        # A peer that cannot lead has no choice. Nor have two peers that refuse to follow each other and see no others.
        if not usable and (not self.settings.leads or self._is_left_with(possible)):
            usable = possible
        return min(usable)[2] if usable else None

    def _possible_leaders(self) -> list[tuple[float, bytes, PeerID]]:
        now = get_dht_time()
        return [
            (expiration, peer.to_bytes(), peer)
            for peer, expiration in self.candidates.items()
            if expiration + self._patience_with(peer) > now
            and self.spent.get(peer) != expiration
            and self.resting.get(peer, now) <= now
            and peer not in self.followers
            # If this peer has no time for it, it could not join as a follower either.
            and not (self.settings.leads and (self.leads_before(peer, expiration) or not self.has_time_for(peer)))
        ]

    def _is_left_with(self, unfit: list[tuple[float, bytes, PeerID]]) -> bool:
        """Whether there are no others than unfit leaders that this peer has outbid in vain."""
        has_others = bool(self.followers) or any(map(self.may_lead, self.candidates))
        return not has_others and all(peer in self.outbid for *_, peer in unfit)

    def go_before_unfit_leaders(self) -> bool:
        """Outbid leaders that this peer does not follow: promise an earlier time, so that they may follow this peer.

        The earliest promised time still decides which peer leads, so no ring of peers that follow each other can form.
        Two peers that refuse to follow each other outbid each other once.
        """
        unfit = [each for each in self._possible_leaders() if each[2] not in self.outbid]
        if not self.settings.leads or self.leader is not None or not unfit:
            return False
        self.outbid.update((peer, None) for *_, peer in unfit)
        latest = min(expiration for expiration, *_ in unfit) + self.settings.request_timeout * RETURN_SHARE
        self.starts_at = max(self.starts_at, min(self.expiration, latest))
        self.expiration = math.nextafter(min(self.expiration, *(expiration for expiration, *_ in unfit)), -math.inf)
        return True

    def _patience_with(self, peer: PeerID) -> float:
        """How many seconds past its promised time a peer may still start."""
        if peer == self.accepted_by:
            return self.settings.request_timeout
        return 0.0 if math.isinf(self.leader_lost_at) else self.return_seconds

    def note_failure(self, peer: PeerID, error: Exception) -> None:
        """Note that a candidate could not be reached or its connection broke: others come first for a while.

        If the candidate lives, these others follow it and send this peer back to it. Two kinds of candidates are asked
        again at once: one that has accepted this peer, because it may be about to start, and one whose connection seems
        to have broken by chance.
        """
        is_silent = isinstance(error, TimeoutError)
        if self.leader is not None or is_silent:
            self.leader_lost_at = get_dht_time()
        is_worth_another_try = peer == self.accepted_by or isinstance(error, (StreamClosedError, InterruptedDialError))
        if is_worth_another_try and peer not in self.failures:
            self.failures[peer] = 0
            return
        self.failures[peer] = failures = self.failures.get(peer, 0) + 1
        pause = min(RETRY_PAUSE * 2 ** (failures - 1), MAX_RETRY_PAUSE)
        if is_silent:
            self.silent[peer], pause = None, MAX_RETRY_PAUSE
        self.resting[peer] = get_dht_time() + pause

    def note_redirection(self, leader: PeerID, expiration: float) -> None:
        """Note a leader that another peer has named. That peer follows it, so it can probably be reached after all."""
        if leader not in self.silent and not self._talks_too_much(leader):
            self.resting.pop(leader, None)
        self.note_candidate(leader, expiration)

    def note_answer(self, peer: PeerID, promised: float, code: int) -> None:
        """Note a candidate's last answer. It is not asked again as long as it promises the same time."""
        self.spent[peer] = promised
        self.answers.setdefault(peer, deque(maxlen=MOST_ANSWERS)).append(get_dht_time())
        if self._talks_too_much(peer):
            self.resting[peer] = get_dht_time() + self.settings.min_matchmaking_time
        self.is_outdated = self.is_outdated or code == Code.NOT_LOOKING_FOR_GROUP

    def _talks_too_much(self, peer: PeerID) -> bool:
        times, since = self.answers.get(peer), get_dht_time() - self.settings.min_matchmaking_time
        return times is not None and len(times) == MOST_ANSWERS and times[0] > since

    def note_acceptance(self, peer: PeerID, expiration: float) -> float:
        """Follow a leader that has accepted this peer. Returns the time until which this peer waits for the start.

        The leader may have promised any time, so there is a limit.
        """
        more = PATIENCE_FACTOR * self.settings.min_matchmaking_time if self._is_proven(peer) else 0.0
        expiration = min(expiration, max(self.expiration, get_dht_time()) + more)
        self.leader, self.accepted_by = (peer, expiration), peer
        self.failures.pop(peer, None)
        self._decline()
        return expiration

    # --- when to start ------------------------------------------------------------------------------------------------

    @property
    def return_seconds(self) -> float:
        """How many seconds this peer waits for followers whose connection broke."""
        return min(MAX_RETURN_SECONDS, self.settings.request_timeout * RETURN_SHARE)

    def start_time(self) -> float:
        """When this peer starts with the members that it has: as promised, or a little later if others may be coming.

        These others are followers whose connection broke, peers that were invited a moment ago, and, if this peer's own
        leader was lost, the other followers of that leader. When a group is not kept open any more, peers that learn of
        this get a moment to join, too.
        """
        called = [self.invited[peer][1] for peer in self.pending]
        last_loss = max([self.leader_lost_at, *called, *(lost_at for lost_at, _ in self.lost.values())])
        released_at = -math.inf if self.control.released_at is None else self.control.released_at
        last_call = released_at + self.return_seconds
        return max(self.expiration, self.starts_at, last_call, min(last_loss, self.expiration) + self.return_seconds)

    def next_moment(self) -> float | None:
        """The next time at which there is something to do even without news; ``None``: never."""
        now = get_dht_time()
        moments = [until for until in self.resting.values() if until > now]
        if self.settings.leads:
            moments.append(self.start_time())
        return min(moments) if moments else None
