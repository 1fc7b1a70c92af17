"""The guard of an open run: a claim costs nothing, training in rounds with others costs work.

Peers tell each other their epoch, their samples and their speed. A liar could use that to end epochs too early, to lead
others to an epoch that does not exist, or to make them wait. So this peer remembers what each other peer has brought to
averaging rounds, its *deeds*, and compares claims with them:

* Samples: a peer is believed to make up to twice what it brought to its last round, in each span as long as the
  training for that round, and one batch more. A peer that was in no round is believed to have one batch. What it
  brought to the first round of a run is a claim itself, and counts as at most eight times what most others brought.
* Epochs: the run is at the epoch that most hosts have reached; this peer has a vote unless it is a newcomer. Peers that
  were in rounds may also say that an epoch is over, once half of it has passed by this peer's own estimate. A peer that
  was away for some epochs believes any epoch that the run can have reached meanwhile at twice its usual pace.
* Waiting: this peer waits for peers that take part in rounds, and for others while that costs it at most 5 % of its
  time. If more peers go on without this one than with it, they are the run, and count as if they had come.

In its first epoch this peer knows nothing: all claims count in full, and it waits for everybody, until nobody has come
three times. Later a fifth of all hosts may lie. Where at least five others are known, more than a fifth must say that
an epoch is over or that the run is ahead. A peer that joins late, or was alone in its first round, has no deeds to
compare with: it ignores the largest fifth of the claims, and cuts them to twice the largest of the rest. So one liar
can end only the first epoch.

In a run of several groups a peer never meets most others. It takes them to be as fast as those it has met, and counts
nobody as missing.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING

from shoal.averaging.majorities import PEERS_PER_LIAR, cut_to_others, largest_but_for_liars, votes_by_host
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, counted
from shoal.net.transport import MOST
from shoal.optim.deeds import ContributionHistory, remember
from shoal.optim.history.window import EPOCHS_AHEAD
from shoal.optim.members import ROUNDS_TO_LOSE_TRUST, SHARE_WASTED, Members
from shoal.optim.progress.epoch_rate import LEAST_SECONDS
from shoal.optim.progress.records import MAX_CALLED, Companion, LocalTrainingProgress
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.averaging.groups.settings import Trust
    from shoal.optim.progress.board import ProgressBoard

logger = logging.getLogger(__name__)

# A claim may be this many times what the peer has delivered, because speeds and shares vary from round to round.
_GENEROSITY = 2.0
# Before this share of an epoch has passed, by its own estimate, this peer believes no claim that the epoch is over.
_LEAST_SHARE_OF_EPOCH = 0.5
# What a peer brought to the first round counts as at most so many times what most others brought. It may bring twice as
# much to each later one, so that a machine that is faster than that counts in full after some rounds.
_MOST_AT_FIRST = 8


class OpenGuard(Members):
    """What this peer has seen others do, and how far it therefore believes them. Not thread-safe: its owner locks it.

    Args:
        own: id of this peer.
        host_of: the host of a peer. All peers of one host have one vote together.
        now: DHT time, in seconds, as in all methods.
    """

    def __init__(self, own: bytes, host_of: Callable[[bytes], Hashable], now: float) -> None:
        super().__init__(own, host_of, now)
        self._deeds: dict[bytes, ContributionHistory] = {}
        # The median of what members brought to the latest round. It stands for peers that this one has not met.
        self._typical = ContributionHistory(0.0, 1.0)
        # The epochs of others, at this peer's last round; and who went on without it then, of those that it knew.
        self._seen_at: dict[bytes, int] = {}
        self._went_on: Collection[bytes] = ()
        # How long the training for the latest round took, and the most samples that anybody brought, and that anybody
        # claims, without the largest fifth.
        self._seconds, self._most_brought, self._most_claimed = LEAST_SECONDS, 0.0, 0.0
        self._round_ended_at = now  # the last round with others; before the first one: the start
        # No strangers are waited for until then; nor may any join or lead until then, because some have held groups up.
        self._waits_again_at = self._admits_again_at = -math.inf
        self._tell_seldom = Seldom(logger.warning)

    # --- what has happened --------------------------------------------------------------------------------------------

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
        """
        members = samples.keys() - {self._own}
        samples = samples if self.knows_rounds else cut_to_others(samples, _MOST_AT_FIRST)
        reachable = {p: c for p, c in (companions or {}).items() if c.is_reachable(now) and not c.record.is_donor}
        size = 1 + len(self._awaited[0] | members | reachable.keys())
        self._meets_everybody = self.full_group is None or size <= self.full_group
        unheard = self._unheard(companions or {})
        self._note_the_missing(members, now, unheard)
        self._note_if_alone(members, [peer for peer, c in reachable.items() if c.record.epoch == own], unheard)
        # A round without any finite gradients, as at the start of mixed precision, says nothing about samples.
        if members and any(samples.values()):
            trained_until = self.pace.trained_until if self.pace.trained_until > self._round_ended_at else now
            seconds, self._round_ended_at = max(trained_until - self._round_ended_at, LEAST_SECONDS), now
            self.latest = {peer: each for peer, each in samples.items() if math.isfinite(each)}
            self._seconds = seconds
            self._most_brought = max(*samples.values(), self._most_brought / _GENEROSITY)
            for peer in members:
                # A peer that brings less once may bring more again, so its weight at most halves.
                known = self._deeds.pop(peer, ContributionHistory(0.0, seconds))
                remember(
                    self._deeds, peer, ContributionHistory(max(samples[peer], known.weight / _GENEROSITY), seconds)
                )
            self._typical = ContributionHistory(
                statistics.median(self._deeds[peer].weight for peer in members), seconds
            )
        self.note_who_went_on(members, companions or {}, now, own)

    def note_who_went_on(
        self, members: Collection[bytes], companions: Mapping[bytes, Companion], now: float, own: int
    ) -> None:
        """If more hosts have gone on without this peer than with it, they are the run: wait for them next.

        They have ended this epoch, or another one since this peer's last round. Clients do not count.
        """
        before, self._seen_at = self._seen_at, {peer: c.record.epoch for peer, c in companions.items()}
        self._went_on = ()
        if not self.knows_rounds or not self._meets_everybody:
            return
        clients = {peer for peer, c in companions.items() if c.record.client_mode}
        without = [
            peer
            for peer, c in companions.items()
            if min(own, before.get(peer, own)) < c.record.epoch and abs(c.record.epoch - own) <= EPOCHS_AHEAD
            if peer not in members and peer not in clients and c.is_reachable(now)
        ]
        self._went_on = [peer for peer in without if self.is_known(peer)]
        beside = {*members, self._own} - clients
        # If those that it knows are enough, a stranger gains nothing by saying that it went on with them.
        run = next((some for some in (self._went_on, without) if self._are_more(some, beside)), ())
        for peer in run:
            # What it brought to its last round with this peer may be little: the end of an epoch would seem far away.
            known = max(self._deeds.pop(peer, self._typical), self._typical, key=lambda deeds: deeds.speed)
            remember(self._deeds, peer, ContributionHistory(known.weight, known.seconds))

    def _are_more(self, some: Collection[bytes], others: Collection[bytes]) -> bool:
        """Whether some peers have more hosts than others."""
        return len({*map(self._host_of, some)}) > len({*map(self._host_of, others)})

    def note_waste(self, peers: Collection[bytes], seconds: float, now: float) -> None:
        strangers = [peer for peer in peers if not self.is_proven(peer)]
        if not strangers or seconds <= 0:
            return
        self._admits_again_at = max(self._admits_again_at, now + seconds / SHARE_WASTED)
        for peer in strangers:
            if (deeds := self._deeds.get(peer)) is not None:
                deeds.has_wasted = True
            self._tell_once(
                peer,
                "waited in vain for new peer %s: for a while no new peers join or lead. Is its line too slow, or its "
                "machine stuck?",
            )

    def _note_the_missing(self, members: Collection[bytes], now: float, unheard: Collection[bytes]) -> None:
        (awaited, since, patience), self._awaited = self._awaited, (frozenset(), now, 0.0)
        if not self._meets_everybody:
            return
        strangers = [peer for peer in awaited if peer not in members and not self.is_proven(peer)]
        if strangers:
            self._waits_again_at = now + min(now - since, patience) / SHARE_WASTED
        if awaited and not members and self._is_deserted:
            self._waits_again_at = now + (now - since) / SHARE_WASTED  # it was a whole search for a group
        for peer in self._deeds.keys() & members:
            self._deeds[peer].missed = 0
        # If nobody came at all, this peer's own line may be down: that is not held against the others.
        known = [peer for peer in awaited if peer not in members and peer in self._deeds] if members else []
        for peer in known:
            self._deeds[peer].missed += 1
        self.troubles["waited in vain"] += len(strangers) + len(known)
        accused = [*strangers, *(peer for peer in known if not self.is_proven(peer))]
        for peer in [each for each in accused if each not in unheard]:
            self._tell_once(
                peer,
                "waited in vain for peer %s in %s running: it is seldom waited for until it comes. Is its line too "
                "slow, or its machine stuck?",
                counted(self._deeds[peer].missed if peer in self._deeds else 1, "round"),
            )

    def is_led_astray(self, leader: bytes, members: Collection[bytes]) -> bool:
        """Whether as many known hosts have gone on without a round as were in it, this peer's and not the leader's."""
        without = {self._host_of(peer) for peer in self._went_on if peer not in members}
        return len(without) >= max(2, len({self._host_of(peer) for peer in members if peer != leader}))

    # --- what follows -------------------------------------------------------------------------------------------------

    @property
    def knows_rounds(self) -> bool:
        """Whether this peer has been in a round with others."""
        return bool(self._deeds)

    @property
    def _knows_nothing(self) -> bool:
        """Whether this peer is in its first epoch, has made no step alone, and has taken over no state."""
        return not self.knows_rounds and self.pace.is_first_epoch and not self._alone

    @property
    def _is_deserted(self) -> bool:
        """Whether this peer, which was in no round yet, was alone so often that it no longer believes others."""
        return not self.knows_rounds and self._alone >= ROUNDS_TO_LOSE_TRUST - 1

    def is_proven(self, peer: bytes) -> bool:
        """Whether a peer takes part in rounds, as far as this one can know. Before its own first round, all do."""
        deeds = self._deeds.get(peer)
        return not self._deeds or (deeds is not None and deeds.missed < ROUNDS_TO_LOSE_TRUST)

    def has_time_for(self, peer: bytes, now: float) -> bool:
        """Whether a peer may join or lead a group: it was in rounds, or newcomers have not used up the time for them.

        Who has missed rounds may come back: else two halves of a run would stay apart.
        """
        if now >= self._admits_again_at or not self._deeds:
            return True
        deeds = self._deeds.get(peer)
        return deeds is not None and not deeds.has_wasted

    def is_known(self, peer: bytes) -> bool:
        """Whether this peer knows what another one has brought to rounds."""
        return peer in self._deeds

    def has_met(self, peer: bytes) -> bool:
        """Whether this peer was in a round with another one."""
        return peer in self._deeds

    def whom_to_wait_for(self, peers: set[bytes], now: float) -> set[bytes]:
        """Of several peers that claim to come, those that this peer should wait for."""
        if not self._meets_everybody:
            return peers
        if self._is_deserted and now < self._waits_again_at:
            return set()
        proven = {peer for peer in peers if self.is_proven(peer)}
        # If no proven peer comes, one that may come is better than nobody.
        return proven if proven and now < max(self._waits_again_at, self._admits_again_at) else peers

    def _deeds_of(self, peer: bytes) -> ContributionHistory | None:
        """What a peer has brought to rounds; in several groups, the typical amount stands for a peer not met yet."""
        return self._deeds.get(peer) or (self._typical if self._believes_strangers else None)

    @property
    def _believes_strangers(self) -> bool:
        """Whether a peer that this one does not know may be taking part all the same."""
        return not self._meets_everybody

    def most_samples(self, peer: bytes, now: float, batch_size: int) -> float:
        """The most samples that a peer can have made since the last round. ``batch_size`` is that of this peer."""
        if not self.knows_rounds:
            return MOST
        deeds = self._deeds_of(peer)
        if deeds is None:
            return max(1, batch_size)
        rounds = max(1.0, (now - self._round_ended_at) / deeds.seconds)
        return min(MOST, _GENEROSITY * deeds.weight * rounds + max(1, batch_size))

    def largest_weight(self, peer: bytes, now: float, batch_size: int, own_samples: float = 0.0) -> float:
        """The most samples that a member can bring to a round that begins now; arguments as of :meth:`most_samples`.

        In several groups, who is met for the first time must not weigh less. ``own_samples``: what this peer has made.
        """
        if peer == self._own and not self._knows_nothing:
            seen = max(self._most_brought if self.knows_rounds else self._most_claimed, own_samples)
            others = [brought for member, brought in self.latest.items() if member != self._own and brought]
            # Who has not met this peer has seen others bring about as much, see :meth:`most_limit`.
            most = _GENEROSITY**2 * max(others) if others and not self._meets_everybody else MOST
            return min(most, _GENEROSITY * seen + max(1, batch_size))
        most = self.most_samples(peer, now, batch_size)
        return most if self._meets_everybody else max(most, min(MOST, _GENEROSITY * self._most_brought))

    def most_limit(self, leader: bytes, now: float, batch_size: int) -> float:
        """At least the limit that an honest leader sets for itself. It is twice what this peer finds for the leader, or
        would for the member that brought most: what peers have seen may differ."""
        if not self.knows_rounds:
            return MOST
        rounds = max(1.0, (now - self._round_ended_at) / self._seconds)
        known = self.most_samples(leader, now, batch_size)
        return min(MOST, _GENEROSITY * max(known, _GENEROSITY * self._most_brought * rounds))

    def least_limit(self, leader: bytes, peer: bytes) -> float:
        """A lower bound of what an honest leader finds by :meth:`largest_weight`: what it saw the peer bring, if both
        were in this peer's latest round."""
        return self.latest.get(peer, 0.0) if leader in self.latest else 0.0

    def limited(
        self, records: Collection[LocalTrainingProgress], now: float, batch_size: int
    ) -> list[LocalTrainingProgress]:
        """The records of all peers, cut to what is believed; the other arguments are those of :meth:`most_samples`."""
        if self.knows_rounds:
            return [self._limited_by_deeds(record, now, batch_size) for record in records]
        if self._is_deserted:
            return [record.at_most(max(1, batch_size), 0.0) for record in records]
        samples = largest_but_for_liars(record.samples_accumulated for record in records) if records else 0.0
        self._most_claimed = samples
        if len(records) < PEERS_PER_LIAR or self._knows_nothing:
            return list(records)
        speed = largest_but_for_liars(record.samples_per_second for record in records)
        most = min(MOST, _GENEROSITY * samples + max(1, batch_size))
        return [record.at_most(most, _GENEROSITY * speed) for record in records]

    def _limited_by_deeds(self, record: LocalTrainingProgress, now: float, batch_size: int) -> LocalTrainingProgress:
        most, deeds = self.most_samples(record.peer_id, now, batch_size), self._deeds_of(record.peer_id)
        fastest = 0.0 if deeds is None else _GENEROSITY * deeds.speed
        return record.at_most(most, fastest)

    def called_end(self, companions: Mapping[bytes, Companion], epoch: int, own_estimate: float, now: float) -> float:
        """The earliest DHT time at which this epoch ends according to enough others; infinite if too few say so.

        Args:
            own_estimate: DHT time at which it ends by this peer's own estimate.
        """
        ends: dict[Hashable, float] = {}
        for peer, c in companions.items():
            if c.end is not None and c.record.epoch == epoch and c.is_reachable(now) and self._has_a_say(peer):
                host = self._host_of(peer)
                ends[host] = min(c.end, ends.get(host, math.inf))
        liars = self._most_liars(companions, now) if ends else 0
        return max(sorted(ends.values())[liars], self._earliest_end(own_estimate)) if len(ends) > liars else math.inf

    def _has_a_say(self, peer: bytes) -> bool:
        """Whether a peer's word that an epoch is over counts; it takes enough others that say the same."""
        return self.is_proven(peer) or self._believes_strangers

    def _most_liars(self, companions: Mapping[bytes, Companion], now: float) -> int:
        """How many of the hosts that have a say may be liars: if more say the same, one of them is honest."""
        if self._knows_nothing:
            return 0
        present = [peer for peer, c in companions.items() if c.is_reachable(now)]
        all_speak = self._believes_strangers  # as in _has_a_say, once for all
        return len({self._host_of(peer) for peer in present if all_speak or self.is_proven(peer)}) // PEERS_PER_LIAR

    def _earliest_end(self, own_estimate: float) -> float:
        """DHT time before which the epoch does not end, whatever others say."""
        if not self.knows_rounds:
            return -math.inf
        return self.pace.began_at + _LEAST_SHARE_OF_EPOCH * (own_estimate - self.pace.began_at)

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
        leading = {peer: c for peer, c in companions.items() if not c.record.client_mode and c.record.epoch > own}
        if not leading:
            return dict(companions)
        voters = self._voters(companions, now)
        votes = self._votes(voters, now)
        run = max(own, self._epoch_of_most(votes, own, now))
        last = max(run, self._epoch_within_reach(votes, own, now))
        rest = {peer: c for peer, c in companions.items() if peer not in leading or c.record.epoch <= last}
        ahead = {peer: c for peer, c in leading.items() if peer not in rest}
        if not ahead:
            return rest
        # A peer at one of the next epochs also says that this one is over. More than a fifth must say how far it is.
        done = {peer: c for peer, c in ahead.items() if c.record.epoch <= own + EPOCHS_AHEAD and self._has_a_say(peer)}
        said = votes_by_host({peer: c.record.epoch for peer, c in done.items()}, self._host_of)
        liars = self._most_liars(companions, now)
        if len(said) > liars:
            over = {peer: c for peer, c in done.items() if c.record.epoch <= said[-1 - liars]}
            before = {**rest, **{peer: c.as_at_the_beginning(own, self.pace.began_at) for peer, c in over.items()}}
            if now >= self._earliest_end(own_estimate(before)):
                rest.update(over)
        # One that is gone says nothing any more, and the first at the next epochs is no liar.
        for peer in [p for p in ahead if p not in done and p in voters and ahead[p].record.epoch > last + EPOCHS_AHEAD]:
            self._name_impossible_epoch(ahead[peer], run)
        return rest

    def _epoch_of_most(self, votes: list[int], own: int, now: float) -> int:
        """The last epoch that most hosts have reached; ``votes`` are their epochs, the lowest first."""
        if votes and self.pace.contact is None and now >= self._counts_itself_until:
            # For a newcomer half of the votes are enough: of two peers, one may be the run and the other a liar.
            return votes[len(votes) // 2]
        votes = sorted([*votes, own])
        return votes[(len(votes) - 1) // 2]

    def _epoch_within_reach(self, votes: list[int], own: int, now: float) -> float:
        """The last epoch that others can have reached if they went on when this peer last met them."""
        reach = self.pace.reach(own, now) if self.knows_rounds else own + EPOCHS_AHEAD
        if len(votes) < PEERS_PER_LIAR or self._knows_nothing:
            return reach
        return min(reach, largest_but_for_liars(votes))


def limit_claims(trust: Trust, board: ProgressBoard, *, weighs_samples: bool, trains_one: bool) -> None:
    """From now on, an averager bounds the weights of others, and judges its leaders.

    Args:
        trust: of the averager.
        board: knows what others have brought.
        weighs_samples: the weight of a member is its number of samples; otherwise all weights are equal.
        trains_one: all peers train one model.
    """
    evidence = board.guard
    assert isinstance(evidence, OpenGuard)

    def largest_weight(peer: PeerID) -> float:
        with board.lock:
            samples = board.own.samples_accumulated
            return evidence.largest_weight(peer.to_bytes(), get_dht_time(), board.batch_size, samples)

    def most_limit(leader: PeerID) -> float:
        with board.lock:
            return evidence.most_limit(leader.to_bytes(), get_dht_time(), board.batch_size)

    if trains_one:
        trust.is_led_astray = lambda leader, members: evidence.is_led_astray(
            leader.to_bytes(), [peer.to_bytes() for peer in members]
        )
    if weighs_samples:
        trust.largest_weight, trust.most_limit = largest_weight, most_limit
        trust.least_limit = lambda leader, peer: evidence.least_limit(leader.to_bytes(), peer.to_bytes())
    else:  # where all weights are 1, a leader has no reason to make any smaller
        trust.largest_weight = trust.most_limit = lambda peer: 1.0
        trust.least_limit = lambda leader, peer: 1.0
