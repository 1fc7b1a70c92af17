"""Commands as a user types them."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("commands")]
