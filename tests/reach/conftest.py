"""Ways through routers, which differ from system to system."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.pretend
