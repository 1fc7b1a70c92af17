"""The ``shoal doctor`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.base.reactor import Portal
from shoal.cli import add_addresses, add_identity, add_listening, add_option
from shoal.cli.doctor.findings import (
    IDENTITY_FILE,
    PROXY,
    Finding,
    Severity,
    describe_listening,
    fail,
    look_at_machine,
    look_at_token,
    ok,
    summary,
)
from shoal.cli.doctor.peer import look_at_peer
from shoal.cli.doctor.reach import is_relay, look_around, look_at_reach, look_at_relay
from shoal.errors import P2PDaemonError
from shoal.net.pasted import Target, describe_target, wants_local
from shoal.p2p import P2P, PeerID
from shoal.p2p.joining import parse_peer_addresses

DESCRIPTION = """\
Checks what may keep this machine from training with others: its settings; for each address how well the peer there can
be reached, can reach this machine, and works as a relay; then how others reach this machine at all. With --device,
trains there and on the CPU, and compares. Says for each problem what to do. The exit status is 0 if nothing failed.
"""
THIS_MACHINE = "this machine"
SEEN_BY_OTHERS = "this machine, as others see it"

Report = Callable[[str, Finding], None]
"""Called with the subject of a finding, and the finding."""


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the subcommands."""
    parser = subparsers.add_parser(
        "doctor", help="find out what may keep this machine from training with others", description=DESCRIPTION
    )
    add_addresses(parser, "of peers that this machine should reach")
    add_listening(parser)
    add_identity(parser, "the file with the key of your peer")
    add_option(parser, "client-mode", action="store_true", help="your peer will not listen, only call others")
    parser.add_argument(
        "--device", metavar="NAME", help="cuda, mps, xpu, cuda:1, …: train there for a minute, and compare with the CPU"
    )
    parser.add_argument("--json", action="store_true", help="print the findings for a program to read")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the findings, and return the exit status."""
    try:
        targets = list(dict.fromkeys(parse_peer_addresses(arguments.addresses)))
        look_at_device = None if arguments.device is None else _prepare_device(arguments.device)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"shoal doctor: {error}", file=sys.stderr)
        return 2
    findings: list[tuple[str, Finding]] = []
    show = _Table().show

    def report(about: str, finding: Finding) -> None:
        findings.append((about, finding))
        if not arguments.json:
            show(about, finding)

    identity_path = arguments.identity_path
    for finding in look_at_machine(identity_path):
        report(THIS_MACHINE, finding)
        if finding.check == IDENTITY_FILE and finding.verdict is Severity.FAIL:
            identity_path = None  # do the other checks with a temporary identity
    if not any(finding.check == PROXY and finding.verdict is Severity.FAIL for _, finding in findings):
        portal = Portal("doctor")  # no peer starts without knowing the proxy
        try:
            portal.call(_examine(arguments, targets, identity_path, report))
        finally:
            portal.close(timeout=3)
    if look_at_device is not None:
        for finding in look_at_device():
            report(f"device {arguments.device}", finding)
    has_failed = any(finding.verdict is Severity.FAIL for _, finding in findings)
    if arguments.json:
        listed = [{"about": about, **finding.as_dict()} for about, finding in findings]
        print(json.dumps({"ok": not has_failed, "findings": listed}, indent=2))
    else:
        print(f"\n{summary([finding for _, finding in findings])}")
    return int(has_failed)


def _prepare_device(name: str) -> Callable[[], Iterator[Finding]]:
    """The function that checks a device.

    Raises:
        ValueError: there is no such device.
    """
    # Imported only here: it loads torch, which takes a second and is not needed otherwise.
    import shoal.base.needs_torch  # noqa: F401
    from shoal.cli.doctor import device as room

    return partial(room.look_at_device, room.find_device(name))


class _Table:
    """Prints findings as they arrive, under a heading for each subject."""

    def __init__(self) -> None:
        self._about = ""

    def show(self, about: str, finding: Finding) -> None:
        if about != self._about:
            address, _, peer = about.rpartition("/p2p/")
            heading = [f"Peer {peer}", f"  at {address}"] if address else [about[:1].upper() + about[1:]]
            print(*([""] * bool(self._about)), *heading, sep="\n")
            self._about = about
        print(*finding.lines(), sep="\n", flush=True)


async def _examine(
    arguments: argparse.Namespace,
    targets: Sequence[Target],
    identity_path: Path | None,
    report: Report,
) -> None:
    token, finding = await look_at_token(arguments.token, identity_path)
    if finding is not None:
        report(THIS_MACHINE, finding)
    p2p, finding = await _start_peer(arguments, identity_path, token)
    try:
        report(THIS_MACHINE, finding)
        if wants_local(arguments.addresses):
            neighbours, finding = await look_around(p2p)
            report(THIS_MACHINE, finding)
            targets = [*targets, *neighbours]
        reached: list[PeerID] = []
        for address, expected_peer in targets:
            about, round_trip, peer = describe_target((address, expected_peer)), None, expected_peer
            if expected_peer is None:
                about = f"the peer at {about}"
            async for finding in look_at_peer(p2p, address, expected_peer, keeps_identity=identity_path is not None):
                peer = expected_peer or p2p.met.get(address)
                is_refuted = finding.check == "dial back" and finding.verdict is Severity.FAIL
                if is_refuted and peer is not None and await is_relay(p2p, peer):
                    finding = replace(finding, verdict=Severity.WARN)  # others can call this machine through that peer
                report(about, finding)
                round_trip = finding.values.get("best_seconds", round_trip)
            if round_trip is not None and peer is not None:
                reached.append(peer)
                async for finding in look_at_relay(p2p, address, peer, round_trip, token):
                    report(about, finding)
        async for finding in look_at_reach(p2p, reached):
            report(SEEN_BY_OTHERS, finding)
    finally:
        await p2p.shutdown()


async def _start_peer(
    arguments: argparse.Namespace, identity_path: Path | None, token: str | None
) -> tuple[P2P, Finding]:
    """Start a peer as the user would, and report how that went; a peer that cannot listen can still call others."""
    if arguments.client_mode:
        p2p = await P2P.create(client_mode=True, identity_path=identity_path, token=token)
        return p2p, ok("listening", "no: in client mode a peer only calls others")
    try:
        p2p = await P2P.create(
            host_maddrs=arguments.host_maddrs,
            announce_maddrs=arguments.announce_maddrs,
            identity_path=identity_path,
            token=token,
        )
    except (P2PDaemonError, OSError, ValueError) as error:
        p2p = await P2P.create(client_mode=True, identity_path=identity_path, token=token)
        fix = "give another address or port with --host-maddrs, or stop what listens there"
        return p2p, fail("listening", str(error), fix)
    return p2p, describe_listening(await p2p.get_visible_maddrs())
