"""Liars with wrong clocks."""

from __future__ import annotations

import asyncio

from shoal.dht import DHTNode
from tests.hostile.attacker import FAILURES, PACE, Attacker

IDENTITIES = 7
SECONDS_AHEAD = 10.0**6


def _tell_another_time(node: DHTNode) -> None:
    honest = node.p2p.hello

    def hello():  # type: ignore[no-untyped-def]
        made = honest()
        made.time += SECONDS_AHEAD
        return made

    node.p2p.hello = hello  # type: ignore[method-assign]


async def tells_another_time(me: Attacker) -> None:
    """Seven identities against a few peers: "it is twelve days later". The time of the swarm must stay as it is."""
    nodes = [await me.make_node(strict=False) for _ in range(IDENTITIES)]
    try:
        for node in nodes:
            _tell_another_time(node)
        while True:
            for peer in await me.victims():
                for node in nodes:
                    try:
                        connection = await node.p2p.dial_without_greeting(peer, me.p2p.get_addresses(peer)[0])
                    except FAILURES:
                        continue
                    connection._make_hello = node.p2p.hello
                    await connection.open_call("nothing").send(node.p2p.hello())
                    connection.close()
            me.has_struck.set()
            await asyncio.sleep(PACE)
    finally:
        await asyncio.gather(*(node.shutdown() for node in nodes))
