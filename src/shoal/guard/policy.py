"""What a peer believes of others in a run that trusts its members: their claims, as long as they show up.

* Samples, speed and the end of an epoch: as each peer claims. A peer that missed three rounds in a row that it was
  expected in is not counted until it shows up. A peer that has cost time is not counted until that is paid for
  (:mod:`~shoal.guard.budget`).
* Epoch: the run is at the median over hosts of the epochs of all reachable peers. A single member at the next epoch can
  also end this peer's epoch; only most hosts can make this peer download another state.
* A member takes part if past rounds show that the swarm processes more samples per second with it than without it.
* Before its first round with others, a peer believes all others.

Records in the DHT may be old, and their peers dead. So the log names no peer that this one has not heard from itself.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

from shoal.averaging.majorities import votes_by_host
from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom, counted
from shoal.guard.budget import Budget
from shoal.peers.book import SHARE_WASTED
from shoal.peers.identity import PeerID

logger = logging.getLogger(__name__)

# A single failure may be chance. Derived: three in a row with a chance of one in ten each are one in a thousand.
ROUNDS_IN_A_ROW = 3
# A group has waited in vain if it waited for this share of a member's patience (chosen). The leader's patience decides,
# and members begin to wait at different times.
_SHARE_OF_PATIENCE = 0.5
# A peer may join a group before its batch is done if that takes up to this share of the patience (chosen). Others then
# wait for it in the round, which does not count against it.
JOIN_SHARE = 1 / 3
# The user is warned after this many steps in a row without others (chosen): a single one may be chance.
_ROUNDS_ALONE = 2
# The least lead over the run, in epochs, that is worth a warning (chosen): a peer may have ended two epochs that others
# are about to end.
_WORTH_TELLING = 2
# The number of past epochs that tell how long an epoch usually takes (chosen).
_EPOCHS_TIMED = 16


class ReportedProgress(Protocol):
    """The part of a peer's progress report that is judged here."""

    @property
    def peer_id(self) -> bytes: ...
    @property
    def epoch(self) -> int: ...
    @property
    def client_mode(self) -> bool: ...
    @property
    def is_donor(self) -> bool: ...
    def at_most(self: ReportT, samples: float, samples_per_second: float) -> ReportT:
        """The same report, clipped to these limits."""
        ...


class KnownPeer(Protocol):
    """The part of this peer's knowledge of another one that is judged here."""

    known_since: float
    end: float | None

    @property
    def record(self) -> ReportedProgress: ...
    @property
    def is_heard(self) -> bool: ...
    def is_reachable(self, now: float) -> bool: ...
    def epoch_by_now(self, now: float, seconds_per_epoch: float) -> int: ...
    def as_at_the_beginning(self: PeerT, epoch: int, began_at: float) -> PeerT: ...


ReportT = TypeVar("ReportT", bound=ReportedProgress)
PeerT = TypeVar("PeerT", bound=KnownPeer)


def epoch_of_most(votes: Sequence[int], own: int) -> int:
    """The last epoch that most hosts have reached, but not an earlier one than this peer's.

    The median cannot be moved by less than half of the votes (its breakdown point; Huber, 1981).

    Args:
        votes: the epochs of hosts, lowest first.
        own: this peer's epoch.
    """
    return max(own, votes[(len(votes) - 1) // 2]) if votes else own


def seconds_worth(training: float, share: float) -> float:
    """The most seconds that it is worth waiting for a member in a round.

    With the member, an epoch takes ``training`` seconds, plus the wait. Without it, the others need
    ``training / (1 - share)`` seconds for the same samples. The wait is worth at most the difference.

    Args:
        training: seconds of training between two rounds.
        share: the share of the samples that come from the member.
    """
    return training * share / (1 - share) if share < 1 else math.inf


class Members:
    """What this peer has seen others do, and how far it believes them as a result. Not thread-safe: its owner locks it.

    Args:
        own: id of this peer.
        host_of: the host of a peer. All peers of one host have one vote together.
        now: DHT time, in seconds, as in all methods.
        share: the share of all time that others may cost this peer.
    """

    def __init__(
        self, own: bytes, host_of: Callable[[bytes], Hashable], now: float, share: float = SHARE_WASTED
    ) -> None:
        self._own, self._host_of = own, host_of
        self.budget = Budget(host_of, now, share)
        """The time that others may cost."""
        # Peers that were in a round with this one; and the number of rounds in a row that each peer has missed.
        self._met = Bounded[bytes, None]()
        self._missed = Bounded[bytes, int]()
        # By member: the number of rounds in a row in which the wait for it was longer than it is worth.
        self._too_slow = Bounded[bytes, int]()
        self.full_group: int | None = None
        """The largest number of members in a group, if the run has several groups. ``None``: all meet in one."""
        self._meets_everybody = True
        self.latest: Mapping[bytes, float] = {}
        """The samples of each member, including this peer, in the latest round with others."""
        self.is_large = False
        """Whether there are more peers than this one can hear of in each epoch."""
        self.epoch_began_at = now
        """When this peer's epoch began."""
        self._epochs: deque[float] = deque(maxlen=_EPOCHS_TIMED)
        self._training = 0.0
        self._counts_itself_until = -math.inf
        # The peers that this one waits for, since when, and for how many seconds at most.
        self._awaited: tuple[frozenset[bytes], float, float] = (frozenset(), now, 0.0)
        # The seconds of rounds in which no stranger failed. The extra time of a round in which one failed is wasted.
        self._durations: deque[float] = deque(maxlen=_EPOCHS_TIMED)
        # The warnings that the user has got: the peer, and the kind of warning.
        self._told = Bounded[tuple[bytes, str], None]()
        # The number of rounds in a row in which this peer was alone although others could have come.
        self._alone, self._has_told_of_it = 0, False
        self.troubles: Counter[str] = Counter()
        """Counts warnings by kind, see :class:`~shoal.metrics.Metrics`."""
        # A message about something that may be no peer's fault asks for no action, so it is no warning.
        self._tell_seldom, self._warn_seldom = Seldom(logger.info), Seldom(logger.warning)

    # --- what has happened --------------------------------------------------------------------------------------------

    def begin_to_wait(self, peers: Collection[bytes], now: float, patience: float) -> None:
        """Note that this peer is ready for a round and starts to wait for these others.

        Args:
            patience: the seconds after which it continues without them.
        """
        self._awaited, self._training = (frozenset(peers), now, patience), max(0.0, now - self.epoch_began_at)

    def note_epoch(self, now: float, *, is_next: bool) -> None:
        """Note that this peer has reached another epoch; ``is_next``: the next one, in a round with others."""
        if is_next:
            self._epochs.append(now - self.epoch_began_at)
        self.epoch_began_at = now

    def note_round(
        self,
        samples: Mapping[bytes, float],
        now: float,
        companions: Mapping[bytes, KnownPeer] | None = None,
        own: int = 0,
        seconds: float = 0.0,
        waits: Mapping[bytes, float] | None = None,
    ) -> None:
        """Note that a round is over.

        Args:
            samples: by member, including this peer. Infinite: the round does not count samples. Empty: it has failed.
            companions: all known peers; those at this peer's epoch could have come.
            own: this peer's epoch, which the round ends.
            seconds: the duration of the round, after all members had come.
            waits: by member: the seconds that the group waited for it alone, as all members were told.
        """
        members, patience = samples.keys() - {self._own}, self._awaited[2]
        reachable = {p: c for p, c in (companions or {}).items() if c.is_reachable(now) and not c.record.is_donor}
        size = 1 + len(self._awaited[0] | members | reachable.keys())
        self._meets_everybody = self.full_group is None or size <= self.full_group
        went_on = {peer for peer, c in (companions or {}).items() if c.record.epoch > own}
        unheard = self._unheard(companions or {})
        others = [peer for peer, c in reachable.items() if c.record.epoch == own]
        # Some peers have appeared while this peer waited, and kept others waiting.
        appeared = {peer: reachable[peer].known_since for peer in others if self.counts(peer, now)}
        self._note_who_is_missing(members, went_on if not members else (), appeared, now, seconds, unheard)
        # As long as others count, this peer makes no step alone: it continues training and tries again to meet them.
        self._note_if_alone(members, [] if any(self.counts(peer, now) for peer in others) else others, unheard)
        if members:
            self.latest = {peer: each for peer, each in samples.items() if math.isfinite(each)}
            for peer in members:
                self._missed.pop(peer, None)
                self._met[peer] = None
            if waits is not None:
                self._note_waits(waits, patience, now)

    def _note_who_is_missing(
        self,
        members: Collection[bytes],
        went_on: Collection[bytes],
        appeared: Mapping[bytes, float],
        now: float,
        seconds: float,
        unheard: Collection[bytes],
    ) -> None:
        (awaited, since, patience), self._awaited = self._awaited, (frozenset(), now, 0.0)
        waited = now - since - seconds
        # A group that was complete without a peer has not waited for it. Peers that advanced without this one had no
        # reason to wait for it either.
        if not self._meets_everybody or waited < patience * _SHARE_OF_PATIENCE:
            return
        in_time = {peer for peer, at in appeared.items() if now - at - seconds >= patience * _SHARE_OF_PATIENCE}
        missing = sorted((awaited | in_time) - {*members, *went_on})
        for peer in missing:
            self._missed[peer] = self._missed.get(peer, 0) + 1
        doubtful = [peer for peer in missing if not self.is_proven(peer)]
        self.budget.charge(doubtful, min(waited, patience) if members else waited, now, bars=False)
        self.troubles["waited in vain"] += len(missing)
        for peer in [each for each in doubtful if each not in unheard]:
            self._tell_once(
                peer,
                "peer %s takes part, but did not come to %s in a row: this peer rarely waits for it now. Its batches "
                "may take longer than matchmaking_time",
                counted(self._missed[peer], "round"),
            )

    def _note_waits(self, waits: Mapping[bytes, float], patience: float, now: float) -> None:
        """Judge members by the waits for them. With two members, each needs the other, so neither is too slow."""
        total, group = sum(self.latest.values()), {**self.latest, **dict.fromkeys(waits.keys() - self.latest, 0.0)}
        for peer, samples in group.items() if len(group) > 2 else ():
            worth = seconds_worth(self._training, samples / total if total else 0.0)
            wait = waits.get(peer, 0.0)
            if wait <= max(worth, JOIN_SHARE * patience):
                if self._too_slow.pop(peer, 0) >= ROUNDS_IN_A_ROW:
                    name = "this peer" if peer == self._own else f"peer {PeerID(peer)}"
                    logger.info("%s no longer keeps rounds waiting, and takes part again", name)
                continue
            rounds = self._too_slow[peer] = self._too_slow.get(peer, 0) + 1
            if rounds >= ROUNDS_IN_A_ROW:
                # This many rounds have shown that it is slow. In a trial it has one round to show that it is faster.
                cost = ROUNDS_IN_A_ROW * wait
                self.budget.charge_member(peer, cost, now)
                if rounds == ROUNDS_IN_A_ROW:
                    self._tell_of_wait(peer, wait, worth, cost / self.budget.share)

    def _tell_of_wait(self, peer: bytes, wait: float, worth: float, pause: float) -> None:
        self.troubles["members too slow"] += 1
        advice = "If its line is slow, use a codec, low rank or DiLoCo"
        if peer == self._own:
            logger.warning(
                "this peer makes rounds %.1f s longer, and its samples save %.1f s: the others leave it out, and it "
                "follows by downloads. It is tried again in %.0f s. %s",
                wait,
                worth,
                pause,
                advice,
            )
            return
        self._warn_seldom(
            "peer %s makes rounds %.1f s longer, and its samples save %.1f s: it is left out for %.0f s. %s",
            PeerID(peer),
            wait,
            worth,
            pause,
            advice,
            about=peer,
        )

    def note_weights(self, weights: Mapping[bytes, float]) -> None:
        """Note the weights of members in a round."""

    def note_failures(self, failed: Collection[bytes], seconds: float, now: float) -> None:
        """Note members that this peer has seen fail in a round that took ``seconds``. This counts like waiting.

        Call it before :meth:`note_round`.
        """
        if not any(map(self.is_proven, failed)):  # otherwise perhaps only the proven ones have cost time
            usual = statistics.median(self._durations) if self._durations else 0.0
            self.note_waste(failed, max(0.0, seconds - usual), now)
        if all(map(self.is_proven, failed)):
            self._durations.append(seconds)

    def note_waste(self, peers: Collection[bytes], seconds: float, now: float) -> None:
        """Note ``seconds`` lost to members of the group. Only strangers among them are charged."""
        strangers = [peer for peer in peers if not self.is_proven(peer)]
        if not strangers or seconds <= 0:
            return
        self.budget.charge(strangers, seconds, now, bars=True)
        for peer in strangers:
            self._tell_once(
                peer,
                "new peer %s stalled the group for %.1f s: its machine may not join or lead for %.0f s. Its line may "
                "be too slow, or its machine stuck",
                seconds,
                seconds / self.budget.share,
            )

    def _note_if_alone(self, members: Collection[bytes], others: Collection[bytes], unheard: Collection[bytes]) -> None:
        if members or not others:
            self._alone, self._has_told_of_it = 0, False
            return
        self._alone += 1
        self.troubles["alone"] += 1
        others = [peer for peer in others if peer not in unheard]
        if self._alone >= _ROUNDS_ALONE and others and not self._has_told_of_it:
            self._has_told_of_it = True
            logger.warning(
                "this peer has made %d steps alone, although %s could have come, such as %s. Read the lines about "
                "them above; `shoal doctor` checks the network",
                self._alone,
                counted(len(others), "other peer"),
                PeerID(min(others)),
            )

    def _tell_once(self, peer: bytes, kind: str, *values: object, tell: Seldom | None = None) -> bool:
        """Warn the user of a peer, but only once. Returns whether this was the first time."""
        if (peer, kind) in self._told:
            return False
        (tell or self._tell_seldom)(kind, PeerID(peer), *values, about=peer)
        self._told[peer, kind] = None
        return True

    def note_vain_attempt(self, now: float, seconds: float) -> None:
        """Note ``seconds`` lost because no peer gave this one a later state. So this peer votes, too, for a while."""
        self._counts_itself_until = now + seconds / self.budget.share

    # --- what follows -------------------------------------------------------------------------------------------------

    def has_met(self, peer: bytes) -> bool:
        """Whether this peer was in a round with another one."""
        return peer in self._met

    def is_proven(self, peer: bytes) -> bool:
        """Whether a peer is known to take part in rounds. Before this peer's own first round, all others count so."""
        comes = self._missed.get(peer, 0) < ROUNDS_IN_A_ROW
        return comes and (not self._met or peer in self._met or not self._meets_everybody)

    def has_time_for(self, peer: bytes, now: float) -> bool:
        """Whether a peer may join or lead a group, because all time that it has cost is paid for.

        While this peer is left out itself, it has time for no other: newcomers do not know yet that it is too slow.
        """
        if not self.budget.allows(self._own, now, is_stranger=False, joins=True):
            return False
        is_stranger = bool(self._met) and peer not in self._met
        return self.budget.allows(peer, now, is_stranger=is_stranger, joins=True)

    def counts(self, peer: bytes, now: float) -> bool:
        """Whether a peer's progress counts, and this peer waits for it."""
        return self.budget.allows(peer, now, is_stranger=not self.is_proven(peer))

    def whom_to_wait_for(self, peers: set[bytes], now: float) -> set[bytes]:
        """Those of the announced peers that this peer should wait for."""
        return {peer for peer in peers if self.counts(peer, now)}

    def limited(self, records: Collection[ReportT], now: float) -> list[ReportT]:
        """The records of all peers, as far as they are believed."""
        return [record if self.counts(record.peer_id, now) else record.at_most(0, 0.0) for record in records]

    def largest_weight(self, peer: bytes) -> float:
        """The largest weight of a member in the parts that this peer reduces."""
        return math.inf

    def called_end(self, companions: Mapping[bytes, KnownPeer], epoch: int, own_estimate: float, now: float) -> float:
        """The earliest DHT time at which this epoch ends according to others; infinite: no other says that it ends.

        Args:
            own_estimate: DHT time at which it ends by this peer's own estimate.
        """
        present = (c for peer, c in companions.items() if c.is_reachable(now) and self.counts(peer, now))
        said = (c.end for c in present if c.record.epoch == epoch)
        return min((end for end in said if end is not None), default=math.inf)

    def credible(
        self,
        companions: Mapping[bytes, PeerT],
        own: int,
        now: float,
        own_estimate: Callable[[Mapping[bytes, PeerT]], float],
    ) -> dict[bytes, PeerT]:
        """The peers whose epoch the run can have reached; the others are left out.

        Clients are never left out: they lead no peer to another epoch, so their claims do no harm.

        Args:
            own: this peer's epoch.
            own_estimate: DHT time at which it ends by this peer's own estimate, if only the given companions count.
        """
        ahead = {peer: c for peer, c in companions.items() if not c.record.client_mode and c.record.epoch > own}
        if not ahead:
            return dict(companions)
        voters = self._voters(companions, now)
        run = self._epoch_of_run(voters, own, now)
        # One member is enough to end this epoch: it may have counted samples that this peer does not know of.
        is_over = any(self.is_proven(peer) for peer in ahead if peer in voters)
        if is_over and run <= own:
            is_over = self.may_be_over(companions, ahead, own, now, own_estimate)
        last = max(run, own + 1 if is_over else own)
        # A member may have been partitioned off together with others.
        strangers = ahead if self._met else {}
        for peer in [p for p in strangers if p in voters and not self.has_met(p)]:
            if ahead[peer].record.epoch > last + _WORTH_TELLING:
                self._name_impossible_epoch(ahead[peer], last)
        return {peer: c for peer, c in companions.items() if peer not in ahead or c.record.epoch <= last}

    def may_be_over(
        self,
        companions: Mapping[bytes, PeerT],
        ahead: Mapping[bytes, PeerT],
        own: int,
        now: float,
        own_estimate: Callable[[Mapping[bytes, PeerT]], float],
    ) -> bool:
        """Whether this epoch can already be over if a member says so."""
        return True

    def are_most_beyond(self, companions: Mapping[bytes, KnownPeer], own: int, now: float) -> bool:
        """Whether most hosts have ended this epoch. One peer alone may have failed to meet the others."""
        return self._epoch_of_run(self._voters(companions, now), own, now) > own

    def _voters(self, companions: Mapping[bytes, PeerT], now: float) -> dict[bytes, PeerT]:
        """The peers whose epochs decide that of the run. Donors, whose state may be old, count if nobody trains."""
        voters = {p: c for p, c in companions.items() if not c.record.client_mode and c.is_reachable(now)}
        return {p: c for p, c in voters.items() if not c.record.is_donor} or voters

    def _epoch_of_run(self, voters: Mapping[bytes, KnownPeer], own: int, now: float) -> int:
        # In a large swarm a record is old when it is read, and its peer has advanced meanwhile.
        usual = statistics.median(self._epochs) if self.is_large and self._epochs else math.inf
        votes = votes_by_host({peer: c.epoch_by_now(now, usual) for peer, c in voters.items()}, self._host_of)
        return epoch_of_most(sorted([*votes, own]) if now < self._counts_itself_until else votes, own)

    def _unheard(self, companions: Mapping[bytes, KnownPeer]) -> set[bytes]:
        """The peers that this one knows only from a record in the DHT."""
        return {peer for peer, c in companions.items() if not c.is_heard and not self.has_met(peer)}

    def _name_impossible_epoch(self, companion: KnownPeer, run: int) -> None:
        """Warn of a peer that claims to be far beyond the run, if this one has heard from it.

        Otherwise it may be dead, and its record may be left from a run that has been restarted since.
        """
        if not companion.is_heard:
            return
        self.troubles["epochs that cannot be"] += self._tell_once(
            companion.record.peer_id,
            "peer %s says that it is at epoch %d, but the run is at epoch %d: its claim does not count unless most "
            "peers say the same",
            companion.record.epoch,
            run,
            tell=self._warn_seldom,
        )
