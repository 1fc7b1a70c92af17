"""How fast a newcomer downloads the state of a running averager, and how much memory that takes on both sides.

    python benchmarks/state.py --library shoal --megabytes 400 --tensors 1
    python benchmarks/state.py --library all --tensors 50
    sudo python benchmarks/state.py --megabytes 40 --donors 3 --megabits 100 --rounds 3

One process per peer over loopback, or with ``--megabits`` on hosts of their own with slow, long links (see
wide_area.py): donors that have the same tensors, and a newcomer that has other ones. A download counts from the call
until the newcomer holds the state; its values are checked every time. The memory is the largest that the processes of
a peer had during the download, less what they had before the first one, in units of the state: 1.00 is one more copy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from statistics import median
from typing import Any

from crew import AveragerCrew
from wide_area import WideArea

LIBRARIES = ("shoal", "hivemind")


def measure(library: str, args: argparse.Namespace) -> dict[str, Any]:
    options = {"allow_state_sharing": True, "declare_state_period": 10, **args.options}
    result: dict[str, Any] = {"seconds": [], "donor_memory": [], "newcomer_memory": [], "failures": 0}
    peers = args.donors + 1
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(WideArea(peers, args.megabits, args.round_trip)).hosts if args.megabits else ()
        crew = stack.enter_context(
            AveragerCrew(library, peers, args.megabytes, options, hosts=hosts, tensors=args.tensors)
        )
        result["version"] = crew.version
        donors, newcomer = crew.processes[:-1], crew.processes[-1:]
        crew.ask_each(lambda index: ("share", index < args.donors))
        crew.note_memory()
        for number in range(-args.warmup, args.rounds):
            crew.reset_peaks()
            [answer] = crew.ask("download", to=newcomer)
            peaks = [peak / (args.megabytes * 1e6) for peak in crew.peaks()]
            if number < 0:
                continue
            if not answer["correct"]:
                result["failures"] += 1
                continue
            result["seconds"].append(answer["ended"] - answer["began"])
            result["donor_memory"].append(max(peaks[: len(donors)]))
            result["newcomer_memory"].append(peaks[-1])
    return result


def report(library: str, result: dict[str, Any], args: argparse.Namespace) -> None:
    if not result["seconds"]:
        print(f"  {library:<9} {result['version']:<12} all {result['failures']} downloads failed")
        return
    seconds = median(result["seconds"])
    memory = f"donor +{median(result['donor_memory']):.2f}, newcomer +{median(result['newcomer_memory']):.2f} states"
    runs = " ".join(f"{each:.3f}" for each in result["seconds"])
    speed = f"{args.megabytes / 1e3 / seconds:.3f} GB/s"
    print(f"  {library:<9} {result['version']:<12} {speed}   {memory}   failed {result['failures']}   runs {runs}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], default="shoal")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--tensors", type=int, default=1, help="how many tensors of equal size make up the state")
    parser.add_argument("--donors", type=int, default=1)
    parser.add_argument("--megabits", type=float, default=0, help="that each host can send per second; 0 = loopback")
    parser.add_argument("--round-trip", type=float, default=0.060, help="seconds between any two hosts and back")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="downloads that do not count")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON of further DecentralizedAverager parameters, for both"
    )
    args = parser.parse_args()
    print(f"{args.megabytes:g} MB as {args.tensors} tensors from {args.donors} donors")
    results = {}
    for library in LIBRARIES if args.library == "all" else [args.library]:
        results[library] = measure(library, args)
        report(library, results[library], args)
    print(json.dumps({"megabytes": args.megabytes, "tensors": args.tensors, "results": results}))


if __name__ == "__main__":
    main()
