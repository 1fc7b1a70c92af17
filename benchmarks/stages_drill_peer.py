"""One peer of the drill with stages: a process that obeys the commands it reads, see :mod:`commands`.

The model is the demo's, larger, and cut into stages. All begin with the same parameters.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import torch
from commands import obey, peer_parser
from torch import nn
from torch.nn import functional

import shoal
from shoal.cli.demo import model as demo_model

HELD_OUT = 512
load_corpus = functools.cache(demo_model.load_corpus)


class Plan(NamedTuple):
    """What all peers of a drill know, and the process that trains alone."""

    stages: int
    layers: int
    """Of the whole model, as many in each stage."""
    width: int
    heads: int
    drivers: int
    """How many peers drive; they have the first numbers."""
    rows: int
    """Samples of a microbatch."""
    step: int
    """Microbatches of all drivers that make a step."""
    seed: int
    """Of the parameters."""
    learning_rate: float

    @property
    def size(self) -> demo_model.ModelSize:
        return demo_model.ModelSize(layers=self.layers, width=self.width, heads=self.heads)

    @property
    def window(self) -> int:
        return self.size.context + 1


class Stage(nn.Module):
    """Some blocks of the model. The first stage has the embeddings, too; the last one computes losses."""

    def __init__(self, number: int, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(plan.seed)
        whole = demo_model.ByteTransformer(plan.size)
        count = plan.layers // plan.stages
        self.is_first, self.is_last = number == 0, number == plan.stages - 1
        self.blocks = whole.blocks[number * count : (number + 1) * count]
        if self.is_first:
            self.tables, self.positions = whole.tables, whole.positions
        if self.is_last:
            self.norm, self.out = whole.norm, whole.out

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_first:
            tokens, x = x, self.positions.weight[: x.shape[1]].expand(len(x), -1, -1)
            for back, table in enumerate(self.tables):
                x = x + functional.pad(table(tokens), (0, 0, back, 0))[:, : tokens.shape[1]]
        x = self.blocks(x)
        if not self.is_last:
            return x
        logits = self.out(self.norm(x)).transpose(1, 2)
        return functional.cross_entropy(logits, labels, reduction="none").mean(dim=1)


def microbatches(driver: int, plan: Plan, skipped: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a driver brings through: windows of its own part of the text, always the same ones, but for the first."""
    text, random = load_corpus(plan.drivers).shards[driver], torch.Generator().manual_seed(driver)
    for number in itertools.count():
        windows = demo_model.random_windows(text, plan.rows, plan.window, random)
        if number >= skipped:
            yield windows[:, :-1], windows[:, 1:]


def held_out(plan: Plan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Windows of text on which nobody trains."""
    windows = demo_model.even_windows(load_corpus(plan.drivers).held_out, HELD_OUT, plan.window)
    return [(each[:, :-1], each[:, 1:]) for each in windows.split(64)]


def train_alone(plan: Plan, steps: int, skipped: int = 0) -> tuple[float, list[float]]:
    """Train all stages in this process, with the microbatches of all drivers in turns, but for the first ones of each.

    Returns:
        The loss on text held out, and that of each step before it.
    """
    stages = [Stage(number, plan) for number in range(plan.stages)]
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=plan.learning_rate) for stage in stages]
    sources = itertools.cycle([microbatches(each, plan, skipped) for each in range(plan.drivers)])

    def losses_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for stage in stages[:-1]:
            x = stage(x)
        return stages[-1](x, labels)

    found = []
    for _ in range(steps):
        found.append(0.0)
        for _ in range(plan.step):
            loss = losses_of(*next(next(sources))).mean() / plan.step
            loss.backward()
            found[-1] += loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float(torch.cat([losses_of(*each) for each in held_out(plan)]).mean()), found


def _with_codecs(options: dict[str, Any]) -> dict[str, Any]:
    """Options in which a codec is no longer the name of its class."""
    return {
        name: _with_codecs(value)
        if isinstance(value, dict)
        else getattr(shoal, value)()
        if name.endswith("compression")
        else value
        for name, value in options.items()
    }


class Brought(NamedTuple):
    """A microbatch that a driver has brought through."""

    moment: float
    step: int
    """Of this peer at that moment."""
    samples: int
    loss: float


class DrillPeer:
    """Holds a stage, or drives, or both.

    Args:
        options: of ``StagedModel``; a codec is given by the name of its class.
    """

    version = shoal.__version__

    def __init__(self, index: int, plan: Plan, listen: str, options: dict[str, Any]) -> None:
        self.index, self.plan, self.listen = index, plan, listen
        self.options = {
            **_with_codecs(options),
            "stages": [functools.partial(Stage, number, plan) for number in range(plan.stages)],
            "optimizer": functools.partial(torch.optim.AdamW, lr=plan.learning_rate),
            "target_batch_size": plan.step * plan.rows,
        }
        self.story: list[Brought] = []
        self.error = ""
        self.stopping = threading.Event()

    def open(self, addresses: list[str]) -> list[str]:
        """Start a peer that knows those at these addresses; returns where others find it."""
        self.dht = shoal.DHT(addresses, start=True, host_maddrs=[f"/ip4/{self.listen}/tcp/0"])
        return self.addresses()

    def addresses(self) -> list[str]:
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, stage: int | None) -> None:
        """Hold a stage, or get ready to drive."""
        self.model = shoal.StagedModel(dht=self.dht, run_id="drill", stage=stage, **self.options)

    def start(self, skipped: int) -> None:
        """Begin to drive, with other microbatches than those before, until told to stop."""
        self.training = threading.Thread(
            target=self._train, args=[microbatches(self.index, self.plan, skipped)], daemon=True
        )
        self.training.start()

    def _train(self, source: Iterator[Any]) -> None:
        try:
            for losses in self.model.train(source):
                moment, step = time.monotonic(), self.model.local_epoch
                self.story.append(Brought(moment, step, len(losses), float(losses.mean())))
                if self.stopping.is_set():
                    return
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"

    def progress(self, seen: int) -> list[Brought]:
        """What this driver has brought since it was asked last."""
        if self.error:
            raise RuntimeError(self.error)
        return self.story[seen:]

    def stop(self) -> None:
        """Drive no more."""
        self.stopping.set()
        self.training.join()

    def evaluate(self) -> float:
        """The loss on text on which nobody trains."""
        return float(torch.cat(list(self.model.evaluate(held_out(self.plan)))).mean())

    def counts(self) -> dict[str, Any]:
        """What this peer has counted so far: of microbatches, bytes, and seconds of processor time."""
        metrics = self.dht.p2p.metrics
        names = ("microbatches_done", "microbatches_resent", "microbatches_dropped", "hops_repaired", "bytes_sent")
        sent = Counter[str]()
        for handler, count in metrics.bytes_sent_by_handler.items():
            sent[handler.rsplit("::")[-1].split(".")[0]] += count
        return {
            **{name: getattr(metrics, name) for name in names},
            "sent_by_service": sent,
            "processor": time.process_time(),
            "computing": self._computing(),
        }

    def _computing(self) -> float:
        """Seconds of processor time of the thread that computes stages."""
        own = {thread.native_id for thread in threading.enumerate() if thread.name == "shoal-runtime"}
        found = (each for each in psutil.Process().threads() if each.id in own)
        return sum(each.user_time + each.system_time for each in found)

    def close(self) -> None:
        self.model.shutdown()
        self.dht.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--plan", type=json.loads, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--listen", default="127.0.0.1", metavar="ADDRESS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    obey(lambda: DrillPeer(args.index, Plan(*args.plan), args.listen, args.options))


if __name__ == "__main__":
    main()
