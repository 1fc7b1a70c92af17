"""One peer of the benchmark of low-communication training: trains the demo's model, see :mod:`commands`."""

from __future__ import annotations

import argparse
import functools
import json
import math
import threading
import time
from typing import Any

import torch
from commands import obey, peer_parser
from language_peer import LanguagePeer

import shoal
from shoal.cli.demo import model as demo_model
from shoal.compression import (
    Blockwise4BitQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    TopKCompression,
)
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.grad_averager import GradientAverager

CODECS: dict[str, CompressionBase] = {
    "none": NoCompression(),
    "float16": Float16Compression(),
    "4 bits": Blockwise4BitQuantization(),
    "top-k": TopKCompression(),
}
BATCH_SIZE = 8
HELD_OUT_WINDOWS = 384
WARM_UP_STEPS = 20
# Others may take long on a busy machine. All are to make the same steps, so nobody goes on without them.
PATIENCE_SECONDS = 100.0
MEETING_SECONDS = 20.0


class LowCommunicationPeer(LanguagePeer):
    """Trains with the others, and counts what it sends.

    Args:
        mode: what kind of optimizer, and its options; with ``"inner"`` learning rates are so many times the demo's.
        steps: that each peer makes in all.
        options: of :class:`LanguagePeer`.
    """

    def __init__(self, index: int, peers: int, mode: dict[str, Any], steps: int, **options: Any) -> None:
        super().__init__(index, peers, **options)
        self.mode, self.steps = mode, steps
        self.kind: str = mode["kind"]
        self.rounds: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.sent_before = 0
        self._last: Any = None

    def make_optimizer(self) -> Any:
        groups = demo_model.parameter_groups(self.model)
        for group in groups:
            group["lr"] *= self.mode.get("inner", 1)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.01)
        schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=self.rate)
        if self.kind == "alone":
            self.scheduler = schedule(optimizer)
            return optimizer
        return (self._synchronous if self.kind == "synchronous" else self._diloco)(optimizer, schedule)

    def rate(self, step: int) -> float:
        """The factor for the learning rates: warm-up, then a cosine to a tenth."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.9 * cosine)

    def _synchronous(self, optimizer: torch.optim.Optimizer, schedule: Any) -> shoal.Optimizer:
        return shoal.Optimizer(
            dht=self.dht,
            run_id="low_communication",
            target_batch_size=self.batch_size * self.peers,
            batch_size_per_step=self.batch_size,
            optimizer=optimizer,
            scheduler=schedule(optimizer),
            grad_averager=GradientAverager.get_factory(compression=Float16Compression()),
            average_state_every=10**6,
            delay_state_averaging=False,
            matchmaking_time=MEETING_SECONDS,
            averaging_timeout=2 * PATIENCE_SECONDS,
        )

    def _diloco(self, optimizer: torch.optim.Optimizer, schedule: Any) -> DiLoCo:
        options = dict(self.mode["options"])
        rate, momentum = options.pop("outer", (None, None))
        if rate is not None:
            outer = functools.partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
            options["outer_optimizer"] = outer
        return DiLoCo(
            dht=self.dht,
            run_id="low_communication",
            optimizer=optimizer,
            scheduler=schedule,
            batch_size_per_step=self.batch_size,
            compression=CODECS[options.pop("compression")],
            matchmaking_time=MEETING_SECONDS,
            straggler_patience=PATIENCE_SECONDS,
            averaging_timeout=2 * PATIENCE_SECONDS,
            **options,
        )

    def appear(self) -> None:
        """Let the others know of this peer."""
        if self.kind == "alone":
            return
        tracker = self.optimizer.tracker
        tracker.report_local_progress(0, 0)
        tracker.board.report(0, 1, tracker.board.own.time)  # who has done nothing is not expected
        tracker.report_local_progress(0, 0)
        _wait_for(lambda: tracker.is_introduced)

    def meet(self) -> None:
        """Wait until this peer knows all others. What it has sent until then does not count."""
        self.sent_before = self.dht.p2p.metrics.bytes_sent
        if self.kind == "alone":
            return
        tracker = self.optimizer.tracker
        self.dht.portal.call(tracker.exchange.fetch(8))
        _wait_for(lambda: len(tracker.expected_members(until_epoch=10)) == self.peers - 1)

    @property
    def step(self) -> int:
        """The steps that this peer has made; in the synchronous mode, those of the swarm."""
        return len(self.losses) if self.kind != "synchronous" else self.optimizer.local_epoch

    def train(self, until: int) -> dict[str, Any]:
        """Make steps; returns what the rounds meanwhile were like, and the seconds that it took."""
        began, known = time.monotonic(), len(self.rounds)
        while self.step < until:
            self.optimizer.zero_grad()
            loss = self.compute_gradients()
            stepped = time.monotonic()
            self.optimizer.step()
            stepped = time.monotonic() - stepped
            if self.kind == "alone":
                self.scheduler.step()
            self.losses.append(loss)
            self._note_round(stepped)
        return {"rounds": self.rounds[known:], "seconds": time.monotonic() - began}

    def _note_round(self, stepped: float = 0.0) -> None:
        """Keep what is known of a round, if there is one since the last step, which took so many seconds."""
        if self.kind == "alone":
            return
        last = self.optimizer.grad_averager.last_round if self.kind == "synchronous" else self.optimizer.last_round
        if last is None or last is self._last:
            return
        self._last = last
        noted = {"peers": len(last.peers), "bytes": last.bytes_sent, "step": stepped}
        if self.kind == "diloco":
            noted["seconds"] = last.seconds
        self.rounds.append(noted)

    def measure(self, is_end: bool) -> dict[str, Any]:
        """The loss on text that nobody has trained on, in nats per byte."""
        if self.kind == "diloco" and (is_end or not self.mode["options"].get("fragment_sync_delay")):
            with self.optimizer.use_outer_parameters():
                self._note_round()
                loss = self.held_out_loss()
        else:
            loss = self.held_out_loss()
        versions = [bits.hex() for _, bits in self.optimizer.outer_versions()] if self.kind == "diloco" else []
        sent = self.dht.p2p.metrics.bytes_sent - self.sent_before
        return {"loss": loss, "bits": versions, "values": self.values, "rounds": self.rounds, "sent": sent}

    def close(self) -> None:
        if self.kind == "alone":
            self.optimizer = None
        super().close()


def _wait_for(condition: Any) -> None:
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the peers do not find each other")
        pause.wait(0.02)


def make_peer(args: argparse.Namespace) -> LowCommunicationPeer:
    peer = LowCommunicationPeer(
        args.index,
        args.peers,
        json.loads(args.mode),
        args.steps,
        seed=args.seed,
        batches=1000 * args.seed + args.index,
        batch_size=BATCH_SIZE,
        held_out=HELD_OUT_WINDOWS,
        shards=max(4, args.peers),  # who is alone has no more text than one of four
    )
    peer.dht_options = {"host_maddrs": [f"/ip4/{args.listen}/tcp/0"]}
    return peer


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--listen", default="127.0.0.1", metavar="ADDRESS")
    args = parser.parse_args()
    obey(lambda: make_peer(args))


if __name__ == "__main__":
    main()
