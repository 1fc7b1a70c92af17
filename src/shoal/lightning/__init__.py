"""For users of Lightning: a strategy that trains with peers over the internet, and distributed utilities.

Needs ``lightning`` or ``pytorch-lightning``, except for :mod:`shoal.lightning.distributed`. Import this after your
``Trainer``: then ``Trainer(strategy="hivemind")`` works, too.
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

    _register()  # with what has been imported meanwhile
    return getattr(strategy, "HivemindStrategy" if name == "ShoalStrategy" else name)


def _register() -> None:
    if imported_flavours() or len(installed_flavours()) == 1:
        from shoal.lightning.strategy import HivemindStrategy

        register_by_name(HivemindStrategy, ("hivemind", "shoal"))


_register()
