"""How long one all-reduce takes: shoal, hivemind and gloo, one process per peer, on this machine's loopback.

    python benchmarks/allreduce.py --library all --peers 2 --megabytes 200
    python benchmarks/allreduce.py --library all --peers 2 --megabytes 200 --codec float16

The group is formed before the clock starts; a round counts from the trigger, given to all peers at once, until the last
of them has the result, and every result is checked. ``--library all`` takes the libraries in turn within each round, so
that a noisy moment of the machine hits all of them, waits each time until what the others have left to do is done, and
prints ratios. Rounds that fail, also those before the clock counts, are reported, and are not part of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from crew import AveragerCrew
from peer import CODECS

LIBRARIES = ("gloo", "shoal", "hivemind")
LOOK_SECONDS, REST_SHARE, REST_LIMIT_SECONDS = 0.2, 0.05, 5.0
"""Peers rest when in such a time they use less than this share of one core; some never do."""


def measure(libraries: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        crews = []
        for library in libraries:
            options = {} if library == "gloo" else args.options
            crews.append(stack.enter_context(AveragerCrew(library, args.peers, args.megabytes, options)))
            results[library] = {"version": crews[-1].version, "seconds": [], "cpu_seconds": [], "failures": []}
        for round_number in range(-args.warmup, args.rounds):
            for crew in crews:
                result = results[crew.library]
                try:
                    seconds, cpu_seconds = run_round(crew, crews)
                except (RuntimeError, OSError) as e:  # the others go on
                    print(f"a round failed: {e}", file=sys.stderr)
                    result["failures"].append(str(e).splitlines()[0])
                    continue
                if round_number >= 0:
                    result["seconds"].append(seconds)
                    result["cpu_seconds"].append(cpu_seconds)
    for result in results.values():
        result["median"] = median(result["seconds"] or [math.nan])
        result["cpu_median"] = median(result["cpu_seconds"] or [math.nan])
    return results


def run_round(crew: AveragerCrew, crews: Sequence[AveragerCrew]) -> tuple[float, float]:
    """Seconds, and processor time, of one round of one crew, while the others rest.

    Raises:
        RuntimeError, OSError: it failed, or its result was wrong.
    """
    crew.ask("fill")
    crew.ask("form")
    wait_for_rest(crews)
    cpu_before = crew.cpu_seconds()
    seconds = crew.time("reduce")
    cpu_seconds = crew.cpu_seconds() - cpu_before
    crew.ask("check")
    return seconds, cpu_seconds


def wait_for_rest(crews: Sequence[AveragerCrew]) -> None:
    """What a library still does after its round, or after forming a group, must not be in the way of another one's."""
    deadline = time.monotonic() + REST_LIMIT_SECONDS
    living = [crew for crew in crews if crew.lives()]
    used, before = sum(crew.cpu_seconds() for crew in living), -math.inf
    while used - before > REST_SHARE * LOOK_SECONDS and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        used, before = sum(crew.cpu_seconds() for crew in living), used


def report(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    codec = "none" if args.codec is None else args.codec
    print(f"all-reduce of {args.megabytes:g} MB (fp32) among {args.peers} peers, codec {codec}, seconds per round")
    for library, result in results.items():
        rounds = " ".join(f"{seconds:6.3f}" for seconds in result["seconds"])
        medians = f"median {result['median']:6.3f}   cpu {result['cpu_median']:6.2f}"
        failed = f"   FAILED {len(result['failures'])}" if result["failures"] else ""
        print(f"  {library:<9} {result['version']:<12} {medians}   rounds {rounds}{failed}")
    if "shoal" in results:
        own = results["shoal"]["median"]
        for library in results.keys() - {"shoal"}:
            other = results[library]["median"]
            print(f"  shoal takes {own / other:.2f} × the time of {library} ({other / own:.2f} × as fast)")
    print(json.dumps({"peers": args.peers, "megabytes": args.megabytes, "codec": codec, "results": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], required=True)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--warmup", type=int, default=5, help="rounds that do not count, in which memory is still new to the processes"
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON of further DecentralizedAverager parameters, for both"
    )
    parser.add_argument("--codec", choices=CODECS, help="how values travel; gloo has none of these")
    args = parser.parse_args()
    if args.codec is not None:
        args.options["compression"] = args.codec
    if args.peers < 2:
        parser.error("--peers must be at least 2: one peer has nobody to average with")
    libraries = [each for each in LIBRARIES if args.library in (each, "all") and not (each == "gloo" and args.codec)]
    if not libraries:
        parser.error("gloo has no codecs: leave --codec out, or take another library")
    results = measure(libraries, args)
    report(results, args)
    if results.get("shoal", {}).get("failures"):
        sys.exit("shoal failed")


if __name__ == "__main__":
    main()
