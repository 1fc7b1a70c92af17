"""How much time low-communication training saves over slow, long links, and whether it waits for its rounds.

    sudo python benchmarks/low_communication_wan.py --picture loss.png
    sudo python benchmarks/low_communication_wan.py --steps 60

Real processes on hosts of their own, with lines of 100 Mbit/s and a round trip of 60 ms (see wide_area.py), make the
same steps as in low_communication.py. The first three modes need nothing but time; the last one runs over loopback,
where the loss must be the same. Printed is each loss against time, and then what is asked for with its bar.
"""

from __future__ import annotations

import argparse
import json
from statistics import mean
from typing import Any

from low_communication import draw, measure_once, options

SYNCHRONOUS, LOCAL, STREAMING = "synchronous", "H=30, 4 bits", "streaming, late"
TIMES_FASTER = 6
MOST_OTHER_LOSS = 0.015
# Beside the encoded values: a share of them, for each round, and for each second.
MOST_BESIDE = (0.03, 20e3, 1e3)
MOST_WAITED = 0.1
"""A step in which a round is applied takes at most so much of that round: else training waits for it."""


def tell(name: str, runs: list[dict[str, Any]]) -> None:
    """Print the loss against time."""
    print(f"  {name}: {mean(run['seconds'] for run in runs):.1f} s, loss {mean(run['loss'] for run in runs):.4f}")
    for moments in zip(*(run["curve"] for run in runs), strict=True):
        steps, sent, loss, seconds = (mean(values) for values in zip(*moments, strict=True))
        print(f"    {steps:4.0f} steps, {seconds:6.1f} s, {sent / 1e6:7.2f} MB, loss {loss:.4f}")


def check(what: str, found: float, bar: float, unit: str = "") -> bool:
    """Print a line with its bar."""
    is_met = found <= bar
    print(f"  {what}: {found:.3g}{unit}, at most {bar:.3g}{unit}: {'met' if is_met else 'MISSED'}")
    return is_met


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[options()]
    )
    parser.add_argument("--megabits", type=float, default=100, help="that each peer can send per second")
    args = parser.parse_args()
    print(f"{args.peers} peers, {args.megabits:g} Mbit/s, {1000 * args.round_trip:g} ms, {args.steps} steps each")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in (SYNCHRONOUS, LOCAL, STREAMING):
        results[name] = [measure_once(name, seed, args) for seed in args.seeds]
        tell(name, results[name])
    at_home = argparse.Namespace(**{**vars(args), "megabits": 0})
    loopback = mean(measure_once(LOCAL, seed, at_home)["loss"] for seed in args.seeds)

    def of(name: str, key: str) -> float:
        return mean(run[key] for run in results[name])

    share, per_round, per_second = MOST_BESIDE
    beside = share * of(LOCAL, "payload") + per_round * of(LOCAL, "rounds") + per_second * of(LOCAL, "seconds")
    print(f"a round of {STREAMING!r} is applied {of(STREAMING, 'round'):.3f} s after it began, {LOCAL!r}: at once,")
    print(f"after {of(LOCAL, 'round'):.3f} s, for which training waits")
    good = [
        check(
            f"seconds of {LOCAL!r}, of {SYNCHRONOUS!r}",
            of(LOCAL, "seconds") / of(SYNCHRONOUS, "seconds"),
            1 / TIMES_FASTER,
        ),
        check(
            "difference of its loss to loopback",
            100 * abs(of(LOCAL, "loss") / loopback - 1),
            100 * MOST_OTHER_LOSS,
            " %",
        ),
        check("what it sends beside the values", (of(LOCAL, "sent") - of(LOCAL, "payload")) / 1e3, beside / 1e3, " kB"),
        check(
            f"seconds that {STREAMING!r} waits for a round, of it",
            of(STREAMING, "step") / of(STREAMING, "round"),
            MOST_WAITED,
        ),
    ]
    if args.picture:
        draw(results, args.picture, is_wide=True)
    print(json.dumps({**vars(args), "results": results, "loopback": loopback, "met": all(good)}, default=str))


if __name__ == "__main__":
    main()
