"""Whole swarms in virtual time."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow
