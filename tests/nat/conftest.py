"""Machines behind routers."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hosts")]
