"""Hostile inputs by the million for everything that reads what strangers send, and attacks on nodes that listen.

    python -m tests.fuzz
    python -m tests.fuzz --seed 7 --inputs 100000 --only record
    python -m tests.fuzz --only session handshake   # a million between these alone

Ends with an error at the first input that something was not prepared for, and prints it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import warnings

from shoal.testing import run
from tests.fuzz.fuzzing import Outcome, print_outcomes
from tests.fuzz.live import besiege, print_siege
from tests.fuzz.run import fuzz_all


async def fuzz_parts(args: argparse.Namespace) -> list[Outcome]:
    return [outcome async for outcome in fuzz_all(args.inputs, args.seed, args.only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in total, for all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--attacks", type=int, default=20_000, help="on a listening node, for each transport")
    parser.add_argument("--only", nargs="+", default=[], help="targets with one of these in their names")
    args = parser.parse_args()
    print(f"hostile inputs, seed {args.seed}")
    warnings.simplefilter("ignore")  # cryptography's, about strange certificates
    print_outcomes(run(fuzz_parts(args), seed=args.seed))  # in virtual time: a stranger may be given seconds
    for kind in ("memory", "tcp") if args.attacks and not args.only else ():
        print_siege(kind, asyncio.run(besiege(kind, args.attacks, args.seed)))


if __name__ == "__main__":
    main()
