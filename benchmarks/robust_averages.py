"""How well a model learns while some of its peers lie, by each rule of averaging.

    python -m benchmarks.robust_averages
    python -m benchmarks.robust_averages --averagers --steps 200 --seeds 1 --rules mean clip --attacks none 100x
    python -m benchmarks.robust_averages --loss --members 5 --liars 1 --rules mean clip --momentum 0 --steps 300 \\
        --seeds 3 --attacks none flip 3x growing bias labels

Ten members train a small network on scikit-learn's handwritten digits, three of them lie. All of them have the same
model; in each step each takes a batch of its own. What the members send goes through shoal's own reduction: cut into
parts, each reduced by one of the members, with the norms that rules need. With ``--averagers`` whole averagers do so,
which find each other and average on a simulated network, in virtual time; that takes some thirty times as long.

The liars know what all others send. They send

- ``flip``: their own gradient with the opposite sign,
- ``100x``: a hundred times their own gradient,
- ``constant``: 1 for each value, many times as long as a gradient,
- ``little``: the mean of the honest less 1.5 of their standard deviations ("a little is enough", Baruch et al., 2019),
- ``3x``: three times their own gradient,
- ``growing``: their own gradient with the opposite sign, a tenth longer with each step,
- ``bias``: their own gradient plus the same small number at each value: together as long as the gradient itself,
- ``labels``: the gradient of a batch in which each label is the next one.

Without attackers (``none``), all are honest. ``--members`` and ``--liars`` change how many there are, and ``--loss``
prints the loss on held-out images in place of the accuracy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from shoal.averaging import Aggregation, CenteredClip, ClipToMedianNorm, TrimmedMean
from shoal.averaging.round.combining import Combiner, share_norms
from shoal.averaging.round.parts import RoundVector, load_balance_peers
from shoal.averaging.round.reducer import PartReducer
from shoal.compression import CompressionInfo, NoCompression
from shoal.optim.grad_averager import PeerMomentum
from shoal.testing import Network, run, start_averagers, start_step

MEMBERS, LIARS = 10, 3
PART_BYTES = 1000
"""Each member reduces one part of this model or more."""
ATTACKS = ("none", "flip", "100x", "constant", "little", "3x", "growing", "bias", "labels")
USUAL_ATTACKS = ATTACKS[:5]
GROWTH = 0.1
"""By how much of its first length a growing lie grows in each step."""
RULES: dict[str, Callable[[argparse.Namespace], Aggregation | None]] = {
    "mean": lambda args: None,
    "clip": lambda args: ClipToMedianNorm(),
    "centered": lambda args: CenteredClip(args.tau),
    "trimmed": lambda args: TrimmedMean(args.liars / args.members),
}
Average = Callable[[Sequence[torch.Tensor]], Awaitable[torch.Tensor]]
"""Of the vectors of all members."""


class Digits:
    """Data, and a model that gives the gradients of all members at once."""

    def __init__(self, seed: int, members: int = MEMBERS) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._images = torch.tensor(images, dtype=torch.float32)[order] / 16
        self._labels = torch.tensor(labels)[order]
        self._train, self._members = 1400, members
        torch.manual_seed(seed)
        self._model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        self._rng = torch.Generator().manual_seed(seed + 1)

    @torch.no_grad()
    def gradients(self, batch: int, mistaken: int = 0) -> torch.Tensor:
        """(members, values): of a batch of each member.

        Args:
            mistaken: this many members, the first ones, take each label for the next one.
        """
        chosen = torch.randint(0, self._train, (self._members, batch), generator=self._rng)
        images, labels = self._images[chosen], self._labels[chosen]
        labels[:mistaken] = (labels[:mistaken] + 1) % 10
        first, first_bias, second, second_bias = self._model.parameters()
        hidden = (images @ first.t() + first_bias).relu_()
        # Of the mean cross entropy of each batch, back through both layers.
        errors = (hidden @ second.t() + second_bias).softmax(-1)
        errors -= torch.nn.functional.one_hot(labels, 10)
        errors /= batch
        back = (errors @ second) * (hidden > 0)
        found = back.mT @ images, back.sum(1), errors.mT @ hidden, errors.sum(1)
        return torch.cat([gradient.reshape(self._members, -1) for gradient in found], dim=1)

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, rate: float) -> None:
        vector = torch.nn.utils.parameters_to_vector(self._model.parameters())
        torch.nn.utils.vector_to_parameters(vector - rate * gradient, self._model.parameters())

    @torch.no_grad()
    def accuracy(self) -> float:
        """In percent, on images that nobody has trained on."""
        guesses = self._model(self._images[self._train :]).argmax(1)
        return 100 * float((guesses == self._labels[self._train :]).float().mean())

    @torch.no_grad()
    def loss(self) -> float:
        """Mean cross entropy on images that nobody has trained on."""
        images, labels = self._images[self._train :], self._labels[self._train :]
        return float(torch.nn.functional.cross_entropy(self._model(images), labels))


def attacked(vectors: torch.Tensor, attack: str, liars: int = LIARS, step: int = 0) -> torch.Tensor:
    """What members send of what they have: the first ones lie."""
    sent, lies, honest = vectors.clone(), vectors[:liars], vectors[liars:]
    if attack == "flip":
        sent[:liars] *= -1
    elif attack == "100x":
        sent[:liars] *= 100
    elif attack == "constant":
        sent[:liars] = 1.0
    elif attack == "little":
        sent[:liars] = honest.mean(0) - 1.5 * honest.std(0)
    elif attack == "3x":
        sent[:liars] *= 3
    elif attack == "growing":
        sent[:liars] *= -(1 + GROWTH * step)
    elif attack == "bias":
        sent[:liars] += lies.norm(dim=1, keepdim=True) / lies.shape[1] ** 0.5
    return sent


async def train(
    average: Average,
    attack: str,
    *,
    batch: int,
    steps: int,
    rate: float,
    momentum: float,
    seed: int,
    members: int = MEMBERS,
    liars: int = LIARS,
    wants_loss: bool = False,
) -> float:
    """Accuracy in percent, or the loss, after so many steps.

    Args:
        momentum: of the peers, 0: they send gradients.
    """
    digits, peer_momentum = Digits(seed, members), None
    for step in range(steps):
        vectors = digits.gradients(batch, liars if attack == "labels" else 0)
        if momentum:
            peer_momentum = peer_momentum or PeerMomentum(momentum, [vectors])
            peer_momentum.replace([vectors], batches=step + 1)
        digits.step(await average(list(attacked(vectors, attack, liars, step))), rate)
    return digits.loss() if wants_loss else digits.accuracy()


async def reduce(rule: Aggregation | None, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the members of a round get: parts, reducers and rules as in any round, only without a network."""
    infos = [CompressionInfo.from_tensor(vectors[0], key=0)]
    shares = load_balance_peers(len(vectors[0]), [1.0] * len(vectors))
    sent = [RoundVector([vector], infos, NoCompression(), PART_BYTES, shares, 1.0) for vector in vectors]
    norms = {member: share_norms(vector, member) for member, vector in enumerate(sent)}
    result, weights = torch.empty_like(vectors[0]), dict.fromkeys(range(len(vectors)), 1.0)
    accused: list[tuple[int, str]] = []
    for own, parts in enumerate(sent[0].parts):
        others = [member for member in weights if member != own]
        combiner = None if rule is None else Combiner(rule, len(result), norms, lambda *lie: accused.append(lie))
        reducer = PartReducer(parts, others, sent[own].values, own, weights, combiner=combiner)
        for (index, part), member in itertools.product(enumerate(parts), others):
            reducer.deliver(member, index, sent[member].values(part).clone())
        for index, part in enumerate(parts):
            average = await reducer.peek(index)
            if average is None:  # nobody's values are finite any more, so nobody makes a step
                return torch.zeros_like(result)
            for piece, values in zip(part.pieces_of([result]), [average], strict=True):
                piece.copy_(values)
    assert not accused, "liars tell their norms as they are here"
    return result


def train_without_network(rule: Aggregation | None, attack: str, **options: Any) -> float:
    """As :func:`train`, with the reduction alone."""
    return asyncio.run(train(lambda vectors: reduce(rule, vectors), attack, **options))


def train_with_averagers(rule: Aggregation | None, attack: str, *, members: int = MEMBERS, **options: Any) -> float:
    """As :func:`train`, with averagers on a simulated network."""

    async def main() -> float:
        network = Network()
        tensors = [[torch.zeros(64 * 32 + 32 + 32 * 10 + 10)] for _ in range(members)]
        nodes = await start_averagers(network, tensors, aggregation=rule, part_size_bytes=PART_BYTES)

        async def average(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
            for [tensor], vector in zip(tensors, vectors, strict=True):
                tensor.copy_(vector)
            steps = [start_step(network, node, expected_group_size=members) for node in nodes]
            await asyncio.gather(*map(asyncio.wrap_future, steps))
            assert all(torch.equal(tensor, tensors[0][0]) for [tensor] in tensors)
            return tensors[0][0].clone()

        return await train(average, attack, members=members, **options)

    return run(main(), seed=0, time_limit=1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(USUAL_ATTACKS))
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--liars", type=int, default=LIARS, help="how many of the members lie")
    parser.add_argument("--loss", action="store_true", help="print the loss, not the accuracy")
    parser.add_argument("--momentum", nargs="+", type=float, default=[0.0, 0.9], help="of the peers")
    parser.add_argument("--batch", type=int, default=64, help="samples of each member in a step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate of plain SGD")
    parser.add_argument("--tau", type=float, default=0.1, help="of CenteredClip")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--averagers", action="store_true", help="whole averagers on a simulated network")
    args = parser.parse_args()
    measure = train_with_averagers if args.averagers else train_without_network
    torch.set_num_threads(1)  # the vectors are short
    print(
        f"{args.liars} liars of {args.members}, batch {args.batch}, {args.steps} steps of {args.rate}, tau {args.tau}, "
        f"{args.seeds} seeds"
    )
    print(f"{'momentum':>8}  {'rule':10}" + "".join(f"{attack:>10}" for attack in args.attacks))
    found = []
    for momentum, name in itertools.product(args.momentum, args.rules):
        rule = RULES[name](args)
        row = {}
        for attack in args.attacks:
            options = {"batch": args.batch, "steps": args.steps, "rate": args.rate, "momentum": momentum}
            options |= {"members": args.members, "liars": args.liars, "wants_loss": args.loss}
            row[attack] = sum(measure(rule, attack, **options, seed=s) for s in range(args.seeds)) / args.seeds
        found.append({"momentum": momentum, "rule": name, **row})
        values = "".join(f"{row[attack]:>10.{3 if args.loss else 1}f}" for attack in args.attacks)
        print(f"{momentum:>8g}  {name:10}{values}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
