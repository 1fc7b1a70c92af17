"""What peers have in common although nothing averages it: noticed when it is not so, and told once."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from shoal.optim.consistency import ConsistencyCheck, OtherTensors, owners_of
from shoal.p2p import PeerID
from tests.optim.conftest import Trainer, in_parallel, meet, sgd

pytestmark = pytest.mark.devices

ME, OTHER, THIRD = (PeerID(b"\x00$\x08\x01\x12 " + bytes([number]) * 32) for number in range(3))
LAMBDA = "Pass the schedule as scheduler="


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="shoal")


def told(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """Warnings that have all of these words."""
    return [text for text in caplog.messages if all(word in text for word in words)]


class Whole(nn.Module):
    """What the optimizer has, statistics of batches, a part that somebody else trains, and one that is frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.known = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head, self.base = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("made_anew", torch.rand(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.base(self.head(self.known(self.norm(batch))))


class Parts(nn.Module):
    """Shows trainers only the known part of a model."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.whole(batch)

    def parameters(self, recurse: bool = True) -> Any:
        return self.whole.known.parameters()


@pytest.fixture
def make_whole(make_trainers, monkeypatch):
    """Trainers of models that have more than their optimizers know."""

    def make(seeds: tuple[int, ...] = (1, 2), gives_model: bool = False, **options: Any) -> list[Trainer]:
        wholes = [Whole(seed) for seed in seeds]
        left = iter(wholes)
        monkeypatch.setattr("tests.optim.conftest.make_model", lambda _: Parts(next(left)))
        if gives_model:
            models = iter(wholes)
            monkeypatch.setattr("tests.optim.conftest.Optimizer", lambda **given: original(**given, model=next(models)))
        return make_trainers(len(seeds), **options)

    import tests.optim.conftest

    original = tests.optim.conftest.Optimizer
    return make


def train_together(trainers: list[Trainer], epochs: int = 2) -> None:
    meet(*trainers)
    in_parallel(*(lambda t=trainer: t.train_until(epochs) for trainer in trainers))
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
    in_parallel(*(trainer.opt.shutdown for trainer in trainers))  # they may be in a group already


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_what_no_optimizer_has_is_found_and_compared(make_whole, caplog, offload):
    trainers = make_whole(offload=offload)
    train_together(trainers)
    for beginning, *words in (
        ("parameters that", "2, such as whole.head.weight, whole.head.bias", "model="),
        (
            "frozen parameters that",
            "2, such as whole.base.weight, whole.base.bias",
            "Load the same weights in all peers",
        ),
        ("buffers that", "2, such as whole.norm.running_mean, whole.norm.running_var", "model="),
    ):
        found = [text for text in told(caplog, *words) if text.startswith(beginning)]
        assert len(found) == 2, f"each peer tells it once: {caplog.messages}"
    assert len(caplog.messages) == 6


def test_same_weights_are_fine(make_whole, caplog):
    train_together(make_whole(seeds=(1, 1)))
    assert len(told(caplog, "buffers that")) == 2
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"use_local_updates": True}], ids=str)
def test_a_model_that_is_given_is_brought_together(make_whole, caplog, options):
    trainers = make_whole(gives_model=True, delay_state_averaging=False, **options)
    first, second = (trainer.model.whole for trainer in trainers)
    assert not torch.equal(first.head.weight, second.head.weight)
    train_together(trainers)
    assert torch.equal(first.head.weight, second.head.weight)
    assert torch.equal(first.norm.running_mean, second.norm.running_mean)
    assert first.norm.running_mean.any(), "it is the mean of something"
    assert not torch.equal(first.base.weight, second.base.weight), "a frozen part may be large: it does not travel"
    is_compared = not options.get("use_local_updates")
    assert len(told(caplog, "frozen parameters", "Load the same weights in all peers")) == 2 * is_compared
    assert len(caplog.messages) == 2 * is_compared


def test_newcomers_get_the_whole_model(make_whole, make_dhts, closing):
    (trainer,) = make_whole(seeds=(1,), gives_model=True, target=8)
    trainer.opt.tracker.report_local_progress(0, 1)
    trainer.train_until(2, pace=0)
    from shoal.optim import Optimizer

    (dht,) = make_dhts(1)
    newcomer = Whole(2)
    opt = closing(
        Optimizer(
            dht=dht, run_id="run", target_batch_size=8, optimizer=sgd(newcomer.known.parameters()), model=newcomer
        )
    )
    assert opt.load_state_from_peers()
    assert torch.equal(newcomer.head.weight, trainer.model.whole.head.weight)
    assert torch.equal(newcomer.norm.running_var, trainer.model.whole.norm.running_var)


def test_remainder():
    whole = Whole(1)
    shared = nn.ModuleList([whole, whole.head])
    remainder = OtherTensors.of([shared], list(whole.known.parameters()))
    assert [name for name, _ in remainder.trained] == ["0.head.weight", "0.head.bias"]
    assert [name for name, _ in remainder.frozen] == ["0.base.weight", "0.base.bias"]
    assert [name for name, _ in remainder.buffers] == ["0.norm.running_mean", "0.norm.running_var"]
    found = OtherTensors.find(None, list(whole.known.parameters()), [whole.head.bias])
    assert [name for name, _ in found.trained] == ["0.head.weight"], "what is part of something else is found, too"
    assert len(found.take_what_changes()) == 3
    assert (found.trained, found.buffers) == ([], [])
    alone = nn.Parameter(torch.zeros(1))
    assert OtherTensors.find(None, [alone], []) == OtherTensors()


def test_the_search_for_modules_disturbs_no_thread():
    """Where a thread makes a tuple, nobody else may hold it before it is complete."""
    whole, errors, ends = Whole(1), list[SystemError](), threading.Event()

    def numbers():
        for number in range(20):
            time.sleep(0)  # lets other threads run
            yield number

    def make_tuples() -> None:
        while not ends.is_set():
            try:
                assert len(tuple(numbers())) == 20
            except SystemError as e:
                errors.append(e)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make_tuples)
        for _ in range(40):
            owners, _ = owners_of(list(whole.parameters()), None)
            assert len(owners) == 4
        ends.set()
        made.result(60)
    assert not errors


# --- learning rates ---------------------------------------------------------------------------------------------------


def around(trainer: Trainer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(trainer.opt, lambda count: 0.9**count)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_a_schedule_that_counts_batches_is_noticed(make_trainers, caplog, offload):
    (trainer,) = make_trainers(1, target=10**6, offload=offload)
    schedule = around(trainer)
    for _ in range(4):
        trainer.step()
        schedule.step()
    (text,) = told(caplog, "the learning rate has changed from 0.1 to 0.09 within epoch 0", LAMBDA)
    assert caplog.messages == [text], "once"


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("by_user", [False, True], ids=["", "by the user"])
def test_a_schedule_of_epochs_is_fine(make_trainers, caplog, offload, by_user):
    options: dict[str, Any] = {"offload": offload, "delay_optimizer_step": True if offload else None}
    options["matchmaking_time"] = 3.0  # one is done first, and the other one waits for it
    if not by_user:
        options["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainers = make_trainers(2, **options)
    schedules = [around(trainer) if by_user else None for trainer in trainers]

    def train(trainer: Trainer, schedule: Any) -> None:
        while trainer.opt.local_epoch < 4:
            epoch = trainer.opt.local_epoch
            trainer.step()
            if schedule is not None and trainer.opt.local_epoch > epoch:
                schedule.step()

    meet(*trainers)
    in_parallel(*(lambda t=t, s=s: train(t, s) for t, s in zip(trainers, schedules, strict=True)))
    in_parallel(*(trainer.opt.shutdown for trainer in trainers))
    assert told(caplog, "learning rate") == []


def test_different_rates_are_noticed_at_once(make_trainers, caplog):
    trainers = make_trainers(2)
    for group in trainers[0].opt.param_groups:
        group["lr"] = 0.05
    train_together(trainers)
    for trainer, here, there in ((trainers[0], "0.05", "0.1"), (trainers[1], "0.1", "0.05")):
        other = trainers[1] if trainer is trainers[0] else trainers[0]
        words = f"in epoch 0 the learning rate is {here} here and {there} at peer {other.opt.dht.peer_id}"
        assert len(told(caplog, words, LAMBDA)) == 1
    assert len(caplog.messages) == 2


class Rates:
    """Stands for what a comparison asks of a state averager."""

    def __init__(self) -> None:
        self.local_epoch, self.rates = 0, (0, [0.1])

    def learning_rates(self) -> Any:
        return self.rates


def test_what_others_say_is_not_trusted(caplog):
    comparison = ConsistencyCheck(Rates(), OtherTensors(frozen=[("base", torch.ones(3))]), compares_rates=True)
    own = comparison.describe()
    epochs = {"epoch": 0, "stepped_epoch": 0}
    wrong = [{"rates": rates, **epochs} for rates in ("x", [None], [0.1, 0.2])]
    wrong += [{"rates": [9.0], "epoch": 0}, {"frozen": 3}, {"epoch": "1"}, {"epoch": 10**6}, {}]
    for nonsense in (None, 7, [], *wrong):
        comparison.compare({ME: own, OTHER: nonsense}, ME)
        comparison.compare({ME: nonsense, OTHER: own}, ME)  # a leader may say anything
        assert comparison.epoch_of(nonsense) == 0
    comparison.compare({ME: own, OTHER: dict(own)}, ME)
    assert caplog.messages == []
    comparison.compare({ME: own, OTHER: {**own, "rates": [0.2]}, THIRD: {**own, "rates": [0.3]}}, ME)
    comparison.compare({ME: own, OTHER: {**own, "frozen": b"x"}, THIRD: {**own, "frozen": b"y"}}, ME)
    assert [len(told(caplog, words)) for words in ("0.2 at peer", "0.3 at peer", "frozen parameters")] == [1, 0, 1]


def test_digests_follow_the_values():
    weights = torch.arange(1000.0)
    comparison = ConsistencyCheck(Rates(), OtherTensors(buffers=[("weights", weights)]), compares_rates=False)
    before = comparison.describe()
    assert comparison.describe() == before
    assert set(before) == {"trained", "frozen", "buffers", "epoch"}
    weights += 1
    assert comparison.describe() != before
    for kind in (torch.bfloat16, torch.complex64, torch.uint8):
        named = [("weights", torch.arange(6).to(kind).view(2, 3).t())]
        one, same = (ConsistencyCheck(Rates(), OtherTensors(frozen=named), compares_rates=True) for _ in range(2))
        assert one.describe() == same.describe()
