"""Backups of lonely stages: while a single peer holds a stage, a peer of a neighbouring stage keeps its state.

All peers agree which one it is (:func:`keeper_of`). The keeper downloads the state from time to time, as an archive
does, and offers it as a donor that does not train, as ``shoal revive`` does. As long as the peer of the stage lives,
newcomers prefer its state, which is newer. When it is dead, the next peer takes over the state that was kept. By then
the other stages have gone some steps further. So the keeper offers it as a state of the epoch that they are at:
otherwise no microbatch would pass.

A copy is kept in memory, or in a folder, where it is an archive like any other. Decisions are functions of the
directory's records; :class:`StageBackups` carries them out in a thread of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, NamedTuple

from shoal.archive.contents import CheckedState, with_epoch
from shoal.archive.keeping import RunSource
from shoal.archive.reviving import Offer, ReadState
from shoal.archive.store import Store
from shoal.averaging.groups.settings import Trust
from shoal.averaging.state.download import State
from shoal.base.logs import Seldom
from shoal.errors import ShoalError
from shoal.optim.history.journal import hash_of
from shoal.p2p import PeerID
from shoal.stages.directory import StageDirectory, StageRecord, name_of_stage, seconds_between_looks
from shoal.stages.placement import Peers

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shoal.dht import DHT

logger = logging.getLogger(__name__)

# A stage that is behind the others by this many epochs and makes no progress cannot catch up by itself. Derived: stages
# that work differ by one.
EPOCHS_BEHIND = 2


# --- decisions --------------------------------------------------------------------------------------------------------


def holders_of(stages: Peers, stage: int) -> dict[PeerID, StageRecord]:
    """The peers of a stage that can be sent microbatches."""
    return {peer: record for peer, record in stages.get(stage, {}).items() if record.serves}


def keeper_of(stage: int, stages: Peers) -> PeerID | None:
    """The peer that keeps the state of a stage; ``None``: it needs none, or nobody else is there.

    It holds a neighbouring stage, or the nearest one that another peer holds.
    """
    holders = holders_of(stages, stage)
    if len(holders) > 1:
        return None
    for distance in range(1, max(stages, default=0) + 1):
        near = {peer for each in (stage - distance, stage + distance) for peer in holders_of(stages, each)}
        if others := near - stages.get(stage, {}).keys():
            return min(others, key=lambda peer: hash_of(peer.to_bytes(), stage.to_bytes(4, "big")))
    return None


class Duty(NamedTuple):
    """What this peer does about the state of a stage."""

    keeps: bool
    """Hold on to the copy that it has, if any."""
    downloads_from: PeerID | None = None
    """Make a newer copy of the state of this peer."""


def duty_of(stage: int, own: PeerID, stages: Peers, kept: int | None, backup_every: int) -> Duty:
    """What this peer does about the state of a stage.

    Args:
        kept: the epoch of the copy that it has.
        backup_every: after how many epochs a copy is replaced.
    """
    holders = holders_of(stages, stage)
    if own in stages.get(stage, {}):
        return Duty(keeps=False)
    if not holders:
        return Duty(keeps=True)
    is_old = kept is None or min(record.epoch for record in holders.values()) >= kept + backup_every
    if keeper_of(stage, stages) == own:
        return Duty(True, next(iter(holders)) if is_old else None)
    # There is another keeper with a newer copy, or none is needed. A second holder may be one that died a moment ago.
    return Duty(keeps=not is_old)


def epoch_to_offer(
    kept: int, reached: int, now: Mapping[PeerID, StageRecord], before: Mapping[PeerID, StageRecord]
) -> int:
    """The epoch as which a copy is offered: its own, or that of the run if nobody has brought the stage that far.

    Args:
        kept: the epoch of the copy.
        reached: the epoch of this peer's own stage.
        now, before: the holders of the stage at this look and the one before.
    """
    for peer, record in now.items():
        earlier = before.get(peer)
        is_stuck = earlier is not None and earlier.epoch == record.epoch and earlier.time < record.time
        if not is_stuck or record.epoch + EPOCHS_BEHIND > reached:
            return kept
    return max(kept, reached)


# --- the shell --------------------------------------------------------------------------------------------------------


class _Only(Trust):
    """Takes the state of one peer only."""

    def __init__(self, peer: PeerID) -> None:
        self.peer = peer

    def rank_donors(self, donors: Mapping[PeerID, float]) -> Mapping[PeerID, float]:
        return {peer: rank for peer, rank in donors.items() if peer == self.peer}


class StageBackups:
    """Keeps the states of lonely stages as far as that is this peer's duty, from :meth:`start` to :meth:`stop`.

    Its methods block: call them outside of the event loop.

    Args:
        dht: of this peer.
        run_id: name of the run.
        directory: of the run, in the event loop of the DHT. It has the records of the stages that this peer holds.
        backup_every: after how many epochs of a stage its copy is replaced.
        folder: where copies go; ``None``: they stay in memory.
        period: seconds between two looks at the directory.

    Raises:
        ValueError: an argument is out of range, or others cannot call this peer.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        directory: StageDirectory,
        *,
        backup_every: int = 10,
        folder: str | os.PathLike[str] | None = None,
        period: float | None = None,
    ) -> None:
        if backup_every < 1:
            raise ValueError(f"backup_every is a number of steps, at least 1: got {backup_every!r}")
        if dht.client_mode:
            raise ValueError("a peer that others cannot call cannot give them a state: leave out client_mode or backup")
        self._dht, self._run_id, self._directory, self._every = dht, run_id, directory, backup_every
        self._folder = None if folder is None else os.fspath(folder)
        self._period = period or seconds_between_looks(directory.count)
        self._stop, self._lock = threading.Event(), threading.Lock()
        # By stage. The lock is held while these change.
        self._copies: dict[int, Offer] = {}
        self._released: set[int] = set()
        # At the last look: the holders by stage, and the epoch of the own stage.
        self._before: dict[int, dict[PeerID, StageRecord]] = {}
        self._reached = -1
        self._downloading: Future[CheckedState] | None = None
        self._warn_seldom = Seldom(logger.warning)
        self._thread = threading.Thread(target=self._run, name=f"backups of {run_id}", daemon=True)

    def start(self) -> None:
        """Begin to look after lonely stages."""
        self._thread.start()

    def stop(self) -> None:
        """Stop keeping and offering states. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            while self._thread.is_alive():
                if (download := self._downloading) is not None:
                    download.cancel()
                self._thread.join(0.1)
        for stage in list(self._copies):
            self._drop(stage)

    def kept(self) -> dict[int, int]:
        """By stage: the epoch of the state that this peer keeps and offers."""
        with self._lock:
            return {stage: copy.epoch for stage, copy in self._copies.items()}

    def release(self, stage: int) -> State | None:
        """Hand over the state of a stage that this peer is about to hold itself. It is not offered any more.

        Call it before the optimizer of the stage is made: nobody can be a donor and a newcomer of one run. The state is
        for its ``load_state``.

        Returns:
            The state; ``None`` if this peer keeps none.
        """
        with self._lock:
            self._released.add(stage)
        copy = self._drop(stage)
        return None if copy is None else with_epoch(copy.kind, copy.read(), copy.epoch)

    def _drop(self, stage: int) -> Offer | None:
        with self._lock:
            copy = self._copies.pop(stage, None)
        if copy is not None:
            copy.shutdown()
        return copy

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            try:
                self.look()
            except CancelledError:
                break
            except (ShoalError, OSError) as e:
                self._warn_seldom("backups of run %r: %s", self._run_id, e)

    def look(self) -> None:
        """Look at the directory once, and do what is to be done."""
        stages: Peers = self._dht.run_coroutine(lambda *_: self._directory.read_all())
        own = self._dht.peer_id
        reached = max((records[own].epoch for records in stages.values() if own in records), default=0)
        for stage in range(self._directory.count):
            if own in stages[stage]:
                self._released.discard(stage)  # from now on the directory tells that this peer holds it
            copy, now = self._copies.get(stage), holders_of(stages, stage)
            duty = duty_of(stage, own, stages, None if copy is None else copy.epoch, self._every)
            if not duty.keeps:
                self._drop(stage)
            elif duty.downloads_from is not None:
                self._download(stage, duty.downloads_from)
            elif copy is not None and reached == self._reached:  # otherwise microbatches pass, and records are old
                self._show(stage, copy, epoch_to_offer(copy.epoch, reached, now, self._before.get(stage, {})))
            self._before[stage] = now
        self._reached = reached

    def _show(self, stage: int, copy: Offer, epoch: int) -> None:
        if epoch > copy.epoch:
            logger.warning(
                "stage %d of run %r has no peer that continues: its state of epoch %d, which this peer has kept, is "
                "given to the next one as of epoch %d", stage, self._run_id, copy.epoch, epoch,
            )  # fmt: skip
            copy.serve_as_of(epoch)

    def _download(self, stage: int, peer: PeerID) -> None:
        """Make a copy of the state of the only peer of a stage."""
        source = RunSource(self._dht, name_of_stage(self._run_id, stage), _Only(peer))
        self._downloading = self._dht.run_coroutine(lambda *_: source.take(), return_future=True)
        try:
            found = self._downloading.result()
        except ShoalError as e:
            logger.debug("no backup of stage %d: %s", stage, e)  # a stage without parameters to train has no state
            return
        finally:
            self._downloading = None
        self._keep(stage, found)

    def _keep(self, stage: int, found: CheckedState) -> None:
        """Offer a state instead of the earlier one."""
        read, rounds = self._stored(found), found.state.metadata.get("rounds")
        with self._lock:
            if stage in self._released or self._stop.is_set():
                return
            if stage in self._copies:
                self._copies[stage].replace(found.epoch, read, rounds)
            else:
                self._copies[stage] = Offer(self._dht, found.run, found.kind, found.epoch, read, rounds)
                self._copies[stage].start()
        logger.info("stage %d of run %r: its state of epoch %d is kept here", stage, self._run_id, found.epoch)

    def _stored(self, found: CheckedState) -> ReadState:
        """Store a state, and return how to read it."""
        if self._folder is None:
            state = found.state
            return lambda: state
        store = Store(f"{self._folder}/{found.run}")
        store.write_contents(found.run, {None: found}, is_private=self._dht.p2p.membership is not None)
        store.prune(1)
        return lambda: store.read(next(store.whole())[0]).state
