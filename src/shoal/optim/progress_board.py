"""What one peer knows about everybody's progress, shared between its training thread and its event loop.

The lock is held for a look or a change, never while waiting for anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import msgspec

from shoal.optim.progress import (
    Companion,
    GlobalTrainingProgress,
    LocalTrainingProgress,
    RefreshPolicy,
    expected_members,
    summarize,
)


class ProgressBoard:
    """Own progress, other peers' records and the signs of life behind them.

    Args:
        own: this peer's progress at the start.
        target_batch_size: samples that make an epoch.
        refresh: how often the swarm's records are read.
        now: DHT time.
    """

    def __init__(self, own: LocalTrainingProgress, target_batch_size: int, refresh: RefreshPolicy, now: float) -> None:
        self._lock = threading.Lock()
        self._own = own
        self._target_batch_size = target_batch_size
        self._refresh = refresh
        self._companions: dict[bytes, Companion] = {}
        self._last_members: frozenset[bytes] = frozenset()
        self._closed_epoch = -1
        self._updating = False
        self._published = False
        self._introduced = False
        self._contributed = False
        self._global = GlobalTrainingProgress(own.epoch, 0, target_batch_size, 0, 0, float("inf"), now)
        self.on_change: list[Callable[[], object]] = []
        """Called, without the lock, after anything has changed that others may wait for."""

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def own(self) -> LocalTrainingProgress:
        return self._own

    @property
    def updating(self) -> bool:
        """This peer has declared its epoch over and has not finished the transition."""
        return self._updating

    @property
    def introduced(self) -> bool:
        """Everybody that can be called has been told that this peer takes part."""
        return self._introduced

    @introduced.setter
    def introduced(self, introduced: bool) -> None:
        self._introduced = introduced

    @property
    def published(self) -> bool:
        """Others can find this peer's record."""
        return self._published

    @published.setter
    def published(self, published: bool) -> None:
        self._published = published

    def global_progress(self, now: float) -> GlobalTrainingProgress:
        """The swarm's progress at this moment."""
        with self._lock:
            self._summarize(now)
            return self._global

    @property
    def next_fetch_time(self) -> float:
        return self._global.next_fetch_time

    def wants_publishing(self, now: float) -> bool:
        """Whether others should know of this peer: it has samples to give and is not far behind."""
        with self._lock:
            self._summarize(now)
            return self._contributed and self._own.epoch >= self._global.epoch - 1

    def epoch_is_over(self, now: float) -> bool:
        """Whether it is time for the next global step, by count, by the clock, or because another peer says so."""
        with self._lock:
            self._summarize(now)
            progress = self._global
            if self._contributed and not self._introduced:
                return False  # others would not wait for a peer that they do not know
            return (
                progress.epoch > self._own.epoch
                or progress.samples_accumulated >= progress.target_batch_size
                or now >= progress.eta_next_epoch
                or self._closed_epoch >= self._own.epoch
            )

    def expected_members(
        self, now: float, among: Collection[bytes] | None = None, until_epoch: int | None = None
    ) -> set[bytes]:
        """Other peers that will take part in the round at the end of this peer's epoch.

        Args:
            among: only these can: those of them are left out that are gone or have moved on.
            until_epoch: whoever is beyond this epoch has moved on; default: this peer's epoch.
        """
        with self._lock:
            last = self._own.epoch if until_epoch is None else until_epoch
            if among is None:
                return expected_members(self._own.epoch, last, self._companions, self._last_members, now)
            return {peer for peer in among if not self._has_left(peer, last)}

    def _has_left(self, peer: bytes, until_epoch: int) -> bool:
        companion = self._companions.get(peer)
        if companion is None:
            return False
        return companion.unreachable_since is not None or companion.record.epoch > until_epoch

    def companions_to_call(self, now: float) -> list[LocalTrainingProgress]:
        """Records of the peers that can be called directly."""
        with self._lock:
            self._drop_expired(now)
            return [c.record for c in self._companions.values() if not c.record.client_mode]

    # --- own progress -------------------------------------------------------------------------------------------------

    def report(self, epoch: int, samples: int, samples_per_second: float, now: float) -> None:
        """This peer has accumulated so many samples."""
        with self._lock:
            self._own = msgspec.structs.replace(
                self._own, epoch=epoch, samples_accumulated=samples, samples_per_second=samples_per_second, time=now
            )
            self._contributed = self._contributed or samples > 0
            self._summarize(now)

    def begin_update(self) -> None:
        """This peer declares its epoch over."""
        with self._lock:
            self._updating = True

    def finish_update(self, epoch: int, members: Iterable[bytes], samples_per_second: float, now: float) -> None:
        """This peer is at a new epoch.

        Args:
            members: other peers in the round that led there.
        """
        with self._lock:
            self._updating = False
            self._last_members = frozenset(members)
            self._own = msgspec.structs.replace(
                self._own, epoch=epoch, samples_accumulated=0, samples_per_second=samples_per_second, time=now
            )
            self._summarize(now)
        self._changed()

    def cancel_update(self) -> None:
        """The transition did not come to an end."""
        with self._lock:
            self._updating = False

    # --- news from others ---------------------------------------------------------------------------------------------

    def hear(
        self, record: LocalTrainingProgress, expiration: float, now: float, *, updating: bool | None = None
    ) -> None:
        """A record has arrived.

        Args:
            updating: from the peer itself, which is thereby known to be alive; ``None`` = found in the DHT.
        """
        with self._lock:
            self._hear(record, expiration, now, updating)
            self._summarize(now)
        self._changed()

    def hear_many(self, found: Iterable[tuple[LocalTrainingProgress, float]], now: float) -> list[bytes]:
        """The records in the DHT have been read; the next reading is planned accordingly.

        Returns:
            Peers that can be called and were not known before.
        """
        with self._lock:
            known = set(self._companions)
            for record, expiration in found:
                self._hear(record, expiration, now, None)
            strangers = [peer for peer, c in self._companions.items() if peer not in known and not c.record.client_mode]
            self._drop_expired(now)
            self._summarize(now)
            progress = self._global
            next_fetch = self._refresh.next_fetch_time(now, progress.eta_next_epoch, progress.num_peers)
            self._global = replace(progress, next_fetch_time=next_fetch)
        self._changed()
        return strangers

    def _hear(self, record: LocalTrainingProgress, expiration: float, now: float, updating: bool | None) -> None:
        if record.peer_id == self._own.peer_id:
            return
        companion = self._companions.get(record.peer_id)
        if companion is None:
            companion = self._companions[record.peer_id] = Companion(record, expiration)
        elif record.time >= companion.record.time:
            companion.record, companion.expiration = record, max(expiration, companion.expiration)
            if companion.unreachable_since is not None and record.time > companion.unreachable_since:
                companion.unreachable_since = None  # alive after all, though it could not be called
        if updating is not None:
            companion.updating, companion.heard_at, companion.unreachable_since = updating, now, None
            if updating:  # this peer itself may not have reached that epoch yet
                self._closed_epoch = max(self._closed_epoch, record.epoch)

    def forget(self, peer: bytes, expiration: float, now: float) -> None:
        """A peer has said goodbye; a record with a later expiration counts more."""
        with self._lock:
            companion = self._companions.get(peer)
            if companion is None or companion.expiration > expiration:
                return
            del self._companions[peer]
            self._last_members = self._last_members - {peer}
            self._summarize(now)
        self._changed()

    def mark_unreachable(self, peer: bytes, called_at: float) -> None:
        """A call to a peer has failed; what it said after the call was made counts more."""
        with self._lock:
            companion = self._companions.get(peer)
            if companion is None or companion.heard_at >= called_at or companion.unreachable_since is not None:
                return
            companion.unreachable_since = called_at
        self._changed()

    def _drop_expired(self, now: float) -> None:
        for peer in [peer for peer, companion in self._companions.items() if companion.expiration < now]:
            del self._companions[peer]

    def _summarize(self, now: float) -> None:
        valid = [c for c in self._companions.values() if c.expiration >= now]
        self._global = summarize(
            self._own,
            [c.record for c in valid],
            published=self._published,
            target_batch_size=self._target_batch_size,
            now=now,
            next_fetch_time=self._global.next_fetch_time,
            stopped=[c.record.peer_id for c in valid if c.unreachable_since is not None],
        )

    def _changed(self) -> None:
        for callback in list(self.on_change):
            callback()
