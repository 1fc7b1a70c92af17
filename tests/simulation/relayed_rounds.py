"""Rounds of averagers behind routers, in which relays die or routers start again.

python -m tests.simulation.relayed_rounds --seeds 100
python -m tests.simulation.relayed_rounds --what crash --seeds 1000
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch

from shoal.base.tasks import await_cancelled
from shoal.dht import DHTNode
from shoal.reach.reachability import Reachability
from shoal.testing import Host, Link, Network, run, start_averager, start_step
from tests.simulation.rounds import Member, own_value, when_all_average
from tests.simulation.routers import ANYWHERE, KINDS, Internet

VALUES = 250_000
"""Of each member: a megabyte."""
PART_BYTES = 2**15
LINE = 1e6
"""Bytes per second that a member sends and receives at most."""
RELAYS = 3
WINDOW = 5.0
PATIENCE = {"sender_timeout": 30.0, "reducer_timeout": 60.0, "chunk_timeout": 30.0}
"""The defaults of averagers; in most simulations they are shorter."""
SETTLED_SECONDS = 15.0


@dataclass
class Round:
    """What came of a round."""

    seconds: float
    """From the beginning of the averaging until everybody was done."""
    members: list[Member]
    relayed: int
    """Bytes that went through relays."""

    def check(self, size: int) -> None:
        """Everybody has the mean of all, in the same bytes."""
        mean = sum(map(own_value, range(size))) / size
        for member in self.members:
            assert len(member.result.peers) == size
            assert member.result.share_averaged == 1
            assert torch.equal(member.values, self.members[0].values)
            assert torch.allclose(member.values, torch.tensor(mean))


@dataclass
class Scene:
    """Who takes part."""

    internet: Internet
    relays: list[Host]
    members: list[Member]

    def busiest_relay(self) -> Host:
        """The relay that carries most circuits."""

        def circuits(host: Host) -> int:
            return self._node_on(host).p2p.relay.circuit_count

        return max(self.relays, key=circuits)

    def _node_on(self, host: Host) -> DHTNode:
        return next(node for node in self.internet.nodes if self.internet.host_of(node) is host)


Interfere = Callable[[Scene], None]


def nothing(scene: Scene) -> None:
    """All goes well."""


def crash_relay(scene: Scene) -> None:
    scene.busiest_relay().crash()


def power_off_relay(scene: Scene) -> None:
    scene.busiest_relay().power_off()


def restart_router(scene: Scene) -> None:
    router = scene.members[0].host.nat
    assert router is not None
    router.rebind()


def renumber_router(scene: Scene) -> None:
    router = scene.members[0].host.nat
    assert router is not None
    router.rebind(new_address=True)


def break_pair(scene: Scene) -> None:
    first, second = scene.members[0].host, scene.members[1].host
    scene.internet.network.break_connections(first, second)


def lose_all_relays(scene: Scene) -> None:
    for relay in scene.relays:
        relay.power_off()


WHAT: dict[str, Interfere] = {
    "nothing": nothing,
    "crash": crash_relay,
    "power off": power_off_relay,
    "restart": restart_router,
    "renumber": renumber_router,
    "break": break_pair,
    "all relays": lose_all_relays,
}


def run_round(
    seed: int,
    kinds: Sequence[str],
    interfere: Interfere = nothing,
    *,
    relays: int = RELAYS,
    after: float = 0.7,
    link: Link = ANYWHERE,
    window: float = WINDOW,
) -> Round:
    """A round of one member behind each kind of router.

    Args:
        interfere: called in the middle of it.
        relays: how many public peers there are, which do not average.
        after: seconds from the moment when everybody averages.
        link: between any two.
        window: seconds in which they look for each other.
    """

    async def main() -> Round:
        internet = Internet(link)
        network, loop = internet.network, asyncio.get_running_loop()
        for _ in range(relays):
            await internet.start()
        relay_hosts = list(network.hosts)
        members = []
        for index, kind in enumerate(kinds):
            node = await internet.start(KINDS[kind]())
            host = internet.host_of(node)
            host.uplink = host.downlink = LINE
            values = torch.full((VALUES,), own_value(index))
            settings = {"min_matchmaking_time": window, "part_size_bytes": PART_BYTES, **PATIENCE}
            averager = await start_averager(host, [values], node, **settings)
            members.append(Member(index, averager, host, values))
        await asyncio.sleep(SETTLED_SECONDS)
        for member, kind in zip(members, kinds, strict=True):
            expected = Reachability.PUBLIC if kind == "public" else Reachability.RELAYED
            assert member.node.p2p.reachability is expected
        scene, begun = Scene(internet, relay_hosts, members), asyncio.Event()
        began = 0.0

        def begin(_: Any) -> None:
            nonlocal began
            began = loop.time()
            loop.call_later(after, interfere, scene)
            begun.set()

        when_all_average(members, begin)
        await asyncio.gather(*(_take_part(network, member) for member in members))
        assert begun.is_set()
        relayed = sum(node.p2p.metrics.bytes_carried for node in internet.nodes)
        return Round(max(member.ended for member in members) - began, members, relayed)

    return run(main(), seed=seed, time_limit=900)


async def _take_part(network: Network, member: Member) -> None:
    member.step = start_step(network, member.node, timeout=120.0)
    await await_cancelled(asyncio.wrap_future(member.step))
    member.ended = asyncio.get_running_loop().time()


def seconds_over(seed: int, kinds: Sequence[str], what: str, after: float = 0.7) -> float:
    """How much longer a round takes in which something happens; fails if it does not end well."""
    plain, disturbed = run_round(seed, kinds), run_round(seed, kinds, WHAT[what], after=after)
    for each in (plain, disturbed):
        each.check(len(kinds))
    return disturbed.seconds - plain.seconds


def _try(kinds: Sequence[str], what: str, seed: int) -> float | str:
    try:
        return seconds_over(seed, kinds, what, after=0.1 + seed % 20 * 0.1)
    except Exception as e:
        return f"seed {seed}: {type(e).__name__} {e}"[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--what", choices=WHAT, action="append", help="all by default")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["symmetric"] * 4)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes, initializer=logging.disable) as processes:
        for what in arguments.what or WHAT:
            found = list(processes.map(functools.partial(_try, arguments.kinds, what), range(arguments.seeds)))
            well = [each for each in found if isinstance(each, float)]
            cuts = quantiles(well, n=20, method="inclusive") if len(well) > 1 else well * 19
            told = zip((5, 25, 50, 75, 95), (cuts[number] for number in (0, 4, 9, 14, 18)), strict=True) if well else ()
            times = ", ".join(f"{share} %: {seconds:.2f}" for share, seconds in told)
            times += f", at most {max(well):.2f} s over" if well else ""
            print(f"{what}: {len(well)} of {len(found)} end well; {times}", flush=True)
            for text in [each for each in found if isinstance(each, str)][:5]:
                print(f"  {text}", flush=True)


if __name__ == "__main__":
    main()
