"""What strangers and liars cost a swarm, in virtual time: each attack alone, and three at a time.

    python -m benchmarks.hostile --seeds 20 --triples 50

Honest peers train (``tests/simulation/training.py``: everything is real but the batches and the time), with attackers
of ``tests/hostile/attacks`` among them or around them. Beside it stands the same seed in peace. The problem is a
quadratic one with noisy gradients, which are really averaged.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hostile.attacks import STRANGERS
from tests.hostile.attacks.members import LIES
from tests.hostile.simulated import HONEST, Outcome, train


@dataclass
class Line:
    """What came of one attack, in all seeds."""

    name: str
    goodput: list[float]
    """As a share of what there was in peace."""
    loss: list[float]
    """By how much it differs from that in peace, relative."""
    spread: float
    """The largest of all."""
    downloads: int
    lines: int
    """In the log of one peer, the most of all seeds."""

    @classmethod
    def of(cls, name: str, pairs: list[tuple[Outcome, Outcome]], peers: int) -> Line:
        return cls(
            name,
            [attacked.goodput / peace.goodput for attacked, peace in pairs],
            [abs(attacked.loss / peace.loss - 1) for attacked, peace in pairs],
            max(attacked.spread for attacked, _ in pairs),
            sum(attacked.downloads for attacked, _ in pairs),
            max(-(-attacked.lines // peers) for attacked, _ in pairs),
        )

    def __str__(self) -> str:
        goodput = f"{statistics.median(self.goodput):7.1%} {min(self.goodput):7.1%}"
        return f"{self.name:60} {goodput} {max(self.loss):8.2%} {self.spread:8.4f} {self.downloads:5} {self.lines:5}"


def measure(names: tuple[str, ...], seeds: list[int], peers: int, epochs: int) -> Line:
    strangers = tuple(name for name in names if name in STRANGERS)
    lies = tuple(name for name in names if name in LIES)
    pairs = []
    for seed in seeds:
        attacked = train(seed, strangers, lies, peers=peers, epochs=epochs)
        pairs.append((attacked, train(seed, (), (HONEST,) * len(lies), peers=peers, epochs=epochs)))
    return Line.of(" + ".join(names), pairs, peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=20, help="honest ones")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=20, help="of each attack")
    parser.add_argument("--triples", type=int, default=50, help="sets of three attacks, drawn by chance, one seed each")
    parser.add_argument("--attacks", nargs="*", default=[*STRANGERS, *LIES], help="only these")
    args = parser.parse_args()
    # They are counted, not read.
    logging.getLogger("shoal").addHandler(logging.NullHandler())
    rng, names = random.Random(0), list(args.attacks)
    triples = [tuple(rng.sample(names, min(3, len(names)))) for _ in range(args.triples)]
    cases = [((name,), list(range(args.seeds))) for name in names]
    cases += [(triple, [1000 + number]) for number, triple in enumerate(triples)]
    print(f"{'attack':60} goodput   least     loss   spread taken lines", flush=True)
    lines = []
    for case, seeds in cases:
        lines.append(measure(case, seeds, args.peers, args.epochs))
        print(lines[-1], flush=True)
    print(json.dumps({line.name: [min(line.goodput), max(line.loss), line.spread] for line in lines}))


if __name__ == "__main__":
    main()
