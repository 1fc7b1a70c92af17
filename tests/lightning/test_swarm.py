"""Two real processes train one model with the strategy, each from a package of Lightning of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.swarm import START_LIMIT_SECONDS, Peer

SCRIPT = str(Path(__file__).parent / "train_digits.py")
TRAINING_SECONDS = 200
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@pytest.mark.timeout(2 * START_LIMIT_SECONDS + 2 * TRAINING_SECONDS)
def test_two_processes_train_one_model() -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    peers: list[Peer] = []
    try:
        peers.append(Peer(SCRIPT, "--package", PACKAGES[0]))
        address = peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]
        peers.append(Peer(SCRIPT, "--package", PACKAGES[1], "--initial-peers", address))
        for peer in peers:
            peer.wait_for("ready", START_LIMIT_SECONDS)
        for peer in peers:
            peer.tell("go")
        for peer in peers:
            peer.wait_for("done", TRAINING_SECONDS)
            assert peer.wait(60) == 0, peer.errors()
        check(peers)
    finally:
        for peer in peers:
            peer.close()


def check(peers: list[Peer]) -> None:
    for peer in peers:
        assert peer.wait_for("accuracy", 0.1)["accuracy"] >= 0.95
        assert any(event["peers"] == 2 for event in peer.all("epoch")), "they have found each other"
    first, second = ({event["epoch"]: event for event in peer.all("epoch")} for peer in peers)
    together = [
        epoch
        for epoch in first.keys() & second.keys()
        if len(first[epoch]["group"]) == len(second[epoch]["group"]) == 2
    ]
    assert len(together) >= 5
    for epoch in together:
        assert first[epoch]["parameters"] == second[epoch]["parameters"], f"different after epoch {epoch}"
