"""What follows from the records of a run: who is there, what has happened, and the swarm as a whole."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
import pytest

from shoal.monitor.run import (
    COLUMNS,
    MAX_EVENTS_AT_ONCE,
    MAX_VERSIONS,
    SECONDS_SHOWN,
    SILENT_SECONDS,
    PeerState,
    RunView,
    row_of,
)
from shoal.monitor.terminal import MOST_FIGURES, headline
from tests.monitor.made_up import START, MadeUpPeer, MadeUpRun


@pytest.fixture
def made_up() -> MadeUpRun:
    run = MadeUpRun(RunView("run"), 5)
    for _ in range(60):
        run.pass_second()
    return run


def kinds(view: RunView) -> list[str]:
    return [event.kind for event in view.events if event.kind not in ("epoch", "failed", "trouble")]


def test_the_swarm_is_the_sum_of_its_peers(made_up):
    summary = made_up.view.summary
    assert (summary.peers, summary.reporting, summary.epoch, summary.clients) == (5, 5, 3, 0)
    assert summary.throughput == pytest.approx(sum(peer.speed for peer in made_up.peers), rel=0.2)
    assert summary.states == {"training": 5}
    assert summary.sent == pytest.approx(5 * 4e5, rel=0.01)
    assert summary.computing + summary.waiting + summary.averaging == pytest.approx(summary.step)
    assert set(summary.means) == set(summary.medians) == {"loss", "accuracy"}
    assert made_up.view.history.columns()["peers"][-1] == 5
    assert "epoch" in [event.kind for event in made_up.view.events]


def test_means_are_weighted_by_samples():
    view, rng = RunView("run"), random.Random(0)
    for samples, loss in ((100, 1.0), (300, 2.0), (0, 9.0)):
        peer = MadeUpPeer(rng, 0)
        report = msgspec.structs.replace(peer.report(START, START, 1), recent_samples=samples, metrics={"loss": loss})
        view.hear_progress(peer.record(START, 1), START + 60, START)
        view.hear_report(peer.peer, report, START)
    summary = view.tick(START)
    assert summary.means["loss"] == pytest.approx((100 + 600 + 9) / 401)
    assert summary.medians["loss"] == 2.0


def test_one_liar_moves_little(made_up):
    before, liar = made_up.view.summary, MadeUpPeer(random.Random(1), 0)
    record = msgspec.structs.replace(liar.record(made_up.now, 10**15), samples_per_second=1e20)
    report = liar.report(made_up.now, made_up.began, 10**15)
    report = msgspec.structs.replace(report, samples_per_second=1e20, recent_samples=2**52, metrics={"loss": 3.0})
    made_up.view.hear_progress(record, made_up.now + 60, made_up.now)
    made_up.view.hear_report(liar.peer, report, made_up.now)
    after = made_up.view.tick(made_up.now)
    assert after.epoch == before.epoch
    assert after.throughput < 150 * before.throughput
    assert after.medians["loss"] == pytest.approx(before.medians["loss"], abs=0.5)


def test_who_leaves_is_told_from_who_is_lost(made_up):
    view, (left, lost, behind, *others) = made_up.view, made_up.peers
    made_up.peers = others
    view.hear_goodbye(left.peer, made_up.now)
    view.hear_goodbye(left.peer, made_up.now)
    assert view.peers[left.peer].state is PeerState.LEFT
    for _ in range(int(SILENT_SECONDS) + 2):
        made_up.pass_second()
        view.hear_progress(behind.record(made_up.now, 0), made_up.now + 60, made_up.now)
        view.peers[behind.peer].report = None
    assert view.peers[lost.peer].state is PeerState.SILENT
    made_up.pass_second()
    assert view.peers[behind.peer].state is PeerState.BEHIND
    for _ in range(20):
        made_up.pass_second()
    assert view.peers[lost.peer].state is PeerState.LOST
    assert kinds(view) == ["left", "lost"]
    assert view.summary.values()["gone"] == 2
    view.hear_progress(lost.record(made_up.now, 5), made_up.now + 60, made_up.now)
    assert kinds(view) == ["left", "lost", "returned"]
    change = view.change
    made_up.pass_second(SECONDS_SHOWN + 1)
    assert left.peer not in view.peers
    assert [peer for when, peer in view.removed if when >= change] == [str(left.peer)]


def test_more_peers_than_can_be_shown_are_told_once(monkeypatch):
    monkeypatch.setattr("shoal.monitor.run.MAX_PEERS", 2)
    view, rng = RunView("run"), random.Random(5)
    for number in range(4):
        view.hear_progress(MadeUpPeer(rng, number).record(START, 1), START + 60, START)
    assert len(view.peers) == 2
    assert [event.text for event in view.events] == ["there are more than 2 peers, and no more are shown"]


def test_made_up_versions_and_figures_do_not_fill_the_screen():
    view, rng = RunView("run"), random.Random(6)
    for number in range(60):
        peer = MadeUpPeer(rng, number)
        view.hear_progress(peer.record(START, 1), START + 60, START)
        version = "1.0" if number < 3 else f"{number}".rjust(32, "x")
        figures = {"loss": 1.0, **({f"{n}".rjust(48, "y"): 0.0 for n in range(23)} if number == 5 else {})}
        view.hear_report(
            peer.peer, msgspec.structs.replace(peer.report(START, START, 1), version=version, metrics=figures), START
        )
    summary = view.tick(START)
    assert summary.versions["1.0"] == 3
    assert len(summary.versions) == MAX_VERSIONS
    line = headline("run", summary)
    assert "loss 1" in line
    assert line.count(" yyy") == MOST_FIGURES - 1
    assert len(line) < 1000


def test_a_run_that_begins_anew_is_told(made_up):
    """All peers were stopped, and others begin at epoch 0, or at an older archive."""
    view = made_up.view
    for _ in range(60):
        made_up.pass_second()
    for peer in made_up.peers:
        view.hear_goodbye(peer.peer, made_up.now)
    made_up.pass_second(0)
    epoch, newcomer = view.summary.epoch, MadeUpPeer(random.Random(4), 0)
    assert epoch > 2
    for reached in (0, 0):
        made_up.now += 1
        view.hear_progress(newcomer.record(made_up.now, reached), made_up.now + 60, made_up.now)
        view.tick(made_up.now)
    told = [event.text for event in view.events if event.kind == "epoch"]
    assert told[-1] == f"the run has gone back from epoch {epoch} to 0"
    assert told[-2].startswith(f"epoch {epoch}, ")


def test_bytes_per_second_are_not_known_after_one_report():
    run = MadeUpRun(RunView("run"), 2)
    run.pass_second()
    assert math.isnan(run.view.summary.sent)
    run.pass_second()
    assert run.view.summary.sent == pytest.approx(8e5)


def test_records_that_are_older_or_of_strangers_do_not_count(made_up):
    view, peer = made_up.view, made_up.peers[0]
    before = view.peers[peer.peer]
    record, report = before.record, before.report
    view.hear_progress(peer.record(made_up.now - 30, 0), made_up.now + 60, made_up.now)
    view.hear_report(peer.peer, peer.report(made_up.now - 30, made_up.began, 0), made_up.now)
    view.hear_report(peer.peer, peer.report(made_up.now + 1000, made_up.began, 0), made_up.now)
    assert (view.peers[peer.peer].record, view.peers[peer.peer].report) == (record, report)
    stranger = MadeUpPeer(random.Random(7), 0)
    view.hear_report(stranger.peer, stranger.report(made_up.now, made_up.began, 0), made_up.now)
    assert stranger.peer not in view.peers


def test_failures_are_told_with_their_cause(made_up):
    view, peer = made_up.view, made_up.peers[0]
    made_up.now += 1
    failed = view.peers[peer.peer].report.rounds_failed
    report = peer.report(made_up.now, made_up.began, 3)
    news = {"rounds_failed": failed + 2, "failure": "no\x1b[31m answer", "troubles": {"alone": 1}}
    view.hear_report(peer.peer, msgspec.structs.replace(report, **news), made_up.now)
    failure, trouble = list(view.events)[-2:]
    assert (failure.kind, failure.peer) == ("failed", str(peer.peer))
    assert failure.text.endswith("2 rounds failed: no [31m answer"), "terminal codes of others are none here"
    assert trouble.text.endswith("alone")


def test_names_of_figures_have_no_terminal_codes(made_up):
    peer = made_up.peers[0]
    report = peer.report(made_up.now + 1, made_up.began, 3)
    made_up.view.hear_report(
        peer.peer, msgspec.structs.replace(report, metrics={"a\x1b[2J\ud800": 1.0}), made_up.now + 1
    )
    assert "a [2J " in made_up.view.tick(made_up.now + 1).means


def test_a_crowd_is_told_in_few_lines(made_up):
    view, rng = made_up.view, random.Random(2)
    for _ in range(50):
        peer = MadeUpPeer(rng, 0)
        view.hear_progress(peer.record(made_up.now, 3), made_up.now + 60, made_up.now)
    made_up.pass_second()
    joined = [event.text for event in view.events if event.kind == "joined"]
    assert len(joined) == MAX_EVENTS_AT_ONCE + 1
    assert joined[-1] == f"and {50 - MAX_EVENTS_AT_ONCE} more of this kind (joined)"


def test_rows_have_a_value_for_each_column(made_up):
    view = made_up.view
    peer = next(iter(view.peers.values()))
    assert len(row_of(peer)) == len(COLUMNS) == len(row_of(replace(peer, report=None)))
    change = view.change
    assert view.rows_since(change) == []
    made_up.peers = made_up.peers[:2]
    made_up.pass_second()
    assert len(view.rows_since(change)) == 2
    assert len(view.rows_since(0)) == 5
    assert view.events_since(view.number_of_events) == []
    assert len(view.events_since(view.number_of_events - 2)) == 2


def test_an_empty_run_is_no_error():
    view = RunView("run")
    summary = view.tick(START)
    assert (summary.peers, summary.epoch, summary.throughput) == (0, 0, 0)
    assert math.isnan(summary.step)
    assert view.history.columns()["loss"] == [None]
