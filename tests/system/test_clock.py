"""Real processes with clocks that are off, or that jump: they live by the time of the swarm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal import DHT, get_dht_time
from shoal.base import clock
from tests.system.swarm import START_LIMIT_SECONDS, Swarm

pytestmark = pytest.mark.timeout(240)
PROGRAM = Path(__file__).with_name("live_by_another_clock.py")


@pytest.fixture(autouse=True)
def clock_without_a_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process remembers for an hour whose clocks it has compared, also those of other tests."""
    monkeypatch.setattr(clock, "clock_of_process", clock.ProcessClock())


@pytest.mark.parametrize("offset", [300.0, -300.0])
@pytest.mark.parametrize("companions", [1, 3])
def test_a_process_whose_clock_is_off(offset: float, companions: int) -> None:
    dhts = [DHT(start=True)]
    try:
        for _ in range(companions - 1):
            dhts.append(DHT(initial_peers=dhts[0].get_visible_maddrs(), start=True))
        assert dhts[0].store("for the odd one", "value", get_dht_time() + 60)
        addresses = [str(dht.get_visible_maddrs()[0]) for dht in dhts]
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(offset), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = dhts[-1].get("from the odd one", latest=True)
            _, errors = process.communicate("\n", timeout=120)
        finally:
            process.kill()
            process.communicate()
        assert line, errors
        told = json.loads(line)
        assert abs(told["error"]) < 1
        assert told["offset"] == pytest.approx(offset, abs=1)
        assert (told["stored"], told["found"]) == (True, "value")
        assert 0 < told["left"] <= 61
        assert found is not None
        assert 0 < found.expiration_time - time.time() <= 61
        side = "ahead of" if offset > 0 else "behind"
        assert f"seconds {side} the time of the swarm" in errors
        assert "NTP" in errors
        assert abs(get_dht_time() - time.time()) < 0.01, "those that are right were not moved"
    finally:
        for dht in dhts:
            dht.shutdown()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
@pytest.mark.parametrize("jump", [120.0, -7200.0])
def test_a_clock_that_jumps_during_training(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both peers make all epochs after it together, and the one whose clock it is tells its user once."""
    monkeypatch.setenv("JUMP", str(jump))
    with Swarm("train_by_a_clock_that_jumps.py", 2, "--epochs", 1000) as swarm:
        odd, other = swarm.peers
        for peer in swarm.peers:
            peer.wait_for("epoch", START_LIMIT_SECONDS, lambda event: len(event["group"]) == 2)
        last = max(event["epoch"] for peer in swarm.peers for event in peer.all("epoch"))
        odd.process.send_signal(signal.SIGUSR1)
        for peer in swarm.peers:
            peer.wait_for("epoch", START_LIMIT_SECONDS, lambda event: event["epoch"] >= last + 5)
            groups = [len(event["group"]) for event in peer.all("epoch") if last < event["epoch"] <= last + 5]
            assert groups == [2] * 5
        assert odd.errors().count(f"has jumped by {jump:+.1f} seconds") == 1, odd.errors()
        assert "clock" not in other.errors()
