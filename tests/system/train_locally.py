"""A training script with DiLoCo, small enough to run on one core; prints what each round has done as JSON lines."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

from tests.system.train import CLASSES, PIXELS, digits, left_behind, say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--slots", type=int, default=10)
    parser.add_argument("--sync-every", type=int, default=6)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    from shoal import DHT
    from shoal.optim.diloco.diloco import DiLoCo

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    dht = DHT(initial_peers=args.initial_peers, start=True)
    say(address=str(dht.get_visible_maddrs()[0]), peer_id=str(dht.peer_id))
    opt = DiLoCo(
        dht=dht,
        run_id="system_test",
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.003),
        sync_every=args.sync_every,
        batch_size_per_step=16,
        fragments=args.fragments,
        fragment_sync_delay=args.delay,
        matchmaking_time=5.0,
        averaging_timeout=30.0,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )
    say(ready=True)
    assert sys.stdin.readline() == "go\n"

    prototypes = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0))
    generator, known = torch.Generator().manual_seed(args.seed), None
    while opt.local_epoch < args.slots:
        pictures, labels = digits(generator, 16, prototypes)
        loss = nn.functional.cross_entropy(model(pictures), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(args.pause)  # stands for the work of a larger model
        if opt.last_round is not known:
            known = opt.last_round
            say(
                slot=known.slot,
                loss=loss.item(),
                peers=sorted(map(str, known.peers)),
                contributed=known.contributed,
                versions=[[link.version, link.hash.hex(), bits.hex()] for link, bits in opt.outer_versions()],
            )
    opt.shutdown()
    dht.shutdown()
    say(left=left_behind())


if __name__ == "__main__":
    main()
