"""What follows from the records of peers: pure functions and the board."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import MAX_ASKED, ProgressExchange
from shoal.optim.progress.records import (
    MAX_CALLED,
    MAX_COMPANIONS,
    Companion,
    LocalTrainingProgress,
    PerformanceEMA,
    ProgressRecord,
    RefreshPolicy,
    estimate_is_off,
    expected_members,
    parse_record,
    summarize,
)

pytestmark = pytest.mark.once

NOW = 1000.0


def record(peer: str, epoch: int = 0, samples: int = 0, speed: float = 0.0, time: float = NOW, client: bool = False):
    return LocalTrainingProgress(peer.encode(), epoch, samples, speed, time, client)


def summary(own, *others, target=100, now=NOW, published=True, stopped=(), is_sketchy=False, num_others=None):
    return summarize(
        own,
        others,
        published=published,
        target_batch_size=target,
        now=now,
        next_fetch_time=0.0,
        stopped=stopped,
        is_sketchy=is_sketchy,
        num_others=num_others,
    )


def test_a_sample_of_the_others_stands_for_all_of_them():
    own = record("me", samples=10, speed=1)
    others = [record(f"peer {number}", samples=20, speed=2) for number in range(5)]
    progress = summary(own, *others, target=10_010, num_others=50)
    assert (progress.samples_accumulated, progress.num_peers) == (10 + 50 * 20, 51)
    assert progress.eta_next_epoch == pytest.approx(NOW + (10_010 - 1010) / (1 + 50 * 2))
    assert summary(own, *others, num_others=3).num_peers == 6, "there are at least those that are known"
    assert summary(own, num_others=50).samples_accumulated == 10


def test_a_peer_alone_counts_itself():
    progress = summary(record("me", epoch=3, samples=20, speed=10), published=False)
    assert (progress.epoch, progress.samples_accumulated, progress.num_peers) == (3, 20, 0)
    assert progress.eta_next_epoch == pytest.approx(NOW + 8)


def test_samples_of_the_global_epoch_count_and_grow_with_time():
    own = record("me", epoch=5, samples=10, speed=10)
    behind = record("behind", epoch=4, samples=70, speed=10)
    ahead = record("same", epoch=5, samples=20, speed=20, time=NOW - 1)
    progress = summary(own, behind, ahead)
    assert progress.epoch == 5
    assert progress.samples_accumulated == 30
    assert progress.num_peers == 3
    assert progress.eta_next_epoch == pytest.approx(NOW + (100 - 30 - 20) / 40)


def test_clients_do_not_move_the_epoch():
    progress = summary(record("me", epoch=1), record("client", epoch=9, client=True))
    assert progress.epoch == 1
    assert progress.num_clients == 1
    assert summary(record("me", epoch=1), record("node", epoch=9)).epoch == 9


def test_peers_that_cannot_be_reached_will_not_deliver():
    own, gone = record("me", samples=10, speed=10), record("gone", samples=80, speed=1000)
    assert summary(own, gone, stopped=[b"gone"]).samples_accumulated == 10
    assert summary(own, gone, stopped=[b"gone"]).num_peers == 1
    assert summary(own, gone, stopped=[b"gone"]).eta_next_epoch == pytest.approx(NOW + 9)


def test_the_epoch_of_peers_that_are_gone_does_not_count():
    own, gone = record("me", epoch=2), record("gone", epoch=9)
    assert summary(own, gone).epoch == 9
    assert summary(own, gone, stopped=[b"gone"]).epoch == 2


def test_without_speed_the_end_is_far():
    assert summary(record("me")).eta_next_epoch > NOW + 1e12


def test_records_are_read_more_often_near_the_end():
    policy = RefreshPolicy(0.5, 10, 3, 3, 0.2)
    assert policy.next_fetch_time(NOW, NOW + 8, 0) == NOW + 3
    assert policy.next_fetch_time(NOW, NOW + 8, 1) == NOW + 2
    assert policy.next_fetch_time(NOW, NOW + 12, 100) == pytest.approx(NOW + 10)
    assert policy.next_fetch_time(NOW, NOW + 1e20, 4) == NOW + 10
    assert policy.next_fetch_time(NOW, NOW, 4) == NOW + 0.5


def test_readings_are_rarer_the_more_there_is_to_read():
    policy = RefreshPolicy(0.5, 10, 3, 3, 0.2)
    assert policy.reading_period(0, reaches_others=False) == 3
    assert policy.reading_period(3, reaches_others=True) == 20, "others can be called meanwhile"
    assert 3 < policy.reading_period(3, reaches_others=False) < 20
    few, many = 63, 1023
    ratio = policy.reading_period(many, reaches_others=True) / policy.reading_period(few, reaches_others=True)
    assert ratio * few / many * math.log2(2 + many) / math.log2(2 + few) == pytest.approx(1), "bytes per second"
    assert policy.calling_period(1) == 0.5
    assert 0.5 < policy.calling_period(3) < policy.calling_period(63) < 10


def test_others_are_told_anew_when_they_are_wrong_by_more_than_a_batch_and_a_few_per_cent():
    told = record("me", samples=100, speed=10)

    def is_off(samples: int, epoch: int = 0, batch: int = 10) -> bool:
        own = record("me", epoch=epoch, samples=samples, time=NOW + 10)
        return estimate_is_off(told, own, share=1000, batch_size=batch)

    assert not is_off(200), "just as it was believed"
    assert not is_off(155)
    assert is_off(145)
    assert is_off(255)
    assert not is_off(255, batch=60), "the end of a batch cannot be foreseen"
    assert is_off(200, epoch=1)


def test_peers_of_which_nothing_is_heard_in_a_large_swarm_are_believed_to_be_as_far_as_the_others():
    own, known = record("me", epoch=1, samples=20, speed=10), record("known", epoch=1, samples=20, speed=10)
    unheard = record("unheard", epoch=0, samples=70, speed=20)
    assert summary(own, known, unheard, target=200).samples_accumulated == 40
    sketchy = summary(own, known, unheard, target=200, is_sketchy=True)
    assert sketchy.samples_accumulated == 80
    assert sketchy.eta_next_epoch == pytest.approx(NOW + (200 - 80) / 40)


def test_records_round_trip_and_strangers_are_refused():
    good = record("me", 3, 4, 5.0)
    in_the_table = ProgressRecord(**good.to_dict())
    assert parse_record(good.to_dict()) == in_the_table
    as_sent_by_newer_versions = {**good.to_dict(), "something": "new"}
    assert parse_record(as_sent_by_newer_versions) == in_the_table


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": "3"},
        {"epoch": 1.5},
        {"epoch": True},
        {"epoch": 2**60},
        {"samples_accumulated": -1},
        {"samples_per_second": -0.1},
        {"samples_per_second": math.nan},
        {"samples_per_second": math.inf},
        {"samples_per_second": None},
        {"time": math.nan},
        {"time": math.inf},
        {"client_mode": 1},
        {"peer_id": "text"},
        {"addresses": ["x"] * 100},
        {"addresses": [5]},
        {"endorsement": "text"},
    ],
    ids=str,
)
def test_malformed_records_are_refused(change):
    with pytest.raises(ValueError, match=r"."):
        parse_record({**record("peer").to_dict(), **change})


@settings(max_examples=30)
@given(st.recursive(st.none() | st.integers() | st.floats() | st.binary(), lambda s: st.dictionaries(st.text(), s)))
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match=r"."):
        parse_record(value)


def companion(peer: str, epoch: int, **fields) -> tuple[bytes, Companion]:
    return peer.encode(), Companion(record(peer, epoch), fields.pop("expiration", NOW + 60), **fields)


def test_who_is_expected_in_the_next_round():
    companions = dict(
        [
            companion("same epoch", 7),
            companion("finishing", 6, end=NOW),
            companion("in the last round", 6),
            companion("missed the last round", 6),
            companion("dead since two rounds", 5),
            companion("ahead", 8),
            companion("expired", 7, expiration=NOW - 1),
            companion("unreachable", 7, unreachable_since=NOW - 1),
        ]
    )
    last_members = {b"in the last round", b"dead since two rounds"}
    expected = expected_members(7, 7, companions, last_members, NOW)
    assert expected == {b"same epoch", b"finishing", b"in the last round"}
    in_the_background = expected_members(7, 8, companions, last_members, NOW)
    assert in_the_background == expected | {b"ahead"}, "it may still be in the round that it has left behind"


class Me:
    """The board of a peer that makes so many samples per second, in batches of ten."""

    def __init__(self, speed: float = 10.0, target: int = 100) -> None:
        self.speed, self.clock = speed, 0.0
        self.board = ProgressBoard(b"me", False, target, RefreshPolicy(), PerformanceEMA(clock=lambda: self.clock), NOW)
        self.board.published = self.board.introduced = True

    def report(self, samples: int, epoch: int = 0) -> ProgressBoard:
        for so_far in range(10, samples + 1, 10):
            self.clock += 10 / self.speed
            self.board.report(epoch, so_far, NOW)
        return self.board


def make_board(target: int = 100) -> ProgressBoard:
    return Me(target=target).board


def test_the_epoch_is_over_by_count_by_time_and_by_word():
    board = Me().report(40)
    assert not board.epoch_is_over(NOW)
    assert board.end_of_epoch(NOW) == pytest.approx(NOW + 6)
    board.hear(record("other"), NOW + 60, NOW)
    assert board.epoch_is_over(NOW + 6.1), "by extrapolation"
    board.hear(record("other", samples=60), NOW + 60, NOW)
    assert board.epoch_is_over(NOW), "by count"
    board = Me().report(40)
    board.hear(record("other"), NOW + 60, NOW)
    assert not board.epoch_is_over(NOW)
    board.hear(record("other"), NOW + 60, NOW, end=NOW)
    assert board.epoch_is_over(NOW), "by word"
    board.finish_update(1, [b"other"], NOW)
    assert not board.epoch_is_over(NOW), "another epoch"


def test_the_earliest_end_that_anybody_has_called_counts():
    board = Me().report(40)
    board.hear(record("other"), NOW + 60, NOW, end=NOW + 4)
    board.hear(record("third"), NOW + 60, NOW, end=NOW + 5)
    assert board.end_of_epoch(NOW) == NOW + 4
    assert not board.epoch_is_over(NOW + 3)
    assert board.epoch_is_over(NOW + 4)
    board.hear(record("ahead", epoch=1), NOW + 60, NOW, end=NOW + 9)
    assert board.epoch_is_over(NOW + 3), "whoever is beyond this epoch says that it is over"


def test_a_peer_stops_after_the_batch_whose_end_is_nearest_to_the_end_of_the_epoch():
    board = Me(speed=10).report(40)
    assert board.batch_time == pytest.approx(1.0)
    board.hear(record("other", samples=20, speed=10), NOW + 60, NOW)  # 40 are missing: two seconds
    assert not board.should_stop(NOW, patience=10)
    assert not board.should_stop(NOW + 1.4, patience=10), "more than half of another batch fits"
    assert board.should_stop(NOW + 1.6, patience=10)
    assert not board.epoch_is_over(NOW + 1.6)
    assert not board.should_stop(NOW + 1.6, patience=0.1), "longer than it would wait"
    board.introduced = False
    assert not board.should_stop(NOW + 1.6, patience=10), "nobody would wait for it"


def test_a_peer_alone_makes_every_batch_that_is_missing():
    board = Me(speed=10).report(90)
    assert not board.should_stop(NOW + 0.9, patience=10)
    assert not board.should_stop(NOW + 5, patience=10), "a batch that takes long is not done for that"
    board.report(0, 100, NOW + 6)
    assert board.should_stop(NOW + 6, patience=10)


def test_what_a_peer_declares_ends_with_its_update():
    board = Me(speed=10).report(90)
    board.hear(record("other", samples=8), NOW + 60, NOW)
    assert not board.updating
    assert board.seconds_to_end(NOW) == 0
    board.begin_update(NOW, patience=10)
    assert board.updating
    assert board.seconds_to_end(NOW) == pytest.approx(0.2)
    assert board.seconds_to_end(NOW + 3) == 0
    board.cancel_update()
    assert not board.updating
    board.begin_update(NOW, patience=0.1)
    assert board.seconds_to_end(NOW) == pytest.approx(0.1), "others shall not take longer than this peer would wait"
    board.finish_update(1, [], NOW)
    assert not board.updating


def test_estimates_use_the_corrected_speed():
    """An average that starts at zero is far too small after a few batches."""
    me = Me(speed=10)
    board = me.report(30)  # the first of three measurements is only a guess
    assert board.own.samples_per_second == pytest.approx(10)
    assert board.end_of_epoch(NOW) == pytest.approx(NOW + 7)
    assert me.board.performance_ema.ema_seconds_per_sample == pytest.approx(0.019), "what must not be used"


def test_samples_that_are_kept_at_another_epoch_are_not_counted_twice():
    me = Me()
    for epoch, samples in ((1, 10), (1, 20), (2, 30), (3, 10)):
        me.clock += 0.1
        me.board.report(epoch, samples, NOW)
        assert me.board.own.samples_per_second == pytest.approx(100), "each report is of 10 more"


def test_no_samples_no_speed():
    me = Me()
    me.clock += 10
    me.board.report(0, 0, NOW)
    assert me.board.own.samples_per_second == 0
    assert me.board.batch_time == 0


def test_word_of_the_next_epoch_may_come_early():
    board = make_board()
    board.hear(record("fast", epoch=1), NOW + 60, NOW, end=NOW)
    board.finish_update(1, [], NOW)
    assert board.epoch_is_over(NOW)


def test_a_peer_that_others_do_not_know_yet_waits():
    board = make_board()
    board.introduced = False
    board.report(0, 100, NOW)
    assert not board.epoch_is_over(NOW)
    board.introduced = True
    assert board.epoch_is_over(NOW)


def test_only_peers_with_samples_that_keep_up_publish():
    board = make_board()
    assert not board.wants_publishing(NOW)
    board.report(0, 0, NOW)
    assert not board.wants_publishing(NOW)
    board.report(0, 4, NOW)
    assert board.wants_publishing(NOW)
    board.hear(record("other", epoch=2), NOW + 60, NOW)
    assert not board.wants_publishing(NOW), "two epochs behind"


def test_a_failed_call_counts_until_a_sign_of_life():
    board = make_board()
    board.hear(record("other"), NOW + 60, NOW)
    assert board.expected_members(NOW) == {b"other"}
    board.mark_unreachable(b"other", NOW + 1)
    assert board.expected_members(NOW) == set()
    assert board.unreachable_peers(NOW + 1) == [b"other"]
    assert board.unreachable_peers(NOW + 100) == [], "its record has expired"
    board.hear_many([(record("other", time=NOW + 0.5), NOW + 60)], NOW)
    assert board.expected_members(NOW) == set(), "an older record says nothing"
    board.hear_many([(record("other", time=NOW + 2), NOW + 60)], NOW)
    assert board.expected_members(NOW) == {b"other"}
    board.mark_unreachable(b"other", NOW + 3)
    board.hear(record("other", time=NOW + 2), NOW + 60, NOW + 4)
    board.mark_unreachable(b"other", NOW + 3.5)
    assert board.expected_members(NOW) == {b"other"}, "it has called after that call was made"
    assert board.unreachable_peers(NOW) == []


def test_goodbye_and_expiry():
    board = make_board()
    board.hear(record("left"), NOW + 60, NOW)
    board.forget(b"left", NOW + 50)
    assert board.expected_members(NOW) == {b"left"}, "a goodbye that is older than the record"
    board.forget(b"left", NOW + 70)
    board.hear(record("silent"), NOW + 60, NOW)
    assert board.expected_members(NOW) == {b"silent"}
    assert board.global_progress(NOW + 61).num_peers == 1
    assert board.companions_to_call(NOW + 61) == []


def test_who_has_said_goodbye_is_not_expected_in_a_round_that_it_was_to_join():
    board = make_board()
    board.hear(record("left"), NOW + 60, NOW)
    board.forget(b"left", math.inf)
    board.forget(b"stranger", math.inf)
    assert board.still_expected(NOW, {b"left": 0, b"stranger": 0}) == set()
    board.hear(record("left", time=NOW + 1), NOW + 61, NOW + 1)
    assert board.still_expected(NOW + 1, {b"left": 0}) == {b"left"}, "it has come back"


def test_an_old_record_does_not_bring_back_who_has_said_goodbye():
    board = make_board()
    board.hear(record("left", time=NOW), NOW + 60, NOW)
    board.forget(b"left", math.inf)
    assert board.hear_many([(record("left", time=NOW), NOW + 60)], NOW) == []
    board.hear(record("left", time=NOW - 1), NOW + 60, NOW, end=NOW)
    assert board.expected_members(NOW) == set()
    assert not board.epoch_is_over(NOW)
    board.hear_many([(record("left", time=NOW + 1), NOW + 61)], NOW + 1)
    assert board.expected_members(NOW + 1) == {b"left"}, "it has come back"


def test_older_records_do_not_replace_newer_ones():
    board = make_board()
    board.hear(record("other", samples=30, time=NOW), NOW + 60, NOW)
    board.hear(record("other", samples=10, time=NOW - 5), NOW + 55, NOW)
    assert board.global_progress(NOW).samples_accumulated == 30


def test_what_was_read_counts_until_it_is_read_again():
    board = make_board()
    crowd = [(record(f"peer {i}"), NOW + 1) for i in range(200)]
    board.hear_many(crowd, NOW)
    assert not board.wants_reading(NOW + 20), "that would be too much"
    assert len(board.expected_members(NOW + 20)) == 200
    assert board.wants_reading(NOW + 1000)
    assert board.expected_members(NOW + 1000) == set()


def test_whom_to_ask_in_passing():
    board = make_board()
    board.hear_many([(record(name), NOW + 60) for name in ("heard", "silent", "unused", "gone")], NOW)
    board.hear_many([(record("client", client=True), NOW + 60)], NOW)
    later = board.next_fetch_time
    for name in ("heard", "silent", "gone"):
        board.note_call(name.encode(), later)
    for name in ("heard", "unused"):
        board.hear(record(name), later + 60, later)
    board.mark_unreachable(b"gone", later)
    assert [companion.peer_id for companion in board.companions_to_ask(later)] == [b"silent", b"unused"]


def test_news_go_at_once_to_all_but_those_whose_program_has_ended():
    board = make_board()
    board.hear_many([(record(name), NOW + 60) for name in ("there", "silent", "ended", "frozen, then ended")], NOW)
    board.hear_many([(record("client", client=True), NOW + 60)], NOW)
    for peer, is_refused in ((b"silent", False), (b"ended", True), (b"frozen, then ended", False)):
        board.mark_unreachable(peer, NOW + 1, is_refused=is_refused)
    board.mark_unreachable(b"frozen, then ended", NOW + 2, is_refused=True)
    board.mark_unreachable(b"ended", NOW + 2, is_refused=False)
    assert [each.peer_id for each in board.companions_to_call(NOW + 3, or_ended=False)] == [b"there", b"silent"]
    board.hear(record("ended", time=NOW + 4), NOW + 64, NOW + 4)
    assert [each.peer_id for each in board.companions_to_call(NOW + 5, or_ended=False)] == [
        b"there",
        b"silent",
        b"ended",
    ]


def test_members_of_a_group_count_until_they_move_on():
    board = make_board()
    board.hear(record("a"), NOW + 60, NOW)
    board.hear(record("b"), NOW + 60, NOW)
    last_epochs = {b"a": 0, b"b": 0, b"stranger": 0}
    assert board.still_expected(NOW, last_epochs) == {b"a", b"b", b"stranger"}
    board.hear(record("a", epoch=1, time=NOW + 1), NOW + 60, NOW)
    assert board.still_expected(NOW, last_epochs) == {b"b", b"stranger"}
    assert board.still_expected(NOW, {**last_epochs, b"a": 1}) == {b"a", b"b", b"stranger"}


def test_a_crowd_of_strangers_takes_neither_memory_nor_the_news_from_those_who_take_part():
    now, rng = 1e9, random.Random(0)
    own, *mates = (rng.randbytes(32) for _ in range(6))
    board = ProgressBoard(own, False, 1000, RefreshPolicy(), PerformanceEMA(), now)

    def hear(peer: bytes) -> None:
        board.hear(LocalTrainingProgress(peer, 0, 8, 1.0, now, False), now + 60, now)

    for mate in mates:
        hear(mate)
    board.note_round({own: 8.0, **dict.fromkeys(mates, 8.0)}, now + 5)
    for _ in range(2 * MAX_COMPANIONS):
        hear(rng.randbytes(32))
    known = {record.peer_id for record in board.companions_to_call(now + 5)}
    assert len(known) <= MAX_COMPANIONS
    assert known >= {*mates}
    exchange = ProgressExchange(
        Mock(),
        SimpleNamespace(rng=rng),
        "run",
        board,
        owner_tag=b"tag",
        endorsement=b"",
        min_period=0.5,
        metadata_expiration=60.0,
    )
    records = board.companions_to_call(now + 5)
    for most in (MAX_ASKED, MAX_CALLED):
        chosen = [record.peer_id for record in exchange.some_of(records, most)]
        assert len(set(chosen)) == len(chosen) == most
        assert {*mates} <= {*chosen}
