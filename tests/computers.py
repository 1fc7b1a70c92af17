"""Computers in network namespaces of this machine: what those of every laboratory have in common.

Names begin with the id of the process that has made them. So whatever a killed process has left behind is found and
removed by the next one that makes some.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from tests.nursery import CLONE_NEWNET
from tests.system.swarm import Peer

PREFIX = "shoal-test"
_NAMESPACES = Path("/run/netns")
_UNSET = ("SHOAL_HOST_MADDRS", "HIVEMIND_HOST_MADDRS")
"""What keeps other tests on loopback would keep computers from each other."""
_numbers = itertools.count()


def _can_make_computers() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return made


CAN_MAKE_COMPUTERS = _can_make_computers()


def run(*words: object, text: str = "") -> str:
    """Run a command and return what it prints.

    Args:
        words: the command.
        text: for its standard input.

    Raises:
        RuntimeError: it failed; with what it has printed.
    """
    command = list(map(str, words))
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def ip(*words: object) -> None:
    """Run the ``ip`` command."""
    run("ip", *words)


def new_name() -> str:
    """What the names of all namespaces of one laboratory begin with."""
    return f"{PREFIX}-{os.getpid()}-{next(_numbers)}"


def namespaces() -> list[str]:
    """Those that tests have made, of whatever process."""
    listed = run("ip", "netns", "list")
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")]


def remove(names: Iterable[str]) -> None:
    """Kill all that runs in these namespaces, and remove them."""
    for name in names:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, pids.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def remove_of(laboratory: str) -> None:
    """Remove all namespaces of one laboratory, by its :func:`new_name`."""
    remove(name for name in namespaces() if name.startswith(f"{laboratory}-"))


def remove_leftovers() -> None:
    """Remove what processes have left behind that are no more."""
    remove(name for name in namespaces() if _is_left_over(name))
    for homes in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*-*-*"):
        if _is_left_over(homes.name):
            shutil.rmtree(homes, ignore_errors=True)  # another process may do so, too


def _is_left_over(name: str) -> bool:
    return not psutil.pid_exists(int(name.removeprefix(PREFIX).split("-")[1]))


def new_homes(laboratory: str) -> Path:
    """A folder for the homes of its computers."""
    return Path(tempfile.mkdtemp(prefix=f"{laboratory}-"))


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread makes in the block are in that namespace, and stay there."""
    enter = ctypes.CDLL(None, use_errno=True).setns
    with open("/proc/thread-self/ns/net", "rb") as home, open(_NAMESPACES / namespace, "rb") as there:
        if enter(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        try:
            yield
        finally:
            if enter(home.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot leave the namespace {namespace}")


class Computer:
    """One computer: a network namespace with a loopback interface of its own, and programs in it.

    Args:
        namespace: its name.
        home: a folder that is home to whoever runs programs here; made if it is not there.
    """

    def __init__(self, namespace: str, home: Path) -> None:
        self.namespace, self.home = namespace, home
        self.programs: list[Peer] = []
        home.mkdir(exist_ok=True)
        ip("netns", "add", namespace)
        self.ip("link", "set", "lo", "up")

    @property
    def launcher(self) -> list[str]:
        """What to put before a command so that it runs here."""
        return ["ip", "netns", "exec", self.namespace]

    def ip(self, *words: object) -> None:
        """Run the ``ip`` command on this computer."""
        ip("-n", self.namespace, *words)

    def run(self, *words: object, text: str = "") -> str:
        """Run any command here, see :func:`run`."""
        return run(*self.launcher, *words, text=text)

    def start(
        self,
        program: str | Path,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Peer:
        """Run Python here.

        Args:
            program: a script of tests/system or the path of another one; or ``-c`` or ``-m``, before their arguments.
            arguments: for the program.
            environment: beside what this process has; programs may be anywhere and listen where they like.
            cwd: the folder in which it runs.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
        if paths := inherited.get("PYTHONPATH"):  # they may be relative to the folder of this process
            inherited["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        own = {"HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state"), **(environment or {})}
        started = Peer(
            program,
            *arguments,
            namespace=self.namespace,
            environment=inherited | own,
            cwd=cwd or self.home,
        )
        self.programs.append(started)
        return started

    def close(self) -> None:
        """End all programs and remove the namespace."""
        for program in self.programs:
            program.close()
        remove([self.namespace])
