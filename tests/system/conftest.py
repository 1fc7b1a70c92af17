"""Real processes, which need the machine's cores."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("systems")]
