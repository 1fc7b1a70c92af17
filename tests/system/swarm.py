"""Runs scripts as processes of their own and reads what they print: events, one JSON object per line, or text."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests import nursery
from tests.nursery import Process

HERE = Path(__file__).parent
START_LIMIT_SECONDS = 120
"""Importing torch takes seconds of pure computing, on a busy machine many of them."""
Event = dict[str, Any]


class Peer:
    """One script in a process of its own.

    Args:
        script: a file of this folder or the path of another one; or ``-c`` or ``-m``, before their arguments.
        arguments: for the script.
        namespace: the network namespace in which it runs, by its name.
        environment: instead of what this process has.
        cwd: the folder in which it runs.
        fresh: Python starts anew for it; takes longer, but for a script that does without torch.
    """

    def __init__(
        self,
        script: str | Path,
        *arguments: object,
        namespace: str = "",
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        fresh: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()
        self._output_ended = False
        self._errors = tempfile.TemporaryFile(encoding="utf-8", mode="w+")  # noqa: SIM115 - closed in close()
        environment = {**(environment or os.environ), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        words = [str(argument) for argument in arguments]
        program = str(script) if str(script).startswith("-") else str(HERE / script)
        self.process: Process
        if fresh or program.startswith("-"):
            self.process = subprocess.Popen(
                [*(["ip", "netns", "exec", namespace] if namespace else []), sys.executable, program, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
                cwd=cwd,
            )
        else:
            self.process = nursery.start(
                Path(program),
                words,
                stderr=self._errors.fileno(),
                environment=environment,
                cwd=cwd,
                namespace=namespace,
            )
        self._reader = threading.Thread(target=self._read, name=f"reads {script}")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                with self._news:
                    self.events.append(json.loads(line) if line.startswith("{") else {"line": line.rstrip("\n")})
                    self._news.notify_all()
        with self._news:
            self._output_ended = True
            self._news.notify_all()

    def tell(self, word: str) -> None:
        """Write a line to the script's standard input."""
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def wait_for(self, name: str, timeout: float, matches: Callable[[Event], bool] = lambda _: True) -> Event:
        """The first event that has this key and matches, be it past or future.

        Raises:
            AssertionError: it did not come in time, or the script ended without it.
        """
        deadline = time.monotonic() + timeout
        seen = 0
        with self._news:
            while True:
                for event in self.events[seen:]:
                    if name in event and matches(event):
                        return event
                seen = len(self.events)
                assert not self._output_ended, f"ended without {name!r}: {self.events[-3:]}\n{self.errors()}"
                left = deadline - time.monotonic()
                assert left > 0, f"no {name!r} within {timeout} s: {self.events[-3:]}\n{self.errors()}"
                self._news.wait(left)

    def wait_for_line(self, pattern: str, timeout: float) -> re.Match[str]:
        """The first line of text in which this regular expression is found; raises what :meth:`wait_for` raises."""
        event = self.wait_for("line", timeout, lambda event: re.search(pattern, event["line"]) is not None)
        match = re.search(pattern, event["line"])
        assert match is not None
        return match

    def wait_until_quiet(self, name: str, seconds: float, timeout: float) -> None:
        """Return when no event with this key has come for some seconds: the script waits for something.

        Raises:
            AssertionError: events kept coming, or the script ended.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            before = -1
            while before != (before := len([event for event in self.events if name in event])):
                assert not self._output_ended, f"ended: {self.errors()}"
                assert time.monotonic() < deadline, f"{name!r} kept coming for {timeout} s"
                self._news.wait_for(lambda: self._output_ended, seconds)

    def all(self, name: str) -> list[Event]:
        """Every event so far that has this key."""
        with self._news:
            return [event for event in self.events if name in event]

    def errors(self) -> str:
        """What the script has written to its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended by itself; returns its exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s: {self.events[-3:]}\n{self.errors()}") from None
        self._reader.join()
        return status

    def children(self) -> list[psutil.Process]:
        """Processes that the script has started, at any depth."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        """End the process whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join()
        self._errors.close()


class Swarm:
    """Peers that know each other through the first one; leaving the block ends all of them."""

    def __init__(self, script: str, size: int, *arguments: object, fresh: bool = False) -> None:
        self.script, self.size, self.arguments, self.fresh = script, size, arguments, fresh
        self.peers: list[Peer] = []

    def __enter__(self) -> Swarm:
        try:
            first = Peer(self.script, *self.arguments, fresh=self.fresh)
            self.peers.append(first)
            self.address = first.wait_for("address", START_LIMIT_SECONDS)["address"]
            self.peers += [self._join() for _ in range(self.size - 1)]
            for peer in self.peers:
                peer.wait_for("ready", START_LIMIT_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for peer in self.peers:
            peer.tell("go")
        return self

    def _join(self) -> Peer:
        return Peer(self.script, *self.arguments, "--initial-peers", self.address, fresh=self.fresh)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for peer in self.peers:
            peer.close()
