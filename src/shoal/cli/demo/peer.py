"""One peer of the demo: a process that follows the runner's commands and reports its progress.

Its training is an ordinary PyTorch loop around :class:`shoal.Optimizer`, or around
:class:`~shoal.optim.diloco.diloco.DiLoCo`.

Run as ``python -m shoal.cli.demo.peer NUMBER SHARDS``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from shoal.cli.demo import model as demo_model
from shoal.cli.demo.messages import (
    METHODS,
    RUN_ID,
    SYNCHRONOUS,
    AnyCommand,
    AnyEvent,
    EpochDone,
    Finished,
    JoinSwarm,
    Progress,
    SwarmJoined,
    TextReady,
    Train,
    command_from,
    to_line,
)
from shoal.cli.demo.model import Corpus, load_corpus
from shoal.compression import Blockwise4BitQuantization, CompressionBase, TopKCompression
from shoal.dht import DHT
from shoal.optim import Optimizer
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import OuterOptimizerFactory

# All of these are chosen for this model and text, so that a run of 90 seconds on two cores beats the bigram entropy.
# Windows of text that the whole swarm gathers for a step.
TARGET_BATCH_SIZE = 256
# The same between two exchanges, for the methods that exchange little.
SLOT_BATCH_SIZE = 640
# How messages are encoded, and the outer optimizer. The run is short: much momentum would overshoot.
LITTLE: dict[str, tuple[CompressionBase, OuterOptimizerFactory]] = {
    "diloco": (Blockwise4BitQuantization(), functools.partial(torch.optim.SGD, lr=0.9, momentum=0.5, nesterov=True)),
    "sparse": (TopKCompression(), functools.partial(torch.optim.SGD, lr=0.7)),
}
# Windows of text in a batch of one peer.
BATCH_SIZE = 16
# All peers of the demo are on this machine, and no others can join.
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
# How long a group waits for late peers; it starts at once when all have joined.
MATCHMAKING_SECONDS = 1.5

REPORT_EVERY_SECONDS = 0.25
MEASURE_EVERY_SECONDS = 4.0
MEASURED_WINDOWS = 192
FINAL_WINDOWS = 1500
PROMPT, WRITTEN_BYTES = "    def __init__(self, ", 300
# Seconds that this process has to leave the swarm when the runner is gone.
ORPHAN_GRACE_SECONDS = 2.0


class Trainer:
    """One peer in the swarm, its model and its share of the text.

    Args:
        number: number of this peer, from 1; selects its shard and seeds its random numbers.
        corpus: the text.
        tell: called with each event.
        method: how peers train together.
        initial_peers: addresses of the swarm; none: start one.
    """

    def __init__(
        self,
        number: int,
        corpus: Corpus,
        tell: Callable[[AnyEvent], None],
        method: str = SYNCHRONOUS,
        initial_peers: Sequence[str] = (),
    ) -> None:
        self._tell = tell
        self._text, self._held_out = corpus.shards[(number - 1) % len(corpus.shards)], corpus.held_out
        self._random = torch.Generator().manual_seed(number)
        # Each peer starts from different parameters; the swarm makes them equal.
        torch.manual_seed(number)
        self.model = demo_model.ByteTransformer(demo_model.ModelSize())
        self._counts = _Counts()
        self._next_report = 0.0
        # The peers measure in turn, not all at once.
        self._next_measurement = time.monotonic() + number % 5 / 5 * MEASURE_EVERY_SECONDS
        self.dht = DHT(
            list(initial_peers),
            start=True,
            host_maddrs=LOOPBACK,
            token="",  # whatever the environment says
            name=f"peer {number}",
        )
        self.optimizer = _make_optimizer(self.dht, self.model, method)
        tell(SwarmJoined(str(self.dht.peer_id), [str(address) for address in self.dht.get_visible_maddrs()]))
        if initial_peers:
            self.optimizer.load_state_from_peers()

    @property
    def epoch(self) -> int:
        """Number of steps of the whole swarm that the parameters contain."""
        return self.optimizer.local_epoch

    def step(self) -> None:
        """Work on one batch; from time to time this completes an epoch of the swarm."""
        epoch, counts = self.epoch, self._counts
        windows = demo_model.random_windows(self._text, BATCH_SIZE, self.model.size.context + 1, self._random)
        loss = demo_model.loss_on(self.model, windows)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        started = time.monotonic()
        self.optimizer.step()
        seconds = time.monotonic() - started
        counts.losses.append(float(loss.detach()))
        counts.pending += BATCH_SIZE
        if self.epoch > epoch:
            group_size = self._group_size()
            self._tell(EpochDone(self.epoch, seconds, group_size))
            counts.end_epoch(group_size)
        measured = self._measure_if_due(time.monotonic())
        self.optimizer.report(loss=counts.losses[-1], **({} if measured is None else {"held-out loss": measured}))
        if measured is not None or self.epoch > epoch or time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + REPORT_EVERY_SECONDS
            self._tell(self._progress(measured))

    def _group_size(self) -> int:
        """Number of peers whose values the last epoch has; 1 if this peer averaged with nobody."""
        optimizer, counts = self.optimizer, self._counts
        source = optimizer if isinstance(optimizer, DiLoCo) else optimizer.grad_averager
        result = None if source is None else source.last_round
        if result is None or result is counts.last_round:
            return 1
        counts.last_round = result
        peers = len(result.peers)
        if isinstance(optimizer, DiLoCo):
            values = sum(parameter.numel() for parameter in self.model.parameters())
            counts.synchronous_bytes += SLOT_BATCH_SIZE / TARGET_BATCH_SIZE * 2 * (peers - 1) / peers * 4 * values
        return peers

    def _measure_if_due(self, now: float) -> float | None:
        """The loss on the held-out text, from time to time."""
        if now < self._next_measurement:
            return None
        self._next_measurement = now + MEASURE_EVERY_SECONDS
        return self._measure(MEASURED_WINDOWS)

    def _measure(self, windows: int) -> float:
        with self._common_model():
            return demo_model.held_out_loss(
                self.model, demo_model.even_windows(self._held_out, windows, self.model.size.context + 1)
            )

    def _common_model(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context the model holds the parameters that all peers share."""
        optimizer = self.optimizer
        return optimizer.use_outer_parameters() if isinstance(optimizer, DiLoCo) else contextlib.nullcontext()

    def _progress(self, measured: float | None) -> Progress:
        network, counts, swarm = self.dht.p2p.metrics, self._counts, self.optimizer.tracker.global_progress
        return Progress(
            epoch=self.epoch,
            swarm_epoch=swarm.epoch,
            samples=counts.contributed + counts.pending,
            samples_per_second=self.optimizer.tracker.performance_ema.samples_per_second,
            loss=sum(counts.losses) / len(counts.losses),
            held_out_loss=measured,
            bytes_sent=network.bytes_sent,
            bytes_received=network.bytes_received,
            peers_seen=swarm.num_peers,
        )

    def finish(self) -> Finished:
        """Measure the trained model on many windows, hash its parameters, and let it write a text."""
        digest = hashlib.sha256()
        loss = self._measure(FINAL_WINDOWS)
        with self._common_model():
            for parameter in self.model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            text = demo_model.sample(self.model, PROMPT, WRITTEN_BYTES, seed=0)
        counts = self._counts
        return Finished(self.epoch, counts.contributed, loss, digest.hexdigest(), text, round(counts.synchronous_bytes))

    def shutdown(self) -> None:
        """Leave the swarm."""
        self.optimizer.shutdown()
        self.dht.shutdown()


@dataclass
class _Counts:
    """Samples that a peer has contributed so far."""

    contributed: int = 0
    """Samples in averages that this peer took part in."""
    pending: int = 0
    """Samples since the last epoch."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=TARGET_BATCH_SIZE // BATCH_SIZE))
    """Losses of the latest batches."""
    synchronous_bytes: float = 0.0
    last_round: object = None

    def end_epoch(self, group_size: int) -> None:
        # Otherwise this peer was alone, or it was behind, downloaded the state and dropped its own samples.
        if group_size > 1:
            self.contributed += self.pending
        self.pending = 0


def _make_optimizer(dht: DHT, model: demo_model.ByteTransformer, method: str) -> Optimizer | DiLoCo:
    optimizer = torch.optim.AdamW(demo_model.parameter_groups(model), betas=(0.9, 0.99), weight_decay=0.01)
    common: dict[str, Any] = {
        "dht": dht,
        "run_id": RUN_ID,
        "batch_size_per_step": BATCH_SIZE,
        "optimizer": optimizer,
        "matchmaking_time": MATCHMAKING_SECONDS,
        "averaging_timeout": 20.0,
        "tracker_opts": {"min_refresh_period": 0.1, "default_refresh_period": 0.5, "max_refresh_period": 1.0},
    }
    if method == SYNCHRONOUS:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, demo_model.warm_up)
        return Optimizer(
            target_batch_size=TARGET_BATCH_SIZE, scheduler=scheduler, delay_state_averaging=False, **common
        )
    codec, outer = LITTLE[method]
    return DiLoCo(target_batch_size=SLOT_BATCH_SIZE, compression=codec, outer_optimizer=outer, **common)


def work(commands: queue.Queue[AnyCommand | None], trainer: Trainer, tell: Callable[[AnyEvent], None]) -> None:
    """Train as the runner says, until it hangs up."""
    command = commands.get()
    while command is not None:
        assert isinstance(command, Train)
        last_epoch = math.inf if command.last_epoch is None else command.last_epoch
        while trainer.epoch < last_epoch:
            trainer.step()
            if not commands.empty():
                break
        if trainer.epoch >= last_epoch:
            tell(trainer.finish())
        command = commands.get()


def read_commands(pipe: IO[bytes], commands: queue.Queue[AnyCommand | None]) -> None:
    """Queue the runner's commands, and ``None`` when it has hung up; this process must then end soon."""
    for line in pipe:
        commands.put(command_from(line))
    commands.put(None)
    timer = threading.Timer(ORPHAN_GRACE_SECONDS, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


def _take_standard_input() -> IO[bytes]:
    """Take over the pipe from the runner, and leave the null device as standard input.

    On Windows, libraries that are loaded later inspect standard input, and would block behind the thread that reads it.
    """
    descriptor = sys.stdin.fileno()
    # Unbuffered: a buffered reader would hold a lock when the process ends.
    commands = io.FileIO(os.dup(descriptor))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), descriptor)
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description="One peer of `shoal demo`; the runner starts it.")
    parser.add_argument("number", type=int, help="which peer this is, from 1")
    parser.add_argument("shards", type=int, help="into how many shards the text is cut")
    parser.add_argument("--method", choices=METHODS, default=SYNCHRONOUS, help="how peers train together")
    arguments = parser.parse_args()

    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Send the output of libraries to standard error, so that it does not mix with the events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands: queue.Queue[AnyCommand | None] = queue.Queue()
    threading.Thread(
        target=read_commands, args=(_take_standard_input(), commands), name="commands", daemon=True
    ).start()

    def tell(event: AnyEvent) -> None:
        events.write(to_line(event))
        events.flush()

    corpus = load_corpus(arguments.shards)
    tell(TextReady(corpus.files, corpus.unigram_entropy, corpus.bigram_entropy))
    command = commands.get()
    if isinstance(command, JoinSwarm):
        trainer = Trainer(arguments.number, corpus, tell, arguments.method, command.initial_peers)
        try:
            work(commands, trainer, tell)
        finally:
            trainer.shutdown()


if __name__ == "__main__":
    main()
