"""A process that accumulates gradients, with torch alone and with the library under test; see :mod:`commands`.

It runs in two environments, shoal's own and that of the library with which shoal is compared, so it imports nothing but
the standard library, torch and the library under test: the same calls of the same interface.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from commands import obey, peer_parser
from torch import nn

LAYERS = 12


class AccumulationPeer:
    """Has a model for each way of accumulating, so that these can take turns.

    Args:
        parameters: of each model.
        batch: samples in each step.
    """

    def __init__(self, library: str, index: int, parameters: int, batch: int) -> None:
        self.index, self.batch, self.parameters = index, batch, parameters
        self.library = importlib.import_module(library)
        self.averagers = importlib.import_module(f"{library}.optim.grad_averager")
        self.version: str = self.library.__version__
        self.closing: list[Any] = []

    def _model(self) -> nn.Module:
        width = round((self.parameters / LAYERS) ** 0.5)
        torch.manual_seed(0)
        self.inputs = torch.randn(self.batch, width)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))

    def _backward(self, model: nn.Module) -> None:
        model(self.inputs).square().mean().backward()

    def _plain(self) -> Callable[[], None]:
        """``backward`` adds to ``.grad``, as in every loop that accumulates."""
        model = self._model()
        return lambda: self._backward(model)

    def _with_optimizer(self, reuse_grad_buffers: bool) -> Callable[[], None]:
        """``backward`` and a step that is not the last one of its epoch."""
        model = self._model()
        dht = self.library.DHT(start=True)
        optimizer = self.library.Optimizer(
            dht=dht,
            run_id="benchmark",
            target_batch_size=10**12,
            batch_size_per_step=self.batch,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            reuse_grad_buffers=reuse_grad_buffers,
            grad_averager_factory=self.averagers.GradientAverager,
        )
        self.closing += [dht, optimizer]

        def step() -> None:
            if not reuse_grad_buffers:
                optimizer.zero_grad()
            self._backward(model)
            optimizer.step()

        return step

    def measure(self, runs: int) -> dict[str, list[float]]:
        """Seconds of each step: the ways of accumulating take turns."""
        ways = {
            "plain": self._plain(),
            "in place": self._with_optimizer(reuse_grad_buffers=True),
            "in buffers": self._with_optimizer(reuse_grad_buffers=False),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(2 + runs):
            for way, step in ways.items():
                began = time.perf_counter()
                step()
                seconds[way].append(time.perf_counter() - began)
        return {way: of_all[2:] for way, of_all in seconds.items()}

    def close(self) -> None:
        """Leave."""
        for each in reversed(self.closing):
            each.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    args = parser.parse_args()
    obey(lambda: AccumulationPeer(args.library, args.index, round(args.parameters), args.batch))


if __name__ == "__main__":
    main()
