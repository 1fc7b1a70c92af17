"""What shoal asks the operating system for."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.pretend
