"""The device on which the tensors of these tests are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import DEVICE_TYPE, chosen_device

pytestmark = pytest.mark.oldest


@pytest.fixture(autouse=True)
def _tensors_on_the_device() -> Iterator[None]:
    """Tensors that a test makes are on the device of ``SHOAL_TEST_DEVICE``, also those that it compares with."""
    if DEVICE_TYPE == "cpu":
        yield
        return
    torch.set_default_device(chosen_device())
    yield
    torch.set_default_device(None)
