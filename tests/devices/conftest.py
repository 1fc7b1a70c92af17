"""Tests that need a device with late work. It stays for the life of a process, so these run only when asked for.

Run them with ``make test-devices``, or ``SHOAL_TEST_DEVICE=fake pytest tests/devices``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import DEVICE_TYPE
from tests.fake_device import FakeDevice, load_or_skip
from tests.optim.conftest import closing, make_dhts, make_trainers, network

pytestmark = pytest.mark.devices

__all__ = ["closing", "make_dhts", "make_trainers", "network"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE_TYPE == "fake":
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs the fake device: make test-devices"))


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """The fake device, on which nothing is counted yet; its work is not late unless the test wants it."""
    device = load_or_skip()
    device.wait()
    device.reset()
    yield device
    device.delay(0)
    device.wait()
