"""Which loss PowerSGD and PowerEF reach at which rank, beside exact averages, in one process.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --methods PowerEF --ranks 4 --steps 200

Two peers train a byte-level transformer with AdamW. Their batches are of equal size, so the result of a round depends
only on the mean of their gradients. One averager of the library computes it here from that mean, without a network. The
loss is measured on text that is not trained on. The bytes are those of a peer's gradients in one step, in float32.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from low_rank_peer import AVERAGERS

import shoal
from shoal.cli.demo import model as demo_model
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.low_rank import LowRankAverager

PEERS = 2
SEED = 0
HELD_OUT_WINDOWS = 200
MARKS = (50, 100, 200, 400, 700)
"""Numbers of steps after which the loss is measured."""


@torch.no_grad()
def average(averager: LowRankAverager, gradients: list[torch.Tensor]) -> None:
    """Replace the mean of all peers' gradients by the result of their round."""
    state = averager._state
    tensors = [*gradients, torch.ones(len(gradients))]  # the last one tells which parameters have gradients
    work = averager._begin(state, tensors, 1.0)
    averager._project(work)
    averager._finish(work, tensors, state.made_by, state.rounds + 1, True)


def values_sent(averager: GradientAverager) -> int:
    """How many values of its gradients a peer sends in a step."""
    values = sum(parameter.numel() for parameter in averager.parameters)
    if isinstance(averager, LowRankAverager):
        for matrix in averager._matrices:
            values -= matrix.rows * matrix.columns - averager.rank * (matrix.rows + matrix.columns)
    return values


def train(method: str, rank: int, args: argparse.Namespace, dht: shoal.DHT) -> dict[str, Any]:
    torch.manual_seed(SEED)
    corpus = demo_model.load_corpus(1)
    size = demo_model.ModelSize(context=args.context, nearest=1, width=args.width, heads=6, layers=args.layers)
    model = demo_model.ByteTransformer(size)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.rate)
    held_out = demo_model.even_windows(corpus.held_out, HELD_OUT_WINDOWS, args.context + 1)
    random = torch.Generator().manual_seed(SEED + 1)
    averager = AVERAGERS[method](rank)(parameters, dht=dht, prefix="ranks", start=False, warn=False)
    losses = {}
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for _ in range(PEERS):
            windows = demo_model.random_windows(corpus.shards[0], args.batch_size, args.context + 1, random)
            (demo_model.loss_on(model, windows) / PEERS).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert len(gradients) == len(parameters)
        if isinstance(averager, LowRankAverager):
            average(averager, gradients)
        optimizer.step()
        if step in MARKS:
            losses[step] = round(demo_model.held_out_loss(model, held_out), 3)
    return {
        "averager": method,
        "rank": rank,
        "kB per step": round(4 * values_sent(averager) / 1000),
        "loss after steps": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", choices=["PowerSGD", "PowerEF"], default=["PowerSGD", "PowerEF"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[32, 16, 8, 4])
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of each peer in a step")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate of AdamW")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # An averager needs one, although it is never started here.
    dht = shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    try:
        print(json.dumps(train("plain", 0, args, dht)), flush=True)
        for method in args.methods:
            for rank in args.ranks:
                print(json.dumps(train(method, rank, args, dht)), flush=True)
    finally:
        dht.shutdown()


if __name__ == "__main__":
    main()
