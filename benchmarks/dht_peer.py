"""One peer of the DHT benchmark: a process that obeys the commands it reads, see :mod:`commands`.

It runs in two environments, shoal's own and that of the library with which shoal is compared, so it imports nothing but
the standard library and the library under test, of which only the DHT is used: the same calls of the same interface.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from commands import obey, peer_parser

SECONDS_TO_LIVE = 3600.0
VALUE_BYTES = 100

Span = dict[str, Any]


def key_of(owner: int, series: str, number: int) -> str:
    return f"{series} {number} of peer {owner}"


def value_of(key: str) -> bytes:
    return (key.encode() * VALUE_BYTES)[:VALUE_BYTES]


class DhtPeer:
    """A DHT with default settings. Each command does some operations and says how long each took and which failed.

    Args:
        callers: threads from which :meth:`store` and :meth:`get` are called at a time; each waits for its result.
    """

    def __init__(self, library: str, index: int, callers: int) -> None:
        self.index = index
        self.library = importlib.import_module(library)
        self.dht_class = self.library.DHT
        self.version: str = self.library.__version__
        self.callers = ThreadPoolExecutor(callers)

    def begin(self) -> Span:
        """Start the first peer."""
        began = time.monotonic()
        self.dht = self.dht_class(start=True)
        return {"began": began, "ended": time.monotonic()}

    def addresses(self) -> list[str]:
        """Where the others find this one."""
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, address: list[str]) -> Span:
        """Join the swarm of the first peer."""
        began = time.monotonic()
        self.dht = self.dht_class(initial_peers=address, start=True)
        return {"began": began, "ended": time.monotonic()}

    def store(self, series: str, count: int, in_parallel: bool) -> Span:
        """Store keys of this peer."""
        expiration_time = time.time() + SECONDS_TO_LIVE  # DHT time is that of the machine's clock

        def store_one(number: int) -> bool:
            key = key_of(self.index, series, number)
            return bool(self.dht.store(key, value_of(key), expiration_time=expiration_time))

        return self._repeat(store_one, count, in_parallel)

    def get(self, owner: int, series: str, count: int, latest: bool, in_parallel: bool) -> Span:
        """Get what another peer has stored."""

        def get_one(number: int) -> bool:
            key = key_of(owner, series, number)
            found = self.dht.get(key, latest=latest)
            return found is not None and found.value == value_of(key)

        return self._repeat(get_one, count, in_parallel)

    def _repeat(self, operation: Callable[[int], bool], count: int, in_parallel: bool) -> Span:
        seconds: list[float] = []
        failed: list[int] = []
        lock = threading.Lock()

        def measured(number: int) -> None:
            began = time.monotonic()
            succeeded = operation(number)
            ended = time.monotonic()
            with lock:
                seconds.append(ended - began)
                if not succeeded:
                    failed.append(number)

        began = time.monotonic()
        if in_parallel:
            list(self.callers.map(measured, range(count)))
        else:
            for number in range(count):
                measured(number)
        return {"began": began, "ended": time.monotonic(), "seconds": seconds, "failed": failed}

    def close(self) -> None:
        """Leave."""
        self.callers.shutdown()
        self.dht.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--callers", type=int, required=True)
    args = parser.parse_args()
    obey(lambda: DhtPeer(args.library, args.index, args.callers))


if __name__ == "__main__":
    main()
