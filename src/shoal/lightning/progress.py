"""Shows in the progress bar, and tells loggers, how the swarm is doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from shoal.lightning.strategy import HivemindStrategy
else:
    Callback = object


class SwarmProgress(Callback):
    """A callback that logs ``peers``, ``global_epoch`` and this peer's ``samples/s`` after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what the swarm's tracker knows."""
        strategy: HivemindStrategy = trainer.strategy
        values = strategy.swarm_progress()
        pl_module.log_dict(
            {name: float(value) for name, value in values.items()}, prog_bar=True, on_step=True, on_epoch=False
        )
