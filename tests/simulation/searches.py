"""A few averagers on a simulated network, and the moments of their search for a group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch

from shoal.averaging.control import AveragingStage, StepControl
from shoal.averaging.node import AveragerNode
from shoal.base.tasks import await_cancelled
from shoal.testing import Host, Link, Network, SharedTable, run, start_averager, start_step

T = TypeVar("T")

DELAY = 0.05
WINDOW = 5.0
PROMPTLY = 1.5
"""Seconds for a few lookups, a connection and some round trips."""


class Swarm:
    """A few averagers, each with its own number as its value."""

    def __init__(self) -> None:
        self.network = Network(Link(delay=DELAY))
        self.table = SharedTable(DELAY)
        self.nodes: list[AveragerNode] = []
        self.tensors: list[torch.Tensor] = []

    async def add(self, count: int = 1, **settings: Any) -> None:
        for _ in range(count):
            tensor = torch.full((32,), float(len(self.nodes)))
            settings = {"min_matchmaking_time": WINDOW, **settings}
            self.nodes.append(await start_averager(self.network.add_host(), [tensor], self.table, **settings))
            self.tensors.append(tensor)

    def host(self, index: int) -> Host:
        return self.network.host_of(self.nodes[index].p2p.peer_id)

    def step(self, index: int, **settings: Any) -> StepControl:
        return start_step(self.network, self.nodes[index], **settings)

    def steps(self, **settings: Any) -> list[StepControl]:
        return [self.step(index, **settings) for index in range(len(self.nodes))]

    async def records(self) -> dict[Any, Any]:
        """What the table says about those who look for a group."""
        found = await self.table.get("simulation.0b", latest=True)
        return {} if found is None else {key: entry.value for key, entry in found.value.items()}


def simulate(story: Callable[[Swarm], Awaitable[T]], seed: int = 0) -> T:
    async def main() -> T:
        return await story(Swarm())

    return run(main(), seed=seed, time_limit=1000)


def now() -> float:
    return asyncio.get_running_loop().time()


async def done(*steps: StepControl) -> float:
    """Wait until steps have ended, one way or the other; returns when."""
    await asyncio.gather(*(await_cancelled(asyncio.wrap_future(step)) for step in steps))
    return now()


async def at_stage(stage: AveragingStage, *steps: StepControl) -> None:
    while any(step.stage != stage for step in steps):
        await asyncio.sleep(0.01)


def size(step: StepControl) -> int:
    step.result()
    assert step.round is not None
    return len(step.round.peers)


def leader_of(swarm: Swarm) -> int:
    """Who leads the others at the moment."""
    current = [node.lanes[""].matchmaking.current for node in swarm.nodes]
    return next(i for i, shell in enumerate(current) if shell is not None and shell.search.followers)
