"""Trains on given shares of the data with Lightning, as a peer of one or more processes; prints the parameters."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal.lightning
from shoal.base.clock import get_dht_time
from shoal.compression import NoCompression
from shoal.optim.ranks.several_processes import SeveralProcesses

STEPS = 12
PEERS = 2
CLIPPING = 0.3
MEAN = functools.partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer with which all peers go on from the mean of their parameters."""
Batch = tuple[torch.Tensor, torch.Tensor]


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")  # at once: processes of a peer share the pipe
    sys.stdout.flush()


def make_data(sizes: list[int]) -> list[list[Batch]]:
    """For every step of the swarm the batches of all processes, of these sizes."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(STEPS):
        x = torch.randn(sum(sizes), 6, generator=generator)
        steps.append(list(zip(x.split(sizes), x[:, :2].sin().split(sizes), strict=True)))
    return steps


def make_module(pl: Any) -> Any:
    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Regression()


def make_trainer(pl: Any, **options: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def parameters(module: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(module.parameters()).tolist()


def swarm_of(optimizer: Any) -> Any:
    """The optimizer that talks to the swarm; ``None`` in the other processes of its peer."""
    return optimizer.swarm if isinstance(optimizer, SeveralProcesses) else optimizer


def meet(tracker: Any) -> None:
    """Wait until both peers know each other, before either has made a step."""
    pause = threading.Event()
    tracker.board.report(0, 1, get_dht_time())
    tracker.report_local_progress(0, 0)
    while tracker.expected_group_size < PEERS:
        pause.wait(0.01)


def make_callback(pl: Any, *, steps_alone: bool) -> Any:
    class FinishStep(pl.Callback):
        """After its share each process only takes part in the step of the swarm."""

        most_peers = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            (optimizer,), pause = trainer.optimizers, threading.Event()
            swarm = swarm_of(optimizer)
            while batch_idx == 0 and swarm is not None and swarm.tracker.expected_group_size < PEERS:
                pause.wait(0.01)
            while optimizer.local_epoch == batch_idx:
                optimizer.step(batch_size=0)
                pause.wait(0.002)
            self.most_peers = max(self.most_peers, trainer.strategy.num_peers)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            (optimizer,) = trainer.optimizers
            say(
                parameters=parameters(module),
                rank=trainer.global_rank,
                epoch=optimizer.local_epoch,
                peers=self.most_peers,
                rate=optimizer.param_groups[0]["lr"],
                sampler=trainer.strategy.distributed_sampler_kwargs,
                writes=trainer.is_global_zero,
            )

    class MeetFirst(FinishStep):
        """Where each peer makes steps of its own, the first one would be made alone."""

        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            swarm = swarm_of(trainer.optimizers[0])
            if trainer.global_step == 0 and swarm is not None:
                meet(swarm.tracker)

    return MeetFirst() if steps_alone else FinishStep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--initial-peers", default=None)
    parser.add_argument("--sizes", type=int, nargs="+", help="of the batches of all processes of all peers")
    parser.add_argument("--first", type=int, help="which of them is that of this peer's first process")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps-alone", action="store_true", help="with low_communication, an exchange for each step")
    args = parser.parse_args()
    pl = importlib.import_module(args.package)
    logging.getLogger(args.package).setLevel(logging.WARNING)

    low = {"sync_every": 1, "outer_optimizer": MEAN, "compression": NoCompression(), "straggler_patience": 60.0}
    strategy = shoal.lightning.HivemindStrategy(
        target_batch_size=None if args.steps_alone else sum(args.sizes),
        low_communication=low if args.steps_alone else None,
        run_id="shares",
        initial_peers=args.initial_peers,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        matchmaking_time=20.0,
        averaging_timeout=60.0,
    )
    if strategy.dht is not None:
        say(address=str(strategy.dht.get_visible_maddrs()[0]))
    share = args.first + int(os.environ.get("LOCAL_RANK", 0))
    batches: Any = [step[share] for step in make_data(args.sizes)]
    callback = make_callback(pl, steps_alone=args.steps_alone)
    clipping = None if args.steps_alone else CLIPPING
    trainer = make_trainer(
        pl, strategy=strategy, devices=args.devices, callbacks=[callback], gradient_clip_val=clipping
    )
    trainer.fit(make_module(pl), DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main()
