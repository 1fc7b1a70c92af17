"""How long shoal takes to start: the import, the first DHT, and a group of peers that want to average.

    python benchmarks/startup.py                      # shoal
    python benchmarks/startup.py --library hivemind   # the same with hivemind

Every value is the median of several runs: fresh interpreters for the import and the DHT, rounds for the group.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from statistics import median

from crew import AveragerCrew, interpreter

BUDGETS = {"import": 0.20, "dht": 0.08, "group": 0.25}
TITLES = {
    "import": "import, beyond torch's own",
    "dht": "first ready DHT, after import",
    "group": "group of {peers} peers formed",
}

FRESH_INTERPRETER = """
import gc, json, time
import torch, torch.optim
gc.collect()  # else a collection of torch's many objects falls into the import by chance
began = time.perf_counter()
from {library} import DHT, DecentralizedAverager, Optimizer
imported = time.perf_counter()
dht = DHT(start=True)
ready = time.perf_counter()
print(json.dumps({{"import": imported - began, "dht": ready - imported}}))
dht.shutdown()
"""


def measure_fresh_interpreters(library: str, runs: int) -> dict[str, list[float]]:
    command = [interpreter(library), "-W", "ignore", "-c", FRESH_INTERPRETER.format(library=library)]
    seconds: dict[str, list[float]] = {"import": [], "dht": []}
    for run in range(-1, runs):  # the first one compiles bytecode and warms the disk cache
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120, text=True).stdout
        for name, value in json.loads(output.splitlines()[-1]).items():
            if run >= 0:
                seconds[name].append(value)
    return seconds


def measure_group(library: str, peers: int, runs: int) -> list[float]:
    """Seconds from the moment when all peers call ``step`` until the last of them knows its group."""
    seconds = []
    with AveragerCrew(library, peers, megabytes=0.01) as crew:
        for run in range(-1, runs):
            crew.ask("fill")
            formation = crew.time("form")
            crew.ask("reduce")
            crew.ask("check")
            if run >= 0:
                seconds.append(formation)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["shoal", "hivemind"], default="shoal")
    parser.add_argument("--peers", type=int, default=16, help="size of the group")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", choices=list(BUDGETS), nargs="+", default=list(BUDGETS))
    args = parser.parse_args()

    seconds: dict[str, list[float]] = {}
    if {"import", "dht"} & set(args.only):
        seconds |= measure_fresh_interpreters(args.library, args.runs)
    if "group" in args.only:
        seconds["group"] = measure_group(args.library, args.peers, args.runs)

    print(f"{args.library}, seconds, median of {args.runs}")
    for name in args.only:
        title = TITLES[name].format(peers=args.peers)
        runs = " ".join(f"{value:.3f}" for value in seconds[name])
        print(f"  {title:<32} {median(seconds[name]):6.3f}   budget {BUDGETS[name]:.2f}   runs {runs}")
    result = {"library": args.library, "peers": args.peers, "runs": args.runs}
    print(json.dumps(result | {name: median(seconds[name]) for name in args.only}))


if __name__ == "__main__":
    main()
