"""Swarms in one process, as the tests of the optimizers have them."""

from tests.optim.conftest import closing, make_dhts, network

__all__ = ["closing", "make_dhts", "network"]
