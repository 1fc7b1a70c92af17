"""How much of its time a swarm trains: shoal and hivemind, one process per peer, on this machine's loopback.

    python benchmarks/goodput.py --library all
    python benchmarks/goodput.py --library shoal --monitors 0      # and again with --monitors 5
    python benchmarks/goodput.py --library shoal --peers 8 --target 512 --seconds 0.1 0.14 0.18 0.22 0.26 0.3 0.34 0.38

Every peer trains the same small model in the synchronous mode, and each of its steps takes ``--seconds``. So an epoch
would take ``target / (samples per second of all peers)`` if it took no time to agree that it is over, to find each
other, to average gradients, to step and to average parameters.

With ``--monitors`` the peers of shoal report their loss after each step, and so many ``shoal monitor`` watch them from
processes of their own; ``--monitors 0`` is what to compare with. They start before the training, and need a part of
the machine: with two cores, take few peers, or slow steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from crew import Crew
from training_peer import RUN

LIBRARIES = ("shoal", "hivemind")
Event = dict[str, Any]


def train(library: str, args: argparse.Namespace) -> tuple[str, list[list[Event]]]:
    """The version of a library, and the history of every peer in a run of it."""
    options = {
        "target_batch_size": args.target,
        "delay_state_averaging": False,
        "matchmaking_time": args.matchmaking_time,
        "averaging_timeout": args.averaging_timeout,
        "averager_opts": {"request_timeout": args.matchmaking_time / 2, **args.averager_opts},  # longer: a warning
    }
    arguments = {
        "batch": args.batch,
        "seconds": json.dumps(args.seconds),
        "megabytes": args.megabytes,
        "options": json.dumps(options),
        "reports": int(args.monitors is not None),
    }
    with Crew("training_peer.py", library, args.peers, **arguments) as crew:
        [address] = crew.ask("open", to=crew.processes[:1])
        crew.ask("join", address)
        with watched(args.monitors or 0, address[0]):
            return crew.version, crew.ask("train", args.warmup + args.epochs)


@contextlib.contextmanager
def watched(monitors: int, address: str) -> Iterator[None]:
    """So many monitors watch the run, each of which has told once what it sees."""
    command = [sys.executable, "-m", "shoal.cli", "monitor", address, "--run", RUN]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(monitors)]
    try:
        for process in processes:
            assert process.stdout
            if not process.stdout.readline():
                raise RuntimeError(f"a monitor has ended, with status {process.wait()}")
            threading.Thread(target=process.stdout.read, daemon=True).start()  # or its pipe would fill up
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def evaluate(histories: list[list[Event]], args: argparse.Namespace) -> dict[str, float]:
    """What the table shows, of all epochs after the warm-up."""
    seconds, rounds, samples, epochs = [], [], 0, 0
    used: dict[str, list[float]] = {"processor": [], "sent": []}
    ends: dict[int, list[Event]] = defaultdict(list)
    for history in histories:
        for before, event in itertools.pairwise(history):
            ends[event["epoch"]].append({**event, "began": before["ended"]})
            if before["epoch"] >= args.warmup:
                seconds += [(event["ended"] - before["ended"]) / event["steps"]] * event["steps"]
                rounds += [event["members"] == args.peers] + [False] * (event["steps"] - 1)
                samples += event["samples"]
                for name, values in used.items():
                    values.append((event.get(name, math.nan) - before.get(name, math.nan)) / event["steps"])
    epochs = len(seconds) / len(histories)
    turnovers, errors = [], []
    for events in ends.values():
        if len(events) < args.peers or events[0]["epoch"] <= args.warmup:
            continue  # somebody has missed this one
        stopped = max(event["entered"] for event in events)
        turnovers.append(max(event["ended"] for event in events) - stopped)
        errors += [
            abs(event["predicted"] - stopped) / (stopped - event["began"]) for event in events if event["predicted"]
        ]
    return {
        "ideal": args.target / args.batch / sum(1 / args.seconds[i % len(args.seconds)] for i in range(args.peers)),
        "median": median(seconds),
        "p99": quantiles(seconds, n=100)[98],
        "longest": max(seconds),
        "complete": 100 * fmean(rounds),
        "samples": samples / epochs,
        "turnover": 1e3 * median(turnovers) if turnovers else math.nan,
        "slowest turnover": 1e3 * max(turnovers, default=math.nan),
        "error": 100 * median(errors) if errors else math.nan,
        "processor": 1e3 * fmean(used["processor"]),
        "sent": fmean(used["sent"]) / 1e3,
    }


ROWS = {
    "ideal": ("ideal epoch", "s", 2),
    "median": ("epoch, median", "s", 2),
    "p99": ("epoch, p99", "s", 2),
    "longest": ("epoch, longest", "s", 2),
    "complete": ("rounds with all peers", "%", 1),
    "samples": ("samples in an epoch", "", 1),
    "turnover": ("from the last peer's last batch to the next epoch, median", "ms", 0),
    "slowest turnover": ("from the last peer's last batch to the next epoch, longest", "ms", 0),
    "error": ("end of the epoch as predicted after its first batch, error", "%", 1),
    "processor": ("processor time of a peer in an epoch (shoal)", "ms", 0),
    "sent": ("sent by a peer in an epoch (shoal)", "kB", 1),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a run, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], required=True)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2, help="epochs before those that count")
    parser.add_argument("--target", type=int, default=256, help="samples of all peers that make an epoch")
    parser.add_argument("--batch", type=int, default=16, help="samples in a step")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.1], help="for a step; several: of peers in turn")
    parser.add_argument("--megabytes", type=float, default=0.04, help="size of the model")
    parser.add_argument("--matchmaking-time", type=float, default=1.0)
    parser.add_argument("--averaging-timeout", type=float, default=10.0)
    parser.add_argument("--averager-opts", type=json.loads, default={}, help="further options of averagers, as JSON")
    parser.add_argument("--monitors", type=int, help="monitors that watch (shoal alone)")
    args = parser.parse_args(arguments)
    if args.monitors is not None and args.library != "shoal":
        parser.error("--monitors needs --library shoal")
    if args.peers < 2 or args.warmup < 1:
        parser.error("--peers must be at least 2, and --warmup 1")
    return args


def main() -> None:
    args = parse()
    results = {}
    for library in LIBRARIES if args.library == "all" else [args.library]:
        version, histories = train(library, args)
        results[f"{library} {version}"] = evaluate(histories, args)
    print(f"{args.peers} peers, {args.epochs} epochs of {args.target} samples, {args.batch} in a step")
    print(f"{'':60}" + "".join(f"{name:>18}" for name in results))
    for key, (title, unit, digits) in ROWS.items():
        figures = "".join(f"{result[key]:18.{digits}f}" for result in results.values())
        print(f"{title + (f', {unit}' if unit else ''):60}{figures}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
