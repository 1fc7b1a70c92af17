"""Rooms whose tests load large packages of others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


def allow_for(packages: Iterable[str], items: Iterable[pytest.Item], folder: Path) -> None:
    """Let the tests of a folder load these packages: their own warnings are no business of the tests."""
    modules = rf"({'|'.join(packages)})(\..*)?"
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(f"ignore::Warning:{modules}"), append=False)
            item.add_marker(pytest.mark.timeout(120))  # importing them takes long on a busy machine
