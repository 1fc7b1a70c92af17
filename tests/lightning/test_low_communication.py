"""Peers that make steps of their own, with the strategy: training, validating, resuming, meeting each other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.progress.records import PerformanceEMA
from tests.lightning.models import (
    BATCH,
    PACKAGE,
    STEP,
    adam_with_decay,
    data,
    import_lightning,
    make_model,
    make_trainer,
)
from tests.optim.conftest import in_parallel
from tests.optim.diloco.test_diloco import introduce

pytestmark = pytest.mark.lightning

Make = Callable[..., Any]
"""Makes strategies."""
MEAN = functools.partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer with which a peer that is alone trains as it would without the others."""
DECAY = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def decay_by_step(module: nn.Module) -> Any:
    optimizers, schedulers = adam_with_decay(module)
    return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "trainer_options", "steps"),
    [
        ({}, {}, 8),
        ({}, {"gradient_clip_val": 0.05}, 8),
        ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 8),
        ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, 4),
        ({"batch_size": BATCH, "scheduler_fn": DECAY}, {"precision": "bf16-mixed"}, 8),
    ],
)
def test_as_without_the_strategy(
    make: Make, pl: ModuleType, tmp_path: Path, options: dict[str, Any], trainer_options: dict[str, Any], steps: int
) -> None:
    """Schedules count inner steps, and gradients are clipped in each of them."""
    usual, model = (make_model(pl, configure) for configure in (decay_by_step, adam_with_decay))
    make_trainer(pl, tmp_path, **trainer_options).fit(usual, data())
    strategy = make(None, low_communication={"sync_every": 4, "outer_optimizer": MEAN}, **options)
    make_trainer(pl, tmp_path, **trainer_options, strategy=strategy).fit(model, data())
    assert model.epochs[-1] == steps // 4
    torch.testing.assert_close(weights(model), weights(usual), rtol=1e-5, atol=1e-6)
    assert model.rates[-1] == pytest.approx(0.1 * 0.5**steps)
    assert not torch.equal(weights(model), weights(make_model(pl)))
    assert not strategy.dht.is_alive(), "the end of training is the end of this peer"


@pytest.mark.parametrize("scale", [2.0**6, 2.0**18], ids=["fits", "overflows"])
def test_half_precision_with_a_scaler(make: Make, pl: ModuleType, tmp_path: Path, scale: float) -> None:
    """Steps whose gradients overflow are skipped. On the CPU; with CUDA, precision="16-mixed" makes the same plugin."""
    plugin_class = import_lightning(f"{PACKAGE}.plugins").MixedPrecision
    low_communication = {"sync_every": 4, "outer_optimizer": MEAN}
    models, scales = [], []
    for options in ({}, {"strategy": make(None, low_communication=low_communication)}):
        plugin = plugin_class("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))
        models.append(make_model(pl))
        make_trainer(pl, tmp_path, plugins=[plugin], gradient_clip_val=0.5, **options).fit(models[-1], data())
        scales.append(plugin.scaler.get_scale())
    assert isinstance(plugin.scaler, shoal.GradScaler)
    assert scales[0] == scales[1]
    assert (scales[0] < scale) == (scale > 2.0**16)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-3, atol=1e-4)


def test_by_samples(make: Make, pl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerformanceEMA, "update", lambda *args, **kwargs: 0.0)  # slots end by the count of samples
    model = make_model(pl, adam_with_decay)
    make_trainer(pl, tmp_path, strategy=make(STEP, low_communication={})).fit(model, data())
    assert model.epochs == [0, 1, 1, 2, 2, 3, 3, 4]
    assert model.rates[:-1] == pytest.approx([0.1 * 0.5**slot for slot in (0, 0, 1, 1, 2, 2, 3)])


def test_batches_without_a_loss_are_no_steps(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model, with_loss, steps = make_model(pl), iter([True, False, False, True] * 2), []
    compute = model.training_step
    model.training_step = lambda batch, batch_idx: compute(batch, batch_idx) if next(with_loss) else None
    model.on_train_batch_end = lambda *args: steps.append(model.trainer.optimizers[0].inner_steps)
    strategy = make(None, low_communication={"sync_every": 2})
    make_trainer(pl, tmp_path, strategy=strategy).fit(model, data())
    assert steps == [1, 1, 1, 2, 3, 3, 3, 4]


def test_what_the_trainer_sees(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model, seen = make_model(pl, adam_with_decay), {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen["optimizer"] = trainer.optimizers[0]
            seen["metrics"] = dict(trainer.callback_metrics)

    strategy = make(
        None,
        matchmaking_time=7.0,
        client_mode=True,
        low_communication={"sync_every": 4, "fragments": 2, "shutdown_timeout": 3.0},
    )
    make_trainer(pl, tmp_path, strategy=strategy, callbacks=[Look()]).fit(model, data())
    assert isinstance(seen["optimizer"], shoal.DiLoCo)
    assert seen["optimizer"].options.straggler_patience == 7.0
    assert len(seen["optimizer"].outer_optimizers) == 2
    assert seen["optimizer"].client_mode
    assert not seen["optimizer"].is_alive()
    assert (seen["metrics"]["peers"], seen["metrics"]["global_epoch"]) == (1, 4)
    assert seen["metrics"]["samples/s"] > 0


# --- outer parameters -------------------------------------------------------------------------------------------------


class Watcher:
    """Notes the weights of a model at each stage of its training."""

    def __init__(self, model: Any) -> None:
        self.before, self.after, self.validated = [], [], []
        model.on_train_batch_start = lambda *args: self.before.append(weights(model))
        model.on_train_batch_end = lambda *args: self.after.append(weights(model))
        compute = model.validation_step

        def validation_step(batch: Any, batch_idx: int) -> None:
            self.validated.append(weights(model))
            compute(batch, batch_idx)

        model.validation_step = validation_step


def test_outer_parameters_are_validated_and_kept(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl)
    begin, seen = weights(model), Watcher(model)
    strategy = make(None, low_communication={"sync_every": 4, "outer_optimizer": MEAN})
    trainer = make_trainer(pl, tmp_path, strategy=strategy, val_check_interval=3)
    trainer.fit(model, data(batches=9), data(batches=1))
    first, second, third = seen.validated
    assert torch.equal(first, begin), "after three of four steps, there has been no exchange"
    for validated, exchanged in ((second, seen.after[3]), (third, seen.after[7])):
        torch.testing.assert_close(validated, exchanged)
    for before, after in zip(seen.before[1:], seen.after, strict=False):
        assert torch.equal(before, after), "validating changes nothing of what is trained"
    assert torch.equal(weights(model), third)
    assert not torch.allclose(seen.after[-1], third)
    path = tmp_path / "end.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), third)


@pytest.mark.parametrize("place", ["on_train_epoch_end", "on_validation_end"])
def test_resume(make: Make, pl: ModuleType, tmp_path: Path, place: str) -> None:
    """Two epochs of the Trainer, the second one after a restart in the middle of a slot, are as two in a row."""
    options = {"low_communication": {"sync_every": 6, "fragments": 2}, "shutdown_timeout": 3.0}
    whole, first, second = (make_model(pl, adam_with_decay) for _ in range(3))
    make_trainer(pl, tmp_path, strategy=make(None, **options), max_epochs=2).fit(whole, data(), data(batches=1))
    trainer, path = make_trainer(pl, tmp_path, strategy=make(None, **options)), tmp_path / "between.ckpt"

    def save() -> None:
        trainer.save_checkpoint(path)

    setattr(first, place, save)
    trainer.fit(first, data(), data(batches=1))
    again = make_trainer(pl, tmp_path, strategy=make(None, **options), max_epochs=2)
    again.fit(second, data(), data(batches=1), ckpt_path=path)
    assert whole.epochs == first.epochs + second.epochs[-8:]
    assert second.rates[-8:] == pytest.approx(whole.rates[8:])
    torch.testing.assert_close(weights(second), weights(whole), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("to", ["low communication", "synchronous", "without the strategy"])
def test_checkpoints_of_other_training(make: Make, pl: ModuleType, tmp_path: Path, to: str) -> None:
    """Model, optimizer and its statistics go on."""
    low = {"low_communication": {"sync_every": 4}}
    of, after = {"low communication": ((STEP, {}), (None, low))}.get(to, ((None, low), (STEP, {})))
    trainer, path = make_trainer(pl, tmp_path, strategy=make(of[0], **of[1])), tmp_path / "other.ckpt"
    first, second = make_model(pl), make_model(pl)
    first.on_train_epoch_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(first, data())
    begin, statistics = [], []

    def on_train_batch_start(*args: Any) -> None:
        begin.append(weights(second))
        statistics.extend(second.trainer.optimizers[0].state.values())

    second.on_train_batch_start = on_train_batch_start
    options = {} if to == "without the strategy" else {"strategy": make(after[0], **after[1])}
    make_trainer(pl, tmp_path, max_epochs=2, **options).fit(second, data(), ckpt_path=path)
    saved = torch.load(path, weights_only=False)
    assert torch.equal(begin[0], torch.cat([value.flatten() for value in saved["state_dict"].values()]))
    assert statistics[0]["momentum_buffer"].abs().max() > 0


# --- peers ------------------------------------------------------------------------------------------------------------


def test_two_peers_end_with_the_same_model(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    options = {"matchmaking_time": 20.0, "low_communication": {"sync_every": 4}}
    strategies = [make(None, **options)]
    strategies.append(make(None, initial_peers=list(map(str, strategies[0].dht.get_visible_maddrs())), **options))
    models, rounds, optimizers = [make_model(pl) for _ in strategies], [], []
    all_there = threading.Barrier(2, lambda: introduce(*optimizers), timeout=60)

    def train(number: int) -> None:
        model, inner = models[number], models[number].training_step

        def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
            (optimizer,) = model.trainer.optimizers
            if batch_idx == 0:
                optimizers.append(optimizer)
                all_there.wait()
            elif optimizer.last_round is not None:
                rounds.append(optimizer.last_round)
            return inner([part + number for part in batch], batch_idx)

        model.training_step = training_step
        make_trainer(pl, tmp_path, strategy=strategies[number]).fit(model, data())

    in_parallel(lambda: train(0), lambda: train(1))
    assert {len(each.peers) for each in rounds} == {2}
    assert torch.equal(weights(models[0]), weights(models[1]))
    assert not torch.equal(weights(models[0]), weights(make_model(pl)))


def test_the_guide_is_true(pl: ModuleType) -> None:
    """Its program runs, and it names every argument that keeps its place."""
    guide = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text(encoding="utf-8")
    section = guide.partition("\n## Over slow lines\n")[2].partition("\n## ")[0]
    _, program, text = section.replace("```python", "```").split("```")
    with mock.patch("shoal.DHT", autospec=True) as dht:
        dht.return_value.address = "203.0.113.7:40123"
        exec(program, {})
    for name in ("run_id", "matchmaking_time", "averaging_timeout", "averager_opts", "verbose", "batch_size"):
        assert f"`{name}`" in text


@pytest.mark.parametrize("resumes", [False, True], ids=["newcomer", "with a checkpoint"])
def test_who_comes_late_begins_where_the_others_are(make: Make, pl: ModuleType, tmp_path: Path, resumes: bool) -> None:
    """Whether it is new, or has a checkpoint of which the others know nothing any more."""
    options = {"matchmaking_time": 2.0, "low_communication": {"sync_every": 4}}
    first, late = make(None, **options), []
    models, path = [make_model(pl, adam_with_decay) for _ in range(2)], tmp_path / "early.ckpt"
    trainer = make_trainer(pl, tmp_path, strategy=first)
    notes, is_done, is_there = models[0].on_train_batch_end, threading.Event(), threading.Event()

    def on_train_batch_end(outputs: Any, batch: Any, batch_idx: int) -> None:
        notes()
        if batch_idx == 2:
            trainer.save_checkpoint(path)
        if batch_idx == 7:
            is_there.set()
            assert is_done.wait(60)

    def come() -> None:
        assert is_there.wait(60)
        late.append(make(None, initial_peers=list(map(str, first.dht.get_visible_maddrs())), **options))
        given = {"ckpt_path": path} if resumes else {}
        try:
            make_trainer(pl, tmp_path, strategy=late[0], max_steps=5 if resumes else 2).fit(models[1], data(), **given)
        finally:
            is_done.set()

    models[0].on_train_batch_end = on_train_batch_end
    in_parallel(lambda: trainer.fit(models[0], data()), come)
    assert models[0].epochs[-1] == 2
    assert models[1].epochs[0] == 2
    assert models[1].rates[0] == pytest.approx(0.1 * 0.5**8)
    torch.testing.assert_close(weights(models[1]), weights(models[0]))


# --- wrong use --------------------------------------------------------------------------------------------------------

EVERY = {"sync_every": 4}


@pytest.mark.parametrize(
    ("target", "options", "error", "text"),
    [
        (None, {}, ValueError, r"target_batch_size=None needs low_communication=\{'sync_every'"),
        (None, {"low_communication": {}}, ValueError, r"target_batch_size=None and no sync_every.*'sync_every': 50"),
        (64, {"low_communication": EVERY}, ValueError, r"target_batch_size=64 and .*\{'sync_every': 4\}.*leave"),
        (0, {"low_communication": {}}, ValueError, "target_batch_size must be positive, got 0"),
        (64, {"low_communication": 50}, TypeError, r"by name, as in .*got 50"),
        (64, {"low_communication": {"sync_evry": 5}}, TypeError, r"'sync_evry', which is no option.*sync_every"),
        (64, {"low_communication": {"dht": 5}}, TypeError, "'dht', which is no option"),
        (64, {"low_communication": {"run_id": "a"}}, ValueError, r"write HivemindStrategy\(run_id='a'\)"),
        (64, {"low_communication": {"scheduler": 5}}, ValueError, r"write HivemindStrategy\(scheduler_fn=5\)"),
        (64, {"low_communication": {"batch_size_per_step": 5}}, ValueError, r"HivemindStrategy\(batch_size=5\)"),
        (64, {"sync_every": 5}, TypeError, r"write low_communication=\{'sync_every': 5\}"),
        (None, {"low_communication": EVERY, "averaging_timout": 5}, TypeError, r"no options \['averaging_timout'\]"),
        (None, {"low_communication": EVERY, "offload_optimizer": True}, ValueError, "offload_optimizer=True is for"),
        (None, {"low_communication": EVERY, "delay_optimizer_step": True}, ValueError, "delay_optimizer_step=True is"),
        (None, {"low_communication": EVERY, "delay_grad_averaging": True}, ValueError, "delay_grad_averaging=True is"),
        (None, {"low_communication": EVERY, "delay_state_averaging": True}, ValueError, "delay_state_averaging=True"),
        (None, {"low_communication": EVERY, "reuse_grad_buffers": True}, ValueError, "reuse_grad_buffers=True is for"),
        (None, {"low_communication": EVERY, "use_local_updates": True}, ValueError, "use_local_updates=True is for"),
        (
            None,
            {"low_communication": {**EVERY, "load_state_timeout": 5}, "load_state_timeout": 6},
            ValueError,
            "load_state_timeout is given twice, as 6 and in low_communication as 5",
        ),
        (None, {"low_communication": {"sync_every": 2.5}}, TypeError, r"\{'sync_every': 2.5\}: give a whole number"),
        (None, {"low_communication": {"sync_every": 2, "fragments": 3}}, ValueError, "3 fragments do not fit"),
        (None, {"low_communication": {**EVERY, "fragment_sync_delay": 4}}, ValueError, "less than sync_every=4"),
        (None, {"low_communication": {**EVERY, "average": "all"}}, ValueError, "average must be one of"),
        (None, {"low_communication": {**EVERY, "auxiliary": True}}, ValueError, "without data, and a Trainer has some"),
    ],
)
def test_contradictions_are_told_at_once(
    make: Make, target: int | None, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with mock.patch("shoal.DHT", autospec=True) as dht, pytest.raises(error, match=text):
        make(target, **options)
    assert not dht.called
