"""How close a chain of stages comes to what slow, long links allow.

    sudo python benchmarks/stages_wan.py
    sudo python benchmarks/stages_wan.py --hosts 4 --megabits 50 --round-trip 0.060 --microbatches 128

Each stage is a process on a host of its own (see wide_area.py). The first one also drives. For each microbatch, a stage
in the middle sends its output to the next stage and the gradient of its input to the one before. That is twice a
boundary, which has 1 MB as float32 and a quarter of that in 8 bits. At the ends, a stage sends only one of the two. So
no chain can bring more than ``rate / (2 * encoded boundary)`` microbatches per second through: that is the limit.
Stages compute next to nothing here, so that two cores suffice for all of them and for the wire.

All microbatches are of one step. The first and the last ones, when the chain fills and empties, do not count.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from stages import check, crew_of, rate_of
from stages_peer import Size
from wide_area import WideArea

MOST_OF_LIMIT = 1.10
CODEC = "BlockwiseQuantization"
SHORTER = 4
"""How many times shorter the codec makes float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="one for each stage")
    parser.add_argument("--megabits", type=float, default=50, help="that each host can send per second")
    parser.add_argument("--round-trip", type=float, default=0.060, help="seconds between any two hosts and back")
    parser.add_argument("--microbatches", dest="step", type=int, default=256, help="in a round")
    parser.add_argument("--in-flight", type=int, default=16, help="microbatches that are under way at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further parameters of StagedModel")
    args = parser.parse_args()
    if args.step < 4 * args.in_flight:
        parser.error("--microbatches must be at least four times --in-flight, so that some of them count")
    size = Size(hidden=8)
    limit = args.megabits * 1e6 / 8 / (2 * size.boundary / SHORTER)
    options = {"compression": CODEC, "gradient_compression": CODEC, **args.options}
    rates = []
    with (
        WideArea(args.hosts, args.megabits, args.round_trip) as area,
        crew_of("shoal", list(range(args.hosts)), [size] * args.hosts, args, hosts=area.hosts, options=options) as crew,
    ):
        for _ in range(args.rounds):
            [found] = crew.ask("drive", args.step, to=crew.processes[:1])
            rates.append(rate_of(found["times"][: -args.in_flight], args.in_flight))
    rounds = " ".join(f"{rate:.2f}" for rate in rates)
    print(
        f"{args.hosts} hosts of {args.megabits:g} Mbit/s, {1000 * args.round_trip:g} ms, boundaries of "
        f"{size.boundary / 1e6:.2f} MB in {32 // SHORTER} bits: limit {limit:.2f} microbatches/s   rounds {rounds}"
    )
    is_met = check("times the limit of the slowest line", limit / median(rates), MOST_OF_LIMIT, at_most=True)
    print(json.dumps({"limit": limit, "rates": rates, "met": is_met}))


if __name__ == "__main__":
    main()
