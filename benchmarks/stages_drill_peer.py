"""One peer of the drill with stages: a process that obeys the commands it reads, see :mod:`commands`.

The model is the demo's, with three blocks instead of two, cut into three stages. All begin with the same parameters.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from commands import obey, peer_parser
from torch import nn
from torch.nn import functional

import shoal
from shoal.cli.demo import model as demo_model

STAGES = 3
SIZE = demo_model.ModelSize(layers=STAGES)
WINDOW = SIZE.context + 1
HELD_OUT = 512
LEARNING_RATE = 1e-3
load_corpus = functools.cache(demo_model.load_corpus)


class Stage(nn.Module):
    """A block of the model. The first stage has the embeddings, too; the last one computes losses."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        whole = demo_model.ByteTransformer(SIZE)
        self.is_first, self.is_last = number == 0, number == STAGES - 1
        self.block = whole.blocks[number]
        if self.is_first:
            self.tables, self.positions = whole.tables, whole.positions
        if self.is_last:
            self.norm, self.out = whole.norm, whole.out

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_first:
            tokens, x = x, self.positions.weight[: x.shape[1]].expand(len(x), -1, -1)
            for back, table in enumerate(self.tables):
                x = x + functional.pad(table(tokens), (0, 0, back, 0))[:, : tokens.shape[1]]
        x = self.block(x)
        if not self.is_last:
            return x
        logits = self.out(self.norm(x)).transpose(1, 2)
        return functional.cross_entropy(logits, labels, reduction="none").mean(dim=1)


def microbatches(driver: int, drivers: int, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a driver brings through: windows of its own part of the text, always the same ones."""
    text, random = load_corpus(drivers).shards[driver], torch.Generator().manual_seed(driver)
    while True:
        windows = demo_model.random_windows(text, rows, WINDOW, random)
        yield windows[:, :-1], windows[:, 1:]


def held_out(drivers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Windows of text on which nobody trains."""
    windows = demo_model.even_windows(load_corpus(drivers).held_out, HELD_OUT, WINDOW)
    return [(each[:, :-1], each[:, 1:]) for each in windows.split(64)]


def train_alone(steps: int, drivers: int, rows: int, step: int, seed: int, skipped: int = 0) -> float:
    """Train all stages in this process, with the microbatches of all drivers in turns, but for the first ones of each.

    Returns:
        The loss on text held out.
    """
    stages = [Stage(number, seed) for number in range(STAGES)]
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=LEARNING_RATE) for stage in stages]
    sources = [itertools.islice(microbatches(each, drivers, rows), skipped, None) for each in range(drivers)]

    def losses_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for stage in stages[:-1]:
            x = stage(x)
        return stages[-1](x, labels)

    for number in range(steps * step):
        (losses_of(*next(sources[number % drivers])).mean() / step).backward()
        if number % step == step - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        return float(torch.cat([losses_of(*each) for each in held_out(drivers)]).mean())


class DrillPeer:
    """Holds a stage, or drives.

    Args:
        drivers: how many there are; they have the first numbers.
        rows: samples of a microbatch.
        step: microbatches of all drivers that make a step.
    """

    version = shoal.__version__

    def __init__(self, index: int, drivers: int, rows: int, step: int, seed: int, options: dict[str, Any]) -> None:
        self.index, self.drivers, self.rows = index, drivers, rows
        self.options = {
            **options,
            "stages": [functools.partial(Stage, number, seed) for number in range(STAGES)],
            "optimizer": functools.partial(torch.optim.AdamW, lr=LEARNING_RATE),
            "target_batch_size": step * rows,
        }
        self.times: list[tuple[int, float]] = []
        self.brought = 0
        self.error = ""
        self.stopping = threading.Event()

    def open(self) -> list[str]:
        """Start the first peer; returns where the others find it."""
        self.dht = shoal.DHT(start=True)
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, addresses: list[str], stage: int | None) -> None:
        """Hold a stage, or get ready to drive."""
        if self.index != 0:
            self.dht = shoal.DHT(addresses, start=True)
        self.model = shoal.StagedModel(dht=self.dht, run_id="drill", stage=stage, **self.options)

    def start(self) -> None:
        """Begin to drive, until told to stop."""
        self.training = threading.Thread(target=self._train)
        self.training.start()

    def _train(self) -> None:
        try:
            for losses in self.model.train(microbatches(self.index, self.drivers, self.rows)):
                self.brought += len(losses)
                if not self.times or self.times[-1][0] != self.model.local_epoch:
                    self.times.append((self.model.local_epoch, time.monotonic()))
                if self.stopping.is_set():
                    return
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"

    def progress(self) -> dict[str, Any]:
        """How far this driver is."""
        if self.error:
            raise RuntimeError(self.error)
        step, since = self.times[-1] if self.times else (0, 0.0)
        return {"step": step, "since": since, "brought": self.brought}

    def stop(self) -> list[tuple[int, float]]:
        """Drive no more; returns when each step began."""
        self.stopping.set()
        self.training.join()
        return self.times

    def evaluate(self) -> float:
        """The loss on text on which nobody trains."""
        return float(torch.cat(list(self.model.evaluate(held_out(self.drivers)))).mean())

    def counts(self) -> dict[str, Any]:
        """What this peer has counted about microbatches."""
        metrics = self.dht.p2p.metrics
        names = ("microbatches_done", "microbatches_resent", "microbatches_dropped", "hops_repaired")
        return {name: getattr(metrics, name) for name in names}

    def close(self) -> None:
        self.model.shutdown()
        self.dht.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--drivers", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    torch.set_num_threads(1)
    obey(lambda: DrillPeer(args.index, args.drivers, args.rows, args.step, args.seed, args.options))


if __name__ == "__main__":
    main()
