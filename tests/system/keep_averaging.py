"""Averages a vector with whoever is there, round after round, and says of each round what came of it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time

import psutil
import torch

from shoal import DHT, DecentralizedAverager
from shoal.errors import AveragingError


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--until-told", action="store_true", help="and then go on until told that it is enough")
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--matchmaking-time", type=float, default=1.0)
    args = parser.parse_args()

    dht = DHT(initial_peers=args.initial_peers, start=True)
    say(address=str(dht.get_visible_maddrs()[0]))
    vector = torch.full((round(args.megabytes * 1e6 / 4),), float(os.getpid()))
    averager = DecentralizedAverager(
        [vector], dht, start=True, prefix="churn", min_matchmaking_time=args.matchmaking_time, request_timeout=0.5
    )
    say(ready=True)
    assert sys.stdin.readline() == "go\n"
    enough = threading.Event()
    if args.until_told:
        threading.Thread(target=lambda: sys.stdin.readline() and enough.set(), daemon=True).start()
    else:
        enough.set()
    process = psutil.Process()
    for number in itertools.count(1):
        began = time.monotonic()
        error, members = "", 0
        try:
            members = len(averager.step(timeout=60, allow_retries=False))
        except AveragingError as e:
            error = str(e)
        with averager.get_tensors():  # whoever has died, each value is a mean of process numbers
            sound = bool(torch.isfinite(vector).all() and vector.min() > 0)
        say(
            round=number,
            error=error,
            members=members,
            sound=sound,
            share=averager.last_round.share_averaged if averager.last_round else 0.0,
            seconds=time.monotonic() - began,
            resident=process.memory_info().rss,
            threads=threading.active_count(),
            sockets=len(process.net_connections()),
        )
        if number >= args.rounds and enough.is_set():
            break
    say(finished=True)
    sys.stdin.readline()  # others may still need this peer
    averager.shutdown()
    dht.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
