"""How long it takes until a swarm is one again after an outage, simulated in virtual time.

    python benchmarks/outages.py
    python benchmarks/outages.py --seeds 100 --nodes 4 --who half --seconds 600

Nodes store and read now and then, as peers do that train. Then one of them, half of them, or each of them is cut off
from the rest for a while. The swarm is one again when every node has all others in its routing table, and finds what
every other node has stored since the outage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from shoal.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import ShoalError
from shoal.testing import Host, Link, Network, run, start_dht_nodes

WIDE_AREA = Link(delay=(0.01, 0.1), jitter=0.01)
SECONDS_BEFORE = 30.0
SECONDS_BETWEEN_ACTIONS = (1.0, 5.0)
PATIENCE_SECONDS = 900.0
"""After so long a swarm counts as split for ever."""

WHO: dict[str, Callable[[list[Host], Network], list[list[Host]]]] = {
    "one": lambda hosts, network: _sides(hosts, network, 1),
    "half": lambda hosts, network: _sides(hosts, network, len(hosts) // 2),
    "all": lambda hosts, network: [[host] for host in hosts],
}
"""Who cannot reach whom, as groups."""


def _sides(hosts: list[Host], network: Network, count: int) -> list[list[Host]]:
    away = network.rng.sample(hosts, count)
    return [away, [host for host in hosts if host not in away]]


@dataclass
class Outcome:
    """What came of one outage."""

    seed: int
    seconds: float
    """From the end of the outage until the swarm was one again; the whole patience if it never was."""


class Swarm:
    """Nodes that store and read."""

    def __init__(self, network: Network, nodes: list[DHTNode], *, busy: bool) -> None:
        self.network, self.nodes, self.busy = network, nodes, busy
        self.hosts = [network.host_of(node.peer_id) for node in nodes]

    def begin(self) -> None:
        if self.busy:
            for node, host in zip(self.nodes, self.hosts, strict=True):
                host.spawn(self._live(node, host))

    async def _live(self, node: DHTNode, host: Host) -> None:
        while True:
            await asyncio.sleep(host.rng.uniform(*SECONDS_BETWEEN_ACTIONS))
            with contextlib.suppress(ShoalError):
                await node.store("run", 1, get_dht_time() + 60, subkey=str(node.peer_id))
                await node.get("run", latest=True)

    def knows_all(self, node: DHTNode) -> bool:
        known = dict(node.protocol.routing_table)
        return all(other.node_id in known for other in self.nodes if other is not node)

    async def is_one(self, moment: float) -> bool:
        if not all(map(self.knows_all, self.nodes)):
            return False
        stores = (
            host.run(node.store(f"{moment} {node.peer_id}", 1, get_dht_time() + 60))
            for node, host in zip(self.nodes, self.hosts, strict=True)
        )
        await asyncio.gather(*stores)
        gets = (
            host.run(node.get(f"{moment} {other.peer_id}"))
            for node, host in zip(self.nodes, self.hosts, strict=True)
            for other in self.nodes
        )
        return None not in await asyncio.gather(*gets)


def simulate(who: str, seconds: float, *, nodes: int, seed: int, busy: bool = True) -> Outcome:
    """Let one outage happen."""

    async def main() -> Outcome:
        network = Network(WIDE_AREA)
        swarm = Swarm(network, await start_dht_nodes(network, nodes), busy=busy)
        now = asyncio.get_running_loop().time
        swarm.begin()
        await asyncio.sleep(SECONDS_BEFORE)
        network.partition(*WHO[who](swarm.hosts, network))
        await asyncio.sleep(seconds)
        network.heal()
        healed_at = now()
        while now() - healed_at < PATIENCE_SECONDS:
            if await swarm.is_one(now()):
                break
            await asyncio.sleep(1.0)
        return Outcome(seed, now() - healed_at)

    return run(main(), seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--who", choices=WHO, action="append", help="all kinds by default")
    parser.add_argument("--seconds", type=float, action="append", help="10, 60, 600 and 7200 by default")
    parser.add_argument("--idle", action="store_true", help="nodes that neither store nor read")
    arguments = parser.parse_args()
    for who in arguments.who or WHO:
        for seconds in arguments.seconds or (10.0, 60.0, 600.0, 7200.0):
            took = [
                simulate(who, seconds, nodes=arguments.nodes, seed=seed, busy=not arguments.idle).seconds
                for seed in range(arguments.seeds)
            ]
            print(
                f"{who:>4} of {arguments.nodes} away for {seconds:5.0f} s: one again after {median(took):5.1f} s in "
                f"the median, {max(took):5.1f} s at most; within 60 s in {sum(t <= 60 for t in took)} of {len(took)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
