"""Lightning comes as two packages with the same content: ``lightning`` and ``pytorch_lightning``.

Their classes are unrelated, so a strategy must belong to the package of the user's ``Trainer``. The package is found
when the strategy is made: by then the ``Trainer`` has been imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from typing import Any

# In order of preference, if a program has imported both.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")

# Environment variable used when a strategy is given by its name alone.
TARGET_BATCH_SIZE_ENV = "PL_TARGET_BATCH_SIZE"
# The default if that variable is not set. Chosen, and fixed, because all peers of a run must agree on it.
NAMED_TARGET_BATCH_SIZE = 8192


class Flavour:
    """One of the two packages, and where its classes are."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find(self, module: str, name: str) -> Any:
        """An attribute of one of the package's modules."""
        return getattr(importlib.import_module(f"{self.package}.{module}"), name)

    @property
    def strategy_class(self) -> type[Any]:
        """The base class of all strategies that may have several processes."""
        base: type[Any] = self.find("strategies", "ParallelStrategy")
        return base

    def misconfigured(self, text: str) -> Exception:
        """The error that Lightning raises for wrong use."""
        error: Exception = self.find("utilities.exceptions", "MisconfigurationException")(text)
        return error


def imported_flavours() -> list[Flavour]:
    """The packages that the program has imported."""
    return [Flavour(package) for package in PACKAGES if sys.modules.get(package) is not None]


def installed_flavours() -> list[Flavour]:
    """The packages that could be imported."""
    return [Flavour(package) for package in PACKAGES if importlib.util.find_spec(package.partition(".")[0]) is not None]


def current_flavour() -> Flavour:
    """The package that the program uses.

    Raises:
        ModuleNotFoundError: none is installed.
    """
    flavours = imported_flavours() or installed_flavours()
    if not flavours:
        raise ModuleNotFoundError("Lightning is not installed: pip install 'shoal[lightning]'", name="lightning")
    return flavours[0]


def flavour_of(strategy: type[object]) -> Flavour:
    """The package that a strategy class belongs to, or the one that the program uses if it belongs to none.

    Raises:
        ModuleNotFoundError: none is installed.
    """
    own = (flavour for flavour in imported_flavours() if issubclass(strategy, flavour.strategy_class))
    return next(own, None) or current_flavour()


@functools.cache
def in_flavour(strategy: type[object], package: str) -> type[Any]:
    """A form of the strategy class that a ``Trainer`` of this package accepts."""
    base = Flavour(package).strategy_class
    if issubclass(strategy, base):
        return strategy
    names = {"__module__": strategy.__module__, "__doc__": strategy.__doc__}
    return types.new_class(strategy.__name__, (strategy, base), exec_body=lambda body: body.update(names))


def register_by_name(strategy: type[object], names: tuple[str, ...]) -> None:
    """Register the strategy for ``Trainer(strategy=name)`` in all imported packages, or in the only installed one.

    If two packages are installed and none is imported, it is unknown which one the user wants. Importing both here
    would hide that for good, so nothing is registered.
    """
    installed = installed_flavours()
    for flavour in imported_flavours() or (installed if len(installed) == 1 else []):
        # LightningCLI checks that the class is a strategy before it makes one.
        flavour.find("strategies", "Strategy").register(strategy)
        registry = flavour.find("strategies", "StrategyRegistry")
        for name in names:
            registry.register(
                name,
                functools.partial(_make_named, strategy, flavour.package),
                description="Trains together with peers on other machines, over the internet",
                override=True,
            )


def _make_named(strategy: type[object], package: str, **options: Any) -> Any:
    if "target_batch_size" not in options:
        options["target_batch_size"] = _named_target_batch_size(package)
    return in_flavour(strategy, package)(**options)  # type: ignore[arg-type]  # classes can be hashed


def _named_target_batch_size(package: str) -> int:
    given = os.environ.get(TARGET_BATCH_SIZE_ENV)
    if given is None:
        Flavour(package).find("utilities", "rank_zero_warn")(
            f"the strategy was given by its name alone: all peers together make a step of {NAMED_TARGET_BATCH_SIZE} "
            f"samples. Set {TARGET_BATCH_SIZE_ENV} to another number, or use HivemindStrategy(target_batch_size=...)"
        )
        return NAMED_TARGET_BATCH_SIZE
    if not given.isdigit():
        raise Flavour(package).misconfigured(f"{TARGET_BATCH_SIZE_ENV} must be a number of samples, got {given!r}")
    return int(given)
