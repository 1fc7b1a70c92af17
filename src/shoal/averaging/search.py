"""One peer's search for one group: what it knows of the others, and what follows from that."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from shoal.averaging.allreduce import AveragingMode
from shoal.averaging.control import StepControl
from shoal.averaging.group_info import GroupInfo
from shoal.averaging.protocol import GroupStart, JoinReply, JoinRequest
from shoal.clock import get_dht_time
from shoal.p2p import PeerID

MAX_RETURN_SECONDS = 2.0
"""How long a leader waits for a follower whose connection broke: time to notice, connect and ask again."""
RETURN_SHARE = 2 / 3
"""Nor longer than this part of ``request_timeout``, for which followers wait after the promised time."""
RETRY_PAUSE = 0.5
"""Seconds for which a candidate that could not be reached is left alone; twice as long after each further failure."""
MAX_RETRY_PAUSE = 2.0


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
class Follower:
    """A peer that wants to be led, and where its answer goes."""

    request: JoinRequest
    outcome: asyncio.Future[JoinReply]


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
    invited: dict[PeerID, float] = field(default_factory=dict)
    lost: dict[PeerID, tuple[float, Follower]] = field(default_factory=dict)
    """Followers whose connection broke, and when."""
    refusals: dict[str, str] = field(default_factory=dict)
    declared: asyncio.Event = field(default_factory=asyncio.Event)
    redeclare: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, peer: PeerID, expiration: float) -> None:
        """A peer is known to look for a group."""
        if self.candidates.get(peer) != expiration:
            self.candidates[peer] = expiration
            self.control.changed.set()

    def complete(self, size: int) -> bool:
        """Whether as many as anybody in this group expects are here."""
        expected = [self.control.expected_group_size, *(f.request.expected_group_size for f in self.followers.values())]
        known = [number for number in expected if number is not None]
        return bool(known) and size >= max(known)

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
        once, because it may be about to start.
        """
        is_silent = isinstance(error, (asyncio.TimeoutError, TimeoutError))
        if self.leader is not None or is_silent:
            self.leader_lost_at = get_dht_time()
        if peer == self.accepted_by and peer not in self.failures:
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
        self.offer(leader, expiration)

    def note_acceptance(self, peer: PeerID, expiration: float) -> None:
        """This peer follows another one, which starts then."""
        self.leader, self.accepted_by = (peer, expiration), peer
        self.failures.pop(peer, None)

    # --- when to start ------------------------------------------------------------------------------------------------

    @property
    def return_seconds(self) -> float:
        """How long lost followers are waited for."""
        return min(MAX_RETURN_SECONDS, self.settings.request_timeout * RETURN_SHARE)

    def start_time(self) -> float:
        """When this peer starts with those who are there: as promised, or when the lost have had time to return.

        If this peer's leader was lost, those are all who followed it, or tried to. A group that was kept open gives
        those who hear of its end a moment to come.
        """
        last_loss = max([self.leader_lost_at, *(lost_at for lost_at, _ in self.lost.values())])
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
