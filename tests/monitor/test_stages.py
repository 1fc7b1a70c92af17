"""A run whose model is cut into stages: what the monitor reads, shows, and gives to other programs."""

from __future__ import annotations

import asyncio
import io
import json

import msgspec
import pytest
from rich.console import Console

from shoal.monitor.observer import PERIOD, SECONDS_BETWEEN_TRIES, STAGES_TRIED, Observer
from shoal.monitor.run import RunView
from shoal.monitor.stages import PEERS_NAMED
from shoal.monitor.terminal import headline, render, stages_line
from shoal.stages.directory import StageDirectory, StageRecord
from shoal.testing import Network, SharedTable, run, start_peers
from tests.monitor.made_up import START, MadeUpRun, made_up_stages


@pytest.fixture
def view() -> RunView:
    view = RunView("run")
    made_up_stages(view, [4.0, 4.0], [3.0, 0.5, 0.0], [5.0] * 4)
    return view


def texts(view: RunView) -> list[str]:
    return [event.text for event in view.events.since() if event.kind in ("trouble", "joined")]


def test_a_stage_is_the_sum_of_its_peers(view):
    first, second, third = view.stages.rows
    assert [row.is_bottleneck for row in view.stages.rows] == [False, True, False]
    assert (second.rate, second.serving, second.queue, second.epoch) == (3.5, 3, 3, 4)
    assert (first.rate, third.rate) == (8.0, 20.0)
    assert [peer.rate for peer in second.peers] == [3.0, 0.5, 0.0]
    assert view.stages.change == view.change


def test_stages_that_do_about_the_same_have_no_bottleneck():
    for rates, marked in (([[4.0]] * 3, []), ([[4.0], [3.9]], []), ([[4.0], [2.0]], [1]), ([[4.0], []], [1])):
        view = RunView("run")
        made_up_stages(view, *rates)
        assert [row.stage for row in view.stages.rows if row.is_bottleneck] == marked
    view = RunView("run")
    made_up_stages(view, [0.0], [0.0])
    assert [row.rate for row in view.stages.rows] == [None, None]


def test_one_liar_moves_little():
    view = RunView("run")
    made_up_stages(view, [4.0, 4.0, 1e20], [5.0])
    assert view.stages.rows[0].rate <= 8 + 400
    liar = StageRecord(stage=0, epoch=2**50, rate=0.0, count=1000)
    view.hear_stage(0, [(made_up_stages(RunView("run"), [1.0] * 9)[0][8], liar, START + 30)], START)
    view.tick(START)
    assert (len(view.stages.rows), view.stages.rows[0].epoch) == (2, 4)
    made_up_stages(view, [1.0] * (PEERS_NAMED + 1))
    assert len(view.stages.rows[0].peers) == PEERS_NAMED


def test_moves_and_stages_without_peers_are_events(view):
    peers = made_up_stages(RunView("run"), [4.0, 4.0], [3.0, 0.5, 0.0], [5.0] * 4)
    assert texts(view) == []
    move = StageRecord(stage=2, epoch=4, rate=5.0, count=3, is_leaving=True, moves_to=1, name="card-0")
    view.hear_stage(2, [(peers[2][0], move, START + 31)], START + 1)
    view.hear_stage(0, [(peer, None, START + 31) for peer in peers[0]], START + 1)
    view.tick(START + 1)
    assert [(row.serving, row.leaving, row.rate) for row in view.stages.rows] == [(0, 0, 0), (3, 0, 3.5), (3, 1, 15)]
    assert [row.is_bottleneck for row in view.stages.rows] == [True, False, False]
    assert texts(view) == [
        "card-0 moves from stage 2 to stage 1",
        "stage 0 has no peer any more: microbatches wait for one",
    ]
    view.hear_stage(0, [(peers[0][0], msgspec.structs.replace(move, stage=0, is_leaving=False), START + 90)], START + 2)
    view.tick(START + 2)
    assert texts(view)[2:] == ["stage 0 has a peer again"]
    view.tick(START + 60)  # the others were not renewed
    assert [row.serving for row in view.stages.rows] == [1, 0, 0]


def shown(view: RunView, height: int = 30, width: int = 160) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(view, height, "", width))
    return console.file.getvalue().splitlines()


def test_the_terminal_shows_stages_as_rows(view):
    lines = shown(view)
    assert lines[0].strip() == "run: no driver has been seen yet"
    assert lines[1].strip() == "3 stages  |  9 peers hold them  |  up to 3.5 microbatches/s  |  bottleneck: stage 1"
    rows = [line.split() for line in lines]
    assert ["1", "3", "3.5", "3", "4", "bottleneck"] in rows
    assert ["2", "4", "20", "8", "4"] in rows
    drivers = MadeUpRun(view, 30)
    drivers.pass_second()
    lines = shown(view, 24)
    assert "30 drivers" in lines[0]
    assert len(lines) <= 25
    assert sum("training" in line for line in lines) >= 3
    many = RunView("run")
    made_up_stages(many, *[[float(rate)] for rate in range(1, 33)])
    assert any("and 24 more" in line for line in shown(many))
    assert "bottleneck: stage 0" in stages_line(many.stages.rows)


def test_runs_without_stages_look_as_before():
    run = MadeUpRun(RunView("run"), 2)
    run.pass_second()
    assert run.view.stages.rows == []
    assert stages_line([]) == ""
    assert headline("run", run.view.summary).startswith("run: epoch 0  |  2 peers")
    assert not any("stage" in line for line in shown(run.view))


def test_prometheus_hears_of_stages(view):
    from shoal.monitor.exporters import Prometheus

    endpoint = Prometheus(view, 0)
    try:
        told = {(name, labels["stage"]): value for name, _, labels, value in endpoint._collect() if "stage" in labels}
    finally:
        endpoint.close()
    assert told["shoal_stage_microbatches_per_second", "1"] == 3.5
    assert told["shoal_stage_peers", "2"] == 4
    assert told["shoal_stage_queue", "2"] == 8


def test_the_observer_finds_stages_though_the_first_has_no_peer():
    async def main():
        table, view, asked = SharedTable(), RunView("run"), []

        class Counting(SharedTable):
            async def get(self, key, latest=False, **how):
                asked.append(key)
                return await table.get(key, latest, **how)

        observer = Observer(Counting(), view)
        watching = asyncio.ensure_future(observer.watch_stages())
        await asyncio.sleep(10 * SECONDS_BETWEEN_TRIES)
        assert 8 <= len(asked) <= 12  # a run without stages costs little
        (peer,) = await start_peers(Network(), 1)
        directory = StageDirectory(table, peer, "run", 3)
        directory.start()
        await directory.declare(StageRecord(stage=1, epoch=2, rate=3.0))
        await asyncio.sleep(STAGES_TRIED * SECONDS_BETWEEN_TRIES + PERIOD)
        view.tick(START)
        assert [row.serving for row in view.stages.rows] == [0, 1, 0]
        await directory.stop()
        await asyncio.sleep(2 * PERIOD)
        view.tick(START)
        assert [row.serving for row in view.stages.rows] == [0, 0, 0]
        watching.cancel()

    run(main())


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_stream_has_stages_when_they_change(view):
    from tests.monitor.test_page import following, next_event, read_csv, serving

    with serving(view) as server, following(server) as stream:
        first = next_event(stream)["stages"]
        assert [row["is_bottleneck"] for row in first] == [False, True, False]
        assert first[1]["peers"][0]["name"] == "card-0"
        view.tick(START + 1)
        next_event(stream)  # has all that may have changed since the first one
        assert next_event(stream)["stages"] is None
        view.tick(START + 60)
        assert [row["serving"] for row in next_event(stream)["stages"]] == [0, 0, 0]
        assert json.dumps(first)
    made_up_stages(view, [4.0], [1.0], now=START + 61)
    with serving(view) as server:
        assert [row["microbatches/s"] for row in read_csv(server, "/stages.csv")] == ["4.0", "1.0"]
