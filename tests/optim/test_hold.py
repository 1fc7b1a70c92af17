"""A lone peer waits for those that download its state: as long as it has time to, on a clock that the test moves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import ShoalError
from shoal.optim.recovery import joiner_grace as hold_module
from shoal.optim.recovery.joiner_grace import LEAST_HOLD, LONGEST_HOLD, SECONDS_BETWEEN_LOOKS, JoinerGrace
from shoal.optim.state_averager import TrainingStateAverager
from tests.optim.conftest import PATIENCE, Trainer, in_parallel, meet, wait_until

pytestmark = pytest.mark.once


def wait(hold: JoinerGrace, now: float, *, until: float) -> float:
    """Wait from one moment until another one, or for as long as the peer may; returns the seconds."""
    began = now
    while hold.lasts(now, has_reason=now < until):
        now += SECONDS_BETWEEN_LOOKS
    return now - began


def test_without_a_reason_there_is_no_wait():
    assert wait(JoinerGrace(0.0), 100.0, until=100.0) == 0.0


def test_it_ends_with_its_reason():
    hold = JoinerGrace(0.0)
    assert wait(hold, 10.0, until=12.0) == pytest.approx(2.0, abs=0.1)
    assert wait(hold, 20.0, until=22.0) == pytest.approx(2.0, abs=0.1), "there is time left for another newcomer"


def test_all_waits_together_take_a_twentieth_of_the_time():
    hold, now, waited = JoinerGrace(0.0), 0.0, 0.0
    assert wait(hold, now, until=1e9) == pytest.approx(LONGEST_HOLD, abs=0.1)
    now = LONGEST_HOLD
    while now < 10_000.0:
        seconds = wait(hold, now, until=1e9)
        assert seconds == 0.0 or seconds > LEAST_HOLD - 0.1, "shorter ones would be of no use"
        waited += seconds
        now += seconds + 0.08
    assert 0.04 < waited / now < 0.05


def test_what_is_saved_up_is_limited():
    hold = JoinerGrace(0.0)
    assert wait(hold, 1e6, until=1e9) == pytest.approx(LONGEST_HOLD, abs=0.1)


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
        wait_until(lambda: "waits for one that downloads its state" in caplog.text, "it waits")
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
        wait_until(lambda: "waits for one that downloads its state" in caplog.text, "it waits")
        trainer.opt.shutdown()
        assert step.exception(PATIENCE) is None or isinstance(step.exception(), ShoalError)
