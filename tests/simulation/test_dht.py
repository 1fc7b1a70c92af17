"""The table in a simulated swarm: what ``benchmarks/dht_simulation.py`` measures at full size must hold at any size."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from benchmarks.dht_simulation import Figures, simulate
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.testing import Link, Network, run, start_dht_nodes

ROOT = Path(__file__).parents[2]


def most_hops_in_the_median(nodes: int) -> float:
    return math.log2(nodes) / 2 + 1


@pytest.mark.slow_drill
def test_without_faults_everything_is_found_in_few_hops():
    figures = simulate("plain", nodes=80, operations=150)
    assert figures.stored == figures.asked == figures.found == 150
    assert 1 <= figures.median_hops <= most_hops_in_the_median(80)
    assert figures.p99_get_seconds < 2


@pytest.mark.parametrize(
    ("nodes", "operations", "seed"),
    [(40, 100, 0), *(pytest.param(60, 200, seed, marks=pytest.mark.slow_drill) for seed in range(2))],
)
def test_most_is_found_although_many_nodes_fall_silent(nodes, operations, seed):
    figures = simulate("faults", nodes=nodes, operations=operations, seed=seed)
    assert figures.stored >= 0.995 * figures.operations
    assert figures.lost <= 0.03 * figures.stored, "few places, so all nodes of one may well be among the dead"
    assert figures.found >= 0.995 * (figures.asked - figures.lost)
    assert figures.median_hops <= most_hops_in_the_median(nodes)


@pytest.mark.parametrize(("nodes", "operations"), [(30, 50), pytest.param(60, 100, marks=pytest.mark.slow_drill)])
def test_everything_is_found_one_refresh_after_a_partition(nodes, operations):
    figures = simulate("partition", nodes=nodes, operations=operations)
    assert figures.stored == figures.asked == figures.found == operations


def in_another_process(hash_seed: int) -> Figures:
    command = [sys.executable, "benchmarks/dht_simulation.py", "--scenario=faults", "--nodes=30", "--operations=60"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    return Figures(**json.loads(output.splitlines()[-1]))


@pytest.mark.slow_drill
def test_same_seed_gives_the_same_events():
    here = simulate("faults", nodes=30, operations=60)
    there = in_another_process(hash_seed=1)  # that of this process is random
    assert (there.events, there.trace) == (here.events, here.trace)
    assert simulate("faults", nodes=30, operations=60, seed=1).trace != here.trace


# --- the latest value -------------------------------------------------------------------------------------------------

WIDE_AREA = Link(delay=(0.02, 0.15), jitter=0.01, dial_failure=0.01)
POLLS = 3


@pytest.mark.slow_drill
@pytest.mark.parametrize("share_of_dead", [0.3, 0.0])
def test_dictionaries_are_read_completely_and_quickly(share_of_dead):
    """As peers do that look for each other: all write an entry of one dictionary and read it again and again."""

    async def main(seconds: dict[int, list[float]]) -> None:
        network = Network(WIDE_AREA)
        nodes = await start_dht_nodes(network, 48)
        hosts = {node: network.host_of(node.peer_id) for node in nodes}
        writers = network.rng.sample(nodes, 16)
        now = asyncio.get_running_loop().time

        async def write(node: DHTNode) -> bool:
            store = node.store("group", "here", get_dht_time() + 600, subkey=node.node_id.to_bytes())
            return await hosts[node].run(store)

        async def poll(node: DHTNode) -> None:
            for number in range(POLLS):
                start = now()
                found = await hosts[node].run(node.get("group", latest=True))
                seconds[number].append(now() - start)
                assert set(found.value) == {writer.node_id.to_bytes() for writer in writers}
                await asyncio.sleep(0.5)

        assert all(await asyncio.gather(*map(write, writers)))
        for node in network.rng.sample(nodes, round(share_of_dead * len(nodes))):
            hosts[node].power_off()
        await asyncio.gather(*(poll(node) for node in writers if hosts[node].is_up))

    settled = []
    for seed in (5, 6, 7):
        seconds: dict[int, list[float]] = defaultdict(list)
        run(main(seconds), seed=seed)
        assert max(seconds[0]) < (6 if share_of_dead else 3), "the first time, most nodes have to be dialled"
        settled.append(median(seconds[POLLS - 1]))
    # In one of four swarms, some of the dead are asked once more.
    assert median(settled) < 0.8
