"""How much a training loop slows down while an all-reduce runs in the background of the same process.

    python benchmarks/overlap.py --megabytes 200

This process trains, that is, it multiplies matrices with torch on one thread, and averages with a second process all
the time. It prints the steps per second with and without averaging, for two kinds of steps: large products, which
leave the interpreter's lock (GIL) to others while they compute, and Python code that never does. If only the second
kind slows down, the GIL is the reason; if both do, the processor is: a machine with fewer than three free cores cannot
run the loop, this process's network and the other process at full speed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from statistics import median

import torch

from shoal import DHT, DecentralizedAverager


def average_forever(address: str, megabytes: float, stop: Event) -> None:
    torch.set_num_threads(1)
    dht = DHT([address], start=True)
    averager = _averager(dht, megabytes)
    while not stop.is_set():
        averager.step(timeout=60)
    averager.shutdown()
    dht.shutdown()


def _averager(dht: DHT, megabytes: float) -> DecentralizedAverager:
    vector = torch.randn(round(megabytes * 1e6 / 4))
    return DecentralizedAverager([vector], dht, start=True, prefix="overlap", target_group_size=2)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dht = DHT(start=True)
    averager = _averager(dht, args.megabytes)
    context = multiprocessing.get_context("spawn")
    print(f"{os.cpu_count()} cores; rounds of {args.megabytes:g} MB with one other process, median of {args.runs}")
    for name, step in (("large products", large_products()), ("Python code", python_code())):
        alone, together, rounds = [], [], []
        for _ in range(args.runs):
            alone.append(steps_per_second(step, args.seconds))
            stop = context.Event()
            address = str(dht.get_visible_maddrs()[0])
            other = context.Process(target=average_forever, args=(address, args.megabytes, stop))
            other.start()
            averager.step(timeout=60)  # the other process is there now
            control, count, began = averager.step(timeout=60, wait=False), 0, time.perf_counter()
            steps, busy = 0, 0.0
            while time.perf_counter() < began + args.seconds:
                step()
                steps += 1
                if control.done():
                    busy += control.round.duration
                    count += 1
                    control = averager.step(timeout=60, wait=False)
            elapsed = time.perf_counter() - began
            together.append(steps / elapsed)
            rounds.append(busy / elapsed)
            stop.set()
            control.result(60)
            other.join(30)
            other.kill()
        ratio = median(b / a for a, b in zip(alone, together, strict=True))
        print(
            f"  {name:<15} {median(alone):8.1f} steps/s alone, {median(together):8.1f} while averaging "
            f"({100 * median(rounds):.0f} % of the time in all-reduces): {100 * ratio:.1f} % of the speed"
        )
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
