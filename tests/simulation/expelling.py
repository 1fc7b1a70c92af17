"""A member of a private run is expelled, from a round or between two: all are rid of it, and lose no round.

python -m tests.simulation.expelling --seeds 10
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from statistics import median

import pytest
import torch

from shoal.access.badges import RevocationList
from shoal.access.tokens import Token
from shoal.averaging.control import StepControl
from shoal.averaging.node import AveragerNode
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import NotAMemberError, ShoalError
from shoal.reach.presence import Presence, PresenceQuery, PresenceReply
from shoal.testing import Link, Network, run, start_averager, start_dht_nodes, start_step

LINK = Link(delay=(0.01, 0.075), jitter=0.005)
SECRET = Token.new_run("simulated")
MEMBERS = 50
LIMIT_SECONDS = 10.0


async def round_of(network: Network, averagers: Sequence[AveragerNode]) -> list[StepControl]:
    """A step of each, begun together."""
    steps = [start_step(network, averager) for averager in averagers]
    await asyncio.wait([asyncio.wrap_future(step) for step in steps])
    return steps


def bytes_reduced(node: DHTNode) -> int:
    sent = node.p2p.metrics.bytes_sent_by_handler
    return sum(count for name, count in sent.items() if name.endswith("rpc_reduce"))


def group_of(step: StepControl) -> set[object]:
    return set(step.result())


def expel(seed: int, members: int = MEMBERS, *, is_in_round: bool) -> float:
    """Expel a member; returns the seconds until nobody has a connection with it."""

    async def main() -> float:
        network = Network(LINK)
        nodes = await start_dht_nodes(network, members, token=SECRET.text)
        averagers = [
            await start_averager(
                network.host_of(node.peer_id), [torch.full((members * 4,), float(number))], node, min_group_size=2
            )
            for number, node in enumerate(nodes)
        ]
        everybody = {node.peer_id for node in nodes}
        for step in await round_of(network, averagers):
            assert group_of(step) == everybody
        expelled, *others = nodes[17], *nodes[:17], *nodes[18:]
        before = bytes_reduced(expelled)
        running = asyncio.ensure_future(round_of(network, averagers)) if is_in_round else None
        if is_in_round:
            while bytes_reduced(expelled) == before:
                await asyncio.sleep(0.01)
        assert SECRET.signer is not None
        news = RevocationList.make(SECRET.signer, [expelled.p2p.identity.public_key], int(get_dht_time()), None)
        assert nodes[3].p2p.members is not None
        nodes[3].p2p.members.learn(news.to_bytes(), None)
        began = asyncio.get_running_loop().time()
        while not all(is_cut_off(node, expelled) for node in others):
            await asyncio.sleep(0.1)
            assert asyncio.get_running_loop().time() - began < LIMIT_SECONDS
        seconds = asyncio.get_running_loop().time() - began
        if running is not None:
            steps = await running
            for step, node in zip(steps, nodes, strict=True):
                assert node is expelled or step.exception() is None, step.exception()
        remaining = [averager for averager in averagers if averager.p2p is not expelled.p2p]
        steps = await round_of(network, averagers)
        for averager, step in zip(averagers, steps, strict=True):
            if averager in remaining:
                assert group_of(step) == everybody - {expelled.peer_id}
            else:
                assert isinstance(step.exception(), ShoalError)
        values = {tuple(averager.tensors[0].tolist()) for averager in remaining}
        assert len(values) == 1
        await assert_refused(expelled, others[0])
        return seconds

    return run(main(), seed=seed)


def is_cut_off(node: DHTNode, expelled: DHTNode) -> bool:
    return expelled.peer_id not in node.p2p.pool and not node.p2p.server.connections_of(expelled.peer_id)


async def assert_refused(expelled: DHTNode, member: DHTNode) -> None:
    query = PresenceQuery(instance=b"")
    with pytest.raises(NotAMemberError, match="the badge was revoked") as found:
        await expelled.p2p.call(
            member.peer_id, Presence.handle_name("rpc_who_am_i", None), query, PresenceReply, roles=Presence.roles
        )
    assert found.value.reason == "revoked"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable()
    for is_in_round in (False, True):
        found = [expel(seed, is_in_round=is_in_round) for seed in range(arguments.seeds)]
        when = "in a round" if is_in_round else "between rounds"
        print(
            f"a member of {MEMBERS} is expelled {when}: all connections are cut after {median(found):.1f} s in the "
            f"median of {len(found)}, {max(found):.1f} s at most (limit {LIMIT_SECONDS:g} s); others lose no round",
            flush=True,
        )


if __name__ == "__main__":
    main()
