"""Gives its state to whoever asks, but stops in the middle of a download until it is told to go on."""

from __future__ import annotations

import argparse
import json
import sys
import threading

import torch

from shoal import DHT, DecentralizedAverager
from shoal.averaging.state.download import Snapshot

PATIENCE_SECONDS = 60.0


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def make_state(chunks: int) -> list[torch.Tensor]:
    """What all donors have: two tensors of together so many chunks."""
    values = torch.randn(chunks * 2**18, generator=torch.Generator().manual_seed(chunks))
    return [values[:1000].clone(), values[1000:].clone()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--pause-after", type=int, required=True, help="chunks")
    args = parser.parse_args()

    sent, send = 0, Snapshot.chunk

    def send_or_pause(snapshot: Snapshot, index: int) -> object:
        nonlocal sent
        if sent == args.pause_after:
            say(paused=True)
            sys.stdin.readline()
        sent += 1
        return send(snapshot, index)

    Snapshot.chunk = send_or_pause  # type: ignore[method-assign,assignment]
    dht = DHT(initial_peers=args.initial_peers, start=True)
    say(address=str(dht.get_visible_maddrs()[0]))
    averager = DecentralizedAverager(
        make_state(args.chunks),
        dht,
        start=True,
        prefix="state",
        next_chunk_timeout=PATIENCE_SECONDS,
        declare_state_period=PATIENCE_SECONDS,
    )
    say(ready=True)
    assert sys.stdin.readline() == "go\n"
    threading.Event().wait()  # until this process is killed
    averager.shutdown()


if __name__ == "__main__":
    main()
