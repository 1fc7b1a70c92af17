"""Four trainers, each a process of its own, have a fifth member that lies; and a newcomer looks for a state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.scene import Scene
from tests.system.swarm import START_LIMIT_SECONDS, Peer, Swarm

pytestmark = [pytest.mark.xdist_group("systems"), pytest.mark.timeout(600)]
LIAR = Path(__file__).parent / "liar.py"
OPTIONS = ["--epochs", 10**6, "--matchmaking-time", 3.0]
EPOCHS_TO_LEARN, EPOCHS = 3, 4
PATIENCE = 120.0
"""Who is late for its first round, as on a busy machine, is let into none for twenty times the time that it cost."""
WITHHELD_SECONDS = 10.0
"""An epoch takes longer than this while averages are waited for that do not come."""


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    with Swarm("train.py", 4, *OPTIONS) as swarm:
        for peer in swarm.peers:
            peer.wait_for("epoch", PATIENCE, lambda event: len(event["group"]) == 4)
        yield swarm


def join(swarm: Swarm, script: str | Path, *arguments: object) -> Peer:
    """One more trainer."""
    peer = Peer(script, *arguments, *OPTIONS, "--initial-peers", swarm.address)
    try:
        peer.wait_for("ready", START_LIMIT_SECONDS)
        peer.tell("go")
    except BaseException:
        peer.close()
        raise
    return peer


@pytest.mark.slow_drill
def test_who_withholds_averages_is_waited_for_three_times_at_most(swarm: Swarm) -> None:
    liar = join(swarm, LIAR, "--lie", "withholds_averages")
    try:
        name = liar.wait_for("peer_id", 1)["peer_id"]
        for peer in swarm.peers:
            peer.wait_for("epoch", PATIENCE, lambda event: name in event["group"])
        scene = Scene(swarm.peers, liar)
        scene.epochs(EPOCHS_TO_LEARN)
        epochs = scene.epochs(EPOCHS)
        for reports in epochs:
            assert len({report["parameters"] for report in reports}) == 1
        # One may be long for want of a free processor.
        slow = [reports for reports in epochs if max(report["seconds"] for report in reports) > WITHHELD_SECONDS]
        assert len(slow) <= 1, slow
    finally:
        liar.close()


def test_nobody_takes_over_a_false_state(swarm: Swarm) -> None:
    """The liar is a donor whose priority is 10¹². Those who train keep their parameters, a newcomer gets theirs.

    All parameters are 7, and the epoch is 10⁹, so that a schedule that follows step by step would not come to an end.
    """
    liar = join(swarm, LIAR, "--lie", "offers_a_state_of_the_far_future")
    try:
        name = liar.wait_for("peer_id", 1)["peer_id"]
        for peer in swarm.peers:
            peer.wait_for("epoch", PATIENCE, lambda event: name in event["group"])
        newcomer = join(swarm, "train.py")
        try:
            first = newcomer.wait_for("epoch", PATIENCE, lambda event: len(event["group"]) >= 5)
            scene = Scene([*swarm.peers, newcomer], liar)
            for reports in scene.epochs(EPOCHS_TO_LEARN):
                assert len({report["parameters"] for report in reports}) == 1, (first, reports)
        finally:
            newcomer.close()
    finally:
        liar.close()
