"""How the distributed table does with a thousand nodes, simulated in virtual time on one core.

    python benchmarks/dht_simulation.py
    python benchmarks/dht_simulation.py --scenario faults --nodes 1000 --operations 10000 --seed 3

Each operation is a store by a node chosen at random, and later a get of the same record by another one. Scenarios:

- ``plain``: nothing goes wrong.
- ``faults``: links of 20 to 200 ms each way; one in twenty attempts to connect fails and one in twenty connections
  breaks; between the stores and the gets 30 % of the nodes fall silent for good, without a word to anybody.
- ``partition``: when half of the stores are done, the network falls in two halves for a minute, and both go on storing.
  When it is healed, and every node has had the time of one refresh, any node gets what any node has stored.

A *hop* is one answer in the chain of answers that led to a value: 0 for what a node has itself, 1 for what a node of
its routing table has, 2 for what a node has of which such a node told, and so on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from shoal.base.clock import get_dht_time
from shoal.dht import DHTID, DHTNode
from shoal.testing import Link, Network, Trace, run, start_dht_nodes

SECONDS_TO_LIVE = 86400.0
OPERATIONS_IN_FLIGHT = 64
SECONDS_CONNECTIONS_ARE_KEPT = 30.0
QUIET = Link(delay=(0.01, 0.075), jitter=0.005)
ROUGH = Link(
    delay=(0.02, 0.2), jitter=0.01, dial_failure=0.05, break_rate=-math.log(0.95) / SECONDS_CONNECTIONS_ARE_KEPT
)
SHARE_OF_DEAD = 0.3
PARTITION_SECONDS = 60.0
REFRESH_SECONDS = 60.0


@dataclass
class Figures:
    """What came of a simulation. Seconds are virtual ones, unless the name says otherwise."""

    scenario: str
    nodes: int
    operations: int
    seed: int
    stored: int
    """Stores that most replicas confirmed."""
    asked: int
    """Gets of records that were stored."""
    found: int
    """Gets that returned what was stored."""
    lost: int
    """Records that could not be found, because all nodes that held them are dead."""
    median_hops: float
    most_hops: int
    median_store_seconds: float
    p99_store_seconds: float
    median_get_seconds: float
    p99_get_seconds: float
    calls: int
    """Between nodes, beginning with the start of the first one."""
    virtual_seconds: float
    wall_seconds: float
    wall_seconds_of_start: float
    processor_seconds: float
    events: int
    trace: str
    """Hash of everything that reached a host, and when: the same for the same seed."""

    @property
    def share_found(self) -> float:
        return self.found / self.asked


class Swarm:
    """Nodes of one table, and what they have stored."""

    def __init__(self, network: Network, nodes: list[DHTNode]) -> None:
        self.network, self.nodes = network, nodes
        self.living = [(node, network.host_of(node.peer_id)) for node in nodes]
        self.stored: list[int] = []
        self.asked = 0
        self.found = 0
        self.lost = 0
        self.store_seconds: list[float] = []
        self.get_seconds: list[float] = []
        self._now = asyncio.get_running_loop().time

    async def _at_a_random_node(self, operation: Callable[[DHTNode], Awaitable[Any]]) -> Any:
        node, host = self.network.rng.choice(self.living)
        return await host.run(_await(operation(node)))

    async def store(self, number: int) -> None:
        started, expires = self._now(), get_dht_time() + SECONDS_TO_LIVE
        if await self._at_a_random_node(lambda node: node.store(f"key {number}", _value_of(number), expires)):
            self.stored.append(number)
        self.store_seconds.append(self._now() - started)

    async def get(self, number: int) -> None:
        started = self._now()
        record = await self._at_a_random_node(lambda node: node.get(f"key {number}"))
        self.asked += 1
        self.found += record is not None and record.value == _value_of(number)
        self.get_seconds.append(self._now() - started)

    def let_some_die(self) -> None:
        dying = dict.fromkeys(self.network.rng.sample(self.network.hosts, round(SHARE_OF_DEAD * len(self.nodes))))
        for host in dying:
            host.power_off()
        self.living = [(node, host) for node, host in self.living if host not in dying]

    async def get_everything(self) -> None:
        """Each record that was stored, once, at a node chosen at random."""
        held = {key for node, _ in self.living for key, _ in node.protocol.storage.items()}
        self.lost = sum(DHTID.generate(f"key {number}") not in held for number in self.stored)
        await _a_few_at_a_time(self.get, sorted(self.stored))


def _value_of(number: int) -> list[object]:
    return ["value", number]


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _a_few_at_a_time(operation: Callable[[int], Awaitable[None]], numbers: Iterable[int]) -> None:
    waiting = iter(numbers)

    async def worker() -> None:
        for number in waiting:
            await operation(number)

    await asyncio.gather(*(worker() for _ in range(OPERATIONS_IN_FLIGHT)))


async def plain(swarm: Swarm, operations: int) -> None:
    await _a_few_at_a_time(swarm.store, range(operations))
    await swarm.get_everything()


async def faults(swarm: Swarm, operations: int) -> None:
    await _a_few_at_a_time(swarm.store, range(operations))
    swarm.let_some_die()
    await swarm.get_everything()


async def partition(swarm: Swarm, operations: int) -> None:
    network, half = swarm.network, operations // 2
    await _a_few_at_a_time(swarm.store, range(half))
    one_side = dict.fromkeys(network.rng.sample(network.hosts, len(network.hosts) // 2))
    network.partition(one_side, [host for host in network.hosts if host not in one_side])
    healed = asyncio.create_task(asyncio.sleep(PARTITION_SECONDS))
    await _a_few_at_a_time(swarm.store, range(half, operations))
    await healed
    network.heal()
    await asyncio.sleep(REFRESH_SECONDS)
    await swarm.get_everything()


SCENARIOS: dict[str, tuple[Callable[[Swarm, int], Awaitable[None]], Link, dict[str, Any]]] = {
    "plain": (plain, QUIET, {}),
    # over 200 ms each way, making sure that a newcomer can be called back takes longer than a join may
    "faults": (faults, ROUGH, {"ensure_bootstrap_success": False}),
    "partition": (partition, QUIET, {"refresh_timeout": REFRESH_SECONDS}),
}
"""What happens, on which links, and settings of the nodes."""


def simulate(scenario: str, nodes: int, operations: int, seed: int = 0) -> Figures:
    """Run one scenario."""
    story, link, options = SCENARIOS[scenario]
    wall_start, processor_start = time.perf_counter(), time.process_time()

    async def main() -> Figures:
        trace = Trace()
        network = Network(link, trace=trace)
        swarm = Swarm(network, await start_dht_nodes(network, nodes, **options))
        wall_seconds_of_start = time.perf_counter() - wall_start
        await story(swarm, operations)
        metrics = [node.p2p.metrics for node in swarm.nodes]
        hops = sum((each.hops_to_records for each in metrics), Counter())
        return Figures(
            scenario=scenario,
            nodes=nodes,
            operations=operations,
            seed=seed,
            stored=len(swarm.stored),
            asked=swarm.asked,
            found=swarm.found,
            lost=swarm.lost,
            median_hops=median(hops.elements()),
            most_hops=max(hops),
            median_store_seconds=median(swarm.store_seconds),
            p99_store_seconds=quantiles(swarm.store_seconds, n=100)[-1],
            median_get_seconds=median(swarm.get_seconds),
            p99_get_seconds=quantiles(swarm.get_seconds, n=100)[-1],
            calls=sum(each.calls_made for each in metrics),
            virtual_seconds=asyncio.get_running_loop().time(),
            wall_seconds=time.perf_counter() - wall_start,
            wall_seconds_of_start=wall_seconds_of_start,
            processor_seconds=time.process_time() - processor_start,
            events=trace.events,
            trace=trace.digest(),
        )

    return run(main(), seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, default="plain")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=10_000, help="stores, and as many gets")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figures = simulate(arguments.scenario, arguments.nodes, arguments.operations, arguments.seed)
    for name, value in asdict(figures).items():
        print(
            f"{name.replace('_', ' '):24}{value:.3f}"
            if isinstance(value, float)
            else f"{name.replace('_', ' '):24}{value}"
        )
    print(f"{'share found':24}{figures.share_found:.5f}")
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
