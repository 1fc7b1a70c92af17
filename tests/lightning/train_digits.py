"""A peer that trains a classifier of digits with Lightning, in a process of its own; prints events as JSON lines."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import sys
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.lightning import HivemindStrategy

TRAINING = 1500


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def fingerprint(model: nn.Module) -> str:
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def make_classifier(pl: Any, epochs: int) -> Any:
    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
            self.reported = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.01)  # stands for the work of a larger model
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            accuracy = (self.network(batch[0]).argmax(dim=1) == batch[1]).float().mean()
            say(accuracy=accuracy.item())

        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            if optimizer.local_epoch == self.reported:
                return
            self.reported = optimizer.local_epoch
            last_round = optimizer.grad_averager.last_round
            say(
                epoch=self.reported,
                parameters=fingerprint(self),
                group=[] if last_round is None else sorted(map(str, last_round.peers)),
                peers=self.trainer.strategy.num_peers,
            )
            self.trainer.should_stop = self.reported >= epochs

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Classifier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--initial-peers", default=None)
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    pl = importlib.import_module(args.package)
    logging.getLogger(args.package).setLevel(logging.WARNING)

    strategy = HivemindStrategy(
        target_batch_size=512,
        run_id="digits",
        initial_peers=args.initial_peers,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        averaging_timeout=60.0,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )
    say(address=str(strategy.dht.get_visible_maddrs()[0]), peer_id=str(strategy.dht.peer_id))
    say(ready=True)
    assert sys.stdin.readline() == "go\n"

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    model = make_classifier(pl, args.epochs)
    trainer.fit(model, DataLoader(TensorDataset(images[:TRAINING], labels[:TRAINING]), batch_size=32, shuffle=True))
    trainer.limit_val_batches = 1.0
    trainer.validate(
        model, DataLoader(TensorDataset(images[TRAINING:], labels[TRAINING:]), batch_size=297), verbose=False
    )
    say(done=True)


if __name__ == "__main__":
    main()
