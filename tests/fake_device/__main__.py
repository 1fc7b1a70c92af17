"""Build the device before the tests begin, which have time limits."""

from __future__ import annotations

import sys

from tests.fake_device import FakeDeviceError, load

try:
    load()
except FakeDeviceError as error:
    sys.exit(str(error))
