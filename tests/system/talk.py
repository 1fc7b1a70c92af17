"""Two nodes that talk to each other, in a process without some of its standard streams, or with a child that ends.

What happened is written to a file, because there may be nothing to print on. Used by ``test_fork.py`` and
``test_standard_streams.py``.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import shoal


def end_with(status: int) -> None:
    sys.exit(status)


def fork(then: str) -> int:
    """Make a child that ends in a certain way; returns its exit status, negative for a signal."""
    if then == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=end_with, args=(3,))
        child.start()
        child.join()
        assert child.exitcode is not None
        return child.exitcode
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if then == "own nodes":
        with shoal.DHT(start=True) as mine, shoal.DHT(initial_peers=mine.get_visible_maddrs(), start=True) as other:
            assert other.store("key", 1, shoal.get_dht_time() + 60)
    end_with(3)
    raise AssertionError("unreachable")


def talk(first: shoal.DHT, second: shoal.DHT, key: str) -> None:
    assert second.store(key, key, shoal.get_dht_time() + 60)
    found = first.get(key, latest=True)
    assert found is not None
    assert found.value == key


def main() -> None:
    results, what = Path(sys.argv[1]), sys.argv[2:]
    first = shoal.DHT(start=True)
    second = shoal.DHT(initial_peers=first.get_visible_maddrs(), start=True)
    open_at_start = [name for name in ("/dev/fd/0", "/dev/fd/1", "/dev/fd/2") if os.path.exists(name)]
    talk(first, second, "before")
    said = [f"open: {len(open_at_start)}"]
    for then in what:
        dialled = first.p2p.metrics.connections_dialled + second.p2p.metrics.connections_dialled
        if then == "in a thread":
            statuses = list[int]()
            thread = threading.Thread(target=lambda statuses=statuses: statuses.append(fork("exit")))
            thread.start()
            thread.join()
            status = statuses[0]
        else:
            status = fork(then)
        for number in range(5):
            talk(first, second, f"after {then} {number}")
        dialled -= first.p2p.metrics.connections_dialled + second.p2p.metrics.connections_dialled
        said.append(f"{then}: {status}, new connections: {-dialled}")
    second.shutdown()
    first.shutdown()
    results.write_text("\n".join(said), encoding="utf-8")


if __name__ == "__main__":
    if sys.stderr is not None:
        faulthandler.enable()
    main()
