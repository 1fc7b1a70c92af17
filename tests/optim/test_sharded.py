"""Peers whose processes share the parameters of a model, with real processes that meet over gloo."""

from __future__ import annotations

import pytest

from tests.device import on_cpu_only
from tests.optim import sharded
from tests.processes import run_in_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("groups"),
    pytest.mark.timeout(300),
    on_cpu_only,  # gloo takes no tensors of a device that it does not know
]


@pytest.mark.slow_drill
def test_two_sharded_peers_and_meshes_of_two_dimensions() -> None:
    run_in_group(sharded.four_processes, 4)


def test_a_sharded_peer_trains_with_a_whole_one() -> None:
    run_in_group(sharded.three_processes, 3)
