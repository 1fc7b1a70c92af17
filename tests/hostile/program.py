"""An attacker as a process of its own. Told a name it begins that attack, told ``stop`` it ends it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.base.tasks import cancel_and_wait
from shoal.dht import DHTNode
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import STRANGERS


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


async def attack(name: str, run: str, initial_peers: list[str], stop: asyncio.Event) -> None:
    """Every attack is somebody else's: a new identity each time."""

    async def make_node(**options: object) -> DHTNode:
        return await DHTNode.create(initial_peers=initial_peers, **options)

    node = await make_node()
    me = Attacker(node, run, make_node)
    work = [asyncio.ensure_future(each) for each in (STRANGERS[name](me), stop.wait(), me.has_struck.wait())]
    try:
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        say(struck=name, peer_id=str(node.peer_id))
        await asyncio.wait(work[:2], return_when=asyncio.FIRST_COMPLETED)
        if work[0].done():
            work[0].result()
    finally:
        await cancel_and_wait(*work)
        await node.shutdown()
        say(gone=name)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="+", required=True)
    parser.add_argument("--run", required=True)
    args = parser.parse_args()
    os.nice(19 - os.nice(0))
    words: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(words.put_nowait, line.strip())

    threading.Thread(target=listen, daemon=True).start()
    say(ready=True)
    while True:
        name, stop = await words.get(), asyncio.Event()
        attacking = asyncio.ensure_future(attack(name, args.run, args.initial_peers, stop))
        assert await words.get() == "stop"
        stop.set()
        await attacking


if __name__ == "__main__":
    asyncio.run(main())
