"""Lightning's own warnings are no business of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

FOREIGN = r"(lightning|pytorch_lightning|lightning_fabric|lightning_utilities|torchmetrics|torch|jsonargparse)(\..*)?"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(f"ignore::Warning:{FOREIGN}"), append=False)
            item.add_marker(pytest.mark.timeout(120))  # importing Lightning alone takes long on a busy machine
