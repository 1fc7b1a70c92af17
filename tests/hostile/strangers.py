"""Attackers who know an address and the name of the run, and nothing else. All that they send is well-formed.

Each one goes on until it is closed: it answers calls as any other tracker does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.base.clock import get_dht_time
from shoal.dht import DHT
from shoal.optim.progress_tracker import ProgressTracker

RUN, TARGET = "run", 64


def claims_epoch(dht: DHT, epoch: int) -> ProgressTracker:
    """It says that it is a million epochs ahead."""
    tracker = ProgressTracker(dht, RUN, TARGET, start=True)
    tracker.report_local_progress(epoch + 10**6, 1)
    return tracker


def is_always_one_ahead(dht: DHT, epoch: int) -> ProgressTracker:
    """It says that the others' epoch is over, because it is at the next one."""
    tracker = ProgressTracker(dht, RUN, TARGET, start=True)

    def follow() -> None:
        tracker.board.report(max(epoch, tracker.global_epoch) + 1, 1, get_dht_time())

    tracker.watch(follow)
    tracker.report_local_progress(epoch + 1, 1)
    return tracker


def claims_samples(dht: DHT, epoch: int) -> ProgressTracker:
    """It says that it has made all the samples of an epoch, and makes a million per second."""
    tracker = ProgressTracker(dht, RUN, TARGET, start=True)

    def follow() -> None:
        tracker.board.report(max(epoch, tracker.global_epoch), 10**9, get_dht_time())

    tracker.watch(follow)
    tracker.performance_ema.update(10**6, interval=1.0)
    tracker.report_local_progress(epoch, 10**9)
    return tracker


def calls_the_end(dht: DHT, epoch: int) -> ProgressTracker:
    """It says that the epoch is over, and that it waits for the others, as soon as there is a new epoch."""
    tracker = ProgressTracker(dht, RUN, TARGET, start=True)

    def follow() -> None:
        tracker.board.report(max(epoch, tracker.global_epoch), 1, get_dht_time())
        tracker.board.begin_update(get_dht_time(), 0.0)

    tracker.watch(follow)
    tracker.report_local_progress(epoch, 1)
    tracker.declare_epoch_over()
    return tracker


ATTACKS: list[Callable[[DHT, int], ProgressTracker]] = [
    claims_epoch,
    is_always_one_ahead,
    claims_samples,
    calls_the_end,
]


def withdraw_everything(dht: DHT, key: str) -> list[Any]:
    """Say, for a hundred years, that those who have declared themselves under a key are not there any more.

    Returns:
        What stands there now, of those who were there before.
    """
    found = dht.get(key, latest=True)
    assert found is not None, "nobody has declared himself"
    declared = [subkey for subkey, entry in found.value.items() if entry.value is not None]
    for subkey in declared:
        dht.store(key, None, get_dht_time() + 100 * 365 * 86400, subkey=subkey)
    left = dht.get(key, latest=True).value
    return [left[subkey].value for subkey in declared if subkey in left]
