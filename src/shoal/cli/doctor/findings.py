"""The doctor's findings, how they are shown, and the checks of this machine alone: its settings and its token."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ipaddress
import os
import platform
import shutil
import stat
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.access.membership import ADVICE, Membership
from shoal.access.tokens import DAY
from shoal.base.clock import get_clock
from shoal.base.logs import counted
from shoal.errors import NotAMemberError, P2PDaemonError, allow_open_files, make_folder, make_private, move_away
from shoal.metrics import Metrics
from shoal.net.tcp.connect import Proxies
from shoal.p2p import P2P, Identity, Multiaddr
from shoal.peers.identity import split_peer_address
from shoal.reach.checkup import describe_software

# Column where texts begin, after the verdict and the name of the check.
INDENT = 26

IDENTITY_FILE = "identity file"
PROXY = "proxy"
TOKEN = "token"
# Connections and files that a peer of a large swarm may need to have open. Chosen.
ENOUGH_OPEN_FILES = 1024


class Severity(str, Enum):
    """Severity of a finding."""

    OK = "ok"
    UNKNOWN = "unknown"
    """The check gave no answer."""
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    verdict: Severity
    text: str
    fix: str = ""
    """What to do if something is wrong."""
    values: dict[str, Any] = field(default_factory=dict)
    """The measured values, for programs."""

    def lines(self) -> list[str]:
        """The finding as lines of a table."""
        head = f"  {self.verdict.value:<7}  {self.check:<15}"
        texts = [*_wrap(self.text), *_wrap(self.fix and f"-> {self.fix}", hanging="   ")]
        return [f"{(head if not number else ''):<{INDENT}}{line}".rstrip() for number, line in enumerate(texts)]

    def as_dict(self) -> dict[str, Any]:
        """The finding for programs."""
        return {**asdict(self), "verdict": self.verdict.value.lower()}


def ok(check: str, text: str, **values: Any) -> Finding:
    """All is well."""
    return Finding(check, Severity.OK, text, values=values)


def unknown(check: str, text: str, **values: Any) -> Finding:
    """The check gave no answer; the text says what would help."""
    return Finding(check, Severity.UNKNOWN, text, values=values)


def warn(check: str, text: str, fix: str, **values: Any) -> Finding:
    """It works, but not as it should."""
    return Finding(check, Severity.WARN, text, fix, values)


def fail(check: str, text: str, fix: str, **values: Any) -> Finding:
    """It does not work."""
    return Finding(check, Severity.FAIL, text, fix, values)


def _wrap(text: str, hanging: str = "") -> list[str]:
    """Wrap a text. Text from other peers may hold terminal control codes, so unprintable characters are replaced."""
    lines: list[str] = []
    width = max(30, shutil.get_terminal_size().columns - INDENT)
    for paragraph in text[:1000].split("\n"):
        paragraph = "".join(character if character.isprintable() else "?" for character in paragraph)
        lines += textwrap.wrap(
            paragraph, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        )
    return lines


def summary(findings: list[Finding]) -> str:
    """The overall result in one line."""
    failures = sum(finding.verdict is Severity.FAIL for finding in findings)
    warnings = sum(finding.verdict is Severity.WARN for finding in findings)
    if not failures and not warnings:
        open_questions = sum(finding.verdict is Severity.UNKNOWN for finding in findings)
        return f"All is well, as far as is known: {open_questions} unknown." if open_questions else "All is well."
    parts = [counted(failures, "problem")] * bool(failures) + [counted(warnings, "warning")] * bool(warnings)
    return f"{', '.join(parts)}: see the lines with an arrow."


def look_at_machine(identity_path: Path | None) -> Iterator[Finding]:
    """Check versions and settings."""
    yield _versions()
    yield _event_loop()
    yield _open_files()
    yield from _proxy()
    if identity_path is not None:
        yield _identity_file(identity_path)


def _versions() -> Finding:
    found = describe_software()
    text = (
        f"shoal {found.shoal}, protocol {found.wire}, Python {found.python}, torch {found.torch}, "
        f"{platform.system()} {platform.machine()}"
    )
    return ok("versions", text, shoal=found.shoal, python=found.python, torch=found.torch, protocol=found.wire)


def _event_loop() -> Finding:
    if importlib.util.find_spec("uvloop") is not None:
        return ok("event loop", f"uvloop {metadata.version('uvloop')}", uvloop=True)
    if sys.platform == "win32":
        return ok("event loop", "asyncio, there is no uvloop for Windows", uvloop=False)
    return warn("event loop", "asyncio, which moves less data per second", "pip install uvloop", uvloop=False)


def _open_files() -> Finding:
    try:
        resource: Any = importlib.import_module("resource")
    except ImportError:
        return ok("open files", "no limit on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"limit": None if soft == resource.RLIM_INFINITY else soft}
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit", **values)
    if soft >= ENOUGH_OPEN_FILES:
        return ok("open files", f"up to {soft}", **values)
    wanted = ENOUGH_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_OPEN_FILES)
    fix = f"run: {allow_open_files(wanted)}"
    return warn("open files", f"at most {soft}, which is few: every connection is one", fix, **values)


def _proxy() -> Iterator[Finding]:
    """The proxy through which connections to the outside go, if the environment names one."""
    try:
        proxies = Proxies.of_environment()
    except ValueError as error:
        yield fail(PROXY, str(error), "correct that environment variable, or set SHOAL_PROXY=off; then ask again")
        return
    if proxies.proxy is not None:
        direct = ", ".join(["private addresses", *proxies.exceptions])
        yield ok(PROXY, f"{proxies.proxy}; directly: {direct}", proxy=str(proxies.proxy), direct=proxies.exceptions)


def _identity_file(path: Path) -> Finding:
    if not path.parent.is_dir():
        return fail(IDENTITY_FILE, f"the folder of {path} does not exist", f"run: {make_folder(path.parent)}")
    if not path.exists():
        return ok(IDENTITY_FILE, f"{path} does not exist yet, the first start makes it")
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        return fail(IDENTITY_FILE, f"{path} can be read by other users (mode {mode:o})", f"run: {make_private(path)}")
    try:
        identity = Identity.load_or_create(path)
    except (P2PDaemonError, OSError) as error:
        return fail(IDENTITY_FILE, str(error), f"give another file, or move this one away: {move_away(path)}")
    return ok(IDENTITY_FILE, f"{identity.peer_id}, private (mode {mode:o})", peer_id=str(identity.peer_id))


def describe_listening(addresses: Sequence[Multiaddr]) -> Finding:
    """Where this peer listens, and from how far away it can be reached at best."""
    shown = [str(split_peer_address(address)[0]) for address in addresses]
    ips = [ipaddress.ip_address(ip) for address in addresses if (ip := address.get("ip4") or address.get("ip6"))]
    text, values = "\n".join(shown), {"addresses": [str(address) for address in addresses]}
    if len(ips) < len(addresses) or any(ip.is_global for ip in ips):
        return ok("listening", text, **values)
    if all(ip.is_loopback for ip in ips):
        fix = "to let other machines in: --host-maddrs /ip4/0.0.0.0/tcp/31337"
        return warn("listening", f"{text}\non this machine alone", fix, **values)
    fix = (
        "nothing to do if one peer of the swarm can be called from outside, such as `shoal dht` on a rented machine: "
        "others then reach this one through it. To be called directly, forward a port of the router to this machine: "
        "--host-maddrs /ip4/0.0.0.0/tcp/PORT --announce-maddrs /ip4/PUBLIC_ADDRESS/tcp/PORT"
    )
    return warn("listening", f"{text}\nin the local network alone, as far as these addresses tell", fix, **values)


async def look_at_token(token: str | None, identity_path: Path | None) -> tuple[str | None, Finding | None]:
    """Check only the user's token; returns the token for the other checks, and the finding if there is a token.

    Args:
        token: the user's token; ``None`` = that of the environment.
        identity_path: the file with the key of this peer, if it is usable.
    """
    identity = await asyncio.to_thread(_identity_in, identity_path)
    clock = get_clock()
    try:
        membership = await Membership.chosen(token, identity, clock, Metrics())
    except P2PDaemonError as error:
        # The other checks continue without a token.
        return "", fail(TOKEN, str(error), "give a usable one with --token, or unset SHOAL_TOKEN for an open run")
    if membership is None:
        return token, None
    text, left = membership.describe(), membership.own.expires - clock.time()
    if membership.is_revoked(membership.own):
        return token, fail(TOKEN, f"revoked: {text}", ADVICE)
    if left <= 0:
        return token, fail(TOKEN, f"expired: {text}", ADVICE)
    if left < 3 * DAY:  # time to ask for a new one
        return token, warn(TOKEN, f"{text}, which is soon", "ask the person who invited you for a new one")
    return token, ok(TOKEN, text)


def _identity_in(path: Path | None) -> Identity:
    return Identity.generate() if path is None or not path.exists() else Identity.load_or_create(path)


def accepted(p2p: P2P) -> Finding | None:
    """The finding that both sides are members, if the run is private."""
    if p2p.membership is None:
        return None
    return ok(TOKEN, f"both are members of the run {p2p.membership.token.run}")


def refused(error: NotAMemberError) -> Finding:
    """The finding that one side refuses the other."""
    return fail(
        TOKEN, str(error), "compare what `shoal token show` says at both peers; `shoal token invite` makes a token"
    )
