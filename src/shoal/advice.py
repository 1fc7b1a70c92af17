"""What to do about troubles of a machine, in the words of its system."""

from __future__ import annotations

import os
import sys


def set_the_clock() -> str:
    """How to let the machine keep its clock right."""
    if sys.platform == "win32":
        return "w32tm /resync, or Settings > Time & language > Date & time > Set time automatically"
    if sys.platform == "darwin":
        return "sudo sntp -sS time.apple.com, or System Settings > General > Date & Time > Set time automatically"
    return "timedatectl set-ntp true"


def make_private(path: str | os.PathLike[str]) -> str:
    """How to keep other users of the machine from reading a file."""
    if sys.platform == "win32":
        return f'icacls "{path}" /inheritance:r /grant:r "%USERNAME%:F"'
    return f"chmod 600 {path}"


def move_away(path: str | os.PathLike[str]) -> str:
    """How to keep a file under another name."""
    return f'move "{path}" "{path}.old"' if sys.platform == "win32" else f"mv {path} {path}.old"


def make_folder(path: str | os.PathLike[str]) -> str:
    """How to make a folder and those that it is in."""
    return f'mkdir "{path}"' if sys.platform == "win32" else f"mkdir -p {path}"


def allow_open_files(count: int) -> str:
    """How to let programs started from a terminal have more files and sockets open; Windows has no such limit."""
    if sys.platform == "darwin":
        return f"ulimit -n {count}, or for all programs: sudo launchctl limit maxfiles {count} unlimited"
    return f"ulimit -n {count}"


def end_at_once() -> str:
    """What ends a process here without a word."""
    return "TerminateProcess" if sys.platform == "win32" else "SIGKILL"


def no_route_to_neighbours() -> str:
    """What may keep a program from its own network although the way is open; empty where nothing does."""
    if sys.platform == "darwin":
        return (
            "; macOS says the same if this program may not use the local network: allow your terminal in System "
            "Settings > Privacy & Security > Local Network, and start it anew"
        )
    return ""
