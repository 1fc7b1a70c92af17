"""The device on which tests put their models: that of ``SHOAL_TEST_DEVICE``, or the CPU.

With ``SHOAL_TEST_DEVICE=fake`` it is the device of :mod:`tests.fake_device`, which stays for the life of the process.
Any other name is one of torch's own: ``SHOAL_TEST_DEVICE=cuda`` is meant for a graphics card, and nobody has tried it.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
DEVICE_TYPE = DEVICE.partition(":")[0]


def chosen_device() -> torch.device:
    """The device; builds the fake one at first use, and skips the test where that cannot be done."""
    if DEVICE_TYPE == "fake":
        from tests.fake_device import load_or_skip

        load_or_skip()
    return torch.device(DEVICE)


on_cpu_only = pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="about the CPU")
"""Marks tests that have no meaning, or cannot be run, on another device."""
