"""How much a training loop slows down while an all-reduce runs in the background of the same process.

    python benchmarks/overlap.py --megabytes 200

This process trains, that is, it multiplies matrices with torch on one thread, and averages with another process all
the time. Its speed is compared with its speed alone, just before, in three settings:

- as the system schedules it: the loop, this process's network and the other process want three cores;
- with a core to spare: the loop has one core for itself, all the rest shares another one (Linux only). There this
  process goes first: the other one, which would be on another machine, must not interrupt it while it holds the
  interpreter lock (GIL), for which the loop would have to wait;
- the same, but what averages is not in this process, but in two others. Here the loop shares no GIL with the averaging:
  the difference to the setting before is what the GIL costs.

A second loop is Python code that never leaves the GIL to others of its own accord. The interpreter lets the averaging
interrupt it every 5 ms only, so its speed stays and the rounds starve.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from statistics import median

import psutil
import torch

from shoal import DHT, DecentralizedAverager

LOOP_CORE, OTHER_CORE = 0, 1


def average_forever(address: str, megabytes: float, pinned: bool, stop: Event, busy: Synchronized[float]) -> None:
    """What another process does; ``busy`` counts its seconds in all-reduces."""
    torch.set_num_threads(1)
    if pinned:
        os.nice(19)  # for this thread and those that it will start
    dht = DHT([address], start=True)
    averager = _averager(dht, megabytes)
    if pinned:
        _pin(os.getpid(), OTHER_CORE)
    while not stop.is_set():
        busy.value += average_once(averager)
    averager.shutdown()
    dht.shutdown()


def average_once(averager: DecentralizedAverager) -> float:
    """Returns the seconds in the all-reduce."""
    control = averager.step(timeout=60, wait=False)
    control.result(60)
    return control.round.duration


def _averager(dht: DHT, megabytes: float) -> DecentralizedAverager:
    vector = torch.randn(round(megabytes * 1e6 / 4))
    return DecentralizedAverager([vector], dht, start=True, prefix="overlap", target_group_size=2)


def _pin(process: int, *cores: int, but: int | None = None) -> None:
    for thread in psutil.Process(process).threads():
        if thread.id != but:
            os.sched_setaffinity(thread.id, cores)


def large_products() -> Callable[[], object]:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return lambda: a @ b


def python_code() -> Callable[[], object]:
    return lambda: sum(i * i for i in range(100_000))


def steps_per_second(step: Callable[[], object], seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        step()
        count += 1
    return count / (time.perf_counter() - began)


@contextmanager
def others(count: int, address: str, megabytes: float, pinned: bool) -> Iterator[Synchronized[float]]:
    """Other processes that average all the time; gives the seconds that one of them has spent in all-reduces."""
    context = multiprocessing.get_context("spawn")
    stop, clocks = context.Event(), [context.Value("d", 0.0) for _ in range(count)]
    processes = [context.Process(target=average_forever, args=(address, megabytes, pinned, stop, c)) for c in clocks]
    for process in processes:
        process.start()
    try:
        yield clocks[0]
    finally:
        stop.set()
        for process in processes:
            process.join(3)  # it may wait for this one, which does not average any more
            process.kill()


class Loop:
    """Average with another process for ever, in the background."""

    def __init__(self, averager: DecentralizedAverager) -> None:
        self._averager, self._stop = averager, threading.Event()
        self.busy = 0.0
        averager.step(timeout=60)  # the other process is there now
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.busy += average_once(self._averager)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def measure_inside(
    step: Callable[[], object], dht: DHT, averager: DecentralizedAverager, args: argparse.Namespace, pinned: bool
) -> tuple[float, float]:
    """Steps per second while this process averages, and the share of the time in which it does."""
    with others(1, str(dht.get_visible_maddrs()[0]), args.megabytes, pinned):
        loop = Loop(averager)
        if pinned:
            _pin(os.getpid(), OTHER_CORE, but=threading.get_native_id())
            os.sched_setaffinity(threading.get_native_id(), {LOOP_CORE})
        before = loop.busy
        speed = steps_per_second(step, args.seconds)
        share = (loop.busy - before) / args.seconds
        if pinned:
            _pin(os.getpid(), LOOP_CORE, OTHER_CORE)
        loop.stop()
    return speed, share


def measure_beside(
    step: Callable[[], object], dht: DHT, averager: DecentralizedAverager, args: argparse.Namespace, pinned: bool
) -> tuple[float, float]:
    """The same while two other processes do."""
    with others(2, str(dht.get_visible_maddrs()[0]), args.megabytes, pinned) as clock:
        while not clock.value:
            time.sleep(0.05)
        os.sched_setaffinity(threading.get_native_id(), {LOOP_CORE})
        before = clock.value
        speed = steps_per_second(step, args.seconds)
        share = (clock.value - before) / args.seconds
        os.sched_setaffinity(threading.get_native_id(), {LOOP_CORE, OTHER_CORE})
    return speed, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dht = DHT(start=True)
    averager = _averager(dht, args.megabytes)
    print(f"{os.cpu_count()} cores; rounds of {args.megabytes:g} MB with one other process, medians of {args.runs}")
    settings: list[tuple[str, Callable[..., tuple[float, float]], bool]] = [("in this process", measure_inside, False)]
    if hasattr(os, "sched_setaffinity"):
        settings += [("... with a core to spare", measure_inside, True), ("... and beside it", measure_beside, True)]
    for name, step in (("large products", large_products()), ("Python code", python_code())):
        print(f"  {name}, with averaging")
        for setting, measure, pinned in settings:
            ratios, shares = [], []
            for _ in range(args.runs):
                alone = steps_per_second(step, args.seconds)
                speed, share = measure(step, dht, averager, args, pinned)
                ratios.append(speed / alone)
                shares.append(share)
            each = " ".join(f"{100 * ratio:.1f}" for ratio in ratios)
            print(
                f"    {setting:<25} {100 * median(ratios):5.1f} % of the speed alone, "
                f"{100 * median(shares):3.0f} % of the time in all-reduces   runs {each}"
            )
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
