"""Processes whose standard streams are closed, as those of some daemons are: nothing ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.swarm import START_LIMIT_SECONDS

PROGRAM = Path(__file__).with_name("talk.py")
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="there are no descriptors to close"),
    pytest.mark.timeout(240),
]
closed_streams = pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])


@closed_streams
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_two_nodes_talk_with_closed_streams(closed: str, loop: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    status = subprocess.call(
        ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, str(PROGRAM), str(results)],
        env={**os.environ, "SHOAL_LOOP": loop},
        timeout=START_LIMIT_SECONDS,
    )
    assert status == 0
    assert results.read_text(encoding="utf-8") == "open: 3"


@closed_streams
def test_the_command_runs_with_closed_streams(closed: str, tmp_path: Path) -> None:
    identity = tmp_path / "identity"
    words = [sys.executable, "-m", "shoal.cli", "dht", "--identity_path", str(identity)]
    process = subprocess.Popen(["sh", "-c", f'exec "$0" "$@" {closed}', *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while not identity.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_LIMIT_SECONDS) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
