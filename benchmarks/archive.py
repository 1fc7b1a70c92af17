"""How fast an archive is taken from one donor of this machine, and how much that slows down the donor's training.

    python benchmarks/archive.py --megabytes 1000

This process trains a model with ``shoal.Optimizer`` and Adam, on one thread; its state has the given size. Another
process takes archives of it, with rests in between. An archive counts from the beginning of the download until its
manifest is written and every byte has been handed to the disk (``fsync``). The speed of the training while one is taken
is compared with that in the rests around it. On Linux, with at least two cores, the training thread has one of them for
itself, and all else shares the others; ``--no-pin`` leaves that to the system. With ``--idle`` the donor does not train
meanwhile: then each side of the download has a core of two.

Both sides need fresh memory. A virtual machine may have given it back to its host some seconds after it was free, and
waits long for it: ``--rest 1`` takes the next archive before that.

It prints: GB per second, the part of it that was writing, and the share of the speed that the training has kept, while
an archive is taken and in the long run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil
import torch

from shoal import DHT, Optimizer

RUN, BATCH, WIDTH = "archive_benchmark", 8, 1024
BATCHES_OF_EPOCH = 8
EVERY = 600.0
"""Seconds from one archive to the next, by default."""


def take_archives(address: str, folder: str, cores: Sequence[int], orders: Connection) -> None:
    """What the other process does: an archive for each order, answered with when it began and what took how long."""
    from shoal.archive.keeping import Archiver
    from shoal.archive.store import Store

    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    store, seconds_writing = Store(folder), 0.0
    write = store.write

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal seconds_writing
        began_at = time.monotonic()
        manifest = write(*arguments, **options)
        seconds_writing = time.monotonic() - began_at
        return manifest

    store.write = timed  # type: ignore[method-assign]
    dht = DHT([address], start=True, client_mode=True)
    archiver = Archiver(dht, RUN, store, keep=1)
    orders.send("ready")
    while orders.recv() == "take":
        began_at, used = time.monotonic(), time.process_time()
        manifest = archiver.write_one()
        ended_at = time.monotonic()
        total = sum(file.bytes for file in manifest.files.values())
        orders.send((began_at, ended_at, total, seconds_writing, time.process_time() - used))
    archiver.close()
    dht.shutdown()


class Training:
    """Trains until it is told to stop, and notes when each batch ended."""

    def __init__(self, dht: DHT, megabytes: float) -> None:
        torch.set_num_threads(1)
        # Adam keeps two values for each parameter, and averagers have something to tell newcomers, too.
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.opt = Optimizer(
            dht=dht,
            run_id=RUN,
            target_batch_size=BATCH * BATCHES_OF_EPOCH,
            batch_size_per_step=BATCH,
            optimizer=torch.optim.Adam(self.model.named_parameters(), lr=1e-5),
            matchmaking_time=1.0,
        )
        self.ends: list[float] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def run(self, stop: threading.Event, core: int | None) -> None:
        torch.set_num_threads(1)
        if core is not None:
            os.sched_setaffinity(threading.get_native_id(), [core])
        batch = torch.randn(BATCH, WIDTH)
        while not stop.is_set():
            self.opt.zero_grad()
            self.model(batch).square().mean().backward()
            self.opt.step()
            self.ends.append(time.monotonic())
            self.may_go_on.wait()

    def speed(self, since: float, until: float) -> float:
        """Batches per second in a time; parts of batches count."""
        return (self._done(until) - self._done(since)) / (until - since)

    def _done(self, moment: float) -> float:
        index = bisect_left(self.ends, moment)
        if not 0 < index < len(self.ends):
            return float(index)
        before, after = self.ends[index - 1], self.ends[index]
        return index + (moment - before) / (after - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=10.0, help="seconds between two archives")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--idle", action="store_true", help="the donor does not train meanwhile")
    parser.add_argument("--no-pin", action="store_true", help="let the system choose cores")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" and not args.no_pin and not args.idle else []
    core, others = (cores[0], cores[1:]) if len(cores) > 1 else (None, [])
    dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    training, stop = Training(dht, args.megabytes), threading.Event()
    if others:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, others)
    thread = threading.Thread(target=training.run, args=(stop, core))
    thread.start()
    found, kept, pause = [], [], threading.Event()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        orders, theirs = multiprocessing.Pipe()
        arguments = str(dht.get_visible_maddrs()[0]), folder, others, theirs
        process = multiprocessing.get_context("spawn").Process(target=take_archives, args=arguments)
        process.start()
        try:
            orders.recv()
            while training.opt.local_epoch < 2:
                pause.wait(0.1)
            for number in range(-1, args.rounds):
                pause.wait(args.rest)
                if args.idle:
                    training.may_go_on.clear()
                orders.send("take")
                answer = orders.recv()
                training.may_go_on.set()
                pause.wait(args.rest)
                began_at, ended_at, *_ = answer
                if number < 0:  # the first one warms up
                    continue
                found.append(answer)
                if not args.idle:
                    before = training.speed(began_at - args.rest, began_at)
                    after = training.speed(ended_at, ended_at + args.rest)
                    kept.append(2 * training.speed(began_at, ended_at) / (before + after))
        finally:
            training.may_go_on.set()
            orders.send("end")
            process.join()
            stop.set()
            thread.join()
    training.opt.shutdown()
    dht.shutdown()
    speeds = [total / (ended_at - began_at) / 1e9 for began_at, ended_at, total, _, _ in found]
    writing = [seconds / (ended_at - began_at) for began_at, ended_at, _, seconds, _ in found]
    used = [seconds / (total / 1e9) for *_, total, _, seconds in found]
    print(f"archive of {found[0][2] / 1e6:.0f} MB: {median(speeds):.2f} GB/s, {median(writing):.0%} of it writing")
    print(f"processor time of the archiver: {median(used):.2f} s for each GB")
    if not args.idle:
        runs = " ".join(f"{each:.3f}" for each in kept)
        print(f"training keeps {median(kept):.1%} of its speed while one is taken (runs: {runs})")
        seconds = median(ended_at - began_at for began_at, ended_at, *_ in found)
        overall = 1 - (1 - median(kept)) * min(1.0, seconds / EVERY)
        print(f"with one every {EVERY / 60:g} minutes, as `shoal archive` takes them by default: {overall:.2%}")
    result = {"gb_per_second": speeds, "share_writing": writing, "cpu_seconds_per_gb": used, "speed_kept": kept}
    print(json.dumps({"megabytes": args.megabytes, **result}))


if __name__ == "__main__":
    main()
