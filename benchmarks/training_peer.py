"""One peer of a training run: a process that obeys the commands it reads, see :mod:`commands`.

It runs in two environments, shoal's own and that of the library with which shoal is compared, so it imports nothing but
the standard library, torch and the library under test: the same calls of the same interface.
"""

from __future__ import annotations

import importlib
import json
import time
from typing import Any

import torch
from commands import obey, peer_parser
from torch import nn

RUN = "benchmark"
PIXELS, CLASSES = 64, 10
BYTES = 4
"""Of a parameter."""


def make_model(megabytes: float) -> nn.Module:
    """A classifier of pictures of 8 × 8 pixels, with one hidden layer of about this size (10^6 bytes)."""
    hidden = max(16, round(megabytes * 1e6 / BYTES / (PIXELS + CLASSES + 1)))
    return nn.Sequential(nn.Linear(PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def remembering(averager_class: type[Any]) -> type[Any]:
    """A class of gradient averagers that remembers its latest round."""

    class RememberingAverager(averager_class):  # type: ignore[misc]
        latest_round: Any = None

        def step(self, *args: Any, **kwargs: Any) -> Any:
            self.latest_round = super().step(*args, **kwargs)
            return self.latest_round

    return RememberingAverager


def members_of(finished_round: Any) -> int:
    """How many peers took part in a round; 1 if it failed or never was."""
    if finished_round is None or not finished_round.done() or finished_round.cancelled() or finished_round.exception():
        return 1
    return len(finished_round.result() or [None])


class TrainingPeer:
    """Trains a small model with an optimizer of the library under test.

    Args:
        batch: samples in a step.
        seconds: what a step takes, without what the optimizer does.
        megabytes: size of the model.
        options: of the optimizer.
        reports: whether it tells its loss to those who watch the run.
    """

    def __init__(
        self,
        library: str,
        index: int,
        batch: int,
        seconds: float,
        megabytes: float,
        options: dict[str, Any],
        reports: bool,
    ) -> None:
        self.reports = reports
        self.index, self.batch, self.seconds, self.options = index, batch, seconds, options
        self.library = importlib.import_module(library)
        self.averagers = importlib.import_module(f"{library}.optim.grad_averager")
        self.version: str = self.library.__version__
        torch.manual_seed(0)
        self.model = make_model(megabytes)
        self.data = torch.Generator().manual_seed(index)

    def open(self) -> list[str]:
        """Start the first peer; returns where the others find it."""
        self.dht = self.library.DHT(start=True)
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self, address: list[str]) -> None:
        """Join the swarm of the first peer, and get ready to train."""
        if self.index != 0:
            self.dht = self.library.DHT(initial_peers=address, start=True)
        self.optimizer = self.library.Optimizer(
            dht=self.dht,
            run_id=RUN,
            batch_size_per_step=self.batch,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.01),
            grad_averager_factory=remembering(self.averagers.GradientAverager),
            **self.options,
        )
        self._make_gradients()

    def train(self, epochs: int) -> list[dict[str, Any]]:
        """Train until so many global steps have been made; tells of each of them, with times of the monotonic clock:

        - ``entered``, ``ended``: when :meth:`step` was called that made it, and when it returned
        - ``steps``: 1, or more if this peer has missed some
        - ``members``: how many peers took part
        - ``samples``: how many of this peer's
        - ``predicted``: when the epoch would end, as it was known after its first batch
        - ``processor``, ``sent``: seconds and bytes that this peer has used so far (shoal alone)
        """
        optimizer, history, samples, predicted = self.optimizer, [], 0, None
        while optimizer.local_epoch < epochs:
            began = time.monotonic()
            self._make_gradients()
            time.sleep(max(0.0, began + self.seconds - time.monotonic()))
            epoch, samples, entered = optimizer.local_epoch, samples + self.batch, time.monotonic()
            optimizer.step()
            if self.reports:
                optimizer.report(loss=self.loss)
            if optimizer.local_epoch == epoch:
                predicted = self._predict() if predicted is None else predicted
                continue
            event = {"epoch": optimizer.local_epoch, "entered": entered, "ended": time.monotonic(), "samples": samples}
            members = members_of(optimizer.grad_averager.latest_round)
            if self.library.__name__ == "shoal":  # others have processes beside this one
                event |= {"processor": time.process_time(), "sent": self.dht.p2p.metrics.bytes_sent}
            history.append({**event, "steps": event["epoch"] - epoch, "members": members, "predicted": predicted})
            optimizer.grad_averager.latest_round, samples, predicted = None, 0, None
        return history

    def _predict(self) -> float:
        """When the epoch will end, by the monotonic clock."""
        now = self.library.utils.get_dht_time()
        return time.monotonic() + min(self.optimizer.tracker.estimated_next_update_time - now, 1e6)

    def _make_gradients(self) -> None:
        labels = torch.randint(CLASSES, (self.batch,), generator=self.data)
        pictures = torch.randn(self.batch, PIXELS, generator=self.data)
        self.model.zero_grad()
        self.loss = nn.functional.cross_entropy(self.model(pictures), labels)
        self.loss.backward()

    def close(self) -> None:
        """Leave."""
        self.optimizer.shutdown()
        self.dht.shutdown()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=json.loads, required=True, help="a list: one for each peer, in turn")
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    parser.add_argument("--reports", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = args.seconds[args.index % len(args.seconds)]
    figures = args.batch, seconds, args.megabytes, args.options, bool(args.reports)
    obey(lambda: TrainingPeer(args.library, args.index, *figures))


if __name__ == "__main__":
    main()
