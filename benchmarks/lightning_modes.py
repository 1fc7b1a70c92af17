"""What the options of the Lightning strategy do for speed and memory: overlap, offloading, reusing gradient buffers.

    python benchmarks/lightning_modes.py

Two peers on this machine, a process each, train a network of ``--megabytes`` of parameters with Adam, and average
gradients exactly, in one mode after another. A part of each batch's time is sleep, which stands for work of a GPU: the
processor is free then. Printed for each mode: how long a step of the swarm takes, which share of it the batches
themselves take (the rest is waiting), and by how much the memory of a peer has grown since before the model was made.
Needs Lightning.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import subprocess
import sys
import time
import warnings
from statistics import mean
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

TARGET, BATCH = 128, 8
WIDTH = 1024

DECAY = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99)
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "state averaging delayed": {"delay_state_averaging": True, "scheduler_fn": DECAY},
    "all delayed, offloaded": {
        "delay_state_averaging": True,
        "delay_grad_averaging": True,
        "delay_optimizer_step": True,
        "offload_optimizer": True,
        "scheduler_fn": DECAY,
    },
    "offloaded": {"offload_optimizer": True, "scheduler_fn": DECAY},
    "gradient buffers reused": {"reuse_grad_buffers": True},
}


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def train(args: argparse.Namespace) -> None:
    import lightning.pytorch as pl

    from shoal.lightning import HivemindStrategy
    from shoal.optim.grad_averager import GradientAverager

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    strategy = HivemindStrategy(
        target_batch_size=TARGET,
        initial_peers=args.initial_peers,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        grad_averager=GradientAverager.get_factory(),
        **MODES[args.mode],
    )
    say(address=str(strategy.dht.get_visible_maddrs()[0]))
    before = psutil.Process().memory_info().rss

    class Network(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = max(1, round(args.megabytes * 1e6 / 4 / WIDTH**2))
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
            self.began, self.batch_seconds, self.grown = 0.0, 0.0, 0
            self.spans: list[tuple[float, float]] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            time.sleep(args.gpu_seconds)
            return self.layers(batch).square().mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.batch_seconds += time.perf_counter() - self.began

        def on_train_batch_end(self, *_: Any) -> None:
            (optimizer,) = self.trainer.optimizers
            while not self.spans and strategy.num_peers < 2:
                time.sleep(0.01)
            if optimizer.local_epoch == len(self.spans):
                return
            self.spans.append((time.perf_counter(), self.batch_seconds))
            if len(self.spans) == args.steps:
                self.grown = psutil.Process().memory_info().rss - before
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    network = Network()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(network, DataLoader([torch.randn(WIDTH) for _ in range(1024)], batch_size=BATCH))
    (began, busy_before), (ended, busy) = network.spans[2], network.spans[-1]  # the first ones are for meeting
    steps = len(network.spans) - 3
    say(seconds=(ended - began) / steps, busy=(busy - busy_before) / (ended - began), grown=network.grown)


def start(args: argparse.Namespace, mode: str, *more: str) -> subprocess.Popen[str]:
    options = ["--megabytes", args.megabytes, "--steps", args.steps, "--gpu-seconds", args.gpu_seconds]
    command = [sys.executable, __file__, "--mode", mode, *map(str, options), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(args: argparse.Namespace, mode: str) -> dict[str, float]:
    peers = [start(args, mode)]
    try:
        address = read(peers[0])["address"]
        peers.append(start(args, mode, "--initial-peers", address))
        read(peers[1])
        results = [read(peer) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
    return {name: mean(result[name] for result in results) for name in results[0]}


def read(peer: subprocess.Popen[str]) -> dict[str, Any]:
    assert peer.stdout
    line = peer.stdout.readline()
    if not line:
        raise RuntimeError(f"a peer ended with status {peer.wait()}")
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--gpu-seconds", type=float, default=0.1, help="of sleep in each batch")
    parser.add_argument("--steps", type=int, default=8, help="of the swarm; the first three do not count")
    parser.add_argument("--mode", default=None, choices=list(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--initial-peers", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode is not None:
        train(args)
        return
    print(f"2 peers, {args.megabytes:g} MB of parameters, Adam, {TARGET // BATCH} batches for each step of the swarm")
    results = {}
    for mode in MODES:
        found = results[mode] = measure(args, mode)
        print(
            f"  {mode:<25} {found['seconds']:6.2f} s for a step, {100 * found['busy']:3.0f} % of it in batches; "
            f"{found['grown'] / 1e6:5.0f} MB more memory"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
