"""Swarms in one process, as the tests of the optimizers have them."""

import pytest

from tests.optim.conftest import closing, make_dhts, network

pytestmark = pytest.mark.oldest

__all__ = ["closing", "make_dhts", "network"]
