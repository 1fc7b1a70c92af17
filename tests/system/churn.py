"""Peers that average in a loop while one of them after another is killed and replaced.

python -m tests.system.churn --peers 8 --rounds 200 --megabytes 8
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from statistics import median

from tests.system.swarm import START_LIMIT_SECONDS, Event, Peer

SCRIPT = "keep_averaging.py"
FIRST_ROUNDS = 10
"""Until then a new process still starts threads and opens connections."""
LANDMARKS = 8
"""At how many rounds, evenly apart, the memory is printed."""


@dataclass
class Churn:
    """What has been seen."""

    killed: int = 0
    rounds: list[Event] = field(default_factory=list)
    """Of peers that were not killed in them."""
    resident: list[list[int]] = field(default_factory=list)
    """Of each peer that finished, the bytes of its resident memory after each round."""
    left_over: list[tuple[int, int]] = field(default_factory=list)
    """By how many threads and sockets it had more at the end than after its first rounds."""

    @property
    def success(self) -> float:
        """Which share of the rounds succeeded, with others, and averaged everything."""
        good = sum(not each["error"] and each["members"] > 1 and each["share"] == 1 for each in self.rounds)
        return good / len(self.rounds)


def run(peers: int, rounds: int, megabytes: float, kill_every: float, seed: int = 0, kills: int | None = None) -> Churn:
    """Let peers average until those that were never killed have done so many rounds.

    Args:
        kill_every: seconds between two kills, on average.
        kills: how many, and only then may the rounds end; default: as many as it takes.
    """
    rng, churn, living = random.Random(seed), Churn(), []
    options = ["--rounds", rounds, "--megabytes", megabytes, *([] if kills is None else ["--until-told"])]
    try:
        while len(living) < peers:
            living.append(_start(options, living))
        for peer in living:
            peer.tell("go")
        protected = living[:2]  # somebody has to finish
        while any(not peer.all("finished") for peer in protected):
            time.sleep(kill_every * (0.5 + rng.random()))
            if churn.killed == kills:
                for peer in living:
                    peer.tell("enough")
                for peer in protected:
                    peer.wait_for("finished", 600)
                break
            victim = rng.choice([peer for peer in living if peer not in protected])
            living.remove(victim)
            victim.process.kill()
            churn.killed += 1
            churn.rounds += victim.all("round")
            victim.close()
            living.append(_start(options, living))
            living[-1].tell("go")
        for peer in living:
            churn.rounds += peer.all("round")
        for peer in protected:
            _check_end(peer, churn)
        for peer in protected:
            peer.tell("leave")
            peer.wait_for("done", 120)
            assert peer.wait(120) == 0, peer.errors()
    finally:
        for peer in living:
            peer.close()
    return churn


def _start(options: list[object], living: list[Peer]) -> Peer:
    addresses = [peer.wait_for("address", START_LIMIT_SECONDS)["address"] for peer in living]
    peer = Peer(SCRIPT, *options, *(["--initial-peers", *addresses] if addresses else []))
    peer.wait_for("ready", START_LIMIT_SECONDS)
    return peer


def _check_end(peer: Peer, churn: Churn) -> None:
    rounds = peer.all("round")
    early, late = rounds[min(FIRST_ROUNDS, len(rounds)) - 1], rounds[-1]
    churn.resident.append([each["resident"] for each in rounds])
    churn.left_over.append((late["threads"] - early["threads"], late["sockets"] - early["sockets"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    churn = run(args.peers, args.rounds, args.megabytes, args.kill_every, args.seed)
    seconds = median(each["seconds"] for each in churn.rounds)
    print(f"{churn.killed} peers were killed and replaced; {len(churn.rounds)} rounds of others, {seconds:.2f} s each")
    print(f"succeeded: {100 * churn.success:.2f} %; not sound: {sum(not each['sound'] for each in churn.rounds)}")
    for resident in churn.resident:
        after = [len(resident) * number // LANDMARKS for number in range(1, LANDMARKS + 1)]
        print("resident MB after rounds", ", ".join(f"{i}: {resident[i - 1] / 1e6:.1f}" for i in after if i))
    print(f"threads and sockets more at the end: {churn.left_over}")
    for each in churn.rounds:
        if each["error"] or each["members"] < 2 or each["share"] < 1:
            print(f"  failed: {each}")


if __name__ == "__main__":
    main()
