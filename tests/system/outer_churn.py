"""Peers that train with DiLoCo while one of them after another is killed and replaced.

python -m tests.system.outer_churn --minutes 5 --peers 6 --every 5
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch

from tests.system.keep_training import Pictures, held_out_loss, loss_on, make_model
from tests.system.keep_training_locally import BATCH_SIZE, OUTER, SYNC_EVERY, make_inner_optimizer
from tests.system.replacing import ReplacedPeers
from tests.system.swarm import Event, Peer

SCRIPT = "keep_training_locally.py"
LAST_VERSIONS = 5
"""So many updates follow after the last kill, beyond what anybody has reached, until all are to agree."""
END_LIMIT_SECONDS = 180
WINDOW, FIRST_COMPARED = 10, 10
"""Losses are means over so many versions, from this one on: before it they fall too fast for that."""
LOSS_TOLERANCE = 0.03


@dataclass
class OuterChurn:
    """What has been seen."""

    peers: int
    """So many live at a time."""
    victims: list[Peer] = field(default_factory=list)
    survivors: list[Peer] = field(default_factory=list)
    at_last_kill: int = 0
    """The newest version that anybody had then."""
    agreed: Event | None = None
    """A version that all survivors have had at the end; ``None``: there was none in time."""
    log: str = ""

    @property
    def histories(self) -> list[list[Event]]:
        """Of each peer all outer parameters that it has had."""
        return [peer.all("version") for peer in self.victims + self.survivors]

    @property
    def events(self) -> list[Event]:
        return list(itertools.chain.from_iterable(self.histories))

    @property
    def newest(self) -> int:
        return max(event["version"] for event in self.events)

    @property
    def went_back(self) -> int:
        """How often a peer had an older version than before."""
        return sum(b["version"] < a["version"] for each in self.histories for a, b in itertools.pairwise(each))

    @property
    def differing(self) -> list[int]:
        """Versions of which peers with the same link had different bits."""
        bits: dict[tuple[int, str], set[str]] = {}
        for event in self.events:
            bits.setdefault((event["version"], event["link"]), set()).add(event["bits"])
        return sorted(version for (version, _), found in bits.items() if len(found) > 1)

    @property
    def forks(self) -> list[int]:
        """Versions of which peers had different ones."""
        links: dict[int, set[str]] = {}
        for event in self.events:
            links.setdefault(event["version"], set()).add(event["link"])
        return sorted(version for version, found in links.items() if len(found) > 1)

    def group_sizes(self) -> list[int]:
        """Of the rounds, as their members saw them; 0: an update that the peer has got from others."""
        return [event["members"] for event in self.events]

    def compared(self) -> list[tuple[int, float, float]]:
        """Version, held-out loss, and that of an undisturbed run; both are means over versions around it."""
        losses: dict[int, list[float]] = {}
        for event in self.events:
            losses.setdefault(event["version"], []).append(event["loss"])
        reference, rows = undisturbed(self.newest, self.peers), []
        for first in range(FIRST_COMPARED, self.newest - WINDOW + 2, WINDOW):
            versions = [version for version in range(first, first + WINDOW) if version in losses]
            if versions:
                loss = statistics.fmean(statistics.fmean(losses[version]) for version in versions)
                rows.append((first + WINDOW // 2, loss, statistics.fmean(reference[each] for each in versions)))
        return rows

    def problems(self) -> list[str]:
        """What is not as it must be, in words."""
        found = []
        if self.went_back:
            found.append(f"peers went back to an older version {self.went_back} times")
        if self.differing:
            found.append(f"versions {self.differing} have several bits under the same link")
        if self.agreed is None:
            found.append("the survivors do not agree on one lineage at the end")
        if late := [version for version in self.forks if version > self.at_last_kill + LAST_VERSIONS]:
            found.append(f"after the end of all kills there are several versions {late}")
        for version, loss, expected in self.compared():
            if abs(loss / expected - 1) > LOSS_TOLERANCE:
                found.append(f"the loss around version {version} is {loss:.4f}, without disturbance {expected:.4f}")
        if "Traceback" in self.log:
            found.append("a peer has logged a traceback")
        return found


def undisturbed(versions: int, peers: int) -> list[float]:
    """Held-out loss of each version, computed in one process with plain torch, beginning with version 0."""
    models = [make_model() for _ in range(peers)]
    shares = [Pictures(seed=1_000_000 + number) for number in range(peers)]
    inner = [make_inner_optimizer(model) for model in models]
    center = make_model()
    outer = torch.optim.SGD(center.parameters(), **OUTER)
    losses = [held_out_loss(center, shares[0])]
    for _ in range(versions):
        for model, pictures, optimizer in zip(models, shares, inner, strict=True):
            for _ in range(SYNC_EVERY):
                optimizer.zero_grad()
                loss_on(model, pictures.draw(BATCH_SIZE)).backward()
                optimizer.step()
        for values, *own in zip(center.parameters(), *(model.parameters() for model in models), strict=True):
            values.grad = values.detach() - torch.stack([each.detach() for each in own]).mean(0)
        outer.step()
        for model in models:
            model.load_state_dict(center.state_dict())
        losses.append(held_out_loss(center, shares[0]))
    return losses


def run(
    peers: int, seconds: float, kill_every: float, pause: float = 0.1, seed: int = 0, verbose: bool = False
) -> OuterChurn:
    """Let peers train for a while, and then on without any kills until all survivors have had the same version.

    Args:
        kill_every: seconds between two kills.
        pause: seconds between two steps of a peer.
    """
    churn = OuterChurn(peers)
    given = ["--pause", pause, *["--verbose"] * verbose]
    swarm = ReplacedPeers(SCRIPT, lambda number: [*given, "--seed", number], peers)
    try:
        for peer in swarm.living:  # they are one run before the first of them dies
            peer.wait_for("version", END_LIMIT_SECONDS, lambda event: event["members"] == peers)
        swarm.kill_for(seconds, kill_every, random.Random(seed))
        churn.victims, churn.survivors = swarm.victims, swarm.living
        churn.at_last_kill = churn.newest
        churn.agreed = _agree(churn)
        swarm.leave(END_LIMIT_SECONDS)
    finally:
        churn.log = swarm.log
        swarm.close()
    return churn


def _agree(churn: OuterChurn) -> Event | None:
    deadline = time.monotonic() + END_LIMIT_SECONDS
    while time.monotonic() < deadline:
        had = [
            {(event["version"], event["link"], event["bits"]) for event in peer.all("version")}
            for peer in churn.survivors
        ]
        late = {each for each in set.intersection(*had) if each[0] > churn.at_last_kill + LAST_VERSIONS}
        if late:
            return dict(zip(("version", "link", "bits"), min(late), strict=True))
        # Nothing changes without news.
        newest = max((each[0] for each in had[0]), default=0)
        churn.survivors[0].wait_for("version", END_LIMIT_SECONDS, lambda event: event["version"] > newest)  # noqa: B023
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps of a peer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print what the peers log")
    args = parser.parse_args()
    churn = run(args.peers, 60 * args.minutes, args.every, args.pause, args.seed, args.verbose)
    if args.verbose:
        print(churn.log)
    print(f"{len(churn.victims)} peers were killed and replaced; {churn.newest} versions, of which peers had")
    print(f"different ones: {churn.forks}")
    sizes = churn.group_sizes()
    print(
        f"group sizes: {', '.join(f'{size}: {sizes.count(size)}' for size in sorted(set(sizes)))}; 0: got from others"
    )
    slowest = [event["slowest"] for event in churn.events]
    print(f"longest step of a version: median {statistics.median(slowest):.2f} s, longest {max(slowest):.2f} s")
    rows = churn.compared()
    print("version   held-out loss   undisturbed   difference")
    for version, loss, expected in rows[:: max(1, len(rows) // 15)]:
        print(f"{version:7d} {loss:15.4f} {expected:13.4f} {100 * (loss / expected - 1):+11.2f} %")
    largest = max((abs(loss / expected - 1) for _, loss, expected in rows), default=0.0)
    print(f"largest difference of the loss: {100 * largest:.2f} %, allowed {100 * LOSS_TOLERANCE:g} %")
    problems = churn.problems()
    agreed = f"at version {churn.agreed['version']} all have the same bits" if churn.agreed else ""
    print("\n".join(problems) if problems else f"all as it must be: {agreed}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
