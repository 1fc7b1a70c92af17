"""Starts one process per peer and gives them commands, all at the same moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from wide_area import Host

    from tests.nat.laboratory import Host as HostBehindRouter

HERE = Path(__file__).parent
ANSWER_LIMIT_SECONDS = 300

HIVEMIND_ENVIRONMENT = HERE / ".venv-hivemind"
HIVEMIND_REQUIREMENTS = ["hivemind==1.1.12", "torch==2.13.0", "numpy<2.3", "setuptools<81"]
"""numpy: newer ones break its codecs; setuptools: newer ones lack the pkg_resources that it imports."""


def interpreter(library: str) -> str:
    """The Python that has this library; hivemind's environment is made at first use."""
    if library != "hivemind":
        return sys.executable
    python = HIVEMIND_ENVIRONMENT / "bin" / "python"
    ready = HIVEMIND_ENVIRONMENT / "ready"
    if not ready.exists():
        print(f"making {HIVEMIND_ENVIRONMENT} with {', '.join(HIVEMIND_REQUIREMENTS)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(HIVEMIND_ENVIRONMENT)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *HIVEMIND_REQUIREMENTS], check=True)
        ready.touch()
    return str(python)


class Crew:
    """The peers of one library; use as a context manager, which ends every process at its exit.

    Args:
        script: what each peer runs, with ``--library``, ``--peers`` and its own ``--index``.
        library: decides which Python runs it.
        hosts: where each peer runs; default: here.
        arguments: further options of the script.
    """

    def __init__(
        self, script: str, library: str, peers: int, hosts: Sequence[Host | HostBehindRouter] = (), **arguments: Any
    ) -> None:
        self.library = library
        self.broken = False
        """Some peers were killed or stopped: the others are not asked to leave politely."""
        arguments |= {"library": library, "peers": peers}
        self._command = [interpreter(library), "-W", "ignore", str(HERE / script)]
        self._command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        self._hosts = hosts
        self.processes = [self._start(index) for index in range(len(hosts) or peers)]

    def _start(self, index: int) -> subprocess.Popen[str]:
        environment = {"SHOAL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0", **os.environ}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [*self._command, "--index", str(index)]
        if self._hosts:
            command = [*self._hosts[index].launcher, *command, "--listen", self._hosts[index].address]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # a group of its own: closing takes its children along
        )

    def replace(self, index: int) -> subprocess.Popen[str]:
        """Kill a peer and start another one in its place, which is not asked to join yet."""
        _end(self.processes[index])
        self.processes[index] = process = self._start(index)
        self.answers_of([process])
        return process

    def _get_ready(self) -> None:
        self.version: str = self.answers_of(self.processes)[0]

    def __enter__(self) -> Crew:
        try:
            self._get_ready()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and self.lives() and not self.broken:
                self.ask("close")
        finally:
            self._kill()
            for process in self.processes:
                _end(process)

    def lives(self) -> bool:
        """Whether no peer has ended."""
        return all(process.poll() is None for process in self.processes)

    def _kill(self) -> None:
        """With all child processes: as long as one of them has a peer's pipe, its end cannot be read."""
        for process in self.processes:
            _kill(process)

    def ask(self, command: str, *arguments: Any, to: Sequence[subprocess.Popen[str]] | None = None) -> list[Any]:
        """Give a command to all peers (or to some) at once and return their answers.

        Raises:
            RuntimeError: a peer failed or did not answer in time; the text says which and why.
        """
        peers = self.processes if to is None else to
        for process in peers:
            _tell(process, command, *arguments)
        return self.answers_of(peers)

    def tell(self, command: str, *arguments: Any, to: Sequence[subprocess.Popen[str]] | None = None) -> None:
        """Give a command to all peers (or to some) at once; their answers are still to be read."""
        for process in self.processes if to is None else to:
            _tell(process, command, *arguments)

    def ask_each(self, command: Callable[[int], Sequence[Any]]) -> list[Any]:
        """Give each peer a command that depends on its index, all at once, and return their answers."""
        for index, process in enumerate(self.processes):
            _tell(process, *command(index))
        return self.answers_of(self.processes)

    def answers_of(self, peers: Sequence[subprocess.Popen[str]]) -> list[Any]:
        """What these peers answer to what they have been told."""
        alarm = threading.Timer(ANSWER_LIMIT_SECONDS, self._kill)
        alarm.start()
        try:
            lines = [process.stdout.readline() for process in peers if process.stdout]
        finally:
            alarm.cancel()
        if not all(lines):
            raise RuntimeError(f"a {self.library} peer ended, or gave no answer within {ANSWER_LIMIT_SECONDS} s")
        answers = [json.loads(line) for line in lines]
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise RuntimeError(f"{self.library}: " + "; ".join(errors))
        return [answer["result"] for answer in answers]

    def cpu_seconds(self) -> float:
        """Processor time that the peers and their child processes have used so far."""
        times = [process.cpu_times() for process in self._all_processes()]
        return sum(t.user + t.system for t in times)

    def private_bytes(self) -> int:
        """Memory that the peers and their child processes have for themselves."""
        return sum(process.memory_full_info().uss for process in self._all_processes())

    def note_memory(self) -> None:
        """Remember what the peers have now, for :meth:`peaks`."""
        self._memory_before = [sum(each.memory_info().rss for each in _family(peer)) for peer in self.processes]

    def reset_peaks(self) -> None:
        """Begin to look for the peaks of memory anew (Linux only)."""
        for process in self._all_processes():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="utf-8")

    def peaks(self) -> list[int]:
        """By how many bytes the peers and their child processes, each at its own peak, were above what was noted."""
        peaks = []
        for peer, before in zip(self.processes, self._memory_before, strict=True):
            statuses = [Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8") for process in _family(peer)]
            high_water = [int(status.split("VmHWM:")[1].split()[0]) * 1024 for status in statuses]
            peaks.append(sum(high_water) - before)
        return peaks

    def process_count(self) -> int:
        """The peers and their child processes."""
        return len(self._all_processes())

    def _all_processes(self) -> list[psutil.Process]:
        return [each for process in self.processes for each in _family(process)]

    def time(self, command: str, *arguments: Any, to: Sequence[subprocess.Popen[str]] | None = None) -> float:
        """Seconds from the first peer's beginning to the last peer's end; all processes share the monotonic clock."""
        spans = self.ask(command, *arguments, to=to)
        return max(span["ended"] for span in spans) - min(span["began"] for span in spans)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a peer, and leave nothing of it behind."""
    _kill(process)
    process.wait()
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()


def _family(peer: subprocess.Popen[str]) -> list[psutil.Process]:
    process = psutil.Process(peer.pid)
    return [process, *process.children(recursive=True)]


def _tell(process: subprocess.Popen[str], *words: Any) -> None:
    assert process.stdin
    try:
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise RuntimeError(f"process {process.pid} has ended with status {process.wait(10)}") from None


class JoinedCrew(Crew):
    """Peers that have joined the first one when the block begins."""

    def _get_ready(self) -> None:
        super()._get_ready()
        [address] = self.ask("open", to=self.processes[:1])
        self.ask("join", address)


class AveragerCrew(JoinedCrew):
    """Peers that average a vector with each other; they know each other when the block begins."""

    def __init__(
        self, library: str, peers: int, megabytes: float, options: dict[str, Any] | None = None, **arguments: Any
    ) -> None:
        threads = max(1, (os.cpu_count() or 1) // peers)  # the same for every library
        arguments |= {"megabytes": megabytes, "threads": threads, "options": json.dumps(options or {})}
        super().__init__("peer.py", library, peers, **arguments)
