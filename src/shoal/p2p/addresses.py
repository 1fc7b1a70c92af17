"""What is known about where peers can be dialled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.peer_id import PeerID

MAX_PEERS = 10_000
MAX_ADDRESSES_PER_PEER = 8


class AddressBook:
    """Addresses by peer, without the ``/p2p`` part; the best first. Bounded: forgets peers unused for longest."""

    def __init__(self) -> None:
        self._known: OrderedDict[PeerID, list[Multiaddr]] = OrderedDict()

    def add(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember addresses of a peer; those that are known stay in front.

        Raises:
            ValueError: an address belongs to somebody else or is not a multiaddr.
        """
        known = self._known.setdefault(peer, [])
        self._known.move_to_end(peer)
        for address in addresses:
            plain = Multiaddr(address)
            if "p2p" in plain:
                if plain["p2p"] != peer.to_base58():
                    raise ValueError(f"{plain} is not an address of peer {peer}")
                plain = plain.decapsulate(f"/p2p/{peer}")
            if plain not in known and len(known) < MAX_ADDRESSES_PER_PEER:
                known.append(plain)
        if not known:
            del self._known[peer]
        while len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def replace(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """The peer itself has told where it can be dialled: that is now all that counts."""
        self._known.pop(peer, None)
        self.add(peer, addresses)

    def get(self, peer: PeerID) -> list[Multiaddr]:
        """Addresses of a peer, the best first; empty if unknown."""
        return list(self._known.get(peer, ()))

    def prefer(self, peer: PeerID, address: Multiaddr) -> None:
        """This address worked: try it first next time."""
        known = self._known.get(peer, [])
        if address in known:
            known.remove(address)
            known.insert(0, address)
