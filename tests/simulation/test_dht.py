"""The table in a simulated swarm: what ``benchmarks/dht_simulation.py`` measures at full size must hold at any size."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dht_simulation import Figures, simulate

ROOT = Path(__file__).parents[2]


def most_hops_in_the_median(nodes: int) -> float:
    return math.log2(nodes) / 2 + 1


def test_without_faults_everything_is_found_in_few_hops():
    figures = simulate("plain", nodes=150, operations=300)
    assert figures.stored == figures.asked == figures.found == 300
    assert 1 <= figures.median_hops <= most_hops_in_the_median(150)
    assert figures.p99_get_seconds < 2


@pytest.mark.parametrize("seed", range(2))
def test_most_is_found_although_many_nodes_fall_silent(seed):
    figures = simulate("faults", nodes=100, operations=300, seed=seed)
    assert figures.stored >= 0.995 * figures.operations
    assert figures.lost <= 0.03 * figures.stored, "few places, so all nodes of one may well be among the dead"
    assert figures.found >= 0.995 * (figures.asked - figures.lost)
    assert figures.median_hops <= most_hops_in_the_median(100)


def test_everything_is_found_one_refresh_after_a_partition():
    figures = simulate("partition", nodes=100, operations=200)
    assert figures.stored == figures.asked == figures.found == 200


def in_another_process(hash_seed: int) -> Figures:
    command = [sys.executable, "benchmarks/dht_simulation.py", "--scenario=faults", "--nodes=30", "--operations=60"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    return Figures(**json.loads(output.splitlines()[-1]))


def test_the_same_seed_gives_the_same_events_whatever_the_hash_seed():
    here = simulate("faults", nodes=30, operations=60)
    for hash_seed in (1, 2):
        there = in_another_process(hash_seed)
        assert (there.events, there.trace) == (here.events, here.trace)
    assert simulate("faults", nodes=30, operations=60, seed=1).trace != here.trace
