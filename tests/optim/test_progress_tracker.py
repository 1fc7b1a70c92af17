"""Trackers of several peers over real DHTs."""

from __future__ import annotations

import time

import pytest

from shoal.clock import get_dht_time
from shoal.optim.progress_tracker import ProgressTracker
from tests.optim.conftest import in_parallel, wait_until

QUICK = {"min_refresh_period": 0.05, "default_refresh_period": 0.2, "start": True}


@pytest.fixture
def trackers(make_dhts, closing):
    def make(count: int, target: int = 100, clients: int = 0, **options) -> list[ProgressTracker]:
        dhts = make_dhts(count, clients=clients)
        return [closing(ProgressTracker(dht, "run", target, **{**QUICK, **options})) for dht in dhts]

    return make


def test_peers_learn_of_each_other_and_of_the_end_of_the_epoch(trackers):
    a, b, observer = trackers(3)
    in_parallel(lambda: a.report_local_progress(0, 40), lambda: b.report_local_progress(0, 30))
    for tracker in (a, b, observer):
        wait_until(lambda t=tracker: t.global_progress.samples_accumulated == 70, "all samples are known")
        assert tracker.global_progress.num_peers == 2
    assert observer.expected_group_size == 3, "the two, and itself"
    assert a.expected_group_size == 2
    assert observer.performance_ema.samples_per_second < 1e-9
    a.report_local_progress(0, 75)
    assert a.ready_to_update_epoch
    assert a.estimated_next_update_time <= get_dht_time()
    wait_until(lambda: b.ready_to_update_epoch and observer.ready_to_update_epoch, "the others know, too")


def test_word_travels_faster_than_records(trackers):
    a, b = trackers(2, target=10**9, min_refresh_period=30)
    in_parallel(lambda: a.report_local_progress(0, 1), lambda: b.report_local_progress(0, 1))
    wait_until(lambda: a.expected_group_size == b.expected_group_size == 2, "the two know each other")
    assert not a.ready_to_update_epoch
    started = time.monotonic()
    with b.pause_updates():
        b.declare_epoch_over()
        wait_until(lambda: a.ready_to_update_epoch, "the other has declared the epoch over")
        b.update_epoch(1, members=[a.dht.peer_id])
    wait_until(lambda: a.global_epoch == 1, "the other is at the next epoch")
    assert time.monotonic() - started < 5, "not by reading the records, which happens every 30 s"
    assert a.expected_group_size == 1, "nobody comes to the round at the end of epoch 0 any more"
    assert b.expected_group_size == 2, "the last companion is still on its way"


def test_a_dead_peer_is_noticed_at_the_next_occasion(trackers):
    a, b = trackers(2, target=10**9, min_refresh_period=30)
    in_parallel(lambda: a.report_local_progress(0, 1), lambda: b.report_local_progress(0, 1))
    wait_until(lambda: a.expected_group_size == 2, "the two know each other")
    b.dht.portal.call(b.dht.p2p.shutdown())  # as if killed: no goodbye
    with a.pause_updates():
        a.declare_epoch_over()
        wait_until(lambda: a.expected_group_size == 1, "the dead peer is not expected any more")


def test_goodbye_reaches_others_before_the_shutdown_is_over(trackers):
    a, b = trackers(2, target=10**9, min_refresh_period=30)
    in_parallel(lambda: a.report_local_progress(0, 1), lambda: b.report_local_progress(0, 1))
    wait_until(lambda: a.expected_group_size == b.expected_group_size == 2, "the two know each other")
    b.shutdown(5)
    assert a.expected_group_size == 1
    assert a.global_progress.num_peers == 1
    assert not b.is_alive()
    assert a.is_alive()
    assert a.dht.get("run_progress", latest=True).value[b.dht.peer_id.to_bytes()].value is None
    b.report_local_progress(0, 5)  # harmless


def test_a_client_is_counted_but_does_not_lead(trackers):
    a, client = trackers(2, target=10**9, clients=1)
    in_parallel(lambda: a.report_local_progress(0, 1), lambda: client.report_local_progress(3, 1))
    wait_until(lambda: a.global_progress.num_clients == 1, "the client's record is known")
    assert a.global_epoch == 0
    assert client.client_mode
    wait_until(lambda: client.expected_members() == set(), "the client knows that nobody is at its epoch")


def test_peers_without_samples_stay_invisible(trackers):
    a, idle = trackers(2)
    idle.report_local_progress(0, 0)
    a.report_local_progress(0, 1)
    wait_until(lambda: idle.global_progress.samples_accumulated == 1, "the idle peer has read the records")
    wait_until(lambda: a.board.introduced, "the other one is introduced")
    assert a.expected_group_size == 1
    assert not idle.board.published


def test_hostile_records_are_skipped(trackers, make_dhts):
    (a,) = trackers(1)
    now = get_dht_time()
    good = {**a.local_progress.to_dict(), "peer_id": b"peer", "samples_accumulated": 7}
    hostile = {
        b"peer": good,
        b"thief": {**good, "peer_id": b"somebody else", "samples_accumulated": 1000},
        b"liar": {**good, "peer_id": b"liar", "epoch": -5},
        b"text": "nonsense",
        "not bytes": good,
    }
    for subkey, value in hostile.items():
        assert a.dht.store("run_progress", value, now + 60, subkey=subkey)
    wait_until(lambda: a.global_progress.samples_accumulated == 7, "the good record has been read")
    assert a.global_progress.epoch == 0
    assert a.global_progress.num_peers == 1


def test_epochs_change_only_in_a_pause(trackers):
    (a,) = trackers(1)
    with pytest.raises(AssertionError, match="pause_updates"):
        a.update_epoch()
    a.report_local_progress(0, 50)
    wait_until(a.fetched_global_progress_this_epoch.is_set, "the records have been read")
    with a.pause_updates():
        assert a.update_epoch() == 1
        with pytest.raises(AssertionError, match="reentrant"), a.pause_updates():
            pass
    assert a.global_epoch == 1
    assert a.global_progress.samples_accumulated == 0
    assert a.local_progress.samples_accumulated == 0


def test_time_in_a_pause_does_not_slow_the_estimate(trackers):
    (a,) = trackers(1)
    a.performance_ema.reset_timer()
    a.report_local_progress(0, 50)
    before = a.performance_ema.samples_per_second
    assert before > 0
    assert a.local_progress.samples_per_second == before


def test_bad_arguments():
    with pytest.raises(NotImplementedError, match="signed"):
        ProgressTracker(None, "run", 1, private_key=object(), start=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target_batch_size"):
        ProgressTracker(None, "run", 0, start=False)  # type: ignore[arg-type]
