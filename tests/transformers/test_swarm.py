"""Three real processes train a small GPT-2 together; one of them dies, and the others carry on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups")]

SCRIPT = Path(__file__).parent / "train_gpt2.py"
TRAINING_SECONDS = 150


def wait_for_group(peers: list[Peer], after: int = 0) -> int:
    """The first epoch after that one which exactly these peers have made together; they have the same parameters."""
    while True:
        # On a busy machine, a member may miss the end of a round, or tell of it an epoch later.
        events = [peer.wait_for("epoch", TRAINING_SECONDS, partial(is_later, after)) for peer in peers]
        after = max(event["epoch"] for event in events)
        groups = {(event["epoch"], *event["group"]) for event in events}
        if len(groups) == 1 and len(events[0]["group"]) == len(peers):
            assert len({event["parameters"] for event in events}) == 1, events
            return after


def is_later(epoch: int, event: Event) -> bool:
    return bool(event["epoch"] > epoch)


@pytest.mark.timeout(2 * START_LIMIT_SECONDS + 5 * TRAINING_SECONDS)
@pytest.mark.slow_drill
def test_a_swarm_of_trainers_survives_a_death(tmp_path: Path) -> None:
    peers = [Peer(SCRIPT, tmp_path)]
    try:
        address = peers[0].wait_for("address", START_LIMIT_SECONDS)["address"]
        peers += [Peer(SCRIPT, tmp_path, "--initial-peers", address) for _ in range(2)]
        together = wait_for_group(peers)
        peers[2].process.kill()
        wait_for_group(peers[:2], together)
        for peer in peers[:2]:
            peer.tell("stop")
        for peer in peers[:2]:
            assert peer.wait(TRAINING_SECONDS) == 0, peer.errors()
            assert peer.all("done")
            losses = [event["logs"]["loss"] for event in peer.all("logs") if "loss" in event["logs"]]
            assert losses[-1] < losses[0]
            assert {"swarm_epoch", "swarm_peers", "swarm_samples_per_second"} <= peer.all("logs")[0]["logs"].keys()
    finally:
        for peer in peers:
            peer.close()
