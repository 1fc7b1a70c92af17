"""Two optimizers in one thread: peers that wait in different ones do not wait for each other."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import (
    Trainer,
    check_identical,
    in_parallel,
    make_model,
    meet,
    sgd,
    values,
)

FAR_BEYOND = 30.0
"""Seconds after which peers would give up waiting for each other. Tests end long before."""


@pytest.fixture
def make_pairs(make_dhts, closing):
    """Peers with two optimizers each, on one DHT: ``[(first, second), ...]``. All know each other."""

    def make(count: int, **options) -> list[tuple[Trainer, Trainer]]:
        pairs = []
        for index, dht in enumerate(make_dhts(count)):
            pair = []
            for name in ("first", "second"):
                model = make_model()
                given = {"optimizer": sgd(model.parameters())}
                if options.get("offload_optimizer"):
                    given = {"optimizer": sgd, "params": model.parameters()}
                patience = {"matchmaking_time": FAR_BEYOND, "averaging_timeout": 2 * FAR_BEYOND}
                opt = closing(
                    Optimizer(dht=dht, run_id=name, target_batch_size=16 * count, **{**patience, **given, **options})
                )
                pair.append(Trainer(opt, model, seed=index))
            pairs.append(tuple(pair))
        for each in zip(*pairs, strict=True):
            meet(*each)
        return pairs

    return make


def step(trainer: Trainer, batch_size: int = 8) -> None:
    """Epochs end by count here: the speed of so few batches says nothing."""
    with trainer.opt.tracker.performance_ema.pause():
        trainer.batch_size = batch_size
        trainer.step()


def complete_epoch(trainer: Trainer) -> None:
    """With this batch, all peers together have the samples of the epoch."""
    step(trainer, trainer.opt.target_batch_size)


OPTIONS = [
    {},
    {"delay_state_averaging": False},
    {"average_state_every": 3},
    {"offload_optimizer": True},
    {"grad_averager": GradientAverager.get_factory()},
    {"grad_averager": PowerSGDGradientAverager.get_factory(averager_rank=1)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "default")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-second", "second-first"])
def test_peers_that_wait_in_different_optimizers_meet_in_both(make_pairs, order, options):
    one, other = make_pairs(2, **options)
    here, there = order
    began = time.monotonic()

    def train(pair: tuple[Trainer, Trainer], index: int) -> None:
        for trainer in pair:
            trainer.opt.thread = threading.current_thread()  # as if its first batch had been made here
        complete_epoch(pair[index])
        step(pair[1 - index])

    in_parallel(lambda: train(one, here), lambda: train(other, there))
    assert time.monotonic() - began < FAR_BEYOND / 2
    for index in (0, 1):
        trainers = [one[index], other[index]]
        assert all(trainer.opt.local_epoch == 1 for trainer in trainers)
        assert all(len(trainer.opt.grad_averager.last_round.peers) == 2 for trainer in trainers)
        check_identical(trainers)
        assert not torch.equal(values(trainers[0].model), values(make_model()))
