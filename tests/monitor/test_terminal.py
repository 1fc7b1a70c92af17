"""What the terminal shows of a run."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from shoal.monitor.run import RunView
from shoal.monitor.terminal import Lines, headline, render, span
from tests.monitor.made_up import MadeUpRun


def shown(view: RunView, height: int = 30, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(view, height, "Watch it elsewhere", width))
    return console.file.getvalue()


def test_it_shows_swarm_peers_and_events():
    run = MadeUpRun(RunView("run [bold]"), 30)
    assert "no peer has been seen yet" in shown(run.view)
    for _ in range(65):
        run.pass_second()
    gone = run.peers.pop()
    run.view.hear_goodbye(gone.peer, run.now)
    run.pass_second()
    text = shown(run.view)
    assert "run [bold]: epoch 3" in text, "what looks like markup is none"
    assert "29 peers" in text
    assert "computing" in text
    assert f"…{str(run.peers[0].peer)[-8:]}"[1:] in shown(run.view, 100)
    assert "has left" in text
    assert "more" in text, "not all peers have room"
    assert len(text.splitlines()) <= 31


@pytest.mark.parametrize(("width", "last"), [(160, "version"), (80, "link"), (40, "epoch"), (10, None)])
def test_narrow_terminal_shows_fewer_columns(width, last):
    run = MadeUpRun(RunView("run"), 3)
    run.pass_second()
    liar = msgspec.structs.replace(run.peers[0].report(run.now + 1, run.began, 0), version="x" * 32)
    run.view.hear_report(run.peers[0].peer, liar, run.now + 1)
    lines = shown(run.view, 30, width).splitlines()
    if last is None:
        return  # nothing fits, and that is no error
    head = next(line for line in lines if line.lstrip().startswith("peer"))
    rows = [line for line in lines if "training" in line]
    assert head.split()[-1] == last
    assert len(rows) == 3
    assert all(len(row.split()) >= len(head.split()) for row in rows)
    cut = [row for row in rows if "…" in row.replace(" …", "", 1)]
    assert len(cut) == (width == 160), "nothing is cut but the version of a liar"


def test_ended_run_differs_from_unseen_run():
    run = MadeUpRun(RunView("run"), 1)
    for _ in range(65):
        run.pass_second()
    run.view.hear_goodbye(run.peers[0].peer, run.now)
    assert headline("run", run.view.tick(run.now)) == "run: epoch 3  |  all peers are gone"
    assert headline("run", run.view.tick(run.now + 1000)) == "run: all peers are gone"


def test_peers_that_do_not_report_are_shown_too():
    run = MadeUpRun(RunView("run"), 1)
    peer = run.peers[0]
    run.view.hear_progress(peer.record(run.now, 2), run.now + 60, run.now)
    run.view.tick(run.now)
    assert "epoch 2" in headline("run", run.view.summary)
    assert "direct" in shown(run.view)


def test_markup_in_peer_texts_is_escaped():
    run = MadeUpRun(RunView("run"), 1)
    run.pass_second()
    report = msgspec.structs.replace(run.peers[0].report(run.now + 1, run.began, 0), link="[red]x", version="[/]")
    run.view.hear_report(run.peers[0].peer, report, run.now + 1)
    assert "[red]x" in shown(run.view)


def test_peers_are_shown_by_name():
    run = MadeUpRun(RunView("run"), 4)
    names = ["laptop-4711", "twin", "twin", "\x1b[31m[red]evil\n"]
    run.view.is_complete = True
    for peer, name in zip(run.peers, names, strict=True):
        record = msgspec.structs.replace(peer.record(run.now, 2), name=name)
        run.view.hear_progress(record, run.now + 60, run.now)
    text = shown(run.view)
    table = [line.split()[0] for line in text.splitlines() if "training" in line]
    assert {"laptop-4711", "[31m[red]evil"} <= set(table)
    ends = [f"…{str(peer.peer)[-8:]}" for peer in run.peers]
    assert set(ends[1:3]) <= set(table), "a name that two peers have says nothing"
    assert "\x1b" not in text
    assert f"laptop-4711 ({ends[0]}) has joined" in text


def test_versions_are_told_if_they_differ():
    run = MadeUpRun(RunView("run"), 2)
    run.pass_second()
    old = msgspec.structs.replace(run.peers[0].report(run.now + 1, run.began, 0), version="0.0.9")
    run.view.hear_report(run.peers[0].peer, old, run.now + 1)
    assert "versions" in headline("run", run.view.tick(run.now + 1))


def test_lines_for_logs(capsys):
    run, lines = MadeUpRun(RunView("run"), 2), Lines()
    with lines:
        lines.show(run.view)
        assert capsys.readouterr().out == "", "nothing has been read yet"
        run.pass_second()
        run.view.hear_goodbye(run.peers[0].peer, run.now)
        lines.show(run.view)
        first = capsys.readouterr().out
        assert "has left" in first
        assert "run: epoch 0  |  2 peers" in first
        assert "/s sent" not in first, "that takes two reports"
        lines.show(run.view)
        assert capsys.readouterr().out == "", "the state of the swarm is told now and then"


def test_times_in_words():
    assert [span(seconds) for seconds in (0, 59.4, 99, 130, 5000, 7250, 86_400 * 3 + 3600 * 5)] == [
        *("0 s", "59 s", "99 s", "2 min", "83 min", "2 h 1 min", "3 d 5 h"),
    ]
