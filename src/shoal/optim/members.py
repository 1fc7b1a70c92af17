"""What a peer believes of others in a run that trusts its members: what they say, as long as they come.

A run trusts those that take part in its rounds, and withstands strangers and faults:

* Samples, speed and the end of an epoch: as each peer says. A peer that was expected in three rounds in a row and did
  not come counts for nothing until it comes.
* Epoch: the run is at the median over hosts of the epochs of all peers that can be reached. One member alone can also
  end this peer's epoch by being at the next one; only most hosts can make this peer download another state.
* Strangers, which have been in no round with this peer, count like members, unless they have cost time because they did
  not come, or stalled a group. The time that they may cost is bounded (:class:`Budget`). Before its first round with
  others a peer believes everybody.
* Records in the table may be old, and their peers dead. So the user is warned of no peer from which this one has heard
  nothing itself.

:mod:`shoal.optim.evidence` adds limits to what members claim, for runs that anybody may join.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping

from shoal.averaging.majorities import votes_by_host
from shoal.base.logs import Seldom, counted
from shoal.optim.deeds import remember
from shoal.optim.history.window import EPOCHS_AHEAD
from shoal.optim.progress.epoch_rate import EPOCHS_TIMED, EpochRate
from shoal.optim.progress.records import MAX_CALLED, Companion, LocalTrainingProgress
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

# The share of its time that this peer may lose to peers that were in no round yet.
SHARE_WASTED = 0.05
# A peer that failed to come this many times running is treated like one that never came.
ROUNDS_TO_LOSE_TRUST = 3
# A group has waited in vain from this share of a member's patience on. The patience of the leader decides, and members
# begin to wait at different times.
SHARE_OF_PATIENCE = 0.5
# If this many hosts of strangers have cost time, all strangers have to wait.
HOSTS_TO_STOP_ALL = 2
# The user is warned after this many steps in a row without others: a single one may be chance.
ROUNDS_ALONE = 2


class Budget:
    """Bounds the time that strangers cost to a share of all time. A host that has cost time pays for it with a pause.

    Other strangers are welcome meanwhile, because they are usually honest; but if several hosts have to pause at a
    time, all strangers do. Otherwise somebody with many hosts could cost any amount of time.

    Args:
        host_of: the host of a peer.
    """

    def __init__(self, host_of: Callable[[bytes], Hashable]) -> None:
        self._host_of = host_of
        self._pauses: dict[Hashable, float] = {}

    def charge(self, peers: Collection[bytes], seconds: float, now: float) -> None:
        """These strangers together have cost so many seconds."""
        pauses = {host: until for host, until in self._pauses.items() if until > now}
        for host in {*map(self._host_of, peers)}:
            remember(pauses, host, max(now + seconds / SHARE_WASTED, pauses.pop(host, now)))
        self._pauses = pauses  # in one go: the event loop may be reading the dictionary without a lock

    def allows(self, peer: bytes, now: float) -> bool:
        """Whether there is time for a stranger."""
        pausing = {host for host, until in self._pauses.items() if until > now}
        return len(pausing) < HOSTS_TO_STOP_ALL and self._host_of(peer) not in pausing


class Members:
    """What this peer has seen others do, and how far it therefore believes them. Not thread-safe: its owner locks it.

    Args:
        own: id of this peer.
        host_of: the host of a peer. All peers of one host have one vote together.
        now: DHT time, in seconds, as in all methods.
    """

    def __init__(self, own: bytes, host_of: Callable[[bytes], Hashable], now: float) -> None:
        self._own, self._host_of = own, host_of
        # Peers that were in a round with this one; and in how many rounds in a row each peer was missing.
        self._met: dict[bytes, None] = {}
        self._missed: dict[bytes, int] = {}
        self.full_group: int | None = None
        """The largest number of members in a group, if the run has several groups. ``None``: all meet in one."""
        self._meets_everybody = True
        self.latest: Mapping[bytes, float] = {}
        """What each member, this peer included, brought to the latest round with others."""
        self.is_large = False
        """There are more peers than this one can hear of in each epoch."""
        self.pace = EpochRate(now)
        self._counts_itself_until = -math.inf
        # Which peers this one waits for, since when, and for how many seconds at most.
        self._awaited: tuple[frozenset[bytes], float, float] = (frozenset(), now, 0.0)
        # For strangers: time to wait for those that do not come, and time for those that stall a group.
        self._waiting, self._stalls = Budget(host_of), Budget(host_of)
        # How many seconds rounds take in which no stranger fails: what one with such a failure takes more is wasted.
        self._durations: deque[float] = deque(maxlen=EPOCHS_TIMED)
        # Which peers the user has been warned of, and how. Bounded, because a liar can invent any number of peers.
        self._told: dict[tuple[bytes, str], None] = {}
        # For how many rounds in a row this peer was alone although others could have come.
        self._alone, self._has_told_of_it = 0, False
        self.troubles: Counter[str] = Counter()
        """Counts what the user was warned of, see :class:`~shoal.metrics.Metrics`."""
        # What may be nobody's fault, so that nobody has to do anything about it, is no warning.
        self._tell_seldom, self._warn_seldom = Seldom(logger.info), Seldom(logger.warning)

    # --- what has happened --------------------------------------------------------------------------------------------

    def begin_to_wait(self, peers: Collection[bytes], now: float, patience: float) -> None:
        """This peer is ready for a round and begins to wait for these others.

        Args:
            patience: after this many seconds it goes on without them.
        """
        self._awaited, self.pace.trained_until = (frozenset(peers), now, patience), now

    def note_round(
        self,
        samples: Mapping[bytes, float],
        now: float,
        companions: Mapping[bytes, Companion] | None = None,
        own: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """A round is over.

        Args:
            samples: of each member, this peer included. Infinite: the round does not count them. Empty: it has failed.
            companions: all known peers; those at this peer's epoch could have come.
            own: this peer's epoch, which the round ends.
            seconds: how long the group was at work, after all members had come.
        """
        members = samples.keys() - {self._own}
        reachable = {p: c for p, c in (companions or {}).items() if c.is_reachable(now) and not c.record.is_donor}
        size = 1 + len(self._awaited[0] | members | reachable.keys())
        self._meets_everybody = self.full_group is None or size <= self.full_group
        went_on = {peer for peer, c in (companions or {}).items() if c.record.epoch > own}
        unheard = self._unheard(companions or {})
        self._note_who_is_missing(members, went_on if not members else (), now, seconds, unheard)
        others = [peer for peer, c in reachable.items() if c.record.epoch == own]
        # As long as others count, this peer trains on and tries again to meet them: it makes no step alone.
        self._note_if_alone(members, [] if any(self.counts(peer, now) for peer in others) else others, unheard)
        if members:
            self.latest = {peer: each for peer, each in samples.items() if math.isfinite(each)}
            for peer in members:
                self._missed.pop(peer, None)
                self._met.pop(peer, None)
                remember(self._met, peer, None)

    def _note_who_is_missing(
        self,
        members: Collection[bytes],
        went_on: Collection[bytes],
        now: float,
        seconds: float,
        unheard: Collection[bytes],
    ) -> None:
        (awaited, since, patience), self._awaited = self._awaited, (frozenset(), now, 0.0)
        waited = now - since - seconds
        # A group that was complete without a peer has not waited for it; and those that went on without this peer
        # had no reason to wait for it either.
        if not self._meets_everybody or waited < patience * SHARE_OF_PATIENCE:
            return
        missing = sorted(awaited - {*members, *went_on})
        for peer in missing:
            remember(self._missed, peer, self._missed.pop(peer, 0) + 1)
        doubtful = [peer for peer in missing if not self.is_proven(peer)]
        self._waiting.charge(doubtful, min(waited, patience) if members else waited, now)
        self.troubles["waited in vain"] += len(missing)
        for peer in [each for each in doubtful if each not in unheard]:
            self._tell_once(
                peer,
                "peer %s takes part, but did not come to %s in a row: this peer seldom waits for it now. Its batches "
                "may take longer than matchmaking_time",
                counted(self._missed[peer], "round"),
            )

    def note_who_went_on(
        self, members: Collection[bytes], companions: Mapping[bytes, Companion], now: float, own: int
    ) -> None:
        """A round of this peer has failed, or had these members; others may have gone on without it."""

    def note_failures(self, failed: Collection[bytes], seconds: float, now: float) -> None:
        """This peer has seen these members fail in a round of so many seconds: that counts like waiting.

        Call it before :meth:`note_round`.
        """
        if not any(map(self.is_proven, failed)):  # else perhaps only those that are known have cost time
            usual = statistics.median(self._durations) if self._durations else 0.0
            self.note_waste(failed, max(0.0, seconds - usual), now)
        if all(map(self.is_proven, failed)):
            self._durations.append(seconds)

    def note_waste(self, peers: Collection[bytes], seconds: float, now: float) -> None:
        """This peer has lost so many seconds to members of its group; only strangers among them count."""
        strangers = [peer for peer in peers if not self.is_proven(peer)]
        if not strangers or seconds <= 0:
            return
        self._stalls.charge(strangers, seconds, now)
        for peer in strangers:
            self._tell_once(
                peer,
                "new peer %s stalled the group for %.1f s: its machine may not join or lead for %.0f s. Its line may "
                "be too slow, or its machine stuck",
                seconds,
                seconds / SHARE_WASTED,
            )

    def _note_if_alone(self, members: Collection[bytes], others: Collection[bytes], unheard: Collection[bytes]) -> None:
        if members or not others:
            self._alone, self._has_told_of_it = 0, False
            return
        self._alone += 1
        self.troubles["alone"] += 1
        others = [peer for peer in others if peer not in unheard]
        if self._alone >= ROUNDS_ALONE and others and not self._has_told_of_it:
            self._has_told_of_it = True
            logger.warning(
                "this peer has made %d steps alone, although %s could have come, such as %s. Read the lines about "
                "them above; `shoal doctor` checks the network",
                self._alone,
                counted(len(others), "other peer"),
                PeerID(min(others)),
            )

    def _tell_once(self, peer: bytes, kind: str, *values: object, tell: Seldom | None = None) -> bool:
        """Tell the user of a peer, but only once. Returns whether this was the first time."""
        if (peer, kind) in self._told:
            return False
        (tell or self._tell_seldom)(kind, PeerID(peer), *values, about=peer)
        remember(self._told, (peer, kind), None)
        return True

    def note_vain_attempt(self, now: float, seconds: float) -> None:
        """This peer lost so many seconds because no peer gave it a later state. So it votes, too, for a while."""
        self._counts_itself_until = now + seconds / SHARE_WASTED

    # --- what follows -------------------------------------------------------------------------------------------------

    @property
    def knows_rounds(self) -> bool:
        """Whether this peer has been in a round with others."""
        return bool(self._met)

    def has_met(self, peer: bytes) -> bool:
        """Whether this peer was in a round with another one."""
        return peer in self._met

    def is_known(self, peer: bytes) -> bool:
        """Whether another peer has been seen to take part."""
        return self.has_met(peer)

    def is_proven(self, peer: bytes) -> bool:
        """Whether a peer takes part in rounds, as far as this one can know. Before its own first round, all do."""
        comes = self._missed.get(peer, 0) < ROUNDS_TO_LOSE_TRUST
        return comes and (not self._met or peer in self._met or not self._meets_everybody)

    def has_time_for(self, peer: bytes, now: float) -> bool:
        """Whether a peer may join or lead a group: it was in rounds, or strangers have not used up their time."""
        return not self._met or peer in self._met or self._stalls.allows(peer, now)

    def counts(self, peer: bytes, now: float) -> bool:
        """Whether what a peer says of its progress counts, and this peer waits for it."""
        return self.is_proven(peer) or (self._waiting.allows(peer, now) and self._stalls.allows(peer, now))

    def whom_to_wait_for(self, peers: set[bytes], now: float) -> set[bytes]:
        """Of several peers that claim to come, those that this peer should wait for."""
        return {peer for peer in peers if self.counts(peer, now)}

    def limited(
        self, records: Collection[LocalTrainingProgress], now: float, batch_size: int
    ) -> list[LocalTrainingProgress]:
        """The records of all peers, as far as they are believed. ``batch_size`` is that of this peer."""
        return [record if self.counts(record.peer_id, now) else record.at_most(0, 0.0) for record in records]

    def called_end(self, companions: Mapping[bytes, Companion], epoch: int, own_estimate: float, now: float) -> float:
        """The earliest DHT time at which this epoch ends according to others; infinite if none says so.

        Args:
            own_estimate: DHT time at which it ends by this peer's own estimate.
        """
        said = (c.end for peer, c in self._present(companions, now).items() if c.record.epoch == epoch)
        return min((end for end in said if end is not None), default=math.inf)

    def _present(self, companions: Mapping[bytes, Companion], now: float) -> dict[bytes, Companion]:
        return {peer: c for peer, c in companions.items() if c.is_reachable(now) and self.counts(peer, now)}

    def credible(
        self,
        companions: Mapping[bytes, Companion],
        own: int,
        now: float,
        own_estimate: Callable[[Mapping[bytes, Companion]], float],
    ) -> dict[bytes, Companion]:
        """The peers whose epoch the run can have reached; the others are left out.

        Clients are never left out: they lead nobody to another epoch, so what they claim does no harm.

        Args:
            own: this peer's epoch.
            own_estimate: DHT time at which it ends by this peer's own estimate, if only the given companions count.
        """
        self.is_large = len(companions) > MAX_CALLED
        ahead = {peer: c for peer, c in companions.items() if not c.record.client_mode and c.record.epoch > own}
        if not ahead:
            return dict(companions)
        voters = self._voters(companions, now)
        run = self._epoch_of_run(self._votes(voters, now), own, now)
        # One member is enough to say that this epoch is over: it has counted samples that this peer may not know of.
        next_one = own + 1 if any(self.is_proven(peer) for peer in ahead if peer in voters) else own
        last = max(run, next_one)
        # A member may have been cut off with others.
        strangers = ahead if self._met else {}
        for peer in [p for p in strangers if p in voters and not self.has_met(p)]:
            if ahead[peer].record.epoch > last + EPOCHS_AHEAD:
                self._name_impossible_epoch(ahead[peer], last)
        return {peer: c for peer, c in companions.items() if peer not in ahead or c.record.epoch <= last}

    def are_most_beyond(self, companions: Mapping[bytes, Companion], own: int, now: float) -> bool:
        """Whether most hosts have ended this epoch. One peer alone may have failed to meet the others."""
        return self._epoch_of_run(self._votes(self._voters(companions, now), now), own, now) > own

    def _voters(self, companions: Mapping[bytes, Companion], now: float) -> dict[bytes, Companion]:
        """The peers whose epochs decide which one the run is at."""
        return {p: c for p, c in companions.items() if not c.record.client_mode and c.is_reachable(now)}

    def _votes(self, voters: Mapping[bytes, Companion], now: float) -> list[int]:
        """The epochs of their hosts, the lowest first."""
        # In a large swarm a record is old when it is read, and its peer has gone on meanwhile.
        pace = self.pace.usual_epoch if self.is_large else math.inf
        return votes_by_host({peer: c.epoch_by_now(now, pace) for peer, c in voters.items()}, self._host_of)

    def _epoch_of_run(self, votes: list[int], own: int, now: float) -> int:
        """The last epoch that most hosts have reached, but not an earlier one than this peer's."""
        if now < self._counts_itself_until:
            votes = sorted([*votes, own])
        return max(own, votes[(len(votes) - 1) // 2]) if votes else own

    def _unheard(self, companions: Mapping[bytes, Companion]) -> set[bytes]:
        """The peers of which this one knows nothing but a record in the table."""
        return {peer for peer, c in companions.items() if not c.is_heard and not self.has_met(peer)}

    def _name_impossible_epoch(self, companion: Companion, run: int) -> None:
        """Warn of a peer that claims to be far beyond the run, if this one has heard from it.

        Otherwise it may be dead, and its record that of a run that has begun again since.
        """
        if not companion.is_heard:
            return
        self.troubles["epochs that cannot be"] += self._tell_once(
            companion.record.peer_id,
            "peer %s says that it is at epoch %d, and the run is at epoch %d: what it says does not count unless most "
            "peers say the same",
            companion.record.epoch,
            run,
            tell=self._warn_seldom,
        )
