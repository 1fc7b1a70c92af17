"""One peer of the benchmark of low-rank averaging: trains the demo's language model when told, see :mod:`commands`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from commands import obey, peer_parser
from language_peer import LanguagePeer

import shoal
from shoal.cli.demo import model as demo_model
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager

AVERAGERS: dict[str, Any] = {
    "plain": lambda rank: GradientAverager.get_factory(),
    "PowerSGD": lambda rank: PowerSGDGradientAverager.get_factory(averager_rank=rank),
    "PowerEF": lambda rank: PowerEFGradientAverager.get_factory(averager_rank=rank),
}
BATCH_SIZE = 16
MOMENTUM = 0.9
TABLES_FASTER = 10
"""So many times the learning rate of the other parameters."""
WARM_UP_EPOCHS = 10
HELD_OUT_WINDOWS = 1500


class LowRankPeer(LanguagePeer):
    """Trains with the others, and counts what it sends."""

    def __init__(self, args: argparse.Namespace) -> None:
        batches = 1 + args.index
        super().__init__(
            args.index, args.peers, seed=0, batches=batches, batch_size=BATCH_SIZE, held_out=HELD_OUT_WINDOWS
        )
        self.args = args

    def make_optimizer(self) -> shoal.Optimizer:
        epochs = self.args.epochs
        groups = demo_model.parameter_groups(self.model)
        for group, factor in zip(groups, (1, TABLES_FASTER), strict=True):
            group["lr"] = factor * self.args.rate
        optimizer = torch.optim.SGD(groups, lr=self.args.rate, momentum=MOMENTUM)
        return shoal.Optimizer(
            dht=self.dht,
            run_id="low_rank",
            target_batch_size=self.args.target_batch_size,
            batch_size_per_step=BATCH_SIZE,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda epoch: min(1.0, (epoch + 1) / WARM_UP_EPOCHS) * max(0.02, 1 - epoch / epochs)
            ),
            grad_averager=AVERAGERS[self.args.averager](self.args.rank),
            average_state_every=self.args.average_state_every,
            delay_state_averaging=False,
            matchmaking_time=5.0,
            averaging_timeout=30.0,
        )

    def train(self, until: int) -> dict[str, Any]:
        """Make global steps; returns their groups and samples, and what this peer has sent meanwhile, whatever for."""
        sent, sizes, samples, epoch = self.dht.p2p.metrics.bytes_sent, [], 0.0, self.optimizer.local_epoch
        while self.optimizer.local_epoch < until:
            self.optimizer.zero_grad()
            self.compute_gradients()
            self.optimizer.step()
            if self.optimizer.local_epoch > epoch:
                epoch = self.optimizer.local_epoch
                assert self.optimizer.grad_averager is not None
                last_round = self.optimizer.grad_averager.last_round
                sizes.append(0 if last_round is None else len(last_round.peers))
                samples += 0 if last_round is None else sum(last_round.weights)
        return {"sizes": sizes, "samples": samples, "bytes": self.dht.p2p.metrics.bytes_sent - sent}

    def measure(self) -> dict[str, Any]:
        """Nats per byte of text that nobody has trained on, and how many values the gradients have."""
        return {"loss": self.held_out_loss(), "values": self.values}


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--averager", choices=AVERAGERS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--target_batch_size", type=int, required=True)
    parser.add_argument("--average_state_every", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    args = parser.parse_args()
    obey(lambda: LowRankPeer(args))


if __name__ == "__main__":
    main()
