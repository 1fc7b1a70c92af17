"""What is known about where peers can be dialled."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable

from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr

MAX_PEERS = 10_000
MAX_ADDRESSES_PER_PEER = 8


class AddressBook:
    """Addresses by peer, without the ``/p2p`` part; the best first.

    Bounded: forgets peers unused for longest. What the peer itself has told, or where it has answered, comes first and
    is not pushed out by what others tell about it.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[PeerID, dict[Multiaddr, bool]] = OrderedDict()  # and whether it is more than hearsay
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
