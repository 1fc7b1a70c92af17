"""``LightningCLI`` and editors see the parameters of the strategy."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.lightning.models import PACKAGE

CONFIGURATION = """
trainer:
  accelerator: cpu
  logger: false
  strategy:
    class_path: shoal.lightning.HivemindStrategy
    init_args:
      target_batch_size: 128
      run_id: from a file
      host_maddrs: [/ip4/127.0.0.1/tcp/0]
      averager_opts: {request_timeout: 2.0}
"""


def test_lightning_cli_makes_the_strategy_of_a_file(pl: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    cli = importlib.import_module(f"{PACKAGE}.cli")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIGURATION)
    model = importlib.import_module(f"{PACKAGE}.demos.boring_classes").BoringModel
    made = cli.LightningCLI(model, args=["--config", str(config)], run=False)
    strategy = made.trainer.strategy
    try:
        options = strategy._optimizer_options
        assert (options["target_batch_size"], options["run_id"]) == (128, "from a file")
        assert options["averager_opts"] == {"request_timeout": 2.0}
        assert isinstance(strategy, pl.strategies.ParallelStrategy)
    finally:
        strategy.dht.shutdown()


@pytest.mark.slow_drill
def test_lightning_imported_later_knows_the_strategy() -> None:
    """``LightningCLI`` asks before it makes one."""
    program = f"""
import shoal.lightning
from {PACKAGE}.strategies import Strategy
from shoal.lightning import HivemindStrategy
assert issubclass(HivemindStrategy, Strategy)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_signature_is_that_of_the_constructor(pl: ModuleType) -> None:
    from shoal.lightning import HivemindStrategy

    parameters = inspect.signature(HivemindStrategy).parameters
    assert next(iter(parameters)) == "target_batch_size"
    assert parameters["matchmaking_time"].default == 5.0

    class Own(HivemindStrategy):
        def __init__(self, rooms: int) -> None:
            super().__init__(rooms)

    assert list(inspect.signature(Own).parameters) == ["rooms"]
