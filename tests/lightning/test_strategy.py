"""One peer with the strategy: what the Trainer sees, and that training is what it is without the strategy."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shoal.lightning
from shoal.access.tokens import Token
from shoal.errors import BootstrapError
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.progress.records import PerformanceEMA
from shoal.optim.report import Reporting
from tests.device import DEVICE_TYPE
from tests.lightning.models import (
    BATCH,
    LOOPBACK,
    PACKAGE,
    STEP,
    adam_with_decay,
    data,
    import_lightning,
    make_model,
    make_trainer,
    misconfiguration,
    sgd,
    warned_of,
)

pytestmark = pytest.mark.lightning

Make = Callable[..., Any]
DECAY = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


@pytest.fixture
def by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer without speed: steps are made when the samples are there, not when by the clock they should be."""
    monkeypatch.setattr(PerformanceEMA, "update", lambda *args, **kwargs: 0.0)


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# --- training is the same ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_count")
@pytest.mark.parametrize(
    ("options", "trainer_options", "accumulate"),
    [
        ({}, {}, 2),
        ({}, {"gradient_clip_val": 0.05}, 2),
        ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 2),
        ({"reuse_grad_buffers": True}, {}, 2),
        ({"offload_optimizer": True, "scheduler_fn": DECAY}, {"gradient_clip_val": 0.05}, 2),
        ({"target_batch_size": 2 * STEP}, {"accumulate_grad_batches": 2}, 4),
        ({"target_batch_size": 2 * STEP, "reuse_grad_buffers": True}, {"accumulate_grad_batches": 2}, 4),
        ({"delay_state_averaging": True, "scheduler_fn": DECAY}, {}, 2),
        ({"batch_size": BATCH}, {"precision": "bf16-mixed"}, 2),
    ],
)
def test_as_without_the_strategy(
    make: Make,
    pl: ModuleType,
    tmp_path: Path,
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    accumulate: int,
) -> None:
    """A step of the swarm is a step over as many accumulated batches, with the same learning rates."""

    def by_step(module: nn.Module) -> Any:
        optimizers, schedulers = adam_with_decay(module)
        return optimizers, [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]

    usual = make_model(pl, by_step)
    make_trainer(pl, tmp_path, **{**trainer_options, "accumulate_grad_batches": accumulate}).fit(usual, data())
    model, strategy = make_model(pl, adam_with_decay), make(**options)
    make_trainer(pl, tmp_path, **trainer_options, strategy=strategy).fit(model, data())
    assert model.epochs[-1] == 8 // accumulate
    torch.testing.assert_close(weights(model), weights(usual), rtol=1e-5, atol=1e-7)
    assert model.rates[-1] == pytest.approx(0.1 * 0.5 ** model.epochs[-1])
    assert not torch.equal(weights(model), weights(make_model(pl)))
    assert not strategy.dht.is_alive(), "the end of training is the end of this peer"


@pytest.mark.usefixtures("by_count")
@pytest.mark.parametrize("reuse_grad_buffers", [False, True])
def test_half_precision_with_a_scaler(make: Make, pl: ModuleType, tmp_path: Path, reuse_grad_buffers: bool) -> None:
    """On the CPU; with CUDA, precision="16-mixed" makes the same plugin."""
    plugin_class = import_lightning(f"{PACKAGE}.plugins").MixedPrecision
    models = []
    strategy = make(reuse_grad_buffers=reuse_grad_buffers)
    for options in ({"accumulate_grad_batches": 2}, {"strategy": strategy}):
        plugin = plugin_class("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
        models.append(make_model(pl))
        make_trainer(pl, tmp_path, plugins=[plugin], gradient_clip_val=0.5, **options).fit(models[-1], data())
    assert isinstance(plugin.scaler, shoal.GradScaler)
    assert plugin.scaler.get_scale() == 64
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-3, atol=1e-4)
    assert models[1].epochs[-1] == 4


@pytest.mark.usefixtures("by_count")
def test_everything_in_the_background(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    strategy = make(
        delay_optimizer_step=True,
        delay_grad_averaging=True,
        delay_state_averaging=True,
        offload_optimizer=True,
        scheduler_fn=DECAY,
    )
    model = make_model(pl)
    make_trainer(pl, tmp_path, strategy=strategy).fit(model, data(batches=12))
    assert model.epochs[-1] == 6
    assert not torch.equal(weights(model), weights(make_model(pl)))


@pytest.mark.usefixtures("by_count")
def test_uneven_batches_are_counted_one_by_one(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl)
    loader = torch.utils.data.DataLoader(data().dataset, batch_size=12)  # 12, 12, 8 samples
    make_trainer(pl, tmp_path, strategy=make(target_batch_size=32)).fit(model, loader)
    assert model.epochs == [0, 0, 1]


@pytest.mark.usefixtures("by_count")
@pytest.mark.parametrize(
    ("options", "trainer_options", "epochs"),
    [
        ({}, {}, [0, 0, 0, 1, 1, 1, 1, 2]),
        ({"batch_size": BATCH, "reuse_grad_buffers": True}, {}, [0, 0, 0, 1, 1, 1, 1, 2]),
        ({}, {"accumulate_grad_batches": 2}, [0, 0, 0, 1, 1, 1, 1, 2]),
    ],
)
def test_batches_without_a_loss_do_not_count(
    make: Make, pl: ModuleType, tmp_path: Path, options: dict[str, Any], trainer_options: dict[str, Any], epochs: list
) -> None:
    """``training_step`` may return None to leave a batch out; its samples have no gradients."""
    model, with_loss = make_model(pl), iter([True, False, False, True] * 2)
    compute = model.training_step
    model.training_step = lambda batch, batch_idx: compute(batch, batch_idx) if next(with_loss) else None
    make_trainer(pl, tmp_path, strategy=make(**options), **trainer_options).fit(model, data())
    assert model.epochs == epochs


@pytest.mark.usefixtures("by_count")
def test_several_steps_in_one_batch(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    """Manual optimization: each step counts the whole batch."""
    model = make_model(pl)
    model.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = model.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            model.manual_backward(nn.functional.mse_loss(model.layer(batch[0]), batch[1]))
            optimizer.step()

    model.training_step = training_step
    make_trainer(pl, tmp_path, strategy=make(), max_steps=6).fit(model, data())
    assert model.epochs == [1, 2, 3]


# --- what the Trainer sees --------------------------------------------------------------------------------------------


def test_optimizer_and_schedulers_while_training(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    strategy = make()
    seen: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen["optimizer"] = trainer.optimizers[0]
            seen["schedulers"] = [config.scheduler for config in trainer.lr_scheduler_configs]
            seen["metrics"] = dict(trainer.callback_metrics)
            seen["bar"] = dict(trainer.progress_bar_metrics)

    monitor = pl.callbacks.LearningRateMonitor()
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = make_trainer(
        pl, tmp_path, strategy=strategy, callbacks=[Look(), monitor], logger=logger, log_every_n_steps=1
    )
    assert trainer.strategy is strategy
    assert strategy.num_peers == 1
    trainer.fit(make_model(pl, adam_with_decay), data())
    assert isinstance(seen["optimizer"], shoal.Optimizer)
    (scheduler,) = seen["schedulers"]
    assert isinstance(scheduler, shoal.lightning.HiveMindScheduler)
    assert scheduler.last_epoch == 4
    assert scheduler.get_last_lr() == [pytest.approx(0.1 * 0.5**4)]
    assert scheduler.base_lrs == [0.1]
    for metrics in (seen["metrics"], seen["bar"]):
        assert metrics["peers"] == 1
        assert metrics["global_epoch"] == 4
        assert metrics["samples/s"] > 0
    columns = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"peers", "global_epoch", "samples/s", "lr-Adam"} <= set(columns)


def test_losses_are_reported_to_those_who_watch(
    pl: ModuleType, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    losses: list[float] = []
    monkeypatch.setattr(Reporting, "is_due", property(lambda self: True))
    monkeypatch.setattr(Reporting, "report", lambda self, figures, last: told.append(float(figures["loss"])))

    class Look(pl.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    trainer = make_trainer(pl, tmp_path, strategy=make(2 * STEP), callbacks=[Look()], accumulate_grad_batches=2)
    trainer.fit(make_model(pl), data())
    assert len(told) == 8
    assert told == pytest.approx(losses), "as the module has returned them"


@pytest.mark.usefixtures("by_count")
def test_validating_in_between_and_again_afterwards(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl)
    trainer = make_trainer(pl, tmp_path, strategy=make(), val_check_interval=3, max_epochs=2)
    trainer.fit(model, data(), data())
    assert model.epochs[-1] == 8
    (result,) = trainer.test(model, data(), verbose=False)
    assert result["val_loss"] > 0
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data())
    assert model.epochs[-1] == 4, "a run that begins anew"


def test_early_stopping_and_checkpoints(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    stop = pl.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9, check_on_train_epoch_end=True)
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, filename="{global_epoch:.0f}")
    trainer = make_trainer(
        pl, tmp_path, strategy=make(), max_epochs=9, callbacks=[stop, keep], enable_checkpointing=True
    )
    trainer.fit(make_model(pl), data())
    assert trainer.current_epoch == 2
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.usefixtures("by_count")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload_optimizer": True, "scheduler_fn": DECAY},
        {"offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True, "scheduler_fn": DECAY},
    ],
)
def test_resume(make: Make, pl: ModuleType, tmp_path: Path, options: dict[str, Any]) -> None:
    """Two epochs of the Trainer, the second one after a restart from a checkpoint, are as two in a row."""
    whole, first, second = (make_model(pl, adam_with_decay) for _ in range(3))
    make_trainer(pl, tmp_path, strategy=make(**options), max_epochs=2).fit(whole, data())
    trainer = make_trainer(pl, tmp_path, strategy=make(**options))
    path = tmp_path / "between.ckpt"
    first.on_train_epoch_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(first, data())
    make_trainer(pl, tmp_path, strategy=make(**options), max_epochs=2).fit(second, data(), ckpt_path=path)
    assert first.epochs[-1] == 4
    assert second.epochs[-1] == whole.epochs[-1] == 8
    assert second.rates[-1] == pytest.approx(0.1 * 0.5**8)
    if not options.get("delay_grad_averaging"):
        assert second.rates == pytest.approx(whole.rates[8:])
        torch.testing.assert_close(weights(second), weights(whole), rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("by_count")
def test_plain_checkpoints_do_not_bring_their_schedule(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    """It has counted batches. If its step were taken for that of the swarm, learning rates would stand still."""

    def configure(module: torch.nn.Module) -> Any:
        optimizers, schedulers = adam_with_decay(module)
        return optimizers, [{"scheduler": schedulers[0], "interval": "step"}]

    plain, path = make_model(pl, configure), tmp_path / "plain.ckpt"
    trainer = make_trainer(pl, tmp_path, max_epochs=1)
    trainer.fit(plain, data())
    trainer.save_checkpoint(path)
    resumed = make_model(pl, configure)
    make_trainer(pl, tmp_path, strategy=make(), max_epochs=2).fit(resumed, data(), ckpt_path=path)
    assert resumed.epochs[-1] > 2
    assert resumed.rates == pytest.approx([0.1 * 0.5**epoch for epoch in resumed.epochs])


def test_checkpoint_of_the_strategy_goes_on_without_it(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    trainer = make_trainer(pl, tmp_path, strategy=make())
    path = tmp_path / "from_swarm.ckpt"
    model = make_model(pl)
    model.on_train_epoch_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(model, data())
    other = make_model(pl)
    make_trainer(pl, tmp_path, max_epochs=1).fit(other, data(), ckpt_path=path)
    torch.testing.assert_close(weights(other), weights(model))


@pytest.mark.skipif(
    DEVICE_TYPE == "fake", reason="torch gives a model that leaves it new parameters; not those of GPUs"
)
@pytest.mark.usefixtures("by_count")
def test_the_optimizer_is_restored_after_training(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl)
    optimizer = sgd(model)
    model.configure_optimizers = lambda: optimizer
    make_trainer(pl, tmp_path, strategy=make(), gradient_clip_val=1e-9).fit(model, data())
    before = weights(model).clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (before - weights(model)).min() > 0.01, "gradients are still being clipped"


def test_a_failed_goodbye_does_not_keep_a_peer(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model, strategy = make_model(pl), make()
    original = shoal.Optimizer.shutdown

    def fail(optimizer: shoal.Optimizer) -> None:
        original(optimizer)
        raise RuntimeError("a step in the background has failed")

    with mock.patch.object(shoal.Optimizer, "shutdown", fail), pytest.raises(RuntimeError, match="in the background"):
        make_trainer(pl, tmp_path, strategy=strategy).fit(model, data(batches=1))
    assert not strategy.dht.is_alive()


# --- grad buffers -----------------------------------------------------------------------------------------------------


def test_zero_grad_is_disabled_with_reused_buffers(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl)
    original = type(model).optimizer_zero_grad
    during = []
    model.on_train_batch_end = lambda *args: during.append(model.optimizer_zero_grad)
    make_trainer(pl, tmp_path, strategy=make(reuse_grad_buffers=True)).fit(model, data())
    assert all(getattr(method, "__func__", method) is not original for method in during)
    assert model.optimizer_zero_grad.__func__ is original


def test_own_zero_grad_is_disabled_with_a_warning(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl)
    calls = []

    class Own(type(model)):
        def optimizer_zero_grad(self, *args: Any) -> None:
            calls.append(args)

    model.__class__ = Own
    trainer = make_trainer(pl, tmp_path, strategy=make(reuse_grad_buffers=True))
    with warned_of("You have overridden `optimizer_zero_grad` which will be disabled"):
        trainer.fit(model, data())
    assert not calls


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PL_INITIAL_PEERS", "INITIAL_PEERS"])
def test_peers_from_the_environment(
    make: Make, pl: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "TEST_PEERS")
    with mock.patch("shoal.DHT", autospec=True) as dht:
        strategy = make(initial_peers=["/from/argument"])
    assert strategy._initial_peers == ["TEST_PEERS"]
    assert dht.call_args.kwargs["initial_peers"] == ["TEST_PEERS"]
    assert make_trainer(pl, tmp_path, strategy=strategy).strategy is strategy
    assert shoal.lightning.HivemindStrategy.INITIAL_PEERS_ENV == "PL_INITIAL_PEERS"


def test_peers_as_text(make: Make) -> None:
    first = make()
    address = str(first.dht.get_visible_maddrs()[0])
    second = make(initial_peers=f" {address}, '{address}'\n")
    assert second._initial_peers == [address, address]
    assert second.dht.initial_peers == [address, address]


def test_lines_for_others_are_printed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", f"{PACKAGE}.utilities.rank_zero"):
        address = make().dht.address
        assert f"PL_INITIAL_PEERS={address} " in caplog.text
        assert f'initial_peers="{address}"' in caplog.text
        caplog.clear()
        make(initial_peers=[address])
        assert "PL_INITIAL_PEERS" not in caplog.text, "only the first peer of a run prints them"


def test_where_to_listen(pl: ModuleType, make: Make) -> None:
    assert make().dht.kwargs["host_maddrs"] == LOOPBACK
    with mock.patch("shoal.DHT", autospec=True) as dht:
        dht.return_value.address = "192.0.2.1:4000"
        make(host_maddrs=None)
    assert dht.call_args.kwargs["host_maddrs"] is None, "the same default as everywhere"


def test_a_start_without_options_warns_of_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert make(host_maddrs=None).dht.get_visible_maddrs()
    assert not caplog.records


@pytest.mark.usefixtures("by_count")
def test_validating_first_keeps_the_address(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    strategy, model = make(), make_model(pl)
    trainer = make_trainer(pl, tmp_path, strategy=strategy)
    before = strategy.dht
    trainer.validate(model, data(), verbose=False)
    assert before.is_alive(), "others may have been told where it is"
    trainer.fit(model, data())
    assert strategy.dht is before
    assert model.epochs[-1] == 4


def test_options_reach_the_optimizer(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    codec = shoal.Float16Compression()
    options = {
        "delay_state_averaging": True,
        "offload_optimizer": True,
        "delay_optimizer_step": True,
        "reuse_grad_buffers": True,
        "grad_compression": codec,
        "state_averaging_compression": codec,
        "scheduler_fn": DECAY,
    }
    trainer = make_trainer(pl, tmp_path, strategy=make(64, **options))
    with mock.patch("shoal.Optimizer", side_effect=EnoughError) as optimizer, pytest.raises(EnoughError):
        trainer.fit(make_model(pl), data())
    given = optimizer.call_args.kwargs
    assert given["target_batch_size"] == 64
    assert given["scheduler"] is DECAY
    assert {name: given[name] for name in options if name != "scheduler_fn"} == {
        name: value for name, value in options.items() if name != "scheduler_fn"
    }
    assert given["averager_opts"] == {"request_timeout": 1.0}


def test_by_default_gradients_are_averaged_exactly(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    averagers = []
    model = make_model(pl)
    model.on_train_batch_end = lambda *args: averagers.append(model.trainer.optimizers[0].grad_averager)
    make_trainer(pl, tmp_path, strategy=make()).fit(model, data())
    assert {type(averager) for averager in averagers} == {GradientAverager}
    assert averagers[0].get_buffers() == []
    assert averagers[0].phases == "one all-reduce"


# --- names and packages -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_count")
def test_by_name(make: Make, pl: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    importlib.reload(shoal.lightning)  # after the package of the Trainer, as users are told to import it
    monkeypatch.setenv("PL_TARGET_BATCH_SIZE", str(STEP))
    trainer = make_trainer(pl, tmp_path, strategy="hivemind")
    assert isinstance(trainer.strategy, shoal.lightning.ShoalStrategy)
    model = make_model(pl)
    trainer.fit(model, data())
    assert model.epochs[-1] == 4
    monkeypatch.setenv("PL_TARGET_BATCH_SIZE", "many")
    with pytest.raises(misconfiguration(), match="'many'"):
        make_trainer(pl, tmp_path, strategy="shoal")


def test_subclasses_are_strategies_too(pl: ModuleType, tmp_path: Path) -> None:
    class Own(shoal.lightning.HivemindStrategy):
        pass

    own = Own(STEP, host_maddrs=LOOPBACK)
    assert isinstance(own, Own)
    assert make_trainer(pl, tmp_path, strategy=own).strategy is own
    own.dht.shutdown()


def test_a_private_run(make: Make) -> None:
    secret = Token.new_run("friends")
    strategy = make(token=secret.text)
    membership = strategy.dht.p2p.membership
    assert membership is not None
    assert membership.token.run == secret.run
    [address, *_] = map(str, strategy.dht.get_visible_maddrs())
    with pytest.raises(BootstrapError, match="private run, and this peer has no token"):
        make(initial_peers=[address])
