"""A process whose clock is off: joins, stores and gets, and says what it found out. Used by ``test_clock.py``."""

from __future__ import annotations

import json
import logging
import sys
import time

offset = float(sys.argv[1])
true_time = time.time
time.time = lambda: true_time() + offset  # before anything else asks what time it is

from shoal import DHT, get_dht_time  # noqa: E402


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    dht = DHT(initial_peers=sys.argv[2:], start=True)
    stored = dht.store("from the odd one", "value", get_dht_time() + 60)
    found = dht.get("for the odd one")
    print(
        json.dumps(
            {
                "error": get_dht_time() - true_time(),
                "offset": dht.p2p.metrics.clock_offset,
                "stored": stored,
                "found": None if found is None else found.value,
                "left": None if found is None else found.expiration_time - get_dht_time(),
            }
        ),
        flush=True,
    )
    sys.stdin.readline()
    dht.shutdown()


main()
