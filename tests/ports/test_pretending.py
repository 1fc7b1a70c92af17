"""Processes that tests start pretend to be the same system as the tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.base import reactor
from tests import pretend

PLATFORMS = {"windows": "win32", "macos": "darwin"}
PROGRAM = """
import subprocess, sys
from shoal.base import reactor
print(reactor.sys.platform, flush=True)
if len(sys.argv) == 2:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""


@pytest.mark.parametrize("system", PLATFORMS)
def test_processes_and_theirs_pretend_too(system: str) -> None:
    if pretend.system not in ("", system):
        pytest.skip("this process pretends something else")
    environment = {**os.environ, pretend.VARIABLE: system, "PYTHONPATH": pretend.STARTUP}
    command = [sys.executable, "-c", PROGRAM, PROGRAM]
    # If this process pretends, what it has set for its children is enough.
    output = subprocess.check_output(command, text=True, env=None if pretend.system else environment)
    assert output.split() == [PLATFORMS[system]] * 2


def test_what_a_test_changes_is_put_back() -> None:
    before = reactor.sys.platform
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("shoal.base.reactor.sys.platform", "plan9")
        assert reactor.sys.platform == "plan9"
    assert reactor.sys.platform == before
