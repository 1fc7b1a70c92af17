"""Every exception that shoal raises on purpose.

::

    ShoalError
    ├── ReactorError            a blocking call from inside the event loop, a forked child, a closed object
    ├── P2PDaemonError          this side of the network failed: cannot start, listen, dial, or find a handler
    │   ├── BootstrapError      no bootstrap address could be used; one verdict for each address
    │   ├── ForeignPeerError    a peer id made from another kind of key, such as RSA
    │   ├── DialError           one peer could not be connected, with the reason
    │   │   ├── IdentityMismatchError   the address answered, but as another peer
    │   │   ├── NoRelayError            only relays lead to the peer, and none of them answers
    │   │   ├── NoRoomError             the relay that leads to the peer has no room for one more connection
    │   │   ├── RefusedDialError        its machine answers, but nothing listens there: the process is gone
    │   │   │   └── NoReservationError  relays answer, but none of them holds a reservation of the peer
    │   │   ├── InterruptedDialError    the connection broke before it could be used; another attempt may succeed
    │   │   └── NotAMemberError         one side is not a member of the other's run, or lacks the role
    │   ├── NoAccessTokenError  this peer has no valid token of its authority, so it calls and answers nobody
    │   ├── IdentityTakenError  another process is online with the identity of this peer
    │   └── StreamClosedError   the connection to a peer ended before an operation was complete
    ├── P2PHandlerError         the other side received the call and its handler raised
    ├── BusyError               a peer is asked for more than it can do for others at the moment
    ├── ProtocolError           a peer sent bytes that break the protocol; its connection is dropped
    ├── DHTError                the distributed table refused or failed
    │   └── ValidationError     this node may not join, because the time is disputed
    │       └── NotCallableError    another peer cannot call this one back
    ├── AveragingError
    │   ├── MatchmakingException    no group could be formed
    │   └── AllreduceException      a step ended without a result, usually after a group was formed
    │       └── BannedException     a member of the group was excluded from the rest of the round
    ├── SettingsMismatch        the settings of this peer are not those of its run; the text names what differs
    ├── ArchiveError            an archive cannot be written, or cannot be read
    ├── StateRefusedError       raise it in ``check_state`` to refuse a downloaded state, with the reason
    ├── MicrobatchError         a microbatch cannot be computed in a stage, or must not count
    │   └── MicrobatchNotFiniteError  a loss or a gradient of it is not finite
    ├── ProcessGroupError       a peer is several processes, and another one of them has ended or failed
    └── SimulationError         a simulation in virtual time cannot continue, or a machine in it is down

``P2PDaemonError`` keeps the name that existing programs use, although shoal has no daemon.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def _list_verdicts(verdicts: dict[str, str]) -> str:
    return "".join(f"\n  {address}: {verdict}" for address, verdict in verdicts.items())


class ShoalError(Exception):
    """Base class: catch it to catch everything that shoal raises on purpose."""


class ReactorError(ShoalError, RuntimeError):
    """The background event loop cannot be used from here, or has ended."""


class P2PDaemonError(ShoalError):
    """A problem on this side of the network: start-up, listening, dialling, or a missing handler."""


class ForeignPeerError(P2PDaemonError, ValueError):
    """A peer id that no shoal peer can have: it is made from another kind of key, such as RSA."""


class DialError(P2PDaemonError, ConnectionError):
    """A peer could not be connected; the text names the address and the cause."""


class IdentityMismatchError(DialError):
    """The address answered and proved to be another peer than the expected one."""


class RefusedDialError(DialError):
    """The machine answers that nothing listens at any known address of the peer: its process has ended."""


class InterruptedDialError(DialError):
    """Something answered, but the connection broke before it could be used: another attempt may succeed."""


class NoRelayError(DialError):
    """Only relays lead to a peer, and none of them answers."""


class NoRoomError(DialError):
    """The relay that leads to a peer has no room for one more connection at the moment."""


class NoReservationError(RefusedDialError):
    """The relays of a peer answer, but hold no reservation of it: it has left, or has changed its relays."""


class NotAMemberError(DialError):
    """One side is not a member of the other's run, or lacks the role that a call needs.

    Attributes:
        reason: in a few words, for counters: ``not a member``, ``another run``, ``expired``, ``revoked``,
            ``wrong role`` or ``broken``.
    """

    def __init__(self, text: str, *, reason: str = "not a member") -> None:
        super().__init__(text)
        self.reason = reason


class NoAccessTokenError(P2PDaemonError, RuntimeError):
    """This peer has no valid access token, because its authority gives it none; the text says why."""


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
    """A peer has reached its limit for this kind of work for others; try again later."""


class ProtocolError(ShoalError):
    """A peer sent something that the protocol does not allow."""


class DHTError(ShoalError):
    """The distributed hash table could not do what was asked."""


class ValidationError(DHTError):
    """This node may not join the table: its initial peers disagree about the time, or cannot reach it as promised.

    Attributes:
        verdicts: the answer of each bootstrap address, by address; empty if the text is about a single peer.
    """

    def __init__(self, text: str, verdicts: dict[str, str] | None = None) -> None:
        self.verdicts = verdicts or {}
        self._text = text
        super().__init__(text + _list_verdicts(self.verdicts))

    def __reduce__(self) -> tuple[type[ValidationError], tuple[str, dict[str, str]]]:
        return type(self), (self._text, self.verdicts)


class NotCallableError(ValidationError):
    """A peer that was asked to call this one back could not."""


class AveragingError(ShoalError):
    """Averaging with other peers failed; local tensors keep their values unless the error says what has changed."""


class MatchmakingException(AveragingError):
    """A group of peers could not be formed."""


class AllreduceException(AveragingError):
    """An averaging step ended without a result.

    Attributes:
        share_averaged: the share of values that hold an average although the exchange was cut short.
    """

    share_averaged: float = 0.0


class BannedException(AllreduceException):
    """A group member was excluded from the rest of the round."""


class SettingsMismatch(ShoalError, ValueError):
    """This peer's settings differ from those of its run, so that it would train alone, or by other rules.

    Attributes:
        run_id: name of the run.
        differences: what differs, in words.
        peers: the ids of the peers from which this one differs.
    """

    def __init__(self, run_id: str, why: str, whom: str, differences: Sequence[str], peers: Sequence[str]) -> None:
        self.run_id, self.differences, self.peers = run_id, list(differences), list(peers)
        self._why, self._whom = why, whom
        told = "".join(f"\n  {difference}" for difference in differences)
        super().__init__(
            f"this peer does not fit run {run_id!r}: {why}. It differs from {whom}:{told}\n"
            "Make these the same in all peers, or choose another run_id here. To continue anyway: on_mismatch='warn'"
        )

    def __reduce__(self) -> tuple[type[SettingsMismatch], tuple[str, str, str, list[str], list[str]]]:
        return type(self), (self.run_id, self._why, self._whom, self.differences, self.peers)


class ArchiveError(ShoalError):
    """An archive of a run cannot be written or read; the text says which one is the last good one."""


class StateRefusedError(ShoalError, ValueError):
    """A user's ``check_state`` does not accept a downloaded state; the text says why, for the log."""


class MicrobatchError(ShoalError, ValueError):
    """A microbatch cannot be computed in a stage, or must not count; the text says why."""


class MicrobatchNotFiniteError(MicrobatchError):
    """A loss or a gradient of a microbatch is not finite: it must not count anywhere."""


class ProcessGroupError(ShoalError, RuntimeError):
    """Another process of this peer has ended, failed or hangs; this one cannot continue alone."""


class SimulationError(ShoalError, RuntimeError):
    """A simulation in virtual time cannot continue, or a machine in it was asked for something that it cannot do."""


def kind_of_dial_errors(errors: Sequence[BaseException]) -> type[ShoalError]:
    """The class that stands for all these errors."""
    for kind in (IdentityMismatchError, NoReservationError, RefusedDialError, NoRoomError):
        if all(isinstance(error, kind) for error in errors):
            return kind
    return DialError


def torch_is_missing(name: str = "torch") -> ModuleNotFoundError:
    """The error for work with tensors where torch or numpy is not installed."""
    return ModuleNotFoundError(
        f"this part of shoal needs {name}, which is not installed: run pip install shoal. Without torch and numpy, "
        "there are the DHT and the commands dht, doctor and token",
        name=name,
    )


def set_the_clock() -> str:
    """How to synchronise the machine's clock."""
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
    """How to make a folder and its parents."""
    return f'mkdir "{path}"' if sys.platform == "win32" else f"mkdir -p {path}"


def allow_open_files(count: int) -> str:
    """How to allow more open files and sockets for programs started from a terminal; Windows has no such limit."""
    if sys.platform == "darwin":
        return f"ulimit -n {count}, or for all programs: sudo launchctl limit maxfiles {count} unlimited"
    return f"ulimit -n {count}"


def end_at_once() -> str:
    """What kills a process at once on this system."""
    return "TerminateProcess" if sys.platform == "win32" else "SIGKILL"


def no_route_to_neighbours() -> str:
    """The permission that may keep a program out of the local network; empty on systems without one."""
    if sys.platform == "darwin":
        return (
            "; macOS says the same if this program may not use the local network: allow your terminal in System "
            "Settings > Privacy & Security > Local Network, and restart it"
        )
    return ""
