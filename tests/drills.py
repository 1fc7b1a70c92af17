"""Parameters of which the first ones make a quick test, and the others slow drills, which run before a release."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_drills(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Values for ``pytest.mark.parametrize``, of one argument.

    Args:
        values: those that can show something new come first.
        quick: so many of them are tried with every change.
    """
    return [value if i < quick else pytest.param(value, marks=pytest.mark.slow_drill) for i, value in enumerate(values)]
