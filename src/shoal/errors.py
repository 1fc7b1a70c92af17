"""Every exception that shoal raises on purpose.

::

    ShoalError
    ├── ReactorError            a blocking call from inside the event loop, a forked child, a closed object
    ├── P2PDaemonError          this side of the network failed: cannot start, listen, dial, or find a handler
    │   ├── BootstrapError      no bootstrap address answered; one verdict for each address
    │   ├── DialError           one peer could not be connected, with the reason
    │   │   ├── IdentityMismatchError   the address answered, but as another peer
    │   │   └── InterruptedDialError    the connection broke before it could be used; another attempt may succeed
    │   ├── IdentityTakenError  another process is online with the identity of this peer
    │   └── StreamClosedError   the connection to a peer ended in the middle of something
    ├── P2PHandlerError         the other side received the call and its handler raised
    ├── BusyError               a peer is asked for more than it does for others at the moment
    ├── ProtocolError           a peer sent bytes that break the protocol; its connection is dropped
    ├── DHTError                the distributed table refused or failed
    │   └── ValidationError     this node may not join: unreachable, or the time is disputed
    ├── AveragingError
    │   ├── MatchmakingException    no group could be formed
    │   └── AllreduceException      a group was formed (or not in time) but no result came of it
    │       └── BannedException     a member of the group was excluded from the rest of the round
    ├── ProcessGroupError       a peer is several processes, and another one of them has ended or failed
    └── SimulationError         a simulation in virtual time cannot go on, or a machine in it is down

``P2PDaemonError`` keeps the name that users of this field know, although shoal has no daemon.
"""

from __future__ import annotations

import os
import sys


def _list_verdicts(verdicts: dict[str, str]) -> str:
    return "".join(f"\n  {address}: {verdict}" for address, verdict in verdicts.items())


class ShoalError(Exception):
    """Base class: catch it to catch everything that shoal raises on purpose."""


class ReactorError(ShoalError, RuntimeError):
    """The background event loop cannot be used from here, or not any more."""


class P2PDaemonError(ShoalError):
    """A problem on this side of the network: start-up, listening, dialling, or a missing handler."""


class DialError(P2PDaemonError, ConnectionError):
    """A peer could not be connected; the text names the address and the cause."""


class IdentityMismatchError(DialError):
    """The address answered and proved to be another peer than the expected one."""


class InterruptedDialError(DialError):
    """Something answered, but the connection broke before it could be used: another attempt may succeed."""


class IdentityTakenError(P2PDaemonError):
    """Another process is online with this peer's identity; the text says where."""


class StreamClosedError(P2PDaemonError, ConnectionError):
    """The connection to a peer ended before the operation was complete."""


class BootstrapError(P2PDaemonError, RuntimeError):
    """No bootstrap address could be used.

    Attributes:
        verdicts: why each address failed, by address.
    """

    def __init__(self, verdicts: dict[str, str]) -> None:
        self.verdicts = verdicts
        super().__init__(f"failed to connect to bootstrap peers:{_list_verdicts(verdicts)}")

    def __reduce__(self) -> tuple[type[BootstrapError], tuple[dict[str, str]]]:
        return type(self), (self.verdicts,)


class P2PHandlerError(ShoalError):
    """The remote handler raised; the text carries its error type and message, never its traceback."""


class BusyError(ShoalError):
    """This peer does no more of that for others at the moment."""


class ProtocolError(ShoalError):
    """A peer sent something that the protocol does not allow."""


class DHTError(ShoalError):
    """The distributed hash table could not do what was asked."""


class ValidationError(DHTError):
    """This node may not take part in the table: it cannot be reached, or nobody can tell the right time.

    Attributes:
        verdicts: what each bootstrap address has answered, by address; empty if the text speaks of one peer alone.
    """

    def __init__(self, text: str, verdicts: dict[str, str] | None = None) -> None:
        self.verdicts = verdicts or {}
        self._text = text
        super().__init__(text + _list_verdicts(self.verdicts))

    def __reduce__(self) -> tuple[type[ValidationError], tuple[str, dict[str, str]]]:
        return type(self), (self._text, self.verdicts)


class AveragingError(ShoalError):
    """Averaging with other peers failed; local tensors keep their values, unless the error says what has changed."""


class MatchmakingException(AveragingError):
    """A group of peers could not be formed."""


class AllreduceException(AveragingError):
    """An averaging step ended without a result.

    Attributes:
        share_averaged: which share of the values holds an average nevertheless, because the exchange was cut short.
    """

    share_averaged: float = 0.0


class BannedException(AllreduceException):
    """A group member was excluded from the rest of the round."""


class ProcessGroupError(ShoalError, RuntimeError):
    """Another process of this peer has ended, failed or hangs: this one cannot go on alone."""


class SimulationError(ShoalError, RuntimeError):
    """A simulation in virtual time cannot go on, or was asked for something that a machine in it cannot do."""


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
