"""Peers that wait in different places do not wait for each other: two optimizers in one thread, and a shared pass."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.base import standby
from shoal.data import SharedPass, leases
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import Trainer, backward, check_identical, in_parallel, make_model, meet, sgd, values

PATIENCE = 30.0
"""For so long peers wait for each other in a round."""

Pair = tuple[Trainer, Trainer]


@pytest.fixture
def make_pairs(make_dhts, closing) -> Callable[..., list[Pair]]:
    """Two peers with two optimizers each, which know each other."""

    def make(target: int, **options: Any) -> list[Pair]:
        def trainer(dht, run_id: str) -> Trainer:
            model = make_model()
            given: dict[str, Any] = {"optimizer": sgd(model.parameters())}
            if options.get("offload_optimizer"):
                given = {"optimizer": sgd, "params": model.parameters()}
            patience = {"matchmaking_time": PATIENCE, "averaging_timeout": 2 * PATIENCE}
            opt = Optimizer(dht=dht, run_id=run_id, target_batch_size=target, **{**patience, **given, **options})
            return Trainer(closing(opt), model)

        pairs = [(trainer(dht, "first"), trainer(dht, "second")) for dht in make_dhts(2)]
        for each in zip(*pairs, strict=True):
            meet(*each)
        return pairs

    return make


def step(trainer: Trainer, batch_size: int = 8) -> None:
    """Epochs end by count here: the speed of so few batches says nothing."""
    with trainer.opt.tracker.performance_ema.pause():
        trainer.batch_size = batch_size
        trainer.step()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"delay_state_averaging": False},
    {"average_state_every": 3},
    {"offload_optimizer": True},
    {"grad_averager": GradientAverager.get_factory()},
    {"grad_averager": PowerSGDGradientAverager.get_factory(averager_rank=1)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "default")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-second", "second-first"])
def test_peers_waiting_in_different_optimizers_meet(make_pairs, order, options, caplog):
    pairs = make_pairs(32, **options)
    began, fresh = time.monotonic(), values(make_model())

    def train(pair: Pair, first: int) -> None:
        for trainer in pair:
            trainer.opt.thread = threading.current_thread()  # as if it had made its first batch here
        waits, stands_by = pair[first], pair[1 - first]
        step(waits, 32)  # these complete the epoch
        assert torch.equal(values(stands_by.model), fresh), "a model changes only in its own steps"
        step(stands_by)

    in_parallel(*(lambda p=pair, f=first: train(p, f) for pair, first in zip(pairs, order, strict=True)))
    assert time.monotonic() - began < PATIENCE / 2
    for trainers in zip(*pairs, strict=True):
        assert [trainer.opt.local_epoch for trainer in trainers] == [1, 1]
        weights = [sum(trainer.opt.grad_averager.last_round.weights) for trainer in trainers]
        # The batch of a step that has found the round done counts in the next epoch.
        left = sum(trainer.opt.grad_averager.local_samples_accumulated for trainer in trainers)
        assert [weight + left for weight in weights] == 2 * [2 * 8 + 32 + 8], "all samples count, and once"
        check_identical(trainers)
        assert not torch.equal(values(trainers[0].model), fresh)
    if options.get("delay_state_averaging", True):
        assert not caplog.text, "nothing fails"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["same order", "other order"])
def test_two_networks_in_turn_lose_no_round(make_pairs, order, caplog):
    pairs = make_pairs(96)
    began, warnings = time.monotonic(), []

    def train(pair: Pair, first: int) -> None:
        pause = threading.Event()
        while min(trainer.opt.local_epoch for trainer in pair) < 6:
            for trainer in (pair[first], pair[1 - first]):
                trainer.step()
                pause.wait(0.01)
        warnings.append([record for record in caplog.records if record.levelno >= logging.WARNING])
        for trainer in pair:
            trainer.opt.shutdown()  # the other peer may have begun a round that this one does not need

    in_parallel(*(lambda p=pair, f=first: train(p, f) for pair, first in zip(pairs, order, strict=True)))
    assert time.monotonic() - began < PATIENCE
    assert not warnings[0]


def test_optimizers_in_own_threads_lose_no_time(make_pairs, caplog):
    pairs = make_pairs(96)
    began = time.monotonic()
    in_parallel(*(lambda t=trainer: t.train_until(5) for pair in pairs for trainer in pair))
    assert time.monotonic() - began < PATIENCE
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_optimizer_of_another_thread_is_skipped(make_pairs):
    ((waits, other), _) = make_pairs(1000)
    waits.step()
    other.opt._begin_round_if_awaited = lambda: pytest.fail("it belongs to another thread")
    in_parallel(other.step)
    with standby.standing_by(waits.opt):
        other.opt.begin_round_if_awaited(threading.current_thread())


def test_errors_are_raised_in_the_optimizers_thread(make_pairs):
    ((waits, other), _) = make_pairs(1000)
    waits.step(), other.step()
    has_failed = threading.Event()

    def fail() -> None:
        has_failed.set()
        raise RuntimeError("out of memory")

    other.opt._begin_round_if_awaited = fail
    with pytest.raises(RuntimeError, match="out of memory"), standby.standing_by(waits.opt):
        assert has_failed.wait(PATIENCE)


def test_waiting_for_a_lease_blocks_no_round(make_trainers, closing, monkeypatch, caplog):
    """At the end of a pass the last chunks are with others, and these need this peer in order to finish them."""
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.05)
    trainers = make_trainers(2, target=64, matchmaking_time=PATIENCE, averaging_timeout=2 * PATIENCE)
    data = torch.randn(800, 6)
    passes = [closing(SharedPass(data, trainer.opt.dht, "run", batch_size=8, chunk=80)) for trainer in trainers]
    meet(*trainers)
    began = time.monotonic()

    def train(trainer: Trainer, shared: SharedPass, pace: float) -> None:
        pause = threading.Event()
        for _ in range(2):
            for batch in shared.loader():
                trainer.opt.zero_grad()
                backward(trainer.model, batch)
                trainer.opt.step(batch_size=len(batch))
                pause.wait(pace)

    in_parallel(*(lambda a=each: train(*a) for each in zip(trainers, passes, (0.01, 0.03), strict=True)))
    assert time.monotonic() - began < PATIENCE
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_extra_step_keeps_the_gradients(make_trainers):
    """A program may add up the gradients of several batches by itself, and draw the next one meanwhile."""
    (trainer,) = make_trainers(1, target=1000)
    trainer.step()
    trainer.opt.zero_grad()
    backward(trainer.model, torch.ones(8, 6))
    before = [parameter.grad.clone() for parameter in trainer.model.parameters()]
    trainer.opt._is_awaited = lambda: True
    trainer.opt.step = lambda batch_size: [parameter.grad for parameter in trainer.model.parameters()]
    trainer.opt.step_if_awaited()
    after = [parameter.grad for parameter in trainer.model.parameters()]
    assert all(map(torch.equal, before, after))
