"""The end of a slot that is counted in inner steps: who calls it, and how long others may go on."""

from __future__ import annotations

import math

import pytest

from shoal.guard.budget import SHARE_WASTED
from shoal.optim.diloco.in_flight import ExpectedMembers
from shoal.optim.diloco.slot_tracker import SlotBoard
from shoal.optim.progress.records import LocalTrainingProgress, PerformanceEMA, RefreshPolicy
from shoal.p2p import PeerID

NOW = 1000.0


def record(peer, slot, steps, speed=1.0, time=NOW):
    return LocalTrainingProgress(peer.encode(), slot, steps, speed, time, False)


@pytest.fixture(params=[False])
def board(request):
    made = SlotBoard(b"me", request.param, 10, RefreshPolicy(), PerformanceEMA(paused=True), NOW)
    made.patience = 5.0
    made.report(0, 1, NOW)
    made.note_introduction(NOW)
    return made


def test_steps_of_peers_are_not_added_up(board):
    for peer in ("a", "b", "c"):
        board.hear(record(peer, 0, 8), NOW + 60, NOW)
    assert not board.should_stop(NOW, 5.0)
    assert board.global_progress(NOW).samples_accumulated == 8
    assert board.global_progress(NOW).eta_next_epoch == NOW + 2
    # That the first one must be ready by now is no reason to stop.
    assert board.end_of_epoch(NOW + 3) == math.inf


def test_who_has_made_all_steps_is_ready_and_gives_the_others_time(board):
    board.hear(record("a", 0, 3), NOW + 60, NOW)
    board.report(0, 10, NOW)
    assert board.should_stop(NOW, 5.0)
    board.begin_update(NOW, 5.0)
    assert board.seconds_to_end(NOW) == 5.0


def test_others_go_on_until_the_first_one_loses_its_patience(board):
    board.hear(record("a", 0, 10), NOW + 60, NOW, end=NOW + 4)
    assert not board.should_stop(NOW, 5.0)
    assert board.end_of_epoch(NOW + 1) == NOW + 4
    assert board.should_stop(NOW + 4, 5.0)


def test_a_round_that_is_over_is_not_waited_for(board):
    board.hear(record("a", 1, 0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == NOW


def test_where_rounds_overlap_others_may_be_a_slot_ahead_for_a_while(board):
    board.overlaps = True
    board.hear(record("a", 1, 0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == NOW + 5
    assert board.end_of_epoch(NOW + 2) == NOW + 5
    board.hear(record("a", 2, 0, time=NOW + 3), NOW + 60, NOW + 3)
    assert board.end_of_epoch(NOW + 3) == NOW + 3


def test_slots_may_have_different_numbers_of_steps(board):
    board.report(0, 3, NOW)
    assert not board.has_made_all
    board.set_steps(3)
    assert board.has_made_all


def test_who_was_late_ends_its_slot_with_the_others(board):
    """They need not wait for it: with all steps it would be late again."""
    board.hear(record("a", 0, 6, speed=2.0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == math.inf
    board.note_failed_round(-1, NOW)
    assert board.end_of_epoch(NOW) == NOW + 2
    board.note_outer_round({b"me": 1.0, b"a": 1.0}, NOW, ExpectedMembers(0, (), NOW, 0.0))
    board.finish_update(1, [b"a"], NOW)
    board.hear(record("a", 1, 6, speed=2.0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == math.inf


@pytest.mark.parametrize(
    ("silent", "refused", "is_cut_off"),
    [("ab", "", True), ("a", "b", True), ("z", "", False), ("", "ab", False), ("", "", False)],
    ids=["all silent", "one silent, and smaller", "one silent, and larger", "all dead", "nobody"],
)
def test_who_reaches_nobody_any_more_may_be_cut_off(board, silent, refused, is_cut_off):
    met = {name.encode(): 1.0 for name in ["me", *silent, *refused]}
    board.note_outer_round(met, NOW, ExpectedMembers(0, (), NOW, 0.0))
    for peer in silent + refused:
        board.hear(record(peer, 0, 3), NOW + 60, NOW)
        board.mark_unreachable(peer.encode(), NOW + 1, is_refused=peer in refused)
    assert board.is_cut_off(NOW + 2) is is_cut_off
    assert not board.is_cut_off(NOW + 61), "their records have expired"


def test_silent_strangers_do_not_keep_a_lone_peer_from_going_on(board):
    for peer in "ab":
        board.hear(record(peer, 0, 3), NOW + 60, NOW)
        board.mark_unreachable(peer.encode(), NOW + 1, is_refused=False)
    assert not board.is_cut_off(NOW + 2)


@pytest.mark.parametrize("board", [True], ids=["client"], indirect=True)
def test_a_client_that_reaches_nobody_waits_for_a_while(board):
    """Its update would be lost: nobody can call it."""
    assert not board.is_cut_off(NOW), "there was never anybody"
    board.hear(record("a", 0, 3), NOW + 60, NOW)
    assert not board.is_cut_off(NOW), "it reaches somebody"
    board.mark_unreachable(b"a", NOW + 1, is_refused=True)
    assert board.is_cut_off(NOW + 2), "perhaps another one has come since, which it does not know"
    assert not board.is_cut_off(NOW + 61)


def test_all_that_may_update_the_same_count_at_whatever_slot_they_are(board):
    """Rounds of one fragment in several slots may be one round, so halves some slots apart must know of each other."""
    board.report(5, 10, NOW)
    for peer, slot in {"behind": 3, "here": 5, "ahead": 9, "far behind": 1, "newcomer": 3, "absent": 5}.items():
        board.hear(record(peer, slot, 3), NOW + 60, NOW)
    met = dict.fromkeys([b"me", b"behind", b"here", b"ahead", b"far behind"], 1.0)
    board.note_outer_round(met, NOW, ExpectedMembers(4, {PeerID(b"absent")}, NOW, 0.0))
    assert board.electorate(NOW, 2) == {b"behind", b"here", b"ahead"}
    board.mark_unreachable(b"behind", NOW + 1, is_refused=True)
    assert board.electorate(NOW + 1, 2) == {b"here", b"ahead"}


def test_who_did_not_come_and_went_on_counts(board):
    """Else each of two halves that miss each other would be most of those who count."""
    board.report(5, 10, NOW)
    for peer in ("here", "met", "stranger"):
        board.hear(record(peer, 4, 3), NOW + 60, NOW)
    board.note_outer_round(dict.fromkeys([b"me", b"here", b"met"], 1.0), NOW, ExpectedMembers(3, (), NOW, 0.0))
    absent = {PeerID(b"met"), PeerID(b"stranger")}
    board.note_outer_round({b"me": 1.0, b"here": 1.0}, NOW, ExpectedMembers(4, absent, NOW, 0.0))
    assert board.electorate(NOW, 2) == {b"here"}
    for peer in ("met", "stranger"):
        board.hear(record(peer, 5, 3, time=NOW + 1), NOW + 60, NOW + 1)
    assert board.electorate(NOW + 1, 2) == {b"here", b"met"}, "a stranger can say what it likes"
    for slot in (4, 5):
        board.note_outer_round({b"me": 1.0, b"here": 1.0}, NOW + 1, ExpectedMembers(slot, absent, NOW, 0.0))
    assert board.electorate(NOW + 1, 2) == {b"here"}, "it never comes"


def test_only_those_who_were_in_a_round_with_this_peer_are_its_companions(board):
    board.report(9, 10, NOW)
    for peer, slot in {"met": 3, "silent": 4, "newcomer": 0}.items():
        board.hear(record(peer, slot, 3), NOW + 60, NOW)
    board.note_outer_round(dict.fromkeys([b"me", b"met", b"silent"], 1.0), NOW, ExpectedMembers(8, (), NOW, 0.0))
    board.mark_unreachable(b"silent", NOW + 1, is_refused=False)
    assert board.slots_of_companions(NOW + 1) == {b"met": 3}


def test_newcomers_who_may_not_join_do_not_count(board):
    """Else the others could have no round without them, nor with them."""
    board.report(5, 10, NOW)
    for peer in ("here", "newcomer"):
        board.hear(record(peer, 5, 3), NOW + 300, NOW)
    board.note_outer_round({b"me": 1.0, b"here": 1.0}, NOW, ExpectedMembers(4, (), NOW, 0.0))
    assert board.electorate(NOW, 5) == {b"here", b"newcomer"}
    board.guard.note_waste([b"newcomer"], 8.0, NOW)
    assert board.electorate(NOW, 5) == {b"here"}
    assert board.electorate(NOW + 8.0 / SHARE_WASTED + 0.1, 5) == {b"here", b"newcomer"}
