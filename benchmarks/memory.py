"""How much memory training with others takes beside what plain torch takes, and in which phase.

    python benchmarks/memory.py --library shoal --megabytes 400
    python benchmarks/memory.py --library all

Two processes on this machine's loopback train a model with Adam. First each trains it in plain torch: parameters,
gradients and statistics are the baseline, four times the model. Then one trains as the first peer of a run. Later the
other one joins, downloads the state from it, and both train on together. All this time the proportional set size of
each peer, with its child processes, is measured every 20 ms. Printed is the highest one in each phase, less the
baseline, in sizes of the model: 1.00 is one more copy of the parameters.

A sample counts for the first phase in the table that it falls into. Serving is what the first peer does while the other
one downloads.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import psutil
from crew import Crew

LIBRARIES = ("shoal", "hivemind")
DONOR, NEWCOMER = "donor", "newcomer"
PHASES = (
    "made",
    "downloading",
    "serving a download",
    "averaging gradients",
    "stepping",
    "averaging parameters",
    "training",
)
SAMPLE_SECONDS = 0.02


class MemoryWatch:
    """Samples the memory of a process and its children in a thread; use as a context manager."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.samples: list[tuple[float, int]] = []
        """Times of the monotonic clock, and bytes."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def now(self) -> int:
        """The proportional set size at this moment: pages that processes share count in equal parts for each."""
        total = 0
        for each in [self._process, *self._process.children(recursive=True)]:
            try:
                total += each.memory_full_info().pss
            except psutil.NoSuchProcess:  # a child has ended
                continue
        return total

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.samples.append((time.monotonic(), self.now()))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def peaks(
    samples: list[tuple[float, int]], spans: list[tuple[str, float, float]], baseline: int, model: int
) -> dict[str, float]:
    """The highest memory in each phase that occurred, above the baseline, in sizes of the model."""
    found: dict[str, float] = {}
    for at, nbytes in samples:
        running = {name for name, began, ended in spans if began <= at <= ended}
        phase = next((phase for phase in PHASES if phase in running), PHASES[-1])
        found[phase] = max(found.get(phase, 0.0), (nbytes - baseline) / model)
    return found


def measure(library: str, args: argparse.Namespace) -> dict[str, Any]:
    options = {"target_batch_size": args.batch * args.batches, **args.options}
    arguments = {
        "batch": args.batch,
        "seconds": args.seconds,
        "megabytes": args.megabytes,
        "options": json.dumps(options),
        "offload": int(args.offload),
    }
    with Crew("memory_peer.py", library, 2, **arguments) as crew:
        donor, newcomer = crew.processes
        model = crew.ask("prepare")[0]
        with MemoryWatch(donor.pid) as of_donor, MemoryWatch(newcomer.pid) as of_newcomer:
            baselines = of_donor.now(), of_newcomer.now()
            began = time.monotonic()
            [address] = crew.ask("join", [], to=[donor])
            [epoch] = crew.ask("train", args.before, to=[donor])
            # It trains on while the other one joins.
            joining = threading.Thread(target=crew.ask, args=("join", address), kwargs={"to": [newcomer]})
            joining.start()
            crew.ask("train", 1, to=[donor])
            joining.join()
            last = epoch + 1 + args.epochs
            epochs = crew.ask("train_to", last)
            time.sleep(args.rest)
            at_rest = of_donor.now(), of_newcomer.now()
        spans = {DONOR: crew.ask("noted", to=[donor])[0], NEWCOMER: crew.ask("noted", to=[newcomer])[0]}
        downloads = [(began, ended) for name, began, ended in spans[NEWCOMER] if name == "downloading"]
        if not downloads:
            raise RuntimeError("the newcomer has not downloaded anything: let the other peer train longer before")
        spans[DONOR] += [("serving a download", *span) for span in downloads]
        rounds = [name for name, _, _ in spans[NEWCOMER] if name == "averaging gradients"]
        watches = zip((DONOR, NEWCOMER), (of_donor, of_newcomer), baselines, at_rest, strict=True)
        peers: dict[str, Any] = {}
        for name, watch, baseline, rest in watches:
            samples = [sample for sample in watch.samples if sample[0] >= began]
            phases = peaks(samples, spans[name], baseline, model)
            peers[name] = {
                "before": baseline / 1e9,
                "peak": max(phases.values()),
                "at rest": (rest - baseline) / model,
                "phases": phases,
            }
        return {
            "version": crew.version,
            "model": model / 1e6,
            "epochs": epochs,
            "rounds": len(rounds),
            "downloads": len(downloads),
            "models": crew.ask("first_parameter"),
            "peers": peers,
        }


def report(library: str, result: dict[str, Any]) -> None:
    peers = result["peers"]
    print(
        f"{library} {result['version']}: a model of {result['model']:.0f} MB and Adam, epoch {result['epochs'][0]}, "
        f"{result['rounds']} rounds of gradients with the newcomer, {result['downloads']} downloads"
    )
    print(f"  {'':<24}{DONOR:>10}{NEWCOMER:>10}")
    print(f"  {'before shoal, in GB':<24}{peers[DONOR]['before']:>10.2f}{peers[NEWCOMER]['before']:>10.2f}")
    for phase in PHASES:
        cells = [peers[name]["phases"].get(phase) for name in (DONOR, NEWCOMER)]
        if any(cell is not None for cell in cells):
            print(f"  {phase:<24}" + "".join(f"{'':>10}" if cell is None else f"{cell:>10.2f}" for cell in cells))
    for line in ("at rest", "peak"):
        print(f"  {line:<24}" + "".join(f"{peers[name][line]:>10.2f}" for name in (DONOR, NEWCOMER)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], default="shoal")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--batch", type=int, default=4, help="samples in a batch")
    parser.add_argument("--batches", type=int, default=8, help="of all peers in an epoch")
    parser.add_argument("--seconds", type=float, default=0.3, help="that a batch takes at least")
    parser.add_argument("--before", type=int, default=1, help="epochs that the first peer makes alone")
    parser.add_argument("--epochs", type=int, default=4, help="epochs that both make")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds after the end until memory is at rest")
    parser.add_argument("--offload", action="store_true", help="offload_optimizer=True")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further options of the Optimizer")
    args = parser.parse_args()
    results = {}
    for library in LIBRARIES if args.library == "all" else [args.library]:
        results[library] = measure(library, args)
        report(library, results[library])
    print(json.dumps({"megabytes": args.megabytes, "results": results}))


if __name__ == "__main__":
    main()
