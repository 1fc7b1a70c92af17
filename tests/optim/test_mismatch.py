"""Optimizers that do not fit: each mistake that users make is named on both sides, and the wrong peer stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from shoal import DHT, DiLoCo, Float16Compression, NoCompression, Optimizer
from shoal.averaging import TrimmedMean
from shoal.errors import AllreduceException, SettingsMismatch
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from shoal.optim.progress import run_settings
from shoal.p2p import PeerID
from tests.optim.conftest import Trainer, backward, in_parallel, meet, wait_until


def make_model(hidden: int = 8, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Peers:
    """Makes peers of one run, each with its own options."""

    def __init__(self, make_dhts: Callable[..., list[DHT]], closing: Callable[[Any], Any]) -> None:
        self._make_dhts, self._closing = make_dhts, closing

    def make(self, model: nn.Module | None = None, kind: type = Optimizer, **options: Any) -> Trainer:
        model = make_model() if model is None else model
        [dht] = self._make_dhts(1)
        usual: dict[str, Any] = {"matchmaking_time": 2.0, "averaging_timeout": 10.0, "run_id": "digits"}
        if kind is Optimizer:
            usual |= {"target_batch_size": 64, "grad_averager": GradientAverager, "delay_state_averaging": False}
        else:
            usual |= {"sync_every": 8, "compression": NoCompression()}
        if not {"optimizer", "params"} & options.keys():
            usual["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(self._closing(kind(dht=dht, **{**usual, **options})), model)


@pytest.fixture
def peers(make_dhts, closing, monkeypatch) -> Peers:
    # A minute in the life of a run.
    monkeypatch.setattr(run_settings, "PATIENCE", 0.5)
    monkeypatch.setattr(run_settings, "LOOK_EVERY", 0.0)
    return Peers(make_dhts, closing)


def begin(trainer: Trainer) -> None:
    """Let a peer take part before the others come, and make no global step yet."""
    backward_of(trainer)
    trainer.opt.step(batch_size=8)
    wait_until(lambda: trainer.opt.tracker.is_introduced, "the first peer takes part")


def backward_of(trainer: Trainer) -> None:
    trainer.opt.zero_grad()
    inputs = torch.randn(8, 6, generator=trainer.rng)
    trainer.model(inputs).square().mean().backward()


def stops(trainer: Trainer) -> SettingsMismatch:
    """Step until the peer stops, with batches that do not count, so that no epoch is over."""
    caught: list[SettingsMismatch] = []

    def has_stopped() -> bool:
        try:
            backward_of(trainer)
            trainer.opt.step(batch_size=1)
        except SettingsMismatch as e:
            caught.append(e)
        return bool(caught)

    wait_until(has_stopped, "it stops")
    return caught[0]


def is_urgent(trainer: Trainer, other: Trainer) -> bool:
    """Whether a peer does not wait for others that fit."""
    return trainer.opt._company._known[other.opt.dht.peer_id.to_bytes()].is_urgent


def warns(trainer: Trainer, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Step until the peer has warned of the other one."""

    def has_warned() -> bool:
        backward_of(trainer)
        trainer.opt.step(batch_size=1)
        return any(all(word in line for word in ("does not fit this one", *words)) for line in caplog.messages)

    wait_until(has_warned, f"it warns of {words}")


OTHER_OPTIONS = {
    "target_batch_size": ({"target_batch_size": 128}, "target_batch_size is 128 here and 64 there"),
    "average_state_every": ({"average_state_every": 2}, "average_state_every is 2 here and 1 there"),
    "compression of the state": (
        {"state_averaging_compression": Float16Compression()},
        "state_averaging_compression is ",
    ),
    "compression": ({"grad_compression": Float16Compression()}, "grad_compression is "),
    "grad_averager": ({"peer_momentum": 0.9}, "grad_averager is one all-reduce, peer_momentum 0.9 here"),
    "PowerEF": (
        {"grad_averager": PowerEFGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.3)},
        "grad_averager is PowerEF of rank 1, saving 0.3 or more, "
        "repaired every 10 rounds here and one all-reduce there",
    ),
    "PowerSGD": (
        {"grad_averager": PowerSGDGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.3)},
        "grad_averager is PowerSGD of rank 1, saving 0.3 or more",
    ),
    "use_local_updates": (
        {"use_local_updates": True, "grad_averager": None},
        "this peer trains with Optimizer(use_local",
    ),
}


def test_peers_with_other_averagers_form_no_group(peers, caplog):
    low_rank = PowerEFGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.3)
    first, other = (peers.make(**options).opt.grad_averager for options in ({}, {"grad_averager": low_rank}))
    exact = peers.make().opt.grad_averager
    controls = [each.schedule_step(timeout=4.0) for each in (first, other, exact)]
    for averager, control in zip((first, other, exact), controls, strict=True):
        averager.parameters[0].grad = torch.ones_like(averager.parameters[0])
        averager.accumulate_grads_(batch_size=1)
        averager.step(control=control, wait=False)
    alike = {str(each.peer_id) for each in (first, exact)}
    assert {str(peer) for peer in controls[0].result(30)} == alike
    with pytest.raises(AllreduceException, match="phases is 'one all-reduce' there and 'PowerEF of rank 1"):
        controls[1].result(30)
    assert any("phases is 'PowerEF" in text and "there and 'one all-reduce' here" in text for text in caplog.messages)
    assert any("'one all-reduce' there and 'PowerEF" in text for text in caplog.messages)


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_another_option_is_named_on_both_sides(peers, name, caplog):
    options, told = OTHER_OPTIONS[name]
    first = peers.make()
    begin(first)
    newcomer = peers.make(**options)
    error = stops(newcomer)
    assert any(told in each for each in error.differences)
    assert error.peers == [str(first.opt.dht.peer_id)]
    warns(first, caplog, told.split(" is ")[0].removeprefix("this peer trains with "))


def test_donors_with_another_base_are_asked_even_if_that_is_known_so_that_both_users_are_told(peers, caplog):
    first = peers.make(frozen_base="one")
    begin(first)
    newcomer = peers.make(frozen_base="another")
    wait_until(lambda: newcomer.opt._company.strangers, "it has heard of the other base")
    assert not newcomer.opt.load_state_from_peers(timeout=10)
    here, there = str(newcomer.opt.dht.peer_id), str(first.opt.dht.peer_id)
    assert [text for text in caplog.messages if text.startswith(f"donor {there}") and "'one' there" in text]
    assert [text for text in caplog.messages if text.startswith(f"newcomer {here}") and "'another' there" in text]


def with_schedule(make: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    model = make_model()
    return {"model": model, "params": model.parameters(), "optimizer": torch.optim.SGD, "scheduler": make}


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (lambda o: CosineAnnealingLR(o, 200), "CosineAnnealingLR(T_max=200, eta_min=0) here and CosineAnnealingLR"),
        (lambda o: StepLR(o, 30), "StepLR(gamma=0.1, step_size=30) here and CosineAnnealingLR"),
        (None, "scheduler is none here and CosineAnnealingLR(T_max=100"),
    ],
    ids=["length", "kind", "none"],
)
def test_another_schedule_is_named_at_once(peers, theirs, told, monkeypatch):
    monkeypatch.setattr(run_settings, "PATIENCE", 1e9)
    begin(peers.make(**with_schedule(lambda o: CosineAnnealingLR(o, 100))))
    error = stops(peers.make(**with_schedule(theirs)))  # and not after a minute
    assert any(told in each for each in error.differences)


def frozen(model: nn.Module) -> nn.Module:
    model[0].bias.requires_grad_(False)
    return model


OTHER_MODELS = {
    "shape": (
        lambda: make_model(hidden=16),
        "parameter '0.weight' has the shape (16, 6) here and (8, 6) there",
    ),
    "extra": (
        lambda: nn.Sequential(*make_model(), nn.Linear(2, 2)),
        "parameter '3.weight' of shape (2, 2) is missing there",
    ),
    "frozen": (lambda: frozen(make_model()), "parameter '0.bias' is frozen here and trained there"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_is_named_by_its_parameters(peers, name, caplog):
    make, told = OTHER_MODELS[name]
    first = peers.make()
    begin(first)
    newcomer = peers.make(make())
    error = stops(newcomer)
    assert told in error.differences
    assert not is_urgent(newcomer, first), "it waits for others that fit"
    warns(first, caplog, "parameter '")


def test_parameters_in_another_order_are_named(peers, monkeypatch):
    """Nothing else shows it: they have the same shape."""
    monkeypatch.setattr(run_settings, "PATIENCE", 1e9)

    def square() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))

    begin(peers.make(square()))
    turned = square()
    error = stops(peers.make(turned, optimizer=torch.optim.SGD(list(turned.parameters())[::-1], lr=0.1)))
    assert error.differences == ["the parameters have another order: number 0 is '1.weight' here and '0.weight' there"]


def test_another_optimizer_and_other_groups_are_named(peers):
    begin(peers.make())
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    error = stops(peers.make(model, optimizer=torch.optim.Adam(groups)))
    assert error.differences == [
        "optimizer is Adam here and SGD there",
        "size of each parameter group is [2, 2] here and [4] there",
    ]


@pytest.mark.parametrize("kinds", [(Optimizer, DiLoCo), (DiLoCo, Optimizer)], ids=["DiLoCo comes", "Optimizer comes"])
def test_the_other_kind_of_optimizer_is_named(peers, kinds, caplog):
    first, newcomer = (peers.make(kind=kind) for kind in kinds)
    begin(first)
    here, there = kinds[1].__name__, kinds[0].__name__
    assert stops(newcomer).differences == [f"this peer trains with {here}, and that one with {there}"]
    assert not is_urgent(newcomer, first)
    warns(first, caplog, f"this peer trains with {there}, and that one with {here}")
    assert "shares a training state" not in caplog.text


OTHER_OUTER_OPTIONS = {
    "sync_every": ({"sync_every": 16}, "sync_every is 16 here and 8 there"),
    "compression": ({"compression": Float16Compression()}, "compression is "),
    "weighting": ({"weighting": "samples"}, "weighting is samples here and batch there"),
    "aggregation": ({"aggregation": TrimmedMean(0.3)}, "aggregation is "),
    "frozen_base": ({"frozen_base": "another"}, "frozen base is another here and not set there"),
    "outer_optimizer": (
        {"outer_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5)},
        "outer_optimizer is SGD(lr=0.5, ",
    ),
    "target_batch_size": ({"sync_every": None, "target_batch_size": 640}, "target_batch_size is 640 here and None"),
    "model": ({"model": make_model(16)}, "parameter number 0 has the shape (16, 6) here and (8, 6) there"),
}


@pytest.mark.parametrize("name", OTHER_OUTER_OPTIONS)
def test_other_options_of_diloco_are_named_on_both_sides(peers, name, caplog):
    options, told = OTHER_OUTER_OPTIONS[name]
    first = peers.make(kind=DiLoCo)
    begin(first)
    error = stops(peers.make(kind=DiLoCo, **options))
    assert any(told in each for each in error.differences), error.differences
    warns(first, caplog, told.split(" is ")[0].split(" has ")[0])


def test_of_two_that_begin_together_at_least_one_stops(peers):
    """Both do if each finds the other there, and nothing tells which of them is wrong."""
    pair, errors = [peers.make(), peers.make(target_batch_size=128)], list[SettingsMismatch]()

    def train(trainer: Trainer) -> None:
        def is_over() -> bool:
            try:
                backward_of(trainer)
                trainer.opt.step(batch_size=1)
            except SettingsMismatch as e:
                errors.append(e)
            return bool(errors)

        wait_until(is_over, "one of them stops")

    in_parallel(*(lambda t=t: train(t) for t in pair))
    told = ["target_batch_size is 64 here and 128 there"], ["target_batch_size is 128 here and 64 there"]
    assert all(error.differences in told for error in errors)


def test_a_run_goes_on_when_a_wrong_peer_comes(peers, caplog):
    run = [peers.make(), peers.make()]
    meet(*run)
    wrong = peers.make(make_model(hidden=16))
    assert "'0.weight'" in stops(wrong).differences[0]
    in_parallel(*(lambda t=t: t.train_until(2) for t in run))
    assert all(len(each.opt.grad_averager.last_round.peers) == 2 for each in run)
    lines = [line for line in caplog.messages if "does not fit this one" in line]
    assert len(lines) <= len(run), "one each"


def test_a_peer_with_another_model_waits_without_downloads_and_false_alarms(peers, monkeypatch, caplog):
    """Both have made steps of their own, so without their settings they would look like two sides of one run."""
    first = peers.make()
    begin(first)
    first.train_until(3)
    wrong = peers.make(make_model(hidden=16))
    monkeypatch.setattr(run_settings, "PATIENCE", 1e9)
    wrong.train_until(3)

    def has_warned() -> bool:
        wrong.step()
        return "peer that fits this one" in caplog.text

    wait_until(has_warned, "it says that it waits")
    donors = [PeerID(peer) for peer in wrong.opt.tracker.board.strangers]
    assert donors == [first.opt.dht.peer_id]
    assert wrong.opt.tracker.rank_donors(donors) == {}
    for _ in range(5):
        wrong.step()
    assert "come apart" not in caplog.text
    assert caplog.text.count("is refused: ") <= 1, "at most one, before the settings were known"
    assert caplog.text.count("peer that fits this one") == 1


def test_with_warn_a_peer_continues(peers, caplog):
    begin(peers.make())
    other = peers.make(make_model(hidden=16), on_mismatch="warn")
    other.train_until(2)
    wait_until(lambda: (other.step(), "on_mismatch is 'warn'" in caplog.text)[1], "it says that it continues")


def test_an_auxiliary_needs_no_options_of_training(peers):
    first = peers.make()
    helper = peers.make(auxiliary=True, target_batch_size=1)
    begin(first)
    for _ in range(20):
        helper.opt.step()
    board = first.opt.tracker.board
    assert not board.strangers


def test_batches_are_made_by_the_usual_loop(peers):
    """The helpers above are no special case: two peers that fit train together."""
    run = [peers.make(), peers.make()]
    meet(*run)
    for trainer in run:
        backward(trainer.model, torch.randn(8, 6))
    in_parallel(*(lambda t=t: t.train_until(2) for t in run))
    assert all(len(each.opt.grad_averager.last_round.peers) == 2 for each in run)
