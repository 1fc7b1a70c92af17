"""The ``shoal dht`` command: a peer that trains nothing, and through which others join the swarm.

It keeps its key and its port between starts, so its address stays the same. Both are files in the user's state
directory, in one folder per name. A lock file ensures that no two processes use the same key and port; the system
releases the lock however a process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from shoal.base.logs import counted, shown_name
from shoal.cli import add_addresses, add_identity, add_listening, add_option, end_on_signals, rate_of, value
from shoal.dht import DHT, DHTNode
from shoal.errors import P2PDaemonError
from shoal.net.limits import RelayLimits, increase_file_limit
from shoal.net.own_addresses import chosen_host_maddrs, everywhere
from shoal.net.pasted import line_to_paste, reach_of, read_addresses, short_form
from shoal.p2p import Identity, Multiaddr
from shoal.reach.reachability import Reachability

# Accepted so that existing scripts work. It configures a libp2p daemon, which shoal does not have.
WITHOUT_EFFECT = ("use-ipfs",)
# Accepted for the same reason; shoal always does this.
ALWAYS_ON = ("use-auto-relay",)

DEFAULT_NAME = "default"
ANY_PORT = "/tcp/0"

DESCRIPTION = """\
Starts a peer that does no training. Others join the swarm through its address, so let it run on a machine that stays on
and that they can reach. It holds nothing that the swarm could not do without: when it goes, the others carry on. Its
address stays the same from one start to the next, so that the others find it after a reboot.
"""

# Ports to try. Chosen below those that systems give to outgoing connections, which might be in use after a restart.
FIRST_PORT, PORTS_TRIED = 31337, 100


class TakenError(P2PDaemonError):
    """Another process uses the key and port of this name."""


def state_directory() -> Path:
    """The directory in which programs keep their state on this system."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "shoal")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "shoal"
    chosen = os.environ.get("XDG_STATE_HOME", "")
    return (Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".local" / "state") / "shoal"


class SavedIdentity:
    """The key and port that are kept under one name.

    Args:
        folder: contains them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity_path = folder / "identity.key"
        self._port_path = folder / "port"

    @classmethod
    @contextmanager
    def under(cls, name: str) -> Iterator[SavedIdentity]:
        """Lock the key and port of a name for this process.

        Raises:
            ValueError: the name cannot be the name of a folder.
            TakenError: another process has locked it.
            P2PDaemonError: there is no place to keep them.
        """
        if not name or name != Path(name).name or name.startswith("."):
            raise ValueError(f"--name must be a plain word, such as seed-2, got {name!r}")
        try:
            folder = state_directory() / "dht" / name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (folder / "lock").open("a+")
        except (OSError, RuntimeError) as e:
            # The user has no home directory, or it is not writable.
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
        """The port of the last start, if it is known."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            port = int(self._port_path.read_text())
            return port if 0 < port < 2**16 else None
        return None

    def keep_port(self, port: int) -> None:
        """Store the port for the next start."""
        written = self._port_path.with_suffix(".new")
        written.write_text(f"{port}\n")
        written.replace(self._port_path)  # atomic: never leaves half a number


def free_port() -> int:
    """A port that will still be free after a restart; 0 if all candidates are taken."""
    return next((port for port in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED) if _is_free(port)), 0)


def _by_process(text: str) -> str:
    return f" (process {text})" if text.isdigit() else ""


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if sys.platform == "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        elif sys.platform != "darwin":  # macOS would let two sockets share the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        # Windows keeps others from reading locked bytes. They need the process id, so lock a byte far after it.
        file.seek(2**20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)

else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def add_parser(subparsers: Any) -> None:
    """Add ``dht`` to the subcommands."""
    parser = subparsers.add_parser(
        "dht", help="run a peer through which others join the swarm", description=DESCRIPTION
    )

    add_addresses(parser, "join the swarm of these peers; `local`: of those in the local network; none: start one")
    add_option(parser, "initial-peers", nargs="*", default=[], metavar="ADDRESS", help="the same, as an option")
    add_listening(parser, "all networks, on the port of the last time", ", such as the public side of a forwarded port")
    add_identity(parser, "file that keeps this peer's key, instead of the one kept under --name; made if missing")
    parser.add_argument(
        "--name",
        metavar="WORD",
        help=f"keep key and port under this name, to run several on one machine (default: {DEFAULT_NAME}); other "
        "peers see it, too",
    )
    parser.add_argument(
        "--ephemeral",
        action="store_true",
        help="keep nothing: be a new peer, with a new address, at each start",
    )
    add_option(
        parser,
        "refresh-period",
        type=value("a positive number of seconds", float, lambda seconds: 0 < seconds < threading.TIMEOUT_MAX),
        default=30.0,
        metavar="SECONDS",
        help="how often to report and to look for peers that are gone (default: 30)",
    )
    add_option(
        parser, "no-relay", action="store_true", help="do not carry anything between peers that cannot call each other"
    )
    add_option(
        parser,
        "relay-rate",
        type=rate_of,
        metavar="RATE",
        help="how much to carry at most, in bytes per second and for all together, such as 5M (default: no limit)",
    )
    parser.add_argument("--qr", action="store_true", help="show the address as a QR code, too, for a phone")
    for name in (*WITHOUT_EFFECT, *ALWAYS_ON):
        add_option(parser, name, action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run, for_scripts=False)


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM and return the exit status."""
    end_on_signals()
    ignored = [f"--{name}" for name in WITHOUT_EFFECT if getattr(arguments, name.replace("-", "_"))]
    if ignored:
        print(f"shoal dht: no effect here: {', '.join(ignored)}", file=sys.stderr)
    increase_file_limit()  # each peer that joins through this one takes a few sockets
    with ExitStack() as stack:
        try:
            if arguments.qr:
                qr_code("")  # fail at once if it cannot be drawn
            kept = _what_is_kept(arguments, stack)
            dht = _start(arguments, kept)
        except KeyboardInterrupt:
            return 0
        try:
            addresses = dht.get_visible_maddrs()
            if arguments.for_scripts:
                _say(*lines_for_scripts(addresses), to_stderr=True)
            _say(
                *how_to_join(addresses, is_private=dht.p2p.membership is not None),
                *_peers_met(dht),
                *(qr_code(line_to_paste(addresses)) if arguments.qr else []),
                _what_stays(arguments, kept),
            )
            _report_until_interrupted(dht, arguments.refresh_period, to_stderr=arguments.for_scripts)
        except KeyboardInterrupt:
            _say("Leaving.")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                # Leaving takes a moment; a second signal must not interrupt it.
                signal.signal(number, signal.SIG_IGN)
            dht.shutdown()
    return 0


def _what_is_kept(arguments: argparse.Namespace, stack: ExitStack) -> SavedIdentity | None:
    """The stored key and port; ``None`` if the peer should have a new address at each start.

    A user who asks for any free port does not need a stable address, unless a name is given too.
    """
    name = arguments.name
    if arguments.ephemeral:
        if name is not None:
            raise ValueError("--name and --ephemeral exclude each other: what has a name is kept")
        return None
    if name is None:
        if _asks_for_any_port(_chosen_hosts(arguments)):
            return None
        path = arguments.identity_path
        name = DEFAULT_NAME if path is None else str(Identity.load_or_create(path).peer_id)
    return stack.enter_context(SavedIdentity.under(name))


def _chosen_hosts(arguments: argparse.Namespace) -> list[str]:
    """Where the user wants the peer to listen; empty if nothing was given."""
    given = chosen_host_maddrs() if arguments.host_maddrs is None else arguments.host_maddrs
    return [str(address) for address in read_addresses(given, "--host-maddrs")]


def _asks_for_any_port(hosts: Sequence[str]) -> bool:
    return any(host.endswith(ANY_PORT) for host in hosts) and all(
        host.endswith(ANY_PORT) for host in hosts if "/tcp/" in host
    )


def _start(arguments: argparse.Namespace, kept: SavedIdentity | None) -> DHT:
    hosts = _chosen_hosts(arguments) or everywhere()
    port = None
    if kept is not None and _asks_for_any_port(hosts):
        port = kept.port or free_port()
        hosts = [host[: -len(ANY_PORT)] + f"/tcp/{port}" if host.endswith(ANY_PORT) else host for host in hosts]
    deadline = time.monotonic() + 3.0  # the process that has the port may be about to end
    while True:
        try:
            dht = DHT(
                initial_peers=[*arguments.addresses, *arguments.initial_peers],
                start=True,
                host_maddrs=hosts,
                announce_maddrs=arguments.announce_maddrs,
                identity_path=arguments.identity_path or (None if kept is None else kept.identity_path),
                refresh_timeout=arguments.refresh_period,
                token=arguments.token,
                relay=False if arguments.no_relay else None,
                relay_limits=RelayLimits(rate=arguments.relay_rate),
                name=None if arguments.name is None else shown_name(arguments.name),
            )
            break
        except P2PDaemonError as error:
            if kept is None or port != kept.port or "cannot listen" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise P2PDaemonError(
                    f"{error}\nIt is the port of the last time, a part of the address that others know: stop what has "
                    "it now, or give another one with --host-maddrs /ip4/0.0.0.0/tcp/PORT and tell the others"
                ) from error
            time.sleep(0.2)
    if kept is not None and port:
        kept.keep_port(port)
    return dht


def _peers_met(dht: DHT) -> list[str]:
    """The peers that answered at addresses without a peer id."""
    return [
        f"Peer {peer} answered at {short_form(address)}. Its identity was not checked; to pin it: {address}/p2p/{peer}"
        for address, peer in list(dht.p2p.met.items())
        if peer != dht.peer_id
    ]


def _what_stays(arguments: argparse.Namespace, kept: SavedIdentity | None) -> str:
    if kept is not None:
        return f"Key and port stay the same at the next start: they are kept in {kept.folder}"
    how = "leave out --ephemeral" if arguments.ephemeral else "give a port or a --name"
    return f"The next start will have another address; for one that stays, {how}."


def _say(*lines: str, to_stderr: bool = False) -> None:
    print(*lines, sep="\n", file=sys.stderr if to_stderr else sys.stdout, flush=True)


def lines_for_scripts(addresses: Sequence[Multiaddr]) -> list[str]:
    """The lines in which scripts for ``hivemind-dht`` look for the addresses."""
    told = " ".join(str(address) for address in sorted(addresses, key=reach_of, reverse=True))
    return [
        f"Running a DHT instance. To connect other peers to this one, use --initial_peers {told}",
        f"Full list of visible multiaddresses: {told}",
    ]


def how_to_join(addresses: Sequence[Multiaddr], *, is_private: bool = False) -> list[str]:
    """Tell a user how other peers can join. In a private run each needs a token of its own, which is not shown."""
    option, argument = (" --token TOKEN", ', token="TOKEN"') if is_private else ("", "")
    best = max(addresses, key=reach_of)
    return [
        "This peer is running. Give this address to the others:",
        f"  {line_to_paste(addresses)}",
        "All of its addresses, which also say which peer has to answer there:",
        *(f"  {address}" for address in sorted(addresses, key=reach_of, reverse=True)),
        "Others join with a TOKEN of this run, see shoal token invite:" if is_private else "Others join with:",
        f"  shoal dht --initial-peers {best}{option}",
        "or in Python:",
        f'  dht = shoal.DHT(initial_peers=["{best}"], start=True{argument})',
    ]


def qr_code(text: str) -> list[str]:
    """A text as a QR code, in lines for the terminal.

    Raises:
        ModuleNotFoundError: the package that draws it is not installed.
    """
    try:
        import segno
    except ModuleNotFoundError:
        message = "--qr needs segno, which is not installed: pip install 'shoal[qr]'"
        raise ModuleNotFoundError(message, name="segno") from None
    drawn = io.StringIO()
    code = segno.make(text or " ", micro=False)
    try:
        "▀▄█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        code.terminal(drawn)
        return drawn.getvalue().splitlines()
    code.terminal(drawn, compact=True)
    # The blocks are light: cameras read it on any background if the rest is dark.
    before, after = ("\033[97;40m", "\033[0m") if sys.stdout.isatty() else ("", "")
    return [f"{before}{line}{after}" for line in drawn.getvalue().splitlines()]


def _report_until_interrupted(
    dht: DHT, period: float, pause: Callable[[float], object] | None = None, *, to_stderr: bool = False
) -> None:
    pause = pause or time.sleep  # waiting for an event would ignore Ctrl-C on Windows
    told, carried = set(dht.get_visible_maddrs()), 0
    while True:
        pause(period)
        nodes, keys = dht.run_coroutine(_size)
        relay_lines, carried = dht.run_coroutine(partial(_relay_use, carried=carried))
        addresses = dht.get_visible_maddrs()
        _say(
            f"{nodes} DHT nodes (including this one) are in the local routing table",
            f"Local storage contains {keys} keys",
            *relay_lines,
            *(f"This peer can be reached at {address} now" for address in addresses if address not in told),
            to_stderr=to_stderr,
        )
        told = set(addresses)


async def _size(dht: DHT, node: DHTNode) -> tuple[int, int]:
    return len(node.protocol.routing_table) + 1, len(node.protocol.storage)


async def _relay_use(dht: DHT, node: DHTNode, *, carried: int) -> tuple[list[str], int]:
    """Lines about this peer's work as a relay, and the bytes that it has carried so far."""
    p2p, now_carried = node.p2p, node.p2p.metrics.bytes_carried
    relay = p2p.relay
    if relay.serves:
        since = (now_carried - carried) / 1e6
        guests, circuits = counted(len(relay.guests), "peer"), counted(relay.circuit_count, "circuit")
        lines = [f"Relay for {guests}: {circuits}, {since:.1f} MB carried since the last report"]
        refused = ", ".join(f"{why} {number}" for why, number in p2p.metrics.circuits_refused.items())
        lines += [f"Refused to peers so far: {refused}"] if refused else []
    elif p2p.reachability is Reachability.PUBLIC:
        lines = ["No relay for others"]
    else:
        lines = [f"Not called from outside directly ({p2p.reachability.value}), so it is no relay for others"]
    return lines, now_carried
