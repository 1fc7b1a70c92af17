"""A table that many processes share, over real sockets."""

from __future__ import annotations

import json

import pytest

from tests.system.swarm import Peer, Swarm

PEERS = 24  # more than a bucket holds, so that some are found through others
KEYS = 320
LIMIT_SECONDS = 240


@pytest.mark.timeout(600)  # seconds on a quiet machine
@pytest.mark.slow_drill
def test_every_value_is_found_by_another_process() -> None:
    shares = [range(number, KEYS, PEERS) for number in range(PEERS)]
    with Swarm("share_a_table.py", PEERS, fresh=True) as swarm:
        for peer, share in zip(swarm.peers, shares, strict=True):
            peer.tell(json.dumps(["store", list(share)]))
        for peer, share in zip(swarm.peers, shares, strict=True):
            assert peer.wait_for("stored", LIMIT_SECONDS)["stored"] == len(share)
        for distance in (1, PEERS // 2):
            others = shares[distance:] + shares[:distance]
            for peer, share in zip(swarm.peers, others, strict=True):
                peer.tell(json.dumps(["get", list(share)]))
            for peer, share in zip(swarm.peers, others, strict=True):
                assert _found(peer, share) == list(share)
        for peer in swarm.peers:
            assert peer.process.stdin
            peer.process.stdin.close()
            assert peer.wait(LIMIT_SECONDS) == 0, peer.errors()
            assert peer.errors() == ""


def _found(peer: Peer, share: range) -> list[int]:
    return peer.wait_for("found", LIMIT_SECONDS, lambda event: event["asked"] == list(share))["found"]
