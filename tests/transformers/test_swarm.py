"""Three real processes train a small GPT-2 together; one of them dies, and the others carry on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

SCRIPT = Path(__file__).parent / "train_gpt2.py"
TRAINING_SECONDS = 150


def wait_for_group(peer: Peer, size: int, after: int = 0) -> int:
    """The first epoch after that one which a group of this size has made."""
    event = peer.wait_for(
        "epoch", TRAINING_SECONDS, lambda event: event["epoch"] > after and len(event["group"]) == size
    )
    epoch: int = event["epoch"]
    return epoch


@pytest.mark.timeout(2 * START_LIMIT_SECONDS + 5 * TRAINING_SECONDS)
def test_a_swarm_of_trainers_survives_a_death(tmp_path: Path) -> None:
    peers = [Peer(SCRIPT, tmp_path)]
    try:
        address = peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]
        peers += [Peer(SCRIPT, tmp_path, "--initial-peers", address) for _ in range(2)]
        together = max(wait_for_group(peer, 3) for peer in peers)
        peers[2].process.kill()
        after = max(wait_for_group(peer, 2, together) for peer in peers[:2])
        after = max(wait_for_group(peer, 2, after) for peer in peers[:2])
        for peer in peers[:2]:
            peer.tell("stop")
        for peer in peers[:2]:
            assert peer.wait(TRAINING_SECONDS) == 0, peer.errors()
            assert peer.all("done")
            losses = [event["logs"]["loss"] for event in peer.all("logs") if "loss" in event["logs"]]
            assert losses[-1] < losses[0]
            assert {"swarm_epoch", "swarm_peers", "swarm_samples_per_second"} <= peer.all("logs")[0]["logs"].keys()
        check_agreement(peers)
    finally:
        for peer in peers:
            peer.close()


def check_agreement(peers: list[Peer]) -> None:
    """All members of a group have the same parameters after their step."""
    steps: dict[int, list[Event]] = {}
    for peer in peers:
        for event in peer.all("epoch"):
            steps.setdefault(event["epoch"], []).append(event)
    sizes = set()
    for epoch, events in steps.items():
        (group, *others) = {tuple(event["group"]) for event in events}
        if not others and len(group) == len(events) > 1:
            sizes.add(len(events))
            assert len({event["parameters"] for event in events}) == 1, f"different after epoch {epoch}: {events}"
    assert {2, 3} <= sizes
