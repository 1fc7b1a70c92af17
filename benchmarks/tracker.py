"""What the peers of a run say about their progress: bytes that each of them sends beside the training, table included.

    python -m benchmarks.tracker --real 4 8 16 64 --simulated 256 1024

Three modes, each with the same peers:

- ``idle``: they are there, and nobody has begun to train.
- ``working``: each reports its progress five times a second, and no epoch ends.
- ``epochs``: the same, and an epoch ends every 20 seconds. Printed is what is sent from the moment when the first peer
  declares it over until half a second after the last one is at the next, for each other member of the group; for
  simulated peers also how many samples the epochs had, beside those that make one.

Real peers are DHTs and trackers of this process, connected over loopback. Simulated ones run the same code below the
facades, in virtual time and on links of 10 to 50 ms; from 256 on they report once in two seconds, and make no epochs.
Bytes are those of messages, before encryption. Connections count with an estimate of what a handshake takes.

A peer sends more than the mean if its node holds the records, because it answers those who read them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import fmean

from shoal import DHT
from shoal.optim.progress_tracker import ProgressTracker
from tests.simulation.talking import (
    BATCH,
    NEVER,
    REPORTS_PER_SECOND,
    RUN,
    Talk,
    bytes_sent,
    talk_between,
    talk_in_epochs,
    talk_without_end,
    without_table,
)

MANY = 256
SLOWNESS_OF_MANY = 10.0
EPOCH_SECONDS = 20.0
ROUND_SECONDS, AFTERMATH_SECONDS = 0.2, 0.5
SECONDS_TO_MEET = 60.0
"""Most seconds until all real peers know each other."""


class RealSwarm:
    """DHTs and trackers in this process."""

    def __init__(self, peers: int) -> None:
        self.dhts = [DHT(start=True)]
        addresses = self.dhts[0].get_visible_maddrs()
        self.dhts += [DHT(initial_peers=addresses, start=True) for _ in range(peers - 1)]
        self.trackers = [ProgressTracker(dht, RUN, NEVER, start=True) for dht in self.dhts]
        self.samples = 0
        self.epoch = 0

    def listen(self, seconds: float, during: Callable[[float], object]) -> Talk:
        """What is said while something goes on for so many seconds."""
        before, began = [bytes_sent(dht.p2p.metrics) for dht in self.dhts], time.monotonic()
        during(seconds)
        return talk_between(before, [bytes_sent(dht.p2p.metrics) for dht in self.dhts], time.monotonic() - began)

    def work(self, seconds: float) -> None:
        """Let all peers report progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            self.samples += BATCH
            for tracker in self.trackers:
                tracker.report_local_progress(self.epoch, self.samples)
            time.sleep(max(0.0, began + 1 / REPORTS_PER_SECOND - time.monotonic()))

    def get_to_know_each_other(self) -> None:
        end = time.monotonic() + SECONDS_TO_MEET
        while any(tracker.expected_group_size < len(self.trackers) for tracker in self.trackers):
            if time.monotonic() > end:
                raise TimeoutError("the peers do not find each other: is this machine busy?")
            self.work(1.0)

    def end_epoch(self) -> float:
        """End an epoch; returns bytes of the mean peer for each other member."""

        def turn_over(_: float) -> None:
            with ExitStack() as pauses:
                for tracker in self.trackers:
                    pauses.enter_context(tracker.pause_updates())
                    tracker.declare_epoch_over()
                time.sleep(ROUND_SECONDS)
                self.epoch, self.samples = self.epoch + 1, 0
                members = {dht.peer_id for dht in self.dhts}
                for tracker in self.trackers:
                    tracker.update_epoch(self.epoch, members=members - {tracker.dht.peer_id})
            time.sleep(AFTERMATH_SECONDS)

        began = time.monotonic()
        talk = self.listen(0.0, turn_over)
        return without_table(talk.by_handler) * (time.monotonic() - began) / (len(self.dhts) - 1)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.shutdown()
        for dht in reversed(self.dhts):
            dht.shutdown()


def real(peers: int, seconds: float, epochs: int) -> dict[str, Talk]:
    swarm = RealSwarm(peers)
    try:
        talks = {"idle": swarm.listen(seconds, time.sleep)}
        swarm.get_to_know_each_other()
        talks["working"] = swarm.listen(seconds, swarm.work)
        ends = []

        def train(_: float) -> None:
            for _ in range(epochs):
                swarm.work(EPOCH_SECONDS)
                ends.append(swarm.end_epoch())

        talks["epochs"] = swarm.listen(0.0, train)
        talks["epochs"].bytes_per_member = fmean(ends)
    finally:
        swarm.close()
    return talks


def simulated(peers: int, seconds: float, epochs: int) -> dict[str, Talk]:
    slowness = SLOWNESS_OF_MANY if peers >= MANY else 1.0
    talks = {
        "idle": talk_without_end(peers, working=False, seconds=seconds),
        "working": talk_without_end(peers, working=True, seconds=seconds, slowness=slowness),
    }
    if peers < MANY:
        talks["epochs"] = talk_in_epochs(peers, seconds=EPOCH_SECONDS, epochs=epochs, slowness=(1.0, 1.4, 2.5))
    return talks


def report(kind: str, talks: dict[str, Talk]) -> None:
    for mode, talk in talks.items():
        line = f"{talk.peers:5} {kind:9} {mode:8}{talk.rate / 1e3:10.2f} kB/s{talk.busiest / 1e3:10.2f} kB/s"
        line += f"{talk.bytes_per_member:9.0f} B" if talk.bytes_per_member else f"{'':11}"
        if talk.samples:
            line += (
                f"   {fmean(talk.samples):.0f} ({min(talk.samples)} to {max(talk.samples)}) of {talk.target} samples"
            )
        print(line)
        print("        " + ", ".join(f"{name} {rate / 1e3:.2f}" for name, rate in talk.by_handler.items()), flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, nargs="*", default=[4, 8, 16, 64], help="numbers of peers")
    parser.add_argument("--simulated", type=int, nargs="*", default=[256, 1024], help="numbers of peers")
    parser.add_argument("--seconds", type=float, default=120.0, help="for which each mode is listened to")
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    print(f"{'peers':>5} {'':9} {'mode':8}{'mean sends':>15}{'busiest':>15}{'epoch end':>11}")
    results = []
    for kind, numbers, measure in (("real", args.real, real), ("simulated", args.simulated, simulated)):
        for peers in numbers:
            talks = measure(peers, args.seconds, args.epochs)
            report(kind, talks)
            results += [{"kind": kind, "mode": mode, **asdict(talk)} for mode, talk in talks.items()]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
