"""One peer of the benchmarks of stages: a process that obeys the commands it reads, see :mod:`commands`.

It runs in two environments, shoal's own and that of the library with which shoal is compared, so it imports nothing but
the standard library, torch and the library under test. The stages are the same modules in both.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from commands import obey, peer_parser
from torch import nn

RUN = "benchmark"
VOCABULARY = 256
LEARNING_RATE = 1e-3
FIND_LIMIT_SECONDS = 60


class Size(NamedTuple):
    """What a microbatch is, and what a stage computes with it."""

    rows: int = 16
    length: int = 64
    width: int = 256
    hidden: int = 64
    layers: int = 1
    seconds: float = 0.0
    """For which a stage waits in a pass, two thirds of it on the way back: it has a device of its own to wait for."""

    @property
    def boundary(self) -> int:
        """Bytes of the tensor between two stages."""
        return self.rows * self.length * self.width * 4


class _Wait(torch.autograd.Function):
    """Takes time, but no processor time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


class Stage(nn.Module):
    """One of several stages: the first one takes tokens, the last one takes labels, too, and returns losses."""

    def __init__(self, number: int, count: int, size: Size) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.seconds = size.seconds
        self.embedding = nn.Embedding(VOCABULARY, size.width) if number == 0 else None
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(size.width, size.hidden), nn.ReLU(), nn.Linear(size.hidden, size.width))
            for _ in range(size.layers)
        )
        self.out = nn.Linear(size.width, VOCABULARY) if number == count - 1 else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        if self.seconds:
            x = _Wait.apply(x, self.seconds)
        for layer in self.layers:
            x = x + layer(x)
        if self.out is None:
            return x
        logits = self.out(x).transpose(1, 2)
        return nn.functional.cross_entropy(logits, labels, reduction="none").mean(dim=1)


def microbatches(size: Size, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens; the label of each one is what follows it."""
    random = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (size.rows, size.length), generator=random)
        yield tokens, tokens.roll(-1, dims=1)


def arguments_of(number: int, count: int, size: Size, rows: int) -> tuple[torch.Tensor, ...]:
    """What a stage is called with."""
    tokens = torch.zeros(rows, size.length, dtype=torch.int64)
    if number == 0:
        return (tokens,)
    x = torch.zeros(rows, size.length, size.width)
    return (x, tokens) if number == count - 1 else (x,)


class Alone:
    """One stage without any network: forward and backward, over and over."""

    def __init__(self, number: int, count: int, size: Size) -> None:
        self.number, self.count, self.size = number, count, size
        self.stage = Stage(number, count, size)
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=LEARNING_RATE)
        x, *labels = arguments_of(number, count, size, size.rows)
        self.x = torch.randn(x.shape, requires_grad=True) if x.is_floating_point() else x
        self.labels = labels

    def compute(self, count: int, step: int, clock: Callable[[], float] = time.monotonic) -> list[float]:
        """The time after each microbatch; ``step`` of them make one of the optimizer."""
        times = []
        for number in range(1, count + 1):
            outputs = self.stage(self.x, *self.labels)
            outputs.backward(torch.full_like(outputs, 1 / outputs.numel()))
            if number % step == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            times.append(clock())
        return times


def layers_for(seconds: float, number: int, count: int, size: Size) -> int:
    """How many layers a stage must have so that a pass, forward and back, takes about this much processor time."""

    def measure(layers: int) -> float:
        alone = Alone(number, count, size._replace(layers=layers))
        times = alone.compute(20, 20, time.process_time)
        return median(after - before for before, after in itertools.pairwise(times))

    few, many = 4, 24
    base = measure(few)
    return max(1, round(few + (seconds - base) * (many - few) / (measure(many) - base)))


class StagePeer:
    """Holds a stage, drives, or both.

    Args:
        holds: the stage that each peer holds: a number, ``"auto"``, or ``None`` for one that only drives.
        count: of stages.
        sizes: of the stages, in their order.
        step: microbatches of all drivers that make a step.
        in_flight: microbatches that a driver has under way at a time.
    """

    version: str

    def __init__(
        self, index: int, holds: list[Any], count: int, sizes: list[Size], step: int, in_flight: int, listen: str
    ) -> None:
        self.index, self.holds, self.count, self.sizes = index, holds, count, sizes
        self.step, self.in_flight = step, in_flight
        self.listen = {"host_maddrs": [f"/ip4/{listen}/tcp/0"]}
        self.source = microbatches(sizes[0], seed=index)

    def peak(self) -> int:
        """The most memory that this process has had since the peak was reset, in bytes."""
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) * 1024

    def reset_peak(self) -> int:
        """Forget peaks; returns what this process has now."""
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        return self.peak()


class AlonePeer(StagePeer):
    """Computes its stage without any network."""

    version = torch.__version__

    def open(self) -> list[str]:
        return []

    def join(self, addresses: list[str], hold: Any) -> None:
        self.alone = Alone(hold, self.count, self.sizes[hold])

    def drive(self, count: int) -> dict[str, Any]:
        began = time.monotonic()
        return {"began": began, "times": self.alone.compute(count, self.step)}

    def close(self) -> None:
        pass


class PlainPeer(StagePeer):
    """Has a stage with the optimizer that a stage peer has, and no stages: what memory is compared with."""

    def __init__(self, *figures: Any, options: dict[str, Any]) -> None:
        super().__init__(*figures)
        self.shoal = importlib.import_module("shoal")
        self.version = self.shoal.__version__
        importlib.import_module("shoal.stages.model")

    def open(self) -> list[str]:
        return []

    def join(self, addresses: list[str], hold: Any) -> None:
        """Make some steps of one sample each, so that gradients and statistics are there."""
        size = self.sizes[hold]
        alone = Alone(hold, self.count, size._replace(rows=1))
        self.dht = self.shoal.DHT(start=True, **self.listen)
        self.optimizer = self.shoal.Optimizer(
            dht=self.dht,
            run_id="plain",
            target_batch_size=1,
            batch_size_per_step=1,
            optimizer=torch.optim.AdamW(alone.stage.parameters()),
        )
        alone.optimizer = self.optimizer
        alone.compute(3, 1)
        self.stage = alone.stage

    def close(self) -> None:
        self.optimizer.shutdown()
        self.dht.shutdown()


class ShoalPeer(StagePeer):
    """Holds stages, or drives, with shoal.

    Args:
        options: further options of ``StagedModel``; a codec is given by the name of its class.
    """

    def __init__(self, *figures: Any, options: dict[str, Any]) -> None:
        super().__init__(*figures)
        self.shoal = importlib.import_module("shoal")
        self.version = self.shoal.__version__
        codecs = {name: getattr(self.shoal, options[name])() for name in options if name.endswith("compression")}
        optimizer = getattr(torch.optim, options.pop("optimizer", "SGD"))
        self.options = {**options, **codecs, "optimizer": functools.partial(optimizer, lr=LEARNING_RATE)}

    def open(self) -> list[str]:
        """Start the first peer; returns where the others find it."""
        self.dht = self.shoal.DHT(start=True, **self.listen)
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, addresses: list[str], hold: Any) -> None:
        """Hold the stage."""
        if self.index != 0:
            self.dht = self.shoal.DHT(addresses, start=True, **self.listen)
        self.model = self.shoal.StagedModel(
            dht=self.dht,
            run_id=RUN,
            stages=[functools.partial(Stage, n, self.count, size) for n, size in enumerate(self.sizes)],
            stage=hold,
            target_batch_size=self.step * self.sizes[0].rows,
            in_flight=self.in_flight,
            **self.options,
        )

    def drive(self, count: int | None, seconds: float = math.inf) -> dict[str, Any]:
        """Bring microbatches through; returns the time of the monotonic clock after each."""
        began, sent = time.monotonic(), self.dht.p2p.metrics.bytes_sent
        source = itertools.islice(self.source, count)
        samples = itertools.takewhile(lambda _: time.monotonic() < began + seconds, source)
        times = [time.monotonic() for _ in self.model.train(samples)]
        return {"began": began, "times": times, "sent": self.dht.p2p.metrics.bytes_sent - sent}

    def held(self) -> list[int]:
        """The stages that this peer holds now."""
        return list(self.model.held)

    def close(self) -> None:
        self.model.shutdown()
        self.dht.shutdown()


class HivemindPeer(StagePeer):
    """A server with one expert, or a client that calls all of them from a pool of threads."""

    def __init__(self, *figures: Any) -> None:
        super().__init__(*figures)
        os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
        self.hivemind = importlib.import_module("hivemind")
        self.version = self.hivemind.__version__

    def open(self) -> list[str]:
        """Start the first server; returns where the others find it."""
        self.serve(self.holds[0], [])
        return [str(address) for address in self.server.dht.get_visible_maddrs()]

    def serve(self, number: int, addresses: list[str]) -> None:
        count, size = self.count, self.sizes[number]

        def sample_input(rows: int, width: int) -> Any:
            arguments = arguments_of(number, count, size, rows)
            return arguments if len(arguments) > 1 else arguments[0]

        @self.hivemind.register_expert_class("stage", sample_input)
        class Expert(Stage):
            def __init__(self, width: int) -> None:
                super().__init__(number, count, size._replace(width=width))

        self.server = self.hivemind.Server.create(
            expert_uids=[f"stage.{number}"],
            expert_cls="stage",
            hidden_dim=size.width,
            optim_cls=functools.partial(torch.optim.SGD, lr=LEARNING_RATE),
            device="cpu",
            initial_peers=addresses,
            start=True,
            **self.listen,
        )

    def join(self, addresses: list[str], hold: Any) -> None:
        """Serve the stage, or get ready to call them all."""
        if hold is not None:
            if self.index != 0:
                self.serve(hold, addresses)
            return
        self.dht = self.hivemind.DHT(addresses, start=True, **self.listen)
        uids = [f"stage.{number}" for number in range(self.count)]
        deadline = time.monotonic() + FIND_LIMIT_SECONDS
        while None in (experts := self.hivemind.moe.get_experts(self.dht, uids)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"hivemind does not find {uids}: {experts}")
            time.sleep(0.5)
        self.experts = experts

    def drive(self, count: int) -> dict[str, Any]:
        """Bring microbatches through; returns the time of the monotonic clock after each."""

        def bring(microbatch: tuple[torch.Tensor, torch.Tensor]) -> float:
            x, labels = microbatch
            for expert in self.experts[:-1]:
                x = expert(x)
            self.experts[-1](x, labels).mean().backward()
            return time.monotonic()

        began = time.monotonic()
        with ThreadPoolExecutor(self.in_flight) as pool:
            times = list(pool.map(bring, itertools.islice(self.source, count)))
        return {"began": began, "times": sorted(times)}

    def close(self) -> None:
        if self.holds[self.index] is None:
            self.dht.shutdown()
        else:
            self.server.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--plain", type=int, default=0, help="1: no stages, but the optimizer of one")
    parser.add_argument("--holds", type=json.loads, required=True)
    parser.add_argument("--sizes", type=json.loads, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--listen", default="127.0.0.1", metavar="ADDRESS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [Size(*each) for each in args.sizes]
    figures = args.index, args.holds, len(sizes), sizes, args.step, args.in_flight, args.listen

    def make_peer() -> StagePeer:
        if args.library == "torch":
            return AlonePeer(*figures)
        if args.library == "hivemind":
            return HivemindPeer(*figures)
        return (PlainPeer if args.plain else ShoalPeer)(*figures, options=args.options)

    obey(make_peer)


if __name__ == "__main__":
    main()
