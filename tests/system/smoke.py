"""A small training of four processes, as a check that anyone can repeat.

python -m tests.system.smoke --runs 20
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from tests.system.swarm import Peer, Swarm

PEERS, EPOCHS = 4, 5


def smoke(delay_state_averaging: bool = False, timeout: float = 200) -> None:
    """Four peers make five global steps together and leave nothing behind.

    Raises:
        AssertionError: anything of it did not happen.
    """
    options = ["--epochs", EPOCHS, "--matchmaking-time", 10] + ["--delay-state-averaging"] * delay_state_averaging
    with Swarm("train.py", PEERS, *options) as swarm:
        deadline = time.monotonic() + timeout
        for peer in swarm.peers:
            peer.wait_for("left", max(0.1, deadline - time.monotonic()))
        for peer in swarm.peers:
            assert peer.wait(120) == 0, peer.errors()
            check_peer(peer)
        check_agreement(swarm.peers, delay_state_averaging)


def check_peer(peer: Peer) -> None:
    assert "Traceback" not in peer.errors(), peer.errors()
    assert peer.all("left")[0]["left"] == []
    epochs = peer.all("epoch")
    assert epochs[-1]["epoch"] >= EPOCHS
    assert epochs[-1]["loss"] < epochs[0]["loss"], "training does not learn"


def check_agreement(peers: list[Peer], delay_state_averaging: bool) -> None:
    """Rounds must have been common ones, and in the synchronous mode must leave identical parameters."""
    events = [event for peer in peers for event in peer.all("epoch")]
    members = Counter(event["epoch"] for event in events if len(event["group"]) == PEERS)
    together = [epoch for epoch, count in members.items() if count == PEERS]
    assert together, f"no round was common to all peers: {members}"
    if not delay_state_averaging:
        for epoch in together:
            prints = {event["parameters"] for event in events if event["epoch"] == epoch}
            assert len(prints) == 1, f"different parameters after the common round of epoch {epoch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--delay-state-averaging", action="store_true")
    args = parser.parse_args()
    for run in range(1, args.runs + 1):
        began = time.monotonic()
        smoke(args.delay_state_averaging)
        print(f"run {run} of {args.runs}: good, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
