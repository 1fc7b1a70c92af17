"""Trackers of several peers over real DHTs."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from shoal.averaging import RoundResult
from shoal.base.clock import get_dht_time
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.errors import P2PHandlerError
from shoal.optim.history.journal import BEGINNING, ForkPoint, Lineage
from shoal.optim.progress.exchange import ProgressExchange, ProgressMessage
from shoal.optim.progress.records import parse_record
from shoal.optim.progress.schema import endorse
from shoal.optim.progress_tracker import ProgressTracker
from tests.optim.conftest import PATIENCE, in_parallel, wait_until

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


def test_a_lone_peer_ends_its_first_epoch_with_the_batch_that_completes_it(trackers):
    """However soon that is: it waits until it has looked for others, and makes no further batch meanwhile."""
    (a,) = trackers(1)
    a.report_local_progress(0, 99)
    assert not a.should_stop(patience=10)
    a.report_local_progress(0, 100)
    assert a.should_stop(patience=10)
    assert a.is_introduced


def test_a_record_tells_what_its_peer_calls_itself(trackers):
    (a,) = trackers(1)
    a.report_local_progress(0, 1)
    wait_until(lambda: a.dht.get("run_progress", latest=True), "the record is there")
    [record] = a.dht.get("run_progress", latest=True).value.values()
    assert parse_record(record.value).name == a.dht.p2p.name
    assert a.dht.p2p.name


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
    assert time.monotonic() - started < 25, "not by reading the records, which happens every 30 s"
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
    by_tag = a.dht.get("run_progress", latest=True).value
    assert sorted(entry.value is None for entry in by_tag.values()) == [False, True], "one of them has left"
    b.report_local_progress(0, 5)  # harmless


def test_a_client_is_counted_but_does_not_lead(trackers):
    a, client = trackers(2, target=10**9, clients=1)
    in_parallel(lambda: a.report_local_progress(0, 1), lambda: client.report_local_progress(3, 1))
    wait_until(lambda: a.global_progress.num_clients == 1, "the client's record is known")
    assert a.global_epoch == 0
    assert client.client_mode
    wait_until(lambda: client.expected_members() == set(), "the client knows that nobody is at its epoch")


def test_a_client_calls_whom_it_meets_although_nobody_has_told_it_of_them(trackers):
    """A newcomer cannot call it, and the nodes that it knows may be dead."""
    seldom = dict.fromkeys(["min_refresh_period", "default_refresh_period", "max_refresh_period"], 10 * PATIENCE)
    a, client = trackers(2, target=10**9, clients=1, **seldom)
    client.compare_rounds()
    client.report_local_progress(0, 1)
    wait_until(lambda: client.board.introduced, "the client has read all records")
    a.report_local_progress(0, 1)
    wait_until(lambda: a.global_progress.num_clients == 1, "the other one knows the client")
    assert client.board.time_of_record(a.dht.peer_id.to_bytes()) is None
    peers = (a.dht.peer_id, client.dht.peer_id)
    client.note_round(RoundResult(bytes(20), peers, (), (1.0, 1.0), 1.0, (), False, 0.1))
    with client.pause_updates():
        client.update_epoch(1, members=peers)
    wait_until(lambda: client.board.time_of_record(a.dht.peer_id.to_bytes()), "it has called the other one")


def test_peers_without_samples_stay_invisible(trackers):
    a, idle = trackers(2)
    idle.report_local_progress(0, 0)
    a.report_local_progress(0, 1)
    wait_until(lambda: idle.global_progress.samples_accumulated == 1, "the idle peer has read the records")
    wait_until(lambda: a.board.introduced, "the other one is introduced")
    assert a.expected_group_size == 1
    assert not idle.board.published


def test_two_trackers_in_one_process_are_two_peers(trackers):
    keys = [PrivateKey(), PrivateKey()]
    dhts = [tracker.dht for tracker in trackers(2, start=False)]
    a, b = (ProgressTracker(dht, "other", 100, private_key=key, **QUICK) for dht, key in zip(dhts, keys, strict=True))
    in_parallel(lambda: a.report_local_progress(0, 40), lambda: b.report_local_progress(0, 30))
    wait_until(lambda: a.global_progress.num_peers == b.global_progress.num_peers == 2, "each counts both")
    tags = {SignatureValidator(key).local_public_key for key in keys}
    wait_until(lambda: set(a.dht.get("other_progress", latest=True).value) == tags, "each record is under its key")
    a.shutdown()
    b.shutdown()


@pytest.fixture
def stranger(trackers, make_dhts):
    """A peer that keeps to no rule, the tag of its key, an honest record of it, and two trackers."""
    a, b = trackers(2, max_refresh_period=1.0)
    (dht,) = make_dhts(1, clients=1)
    signatures = SignatureValidator(PrivateKey())
    dht.add_validators([signatures])
    tag = signatures.local_public_key
    honest = {
        **a.local_progress.to_dict(),
        "peer_id": dht.peer_id.to_bytes(),
        "samples_accumulated": 7,
        "client_mode": True,
        "endorsement": endorse(dht.p2p.identity, tag),
    }
    return SimpleNamespace(dht=dht, tag=tag, honest=honest, a=a, b=b)


@pytest.mark.slow
def test_an_honest_record_is_believed(stranger):
    assert stranger.dht.store("run_progress", stranger.honest, get_dht_time() + 60, subkey=stranger.tag)
    for tracker in (stranger.a, stranger.b):
        wait_until(lambda t=tracker: t.global_progress.samples_accumulated == 7, "the record has been read")
        assert tracker.global_progress.num_clients == 1
    assert stranger.dht.store("run_progress", None, get_dht_time() + 61, subkey=stranger.tag), "it says goodbye"
    wait_until(lambda: stranger.a.global_progress.num_clients == 0, "the goodbye has been read")


@pytest.mark.parametrize("is_later", [False, True], ids=["first", "later"])
def test_addresses_that_nobody_understands_end_no_tracker(stranger, is_later):
    """They may be of a kind that a newer version knows."""
    trackers = stranger.a, stranger.b
    odd = {
        **stranger.honest,
        "addresses": ["nowhere", "/ip4/1.2.3.4/tcp/5/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
    }
    if is_later:
        in_parallel(*(lambda t=t: t.report_local_progress(0, 1) for t in trackers))
        wait_until(lambda: all(t.is_introduced for t in trackers), "they know each other")
    assert stranger.dht.store("run_progress", odd, get_dht_time() + 60, subkey=stranger.tag)
    for tracker in trackers:
        wait_until(lambda t=tracker: t.global_progress.samples_accumulated == 7 + 2 * is_later, "it has been read")
        assert tracker.is_alive()


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -5},
        {"epoch": 2**60},
        {"samples_accumulated": 1.5},
        {"samples_per_second": float("inf")},
        {"client_mode": 1},
        {"addresses": ["/ip4/1.2.3.4/tcp/1"] * 100},
        {"endorsement": b""},
        {"endorsement": bytes(64)},
        {"peer_id": b"nobody"},
    ],
    ids=str,
)
def test_nodes_refuse_malformed_records(stranger, change):
    forged = {**stranger.honest, **change}
    assert not stranger.dht.store("run_progress", forged, get_dht_time() + 60, subkey=stranger.tag)
    assert stranger.a.dht.get("run_progress", latest=True) is None


@pytest.mark.parametrize("value", ["nonsense", 5, [], {"progress": 1}], ids=str)
def test_nodes_refuse_anything_else(stranger, value):
    assert not stranger.dht.store("run_progress", value, get_dht_time() + 60, subkey=stranger.tag)


def test_nodes_refuse_records_in_the_name_of_others(stranger):
    victim, now = stranger.a, get_dht_time()
    victim.report_local_progress(0, 1)
    wait_until(lambda: victim.board.introduced, "it has published its record")
    ((tag, entry),) = stranger.dht.get("run_progress", latest=True).value.items()
    impostors = [
        (stranger.tag, {**stranger.honest, "peer_id": victim.dht.peer_id.to_bytes()}),
        (stranger.tag, entry.value),
        (tag, {**entry.value, "samples_accumulated": 1000}),
        (tag, entry.value),
        (tag, stranger.honest),
        (tag, None),
        (b"no tag at all", stranger.honest),
    ]
    for subkey, value in impostors:
        assert not stranger.dht.store("run_progress", value, now + 100, subkey=subkey), (subkey, value)
    assert not stranger.dht.store("run_progress", "a plain value", now + 100)
    in_the_table = victim.dht.get("run_progress", latest=True).value
    assert list(in_the_table) == [tag]
    wait_until(lambda: stranger.b.global_progress.samples_accumulated == 1, "the honest record has been read")
    assert stranger.b.global_progress.num_peers == 1


def test_nobody_speaks_for_another_peer(trackers):
    a, b = trackers(2, target=10**9)

    async def lie(change) -> None:
        stub = ProgressExchange.get_stub(b.dht.p2p, a.dht.peer_id, namespace="run_progress")
        await stub.rpc_exchange_progress(
            ProgressMessage.of(msgspec.structs.replace(b.local_progress, **change)), timeout=10
        )

    for change in ({"time": get_dht_time() + 100}, {"epoch": -1}):
        with pytest.raises(P2PHandlerError):
            b.dht.portal.call(lie(change))
    assert a.global_progress.epoch == 0
    assert not a.knows_others
    b.dht.portal.call(lie({"peer_id": b"somebody else"}))
    assert a.expected_members() == {b.dht.peer_id}, "there is no way to say it"


def test_who_was_in_the_last_round_and_then_went_over_to_another_side_is_not_averaged_with(trackers):
    """Both were about to give way. The one that is first must not make its next step with the other."""
    a, b = trackers(2)
    for tracker in (a, b):
        tracker.compare_rounds()
    in_parallel(lambda: a.report_local_progress(0, 1), lambda: b.report_local_progress(0, 1))
    peers = (a.dht.peer_id, b.dht.peer_id)
    for number in range(12):
        round_ = RoundResult(bytes([number]) * 20, peers, (), (1.0, 1.0), 1.0, (), False, 0.1)
        for tracker in (a, b):
            tracker.note_round(round_)
            with tracker.pause_updates():
                tracker.update_epoch(members=peers)
    wait_until(lambda: b.expected_members() == {a.dht.peer_id}, "they are at the same epoch again")
    asked = [b.dht.run_coroutine(lambda *_: b.trains_the_same_model(a.dht.peer_id)), b.gives_way_to]
    assert asked == [True, None]

    others = tuple(bytes([number]) * 4 for number in range(100, 108))
    beginning = ForkPoint(BEGINNING, 0, others[0])
    with a.pause_updates():
        a.adopt_lineage(Lineage(others, (beginning,)), epoch=16)
        a.update_epoch(16)
    wait_until(lambda: b.gives_way_to is not None, "the other one knows that its mate is gone")
    assert not b.dht.run_coroutine(lambda *_: b.trains_the_same_model(a.dht.peer_id))
    assert not b.expected_members(), "a step that it looks for ends at once"
    assert not b.still_expected(dict.fromkeys(peers, 100))


def test_a_pause_waits_for_no_network(trackers, monkeypatch):
    """The table may take its time: reading and writing it happens outside of every lock."""
    (a,) = trackers(1, start=False)
    asked = threading.Event()

    async def hang(*args, **kwargs) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(a.dht.node, "get", hang)
    monkeypatch.setattr(a.dht.node, "store", hang)
    a.run_in_background()
    a.report_local_progress(0, 5)
    assert asked.wait(PATIENCE), "the tracker is reading, and will be for ever"
    with a.pause_updates():
        assert a.update_epoch() == 1
    a.report_local_progress(1, 10)
    assert (a.global_epoch, a.global_progress.samples_accumulated) == (1, 10)
    assert not a.ready_to_update_epoch


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
    with pytest.raises(ValueError, match="target_batch_size"):
        ProgressTracker(None, "run", 0, start=False)  # type: ignore[arg-type]
