"""A peer's process as the runner holds it: it starts, is told things, is heard, and ends, whatever happens."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from shoal.cli.demo.messages import AnyEvent, Command, event_from, to_line

_NEW_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""Windows has groups of processes in place of sessions."""

Heard = tuple[int, "AnyEvent | None"]
"""A peer's number and its event; None once it will never say anything again."""


class PeerProcess:
    """One peer.

    Args:
        number: which peer it is.
        shards: into how many shards all peers cut the text.
        log: file for what it writes to standard error.
        heard: gets everything that the peer says.
    """

    def __init__(self, number: int, shards: int, log: Path, heard: queue.Queue[Heard]) -> None:
        self.number = number
        self.log = log
        with log.open("wb") as log_file:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.demo.peer", str(number), str(shards)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                creationflags=_NEW_GROUP,  # Ctrl-C is for the runner, which ends its peers in order
                start_new_session=not _NEW_GROUP,
            )
        self._reader = threading.Thread(target=self._listen, args=(heard,), name=f"hear peer {number}", daemon=True)
        self._reader.start()

    def _listen(self, heard: queue.Queue[Heard]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):  # else the peer died in the middle of a word
                heard.put((self.number, event_from(line)))
        heard.put((self.number, None))

    def tell(self, command: Command) -> None:
        """Send a command; a peer that is gone does not hear it, and the runner learns that from its silence."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # BrokenPipeError, or EINVAL on Windows
            self._process.stdin.write(to_line(command))
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it at once, without a goodbye: SIGKILL, or what the system has for it."""
        self._process.kill()

    def hang_up(self) -> None:
        """Close its input, by which it knows that it should leave."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        """Its exit status, or None if it is still there after ``timeout`` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def release(self) -> None:
        """Forget a process that has ended."""
        self._process.wait()
        self._reader.join()
        self.hang_up()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def last_words(self, lines: int = 15) -> str:
        """The end of what it wrote to standard error."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def end_all(processes: Iterable[PeerProcess], grace: float) -> None:
    """Ask every process to leave, and kill those that are still there after ``grace`` seconds."""
    processes = list(processes)
    for process in processes:
        process.hang_up()
    deadline = time.monotonic() + grace
    for process in processes:
        if process.wait(max(0.0, deadline - time.monotonic())) is None:
            process.kill()
    for process in processes:
        process.release()
