"""Trains with DiLoCo and whoever is there until told to stop, and says which outer parameters it has had."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import threading
import time
from typing import Any

import torch

import shoal
from shoal.errors import BootstrapError
from tests.system.keep_training import Pictures, held_out_loss, loss_on, make_model, say
from tests.system.swarm import START_LIMIT_SECONDS

SYNC_EVERY, BATCH_SIZE = 10, 16
OUTER: dict[str, Any] = {"lr": 0.9, "momentum": 0.5, "nesterov": True}


def make_inner_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def join(addresses: list[str]) -> shoal.DHT:
    """On a busy machine a peer may take longer to answer than others wait."""
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while True:
        try:
            return shoal.DHT(initial_peers=addresses, start=True)
        except BootstrapError:
            if time.monotonic() > deadline:
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True, help="seconds between steps")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    level = logging.DEBUG if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s peer {args.seed}: %(message)s")
    model, pictures = make_model(), Pictures(args.seed)
    say(ready=True)

    # a process that is started ahead waits here, so that it can replace another at once
    dht = join(json.loads(sys.stdin.readline()))
    opt = shoal.DiLoCo(
        dht=dht,
        run_id="outer_churn",
        optimizer=make_inner_optimizer(model),
        outer_optimizer=functools.partial(torch.optim.SGD, **OUTER),
        sync_every=SYNC_EVERY,
        batch_size_per_step=BATCH_SIZE,
        matchmaking_time=3.0,
        averaging_timeout=15.0,
    )
    say(address=str(dht.get_visible_maddrs()[0]))
    is_told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), is_told.set()), daemon=True).start()
    known, slowest = opt.outer_versions(), 0.0
    while not is_told.is_set():
        opt.zero_grad()
        loss_on(model, pictures.draw(BATCH_SIZE)).backward()
        began = time.monotonic()
        opt.step()
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(args.pause)  # stands for the work of a larger model
        if opt.outer_versions() == known:
            continue
        [(link, bits)] = known = opt.outer_versions()
        last = opt.last_round
        is_own = last is not None and last.version == link.version
        with opt.use_outer_parameters():
            loss = held_out_loss(model, pictures)
        say(
            version=link.version,
            link=link.hash.hex(),
            bits=bits.hex(),
            members=len(last.peers) if is_own else 0,
            loss=loss,
            slowest=slowest,
        )
        slowest = 0.0
    opt.shutdown()
    dht.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
