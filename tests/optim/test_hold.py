"""A lone peer waits for those that download its state: as long as it has time to, on a clock that the test moves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import ShoalError
from shoal.guard import budget as hold_module
from shoal.optim.state_averager import TrainingStateAverager
from tests.optim.conftest import PATIENCE, Trainer, in_parallel, meet, wait_until

pytestmark = pytest.mark.once


@pytest.fixture
def on_the_way(monkeypatch) -> set[str]:
    """Who is said to download the state. As long as there is anybody, lone peers wait."""
    monkeypatch.setattr(hold_module, "LONGEST_HOLD", 1e6)
    names: set[str] = set()
    monkeypatch.setattr(TrainingStateAverager, "newcomers", lambda self: set(names))
    return names


def alone(make_trainers) -> Trainer:
    """A peer each of whose batches is an epoch, and which has looked for others."""
    (trainer,) = make_trainers(1, target=8)
    trainer.step()
    wait_until(lambda: trainer.opt.tracker.is_introduced, "the peer has looked for others")
    trainer.step()
    return trainer


def test_a_lone_peer_ends_no_epoch_while_somebody_is_on_the_way(make_trainers, on_the_way, caplog):
    trainer = alone(make_trainers)
    epoch = trainer.opt.local_epoch
    on_the_way.add("newcomer")
    with caplog.at_level(logging.INFO, "shoal.optim"), ThreadPoolExecutor(1) as pool:
        step = pool.submit(trainer.step)
        wait_until(lambda: "waits for a newcomer that downloads its state" in caplog.text, "it waits")
        assert not step.done()
        assert trainer.opt.local_epoch == epoch
        on_the_way.clear()
        step.result(PATIENCE)
    assert trainer.opt.local_epoch == epoch + 1


def test_a_peer_in_company_does_not_wait(make_trainers, on_the_way):
    trainers = make_trainers(2, target=16)
    meet(*trainers)
    on_the_way.add("newcomer")
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))


def test_shutdown_ends_the_wait(make_trainers, on_the_way, caplog):
    trainer = alone(make_trainers)
    on_the_way.add("newcomer")
    with caplog.at_level(logging.INFO, "shoal.optim"), ThreadPoolExecutor(1) as pool:
        step = pool.submit(trainer.step)
        wait_until(lambda: "waits for a newcomer that downloads its state" in caplog.text, "it waits")
        trainer.opt.shutdown()
        assert step.exception(PATIENCE) is None or isinstance(step.exception(), ShoalError)
