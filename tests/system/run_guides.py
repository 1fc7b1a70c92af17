"""Runs the code of the guides, block by block, together with another peer that does the same.

What a block leaves out with ``...`` or takes for granted, such as a model and its data, is put around it here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shoal

ROOT = Path(__file__).parents[2]
GUIDES = ("compression.md", "gradients.md", "robust-averages.md")
SAMPLES = 64


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def blocks_of(document: str) -> list[str]:
    text = (ROOT / "docs" / document).read_text()
    return [match[1] for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def batches(optimizer: Any) -> Iterator[torch.Tensor]:
    """Until a step has been made together."""
    while peers_in_last_round(optimizer) < 2:
        yield torch.randn(16, 8)
        time.sleep(0.02)  # stands for the work of a larger model


def peers_in_last_round(optimizer: Any) -> int:
    last = optimizer.grad_averager.last_round
    return 0 if last is None else len(last.peers)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def run_with_optimizer(block: str, dht: shoal.DHT, run_id: str) -> int:
    """Run a block that makes an optimizer, and train with it; returns of how many peers the last round was."""
    model = make_model()
    common = {
        "dht": dht,
        "run_id": run_id,
        "target_batch_size": SAMPLES,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "matchmaking_time": 5.0,
        "averaging_timeout": 20.0,
        "delay_state_averaging": False,
    }
    given = {name for name in common if f" {name}=" in block.partition("Optimizer(")[2]}
    arguments = {name: value for name, value in common.items() if name not in given}
    names: dict[str, Any] = {"shoal": shoal, "torch": torch, "model": model, "loss_of": loss_of, "common": arguments}
    code = block.replace("...", "**common", 1)
    if "for batch in batches" in code:
        names["batches"] = _Lazily(lambda: batches(names["opt"]))
    exec(compile(code, run_id, "exec"), names)
    opt = names["opt"]
    if "batches" not in names:
        for batch in batches(opt):
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step(batch_size=len(batch))
    peers = peers_in_last_round(opt)
    opt.shutdown()
    return peers


class _Lazily:
    """Something to loop over that is made when the loop begins."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("initial_peers", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dht = shoal.DHT(args.initial_peers, start=True)
    say(addresses=[str(address) for address in dht.get_visible_maddrs()])
    blocks = [block for document in GUIDES for block in blocks_of(document) if "shoal.Optimizer(" in block]
    for number, block in enumerate(blocks):
        assert sys.stdin.readline()
        say(block=number, of=len(blocks), peers=run_with_optimizer(block, dht, f"guide_{number}"))
    say(done=True)
    sys.stdin.readline()
    dht.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
