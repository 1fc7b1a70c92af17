"""What ``shoal dht`` keeps from one start to the next, so that its address stays the same: its key and its port.

Both are files in a folder of the user's state directory, one for each name. A lock, which the system gives back however
a process ends, sees to it that no two processes have the same key and port.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shoal.errors import P2PDaemonError

# Where the search for a port begins. Below those that systems give to outgoing connections, or after a restart
# somebody else might have it.
FIRST_PORT = 31337

PORTS_TRIED = 100


class TakenError(P2PDaemonError):
    """Another process uses what is kept under this name."""


def state_directory() -> Path:
    """Where this system wants programs to keep what is theirs and not for the eyes of the user."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "shoal")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "shoal"
    chosen = os.environ.get("XDG_STATE_HOME", "")
    return (Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".local" / "state") / "shoal"


class Kept:
    """The folder of one name.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity_path = folder / "identity.key"
        self._port_path = folder / "port"

    @classmethod
    @contextmanager
    def under(cls, name: str) -> Iterator[Kept]:
        """Take what is kept under a name, for this process alone.

        Raises:
            ValueError: a name that cannot be that of a folder.
            TakenError: another process has it.
            P2PDaemonError: there is no place to keep anything.
        """
        if not name or name != Path(name).name or name.startswith("."):
            raise ValueError(f"--name must be a plain word, such as seed-2, got {name!r}")
        try:
            folder = state_directory() / "dht" / name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (folder / "lock").open("a+")
        except (OSError, RuntimeError) as e:
            # A user without a home, or one that cannot be written to.
            raise P2PDaemonError(f"there is no place to keep the key and the port ({e}): use --ephemeral") from e
        with lock:
            try:
                _lock(lock)
            except OSError:
                lock.seek(0)
                raise TakenError(
                    f"another `shoal dht` named {name!r} is running{_by_process(lock.read())}, and two cannot have one "
                    "address: stop it, or start this one with --name ANOTHER_NAME, or with --ephemeral"
                ) from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield cls(folder)

    @property
    def port(self) -> int | None:
        """That of the last time."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            port = int(self._port_path.read_text())
            return port if 0 < port < 2**16 else None
        return None

    def keep_port(self, port: int) -> None:
        """Use this one the next time."""
        written = self._port_path.with_suffix(".new")
        written.write_text(f"{port}\n")
        written.replace(self._port_path)  # never half a number


def free_port() -> int:
    """A port that will be free again after a restart; 0 if all of these are taken."""
    return next((port for port in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED) if _is_free(port)), 0)


def _by_process(text: str) -> str:
    return f" (process {text})" if text.isdigit() else ""


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if sys.platform == "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        elif sys.platform != "darwin":  # there it would let two overlap
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        # What is locked cannot be read by others, and they want to know who it is.
        file.seek(2**20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
