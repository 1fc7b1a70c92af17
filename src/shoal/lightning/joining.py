"""How a peer of a ``Trainer`` joins others, and what tells other machines to join it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from shoal.net.pasted import split_addresses

INITIAL_PEERS_ENV = "PL_INITIAL_PEERS"
# Read if the other one is not set.
OTHER_INITIAL_PEERS_ENV = "INITIAL_PEERS"


def initial_peer_addresses(argument: str | Sequence[str] | None) -> list[str]:
    """Addresses of peers to join: those in the environment, or else the argument."""
    given = os.environ.get(INITIAL_PEERS_ENV) or os.environ.get(OTHER_INITIAL_PEERS_ENV) or argument or []
    parts = [given] if isinstance(given, str) else [str(address) for address in given]
    return [str(address) for address in split_addresses(part for part in parts if part.strip(", \t\r\n"))]


def joining_instructions(address: str) -> str:
    """What to type on another machine to make it join."""
    is_script = bool(sys.argv) and sys.argv[0] not in ("", "-", "-c", "-m")
    script = shlex.join(["python", *sys.argv]) if is_script else "python SCRIPT"
    return (
        "Other machines join this run with either of:\n"
        f"    {INITIAL_PEERS_ENV}={shlex.quote(address)} {script}\n"
        f'    HivemindStrategy(..., initial_peers="{address}")'
    )
