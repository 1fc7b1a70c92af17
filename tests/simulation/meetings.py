"""Many peers that look for a group in the same window, and whom they find."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.control import StepControl
from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.errors import AllreduceException
from shoal.testing import Link, Network, SharedTable, run, start_averager, start_averagers, start_dht_nodes
from tests.simulation.rounds import STAGGER, TABLE_DELAY, WIDE_AREA, WINDOW

SETTLING_SECONDS = 5.0
SECONDS_OF_A_WALK = 1.0
"""That the distributed table takes to store or find something."""


@dataclass(frozen=True)
class Meeting:
    """What came of one window. Seconds are virtual ones."""

    group_sizes: Counter[int]
    """How many peers were in groups of each size; 0 = found nobody."""
    seconds: float
    """From the first peer's beginning until the last one had its group, or gave up."""
    calls: int
    """Between peers, those for the table included."""


def meet(seed: int, size: int, *, distributed: bool, link: Link = WIDE_AREA) -> Meeting:
    """Let peers begin within a second of each other, with a window of five seconds, and wait for their groups.

    Args:
        distributed: they find each other by the distributed table, of which each peer is a node; otherwise there is one
            table that knows everything, and is asked over the network.
    """

    async def main() -> Meeting:
        network = Network(link)
        return await _meet_now(network, await _start(network, size, distributed))

    return run(main(), seed=seed, time_limit=600)


def meet_one_after_the_other(
    seed: int, size: int, group_size: int, *, seconds: float, depths: Sequence[int] = (0,)
) -> list[int]:
    """Let peers begin one after the other, each with a window of five seconds.

    Args:
        group_size: of a full group.
        seconds: from the first one to the last one.
        depths: of the keys of progress, in which the peers believe in turn.

    Returns:
        For each peer, the size of its group; 0 = found nobody.
    """

    async def main() -> list[int]:
        network, table = Network(WIDE_AREA), SharedTable(SECONDS_OF_A_WALK / 2)
        settings = {"target_group_size": group_size, "min_matchmaking_time": WINDOW}
        nodes = await start_averagers(network, [[torch.zeros(size)] for _ in range(size)], table, **settings)
        for node, depth in zip(nodes, itertools.cycle(depths)):
            node.trust.depth = functools.partial(int, depth)
        pauses = [seconds * network.rng.random() for _ in nodes]
        looking = [_look(network, node, pause) for node, pause in zip(nodes, pauses, strict=True)]
        return list(await asyncio.gather(*looking))

    return run(main(), seed=seed, time_limit=600)


def meet_again_and_again(seed: int, size: int, rounds: int, *, link: Link) -> list[Meeting]:
    """Let peers begin at the same moment, round after round; a group is complete when it has all of them."""

    async def main() -> list[Meeting]:
        network = Network(link)
        nodes = await _start(network, size, distributed=True, target_group_size=size, min_group_size=size)
        return [await _meet_now(network, nodes, pause=0.0) for _ in range(rounds)]

    return run(main(), seed=seed, time_limit=3600)


async def _meet_now(network: Network, nodes: list[AveragerNode], pause: float | None = None) -> Meeting:
    """Let these peers look for a group, each after this pause, or a random one."""
    await asyncio.sleep(SETTLING_SECONDS)
    calls_before, loop = _calls(nodes), asyncio.get_running_loop()
    began = loop.time()
    looking = [network.host_of(node.p2p.peer_id).run(_look(network, node, pause)) for node in nodes]
    sizes = await asyncio.gather(*looking)
    return Meeting(Counter(sizes), loop.time() - began, _calls(nodes) - calls_before)


async def _start(network: Network, size: int, distributed: bool, **settings: Any) -> list[AveragerNode]:
    settings["min_matchmaking_time"] = WINDOW
    if not distributed:
        tensors = [[torch.zeros(size)] for _ in range(size)]
        return await start_averagers(network, tensors, SharedTable(TABLE_DELAY), **settings)
    tables = await start_dht_nodes(network, size)
    hosts = [network.host_of(table.peer_id) for table in tables]
    return [
        await start_averager(host, [torch.zeros(size)], table, **settings)
        for host, table in zip(hosts, tables, strict=True)
    ]


def _calls(nodes: list[AveragerNode]) -> int:
    return sum(node.p2p.metrics.calls_made for node in nodes)


async def _look(network: Network, node: AveragerNode, pause: float | None = None) -> int:
    """Look for a group after a pause; returns its size, or 0."""
    await asyncio.sleep(STAGGER * network.rng.random() if pause is None else pause)
    now = get_dht_time()
    control = StepControl(now + WINDOW, now + 3 * WINDOW)
    control.bind(asyncio.get_running_loop())
    control.allow_allreduce()
    try:
        group = await node.lanes[""].matchmaking.look_for_group(control)
    except AllreduceException:
        return 0
    return group.group_size
