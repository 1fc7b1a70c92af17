"""Whether any two peers of a large swarm connect, most of them behind routers, while relays come and go.

    python benchmarks/reachability_simulation.py
    python benchmarks/reachability_simulation.py --peers 1000 --minutes 60
    python benchmarks/reachability_simulation.py --peers 30 --minutes 2 --seeds 1000

Simulated in virtual time. A fifth of the peers are public, and relays for the others; what the others are behind is
drawn like routers of homes. Public peers crash or lose power (of 1,000 peers one every five seconds), and
new ones join. Meanwhile everybody dials random others, at the addresses that these have declared in the last seconds,
as averagers do. A dial counts if both peers live, and is repeated once after a pause if it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from statistics import quantiles

from shoal.errors import ShoalError
from shoal.net.limits import DEFAULT_RELAY_LIMITS
from shoal.p2p import P2P, PeerID
from shoal.testing import Host, Link, Nat, Network, SimulationError, run

logger = logging.getLogger(__name__)

WIDE_AREA = Link(delay=(0.01, 0.1), jitter=0.01)
PUBLIC_SHARE = 0.2
ROUTERS = {
    "full cone": (0.1, lambda: Nat(filtering="none")),
    "address-restricted": (0.1, lambda: Nat(filtering="address")),
    "port-restricted": (0.4, lambda: Nat(filtering="port")),
    "rejecting": (0.1, lambda: Nat(filtering="port", rejects=True)),
    "carrier": (0.15, lambda: Nat(behind=Nat())),
    "symmetric": (0.15, lambda: Nat(mapping="hard")),
}
"""What private peers are behind, each with its share."""
DECLARE_SECONDS = 15.0
LOOK_UP_SECONDS = 0.15
SETTLE_SECONDS = 45.0
"""After so long, a peer is expected to be callable."""
PAUSE_SECONDS = 5.0
"""Before a dial is repeated."""
RELAYS_KNOWN = 20
"""As many of the public peers are in everybody's routing table."""
AT_ONCE, SECONDS_BETWEEN = 10, 2.0
"""So many join at the same time, and then others."""


@dataclass(eq=False)
class Peer:
    """One peer of the swarm."""

    host: Host
    p2p: P2P
    since: float


@dataclass
class Outcome:
    """What came of all dials."""

    ways: Counter[str] = field(default_factory=Counter)
    """How many were connected in which way, or not at once, or not at all."""
    seconds: list[float] = field(default_factory=list)
    """Of the dials that were connected at once."""
    errors: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    """The most that one relay had at a time."""
    unreachable: int = 0
    """The most peers that nobody could call at a time, though they had time enough."""

    def add(self, other: Outcome) -> None:
        self.ways += other.ways
        self.seconds += other.seconds
        self.errors += other.errors
        self.most |= other.most
        self.unreachable = max(self.unreachable, other.unreachable)

    def describe(self) -> str:
        total = sum(self.ways.values())
        if len(self.seconds) < 2:
            return f"{total} dials"
        failed = self.ways["never"]
        ways = ", ".join(f"{way} {count / total:.2%}" for way, count in self.ways.most_common() if way != "never")
        cuts = quantiles(self.seconds, n=100)
        lines = [
            f"{total} dials: {1 - failed / total:.3%} connected ({ways}); {failed} never",
            f"those at once took {cuts[49]:.2f} s in the median, {cuts[94]:.2f} s at the 95th percentile",
            f"most at one relay: {', '.join(f'{count} {what}' for what, count in sorted(self.most.items()))}",
            f"most peers that nobody could call at a time: {self.unreachable}",
        ]
        return "\n".join(lines + [f"  {count} × {error}" for error, count in self.errors.most_common(8)])


class _Directory:
    """Stands for the DHT."""

    def __init__(self, swarm: Swarm, p2p: P2P) -> None:
        self._swarm, self._p2p = swarm, p2p

    async def find_addresses(self, peer: PeerID) -> None:
        await asyncio.sleep(LOOK_UP_SECONDS)
        self._p2p.add_addresses(peer, self._swarm.table.get(peer, ()))

    def dialable_peers(self) -> list[PeerID]:
        known = self._swarm.public
        chosen = [peer.p2p.peer_id for peer in self._p2p.rng.sample(known, min(RELAYS_KNOWN, len(known)))]
        for peer in chosen:
            self._p2p.add_addresses(peer, self._swarm.table.get(peer, ()))
        return chosen

    def note_reachability(self) -> None:
        pass


class Swarm:
    """Peers that dial each other."""

    def __init__(self, network: Network, dial_seconds: float) -> None:
        self.network, self.dial_seconds = network, dial_seconds
        self.rng, self.now = network.rng, asyncio.get_running_loop().time
        self.peers: dict[PeerID, Peer] = {}
        self.table: dict[PeerID, list[str]] = {}
        self.outcome = Outcome()

    @property
    def public(self) -> list[Peer]:
        """Peers that need no relay, and live."""
        return [peer for peer in self.peers.values() if peer.host.nat is None]

    async def join(self, *, is_public: bool) -> None:
        """Let a peer join by way of a few public ones."""
        nat = None
        if not is_public:
            makers = list(ROUTERS.values())
            _, make = self.rng.choices(makers, [share for share, _ in makers])[0]
            nat = make()
        host = self.network.add_host(nat=nat)
        known = self.public
        seeds = self.rng.sample(known, min(3, len(known)))
        addresses = [address for seed in seeds for address in await seed.p2p.get_visible_maddrs()]
        try:
            p2p = await host.run(P2P.create(addresses, transport=host.transport(), rng=host.rng))
        except ShoalError:
            return  # its seeds have died meanwhile
        p2p.directory = _Directory(self, p2p)
        self.peers[p2p.peer_id] = peer = Peer(host, p2p, self.now())
        host.spawn(self._declare(peer))
        host.spawn(self._dial_others(peer))

    async def _declare(self, peer: Peer) -> None:
        while True:
            self.table[peer.p2p.peer_id] = [str(address) for address in peer.p2p.outlook.announced()]
            await asyncio.sleep(peer.host.rng.uniform(0.5, 1.5) * DECLARE_SECONDS)

    async def _dial_others(self, peer: Peer) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        while True:
            await asyncio.sleep(peer.host.rng.expovariate(1 / self.dial_seconds))
            others = [
                each for each in self.peers.values() if each is not peer and self.now() - each.since > SETTLE_SECONDS
            ]
            if others:
                await self._dial(peer.p2p, peer.host.rng.choice(others))

    async def _dial(self, caller: P2P, other: Peer) -> None:
        way = "not at once"
        for is_last in (False, True):
            caller.address_book.replace(other.p2p.peer_id, self.table.get(other.p2p.peer_id, ()))
            began, before = self.now(), (caller.metrics.dials_reversed, caller.metrics.dials_punched)
            try:
                connection = await caller.dial(other.p2p.peer_id)
            except (ShoalError, ConnectionError, TimeoutError) as e:
                if not other.host.is_up:
                    return
                if is_last:
                    self.outcome.ways["never"] += 1
                    kind = "no address" if not self.table.get(other.p2p.peer_id) else type(e).__name__
                    self.outcome.errors[f"{kind}, {other.p2p.reachability.value}"] += 1
                    logger.info("%s from %s to %s: %s", self.now(), caller.peer_id, other.p2p.peer_id, e)
                    return
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if not is_last:
                way = "relayed" if connection.stream.is_relayed else "direct"
                if (caller.metrics.dials_reversed, caller.metrics.dials_punched) != before and way == "direct":
                    way = "reversed" if caller.metrics.dials_reversed != before[0] else "punched"
                self.outcome.seconds.append(self.now() - began)
            connection.abort()
            self.outcome.ways[way] += 1
            return

    async def churn(self, period: float) -> None:
        """Let public peers die, and new ones join."""
        while True:
            await asyncio.sleep(period)
            victim = self.rng.choice(self.public)
            del self.peers[victim.p2p.peer_id]
            self.table.pop(victim.p2p.peer_id, None)
            victim.host.crash() if self.rng.random() < 0.5 else victim.host.power_off()
            await self.join(is_public=True)

    async def watch(self) -> None:
        """Look at the relays, and at who is unreachable."""
        while True:
            await asyncio.sleep(1.0)
            for peer in self.public:
                relay = peer.p2p.relay
                self.outcome.most |= Counter(reservations=len(relay.guests), circuits=relay.circuit_count)
            unreachable = sum(
                not peer.p2p.is_callable for peer in self.peers.values() if self.now() - peer.since > SETTLE_SECONDS
            )
            self.outcome.unreachable = max(self.outcome.unreachable, unreachable)


def simulate(peers: int, seconds: float, life: float, dial_seconds: float, seed: int) -> Outcome:
    """Let a swarm live for a while."""

    async def main() -> Outcome:
        network = Network(WIDE_AREA, internet=True)
        swarm = Swarm(network, dial_seconds)
        count = max(3, round(PUBLIC_SHARE * peers))
        await swarm.join(is_public=True)
        kinds = [True] * (count - 1) + [False] * (peers - count)
        for start in range(0, len(kinds), AT_ONCE):
            await asyncio.gather(*(swarm.join(is_public=kind) for kind in kinds[start : start + AT_ONCE]))
            await asyncio.sleep(SECONDS_BETWEEN)
        await asyncio.sleep(SETTLE_SECONDS)
        tasks = [asyncio.ensure_future(work) for work in (swarm.churn(life / count), swarm.watch())]
        for tenth in range(1, 11):
            await asyncio.sleep(seconds / 10)
            logger.info("seed %d, %d %% of the time: %s", seed, 10 * tenth, swarm.outcome.describe())
        for task in tasks:
            task.cancel()
        for name, most in (
            ("reservations", DEFAULT_RELAY_LIMITS.reservations),
            ("circuits", DEFAULT_RELAY_LIMITS.circuits),
        ):
            if swarm.outcome.most[name] > most:
                raise SimulationError(f"a relay had {swarm.outcome.most[name]} {name}, and {most} are its limit")
        for peer in swarm.peers.values():
            peer.host.power_off()
        return swarm.outcome

    return run(main(), seed=seed)


def _log(progress: bool) -> None:
    """In each process: nothing, or how it goes and which dials fail."""
    if not progress:
        logging.disable()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("shoal").setLevel(logging.CRITICAL + 1)
    logger.setLevel(logging.INFO)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--life", type=float, default=1000.0, help="seconds that a public peer lives on average")
    parser.add_argument("--dials", type=float, default=30.0, help="seconds from one dial of a peer to its next")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="simulations at the same time")
    parser.add_argument("--progress", action="store_true", help="tell ten times how it goes, and of dials that fail")
    arguments = parser.parse_args()
    one = functools.partial(simulate, arguments.peers, 60 * arguments.minutes, arguments.life, arguments.dials)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    total = Outcome()
    with ProcessPoolExecutor(arguments.processes, initializer=_log, initargs=(arguments.progress,)) as processes:
        for outcome in processes.map(one, seeds):
            total.add(outcome)
    print(total.describe())


if __name__ == "__main__":
    main()
