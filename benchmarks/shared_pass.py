"""A pass over a data set by several processes, of which one is killed and replaced every few seconds.

python benchmarks/shared_pass.py                 # 8 processes, 100,000 samples in chunks of 16, a death every 5 s
python benchmarks/shared_pass.py --every 1000    # nobody dies
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.drill import pass_over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two deaths")
    parser.add_argument("--at-most", type=float, default=300.0, help="seconds after which nobody dies any more")
    parser.add_argument("--seconds", type=float, default=0.2, help="that a chunk takes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = pass_over(
            Path(folder),
            processes=options.processes,
            samples=options.samples,
            chunk=options.chunk,
            seconds=options.seconds,
            may_kill=lambda seconds, deaths: options.every * (deaths + 1) < min(seconds, options.at_most),
        )
    again = outcome.seen.total() - len(outcome.seen)
    print(f"{outcome.seconds:.0f} s, {outcome.deaths} processes killed")
    print(f"samples never seen: {options.samples - len(outcome.seen)} (bar 0)")
    print(f"seen again: {again}, {again / options.samples:.2%} (bar 2 %)")


if __name__ == "__main__":
    main()
