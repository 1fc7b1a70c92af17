"""How many keys a second many DHTs of one process store and find when all of them are asked at once.

    python benchmarks/dht_crowd.py --peers 16 --keys 1000 5000

All stores are begun together, without waiting (``return_future=True``); then each key is looked for by a peer other
than the one that has stored it, again all at once. A store that is reported as done and is not found at once is a loss.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("SHOAL_HOST_MADDRS", "/ip4/127.0.0.1/tcp/0")

from shoal import DHT, get_dht_time

LIFETIME_SECONDS = 3600.0


def measure(peers: int, keys: int) -> dict[str, Any]:
    """Stores and gets of one new swarm."""
    first = DHT(start=True)
    dhts = [first, *(DHT(initial_peers=first.get_visible_maddrs(), start=True) for _ in range(peers - 1))]
    try:
        begun, expiration = time.perf_counter(), get_dht_time() + LIFETIME_SECONDS
        storing = [dhts[i % peers].store(f"key {i}", i, expiration, return_future=True) for i in range(keys)]
        stored = sum(future.result() for future in storing)
        store_seconds, begun = time.perf_counter() - begun, time.perf_counter()
        getting = [dhts[(i + 1) % peers].get(f"key {i}", return_future=True) for i in range(keys)]
        results = [future.result() for future in getting]
        found = sum(result is not None and result.value == i for i, result in enumerate(results))
        get_seconds = time.perf_counter() - begun
    finally:
        for dht in dhts:
            dht.shutdown()
    return {"stored": stored, "found": found, "stores/s": keys / store_seconds, "gets/s": keys / get_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--keys", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--runs", type=int, default=1, help="swarms for each number of keys")
    args = parser.parse_args()
    if args.peers < 2:
        parser.error("--peers must be at least 2: somebody else looks for what one has stored")
    for keys in args.keys:
        for _ in range(args.runs):
            result = measure(args.peers, keys)
            print(
                f"{args.peers} peers, {keys} keys at once: {result['stored']} stored, {result['stores/s']:.0f}/s; "
                f"{result['found']} found, {result['gets/s']:.0f}/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
