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
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import torch

from shoal.cli.demo import model as demo_model
from shoal.cli.demo.messages import (
    METHODS,
    SYNCHRONOUS,
    AnyCommand,
    CaughtUp,
    EpochDone,
    Finished,
    JoinSwarm,
    Leave,
    Measured,
    PeerEvent,
    Progress,
    StopAfter,
    SwarmJoined,
    TextReady,
    Train,
    Write,
    Wrote,
    command_from,
    to_line,
)
from shoal.cli.demo.model import Corpus, load_corpus
from shoal.cli.demo.page import RUN_ID
from shoal.compression import Blockwise4BitQuantization, CompressionBase, TopKCompression
from shoal.dht import DHT
from shoal.optim import Optimizer
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import OuterOptimizerFactory

# Windows of text that the whole swarm gathers for a step.
TARGET_BATCH_SIZE = 256
# The same between two exchanges, with the methods that exchange little.
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


class Trainer:
    """One peer's model, its share of the text, and its place in the swarm.

    Args:
        number: number of this peer, from 1; selects its shard and seeds its random numbers.
        corpus: the text.
        tell: called with each event.
        method: how peers train together.
    """

    def __init__(
        self, number: int, corpus: Corpus, tell: Callable[[PeerEvent], None], method: str = SYNCHRONOUS
    ) -> None:
        self._tell, self._method = tell, method
        self._name = f"peer {number}"
        self._text = corpus.shards[(number - 1) % len(corpus.shards)]
        self._held_out = corpus.held_out
        self._random = torch.Generator().manual_seed(number)
        # Each peer starts from different parameters; the swarm makes them equal.
        torch.manual_seed(number)
        self.model = demo_model.ByteTransformer(demo_model.ModelSize())
        self._window = self.model.size.context + 1
        self._measured = demo_model.even_windows(self._held_out, MEASURED_WINDOWS, self._window)
        self._dht: DHT | None = None
        self._optimizer: Optimizer | DiLoCo | None = None
        self._synchronous_bytes = 0.0
        self._last_round: object = None
        self._caught_up = False
        self._contributed = self._pending = 0
        self._losses: list[float] = []
        self._next_report = 0.0
        self._held_out_loss: float | None = None
        # The peers measure in turn, not all at once.
        self._next_measurement = time.monotonic() + number % 5 / 5 * MEASURE_EVERY_SECONDS

    def connect(self, initial_peers: list[str]) -> None:
        """Join the swarm and download its state, or start a swarm if there are no addresses."""
        self._dht = DHT(
            initial_peers,
            start=True,
            host_maddrs=LOOPBACK,
            token="",  # whatever the environment says
            name=self._name,
        )
        optimizer = torch.optim.AdamW(demo_model.parameter_groups(self.model), betas=(0.9, 0.99), weight_decay=0.01)
        common: dict[str, Any] = {
            "dht": self._dht,
            "run_id": RUN_ID,
            "batch_size_per_step": BATCH_SIZE,
            "optimizer": optimizer,
            "matchmaking_time": MATCHMAKING_SECONDS,
            "averaging_timeout": 20.0,
            "tracker_opts": {"min_refresh_period": 0.1, "default_refresh_period": 0.5, "max_refresh_period": 1.0},
        }
        if self._method == SYNCHRONOUS:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, demo_model.warm_up)
            self._optimizer = Optimizer(
                target_batch_size=TARGET_BATCH_SIZE, scheduler=scheduler, delay_state_averaging=False, **common
            )
        else:
            codec, outer = LITTLE[self._method]
            self._optimizer = DiLoCo(
                target_batch_size=SLOT_BATCH_SIZE, compression=codec, outer_optimizer=outer, **common
            )
        self._tell(SwarmJoined(str(self._dht.peer_id), [str(address) for address in self._dht.get_visible_maddrs()]))
        if initial_peers:
            self._optimizer.load_state_from_peers()

    @property
    def optimizer(self) -> Optimizer | DiLoCo:
        assert self._optimizer is not None, "connect() comes first"
        return self._optimizer

    @property
    def epoch(self) -> int:
        """Number of steps of the whole swarm that the parameters contain."""
        return self.optimizer.local_epoch

    def step(self) -> None:
        """Work on one batch; from time to time this completes an epoch of the swarm."""
        epoch = self.epoch
        windows = demo_model.random_windows(self._text, BATCH_SIZE, self._window, self._random)
        loss = demo_model.loss_on(self.model, windows)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        started = time.monotonic()
        self.optimizer.step()
        seconds = time.monotonic() - started
        self._losses.append(float(loss.detach()))
        self.optimizer.report(loss=self._losses[-1], **self._measured_now())
        self._pending += BATCH_SIZE
        if self.epoch > epoch:
            self._note_epoch(seconds)
        self._report(time.monotonic())

    def _measured_now(self) -> dict[str, float]:
        """The held-out loss if it was measured since the last time, for those who watch the run."""
        loss, self._held_out_loss = self._held_out_loss, None
        return {} if loss is None else {"held-out loss": loss}

    def _note_epoch(self, seconds: float) -> None:
        size = self._group_size()
        self._tell(EpochDone(self.epoch, seconds, size))
        # Otherwise this peer was alone, or it was behind, downloaded the state and dropped its own samples.
        if size > 1:
            self._contributed += self._pending
        self._pending = 0

    def _group_size(self) -> int:
        """Number of peers that the last epoch's gradients come from; 1 if this peer went on alone."""
        optimizer = self.optimizer
        if isinstance(optimizer, DiLoCo):
            peers, result = self._group_of(optimizer)
        else:
            averager = optimizer.grad_averager
            averaged = None if averager is None else averager.last_round
            peers, result = 0 if averaged is None else len(averaged.peers), averaged
        if result is None or result is self._last_round:
            return 1
        self._last_round = result
        return peers

    def _group_of(self, optimizer: DiLoCo) -> tuple[int, object]:
        """The number of peers in the last exchange, and the exchange; notes what it has saved."""
        done = optimizer.last_round
        if done is None or done is self._last_round:
            return 0, None
        peers = len(done.peers)
        values = sum(parameter.numel() for parameter in self.model.parameters())
        self._synchronous_bytes += SLOT_BATCH_SIZE / TARGET_BATCH_SIZE * 2 * (peers - 1) / peers * 4 * values
        return peers, done

    def _report(self, now: float) -> None:
        progress = self.optimizer.tracker.global_progress
        if not self._caught_up and self.epoch >= progress.epoch:
            self._caught_up = True
            self._tell(CaughtUp(self.epoch))
        if now >= self._next_measurement:
            self._next_measurement = now + MEASURE_EVERY_SECONDS
            with self._common_model():
                self._held_out_loss = demo_model.held_out_loss(self.model, self._measured)
            self._tell(Measured(self.epoch, self._held_out_loss))
        if now >= self._next_report:
            self._next_report = now + REPORT_EVERY_SECONDS
            self._tell(self._progress(progress.num_peers))

    def _common_model(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context the model holds what all peers have in common."""
        optimizer = self.optimizer
        return optimizer.use_outer_parameters() if isinstance(optimizer, DiLoCo) else contextlib.nullcontext()

    def _progress(self, peers_seen: int) -> Progress:
        assert self._dht is not None
        network = self._dht.p2p.metrics
        recent = self._losses[-TARGET_BATCH_SIZE // BATCH_SIZE :]
        del self._losses[: -len(recent)]
        return Progress(
            epoch=self.epoch,
            samples=self._contributed + self._pending,
            samples_per_second=self.optimizer.tracker.performance_ema.samples_per_second,
            loss=sum(recent) / len(recent),
            bytes_sent=network.bytes_sent,
            bytes_received=network.bytes_received,
            peers_seen=peers_seen,
        )

    def finish(self) -> Finished:
        """Measure the trained model on many windows, and hash its parameters."""
        windows = demo_model.even_windows(self._held_out, FINAL_WINDOWS, self._window)
        digest = hashlib.sha256()
        with self._common_model():
            loss = demo_model.held_out_loss(self.model, windows)
            for parameter in self.model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
        return Finished(self.epoch, self._contributed, loss, digest.hexdigest(), round(self._synchronous_bytes))

    def write(self, prompt: str, length: int) -> str:
        """Let the model write a text."""
        return demo_model.sample(self.model, prompt, length, seed=0)

    def shutdown(self) -> None:
        """Leave the swarm; does nothing if this peer has not joined."""
        if self._optimizer is not None:
            self._optimizer.shutdown()
        if self._dht is not None:
            self._dht.shutdown()


# Seconds that this process has to leave the swarm when the runner is gone.
ORPHAN_GRACE_SECONDS = 2.0


class Pipes:
    """The two pipes between this peer and its runner."""

    def __init__(self, commands: IO[bytes], events: IO[bytes]) -> None:
        self._events = events
        self._queue: queue.Queue[AnyCommand] = queue.Queue()
        threading.Thread(target=self._read, args=(commands,), name="commands", daemon=True).start()

    def _read(self, commands: IO[bytes]) -> None:
        for line in commands:
            self._queue.put(command_from(line))
        self._queue.put(Leave())
        timer = threading.Timer(ORPHAN_GRACE_SECONDS, os._exit, args=(1,))
        timer.daemon = True
        timer.start()

    def send(self, event: PeerEvent) -> None:
        self._events.write(to_line(event))
        self._events.flush()

    def receive(self) -> AnyCommand:
        """Wait for the next command."""
        return self._queue.get()

    def poll(self) -> AnyCommand | None:
        """The next command, or ``None`` if there is none yet."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None


def follow(pipes: Pipes, trainer: Trainer) -> None:
    """Follow the runner's commands until it says to leave."""
    command: AnyCommand | None = pipes.receive()
    while not isinstance(command, Leave):
        if isinstance(command, JoinSwarm):
            trainer.connect(command.initial_peers)
        elif isinstance(command, (Train, StopAfter)):
            command = train(pipes, trainer, command)
            continue
        elif isinstance(command, Write):
            pipes.send(Wrote(trainer.write(command.prompt, command.length)))
        command = pipes.receive()


def train(pipes: Pipes, trainer: Trainer, command: Train | StopAfter) -> AnyCommand:
    """Train until the last epoch is complete or another command comes.

    Returns:
        The command to follow next.
    """
    last_epoch = None if isinstance(command, Train) else command.epoch
    while last_epoch is None or trainer.epoch < last_epoch:
        trainer.step()
        news = pipes.poll()
        if isinstance(news, StopAfter):
            last_epoch = news.epoch
        elif news is not None:
            return news
    pipes.send(trainer.finish())
    return pipes.receive()


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
    # Anything that a library prints goes to standard error, so that it does not mix with the events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pipes = Pipes(_take_standard_input(), events)
    corpus = load_corpus(arguments.shards)
    trainer = Trainer(arguments.number, corpus, pipes.send, arguments.method)
    pipes.send(TextReady(corpus.files, corpus.unigram_entropy, corpus.bigram_entropy))
    try:
        follow(pipes, trainer)
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    main()
