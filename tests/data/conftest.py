"""Shared data sets."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.oldest
