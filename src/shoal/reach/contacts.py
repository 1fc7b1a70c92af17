"""The peers with which this one has had connections, by the places where they are: who could bear witness."""

from __future__ import annotations

import random
from collections.abc import Callable

from shoal.base.bounded import Bounded
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.reachability import network_of

MAX_CONTACTS = 256


class Contacts:
    """Remembers the latest ones."""

    def __init__(self) -> None:
        # By peer: the host that it shares with others, and whether it is outside; the latest last.
        self._places: Bounded[PeerID, tuple[str, bool]] = Bounded(MAX_CONTACTS)

    def __len__(self) -> int:
        return len(self._places)

    def note(self, peer: PeerID, address: Multiaddr, *, is_outside: bool) -> None:
        """There is a connection with a peer at this address."""
        self._places[peer] = network_of(address) or str(peer), is_outside

    def place_of(self, peer: PeerID) -> tuple[str, bool]:
        """The host of a peer, which is the same for all peers of one network, and whether it is outside."""
        return self._places.get(peer, ("", False))

    def draw(self, rng: random.Random, count: int, is_usable: Callable[[PeerID], bool]) -> list[PeerID]:
        """Some of them."""
        usable = [peer for peer in self._places if is_usable(peer)]
        return rng.sample(usable, min(count, len(usable)))

    def num_hosts(self, is_usable: Callable[[PeerID], bool]) -> int:
        """How many hosts there are, outside if there are any."""
        return len(self._by_host(is_usable)[0])

    def witnesses(
        self, rng: random.Random, count: int, is_usable: Callable[[PeerID], bool]
    ) -> tuple[list[PeerID], bool]:
        """Peers on different hosts, and whether these are outside; only if nobody is, peers of the own networks."""
        by_host, is_outside = self._by_host(is_usable)
        hosts = rng.sample(sorted(by_host), min(count, len(by_host)))
        return [rng.choice(by_host[host]) for host in hosts], is_outside

    def _by_host(self, is_usable: Callable[[PeerID], bool]) -> tuple[dict[str, list[PeerID]], bool]:
        for wanted in (True, False):
            by_host: dict[str, list[PeerID]] = {}
            for peer, (host, is_outside) in self._places.items():
                if is_outside is wanted and is_usable(peer):
                    by_host.setdefault(host, []).append(peer)
            if by_host:
                return by_host, wanted
        return {}, False
