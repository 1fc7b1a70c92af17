"""Slots: which fragment is due when, who ends a slot that is counted in steps, and who comes to its round."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.diloco.slots import Attendance, Schedule, SlotCounter, StepRule, group_of
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.records import LocalTrainingProgress, PerformanceEMA, RefreshPolicy
from shoal.p2p import PeerID

NOW = 1000.0


def record(peer, slot, steps, speed=1.0, time=NOW):
    return LocalTrainingProgress(peer.encode(), slot, steps, speed, time, False)


@pytest.fixture(params=[False])
def board(request):
    ema, rule = PerformanceEMA(paused=True), StepRule(5.0)
    made = ProgressBoard(b"me", request.param, 10, RefreshPolicy(), ema, NOW, rule=rule)
    made.report(0, 1, NOW)
    made.note_introduction(NOW)
    return made


@pytest.fixture
def attendance(board):
    return Attendance(SimpleNamespace(board=board), SimpleNamespace(), 1)


def meets(attendance, members, slot=0, absent=()):
    """A round has ended."""
    samples = {name.encode(): 1.0 for name in members}
    expected = {PeerID(name.encode()) for name in absent}
    flight = SimpleNamespace(slot=slot, expected=expected, began_at=time.monotonic())
    attendance.note_members(flight, samples, NOW, 0.0)


def test_steps_of_peers_are_not_added_up(board):
    for peer in ("a", "b", "c"):
        board.hear(record(peer, 0, 8), NOW + 60, NOW)
    assert not board.should_stop(NOW, 5.0)
    assert board.global_progress(NOW).samples_accumulated == 8
    assert board.global_progress(NOW).eta_next_epoch == NOW + 2
    # That the first one must be ready by now is no reason to stop.
    assert board.end_of_epoch(NOW + 3) == math.inf


def test_the_first_peer_gives_the_others_time(board):
    board.hear(record("a", 0, 3), NOW + 60, NOW)
    board.report(0, 10, NOW)
    assert board.should_stop(NOW, 5.0)
    board.begin_update(NOW, 5.0)
    assert board.seconds_to_end(NOW) == 5.0


def test_others_stop_when_the_first_loses_patience(board):
    board.hear(record("a", 0, 10), NOW + 60, NOW, end=NOW + 4)
    assert not board.should_stop(NOW, 5.0)
    assert board.end_of_epoch(NOW + 1) == NOW + 4
    assert board.should_stop(NOW + 4, 5.0)


def test_a_finished_round_is_not_waited_for(board):
    board.hear(record("a", 1, 0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == NOW


def test_overlapping_rounds_let_others_be_ahead(board):
    board.rule = StepRule(5.0, overlaps=True)
    board.hear(record("a", 1, 0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == NOW + 5
    assert board.end_of_epoch(NOW + 2) == NOW + 5
    board.hear(record("a", 2, 0, time=NOW + 3), NOW + 60, NOW + 3)
    assert board.end_of_epoch(NOW + 3) == NOW + 3


def test_slots_may_have_different_numbers_of_steps(board):
    board.report(0, 3, NOW)
    assert not board.should_stop(NOW, 5.0)
    board.set_target(3)
    assert board.should_stop(NOW, 5.0)


def test_a_late_peer_ends_its_slot_early(board, attendance):
    """The others need not wait for it: with all steps it would be late again."""
    board.hear(record("a", 0, 6, speed=2.0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == math.inf
    attendance.note(SimpleNamespace(result=None, slot=-1), None)
    assert board.end_of_epoch(NOW) == NOW + 2
    attendance.note(SimpleNamespace(result=None, slot=0, expected=(), began_at=time.monotonic()), 0.0)
    board.finish_update(1, [b"a"], NOW)
    board.hear(record("a", 1, 6, speed=2.0), NOW + 60, NOW)
    assert board.end_of_epoch(NOW) == math.inf


# --- who comes to rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent", "refused", "is_cut_off"),
    [("ab", "", True), ("a", "b", True), ("z", "", False), ("", "ab", False), ("", "", False)],
    ids=["all silent", "one silent, and smaller", "one silent, and larger", "all dead", "nobody"],
)
def test_reaching_nobody_may_mean_cut_off(board, attendance, silent, refused, is_cut_off):
    meets(attendance, ["me", *silent, *refused])
    for peer in silent + refused:
        board.hear(record(peer, 0, 3), NOW + 60, NOW)
        board.mark_unreachable(peer.encode(), NOW + 1, is_refused=peer in refused)
    assert attendance.is_cut_off(NOW + 2) is is_cut_off
    assert not attendance.is_cut_off(NOW + 61), "their records have expired"


def test_silent_strangers_do_not_stop_a_peer(board, attendance):
    for peer in "ab":
        board.hear(record(peer, 0, 3), NOW + 60, NOW)
        board.mark_unreachable(peer.encode(), NOW + 1, is_refused=False)
    assert not attendance.is_cut_off(NOW + 2)


@pytest.mark.parametrize("board", [True], ids=["client"], indirect=True)
def test_a_client_that_reaches_nobody_waits(board, attendance):
    """Its update would be lost: nobody can call it."""
    assert not attendance.is_cut_off(NOW), "there was never anybody"
    board.hear(record("a", 0, 3), NOW + 60, NOW)
    assert not attendance.is_cut_off(NOW), "it reaches somebody"
    board.mark_unreachable(b"a", NOW + 1, is_refused=True)
    assert attendance.is_cut_off(NOW + 2), "perhaps another one has come since, which it does not know"
    assert not attendance.is_cut_off(NOW + 61)


def peers(*names):
    return {PeerID(name.encode()) for name in names}


def test_peers_some_slots_apart_count(board, attendance):
    """Rounds of one fragment in several slots may be one round, so halves some slots apart must know of each other."""
    board.report(5, 10, NOW)
    for peer, slot in {"behind": 3, "here": 5, "ahead": 9, "far behind": 1, "newcomer": 3, "absent": 5}.items():
        board.hear(record(peer, slot, 3), NOW + 60, NOW)
    meets(attendance, ["me", "behind", "here", "ahead", "far behind"], 4, ["absent"])
    assert attendance.electorate(NOW, 2) == peers("behind", "here", "ahead")
    board.mark_unreachable(b"behind", NOW + 1, is_refused=True)
    assert attendance.electorate(NOW + 1, 2) == peers("here", "ahead")


def test_an_absent_peer_that_advanced_counts(board, attendance):
    """Else each of two halves that miss each other would be most of those that count."""
    board.report(5, 10, NOW)
    for peer in ("here", "met", "stranger"):
        board.hear(record(peer, 4, 3), NOW + 60, NOW)
    meets(attendance, ["me", "here", "met"], 3)
    absent = ["met", "stranger"]
    meets(attendance, ["me", "here"], 4, absent)
    assert attendance.electorate(NOW, 2) == peers("here")
    for peer in absent:
        board.hear(record(peer, 5, 3, time=NOW + 1), NOW + 60, NOW + 1)
    assert attendance.electorate(NOW + 1, 2) == peers("here", "met"), "a stranger can say what it likes"
    for slot in (4, 5):
        meets(attendance, ["me", "here"], slot, absent)
    assert attendance.electorate(NOW + 1, 2) == peers("here"), "it never comes"


def test_companions_were_in_a_round(board, attendance):
    board.report(9, 10, NOW)
    for peer, slot in {"met": 3, "silent": 4, "newcomer": 0}.items():
        board.hear(record(peer, slot, 3), NOW + 60, NOW)
    meets(attendance, ["me", "met", "silent"], 8)
    board.mark_unreachable(b"silent", NOW + 1, is_refused=False)
    assert attendance.slots_of_companions(NOW + 1) == {b"met": 3}


def test_newcomers_that_may_not_join_do_not_count(board, attendance):
    """Else the others could have no round without them, nor with them."""
    board.report(5, 10, NOW)
    for peer in ("here", "newcomer"):
        board.hear(record(peer, 5, 3), NOW + 300, NOW)
    meets(attendance, ["me", "here"], 4)
    assert attendance.electorate(NOW, 5) == peers("here", "newcomer")
    board.guard.note_waste([b"another one", b"newcomer"], 8.0, NOW)
    assert attendance.electorate(NOW, 5) == peers("here")


def test_a_failed_round_is_nobodys_fault(board, attendance, caplog):
    attendance.note(SimpleNamespace(result=None, slot=0), None)
    assert not caplog.records
    assert not board.guard.latest


def test_rounds_that_overlap_hold_nobody_up(board, attendance):
    for peer in ("here", "late"):
        board.hear(record(peer, 0, 3), NOW + 60, NOW)
    for slot in range(3):  # without patience, so they cost no time
        meets(attendance, ["me", "here"], slot, ["here", "late"])
    assert board.expected_members(NOW) == {b"here", b"late"}


# --- which fragment is due --------------------------------------------------------------------------------------------


def test_slots_are_spread_evenly_over_the_steps():
    assert [Schedule(4, sync_every=30).due_at(slot) for slot in range(5)] == [7, 15, 22, 30, 37]
    assert [Schedule(2, sync_every=6).due_at(slot) for slot in range(3)] == [3, 6, 9]
    assert [Schedule(3, sync_every=10).due_at(slot) for slot in range(3)] == [3, 6, 10]
    assert [Schedule(sync_every=50).due_at(slot) for slot in (-1, 0, 1)] == [0, 50, 100]


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 200))
def test_every_fragment_is_due_every_sync_every_steps(fragments, more, slot):
    schedule = Schedule(fragments, sync_every=fragments + more)
    assert schedule.due_at(slot + fragments) - schedule.due_at(slot) == fragments + more
    assert schedule.fragment_of(slot + fragments) == schedule.fragment_of(slot)
    assert schedule.steps_of(slot) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either sync_every"),
        ({"sync_every": 5, "target_batch_size": 64}, "got 5 and 64"),
        ({"fragments": 0, "sync_every": 5}, "at least 1 fragment"),
        ({"fragments": 6, "sync_every": 5}, "do not fit"),
    ],
)
def test_impossible_schedules_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**options)


def test_a_peer_follows_the_slot_of_the_swarm():
    counter = SlotCounter(Schedule(2, sync_every=5))
    counter.count(8)
    assert not counter.is_full
    counter.count(8)
    assert counter.is_full
    assert counter.samples == 16
    counter.go_to(1)
    assert (counter.steps, counter.samples, counter.position) == (0, 0, 2)
    counter.count(8)
    counter.go_to(1)
    assert counter.steps == 1
    counter.go_to(4)
    assert (counter.steps, counter.position) == (0, 10)


def test_the_position_stops_at_the_slots_end():
    counter = SlotCounter(Schedule(sync_every=3))
    positions = []
    for _ in range(5):
        positions.append(counter.position)
        counter.count(1)
    assert positions == [0, 1, 2, 3, 3]
    counter.go_to(1)
    assert counter.position == 3


def test_with_a_target_the_position_counts_slots():
    counter = SlotCounter(Schedule(3, target_batch_size=64))
    counter.count(64)
    assert not counter.is_full
    assert counter.position == 0
    counter.go_to(7)
    assert counter.position == 7
    with pytest.raises(AssertionError, match="nobody knows"):
        counter.schedule.due_at(1)


@pytest.mark.parametrize(("peers", "size"), [(4, 2), (7, 3), (100, 2)])
def test_each_slot_draws_groups_again(peers, size):
    everybody = [bytes([number]) * 34 for number in range(peers)]
    met = {peer: set() for peer in everybody}
    for slot in range(40):
        found = {peer: group_of(peer, set(everybody) - {peer}, slot, size) for peer in everybody}
        for peer, (bits, members) in found.items():
            assert all(found[other] == (bits, {peer, *members} - {other}) for other in members)
            met[peer] |= members
        sizes = [1 + len(members) for _, members in found.values()]
        assert sizes.count(size) == peers // size * size
        assert len({bits for bits, _ in found.values()}) == -(-peers // size)
    assert all(len(others) > min(peers - 2, 25) for others in met.values())
