"""What it costs when peers die, or freeze, in the middle of an all-reduce of real processes.

    python benchmarks/failover.py --library shoal
    python benchmarks/failover.py --library hivemind --options '{"sender_timeout": 5, "reducer_timeout": 10}'

Eight peers average 8 MB. Some time into the all-reduce two of them get SIGKILL, or SIGSTOP. Printed for every case: how
long after the signal the last survivor had its result, which share of the vector is the average over at least all
survivors, and whether all survivors hold the same bytes. "before" in place of a share: the round was over when the
signal came.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from statistics import median
from typing import Any

from crew import AveragerCrew


def run_once(args: argparse.Namespace, number: signal.Signals, after: float) -> dict[str, Any]:
    with AveragerCrew(args.library, args.peers, args.megabytes, args.options) as crew:
        crew.ask("fill")
        crew.ask("form")
        crew.ask("reduce")
        crew.ask("fill")
        crew.ask("form")
        crew.broken = True
        began = time.monotonic()
        crew.tell("reduce")
        time.sleep(max(0.0, after - (time.monotonic() - began)))
        for process in crew.processes[-args.victims :]:
            process.send_signal(number)
        signalled = time.monotonic()
        survivors = crew.processes[: -args.victims]
        spans = crew.answers_of(survivors)
        found = crew.ask("inspect", list(range(len(survivors))), to=survivors)
        ended = max(span["ended"] for span in spans)
        return {
            "seconds": ended - signalled,
            "share_averaged": min(each["share_averaged"] for each in found),
            "identical": len({each["digest"] for each in found}) == 1,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["shoal", "hivemind"], default="shoal")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--victims", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--signals", nargs="*", choices=["KILL", "STOP"], default=["KILL", "STOP"])
    parser.add_argument("--after", nargs="*", type=float, default=[0.0, 0.1, 0.3], help="seconds into the all-reduce")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON of further DecentralizedAverager parameters"
    )
    args = parser.parse_args()
    print(f"{args.library}: {args.peers} peers average {args.megabytes:g} MB, {args.victims} get a signal")
    for name in args.signals:
        for after in args.after:
            runs = [run_once(args, signal.Signals[f"SIG{name}"], after) for _ in range(args.runs)]
            seconds = [run["seconds"] for run in runs]
            shares = [run["share_averaged"] for run in runs]
            identical = sum(run["identical"] for run in runs)
            each = " ".join(f"{value:.2f}" if value > 0 else "before" for value in seconds)
            print(
                f"  SIG{name} after {after:.1f} s: survivors done {median(seconds):6.2f} s later (median of {each})   "
                f"averaged {100 * min(shares):.1f} % at least   identical {identical}/{len(runs)}"
            )


if __name__ == "__main__":
    main()
