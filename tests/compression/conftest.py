"""Codecs, which call other packages."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.oldest
