"""Peers that train together while one of them after another is killed and replaced.

python -m tests.system.training_churn --minutes 5
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass, field

import torch

from tests.system.keep_training import LEARNING_RATE, MODES, Pictures, held_out_loss, loss_on, make_model
from tests.system.replacing import ReplacedPeers
from tests.system.swarm import Peer

SCRIPT = "keep_training.py"
MATCHMAKING_TIME, AVERAGING_TIMEOUT = 3.0, 15.0
STALL_LIMIT = MATCHMAKING_TIME + AVERAGING_TIMEOUT
BATCH_SIZE, TARGET_BATCH_SIZE = 16, 512
LAST_EPOCHS, LEAST_EPOCHS = 10, 30
"""So many follow after the last kill, beyond what anybody has reached; and so many there are at least."""
END_LIMIT_SECONDS = 120
WINDOW, FIRST_COMPARED = 10, 20
"""Losses are means over so many epochs, from this one on: before it they fall too fast for that."""
LOSS_TOLERANCE = 0.03


@dataclass
class TrainingChurn:
    """What has been seen."""

    lag: int = 0
    """So many steps the model lacks when an epoch begins: they are made in the background."""
    killed: int = 0
    survivors: list[Peer] = field(default_factory=list)
    victims: list[Peer] = field(default_factory=list)
    log: str = ""
    """What all peers have written to their standard error."""

    @property
    def peers(self) -> list[Peer]:
        return self.victims + self.survivors

    @property
    def last_epoch(self) -> int:
        return max(event["finished"] for peer in self.survivors for event in peer.all("finished"))

    @property
    def went_back(self) -> int:
        """How often a peer went to an epoch that is not beyond the one it had."""
        return sum(event["epoch"] <= event["before"] for peer in self.peers for event in peer.all("epoch"))

    @property
    def slowest_steps(self) -> list[float]:
        """Seconds of the longest step of each epoch of each peer, up to its death."""
        return [event["slowest"] for peer in self.peers for event in peer.all("epoch")]

    @property
    def fingerprints(self) -> set[str]:
        """Of the parameters at the end; one if all agree."""
        return {event["parameters"] for peer in self.survivors for event in peer.all("finished")}

    def losses(self) -> dict[int, list[float]]:
        """Held-out loss of each peer that came to an epoch."""
        found: dict[int, list[float]] = {}
        for peer in self.peers:
            for event in peer.all("epoch"):
                found.setdefault(event["epoch"], []).append(event["loss"])
        return found

    def samples(self) -> list[float]:
        """In each gradient round, as its members saw it."""
        return [event["samples"] for peer in self.peers for event in peer.all("epoch") if event["members"]]

    def group_sizes(self) -> list[int]:
        """Of the gradient rounds, as their members saw them; 1 = went on alone, or downloaded the state instead."""
        return [max(1, event["members"]) for peer in self.peers for event in peer.all("epoch")]

    def problems(self) -> list[str]:
        """What is not as it must be, in words."""
        found = []
        if self.went_back:
            found.append(f"peers went back in {self.went_back} epochs")
        if max(self.slowest_steps) > STALL_LIMIT:
            found.append(f"a step took {max(self.slowest_steps):.1f} s, allowed are {STALL_LIMIT:g} s")
        if len(self.fingerprints) != 1:
            found.append(f"{len(self.fingerprints)} different models at the end")
        for epoch, loss, expected in self.compared():
            if abs(loss / expected - 1) > LOSS_TOLERANCE:
                found.append(f"the loss around epoch {epoch} is {loss:.4f}, without disturbance {expected:.4f}")
        return found

    def compared(self) -> list[tuple[int, float, float]]:
        """Epoch, held-out loss, and that of an undisturbed run; both are means over epochs around it."""
        losses, reference = self.losses(), undisturbed(self.last_epoch, TARGET_BATCH_SIZE)
        rows = []
        for first in range(FIRST_COMPARED, self.last_epoch - WINDOW + 1, WINDOW):
            epochs = [epoch for epoch in range(first, first + WINDOW) if epoch in losses]
            if epochs:
                loss = statistics.fmean(statistics.fmean(losses[epoch]) for epoch in epochs)
                expected = statistics.fmean(reference[epoch - self.lag] for epoch in epochs)
                rows.append((first + WINDOW // 2, loss, expected))
        return rows


def undisturbed(epochs: int, batch_size: int, seed: int = 0) -> list[float]:
    """Held-out loss after each step of one process, plain torch, beginning with none."""
    model, pictures = make_model(), Pictures(seed=1_000_000 + seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = [held_out_loss(model, pictures)]
    for _ in range(epochs):
        optimizer.zero_grad()
        loss_on(model, pictures.draw(batch_size)).backward()
        optimizer.step()
        losses.append(held_out_loss(model, pictures))
    return losses


def run(
    peers: int,
    seconds: float,
    kill_every: float,
    pause: float = 0.1,
    mode: str = "synchronous",
    seed: int = 0,
    verbose: bool = False,
) -> TrainingChurn:
    """Let peers train for a while, and then some epochs more without any kills.

    Args:
        kill_every: seconds between two kills.
        pause: seconds between two batches of a peer.
    """
    options = {
        "--batch-size": BATCH_SIZE,
        "--target-batch-size": TARGET_BATCH_SIZE,
        "--pause": pause,
        "--matchmaking-time": MATCHMAKING_TIME,
        "--averaging-timeout": AVERAGING_TIMEOUT,
        "--mode": mode,
    }
    given = [part for item in options.items() for part in item] + ["--verbose"] * verbose
    churn = TrainingChurn(lag=int(MODES[mode].get("delay_optimizer_step", False)))
    swarm = ReplacedPeers(SCRIPT, lambda number: [*given, "--seed", number], peers)
    try:
        swarm.kill_for(seconds, kill_every, random.Random(seed))
        churn.survivors, churn.victims, churn.killed = swarm.living, swarm.victims, len(swarm.victims)
        _finish(swarm, churn)
    finally:
        churn.log = swarm.log
        swarm.close()
    return churn


def _finish(swarm: ReplacedPeers, churn: TrainingChurn) -> None:
    reached = [event["epoch"] for peer in churn.peers for event in peer.all("epoch")]
    for peer in churn.survivors:
        peer.tell(str(max(max(reached) + LAST_EPOCHS, LEAST_EPOCHS)))
    for peer in churn.survivors:
        peer.wait_for("finished", END_LIMIT_SECONDS)
    swarm.leave(END_LIMIT_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kill-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--mode", choices=MODES, default="synchronous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print what the peers log")
    args = parser.parse_args()
    churn = run(args.peers, 60 * args.minutes, args.kill_every, mode=args.mode, seed=args.seed, verbose=args.verbose)
    print(churn.log)
    print(f"{churn.killed} peers were killed and replaced, {churn.last_epoch} epochs; went back: {churn.went_back}")
    slowest, sizes = sorted(churn.slowest_steps), churn.group_sizes()
    print(
        f"longest step of an epoch: median {statistics.median(slowest):.2f} s, longest {slowest[-1]:.2f} s, "
        f"allowed {STALL_LIMIT:g} s"
    )
    print(f"group sizes: {', '.join(f'{size}: {sizes.count(size)}' for size in sorted(set(sizes)))}")
    samples = statistics.quantiles(churn.samples(), n=10)
    print(f"samples in a round: {samples[0]:.0f} to {samples[-1]:.0f} in 8 of 10, wanted {TARGET_BATCH_SIZE}")
    rows = churn.compared()
    print("epoch   held-out loss   undisturbed   difference")
    for epoch, loss, expected in rows[:: max(1, len(rows) // 15)]:
        print(f"{epoch:5d} {loss:15.4f} {expected:13.4f} {100 * (loss / expected - 1):+11.2f} %")
    largest = max(abs(loss / expected - 1) for _, loss, expected in rows)
    print(f"largest difference: {100 * largest:.2f} %; different models at the end: {len(churn.fingerprints)}")
    problems = churn.problems()
    print("\n".join(problems) if problems else "all as it must be")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
