"""``shoal demo`` as a user sees it: real processes, a real kill, and nothing left behind however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.cli.__main__ import main
from shoal.cli.demo.messages import METHODS, SYNCHRONOUS, Story
from tests.drills import mostly_drills

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``shoal demo`` with some options."""
    running: list[subprocess.Popen[str]] = []

    def begin(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "shoal.cli", "demo", "--folder", str(tmp_path), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"{words!r} was never said; standard error: {process.communicate()[1]}")


def peers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_missing_page_packages_are_reported_first(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "shoal.monitor.page", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "--web", "--folder", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().err == f"shoal demo: the page needs {package}: pip install 'shoal[monitor]'\n"
    assert not (tmp_path / "report").exists(), "peers write their logs there"


@pytest.mark.parametrize("method", mostly_drills(METHODS))
def test_short_run_survives_a_loss_and_a_newcomer(start: Start, tmp_path: Path, method: str) -> None:
    process = start("--peers", "3", "--seconds", "10", "--method", method)
    out, errors = process.communicate(timeout=280)
    assert errors == ""
    report = json.loads((tmp_path / "report.json").read_text())
    peers = {peer["number"]: peer for peer in report["each_peer"]}
    assert [peers[number]["state"] for number in (1, 2, 3, 4)] == ["finished", "finished", "killed", "finished"]
    assert report["parameters_bit_identical"] is True
    assert len({peers[number]["parameters_sha256"] for number in (1, 2, 4)}) == 1
    assert len({peer["peer_id"] for peer in peers.values()}) == 4
    assert report["epochs"] > (3 if method == SYNCHRONOUS else 0)
    assert report["held_out_loss_nats_per_byte"] < 5.3  # guessing gives 5.55
    assert report["joined"]["seconds_until_it_had_the_swarms_epoch"] is not None
    # Slots are long: the newcomer may have come too late for the last one.
    has_shown_all = report["below_bigram_entropy_at"] and report["joined"]["samples_contributed"]
    assert process.returncode == (0 if has_shown_all else 1)
    lines = out.strip().rpartition("\n\n")[2].splitlines()
    assert len(lines) == (10 if method == SYNCHRONOUS else 11)
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.slow_drill
def test_an_interrupted_run_leaves_no_peer(start: Start) -> None:
    process = start("--peers", "2", "--seconds", "100")
    read_until(process, "All peers are in")
    check_end(process, signal.SIGINT)


def test_termination_during_start_leaves_no_peer(start: Start) -> None:
    process = start("--peers", "2", "--seconds", "100")
    read_until(process, "Starting 2 peers")
    while len(peers_of(process)) < 2:
        assert process.poll() is None
        time.sleep(0.01)  # the next line comes when they have loaded torch
    check_end(process, signal.SIGTERM)


def test_termination_while_a_process_starts_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The signal comes when the process exists and nobody knows of it yet."""
    started: list[subprocess.Popen[bytes]] = []

    class TerminatedMeanwhile(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", TerminatedMeanwhile)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as leaving:
            main(["demo", "--peers", "2", "--folder", str(tmp_path)])
        assert leaving.value.code == 128 + signal.SIGTERM
        assert len(started) == 1, "no other one is started"
        assert started[0].returncode is not None
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                process.communicate()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    peers = peers_of(process)
    assert len(peers) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert not any(peer.is_running() for peer in peers)


@pytest.mark.slow_drill
def test_peers_go_when_their_runner_is_gone(start: Start) -> None:
    process = start("--peers", "2", "--seconds", "100")
    read_until(process, "All peers are in")
    peers = peers_of(process)
    process.kill()
    gone, alive = psutil.wait_procs(peers, timeout=120)
    assert not alive
    assert len(gone) == 2


def test_unwritable_report_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shoal.cli.demo.command.Demo.run", lambda _: Story(2, 10.0))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(["demo", "--folder", str(tmp_path / "gone")]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err.startswith("shoal demo: [Errno 2] No such file")


def test_a_swarm_of_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--peers", "1"]) == 2
    assert "at least 2 peers, got 1" in capsys.readouterr().err
    assert main(["demo", "--seconds", "nan"]) == 2
    assert "at least 10 seconds, got nan" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--web", "99999"])
    assert "from 0 to 65535, got 99999" in capsys.readouterr().err
