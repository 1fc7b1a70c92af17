"""One peer of the demo: a process of its own that does what the runner says and tells how it goes.

Run as ``python -m shoal.cli.demo.peer NUMBER SHARDS``.
"""

from __future__ import annotations

import argparse
import io
import os
import queue
import sys
import threading
from typing import IO

from shoal.cli.demo.corpus import load_corpus
from shoal.cli.demo.messages import (
    AnyCommand,
    Connect,
    Event,
    Leave,
    Ready,
    StopAfter,
    Train,
    Write,
    Wrote,
    command_from,
    to_line,
)
from shoal.cli.demo.training import Trainer

ORPHAN_GRACE_SECONDS = 2.0
"""When the runner is gone, how long this process may still take to say goodbye."""


class Pipes:
    """The two ends that connect this peer with its runner."""

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

    def send(self, event: Event) -> None:
        self._events.write(to_line(event))
        self._events.flush()

    def receive(self) -> AnyCommand:
        """The next command; waits for it."""
        return self._queue.get()

    def poll(self) -> AnyCommand | None:
        """The next command if there is one."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None


def follow(pipes: Pipes, trainer: Trainer) -> None:
    """Do what the runner says until it says to leave."""
    command: AnyCommand | None = pipes.receive()
    while not isinstance(command, Leave):
        if isinstance(command, Connect):
            trainer.connect(command.initial_peers)
        elif isinstance(command, (Train, StopAfter)):
            command = train(pipes, trainer, command)
            continue
        elif isinstance(command, Write):
            pipes.send(Wrote(trainer.write(command.prompt, command.length)))
        command = pipes.receive()


def train(pipes: Pipes, trainer: Trainer, command: Train | StopAfter) -> AnyCommand:
    """Train until the last epoch is complete or another command interrupts.

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
    """What the runner writes; nothing is left in its place.

    On Windows, libraries that are loaded later look at the standard input, and would wait for whoever reads from it.
    """
    descriptor = sys.stdin.fileno()
    commands = io.FileIO(os.dup(descriptor))  # unbuffered: nothing to lock when the process ends
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), descriptor)
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description="One peer of `shoal demo`; the runner starts it.")
    parser.add_argument("number", type=int, help="which peer this is, from 1")
    parser.add_argument("shards", type=int, help="into how many shards the text is cut")
    arguments = parser.parse_args()

    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not mix with the events
    pipes = Pipes(_take_standard_input(), events)
    corpus = load_corpus(arguments.shards)
    trainer = Trainer(arguments.number, corpus, pipes.send)
    pipes.send(Ready(corpus.files, corpus.unigram_entropy, corpus.bigram_entropy))
    try:
        follow(pipes, trainer)
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    main()
