"""Peers with DiLoCo, each a process of its own: one is killed, another one comes, and all have the same bits."""

from __future__ import annotations

import pytest

from tests.system.swarm import Peer, Swarm

pytestmark = pytest.mark.timeout(400)
LIMIT_SECONDS = 120
MANY_SLOTS = 100_000


def versions_of(peer: Peer) -> dict[tuple[int, int, str], str]:
    """By fragment, version and link: the bits of the outer parameters."""
    told = [event["versions"] for event in peer.all("versions")]
    return {(number, version, link): bits for each in told for number, (version, link, bits) in enumerate(each)}


def slot_of(peer: Peer) -> int:
    return max((event["slot"] for event in peer.all("slot")), default=-1)


@pytest.mark.slow_drill
@pytest.mark.parametrize("delay", [0, 2], ids=["at once", "delayed"])
def test_one_is_killed_and_another_one_comes(delay: int) -> None:
    options = ["--slots", MANY_SLOTS, "--delay", delay]
    with Swarm("train_locally.py", 3, *options) as swarm:
        for peer in swarm.peers:
            peer.wait_for("slot", LIMIT_SECONDS, lambda event: len(event["peers"]) == 3)
        victim, *others = swarm.peers[1:] + swarm.peers[:1]
        victim_id = victim.wait_for("peer_id", 1)["peer_id"]
        victim.process.kill()
        at_death = max(map(slot_of, swarm.peers))
        for peer in others:
            later = peer.wait_for(
                "slot", LIMIT_SECONDS, lambda event: event["slot"] > at_death + 3 and len(event["peers"]) == 2
            )
            assert victim_id not in later["peers"]
        newcomer = Peer("train_locally.py", *options, "--seed", 7, "--initial-peers", swarm.address)
        swarm.peers.append(newcomer)
        newcomer.wait_for("ready", LIMIT_SECONDS)
        newcomer.tell("go")
        for peer in (*others, newcomer):
            peer.wait_for(
                "slot",
                LIMIT_SECONDS,
                lambda event: event["slot"] > at_death + 4 and len(event["peers"]) == 3 and event["contributed"],
            )
        last = max(map(slot_of, others)) + 4
        for peer in (*others, newcomer):
            peer.wait_for("slot", LIMIT_SECONDS, lambda event: event["slot"] >= last)
        known: dict[tuple[int, int, str], str] = {}
        for peer in (*others, newcomer, victim):
            versions = versions_of(peer)
            assert all(known.setdefault(each, bits) == bits for each, bits in versions.items())
            assert "Traceback" not in peer.errors(), peer.errors()
        assert set(versions_of(newcomer)) & set(versions_of(others[0])) & set(versions_of(others[1]))
        losses = [event["loss"] for event in others[0].all("loss")]
        assert losses[-1] < losses[0] / 2
