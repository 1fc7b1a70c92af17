"""Lightning's own warnings are no business of these tests; strategies of the package that is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.foreign import allow_for
from tests.lightning.models import LOOPBACK, PACKAGE, STEP, import_lightning

FOREIGN = (
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"),
    *("torch", "jsonargparse"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_for(FOREIGN, items, Path(__file__).parent)


@pytest.fixture(scope="module")
def pl() -> ModuleType:
    return import_lightning(PACKAGE)


@pytest.fixture
def make(pl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Strategies that listen on loopback only, and are shut down in the end."""
    from shoal.lightning import HivemindStrategy  # of the package that has been imported

    for name in ("PL_INITIAL_PEERS", "INITIAL_PEERS", "PL_TARGET_BATCH_SIZE"):
        monkeypatch.delenv(name, raising=False)
    made: list[HivemindStrategy] = []

    def make(target_batch_size: int = STEP, **options: Any) -> HivemindStrategy:
        made.append(HivemindStrategy(target_batch_size, **{"host_maddrs": LOOPBACK, **options}))
        return made[-1]

    yield make
    for strategy in made:
        strategy.dht.shutdown()
