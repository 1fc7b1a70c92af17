"""What is told about a run of the demo follows from what happened in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.demo.messages import EpochDone, Finished, PeerActivity, Story
from shoal.cli.demo.report import findings, succeeded, ten_lines, write_report
from tests.cli.synthetic_story import made_up_story


@pytest.fixture
def story() -> Story:
    return made_up_story()


def test_findings(story: Story) -> None:
    found = findings(story)
    assert found.epochs == 92
    assert found.median_round == pytest.approx(0.3)
    assert found.slowest_after_kill == pytest.approx(2.0)
    assert found.slow_after_kill == 1
    assert found.median_pause == pytest.approx(1.0)
    assert found.longest_pause_after_kill == pytest.approx(1.0)
    assert found.joiner_caught_up == pytest.approx(6.0)
    assert found.joiner_samples == 6000
    assert found.final_loss == pytest.approx(1.81)
    assert found.below_bigram_at == pytest.approx(27.0)
    assert found.identical
    assert succeeded(story)


def test_waiting_peers_do_not_count_as_slow_rounds(story: Story) -> None:
    for index, (time, done) in enumerate(story.peers[1].epochs):
        story.peers[1].epochs[index] = (time, EpochDone(done.epoch, done.seconds + 5.0, done.group_size))
    assert findings(story).median_round == pytest.approx(0.3)


def test_other_parameters_on_one_peer_are_told(story: Story) -> None:
    story.peers[2].finished = Finished(92, 9000, 1.81, "cd" * 32, "")
    assert not findings(story).identical
    assert not succeeded(story)
    assert any("NOT identical" in line and "abab" in line and "cdcd" in line for line in ten_lines(story, []))


def test_the_killed_peer_need_not_agree(story: Story) -> None:
    assert story.peers[4].state is PeerActivity.KILLED
    assert story.identical()
    story.peers[4].state = PeerActivity.FINISHED
    assert not story.identical()


def test_loss_above_bigram_entropy_is_no_success(story: Story) -> None:
    story.bigram_entropy = 1.5
    assert not succeeded(story)
    assert any("not reached" in line for line in ten_lines(story, []))


def test_bytes_that_were_saved(story: Story) -> None:
    for peer in story.living:
        assert peer.finished
        assert peer.progress
        peer.finished.synchronous_bytes, peer.progress.bytes_sent = 50_000_000, 1_000_000
    *_, line, _ = ten_lines(story, [])
    number = len(story.living)
    assert f"sent {number}.0 MB in all" in line
    assert f"{50 * number}.0 MB, 50 times as much" in line


def test_ten_lines(story: Story) -> None:
    lines = ten_lines(story, [Path("report.json")])
    assert len(lines) == 10
    assert not any("\n" in line for line in lines)


def test_files(story: Story, tmp_path: Path) -> None:
    table, picture = write_report(story, tmp_path)
    told = json.loads(table.read_text())
    assert told["parameters_bit_identical"] is True
    assert told["round_seconds"]["slowest_within_15_s_of_the_kill"] == pytest.approx(2.0)
    assert [peer["number"] for peer in told["each_peer"]] == [1, 2, 3, 4, 5]
    assert told["each_peer"][0]["parameters_sha256"] == "ab" * 32
    assert told["each_peer"][3]["parameters_sha256"] is None
    assert told["each_peer"][4]["rounds"][0]["time"] == pytest.approx(52.0)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_interrupted_run_can_be_reported(tmp_path: Path) -> None:
    story = Story(4, 90.0)
    assert len(ten_lines(story, write_report(story, tmp_path))) == 10
    assert not succeeded(story)
