"""What follows from the records of a run: who is there, what has happened, and the swarm as a whole."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
import pytest

from shoal.monitor.run import (
    COLUMNS,
    FIGURE,
    MAX_EVENTS_AT_ONCE,
    MAX_FIGURES_OVER_TIME,
    MAX_VERSIONS,
    SECONDS_SHOWN,
    SILENT_SECONDS,
    PeerState,
    RunView,
    details_of,
    row_of,
)
from shoal.monitor.terminal import MOST_FIGURES, headline
from shoal.optim.report import end_of_id
from tests.monitor.made_up import START, TARGET, MadeUpPeer, MadeUpRun


@pytest.fixture
def made_up() -> MadeUpRun:
    run = MadeUpRun(RunView("run"), 5)
    for _ in range(60):
        run.pass_second()
    return run


def kinds(view: RunView) -> list[str]:
    return [event.kind for event in view.events.since() if event.kind not in ("epoch", "failed", "trouble")]


def test_the_swarm_is_the_sum_of_its_peers(made_up):
    summary = made_up.view.summary
    assert (summary.peers, summary.reporting, summary.epoch, summary.clients) == (5, 5, 3, 0)
    assert summary.throughput == pytest.approx(sum(peer.speed for peer in made_up.peers), rel=0.2)
    assert summary.states == {"training": 5}
    assert summary.sent == pytest.approx(5 * 4e5, rel=0.01)
    assert summary.computing + summary.waiting + summary.averaging == pytest.approx(summary.step)
    assert set(summary.means) == set(summary.medians) == {"loss", "accuracy"}
    assert made_up.view.history.columns()["peers"][-1] == 5
    assert "epoch" in [event.kind for event in made_up.view.events.since()]


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
    (event,) = [event for event in view.events.since() if event.kind == "lost"]
    assert event.text.endswith("is lost, without a goodbye: silent for 60 s")
    view.hear_progress(lost.record(made_up.now, 5), made_up.now + 60, made_up.now)
    assert kinds(view) == ["left", "lost", "returned"]
    change = view.change
    made_up.pass_second(SECONDS_SHOWN + 1)
    assert left.peer not in view.peers
    assert [peer for when, peer in view.removed if when >= change] == [str(left.peer)]


def test_late_goodbye_corrects_lost_to_left(made_up):
    view, (peer, *made_up.peers) = made_up.view, made_up.peers
    view.hear_refusal(peer.peer, made_up.now)
    assert view.peers[peer.peer].state is PeerState.LOST
    view.hear_goodbye(peer.peer, made_up.now)
    assert view.peers[peer.peer].state is PeerState.LEFT
    view.hear_goodbye(peer.peer, made_up.now)
    assert kinds(view) == ["lost", "left"]


def test_too_many_peers_are_reported_once(monkeypatch):
    monkeypatch.setattr("shoal.monitor.run.MAX_PEERS", 2)
    view, rng = RunView("run"), random.Random(5)
    for number in range(4):
        view.hear_progress(MadeUpPeer(rng, number).record(START, 1), START + 60, START)
    assert len(view.peers) == 2
    assert [event.text for event in view.events.since()] == ["there are more than 2 peers, and no more are shown"]


def test_invented_versions_and_figures_are_bounded():
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
    told = [event for event in view.events.since() if event.kind in ("epoch", "trouble")]
    assert (told[-1].kind, told[-1].text) == ("trouble", f"the run has gone back from epoch {epoch} to 0")
    assert told[-2].text.startswith(f"epoch {epoch}, ")


def test_byte_rates_need_two_reports():
    run = MadeUpRun(RunView("run"), 2)
    run.pass_second()
    assert math.isnan(run.view.summary.sent)
    run.pass_second()
    assert run.view.summary.sent == pytest.approx(8e5)


def test_old_or_foreign_records_do_not_count(made_up):
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
    failure, trouble = list(view.events.since())[-2:]
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
    joined = [event.text for event in view.events.since() if event.kind == "joined"]
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
    assert view.events.since(view.events.count) == []
    assert len(view.events.since(view.events.count - 2)) == 2


def test_an_empty_run_is_no_error():
    view = RunView("run")
    summary = view.tick(START)
    assert (summary.peers, summary.epoch, summary.throughput) == (0, 0, 0)
    assert math.isnan(summary.step)
    assert view.history.columns()["loss"] == [None]


def report_of(made_up: MadeUpRun, peer: MadeUpPeer, epoch: int = 3, **changes: object) -> None:
    """A peer reports, at the present time of the run."""
    report = peer.report(made_up.now, made_up.began, epoch)
    made_up.view.hear_report(peer.peer, msgspec.structs.replace(report, **changes), made_up.now)


# --- who is gone ------------------------------------------------------------------------------------------------------


def test_refused_connection_means_lost_at_once(made_up):
    view, victim = made_up.view, made_up.peers.pop()
    old = victim.record(made_up.now + 1, 3)
    made_up.now += 2
    view.hear_refusal(victim.peer, made_up.now)
    view.hear_refusal(victim.peer, made_up.now)
    view.hear_progress(old, made_up.now + 59, made_up.now)
    assert view.peers[victim.peer].state is PeerState.LOST, "what it told before its end is no sign of life"
    assert view.tick(made_up.now).peers == 4
    assert kinds(view) == ["lost"]
    view.hear_progress(victim.record(made_up.now + 1, 3), made_up.now + 60, made_up.now + 1)
    assert kinds(view) == ["lost", "returned"]


def test_peer_unreachable_by_most_is_lost(made_up):
    view, (victim, *others) = made_up.view, made_up.peers
    made_up.now += 1
    for peer in others[:2]:
        report_of(made_up, peer, lost=[end_of_id(victim.peer)])
    view.tick(made_up.now)
    assert view.peers[victim.peer].state is PeerState.TRAINING, "two of four are not most"
    report_of(made_up, others[2], lost=[end_of_id(victim.peer)])
    view.tick(made_up.now)
    assert view.peers[victim.peer].state is PeerState.LOST
    assert view.events.since()[-1].text.endswith("most others cannot reach it any more")


def test_answering_peer_is_there_despite_others(made_up):
    view, (victim, *others) = made_up.view, made_up.peers
    view.hear_answer(victim.peer)
    made_up.now += 1
    for peer in others:
        report_of(made_up, peer, lost=[end_of_id(victim.peer)])
    view.tick(made_up.now)
    assert view.peers[victim.peer].state is PeerState.TRAINING
    view.hear_silence(victim.peer)
    view.tick(made_up.now)
    assert view.peers[victim.peer].state is PeerState.LOST


def test_older_votes_than_the_last_sign_are_ignored(made_up):
    view, (victim, *others) = made_up.view, made_up.peers
    made_up.now += 1
    for peer in others:
        report_of(made_up, peer, lost=[end_of_id(victim.peer)])
    made_up.now += 1
    view.hear_progress(victim.record(made_up.now, 3), made_up.now + 60, made_up.now)
    view.tick(made_up.now)
    assert view.peers[victim.peer].state is PeerState.TRAINING


def test_never_answering_peer_may_still_train(made_up):
    view, peer = made_up.view, made_up.peers[0].peer
    view.hear_silence(peer)
    view.tick(made_up.now)
    assert view.peers[peer].state is PeerState.TRAINING
    view.hear_answer(peer)
    view.hear_silence(peer)
    view.tick(made_up.now)
    assert view.peers[peer].state is PeerState.SILENT
    view.hear_answer(peer)
    view.tick(made_up.now)
    assert view.peers[peer].state is PeerState.TRAINING


def test_behind_is_judged_when_reported():
    view, rng = RunView("run"), random.Random(0)
    slow, *others = [MadeUpPeer(rng, number) for number in range(3)]
    for second in range(30):
        now = START + second
        for peer in others:  # epochs of a second
            view.hear_progress(peer.record(now, second), now + 60, now)
        if second == 2:
            view.hear_progress(slow.record(now, 2), now + 60, now)
        view.tick(now)
    state = view.peers[slow.peer].state
    assert state is PeerState.TRAINING, "its record is 27 s old: by now it may be as far as the others"
    view.hear_progress(slow.record(now, 15), now + 60, now)
    view.tick(now)
    assert view.peers[slow.peer].state is PeerState.BEHIND


# --- steps, samples, time ---------------------------------------------------------------------------------------------


def test_what_a_step_had_and_should_have_had(made_up):
    made_up.now += 1
    for peer in made_up.peers:
        report_of(made_up, peer, step_samples=17_000)
    summary = made_up.view.tick(made_up.now)
    assert (summary.batch, summary.target) == (17_000, TARGET)
    assert "17,000 of 20,000 samples in the last step" in headline("run", summary)
    quiet = RunView("run").tick(START)
    assert math.isnan(quiet.batch)
    assert math.isnan(quiet.samples)


def test_epochs_tell_their_samples(made_up):
    for _ in range(20):
        made_up.pass_second()
    assert " samples, " in [event.text for event in made_up.view.events.since() if event.kind == "epoch"][-1]


def test_samples_of_gone_and_restarted_peers_count():
    made_up = MadeUpRun(RunView("run"), 5)
    made_up.pass_second()
    view, (gone, again, *_) = made_up.view, made_up.peers
    made_up.now += 1
    for peer in made_up.peers:
        report_of(made_up, peer, samples=1000)
    view.hear_goodbye(gone.peer, made_up.now)
    made_up.now += 1
    report_of(made_up, again, samples=300)
    assert view.tick(made_up.now).samples == 5300
    assert view.tick(made_up.now + SECONDS_SHOWN + 1).samples == 5300
    assert gone.peer not in view.peers


def test_run_age_is_that_of_the_oldest_peer(made_up):
    made_up.now += 1
    for peer, age in zip(made_up.peers, (100, 5000, 60, 60, 60), strict=True):
        report_of(made_up, peer, began=made_up.now - age)
    assert made_up.view.tick(made_up.now).age == pytest.approx(5000)
    made_up.now += 1
    report_of(made_up, made_up.peers[0], began=1.0)
    assert made_up.view.tick(made_up.now).age <= 100 * 101, "one liar moves little"


def test_time_to_goal_follows_from_the_pace():
    run = MadeUpRun(RunView("run", goal_epochs=10), 3)
    run.pass_second()
    assert math.isnan(run.view.summary.left)
    for _ in range(104):
        run.pass_second()
    assert run.view.summary.epoch == 5
    assert run.view.summary.left == pytest.approx(95, abs=5), "epochs of 20 s"
    assert "of 10" in headline("run", run.view.summary)
    assert "to epoch 10" in headline("run", run.view.summary)
    for _ in range(110):
        run.pass_second()
    assert run.view.summary.left == 0
    assert [event.text for event in run.view.events.since() if event.kind == "goal"] == [
        "the run has reached its goal, epoch 10"
    ]


def test_stalled_run_gets_no_nearer_to_its_goal():
    run = MadeUpRun(RunView("run", goal_epochs=10), 3)
    for _ in range(105):
        run.pass_second()
    before = run.view.summary.left
    for _ in range(40):
        run.now += 1
        for peer in run.peers:
            run.view.hear_progress(peer.record(run.now, 5), run.now + 60, run.now)
        run.view.tick(run.now)
    assert run.view.summary.epoch == 5
    assert run.view.summary.left >= before


def test_run_that_goes_back_forgets_its_pace():
    run = MadeUpRun(RunView("run", goal_epochs=1000), 3)
    for _ in range(200):
        run.pass_second()
    run.began = run.now  # all are at epoch 0 again
    for peer in run.peers:
        run.view.hear_goodbye(peer.peer, run.now)
    for _ in range(150):
        run.pass_second()
    summary = run.view.summary
    assert summary.left == pytest.approx((1000 - summary.epoch) * 20, rel=0.05)


# --- events, figures, names -------------------------------------------------------------------------------------------


def test_epochs_do_not_push_out_what_is_rare(made_up, monkeypatch):
    view = made_up.view
    made_up.view.hear_goodbye(made_up.peers.pop().peer, made_up.now)
    for epoch in range(10, 2000):
        made_up.now += 1
        for peer in made_up.peers:
            view.hear_progress(peer.record(made_up.now, epoch), made_up.now + 60, made_up.now)
        view.tick(made_up.now)
    assert "left" in [event.kind for event in view.events.since()]
    assert [event.kind for event in view.events.latest(5)].count("epoch") == 5
    assert "left" in [event.kind for event in view.events.latest(5)]
    assert "epoch" not in [event.kind for event in view.events.rare]
    numbers = [event.number for event in view.events.since()]
    assert numbers == sorted(set(numbers))


def test_occasional_figures_stay_for_a_while(made_up):
    view, peer = made_up.view, made_up.peers[0]
    made_up.now += 1
    report_of(made_up, peer, metrics={"loss": 1.0, "test": 5.0})
    made_up.now += 5
    report_of(made_up, peer, metrics={"loss": 0.9})
    assert view.tick(made_up.now).means["test"] == 5.0
    assert view.history.columns()[f"{FIGURE}test"][-1] == 5.0
    made_up.now += 5
    report_of(made_up, peer, metrics={})
    assert view.peers[peer.peer].loss is None, "it is no number any more"
    made_up.now += 200
    report_of(made_up, peer, metrics={"loss": 0.9})
    assert view.peers[peer.peer].figures == {"loss": 0.9}


def test_invented_figure_names_are_bounded(made_up):
    for turn in range(10):
        made_up.now += 1
        figures = {f"{turn} {number}": 1.0 for number in range(20)}
        report_of(made_up, made_up.peers[0], metrics=figures)
        made_up.view.tick(made_up.now)
    names = [name for name in made_up.view.history.names if name.startswith(FIGURE)]
    assert MAX_FIGURES_OVER_TIME <= len(names) < 40
    assert len(made_up.view.peers[made_up.peers[0].peer].figures) <= 32


def test_peers_are_called_by_their_names():
    made_up = MadeUpRun(RunView("run"), 2, with_extras=True)
    made_up.pass_second()
    named, unnamed = (made_up.view.peers[made_up.peers[number].peer] for number in (0, 1))
    end = f"…{str(named.peer)[-8:]}"
    assert named.name == f"lab-0 ({end})"
    assert unnamed.name == f"…{str(unnamed.peer)[-8:]}"
    assert row_of(named)[COLUMNS.index("name")] == "lab-0"
    made_up.view.hear_goodbye(named.peer, made_up.now)
    assert made_up.view.events.since()[-1].text == f"lab-0 ({end}) has left"


def test_details_of_a_peer(made_up):
    view = made_up.view.peers[made_up.peers[0].peer]
    told = details_of(view, made_up.now + 2)
    assert (told["told"], told["name"], told["answers"]) == (2, "", None)
    assert told["figures"]["loss"] == view.loss
    assert told["age"] == made_up.now + 2 - made_up.began
    view.report = None
    assert "age" not in details_of(view, made_up.now)
