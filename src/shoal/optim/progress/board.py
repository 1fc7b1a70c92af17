"""What one peer knows about the progress of all peers. Its training thread and its event loop share it under a lock,
which is held only to read or change something, never while waiting."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import replace

import msgspec

from shoal.base.bounded import Bounded
from shoal.guard.policy import JOIN_SHARE, Members
from shoal.optim.history.fork_choice import ForkChoice, ForkTracker
from shoal.optim.history.journal import Lineage
from shoal.optim.progress.records import (
    MAX_CALLED,
    Companion,
    GlobalTrainingProgress,
    LocalTrainingProgress,
    PerformanceEMA,
    RefreshPolicy,
    SwarmRecords,
    estimate_is_off,
    expected_members,
    make_room,
    summarize,
)
from shoal.optim.progress.run_settings import Company

# A connection idle for this long is used at the next refresh. Chosen: a refresh comes within ten seconds, and an idle
# connection is closed after thirty.
SECONDS_BETWEEN_USES = 15.0
# News that is younger than this, or than this peer's last batch, counts as current. In seconds. Chosen.
LATEST_SECONDS = 0.15
# If a larger share of the target than this is extrapolated from older records, this peer asks before it ends the epoch.
# Chosen.
MOST_GUESSED = 0.05
# In seconds, some thirty years. Chosen: stands for an unknown end of an epoch, because messages cannot hold infinity.
FAR_AHEAD = 1e9
# The most goodbyes that are remembered, so that late records of departed peers do not bring them back. Chosen.
MAX_DEPARTED = 1024


class EpochRule:
    """When an epoch is over: when all peers together have made the samples of the target."""

    adds_up = True
    """Whether what peers have done is added up."""
    is_listed = True
    """Whether users join the run by its name, so that it is in the list of runs."""

    def share(self, target: int, num_peers: int) -> float:
        """The share of one peer in an epoch."""
        return target / max(1, num_peers)

    def summary(
        self, progress: GlobalTrainingProgress, records: Collection[LocalTrainingProgress], now: float
    ) -> GlobalTrainingProgress:
        """The swarm's progress.

        Args:
            progress: as the sum over all peers.
            records: the believed records of the peers at that epoch that can be reached, including this one.
        """
        return progress

    def end(
        self,
        progress: GlobalTrainingProgress,
        own: LocalTrainingProgress,
        called_end: Callable[[float], float],
        now: float,
    ) -> float:
        """DHT time at which this peer should end its epoch.

        Args:
            called_end: takes this peer's estimate of the end of the epoch, and returns the earliest end according to
                others.
        """
        if progress.epoch > own.epoch or progress.samples_accumulated >= progress.target_batch_size:
            return now
        return max(now, min(progress.eta_next_epoch, called_end(progress.eta_next_epoch)))

    def declared_end(self, end: float, own: LocalTrainingProgress, target: int, now: float, patience: float) -> float:
        """Until when others may continue after this peer has declared its epoch over, by default until ``end``."""
        return end


class ProgressBoard:
    """This peer's progress, the records of other peers, and the signs of life behind them.

    Args:
        peer_id: id of this peer.
        client_mode: others never call this peer; ``is_callable`` tells whether they can at present.
        target_batch_size: samples of all peers together that make an epoch.
        refresh: how often the swarm's records are read.
        performance_ema: measures this peer's speed.
        now: DHT time, in seconds, as in all methods.
        host_of: the host of a peer. All peers of one host together have one vote about the epoch of the run.
        make_guard: makes the guard, which decides how far others are believed.
        rule: when an epoch is over; default: by the samples of all.
    """

    def __init__(
        self,
        peer_id: bytes,
        client_mode: bool,
        target_batch_size: int,
        refresh: RefreshPolicy,
        performance_ema: PerformanceEMA,
        now: float,
        host_of: Callable[[bytes], Hashable] = bytes,
        is_callable: Callable[[], bool] = lambda: True,
        make_guard: Callable[[bytes, Callable[[bytes], Hashable], float], Members] = Members,
        rule: EpochRule | None = None,
    ) -> None:
        self.rule = rule or EpochRule()
        self._is_client: Callable[[], bool] = lambda: client_mode or not is_callable()
        self.lock, self._contributed, self.batch_size = threading.RLock(), False, 0
        self._target_batch_size, self._refresh, self.performance_ema = target_batch_size, refresh, performance_ema
        self.own = LocalTrainingProgress(peer_id, 0, 0, 0.0, now, self._is_client())
        """This peer's progress."""
        self.samples_of_last_step = 0
        self._asked_at = -math.inf
        self.moves_together = False
        """Whether peers announce an epoch only after the round that ends the one before, so that all are in it."""
        self.published = False
        """Whether others can find this peer's record."""
        self.introduced, self.epoch_when_introduced = False, 0
        """Whether all peers that can be called have been told that this one takes part, and the swarm's epoch then."""
        self.num_others: float | None = None
        """The estimated number of other peers; ``None`` if this peer knows all of them, not only a sample."""
        self.on_change: list[Callable[[], object]] = []
        """The watchers. They are called without the lock after a change that somebody may wait for. The exchange calls
        them after news of others, at once or a little later for several changes together."""
        self.fork_tracker = ForkTracker(peer_id, host_of)
        """Knows which peers train another model. These are not counted."""
        self.guard = make_guard(peer_id, host_of, now)
        """Decides how far others are believed."""
        self.parse_records: Callable[[SwarmRecords], GlobalTrainingProgress] | None = None
        """Replaces the usual summary of the records that count. It may read from this board."""
        self.company: Company | None = None
        """The settings of other peers; ``None``: they are not compared."""
        self._foreign_before = frozenset[bytes]()
        self._companions: dict[bytes, Companion] = {}
        # Peers that have said goodbye, and up to which DHT time their records no longer count.
        self._departed: Bounded[bytes, float] = Bounded(MAX_DEPARTED)
        self._last_members: frozenset[bytes] = frozenset()
        self._declared_end: float | None = None
        self.contributed_in_advance = False
        """While :attr:`updating`: this peer waits elsewhere, and others already have its gradients."""
        self._next_reading = self._planned_at = now
        self._global = GlobalTrainingProgress(0, 0, target_batch_size, 0, 0, math.inf, now)

    def set_target(self, samples: int) -> None:
        """Set the target of the epoch that begins."""
        self._target_batch_size = samples

    @property
    def strangers(self) -> frozenset[bytes]:
        """The peers with settings that keep this one from averaging with them."""
        return frozenset() if self.company is None else self.company.strangers

    @property
    def companions(self) -> Mapping[bytes, Companion]:
        """All other known peers. Use it under :attr:`lock`."""
        return self._companions

    # --- the swarm ----------------------------------------------------------------------------------------------------

    def global_progress(self, now: float) -> GlobalTrainingProgress:
        """The swarm's progress at this moment."""
        with self.lock:
            return replace(self._summarize(now), samples_of_last_step=self.samples_of_last_step)

    @property
    def next_fetch_time(self) -> float:
        """DHT time of the next refresh of the others' progress."""
        return self._global.next_fetch_time

    def wants_reading(self, now: float) -> bool:
        """Whether the next refresh should read the records in the DHT; otherwise calls to others are enough."""
        return now >= self._next_reading

    def plan_refresh(self, now: float) -> None:
        """The others' progress was just refreshed: plan the next time."""
        with self.lock:
            self._plan_refresh(now)

    def _plan_refresh(self, now: float) -> None:
        self._planned_at = now
        progress, num_callable = self._summarize(now), len(self._callable())
        due = self._refresh.next_fetch_time(now, progress.eta_next_epoch, progress.num_peers)
        earliest = now + self._refresh.calling_period(num_callable) if num_callable else self._next_reading
        self._global = replace(progress, next_fetch_time=max(due, earliest))

    def wants_publishing(self, now: float) -> bool:
        """Whether others should learn of this peer: it has made samples and is at most an epoch behind."""
        with self.lock:
            return self._contributed and self.own.epoch >= self._summarize(now).epoch - 1

    @property
    def relies_on_records(self) -> bool:
        """Whether some peers learn this peer's progress only from its record in the DHT, because nobody calls them."""
        return self.own.client_mode or len(self._companions) > MAX_CALLED

    def is_misjudged(self, told: LocalTrainingProgress) -> bool:
        """Whether peers whose latest record of this peer is ``told`` are now wrong about it."""
        with self.lock:
            share = self.rule.share(self._target_batch_size, self._global.num_peers)
            return estimate_is_off(told, self.own, share, self.batch_size)

    def calling_period(self) -> float:
        """The least time between two rounds of calls, in seconds. News that others wait for goes out at once."""
        with self.lock:
            return self._refresh.calling_period(min(MAX_CALLED, len(self._callable())))

    # --- the end of the epoch -----------------------------------------------------------------------------------------

    def end_of_epoch(self, now: float) -> float:
        """DHT time of the next global step, by count, by extrapolation, or because other peers say so.

        If it is overdue, this is now.
        """
        with self.lock:
            kin = self.kin(now)
            progress = self._global = self._summary_of(kin, now)

            def called_end(estimate: float) -> float:
                return self.guard.called_end(kin, self.own.epoch, estimate, now)

            return self.rule.end(progress, self.own, called_end, now)

    def epoch_is_over(self, now: float) -> bool:
        """Whether it is time for the next global step."""
        if self._contributed and not self.introduced:
            return False  # others do not wait for a peer that they do not know: it would step alone
        if self.end_of_epoch(now) > now:
            return False
        return bool(self.expected_members(now)) or self._is_known_to_be_over(now)

    def ends_when_introduced(self, now: float) -> bool:
        """Whether this peer has all samples of its epoch by itself, and only has to look for others before it steps.

        If it knows of others, they have begun without it, and it makes another batch until they know it.
        """
        progress = self.global_progress(now)
        if self.introduced or not self._contributed or progress.num_peers > 1:
            return False
        return progress.epoch == self.own.epoch and self._is_known_to_be_over(now)

    def _is_known_to_be_over(self, now: float) -> bool:
        """Whether the epoch is over by count. For a lone peer extrapolation is not enough: it may just have paused."""
        progress = self.global_progress(now)
        return progress.epoch > self.own.epoch or progress.samples_accumulated >= progress.target_batch_size

    def should_stop(self, now: float, patience: float) -> bool:
        """Whether this peer should make the global step rather than begin another batch.

        Each peer stops after the batch that ends closest to the end of the epoch. Otherwise a peer that is ready a
        moment early would begin another batch, and all others would wait for it.

        Args:
            patience: the longest time to wait for the end of the epoch, in seconds.
        """
        end = self.end_of_epoch(now)
        if self.introduced and 0 < end - now < self._longest_wait(patience):
            return bool(self.expected_members(now))  # alone, it can complete the target to the last sample
        return end <= now and self.epoch_is_over(now)

    def rests_on_guesses(self, now: float) -> bool:
        """Whether the end of the epoch is due only by extrapolation of older records.

        Their peers may have paused since, for example on a busy machine, and the step would have too few samples.
        """
        if not self.rule.adds_up:
            return False
        with self.lock:
            kin = self.kin(now)
            progress = self._summary_of(kin, now)
            is_known = progress.epoch > self.own.epoch or progress.samples_accumulated >= progress.target_batch_size
            if is_known or self.guard.called_end(kin, self.own.epoch, now, now) <= now:
                return False
            latest = now - max(LATEST_SECONDS, 1.2 * self.batch_time)
            records = [c.record for c in kin.values() if c.is_reachable(now) and c.heard_at < latest]
            present = self.guard.limited([r for r in records if r.epoch == self.own.epoch], now)
            guessed = sum(max(0.0, now - record.time) * record.samples_per_second for record in present)
            return len(kin) <= MAX_CALLED and guessed > MOST_GUESSED * self._target_batch_size

    def should_ask(self, now: float) -> bool:
        """Whether to ask others how far they are, because the next batch is probably the last one."""
        is_near = self.introduced and self.end_of_epoch(now) - now <= self.batch_time + LATEST_SECONDS
        if not is_near or now < self._asked_at + max(LATEST_SECONDS, self.batch_time) or not self.rests_on_guesses(now):
            return False
        self._asked_at = now
        return True

    def may_join_in_advance(self, patience: float) -> bool:
        """Whether this peer may join a group while it makes a batch, for which the others in the group then wait.

        Args:
            patience: the longest that peers wait for others that have not joined, in seconds.
        """
        return self.introduced and self.batch_time <= JOIN_SHARE * patience

    def is_awaited(self, now: float, patience: float) -> bool:
        """Whether it is time for the next global step, and another peer is ready for it and waits.

        Args:
            patience: as for :meth:`should_stop`.
        """
        expected = self.expected_members(now)
        with self.lock:
            present = [self._companions[peer] for peer in expected if peer in self._companions]
            if not any(each.end is not None and each.record.epoch == self.own.epoch for each in present):
                return False
        return self.should_stop(now, patience)

    def _longest_wait(self, patience: float) -> float:
        return min(patience, self.batch_time / 2)

    @property
    def batch_time(self) -> float:
        """Average time of a batch as large as this peer's latest one, in seconds; 0 before the first one."""
        return self.batch_size * self.performance_ema.seconds_per_sample

    @property
    def updating(self) -> bool:
        """Whether this peer has declared its epoch over and has not reached the next one yet."""
        return self._declared_end is not None

    def seconds_to_end(self, now: float) -> float:
        """While :attr:`updating`: for how many more seconds others may continue in this epoch."""
        end = self._declared_end
        return 0.0 if end is None else max(0.0, end - now)

    # --- which peers take part ----------------------------------------------------------------------------------------

    def expected_members(self, now: float, until_epoch: int | None = None) -> set[bytes]:
        """Other peers that will take part in the round at the end of this peer's epoch.

        Args:
            until_epoch: a peer beyond this epoch has finished the round; default: this peer's epoch.
        """
        with self.lock:
            if self.own.peer_id in self._settled(now).losers:
                # This peer is about to take over another state. Until then the others do not count it.
                return set()
            last = self.own.epoch if until_epoch is None else until_epoch
            kin = self.kin(now)
            if last <= self.own.epoch and self._is_left_behind(kin, now):
                return set()
            expected = expected_members(self.own.epoch, last, kin, self._last_members, now)
            return self.guard.whom_to_wait_for(expected, now)

    def _is_left_behind(self, kin: Mapping[bytes, Companion], now: float) -> bool:
        """Whether most others have ended this peer's epoch without it.

        Peers that are left behind must not meet in a round of their own: each takes over the state of the others.
        """
        return self.moves_together and self.guard.are_most_beyond(kin, self.own.epoch, now)

    @property
    def had_others(self) -> bool:
        """Whether other peers were in the round that led to this peer's epoch."""
        return bool(self._last_members)

    def still_expected(self, now: float, last_epochs: Mapping[bytes, int]) -> set[bytes]:
        """The given peers that have not left and are not beyond the epoch given for each."""
        with self.lock:
            strangers = self._settled(now).losers
            if self.own.peer_id in strangers:
                return set()
            peers = last_epochs.keys() - strangers
            return {peer for peer in peers if not self._has_left(peer, last_epochs[peer])}

    def _has_left(self, peer: bytes, until_epoch: int) -> bool:
        if (companion := self._companions.get(peer)) is None:
            return peer in self._departed
        record = companion.record
        # With its gradients in the round, a peer that waits elsewhere is half a step beyond its epoch.
        epoch = record.epoch + companion.in_advance / 2
        return record.is_donor or companion.unreachable_since is not None or epoch > until_epoch

    def unreachable_peers(self, now: float) -> list[bytes]:
        """Peers with valid records that this peer could not call, and has not heard of since."""
        with self.lock:
            companions = self._companions.items()
            return [peer for peer, c in companions if c.unreachable_since is not None and c.is_valid(now)]

    def present(self, now: float) -> list[bytes]:
        """All other peers that train and can be reached, whether or not they count."""
        with self.lock:
            return [p for p, c in self._companions.items() if c.is_reachable(now) and not c.record.is_donor]

    @property
    def last_members(self) -> frozenset[bytes]:
        """The other members of the last round."""
        return self._last_members

    def time_of_record(self, peer: bytes) -> float | None:
        """DHT time of a peer's latest record; ``None`` if this peer has none."""
        companion = self._companions.get(peer)
        return None if companion is None else companion.record.time

    def companions_to_call(self, now: float, *, or_ended: bool = True) -> list[LocalTrainingProgress]:
        """Records of the peers that can be called directly, with ``or_ended`` including those whose program has
        ended."""
        with self.lock:
            self._drop_expired(now)
            return [companion.record for companion in self._callable() if or_ended or not companion.has_ended]

    def companions_to_ask(self, now: float) -> list[LocalTrainingProgress]:
        """Records of the peers that can be called and were not heard of recently.

        This includes peers whose idle connection would soon be closed. A new connection costs more bytes than many
        calls, and at the end of the epoch it costs time.
        """
        with self.lock:
            self._drop_expired(now)
            recently = now - (self._global.next_fetch_time - self._planned_at) / 2
            return [
                companion.record
                for companion in self._callable()
                if companion.unreachable_since is None
                and (companion.heard_at < recently or companion.called_at < now - SECONDS_BETWEEN_USES)
            ]

    def companions_to_try_again(self, now: float) -> list[LocalTrainingProgress]:
        """Records of the peers that could not be called a while ago: the outage may be over."""
        with self.lock:
            too_early = now - self._refresh.max_period
            return [c.record for c in self._callable() if c.unreachable_since is not None and c.called_at < too_early]

    def note_call(self, peer: bytes, now: float) -> None:
        """This peer is about to call another one."""
        with self.lock:
            if (companion := self._companions.get(peer)) is not None:
                companion.called_at = now

    def _callable(self) -> list[Companion]:
        return [companion for companion in self._companions.values() if not companion.record.client_mode]

    def is_client(self, peer: bytes) -> bool:
        """Whether a peer is known to be a client, which cannot be called."""
        return (companion := self._companions.get(peer)) is not None and companion.record.client_mode

    # --- own progress -------------------------------------------------------------------------------------------------

    def report(self, epoch: int, samples: int, now: float) -> None:
        """This peer is at this epoch and has accumulated this many samples for the next one."""
        with self.lock:
            before = self.own.samples_accumulated
            # A peer that adopted the others' epoch by averaging with them keeps its samples.
            extra = samples - before if self.own.epoch == epoch or samples > before else samples
            self.batch_size = extra if extra > 0 else self.batch_size
            if extra > 0 and not self.performance_ema.paused:
                self.performance_ema.count(extra)
            else:
                self.performance_ema.reset_timer()
            self._contributed = self._contributed or samples > 0
            self._set_own(epoch, samples, now)

    def announce(self) -> None:
        """Take part from now on, although this peer has made no samples: others wait for its first batch."""
        with self.lock:
            self._contributed = True

    def donate(self, epoch: int, now: float) -> None:
        """This peer does not train, but tells others that it has the state of this epoch for them."""
        with self.lock:
            self.own, self._contributed = msgspec.structs.replace(self.own, is_donor=True), True
            self._set_own(epoch, 0, now)

    def begin_update(self, now: float, patience: float, in_advance: bool = False) -> None:
        """This peer declares its epoch over and begins no more batches. Others may, until the end of the epoch.

        Args:
            patience: as for :meth:`should_stop`.
            in_advance: it waits elsewhere, and only contributes to the round of gradients.
        """
        self.contributed_in_advance = in_advance
        end = min(self.end_of_epoch(now), now + self._longest_wait(patience))
        self._declared_end = self.rule.declared_end(end, self.own, self._target_batch_size, now, patience)
        expected = self.expected_members(now)
        with self.lock:
            self.guard.begin_to_wait(expected, now, patience)

    def finish_update(self, epoch: int, members: Iterable[bytes], now: float) -> None:
        """This peer has reached a new epoch, in a round with these other members."""
        with self.lock:
            self._declared_end = None
            self._last_members = frozenset(members)
            self.guard.note_epoch(now, is_next=epoch == self.own.epoch + 1 and bool(self._last_members))
            self._set_own(epoch, 0, now)
            self.fork_tracker.changed = True
        self.call_watchers()

    def note_round(
        self,
        samples: Mapping[bytes, float],
        now: float,
        seconds: float = 0.0,
        waits: Mapping[bytes, float] | None = None,
    ) -> None:
        """A round is over, see :meth:`Members.note_round <shoal.guard.policy.Members.note_round>`."""
        with self.lock:
            # If rounds overlap with training, a long one costs nobody time.
            waits = waits if self.moves_together else None
            self.guard.note_round(samples, now, self._companions, self.own.epoch, seconds, waits)

    def cancel_update(self) -> None:
        """This peer has given up the transition to the next epoch."""
        self._declared_end = None

    def _set_own(self, epoch: int, samples: int, now: float) -> None:
        own, ema = self.own, self.performance_ema
        speed = ema.samples_per_second if ema.num_updates else 0.0
        self.own = LocalTrainingProgress(own.peer_id, epoch, samples, speed, now, self._is_client(), own.is_donor)

    def note_introduction(self, now: float) -> None:
        """All peers that can be called know that this one takes part, and wait for it from now on."""
        with self.lock:
            self.epoch_when_introduced = self._summarize(now).epoch
            self.introduced = True

    # --- news from others ---------------------------------------------------------------------------------------------

    def hear(
        self,
        record: LocalTrainingProgress,
        expiration: float,
        now: float,
        *,
        end: float | None = None,
        lineage: Lineage | None = None,
        in_advance: bool = False,
    ) -> None:
        """A peer has told its progress itself, so it is alive.

        Args:
            end: it has declared its epoch over, and others may continue until this DHT time.
            in_advance: see :class:`~shoal.optim.progress.records.Companion`.
            lineage: the rounds behind its parameters; ``None`` if it has not told them.
        """
        with self.lock:
            companion = self._take_note(record, expiration, lineage, now)
            if companion is None:
                return
            self.fork_tracker.changed = self.fork_tracker.changed or companion.unreachable_since is not None
            companion.heard_at, companion.unreachable_since = now, None
            if companion.record.epoch == record.epoch:  # otherwise the peer has sent newer progress since
                companion.end, companion.in_advance = end, in_advance

    def hear_many(
        self, found: Iterable[tuple[LocalTrainingProgress, float]], now: float, is_moving: bool = False
    ) -> list[bytes]:
        """The records in the DHT have been read; the next reading is planned accordingly, soon if ``is_moving``.

        Args:
            found: records of other peers and their expirations.

        Returns:
            The peers that can be called and were not known before.
        """
        with self.lock:
            known = set(self._companions)
            read = [self._take_note(record, expiration, record.lineage, now) for record, expiration in found]
            strangers = [peer for peer, c in self._companions.items() if peer not in known and not c.record.client_mode]
            self._drop_expired(now)
            reaches_others = any(companion.unreachable_since is None for companion in self._callable())
            self._next_reading = now + self._refresh.reading_period(len(read), reaches_others, is_moving)
            for companion in filter(None, read):
                companion.kept_until = self._next_reading + self._refresh.max_period
            self._plan_refresh(now)
        return strangers

    def _take_note(
        self, record: LocalTrainingProgress, expiration: float, lineage: Lineage | None, now: float
    ) -> Companion | None:
        """Store the record, and return its peer; ``None`` if that peer has said goodbye since."""
        if record.time <= self._departed.get(record.peer_id, -math.inf):
            return None
        self._departed.pop(record.peer_id, None)
        companion = self._companions.get(record.peer_id)
        if companion is None:
            make_room(self._companions, self.guard.has_met)
            companion = self._companions[record.peer_id] = Companion(record, expiration, known_since=now)
            self.fork_tracker.changed = True
        if record.time >= companion.record.time:
            if lineage is not None:
                self.fork_tracker.changed |= (record.epoch, lineage) != (companion.record.epoch, companion.lineage)
                companion.lineage, companion.lineage_time = lineage, record.time
            if record.epoch != companion.record.epoch:
                companion.end, companion.in_advance = None, False
            companion.record, companion.expiration = record, max(expiration, companion.expiration)
            if companion.unreachable_since is not None and record.time > companion.unreachable_since:
                # A record from after the failed call: the peer is alive, though this one could not call it.
                companion.unreachable_since = None
                self.fork_tracker.changed = True
        return companion

    def forget(self, peer: bytes, expiration: float, last_word: float = -math.inf) -> None:
        """A peer has said goodbye. A known record that expires later than the goodbye overrules it.

        Args:
            last_word: DHT time of the goodbye. Older records, which may still be on their way, no longer count.
        """
        with self.lock:
            companion = self._companions.pop(peer, None)
            if companion is not None and companion.expiration > expiration:
                self._companions[peer] = companion
                return
            self._departed[peer] = last_word if companion is None else max(last_word, companion.record.time)
            self._last_members = self._last_members - {peer}
            self.fork_tracker.forget(peer)

    def mark_unreachable(self, peer: bytes, called_at: float, *, is_refused: bool = False) -> None:
        """A call to a peer has failed. This is ignored if the peer was heard of since the call was made."""
        with self.lock:
            companion = self._companions.get(peer)
            if companion is not None and companion.note_failed_call(called_at, is_refused=is_refused):
                self.fork_tracker.changed = True

    def _drop_expired(self, now: float) -> None:
        for peer in [peer for peer, companion in self._companions.items() if not companion.is_valid(now)]:
            del self._companions[peer]
            self.fork_tracker.changed = True

    # --- partitions of the run ----------------------------------------------------------------------------------------

    def verdict(self, now: float) -> ForkChoice:
        """Which partition of the run wins, if it was split."""
        with self.lock:
            return self._settled(now)

    def _settled(self, now: float) -> ForkChoice:
        foreign = frozenset[bytes]() if self.company is None else self.company.foreign
        if foreign != self._foreign_before:
            self._foreign_before, self.fork_tracker.changed = foreign, True
        companions = self._companions
        if foreign:
            companions = {peer: each for peer, each in companions.items() if peer not in foreign}
        return self.fork_tracker.verdict(self.own, companions, now)

    def kin(self, now: float) -> dict[bytes, Companion]:
        """The peers that count: without those that train another model and will give way, or that claim false epochs.

        Use it under :attr:`lock`.
        """
        verdict = self._settled(now)
        foreign = {*verdict.losers, *self.strangers}
        kin = {peer: c for peer, c in self._companions.items() if peer not in foreign}
        epoch = max(self.own.epoch, verdict.epoch if self.own.peer_id in verdict.losers else 0)
        self.guard.is_large = len(kin) > MAX_CALLED
        # A peer that has declared its epoch over itself believes others that say the same.
        return self.guard.credible(
            kin, epoch, now, lambda few: now if self.updating else self._summary_of(few, now).eta_next_epoch
        )

    def believed_epochs(self, now: float) -> dict[bytes, int]:
        """The epochs of all peers that count."""
        with self.lock:
            return {peer: companion.record.epoch for peer, companion in self.kin(now).items()}

    def _summarize(self, now: float) -> GlobalTrainingProgress:
        self._global = self._summary_of(self.kin(now), now)
        return self._global

    def _summary_of(self, companions: Mapping[bytes, Companion], now: float) -> GlobalTrainingProgress:
        valid = [c for c in companions.values() if c.is_valid(now)]
        own = self.own
        # This peer is about to take over the winners' state: its own progress no longer counts.
        if own.peer_id in self._settled(now).losers:
            own = msgspec.structs.replace(own, epoch=0, samples_accumulated=0, samples_per_second=0.0)
        records = self.guard.limited([c.record for c in valid], now)
        stopped = {c.record.peer_id for c in valid if c.unreachable_since is not None}

        progress = summarize(
            own,
            records,
            published=self.published,
            target_batch_size=self._target_batch_size,
            now=now,
            next_fetch_time=self._global.next_fetch_time,
            stopped=stopped,
            is_sketchy=len(valid) > MAX_CALLED,
            num_others=self.num_others,
        )
        present = [each for each in records if each.peer_id not in stopped]
        usual = self.rule.summary(progress, [each for each in (own, *present) if each.epoch == progress.epoch], now)
        if self.parse_records is None:
            return usual
        expirations = {c.record.peer_id: c.expiration for c in valid}
        told = [(each, expirations[each.peer_id]) for each in present]
        return self.parse_records(SwarmRecords([(own, math.inf), *told] if self.published else told, usual))

    def call_watchers(self) -> None:
        """Tell the watchers that something has changed."""
        for callback in list(self.on_change):
            callback()
