"""A peer of a table that does what it is told, one JSON line each, and says what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from shoal import DHT
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.p2p import PeerID


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


async def addresses_of(dht: DHT, node: DHTNode, peer: PeerID) -> list[str]:
    """Where this peer would call another one."""
    return [str(address) for address in node.p2p.get_addresses(peer)]


def obey(dht: DHT, command: str, *arguments: Any) -> object:
    if command == "store":
        key, value = arguments
        return dht.store(key, value, get_dht_time() + 600)
    if command == "get":
        found = dht.get(*arguments, latest=True)
        return None if found is None else found.value
    if command == "look":
        return [str(address) for address in dht.get_visible_maddrs(latest=True)]
    if command == "where":
        peer = PeerID.from_base58(*arguments)

        async def look(dht: DHT, node: DHTNode) -> list[str]:
            return await addresses_of(dht, node, peer)

        return dht.run_coroutine(look)
    raise ValueError(f"no command {command!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("initial_peers", nargs="*")
    dht = DHT(parser.parse_args().initial_peers, start=True)
    say(addresses=[str(address) for address in dht.get_visible_maddrs()], peer_id=str(dht.peer_id))
    for line in sys.stdin:
        number, *words = json.loads(line)
        say(number=number, result=obey(dht, *words))
    dht.shutdown()


if __name__ == "__main__":
    main()
