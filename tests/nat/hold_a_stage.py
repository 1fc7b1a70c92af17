"""Holds one of two stages, and drives if that is the first one; tells how it goes. Arguments: an address, and which."""

from __future__ import annotations

import functools
import itertools
import json
import sys

import torch
from torch import nn

import shoal

ROWS, WIDTH, WORDS = 8, 4096, 16
BOUNDARY_BYTES = ROWS * WIDTH * 4
STEP = 4
"""Microbatches of a step."""


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x), labels, reduction="none")


def main() -> None:
    address, stage = sys.argv[1], int(sys.argv[2])
    words = torch.arange(ROWS) % WORDS
    with (
        shoal.DHT([address], start=True) as dht,
        shoal.StagedModel(
            dht=dht,
            run_id="behind_routers",
            stages=[functools.partial(nn.Embedding, WORDS, WIDTH), Last],
            stage=stage,
            optimizer=functools.partial(torch.optim.SGD, lr=1e-4),
            target_batch_size=STEP * ROWS,
        ) as model,
    ):
        if stage:
            model.serve()
        for losses in model.train(itertools.repeat((words, words))):
            metrics = dht.p2p.metrics
            event = {
                "step": model.local_epoch,
                "done": metrics.microbatches_done,
                "dropped": dict(metrics.microbatches_dropped),
                "loss": float(losses.mean()),
                "reachability": metrics.reachability,
            }
            print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
