"""A peer of a table and nothing else: stores and gets what it is told to, and prints what came of it as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys

from shoal import DHT, get_dht_time
from shoal.net.tcp import listener as strangers
from shoal.net.tcp import transport as tcp

SECONDS_TO_LIVE = 3600.0
PATIENCE_SECONDS = 60.0
"""What is tested is not how fast this machine is while dozens of processes start on it."""


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def key_of(number: int) -> str:
    return f"key {number}"


def value_of(number: int) -> dict[str, object]:
    return {"number": number, "square": number**2, "bytes": bytes([number % 256]) * 50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    args = parser.parse_args()
    tcp.HANDSHAKE_TIMEOUT = strangers.HANDSHAKE_TIMEOUT = PATIENCE_SECONDS
    dht = DHT(
        initial_peers=args.initial_peers, start=True, wait_timeout=PATIENCE_SECONDS, startup_timeout=PATIENCE_SECONDS
    )
    say(address=str(dht.get_visible_maddrs()[0]))
    say(ready=True)
    assert sys.stdin.readline() == "go\n"
    for line in sys.stdin:
        command, numbers = json.loads(line)
        if command == "store":
            expires = get_dht_time() + SECONDS_TO_LIVE
            stores = [dht.store(key_of(each), value_of(each), expires, return_future=True) for each in numbers]
            say(stored=sum(store.result() for store in stores))
        else:
            gets = {each: dht.get(key_of(each), return_future=True) for each in numbers}
            found = {each: get.result() for each, get in gets.items()}
            correct = [each for each, result in found.items() if result is not None and result.value == value_of(each)]
            say(asked=numbers, found=correct)
    dht.shutdown()


if __name__ == "__main__":
    main()
