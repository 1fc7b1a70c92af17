"""Which loss low-rank averaging of gradients reaches, and with how many bytes, on the demo's language model.

    python benchmarks/low_rank.py
    python benchmarks/low_rank.py --longer 1

Real processes over loopback train the same byte-level transformer from the same parameters, with plain averaging, with
PowerSGD and with PowerEF; these make 1.4 times as many global steps (``--longer``). Counted is every byte of messages
that the peers send from their first common step to the last one: gradients, parameters, group formation, the
distributed table. The loss is that on text which nobody has trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from crew import JoinedCrew

AVERAGERS = ("plain", "PowerSGD", "PowerEF")
FIRST_EPOCHS = 3
"""Until then peers meet; what these steps send does not count."""
REPORT_EVERY = 20
"""Peers answer after so many steps, so that one that hangs is noticed."""


def measure(averager: str, args: argparse.Namespace) -> dict[str, Any]:
    epochs = args.epochs if averager == "plain" else round(args.longer * args.epochs)
    options = {
        "averager": averager,
        "rank": args.rank,
        "epochs": epochs,
        "target_batch_size": args.target_batch_size,
        "average_state_every": args.average_state_every,
        "rate": args.rate,
    }
    with JoinedCrew("low_rank_peer.py", "shoal", args.peers, **options) as crew:
        crew.ask("train", FIRST_EPOCHS)
        began, answers = time.monotonic(), []
        for until in [*range(FIRST_EPOCHS + REPORT_EVERY, epochs, REPORT_EVERY), epochs]:
            answers += crew.ask("train", until)
        seconds = time.monotonic() - began
        [first, *_] = crew.ask("measure")
    sizes = [size for answer in answers for size in answer["sizes"]]
    return {
        "epochs": epochs,
        "loss": first["loss"],
        "bytes": sum(answer["bytes"] for answer in answers),
        "samples": sum(answer["samples"] for answer in answers) / len(sizes),
        "complete": sizes.count(args.peers) / len(sizes),
        "seconds": seconds,
        "values": first["values"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--averagers", nargs="*", choices=AVERAGERS, default=AVERAGERS)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=240, help="global steps with plain averaging")
    parser.add_argument("--longer", type=float, default=1.4, help="low-rank averagers make so many times more steps")
    parser.add_argument("--target-batch-size", type=int, default=128, help="windows of text in each global step")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate; of embedding tables ten times as high")
    parser.add_argument("--average-state-every", type=int, default=100, help="global steps; the same for all averagers")
    args = parser.parse_args()
    print(f"{args.peers} peers, {args.epochs} global steps of {args.target_batch_size} windows, rank {args.rank}")
    results: dict[str, dict[str, Any]] = {}
    for averager in args.averagers:
        result = results[averager] = measure(averager, args)
        plain = results.get("plain", result)
        print(
            f"  {averager:<9} loss {result['loss']:.4f} ({100 * (result['loss'] / plain['loss'] - 1):+.2f} %)   "
            f"sent {result['bytes'] / 1e6:7.1f} MB ({plain['bytes'] / result['bytes']:.1f} x fewer)   "
            f"{result['epochs']} steps of {result['samples']:.0f} windows   "
            f"{100 * result['complete']:.0f} % of the rounds with all peers   {result['seconds']:.0f} s",
            flush=True,
        )
    print(json.dumps({**vars(args), "results": results}))


if __name__ == "__main__":
    main()
