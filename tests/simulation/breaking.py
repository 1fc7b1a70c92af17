"""One round of a few peers between whom connections break, and what came of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.averaging.control import AveragingMode, RoundResult, StepControl
from shoal.averaging.node import AveragerNode
from shoal.averaging.round.exchange import AllReduce
from shoal.p2p import PeerID
from shoal.testing import Host, Link, Network, SharedTable, run, start_averager, start_step

SIZE = 4
NODE, CLIENT, AUX = AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX
# A round over such uplinks takes about half a second.
VALUES, UPLINK = 4096, 2.0**16
LINK = Link(delay=0.03)

Interfere = Callable[["Broken"], None]
"""Called when all members have begun to average."""


class Broken:
    """A round that somebody interferes with.

    Attributes:
        link: between any two members.
        tensors: what each member has afterwards; by default random numbers before.
        rounds: by member.
        steps: by member.
        seconds: from the moment when all had begun until the last living member had its result.
    """

    def __init__(
        self,
        interfere: Interfere = lambda broken: None,
        *,
        seed: int = 1,
        link: Link = LINK,
        values: int = VALUES,
        uplink: float = UPLINK,
        tensors: Sequence[torch.Tensor] | None = None,
        modes: Sequence[AveragingMode] = (NODE,) * SIZE,
        **settings: Any,
    ) -> None:
        self.settings = {"part_size_bytes": 256, "sender_timeout": 20.0, "reducer_timeout": 40.0, **settings}
        self.modes, self.link, self.uplink = modes, link, uplink
        self.tensors = tensors or [
            torch.randn(values, generator=torch.Generator().manual_seed(1000 * seed + index))
            for index in range(len(modes))
        ]
        self.nodes: list[AveragerNode] = []
        self.rounds: list[AllReduce] = []
        self.steps: list[StepControl] = []
        self.seconds = 0.0
        self._interfere = interfere
        run(self._main(), seed=seed, time_limit=600)

    async def _main(self) -> None:
        self.network, table, loop = Network(self.link, uplink=self.uplink), SharedTable(), asyncio.get_running_loop()
        for tensor, mode in zip(self.tensors, self.modes, strict=True):
            host = self.network.add_host()
            self.nodes.append(await start_averager(host, [tensor], table, mode=mode, **self.settings))
        self.steps = [start_step(self.network, node) for node in self.nodes]
        while len(self.rounds) < len(self.nodes):
            await asyncio.sleep(0.001)
            self.rounds = [current.allreduce for node in self.nodes for current in node.rounds.running.values()]
        begun = loop.time()
        self._interfere(self)
        ending = {
            asyncio.ensure_future(self._result_of(step)): host
            for step, host in zip(self.steps, self.hosts, strict=True)
        }
        while living := [each for each, host in ending.items() if host.is_up and not each.done()]:
            await asyncio.wait(living, timeout=0.01)
        self.seconds = loop.time() - begun
        await asyncio.sleep(5)  # for calls that end after the result

    async def _result_of(self, step: StepControl) -> None:
        await asyncio.wait([asyncio.wrap_future(step)])

    @property
    def hosts(self) -> list[Host]:
        return [self.network.host_of(node.p2p.peer_id) for node in self.nodes]

    @property
    def group(self) -> tuple[PeerID, ...]:
        """All members, in the order of the group: the first one that can be called coordinates."""
        return self.rounds[0].group.peer_ids

    def host_of(self, position: int) -> Host:
        """The host of the member at a position of the group."""
        return self.network.host_of(self.group[position])

    def round_of(self, position: int) -> AllReduce:
        return next(each for each in self.rounds if each.own_index == position)

    @property
    def results(self) -> list[RoundResult]:
        """Of the living."""
        living = [step for step, host in zip(self.steps, self.hosts, strict=True) if host.is_up]
        for step in living:
            step.result()  # raises what the step raised
        return [step.round for step in living if step.round is not None]

    @property
    def resumed(self) -> int:
        return sum(node.p2p.metrics.exchanges_resumed for node in self.nodes)

    def check_like(self, calm: Broken, seconds: float = 1.0) -> None:
        """Nobody has lost anything but some seconds."""
        for result in self.results:
            assert result.share_averaged == 1
            assert result.failed_peers == ()
            assert result.weights == calm.results[0].weights
        assert all(map(torch.equal, self.tensors, calm.tensors))
        assert self.seconds <= calm.seconds + seconds


def cuts(*when: tuple[float, int, int], then: Callable[[Broken], object] = lambda broken: None) -> Interfere:
    """Break the connections between two members at some seconds after the beginning.

    Args:
        when: the moment, and the positions of the two in the group.
        then: done right after the last cut.
    """

    def interfere(broken: Broken) -> None:
        loop = asyncio.get_running_loop()
        for moment, one, other in when:
            cut = functools.partial(broken.network.break_connections, broken.host_of(one), broken.host_of(other))
            loop.call_later(moment, cut)
        loop.call_later(max(moment for moment, _, _ in when), then, broken)

    return interfere


def at(moment: float, action: Callable[[Broken], object]) -> Interfere:
    """Do something at some seconds after the beginning."""
    return lambda broken: asyncio.get_running_loop().call_later(moment, action, broken) and None
