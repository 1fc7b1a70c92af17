"""How long it takes until a group is complete: shoal and hivemind, one process per peer, on this machine's loopback.

    python benchmarks/matchmaking.py --library all --peers 2 4 8 16

Two figures for each number of peers:

- *latency*: all peers are told to look for a group at the same moment, and the group is complete when it has a target
  size, which is everybody. From the first peer's beginning until the last one has its group.
- *lateness* (``--window``): there is no target size, so that the group has to be closed by time. By how much later than
  the window of the peer that began first the last one has its group.

The first round of a crew, in which nobody has ever talked to most of the others, is shown apart. After each round the
group averages a small vector, and every result is checked: so all were in one group, or the benchmark fails.
``--library all`` takes the libraries in turn within each round, so that a noisy moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from statistics import median
from typing import Any

from crew import AveragerCrew

LIBRARIES = ("shoal", "hivemind")
MEGABYTES = 0.01
SHORTEST_WINDOW = 1.0


def measure(libraries: list[str], peers: int, window: float | None, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds for each round of each library; with a window, those by which the group is late."""
    options: dict[str, Any] = {} if window is None else {"target_group_size": None, "min_matchmaking_time": window}
    results: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        crews = [stack.enter_context(AveragerCrew(each, peers, MEGABYTES, options)) for each in libraries]
        for crew in crews:
            results[crew.library] = {"version": crew.version, "seconds": []}
        for _ in range(1 + rounds):
            for crew in crews:
                crew.ask("fill")
                seconds = crew.time("form")
                crew.ask("reduce")
                crew.ask("check")
                results[crew.library]["seconds"].append(seconds - (window or 0.0))
    for result in results.values():
        result["first"], *result["seconds"] = result["seconds"]
        result["median"] = median(result["seconds"])
    return results


def report(results: dict[str, dict[str, Any]], peers: int, window: float | None) -> None:
    subject = "latency with a target size" if window is None else f"lateness with a window of {window:g} s"
    print(f"group of {peers:2} peers, {subject}, milliseconds")
    for library, result in results.items():
        rounds = " ".join(f"{1000 * seconds:6.0f}" for seconds in result["seconds"])
        figures = f"median {1000 * result['median']:6.0f}   first {1000 * result['first']:6.0f}"
        print(f"  {library:<9} {result['version']:<8} {figures}   rounds {rounds}")
    if len(results) == len(LIBRARIES):
        print(f"  shoal takes {results['shoal']['median'] / results['hivemind']['median']:.2f} × the time of hivemind")
    print(json.dumps({"peers": peers, "window": window, "results": results}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], required=True)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5, help="besides the first one")
    parser.add_argument(
        "--window", type=float, help="measure lateness, with windows of so many seconds, instead of latency"
    )
    args = parser.parse_args()
    if min(args.peers) < 2:
        parser.error("--peers must be at least 2: one peer has nobody to meet")
    if args.window is not None and args.window < SHORTEST_WINDOW:
        parser.error(f"--window must be at least {SHORTEST_WINDOW:g}: shorter ones are over before everybody has begun")
    libraries = list(LIBRARIES) if args.library == "all" else [args.library]
    for peers in args.peers:
        report(measure(libraries, peers, args.window, args.rounds), peers, args.window)


if __name__ == "__main__":
    main()
