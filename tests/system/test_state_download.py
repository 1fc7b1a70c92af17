"""A download of the state goes on when a donor is killed in the middle of it."""

from __future__ import annotations

import pytest
import torch

from shoal import DHT, DecentralizedAverager
from tests.drills import mostly_drills
from tests.system.share_state import PATIENCE_SECONDS, make_state
from tests.system.swarm import Swarm

CHUNKS, DONORS, PAUSE_AFTER = 40, 3, 4

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("killed", mostly_drills([1, 2]))
def test_killed_donors_cost_nothing_but_time(killed: int) -> None:
    options = ["--chunks", CHUNKS, "--pause-after", PAUSE_AFTER]
    with Swarm("share_state.py", DONORS, *options) as swarm:
        dht = DHT(initial_peers=[swarm.address], start=True)
        newcomer = DecentralizedAverager(
            [torch.zeros_like(tensor) for tensor in make_state(CHUNKS)],
            dht,
            start=True,
            prefix="state",
            allow_state_sharing=False,
            next_chunk_timeout=PATIENCE_SECONDS,
        )
        try:
            downloading = newcomer.load_state_from_peers(wait=False)
            for donor in swarm.peers:
                donor.wait_for("paused", PATIENCE_SECONDS)
            for donor in swarm.peers[:killed]:
                donor.process.kill()
            for donor in swarm.peers[killed:]:
                donor.tell("go on")
            _, tensors = downloading.result(PATIENCE_SECONDS)
            assert all(map(torch.equal, tensors, make_state(CHUNKS)))
        finally:
            newcomer.shutdown()
            dht.shutdown()
