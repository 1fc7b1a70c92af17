"""What a strategy says, and when, to those who use it wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shoal.errors import BootstrapError
from tests.lightning.models import (
    adam_with_decay,
    data,
    make_model,
    make_trainer,
    misconfiguration,
    sgd,
    warned_of,
)

pytestmark = [pytest.mark.devices, pytest.mark.lightning]

Make = Callable[..., Any]
"""Makes strategies."""


def test_two_optimizers(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    model = make_model(pl, lambda module: [sgd(module), sgd(module)])
    model.automatic_optimization = False
    with pytest.raises(misconfiguration(), match="Hivemind only supports training with one optimizer"):
        make_trainer(pl, tmp_path, strategy=make()).fit(model, data())


def test_nothing_to_train(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    for configure in (lambda module: None, lambda module: sgd(module.requires_grad_(False))):
        with pytest.raises(misconfiguration(), match="no parameter that requires gradients"):
            make_trainer(pl, tmp_path, strategy=make()).fit(make_model(pl, configure), data())


@pytest.mark.parametrize("name", ["averaging_timout", "batch_size_per_step"])
def test_unknown_options_are_told_at_once(make: Make, name: str) -> None:
    with mock.patch("shoal.DHT", autospec=True) as dht, pytest.raises(TypeError, match=f"'{name}'"):
        make(**{name: 3})
    assert not dht.called


def test_plateaus(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    def configure(module: nn.Module) -> dict[str, Any]:
        optimizer = sgd(module)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    with pytest.raises(ValueError, match="not supported with `HivemindStrategy`"):
        make_trainer(pl, tmp_path, strategy=make()).fit(make_model(pl, configure), data())


def test_batches_without_a_size(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    trainer = make_trainer(pl, tmp_path, strategy=make())
    with pytest.raises(misconfiguration(), match=r"HivemindStrategy\(batch_size=x\)"):
        trainer.fit(make_model(pl), torch.utils.data.DataLoader([object()], collate_fn=lambda items: items[0]))


def test_precision(make: Make, pl: ModuleType, tmp_path: Path) -> None:
    trainer = make_trainer(pl, tmp_path, strategy=make(), precision="bf16-true")
    with pytest.raises(misconfiguration(), match="does not support precision='bf16-true'"):
        trainer.fit(make_model(pl), data())


def test_other_accelerators(make: Make, pl: ModuleType) -> None:
    strategy = make()
    strategy.parallel_devices = [torch.device("mps")]  # what "auto" finds on a Mac
    strategy._configure_launcher()
    assert strategy.root_device == torch.device("mps")
    strategy.parallel_devices = [torch.device("xpu:0"), torch.device("xpu:1")]
    with pytest.raises(misconfiguration(), match="CPU or CUDA"):
        strategy._configure_launcher()


def test_peers_that_do_not_answer(make: Make) -> None:
    with pytest.raises(BootstrapError, match="/tcp/1/"):
        make(initial_peers="/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL1NwYaaoG8e88fumv1P4muPVjgmFHgNjY7ZARGwZvK29")


@pytest.mark.parametrize(
    "options",
    [
        {"delay_grad_averaging": True},
        {"delay_grad_averaging": True, "delay_optimizer_step": False, "offload_optimizer": True},
        {"delay_optimizer_step": True, "offload_optimizer": False},
        {"batch_size": 0},
        {"target_batch_size": 0},
    ],
)
def test_contradictions_are_told_at_once(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs|positive"):
        make(**options)


@pytest.mark.parametrize(("grads", "state", "step"), [(True, True, True), (False, True, False)])
def test_a_function_for_the_scheduler_is_asked_for(
    make: Make, pl: ModuleType, tmp_path: Path, grads: bool, state: bool, step: bool
) -> None:
    strategy = make(delay_grad_averaging=grads, delay_state_averaging=state, delay_optimizer_step=step)
    model = make_model(pl, adam_with_decay)
    with warned_of("requires a `scheduler_fn` to be passed to the strategy"):
        make_trainer(pl, tmp_path, strategy=strategy).fit(model, data())
    assert model.rates[-1] < 0.1, "the scheduler that there is moves the optimizer that is used"
