"""Small swarms in one process that somebody attacks."""

from __future__ import annotations

import pytest

from tests.optim.conftest import closing, make_dhts, make_trainers, network

pytestmark = pytest.mark.slow

__all__ = ["closing", "make_dhts", "make_trainers", "network"]
