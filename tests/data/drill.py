"""Processes that pass over a data set together while one after the other is killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.dht import DHT

PROGRAM = Path(__file__).with_name("pass_over.py")


class Outcome(NamedTuple):
    """What came of a pass."""

    seen: Counter[int]
    """How often each sample was seen."""
    deaths: int
    seconds: float


def pass_over(
    folder: Path,
    *,
    processes: int,
    samples: int,
    chunk: int,
    seconds: float,
    may_kill: Callable[[float, int], bool],
) -> Outcome:
    """Let processes pass over so many samples once, and replace each one that is killed.

    Args:
        folder: for what they have seen.
        seconds: that a chunk takes.
        may_kill: called with the seconds since the begin and the number of the deaths so far.
    """
    rng = random.Random(0)
    peers: list[subprocess.Popen[str]] = []
    with DHT(start=True) as dht:
        address = str(dht.get_visible_maddrs()[0])

        def start() -> None:
            file = folder / f"seen-{len(list(folder.iterdir()))}"
            file.touch()
            command = [sys.executable, str(PROGRAM), str(file), str(samples), str(chunk), str(seconds), address]
            peers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

        try:
            begun, deaths = time.monotonic(), 0
            for _ in range(processes):
                start()
            while peers[0].poll() is None:
                if may_kill(time.monotonic() - begun, deaths):
                    victim = peers.pop(rng.randrange(1, len(peers)))
                    victim.kill()
                    victim.communicate()
                    deaths += 1
                    start()
                time.sleep(0.1)
            for peer in peers:
                output, _ = peer.communicate(timeout=300)
                assert output.endswith("over\n"), output
        finally:
            for peer in peers:
                peer.kill()
                peer.communicate()
    numbers = [int(number) for file in folder.iterdir() for number in file.read_text().split()]
    return Outcome(Counter(numbers), deaths, time.monotonic() - begun)
