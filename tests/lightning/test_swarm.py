"""Real processes train one model with the strategy: they find each other, one dies, one comes late, one resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.train_digits import DECAY, RATE
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups")]

SCRIPT = str(Path(__file__).parent / "train_digits.py")
TRAINING_SECONDS = 100
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
EPOCHS = 80
"""Enough of them for an accuracy of 95 %, by far."""


def start(package: str, *arguments: object) -> Peer:
    return Peer(SCRIPT, "--package", package, *arguments)


def wait_for_group(peer: Peer, size: int, after: int = 0) -> int:
    """Returns the epoch of the first step after that one which a group of this size has made."""
    epoch: int = peer.wait_for(
        "epoch",
        TRAINING_SECONDS,
        lambda event: event["epoch"] > after and len(event["group"]) == event["peers"] == size,
    )["epoch"]
    return epoch


@pytest.mark.slow_drill
@pytest.mark.timeout(2 * START_LIMIT_SECONDS + 6 * TRAINING_SECONDS)
def test_a_swarm_of_both_packages(tmp_path: Path) -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    checkpoint = tmp_path / "swarm.ckpt"
    peers: list[Peer] = []
    try:
        peers.append(start(PACKAGES[0], "--save", checkpoint))
        join = ["--initial-peers", peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]]
        peers += [start(PACKAGES[1], *join), start(PACKAGES[0], *join)]
        for peer in peers:
            peer.wait_for("ready", START_LIMIT_SECONDS)
        staying, late = peers[:2], peers[2]
        for peer in staying:
            peer.tell("go")
        alone = max(wait_for_group(peer, 2) for peer in staying)
        late.tell("go")
        together = max(wait_for_group(peer, 3, alone) for peer in peers)
        assert late.all("epoch")[0]["epoch"] >= alone, "a late peer begins where the others are"
        late.process.kill()
        again = max(wait_for_group(peer, 2, together) for peer in staying)
        for peer in staying:
            peer.wait_for("epoch", TRAINING_SECONDS, lambda event: event["epoch"] > max(again + 3, EPOCHS))
        for peer in staying:
            peer.tell("stop")
        for peer in staying:
            assert peer.wait(TRAINING_SECONDS) == 0, peer.errors()
            assert peer.wait_for("accuracy", 0.1)["accuracy"] >= 0.95
        check_agreement(peers)
        resume(checkpoint, staying[0].all("epoch")[-1])
    finally:
        for peer in peers:
            peer.close()


def check_agreement(peers: list[Peer]) -> None:
    """After each step that all members of a group have made, they have the same parameters and learning rate."""
    steps: dict[int, list[dict]] = {}
    for peer in peers:
        for event in peer.all("epoch"):
            steps.setdefault(event["epoch"], []).append(event)
            assert event["rate"] == pytest.approx(RATE * DECAY ** event["epoch"])
    sizes = set()
    for epoch, events in steps.items():
        (group, *others) = {tuple(event["group"]) for event in events}
        if not others and len(group) == len(events) > 1:  # nobody has died or come in the middle of it
            sizes.add(len(events))
            assert len({event["parameters"] for event in events}) == 1, f"different after epoch {epoch}: {events}"
    assert {2, 3} <= sizes


def resume(checkpoint: Path, last: dict) -> None:
    """A peer that begins a run anew from a checkpoint of it."""
    peer = start(PACKAGES[1], "--resume", checkpoint)
    try:
        peer.wait_for("ready", START_LIMIT_SECONDS)
        peer.tell("go")
        first = peer.wait_for("epoch", TRAINING_SECONDS)
        assert first["epoch"] in (last["epoch"], last["epoch"] + 1)
        assert first["rate"] == pytest.approx(RATE * DECAY ** first["epoch"])
        if first["epoch"] == last["epoch"]:
            assert first["parameters"] == last["parameters"]
        peer.wait_for("epoch", TRAINING_SECONDS, lambda event: event["epoch"] > last["epoch"])
        peer.tell("stop")
        assert peer.wait(TRAINING_SECONDS) == 0, peer.errors()
        assert peer.wait_for("accuracy", 0.1)["accuracy"] >= 0.95
    finally:
        peer.close()
