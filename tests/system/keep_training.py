"""Trains with whoever is there until told to stop, and says of each epoch what came of it."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from shoal import DHT, Optimizer
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager

CLASSES, PIXELS, HIDDEN, HELD_OUT = 10, 64, 512, 4096
NOISE = 3.0
"""So much that nobody can tell all pictures apart: the loss ends far above zero."""
LEARNING_RATE = 0.05
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"delay_state_averaging": False},
    "delayed-state": {"delay_state_averaging": True},
    "delayed": {"delay_optimizer_step": True, "delay_grad_averaging": True},
    "local-updates": {"use_local_updates": True},
    "PowerSGD": {"grad_averager": PowerSGDGradientAverager.get_factory(averager_rank=4)},
    "PowerEF": {"grad_averager": PowerEFGradientAverager.get_factory(averager_rank=4)},
}


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Pictures:
    """Noisy 8×8 pictures of ten classes, as many as one wants."""

    def __init__(self, seed: int) -> None:
        common = torch.Generator().manual_seed(0)
        self._prototypes = torch.randn(CLASSES, PIXELS, generator=common)
        self.held_out = self.draw(HELD_OUT, common)
        self._own = torch.Generator().manual_seed(seed)

    def draw(self, count: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures and their classes, never seen before."""
        generator = self._own if generator is None else generator
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return self._prototypes[labels] + NOISE * torch.randn(count, PIXELS, generator=generator), labels


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def loss_on(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def held_out_loss(model: nn.Module, pictures: Pictures) -> float:
    return loss_on(model, pictures.held_out).item()


def fingerprint(model: nn.Module) -> str:
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def train(args: argparse.Namespace, opt: Optimizer, model: nn.Module, last_epoch: list[int]) -> None:
    pictures, slowest, epoch, known_round = Pictures(args.seed), 0.0, opt.local_epoch, None
    while not last_epoch or epoch < last_epoch[0]:
        opt.zero_grad()
        loss_on(model, pictures.draw(args.batch_size)).backward()
        began = time.monotonic()
        opt.step()
        slowest = max(slowest, time.monotonic() - began)
        if opt.local_epoch == epoch:
            time.sleep(args.pause)  # stands for the work of a larger model
            continue
        last_round = (opt.grad_averager or opt.state_averager).last_round
        is_new = last_round is not None and last_round is not known_round
        say(
            epoch=opt.local_epoch,
            before=epoch,
            members=len(last_round.peers) if is_new else 0,
            samples=sum(last_round.weights) if is_new else 0,
            slowest=slowest,
            loss=held_out_loss(model, pictures),
            parameters=fingerprint(model),
        )
        epoch, slowest, known_round = opt.local_epoch, 0.0, last_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--target-batch-size", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True, help="seconds between steps")
    parser.add_argument("--matchmaking-time", type=float, required=True)
    parser.add_argument("--averaging-timeout", type=float, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.WARNING, format=f"%(asctime)s peer {args.seed}: %(message)s"
    )
    model = make_model()
    say(ready=True)

    # a process that is started ahead waits here, so that it can replace another at once
    initial_peers = json.loads(sys.stdin.readline())
    dht = DHT(initial_peers=initial_peers, start=True)
    opt = Optimizer(
        dht=dht,
        run_id="training_churn",
        target_batch_size=args.target_batch_size,
        batch_size_per_step=args.batch_size,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=LEARNING_RATE),
        params=model.parameters(),
        matchmaking_time=args.matchmaking_time,
        averaging_timeout=args.averaging_timeout,
        **MODES[args.mode],
    )
    say(address=str(dht.get_visible_maddrs()[0]))
    last_epoch: list[int] = []
    threading.Thread(target=lambda: last_epoch.append(int(sys.stdin.readline() or 0)), daemon=True).start()
    train(args, opt, model, last_epoch)
    opt.state_averager.finish_jobs(args.averaging_timeout)  # else some have the last averages and some have not
    say(finished=opt.local_epoch, parameters=fingerprint(model))
    sys.stdin.readline()  # others may still need this peer
    opt.shutdown()
    dht.shutdown()
    say(done=True)


if __name__ == "__main__":
    main()
