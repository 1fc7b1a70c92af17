"""How close an all-reduce comes to what slow, long links allow.

    sudo python benchmarks/wan.py --hosts 4 --megabits 100 --round-trip 0.060 --megabytes 40
    sudo python benchmarks/wan.py --hosts 2 --megabits 500 --round-trip 0.100 --megabytes 80 --library hivemind

Each peer is a process on a host of its own (see wide_area.py). No algorithm can average S bytes among N peers that
send with a given rate in less time than 2 * S * (N - 1) / N / rate: that is the limit. ``--library tcp`` shows what the
links make of it: the same number of bytes between the same hosts over bare TCP, without anything that an average needs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from crew import AveragerCrew, Crew
from wide_area import WideArea

CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["shoal", "hivemind", "tcp"], default="shoal")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabits", type=float, default=100, help="that each host can send per second")
    parser.add_argument("--round-trip", type=float, default=0.060, help="seconds between any two hosts and back")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON of further DecentralizedAverager parameters"
    )
    args = parser.parse_args()
    limit = 2 * args.megabytes * (args.hosts - 1) / args.hosts / (args.megabits / 8)
    with WideArea(args.hosts, args.megabits, args.round_trip) as area, _make_crew(args, area) as crew:
        if args.library == "tcp":
            crew.ask("join", crew.ask("open"))
        seconds = [_time_round(crew) for _ in range(args.warmup + args.rounds)][args.warmup :]
        version = crew.version
    print(
        f"{args.library} {version}: {args.megabytes:g} MB among {args.hosts} hosts of {args.megabits:g} Mbit/s, "
        f"{1000 * args.round_trip:g} ms, {CONGESTION_CONTROL.read_text(encoding='utf-8').strip()}: "
        f"median {median(seconds):.3f} s, {median(seconds) / limit:.3f} × the limit of "
        f"{limit:.3f} s   rounds {' '.join(f'{each:.3f}' for each in seconds)}"
    )


def _make_crew(args: argparse.Namespace, area: WideArea) -> Crew:
    if args.library == "tcp":
        return Crew("bare_tcp.py", args.library, args.hosts, area.hosts, megabytes=args.megabytes)
    return AveragerCrew(args.library, args.hosts, args.megabytes, args.options, hosts=area.hosts)


def _time_round(crew: Crew) -> float:
    if not isinstance(crew, AveragerCrew):
        return crew.time("reduce")
    crew.ask("fill")
    crew.ask("form")
    taken = crew.time("reduce")
    crew.ask("check")
    return taken


if __name__ == "__main__":
    main()
