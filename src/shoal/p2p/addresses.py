"""What is known about where peers can be dialled, and which of them cannot be although they are alive.

A dial that fails says little: the peer may be gone, or busy. But if it has shown another sign of life since, through
others, then it was there, and after a few such failures in a row it is the way to it that is closed: its user, or the
one of this peer, has to do something about it. That is said once for each peer. A connection that is made takes
everything back.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.errors import DialError
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.own_addresses import is_loopback

MAX_PEERS = 10_000
MAX_ADDRESSES_PER_PEER = 8


class AddressBook:
    """Addresses by peer, without the ``/p2p`` part; the best first.

    Bounded: forgets peers unused for longest. What the peer itself has told, or where it has answered, comes first and
    is not pushed out by what others tell about it.
    """

    def __init__(self) -> None:
        # For each address: whether it is more than hearsay.
        self._known: OrderedDict[PeerID, dict[Multiaddr, bool]] = OrderedDict()
        self.changes = 0
        """How often something has changed: who keeps what follows from it looks here."""

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._known

    def add(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember addresses of a peer, as told by somebody.

        Raises:
            ValueError: an address belongs to somebody else or is not a multiaddr; nothing is remembered then.
        """
        self.changes += self._add(peer, [_without_peer(peer, address) for address in addresses], certain=False)

    def replace(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """The peer itself has told where it can be dialled: that is now all that counts.

        Addresses that make no sense here are skipped: a newer peer may have more of them.
        """
        plain = []
        for address in list(addresses)[:MAX_ADDRESSES_PER_PEER]:
            try:
                plain.append(_without_peer(peer, address))
            except ValueError:
                continue
        former = list(self._known.pop(peer, {}).items())
        self._add(peer, plain, certain=True)
        self.changes += list(self._known.get(peer, {}).items()) != former

    def _add(self, peer: PeerID, addresses: list[Multiaddr], *, certain: bool) -> bool:
        """Whether any of them is new."""
        if not addresses:
            return False
        known = self._known.setdefault(peer, {})
        self._known.move_to_end(peer)
        is_news = False
        for address in addresses:
            if address not in known and self._has_room(known):
                known[address] = certain
                is_news = True
        while len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)
        return is_news

    @staticmethod
    def _has_room(known: dict[Multiaddr, bool]) -> bool:
        """Make room, if need be, by forgetting the oldest hearsay."""
        if len(known) < MAX_ADDRESSES_PER_PEER:
            return True
        oldest = next((address for address, certain in known.items() if not certain), None)
        if oldest is None:
            return False
        del known[oldest]
        return True

    def get(self, peer: PeerID) -> list[Multiaddr]:
        """Addresses of a peer, the best first; empty if unknown."""
        if peer not in self._known:
            return []
        self._known.move_to_end(peer)
        return list(self._known[peer])

    def items(self) -> list[tuple[PeerID, list[Multiaddr]]]:
        """Everything that is known."""
        return [(peer, list(addresses)) for peer, addresses in self._known.items()]

    def prefer(self, peer: PeerID, address: Multiaddr) -> None:
        """The peer has answered at this address: try it first next time."""
        known = self._known.get(peer, {})
        if address in known:
            self.changes += address != next(iter(known))
            del known[address]
            self._known[peer] = {address: True, **known}


@functools.lru_cache(4096)
def _parse(text: str) -> Multiaddr:
    """Many tell of the same addresses."""
    return Multiaddr(text)


def _without_peer(peer: PeerID, address: Multiaddr | str) -> Multiaddr:
    plain = address if isinstance(address, Multiaddr) else _parse(address)
    if "p2p" in plain:
        if plain["p2p"] != peer.to_base58():
            raise ValueError(f"{plain} is not an address of peer {peer}")
        plain = plain.decapsulate(f"/p2p/{peer}")
    return plain


logger = logging.getLogger(__name__)

FAILURES_TO_TELL = 3
MAX_UNREACHABLE_PEERS = 1024


class UnreachablePeers:
    """What this peer has experienced with peers that it wanted to call."""

    def __init__(self) -> None:
        # For each peer and kind of sign: how many signs of life went before a failure, and the last one.
        self._failures: OrderedDict[PeerID, dict[str, tuple[int, float]]] = OrderedDict()
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
    while len(known) > MAX_UNREACHABLE_PEERS:
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
