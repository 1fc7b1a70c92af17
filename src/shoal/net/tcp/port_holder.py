"""Which process has a port, so that an error can name it. Linux tells; elsewhere it is not known."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LISTENS = "0A"


def holder_of(port: int, proc: Path = Path("/proc")) -> int | None:
    """The process that listens on a TCP port of this machine; ``None`` if it is another user's, or not known.

    Args:
        proc: where the system shows its processes.
    """
    if sys.platform != "linux":
        return None
    wanted = {f"socket:[{inode}]" for inode in _sockets_on(port, proc)}
    if not wanted:
        return None
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(descriptor) in wanted for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # it is another user's, or has just ended
            continue
    return None


def _sockets_on(port: int, proc: Path) -> set[str]:
    """The inodes of sockets that listen on a port."""
    found = set[str]()
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / name).read_text().splitlines()[1:]
        except OSError:  # there may be no IPv6
            continue
        for _, local, _, state, *rest in map(str.split, rows):
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                found.add(rest[5])
    return found


def port_in_use(port: int) -> str:
    """What to tell a user whose port is taken."""
    process = holder_of(port)
    who = "" if process is None else " (this process)" if process == os.getpid() else f" (process {process})"
    return f"port {port} is in use: is an earlier run still running?{who}"
