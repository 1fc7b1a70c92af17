"""What peers bring to rounds: it limits what they weigh and claim, and who does not come is named."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import pytest

from shoal.averaging import RoundResult
from shoal.net.transport import MOST
from shoal.optim.diloco.contributions import OuterContributions
from shoal.optim.diloco.in_flight import ExpectedMembers
from shoal.optim.diloco.slot_tracker import SlotBoard, SlotTracker
from shoal.optim.evidence import OpenGuard
from shoal.optim.progress.records import LocalTrainingProgress, PerformanceEMA, RefreshPolicy
from shoal.peers.identity import Identity
from tests.optim.conftest import in_parallel, wait_until
from tests.optim.diloco.test_diloco import (
    introduce,
    make_trainers,  # noqa: F401  # a fixture
)

ME, A, B, C = (Identity.generate().peer_id for _ in range(4))
STEPS = 10


def make_board(now):
    board = SlotBoard(
        ME.to_bytes(), False, STEPS, RefreshPolicy(), PerformanceEMA(paused=True), now, make_guard=OpenGuard
    )
    board.patience = 5.0
    board.report(0, 1, now)
    board.note_introduction(now)
    return board


def flight_of(weights, done, own_weight=8.0):
    peers = tuple(weights)
    result = RoundResult(b"group", peers, (), tuple(weights.values()), 1.0, (), False, 0.1)
    return SimpleNamespace(result=result, done=done, weight=own_weight)


def make_deeds(now, target_group_size=None):
    deeds, trust = OuterContributions(make_board(now)), SimpleNamespace()
    deeds.advise(SimpleNamespace(config=SimpleNamespace(target_group_size=target_group_size), trust=trust))
    assert trust.largest_weight(A) == MOST, "before the first round nobody knows anything"
    assert trust.least_limit(A, B) == 0
    return deeds, trust


def test_nobody_weighs_much_more_than_before():
    deeds, trust = make_deeds(0.0)
    deeds.note(flight_of({ME: 8.0, A: 16.0, B: 0.0}, (STEPS, STEPS, STEPS)), ExpectedMembers(0, (A, B), 0.0, 5.0))
    assert trust.largest_weight(A) == 2 * 16 + 8
    assert trust.largest_weight(B) == trust.largest_weight(C) == 8, "no more than the leader's message"
    assert trust.least_limit(A, B) == 0
    assert trust.least_limit(B, A) == 16
    deeds.note(flight_of({ME: 8.0, A: 4.0}, (STEPS, STEPS)), ExpectedMembers(1, (A,), 0.0, 5.0))
    assert trust.largest_weight(A) == 2 * 8 + 8, "it may bring more again"


def test_in_groups_a_stranger_may_weigh_as_much_as_others():
    deeds, trust = make_deeds(0.0, target_group_size=2)
    deeds.note(flight_of({ME: 8.0, A: 16.0}, (STEPS, STEPS)), ExpectedMembers(0, (A,), 0.0, 5.0))
    assert trust.largest_weight(C) == 32


def record(peer, slot, steps, speed, now):
    return LocalTrainingProgress(peer.to_bytes(), slot, steps, speed, now, False)


@pytest.fixture
def board(monkeypatch):
    """A board after a round with A, and another one to which B has not come."""
    made = make_board(0.0)
    after_rounds(made, monkeypatch, patience=5.0)
    return made


def after_rounds(board, monkeypatch, patience):
    deeds = OuterContributions(board)
    for slot, expected in enumerate([(A,), (A, B)]):
        now = 10.0 * (slot + 1)
        monkeypatch.setattr("shoal.optim.diloco.contributions.get_dht_time", lambda now=now: now)
        for peer in expected:
            board.hear(record(peer, slot, STEPS, 1.0, now - 3), 60.0, now - 3)
        deeds.note(flight_of({ME: 8.0, A: 8.0}, (STEPS, STEPS)), ExpectedMembers(slot, expected, now - 2, patience))
        board.finish_update(slot + 1, [A.to_bytes()], now)


def test_who_does_not_come_is_named_and_not_waited_for(monkeypatch, caplog):
    board = make_board(0.0)
    after_rounds(board, monkeypatch, patience=5.0)
    assert f"waited in vain for peer {B}" in caplog.text
    for peer in (A, B):
        board.hear(record(peer, 2, STEPS, 1.0, 21.0), 60.0, 21.0)
    board.hear(record(C, 2, STEPS, 1.0, 21.0), 60.0, 21.0)
    assert board.expected_members(21.0) == {A.to_bytes()}
    assert board.electorate(21.0, 2) == {A.to_bytes(), C.to_bytes()}, "nobody has waited for C in vain"


def test_a_claim_counts_as_far_as_its_peer_has_brought_something(board):
    """So nobody makes others believe that a slot is over long before they could make half of it."""
    board.hear(record(B, 2, STEPS, 100.0, 21.0), 60.0, 21.0)
    assert board.global_progress(21.0).samples_accumulated == 1, "a stranger has made one step at most"
    board.hear(record(A, 2, STEPS, 1.0, 22.0), 60.0, 22.0)
    assert board.global_progress(22.0).samples_accumulated == STEPS


def test_rounds_that_overlap_hold_nobody_up(monkeypatch):
    made = make_board(0.0)
    after_rounds(made, monkeypatch, patience=0.0)
    for peer in (A, B):
        made.hear(record(peer, 2, 3, 1.0, 21.0), 60.0, 21.0)
    assert made.expected_members(21.0) == {A.to_bytes(), B.to_bytes()}, "to expect it costs no time"


def test_a_round_that_fails_is_held_against_nobody(monkeypatch, caplog):
    made = make_board(0.0)
    monkeypatch.setattr("shoal.optim.diloco.contributions.get_dht_time", lambda: 10.0)
    OuterContributions(made).note(SimpleNamespace(result=None, weight=8.0, slot=0), None)
    assert not caplog.records
    assert not made.guard.knows_rounds


def test_if_a_round_fails_here_because_most_had_it_without_this_peer_they_are_the_run():
    """Else it would neither wait for them nor let them lead, for fear of strangers."""
    board = make_board(0.0)
    deeds = OuterContributions(board)
    deeds.note(flight_of({ME: 8.0, A: 8.0}, (STEPS, STEPS)), ExpectedMembers(0, (A,), 0.0, 5.0))
    for peer in (B, C):
        board.hear(record(peer, 2, 3, 1.0, 20.0), 60.0, 20.0)
    assert not board.guard.is_proven(B.to_bytes())
    board.note_failed_round(1, 20.0)
    assert board.guard.is_proven(B.to_bytes())
    assert board.guard.is_proven(C.to_bytes())


def test_a_peer_that_claims_steps_and_does_no_rounds_is_seen(make_dhts, make_trainers, closing, caplog):  # noqa: F811
    """Two peers train; a third one says that it does, too."""
    dhts = make_dhts(3)
    trainers = make_trainers(dhts[:2], matchmaking_time=1.0, straggler_patience=1.0, guard="open")
    introduce(*(trainer.opt for trainer in trainers))
    liar = closing(SlotTracker(dhts[2], "run", 4, patience=1.0, overlaps=False, start=True))
    stop, pause = threading.Event(), threading.Event()

    def lie():
        while not stop.is_set():
            slot = max(trainer.opt.local_epoch for trainer in trainers)
            with liar.pause_updates():
                liar.update_epoch(slot)
            liar.report_local_progress(slot, 3)
            pause.wait(0.05)

    thread = threading.Thread(target=lie)
    thread.start()
    name = f"waited in vain for peer {dhts[2].peer_id}"
    try:
        for trainer in trainers:
            wait_until(lambda t=trainer.opt.tracker: len(t.expected_members()) == 2, "they believe the liar at first")
        in_parallel(*(functools.partial(trainer.train_until, 8) for trainer in trainers))
    finally:
        stop.set()
        thread.join()
    assert name in caplog.text
    for trainer in trainers:
        evidence = trainer.opt.tracker.board.guard
        assert evidence.knows_rounds
        assert not evidence.is_proven(dhts[2].peer_id.to_bytes())
        assert len(trainer.opt.last_round.peers) == 2
