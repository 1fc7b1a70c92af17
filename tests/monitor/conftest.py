"""The monitor, which calls other packages."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.oldest
