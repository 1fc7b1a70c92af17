"""Small swarms in one process that somebody attacks."""

from __future__ import annotations

from tests.optim.conftest import closing, make_dhts, make_trainers, network

__all__ = ["closing", "make_dhts", "make_trainers", "network"]
