"""Averages one vector with one other peer, again and again, and prints the peak memory after each round."""

from __future__ import annotations

import argparse
import json
import resource
import sys

import torch

from shoal import DHT, DecentralizedAverager


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=20)
    args = parser.parse_args()

    dht = DHT(initial_peers=args.initial_peers, start=True)
    say(address=str(dht.get_visible_maddrs()[0]))
    own_value = 1.0 if args.initial_peers else 2.0
    tensors = [torch.empty(args.megabytes * 10**6 // 4 // 5) for _ in range(5)]
    averager = DecentralizedAverager(tensors, dht, start=True, prefix="memory_test", target_group_size=2)
    say(ready=True)
    assert sys.stdin.readline() == "go\n"
    for finished in range(1, args.rounds + 1):
        with averager.get_tensors() as averaged:
            for tensor in averaged:
                tensor.fill_(own_value)
        members = averager.step(timeout=60)
        assert members is not None
        assert len(members) == 2
        with averager.get_tensors() as averaged:
            assert all(torch.all(tensor == 1.5) for tensor in averaged)
        say(round=finished, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    averager.shutdown()
    dht.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
