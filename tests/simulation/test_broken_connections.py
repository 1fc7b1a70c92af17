"""Connections that break in the middle of a round: nobody is lost, and the result is the same to the bit."""

from __future__ import annotations

import asyncio
import functools

import pytest
import torch

from shoal.testing import Link, Network, run, start_averagers, start_step

LINK = Link(delay=0.03)
SIZE = 4
VALUES = 4096


class Members:
    """Peers that average over slow uplinks, so that a round lasts about a second."""

    def __init__(self, seed, *, size=SIZE, link=LINK, uplink=2**16, values=VALUES, **settings):
        self.seed, self.size, self.link, self.uplink = seed, size, link, uplink
        self.values = values
        self.settings = {"part_size_bytes": 256, "sender_timeout": 20.0, "reducer_timeout": 40.0, **settings}
        self.tensors, self.nodes, self.seconds = [], [], []
        self.steps = []

    def average(self, interfere=lambda network, nodes, rounds: None, modes=None):
        """Run a round; ``interfere`` is called when all have begun to average."""
        self.tensors = [
            torch.randn(self.values, generator=torch.Generator().manual_seed(1000 * self.seed + index))
            for index in range(self.size)
        ]

        async def main():
            network = Network(self.link, uplink=self.uplink)
            self.nodes = await start_averagers(network, [[tensor] for tensor in self.tensors], **self.settings)
            loop, begun = asyncio.get_running_loop(), []

            def look():
                rounds = [current.allreduce for node in self.nodes for current in node.rounds.running.values()]
                if len(rounds) < self.size:
                    loop.call_later(0.001, look)
                    return
                begun.append(loop.time())
                interfere(network, self.nodes, rounds)

            look()
            self.steps = [start_step(network, node) for node in self.nodes]
            await asyncio.wait([asyncio.wrap_future(step) for step in self.steps])
            self.seconds = loop.time() - begun[0]
            await asyncio.sleep(5)  # for calls that end after the result

        run(main(), seed=self.seed, time_limit=600)
        return self

    @property
    def results(self):
        for step in self.steps:
            step.result()
        return [step.round for step in self.steps]

    @property
    def resumed(self):
        return sum(node.p2p.metrics.exchanges_resumed for node in self.nodes)


def breaks(*cuts):
    """Break the connections between two members, by position in the group, at some times after the beginning."""

    def interfere(network, nodes, rounds):
        group = rounds[0].group
        loop = asyncio.get_running_loop()
        for when, one, other in cuts:
            hosts = [network.host_of(group.peer_ids[index]) for index in (one, other)]
            loop.call_later(when, network.break_connections, *hosts)

    return interfere


def check_same(members, undisturbed, *, seconds=1.0):
    for result in members.results:
        assert result.share_averaged == 1
        assert result.failed_peers == ()
    for tensor, expected in zip(members.tensors, undisturbed.tensors, strict=True):
        assert torch.equal(tensor, expected)
    assert members.seconds <= undisturbed.seconds + seconds


@functools.lru_cache
def undisturbed(seed, **settings):
    return Members(seed, **settings).average()


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (1, 2), (2, 3)])
def test_a_cut_at_any_moment_costs_nothing_but_time(pair):
    """Also of the connections to the coordinator, which is the first one."""
    calm = undisturbed(1)
    moments = [k * calm.seconds / 24 for k in range(26)]
    resumed = 0
    for when in moments:
        members = Members(1).average(breaks((when, *pair)))
        check_same(members, calm)
        resumed += members.resumed
    assert resumed > len(moments)
