"""For users of Lightning: a strategy that trains with peers over the internet, and distributed utilities.

The ``Trainer`` runs as usual. Before its first batch, the strategy replaces its optimizer with that of the swarm, which
decides when to step: Lightning's own step after each batch only adds gradients. So schedules advance with the swarm,
and gradients are clipped when the optimizer really steps. When ``fit`` ends, the peer leaves the run.

In reading order:

- :mod:`~.strategy` is the strategy. :mod:`~.options` refuses options that cannot work.
- :mod:`~.training_loop` adapts schedules, clipping and the progress bar.
- :mod:`~.local_processes` makes one peer of several processes, which one of Lightning's own strategies starts.
- :mod:`~.flavours` finds out which of Lightning's two packages the program uses, and registers the strategy there.
- :mod:`~.distributed`: utilities over ``torch.distributed``, which do not need Lightning.

If you import this package after your ``Trainer``, ``Trainer(strategy="hivemind")`` works, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.lightning.flavours import imported_flavours, installed_flavours, register_by_name

if TYPE_CHECKING:
    from shoal.lightning.strategy import HiveMindScheduler, HivemindStrategy
    from shoal.lightning.strategy import HivemindStrategy as ShoalStrategy

__all__ = ["HiveMindScheduler", "HivemindStrategy", "ShoalStrategy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.lightning' has no attribute {name!r}")
    from shoal.lightning import strategy

    _register()  # again: a Lightning package may have been imported since
    return getattr(strategy, "HivemindStrategy" if name == "ShoalStrategy" else name)


def _register() -> None:
    if imported_flavours() or len(installed_flavours()) == 1:
        from shoal.lightning.strategy import HivemindStrategy

        register_by_name(HivemindStrategy, ("hivemind", "shoal"))


_register()
