"""One peer's search for one group: what it knows of the others, and what follows from that."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.averaging.control import AveragingMode, GroupInfo, StepControl
from shoal.averaging.messages import GroupStart, JoinReply, JoinRequest
from shoal.clock import get_dht_time
from shoal.errors import InterruptedDialError, StreamClosedError
from shoal.p2p import Call, PeerID

# How long a leader waits for a follower whose connection broke: time to notice, connect and ask again.
MAX_RETURN_SECONDS = 2.0
# Nor longer than this part of ``request_timeout``, for which followers wait after the promised time.
RETURN_SHARE = 2 / 3
# Seconds for which a candidate that could not be reached is left alone; twice as long after each further failure.
RETRY_PAUSE = 0.5

MAX_RETRY_PAUSE = 2.0
# A leader may start later than this peer has promised itself, by so many times ``min_matchmaking_time``.
PATIENCE_FACTOR = 4
# A leader takes no more, also where no target size is given.
MAX_GROUP_SIZE = 4096


@dataclass
class MatchmakingSettings:
    """How this averager looks for groups."""

    target_group_size: int | None
    min_group_size: int
    min_matchmaking_time: float
    """Seconds for which a group is kept open, unless it is complete before."""
    request_timeout: float
    """Seconds within which a leader must answer a request to join."""
    mode: AveragingMode
    bandwidth: float | None
    min_vector_size: int
    total_size: int
    """Number of values in the averaged vector."""
    agreed: dict[str, str]
    """What must be equal in all members of a group, readable."""

    @property
    def leads(self) -> bool:
        """Whether others can ask this peer to lead them."""
        return self.mode is not AveragingMode.CLIENT


@dataclass
class Trust:
    """What is known of others beyond what they say. By default they are believed."""

    admits: Callable[[PeerID], Awaitable[bool]] | None = None
    """Who may join a group that this averager leads; ``None``: everybody."""
    is_proven: Callable[[PeerID], bool] | None = None
    """Who has taken part in rounds: a group waits for as many members as such a follower expects."""
    largest_weight: Callable[[PeerID], float] | None = None
    """What a member's weight is at most."""


@dataclass
class Follower:
    """A peer that wants to be led, and where its answer goes."""

    request: JoinRequest
    outcome: asyncio.Future[JoinReply]
    expected_group_size: int | None
    """How large a group it expects by now."""
    nbytes: int
    """What it takes in the message that describes the group."""
    is_proven: bool = True
    """See :class:`Trust`."""
    has_left: bool = False
    """It has said goodbye: it does not come back, as one may whose connection broke."""


@dataclass
class Offer:
    """The call of a peer that offers to lead this one, as long as this one has not decided."""

    call: Call
    outcome: asyncio.Future[tuple[PeerID, float] | None]
    """Whom this peer follows instead, and when that one starts; or nothing more to say."""
    is_used: bool = False

    def close(self, better: tuple[PeerID, float] | None) -> None:
        """The call is not needed any more."""
        if not self.outcome.done():
            self.outcome.set_result(better)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Call]:
        """Ask to be led on this call; leaving the block before both sides have ended cuts the connection."""
        self.is_used = True
        try:
            yield self.call
        finally:
            if not self.call.clean:
                self.call.connection.abort()
            self.close(None)


@dataclass(frozen=True)
class StartedGroup:
    """A group that this peer has started."""

    start: GroupStart
    followers: dict[PeerID, float]
    """The promised time in each one's request tells that search from a later one of the same peer."""


@dataclass
class Search:
    """The state of one search for a group."""

    own: PeerID
    settings: MatchmakingSettings
    control: StepControl
    key: str
    expiration: float
    """DHT time until which this peer promises to start, if it leads."""
    group: asyncio.Future[GroupInfo]
    followers: dict[PeerID, Follower] = field(default_factory=dict)
    leader: tuple[PeerID, float] | None = None
    """Whom this peer follows at the moment, and when that peer will start."""
    leader_lost_at: float = -math.inf
    """When a leader was lost, or did not answer; others who would follow it are going to look for another one."""
    accepted_by: PeerID | None = None
    """Who has accepted this peer last; worth asking again if the connection broke, even past the promised time."""
    candidates: dict[PeerID, float] = field(default_factory=dict)
    """Others that look for a group, and their promised time."""
    spent: dict[PeerID, float] = field(default_factory=dict)
    """Candidates that were asked in vain while they promised this time."""
    failures: dict[PeerID, int] = field(default_factory=dict)
    """How often the connection to a candidate failed."""
    resting: dict[PeerID, float] = field(default_factory=dict)
    """Candidates that could not be reached, and until when others come first."""
    silent: dict[PeerID, None] = field(default_factory=dict)
    """Candidates that did not answer in time."""
    invited: dict[PeerID, tuple[float, float]] = field(default_factory=dict)
    """Whom this peer has invited, with which promise, and when for the first time."""
    uninvited: dict[PeerID, None] = field(default_factory=dict)
    """Whom it could not reach with that."""
    pending: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)
    """Invitations without an answer."""
    offers: dict[PeerID, Offer] = field(default_factory=dict)
    """Invitations to this peer."""
    asked: Call | None = None
    """On which the candidate that this peer wants to follow has got its request."""
    told_expectation: int | None = None
    """How large a group that one has been told to expect."""
    lost: dict[PeerID, tuple[float, Follower]] = field(default_factory=dict)
    """Followers whose connection broke, and when."""
    refusals: dict[str, str] = field(default_factory=dict)
    refused: Mapping[PeerID, bool] = field(default_factory=dict)
    """Whom this peer does not want in its group, and whether others count on that one to come."""
    turned_away: dict[PeerID, None] = field(default_factory=dict)
    """Those of them that look for a group."""
    declared: asyncio.Event = field(default_factory=asyncio.Event)
    redeclare: asyncio.Event = field(default_factory=asyncio.Event)

    def note_candidate(self, peer: PeerID, expiration: float) -> None:
        """A peer is known to look for a group."""
        if peer in self.refused:
            self.turn_away(peer)
        elif self.candidates.get(peer) != expiration:
            self.candidates[peer] = expiration
            self.control.changed.set()

    def turn_away(self, peer: PeerID) -> None:
        """A peer is there, but will not be in the group: nobody needs to wait for it."""
        if self.refused[peer] and peer not in self.turned_away:
            self.turned_away[peer] = None
            self.control.changed.set()

    @property
    def group_bytes(self) -> int:
        """What the message that describes the group takes by now."""
        return len(self.control.data_for_gather) + sum(follower.nbytes for follower in self.followers.values())

    def is_complete(self) -> bool:
        """Whether as many members as anybody in this group expects are here, without those that only help."""
        modes = [self.settings.mode, *(follower.request.mode for follower in self.followers.values())]
        size = sum(mode != AveragingMode.AUX for mode in modes) + len(self.turned_away)
        expected = [
            self.control.expected_group_size,
            *(f.expected_group_size for f in self.followers.values() if f.is_proven),
        ]
        known = [number for number in expected if number is not None]
        return bool(known) and size >= max(known)

    # --- whom to invite -----------------------------------------------------------------------------------------------

    def whom_to_invite(self) -> list[PeerID]:
        """Those who should follow this peer and have not come, if it seems to be the one that leads."""
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

    def _has_not_been_invited(self, peer: PeerID) -> bool:
        return peer not in self.invited or self.invited[peer][0] != self.expiration

    def note_invitation(self, peer: PeerID, task: asyncio.Task[None]) -> None:
        """This peer is being invited."""
        self.pending[peer] = task
        self.uninvited.pop(peer, None)
        if self._has_not_been_invited(peer):
            self.invited[peer] = (self.expiration, get_dht_time())

    def allow_invitation(self, peer: PeerID) -> None:
        """The invitation did not reach this peer: it may be tried again, but is not waited for again."""
        self.uninvited[peer] = None

    # --- who invites --------------------------------------------------------------------------------------------------

    def add_offer(self, peer: PeerID, offer: Offer, expiration: float) -> None:
        """A peer offers to lead this one."""
        previous = self.offers.get(peer)
        if previous is not None and previous.is_used:
            offer.close(None)
            return
        if previous is not None:
            previous.close(None)
        self.offers[peer] = offer
        for past in (self.resting, self.failures, self.silent, self.spent):
            past.pop(peer, None)
        self.note_candidate(peer, expiration)
        self.control.changed.set()
        if self.settings.leads and self.leads_before(peer, expiration):
            offer.close((self.own, self.expiration) if self.leader is None else self.leader)
        self._decline()

    def _decline(self) -> None:
        """Tell those who wait in vain whom this peer follows."""
        for peer, offer in self.offers.items():
            if self.leader is not None and not offer.is_used:
                offer.close(None if peer == self.leader[0] else self.leader)

    def has_shorter_way(self) -> bool:
        """Whether the best candidate has called, while this peer still tries to connect to it or to another one."""
        best = self.best_candidate() if self.asked is None else None
        offer = None if best is None else self.offers.get(best)
        return offer is not None and not offer.is_used and not offer.outcome.done()

    # --- whom to ask --------------------------------------------------------------------------------------------------

    def leads_before(self, peer: PeerID, expiration: float) -> bool:
        """Whether this peer leads, rather than another one with that promised time, if both meet."""
        return (self.expiration, self.own.to_bytes()) < (expiration, peer.to_bytes())

    def best_candidate(self) -> PeerID | None:
        """The peer that should lead this one, if it is to follow any."""
        now = get_dht_time()
        usable = [
            (expiration, peer.to_bytes(), peer)
            for peer, expiration in self.candidates.items()
            if expiration + self._patience_with(peer) > now
            and self.spent.get(peer) != expiration
            and self.resting.get(peer, now) <= now
            and peer not in self.followers
            and not (self.settings.leads and self.leads_before(peer, expiration))
        ]
        return min(usable)[2] if usable else None

    def _patience_with(self, peer: PeerID) -> float:
        """How many seconds past its promised time a peer may not have started yet."""
        if peer == self.accepted_by:
            return self.settings.request_timeout
        return 0.0 if math.isinf(self.leader_lost_at) else self.return_seconds

    def note_failure(self, peer: PeerID, error: Exception) -> None:
        """A candidate could not be reached, or its connection broke: others come first for a while.

        If it lives, they follow it and send this peer back to it. One that has accepted this peer is asked again at
        once, because it may be about to start; so is one to which a connection broke by chance, as it seems.
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
        """Another peer follows that one, so it can probably be reached after all."""
        if leader not in self.silent:
            self.resting.pop(leader, None)
        self.note_candidate(leader, expiration)

    def note_acceptance(self, peer: PeerID, expiration: float) -> float:
        """This peer follows another one. Returns until when it is waited for: it may have promised any time."""
        latest = max(self.expiration, get_dht_time()) + PATIENCE_FACTOR * self.settings.min_matchmaking_time
        expiration = min(expiration, latest)
        self.leader, self.accepted_by = (peer, expiration), peer
        self.failures.pop(peer, None)
        self._decline()
        return expiration

    # --- when to start ------------------------------------------------------------------------------------------------

    @property
    def return_seconds(self) -> float:
        """How long lost followers are waited for."""
        return min(MAX_RETURN_SECONDS, self.settings.request_timeout * RETURN_SHARE)

    def start_time(self) -> float:
        """When this peer starts with those who are there: as promised, or when those who are coming had time to come.

        These are followers that were lost, those who were invited a moment ago, and, if this peer's own leader was
        lost, all who followed that one or tried to. A group that was kept open gives those who hear of its end a moment
        to come.
        """
        called = [self.invited[peer][1] for peer in self.pending]
        last_loss = max([self.leader_lost_at, *called, *(lost_at for lost_at, _ in self.lost.values())])
        released_at = -math.inf if self.control.released_at is None else self.control.released_at
        last_call = released_at + self.return_seconds
        return max(self.expiration, last_call, min(last_loss, self.expiration) + self.return_seconds)

    def next_moment(self) -> float | None:
        """When there is something to do even without news; ``None`` = never."""
        now = get_dht_time()
        moments = [until for until in self.resting.values() if until > now]
        if self.settings.leads:
            moments.append(self.start_time())
        return min(moments) if moments else None
