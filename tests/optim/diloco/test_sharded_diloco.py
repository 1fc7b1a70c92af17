"""DiLoCo with peers whose processes share a model, with real processes that meet over gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device import on_cpu_only
from tests.optim.diloco import sharded
from tests.processes import run_in_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("groups"),
    pytest.mark.timeout(300),
    on_cpu_only,  # gloo takes no tensors of a device that it does not know
]


@pytest.mark.parametrize("scenario", [sharded.equivalence])
def test_two_peers_of_two_processes(scenario: Callable[[], None]) -> None:
    run_in_group(scenario, 4)
