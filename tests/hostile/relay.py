"""A relay in a process of its own. It is told what to do on its standard input, and says what it carries and takes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from shoal.net.limits import RelayLimits
from shoal.p2p import P2P, PeerID


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def look(p2p: P2P) -> None:
    process = psutil.Process()
    say(
        guests=len(p2p.relay.guests),
        circuits=p2p.relay.circuit_count,
        carried=p2p.metrics.bytes_carried,
        refused=dict(p2p.metrics.circuits_refused),
        files=len(os.listdir("/proc/self/fd")),
        memory=process.memory_info().rss,
        cpu=sum(process.cpu_times()[:2]),
    )


def meet(p2p: P2P, peers: list[str]) -> None:
    """Peers have delivered in a round with this one."""
    members = [PeerID.from_base58(peer) for peer in peers]
    p2p.behaviour.note_round(members, failed=[], reducers=[], withheld={}, seconds=1.0)
    say(met=len(members))


async def main(options: dict[str, object]) -> None:
    token = options.pop("token", None)
    p2p = await P2P.create(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], relay=True, relay_limits=RelayLimits(**options), token=token
    )
    say(address=f"{p2p.get_addresses(p2p.peer_id)[0]}/p2p/{p2p.peer_id}")
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *peers = line.split()
        if word == "look":
            look(p2p)
        elif word == "meet":
            meet(p2p, peers)
    await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
