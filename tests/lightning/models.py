"""Small models and trainers for either package of Lightning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.device import DEVICE_TYPE, chosen_device

PACKAGE = os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch")
"""Or ``pytorch_lightning``: a program uses one of them, so each needs a run of its own."""
BATCH = 4
STEP = 2 * BATCH
"""Samples of a step of the swarm: two batches."""
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]

MakeOptimizers = Callable[[nn.Module], Any]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam_with_decay(module: nn.Module) -> Any:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]


def make_model(pl: ModuleType, configure: MakeOptimizers = sgd) -> Any:
    """A linear regression that remembers what happened in each batch."""

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 2)
            self.rates: list[float] = []
            self.epochs: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.layer(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.mse_loss(self.layer(x), y))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            self.rates.append(optimizer.param_groups[0]["lr"])
            self.epochs.append(getattr(optimizer, "local_epoch", -1))

        def configure_optimizers(self) -> Any:
            return configure(self)

    return Regression()


def data(batches: int = 8, batch_size: int = BATCH) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch_size, 3, generator=generator)
    y = torch.randn(batches * batch_size, 2, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def make_trainer(pl: ModuleType, folder: Any, **options: Any) -> Any:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu" if DEVICE_TYPE == "cpu" else make_accelerator(pl),
        "devices": 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**quiet, "max_epochs": 1, **options})


def make_accelerator(pl: ModuleType) -> Any:
    """What tells Lightning of the device of ``SHOAL_TEST_DEVICE``."""

    class Chosen(pl.accelerators.Accelerator):
        def setup_device(self, device: torch.device) -> None: ...

        def teardown(self) -> None: ...

        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [chosen_device()] * devices

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return DEVICE_TYPE

    return Chosen()


def import_lightning(package: str) -> ModuleType:
    """It takes seconds: so tests import it when they run, not when they are found."""
    return pytest.importorskip(package)


@contextmanager
def warned_of(text: str) -> Iterator[None]:
    """Lightning warns of other things, too, which ``pytest.warns`` would make errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(text in str(warning.message) and warning.category is UserWarning for warning in caught)


def misconfiguration() -> type[Exception]:
    """What the package that is tested raises."""
    return import_lightning(f"{PACKAGE}.utilities.exceptions").MisconfigurationException
