"""A peer that trains a classifier of digits with Lightning, in a process of its own; prints events as JSON lines."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal.lightning

TRAINING = 1500
RATE, DECAY = 0.01, 0.995


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def fingerprint(model: nn.Module) -> str:
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def make_classifier(pl: Any, stop: threading.Event) -> Any:
    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
            self.reported = -1
            self.known_round: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.01)  # stands for the work of a larger model
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            accuracy = (self.network(batch[0]).argmax(dim=1) == batch[1]).float().mean()
            say(accuracy=accuracy.item())

        def on_train_batch_end(self, *args: Any) -> None:
            (optimizer,) = self.trainer.optimizers
            self.trainer.should_stop = stop.is_set()
            if optimizer.local_epoch == self.reported:
                return
            self.reported = optimizer.local_epoch
            last_round = optimizer.grad_averager.last_round
            is_new = last_round is not None and last_round is not self.known_round
            self.known_round = last_round
            say(
                epoch=self.reported,
                parameters=fingerprint(self),
                group=sorted(map(str, last_round.peers)) if is_new else [],
                peers=self.trainer.strategy.num_peers,
                rate=optimizer.param_groups[0]["lr"],
            )

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=RATE)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=DECAY)]

    return Classifier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--initial-peers", default=None)
    parser.add_argument("--resume", default=None, help="checkpoint to go on from")
    parser.add_argument("--save", default=None, help="where to leave a checkpoint in the end")
    args = parser.parse_args()
    pl = importlib.import_module(args.package)
    logging.getLogger(args.package).setLevel(logging.WARNING)

    strategy = shoal.lightning.HivemindStrategy(
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
    stop = threading.Event()
    threading.Thread(target=lambda: sys.stdin.readline() and stop.set(), daemon=True).start()

    from sklearn.datasets import load_digits  # it takes a second, which finding the tests need not

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.data, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    images = (images - images[:TRAINING].mean()) / images[:TRAINING].std()
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
    model = make_classifier(pl, stop)
    training = DataLoader(TensorDataset(images[:TRAINING], labels[:TRAINING]), batch_size=32, shuffle=True)
    if args.save:
        model.on_train_end = lambda: trainer.save_checkpoint(args.save)
    trainer.fit(model, training, ckpt_path=args.resume)
    trainer.limit_val_batches = 1.0
    validation = DataLoader(TensorDataset(images[TRAINING:], labels[TRAINING:]), batch_size=297)
    trainer.validate(model, validation, verbose=False)
    say(done=True)


if __name__ == "__main__":
    main()
