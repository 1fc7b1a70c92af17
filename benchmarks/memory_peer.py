"""One peer of the memory benchmark: a process that obeys the commands it reads, see :mod:`commands`.

It runs in two environments, shoal's own and that of the library with which shoal is compared, so it imports nothing but
the standard library, torch and the library under test: the same calls of the same interface.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from commands import obey, peer_parser
from torch import nn

RUN = "benchmark"
WIDTH = 1024
BYTES = 4
"""Of a parameter."""
POLL_SECONDS = 0.005


def make_model(megabytes: float) -> nn.Module:
    """Linear layers that take about this much (10^6 bytes) together."""
    layer = WIDTH * (WIDTH + 1) * BYTES
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(megabytes * 1e6 / layer)))))


class MemoryPeer:
    """Trains a model with Adam, and notes when it does what.

    Args:
        batch: samples in a step.
        seconds: what a batch takes at least.
        megabytes: size of the model.
        options: of the optimizer.
        offload: give the optimizer as a function, so that it works on the CPU whatever the model's device.
    """

    def __init__(
        self,
        library: str,
        index: int,
        batch: int,
        seconds: float,
        megabytes: float,
        options: dict[str, Any],
        offload: bool,
    ) -> None:
        self.index, self.batch, self.seconds, self.options, self.offload = index, batch, seconds, options, offload
        self.library = importlib.import_module(library)
        # What a program has in any case is there before the memory is measured.
        importlib.import_module(f"{library}.optim.grad_averager")
        self.version: str = self.library.__version__
        torch.manual_seed(0)
        self.model = make_model(megabytes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.data = torch.Generator().manual_seed(index)
        self.spans: list[tuple[str, float, float]] = []
        self.ended = threading.Event()

    def prepare(self) -> int:
        """Train in plain torch, so that gradients and statistics are there; returns the bytes of the model."""
        for _ in range(3):
            self._make_gradients()
            self.optimizer.step()
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Note when this block began and ended, by the monotonic clock."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spans.append((name, began, time.monotonic()))

    def join(self, address: list[str]) -> list[str]:
        """Join the swarm of the first peer, which has no address to join; returns this peer's addresses."""
        with self.noting("made"):
            self.dht = self.library.DHT(initial_peers=address, start=True)
            wanted: dict[str, Any] = {"optimizer": self.optimizer}
            if self.offload:
                del self.optimizer
                wanted = {
                    "optimizer": functools.partial(torch.optim.Adam, lr=1e-4),
                    "params": list(self.model.parameters()),
                    "offload_optimizer": True,
                }
            self.shared = self.library.Optimizer(
                dht=self.dht, run_id=RUN, batch_size_per_step=self.batch, **wanted, **self.options
            )
            self._note_phases()
        return [str(each) for each in self.dht.get_visible_maddrs()]

    def _note_phases(self) -> None:
        shared = self.shared
        load, average = shared.load_state_from_peers, shared.grad_averager.step

        def load_state_from_peers(*args: Any, **kwargs: Any) -> Any:
            with self.noting("downloading"):
                return load(*args, **kwargs)

        def step(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            control = average(*args, **kwargs)
            control.add_done_callback(lambda _: self.spans.append(("averaging gradients", began, time.monotonic())))
            return control

        shared.load_state_from_peers, shared.grad_averager.step = load_state_from_peers, step
        began = [0.0]
        inner = shared.opt
        inner.register_step_pre_hook(lambda *_: began.__setitem__(0, time.monotonic()))
        inner.register_step_post_hook(lambda *_: self.spans.append(("stepping", began[0], time.monotonic())))
        self.watching = threading.Thread(target=self._watch_state_rounds)
        self.watching.start()

    def _watch_state_rounds(self) -> None:
        averager, began = self.shared.state_averager, None
        while not self.ended.wait(POLL_SECONDS):
            now, runs = time.monotonic(), averager.averaging_in_progress
            if began is not None and not runs:
                self.spans.append(("averaging parameters", began, now))
            began = None if not runs else began or now

    def train(self, epochs: int) -> int:
        """Train until so many more global steps have been made; returns the epoch."""
        last = self.shared.local_epoch + epochs
        return self.train_to(last)

    def train_to(self, last: int) -> int:
        """Train until the swarm is at this epoch; returns the epoch."""
        while self.shared.local_epoch < last:
            began = time.monotonic()
            self._make_gradients()
            time.sleep(max(0.0, began + self.seconds - time.monotonic()))
            self.shared.step()
        return int(self.shared.local_epoch)

    def first_parameter(self) -> float:
        """Shows whether two peers have the same model."""
        return float(next(self.model.parameters()).detach().flatten()[0])

    def noted(self) -> list[tuple[str, float, float]]:
        """What this peer did, and when."""
        return self.spans

    def _make_gradients(self) -> None:
        self.model.zero_grad()
        self.model(torch.randn(self.batch, WIDTH, generator=self.data)).square().mean().backward()

    def close(self) -> None:
        """Leave."""
        self.ended.set()
        self.watching.join()
        self.shared.shutdown()
        self.dht.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    parser.add_argument("--offload", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = args.batch, args.seconds, args.megabytes, args.options, bool(args.offload)
    obey(lambda: MemoryPeer(args.library, args.index, *figures))


if __name__ == "__main__":
    main()
