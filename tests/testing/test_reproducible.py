"""The same seed gives the same run, event by event, whatever the order of hashes and addresses in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.reproducible_runs import PROGRAMS, hashes

ROOT = Path(__file__).parents[2]


def hashes_in_another_process(seed: int, hash_seed: int) -> dict[str, str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.testing.reproducible_runs", str(seed)]
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=50
    ).stdout
    return dict(line.split(" ", 1) for line in output.splitlines())


@pytest.mark.slow
def test_events_do_not_depend_on_hash_seeds():
    seed = 1
    here = hashes(seed)
    assert here.keys() == {program.__name__ for program in PROGRAMS}
    assert all(int(line.split()[0]) > 100 for line in here.values())
    # The hash seed of this process is drawn by chance.
    assert hashes_in_another_process(seed, 1) == here


@pytest.mark.slow_drill
def test_other_seeds_give_other_events():
    first, second = hashes(3), hashes(4)
    assert all(first[name] != second[name] for name in first)
