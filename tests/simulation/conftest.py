"""Whole swarms in virtual time. They compute all the time, so what they take depends on the machine alone."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
