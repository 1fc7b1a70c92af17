"""Peers that are alive and cannot be called: their user, or the one of this peer, has to do something about it.

A dial that fails says little: the peer may be gone, or busy. But if it has shown another sign of life since, through
others, then it was there, and after a few such failures in a row it is the way to it that is closed. That is said once
for each peer. A connection that is made takes everything back.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from shoal.errors import DialError
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.own_addresses import is_loopback

logger = logging.getLogger(__name__)

FAILURES_TO_TELL = 3
MAX_PEERS = 1024


class UnreachablePeers:
    """What this peer has experienced with peers that it wanted to call."""

    def __init__(self) -> None:
        self._failures: OrderedDict[PeerID, dict[str, tuple[int, float]]] = OrderedDict()
        """By peer, and by what the signs of life are: how many of them went before a failure, and the last one."""
        self._told: OrderedDict[PeerID, None] = OrderedDict()

    def note_failure(
        self, peer: PeerID, error: BaseException, addresses: Sequence[Multiaddr], *, company: str, sign_of_life: float
    ) -> None:
        """A call to a peer has failed.

        Args:
            error: how; only a dial that failed counts.
            addresses: where it is said to be.
            company: what this peer and that one take part in.
            sign_of_life: of that peer, growing with each new one. Signs of different companies are not compared.
        """
        if not isinstance(error, DialError):
            return
        failures = self._failures.setdefault(peer, {})
        count, last_sign = failures.get(company, (0, float("-inf")))
        if sign_of_life <= last_sign:
            return  # it may be gone
        failures[company] = count + 1, sign_of_life
        _forget_oldest(self._failures)
        if count + 1 >= FAILURES_TO_TELL and peer not in self._told:
            self._told[peer] = None
            _forget_oldest(self._told)
            logger.warning(
                "peer %s of %s is there, but this peer cannot call it, so that they may not average with each other: "
                "%s. What to do: %s",
                peer,
                company,
                error,
                what_to_do(addresses),
            )

    def note_connection(self, peer: PeerID) -> None:
        """A peer could be called."""
        self._failures.pop(peer, None)


def _forget_oldest(known: OrderedDict[PeerID, Any]) -> None:
    while len(known) > MAX_PEERS:
        known.popitem(last=False)


def what_to_do(addresses: Sequence[Multiaddr]) -> str:
    """How somebody who announces these addresses becomes reachable."""
    client = "or start it with client_mode=True"
    if addresses and all(map(is_loopback, addresses)):
        return (
            "it listens on its own machine alone: start it with host_maddrs=['/ip4/0.0.0.0/tcp/0'], or without "
            f"SHOAL_HOST_MADDRS in its environment, {client}"
        )
    port = next((f" {port}" for address in addresses if (port := address.get("tcp"))), "")
    return (
        f"open port{port} of that machine in its firewall, or forward it in its router (announce_maddrs), {client}; "
        "'shoal doctor' with its address, from here, says more"
    )
