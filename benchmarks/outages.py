"""How long it takes until a swarm is one again after an outage, simulated in virtual time.

    python benchmarks/outages.py
    python benchmarks/outages.py --seeds 100 --nodes 4 --who half --seconds 600
    python benchmarks/outages.py --crowd 5000

Nodes store and read now and then, as peers do that train. Then one of them, half of them, or each of them is cut off
from the rest for a while. The swarm is one again when every node has all others in its routing table, and finds what
every other node has stored since the outage.

With ``--crowd`` a large swarm, all of which has joined through the same three peers, is cut off for a minute and comes
back at one moment: how long does it take, and how many connections have to be accepted in a second?
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import ShoalError
from shoal.net.memory import MemoryTransport
from shoal.net.transport import Stream
from shoal.p2p import Multiaddr, PeerID
from shoal.testing import Host, Link, Network, run, start_dht_nodes

WIDE_AREA = Link(delay=(0.01, 0.1), jitter=0.01)
SECONDS_BEFORE = 30.0
SECONDS_BETWEEN_ACTIONS = (1.0, 5.0)
AT_ONCE = 32
"""So many nodes of a crowd join at the same time."""
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


class CountingNetwork(Network):
    """Counts the connections that each peer accepts in each second."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.connections: Counter[tuple[PeerID, int]] = Counter()

    async def connect(self, source: MemoryTransport, address: Multiaddr, expected_peer: PeerID) -> Stream:
        stream = await super().connect(source, address, expected_peer)
        self.connections[expected_peer, int(asyncio.get_running_loop().time())] += 1
        return stream


@dataclass
class Return:
    """What came of a crowd that returns from an outage."""

    seconds: float
    """From the end of the outage until every node has found the swarm."""
    most_at_a_seed: int
    """Connections that one of the three first peers had to accept within a second."""
    most_at_others: int
    """The same for all other nodes."""
    found_after: list[float]
    """For each node."""


def let_a_crowd_return(count: int, seconds: float = 60.0, seed: int = 0) -> Return:
    """Cut everybody off from everybody."""

    async def main() -> Return:
        network = CountingNetwork(WIDE_AREA)
        nodes = await start_dht_nodes(network, 3)
        seeds = [address for node in nodes for address in await node.get_visible_maddrs()]
        seed_peers = [node.peer_id for node in nodes]
        while len(nodes) < count:
            hosts = [network.add_host() for _ in range(min(AT_ONCE, count - len(nodes)))]
            create = (
                host.run(DHTNode.create(initial_peers=seeds, transport=host.transport(), rng=host.rng))
                for host in hosts
            )
            nodes += await asyncio.gather(*create)
        network.partition(*([host] for host in network.hosts))
        await asyncio.sleep(seconds)
        assert all(node.protocol.connectivity.is_lost for node in nodes), "a longer outage is needed"
        network.heal()
        now = asyncio.get_running_loop().time
        healed_at, found_after = now(), {}
        network.connections.clear()
        while len(found_after) < count and now() - healed_at < PATIENCE_SECONDS:
            await asyncio.sleep(1.0)
            for number, node in enumerate(nodes):
                if number not in found_after and not node.protocol.connectivity.is_lost:
                    found_after[number] = now() - healed_at
        at_seeds = [times for (peer, _), times in network.connections.items() if peer in seed_peers]
        at_others = [times for (peer, _), times in network.connections.items() if peer not in seed_peers]
        return Return(now() - healed_at, max(at_seeds), max(at_others), sorted(found_after.values()))

    return run(main(), seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--who", choices=WHO, action="append", help="all kinds by default")
    parser.add_argument("--seconds", type=float, action="append", help="10, 60, 600 and 7200 by default")
    parser.add_argument("--idle", action="store_true", help="nodes that neither store nor read")
    parser.add_argument("--crowd", type=int, help="let so many nodes return at once")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="simulations at the same time")
    arguments = parser.parse_args()
    if arguments.crowd:
        result = let_a_crowd_return(arguments.crowd)
        print(
            f"{len(result.found_after)} of {arguments.crowd} nodes are back after {result.seconds:.0f} s, half of them "
            f"after {median(result.found_after):.0f} s; most connections within a second: {result.most_at_a_seed} at "
            f"one of the first peers, {result.most_at_others} at any other"
        )
        return
    with ProcessPoolExecutor(arguments.processes, initializer=logging.disable) as processes:
        for who in arguments.who or WHO:
            for seconds in arguments.seconds or (10.0, 60.0, 600.0, 7200.0):
                one = functools.partial(_seconds_of, who, seconds, arguments.nodes, not arguments.idle)
                took = list(processes.map(one, range(arguments.seeds)))
                in_time = sum(each <= 60 for each in took)
                print(
                    f"{who:>4} of {arguments.nodes} away for {seconds:5.0f} s: one again after {median(took):5.1f} s "
                    f"in the median, {max(took):5.1f} s at most; within 60 s in {in_time} of {len(took)}",
                    flush=True,
                )


def _seconds_of(who: str, seconds: float, nodes: int, is_busy: bool, seed: int) -> float:
    return simulate(who, seconds, nodes=nodes, seed=seed, busy=is_busy).seconds


if __name__ == "__main__":
    main()
