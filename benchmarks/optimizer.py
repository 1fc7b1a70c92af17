"""What shoal's Optimizer adds to training: to a step that only accumulates, and at the end of an epoch.

    python benchmarks/optimizer.py --library all

*accumulating*: one process, one peer, a model of ``--parameters``. A step with the optimizer, which is not the last one
of its epoch, is compared with ``loss.backward()`` alone, which adds to the gradients that are there: what a loop in
plain torch does to accumulate. Both do in turns in the same process; the ratio is the median of those of each turn.
With *reuse_grad_buffers* the optimizer leaves the sum in ``.grad`` too. Without, the user zeroes gradients before each
batch, and the optimizer adds them to buffers of its own.

*turnover*: one process per peer on this machine's loopback, a model of ``--megabytes``, synchronous mode. From the
moment when the last peer has finished its last batch until the last one is at the next epoch: finding each other,
averaging gradients, stepping and averaging parameters.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import goodput
from crew import Crew

LIBRARIES = ("shoal", "hivemind")
WAYS = {"in place": "reuse_grad_buffers=True", "in buffers": "reuse_grad_buffers=False"}


def measure_accumulation(library: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps, and how much longer they are than plain ones."""
    arguments = {"parameters": args.parameters, "batch": args.batch}
    with Crew("accumulation_peer.py", library, 1, **arguments) as crew:
        [seconds] = crew.ask("measure", args.runs)
    plain = seconds["plain"]
    overheads = {way: median(b / a - 1 for a, b in zip(plain, seconds[way], strict=True)) for way in WAYS}
    return {"seconds": {way: median(each) for way, each in seconds.items()}, "overhead": overheads}


def measure_turnover(library: str, args: argparse.Namespace) -> dict[str, float]:
    """Figures of a run in which the end of an epoch is what takes long."""
    options = ["--library", library, "--peers", str(args.peers), "--megabytes", str(args.megabytes)]
    run = goodput.parse([*options, "--seconds", "0.2", "--epochs", str(args.epochs)])
    return goodput.evaluate(goodput.train(library, run)[1], run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], required=True)
    parser.add_argument("--only", choices=["accumulating", "turnover"])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for library in LIBRARIES if args.library == "all" else [args.library]:
        result = results[library] = {}
        if args.only != "turnover":
            result["accumulating"] = accumulation = measure_accumulation(library, args)
            print(f"{library}: accumulating gradients of {args.parameters / 1e6:g} million parameters")
            print(f"  plain torch               {accumulation['seconds']['plain']:8.3f} s")
            for way, title in WAYS.items():
                overhead = 100 * accumulation["overhead"][way]
                print(f"  {title:<25} {accumulation['seconds'][way]:8.3f} s   {overhead:+6.1f} %")
        if args.only != "accumulating":
            result["turnover"] = turnover = measure_turnover(library, args)
            print(f"{library}: {args.peers} peers, a model of {args.megabytes:g} MB")
            print(f"  turnover, median          {turnover['turnover']:8.0f} ms")
            print(f"  turnover, longest         {turnover['slowest turnover']:8.0f} ms")
            print(f"  rounds with all peers     {turnover['complete']:8.1f} %", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
