"""Where other peers can be reached, and which live ones cannot.

A failed dial says little: the peer may be gone or busy. A failure counts only if others have seen a new sign of life of
the peer since the last one. After a few such failures in a row the path to the peer must be blocked, and its user or
the user of this peer has to act. Each such peer is reported once. A successful connection clears its failures.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
from collections.abc import Callable, Iterable, Sequence

from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom
from shoal.errors import DialError, RefusedDialError
from shoal.net.own_addresses import MAX_ADDRESSES_PER_PEER as MAX_ADDRESSES_PER_PEER
from shoal.net.own_addresses import is_of_one_network
from shoal.peers.book import PeerBook
from shoal.peers.identity import CIRCUIT, PeerID, check_circuit, is_circuit
from shoal.peers.multiaddr import Multiaddr

Judge = Callable[[Multiaddr], bool]
"""Says whether to dial an address at somebody's word, see :func:`may_be_dialled_for`."""
IP = ipaddress.IPv4Address | ipaddress.IPv6Address
_CARRIER = ipaddress.ip_network("100.64.0.0/10")  # carrier-grade NAT (RFC 6598), where strangers are neighbours
_TRANSLATED = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))  # NAT64 (RFC 6052, RFC 8215)

MAX_PEERS = 10_000  # chosen: far more than a swarm has, and a few megabytes


def ip_text_of(address: Multiaddr) -> str | None:
    """The IP address in an address; ``None`` for a host name and for a circuit, whose IP address is the relay's."""
    return None if is_circuit(address) else address.get("ip4") or address.get("ip6")


@functools.lru_cache(4096)
def ip_of(address: Multiaddr) -> IP | None:
    """Like :func:`ip_text_of`, parsed."""
    text = ip_text_of(address)
    return None if text is None else ipaddress.ip_address(text)


def is_loopback(address: Multiaddr) -> bool:
    """Whether only the machine itself can use an address; a host name never counts as loopback."""
    ip = ip_of(address)
    return ip is not None and ip.is_loopback


def is_name(address: Multiaddr) -> bool:
    """Whether an address has a host name, which may lead anywhere."""
    return not is_circuit(address) and ip_text_of(address) is None and "memory" not in address


def is_anywhere(address: Multiaddr) -> bool:
    """Whether the address may mean another computer in another network: many homes use the same private range."""
    ip = ip_of(address)
    return ip is not None and not ip.is_loopback and not ip.is_global


@functools.lru_cache(4096)
def is_global(address: Multiaddr) -> bool:
    """Whether an address is meant for the whole internet; host names count as global."""
    host = address.get("ip4") or address.get("ip6")
    return "memory" not in address if host is None else ipaddress.ip_address(host).is_global


@functools.lru_cache(4096)
def is_private(address: Multiaddr) -> bool:
    """Whether an address means something in one network alone."""
    host = address.get("ip4") or address.get("ip6")
    return host is not None and not ipaddress.ip_address(host).is_global


@functools.lru_cache(4096)
def network_of(address: Multiaddr) -> str:
    """The network that addresses of one host share: /24 in IPv4, /48 in IPv6; empty without an IP address."""
    host = address.get("ip4") or address.get("ip6")
    return "" if host is None else str(ipaddress.ip_network((host, 24 if "." in host else 48), strict=False))


def is_ipv6(address: Multiaddr) -> bool:
    """Whether an address begins with an IPv6 address."""
    return "ip6" in address


def ip_to_dial(text: str) -> IP | None:
    """The IP address in a text, if it can be the address of another host and embeds no other address.

    An IPv4 address embedded in an IPv6 address would slip past every rule. ``0.0.0.0/8`` means this machine; class E
    and most of IPv6 belong to nobody; a link-local IPv6 address needs the name of an interface.
    """
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if ip.is_multicast or ip.is_unspecified or (ip.is_reserved and not ip.is_loopback):
        return None
    if isinstance(ip, ipaddress.IPv4Address):
        return None if ip.packed[0] == 0 else ip
    hides_another = ip.ipv4_mapped or ip.sixtofour or ip.teredo or any(ip in network for network in _TRANSLATED)
    return None if hides_another or ip.is_link_local or ip.scope_id else ip


def may_be_dialled_for(address: Multiaddr, seen_at: Multiaddr | None, *, is_inside: Judge, is_here: Judge) -> bool:
    """Whether to dial an address that another peer claims as its own.

    A peer may claim any address, even one that only this machine can reach. The attempt must tell it no more than it
    could find out by itself. So it may name the host at which it is seen, hosts of the public internet, and hosts of
    private networks if it is in such a network too.

    Args:
        address: as the peer claims it. Resolve a host name first; for a circuit, give the relay's address.
        seen_at: where that peer is seen from here; ``None`` if that is not known.
        is_inside: whether an address is in a network of this machine.
        is_here: whether an address is one of this machine itself.
    """
    if "memory" in address:
        return True
    host, seen = ip_text_of(address), None if seen_at is None else ip_text_of(seen_at)
    if host is None:
        return False
    if seen is not None and ipaddress.ip_address(host) == ipaddress.ip_address(seen):
        return True
    ip = ip_to_dial(host)
    if ip is None or ip.is_link_local:
        return False
    if ip.is_global:
        return True
    if seen_at is None or seen is None:
        return False
    if ip.is_loopback:
        return is_here(seen_at)
    if is_inside(seen_at):
        return True
    both_of_carrier = ip in _CARRIER and ipaddress.ip_address(seen) in _CARRIER
    return both_of_carrier or (is_of_one_network(seen) and ipaddress.ip_address(seen) not in _CARRIER)


def host_of(peer: PeerID, addresses: Iterable[Multiaddr]) -> PeerID | str:
    """What peers of one host share: the network of their public address (/24 in IPv4; /48, one site, in IPv6).

    A peer without a public address is a host of its own: peers of one network or one machine know each other.
    """
    for address in addresses:
        ip = ip_of(address)
        if ip is not None and ip.is_global:
            return network_of(address)
    return peer


def subscriber_of(address: str) -> str:
    """What counts as one host: an IPv4 address, or the IPv6 /64 network that one subscriber has to itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))


def host_charged(seen_at: str, peer: PeerID) -> str:
    """The host to charge for what is done for a peer: identities cost nothing, hosts do.

    Args:
        seen_at: the address from which it has connected; empty if that is not known.
    """
    ip = ip_text_of(Multiaddr(seen_at)) if seen_at else None
    return str(peer) if ip is None else subscriber_of(ip)


class AddressBook:
    """Addresses by peer, without the ``/p2p`` part; the best first.

    Bounded: it forgets the peers unused for longest. Addresses that the peer itself announced, or where it answered,
    come first, and hearsay does not push them out.

    Args:
        supports: whether this peer can dial an address.
        book: remembers which peers have answered in a private network.
    """

    def __init__(
        self, supports: Callable[[Multiaddr], bool] = lambda address: True, book: PeerBook | None = None
    ) -> None:
        self._supports = supports
        self._book = PeerBook() if book is None else book
        # For each address: whether it is more than hearsay.
        self._known: Bounded[PeerID, dict[Multiaddr, bool]] = Bounded(MAX_PEERS, on_evict=self._forget_derived)
        # For addresses that only the peer itself has announced: whether to dial them at its word.
        self._judges: dict[PeerID, dict[Multiaddr, Judge]] = {}
        self._hosts: dict[PeerID, PeerID | str] = {}  # cache of `host_of`
        self.changes = 0
        """The number of changes so far: caches of derived data compare it."""

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._known

    def add(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember addresses of a peer, as told by a third party.

        Raises:
            ValueError: an address belongs to another peer or is not a multiaddr; nothing is remembered then.
        """
        plain = [_without_peer(peer, address) for address in addresses]
        self.changes += self._add(peer, plain, certain=False)
        for address in plain:
            self._judges.get(peer, {}).pop(address, None)

    def replace(self, peer: PeerID, addresses: Iterable[Multiaddr | str], judge: Judge | None = None) -> None:
        """Replace all addresses of a peer by those that the peer itself announces.

        Malformed addresses are skipped: a newer peer may know more kinds. If the peer announces nothing that this one
        can dial, the known addresses stay.

        Args:
            judge: whether to dial an address at the peer's word; not asked about addresses at which the peer has
                answered, or that others have told.
        """
        plain = []
        for address in list(addresses)[:MAX_ADDRESSES_PER_PEER]:
            try:
                plain.append(_without_peer(peer, address))
            except ValueError:
                continue
        former, judged = self._known.pop(peer, {}), self._judges.pop(peer, {})
        self._hosts.pop(peer, None)
        kept = {address: is_sure for address, is_sure in former.items() if self._supports(address)}
        if kept and not any(map(self._supports, plain)):
            self._known[peer] = kept
        self._add(peer, plain, certain=True)
        known = self._known.get(peer, {})
        judges = {each: judged[each] for each in known if each in judged}
        if judge is not None:
            judges |= {each: judge for each in plain if each in known and (each in judged or each not in former)}
        if judges:
            self._judges[peer] = judges
        self.changes += list(self._known.get(peer, {}).items()) != list(former.items())

    def _add(self, peer: PeerID, addresses: list[Multiaddr], *, certain: bool) -> bool:
        """Add addresses; returns whether any of them is new."""
        if not addresses:
            return False
        known = self._known[peer] = self._known.get(peer, {})
        is_news = False
        for address in addresses:
            if address not in known and self._has_room(known):
                known[address] = certain
                is_news = True
        if is_news:
            self._hosts.pop(peer, None)
        return is_news

    def _forget_derived(self, peer: PeerID, _: dict[Multiaddr, bool]) -> None:
        self._hosts.pop(peer, None)
        self._judges.pop(peer, None)

    @staticmethod
    def _has_room(known: dict[Multiaddr, bool]) -> bool:
        """Make room, if need be, by forgetting the oldest hearsay; returns whether there is room."""
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
        self._known.touch(peer)
        return list(self._known[peer])

    def judge_of(self, peer: PeerID, address: Multiaddr) -> Judge | None:
        """The judge of an address that only the peer itself has announced; ``None`` for other addresses."""
        return self._judges.get(peer, {}).get(address)

    def to_dial(self, peer: PeerID) -> list[Multiaddr]:
        """Those of :meth:`get` that may be dialled. Host names stay: they are judged once they are resolved."""
        judges = self._judges.get(peer, {})
        return [each for each in self.get(peer) if (judge := judges.get(each)) is None or is_name(each) or judge(each)]

    def peek(self, peer: PeerID) -> tuple[Multiaddr, ...]:
        """Like :meth:`get`, from any thread. It reorders nothing, because :meth:`items` may run in another thread."""
        return tuple(self._known.get(peer, ()))

    def host_of(self, peer: PeerID) -> PeerID | str:
        """The host of a peer, see :func:`host_of`; from any thread. Cached, because votes ask for all peers."""
        host = self._hosts.get(peer)
        if host is None:
            addresses = self.peek(peer)
            host = host_of(peer, addresses)
            if addresses:
                self._hosts[peer] = host
                if self.peek(peer) != addresses:  # another thread has changed them meanwhile
                    self._hosts.pop(peer, None)
        return host

    def items(self) -> list[tuple[PeerID, list[Multiaddr]]]:
        """All known peers and their addresses."""
        return [(peer, list(addresses)) for peer, addresses in self._known.items()]

    def judged(self, peer: PeerID, address: Multiaddr, error: BaseException) -> BaseException:
        """What a failed dial says about a peer: a refused connection means that it is gone, if it was ever there.

        The same private address may belong to another machine here, which has refused in the peer's place.
        """
        if isinstance(error, RefusedDialError) and is_anywhere(address) and not self._book.find(peer).is_near:
            return DialError(f"{error}; or peer {peer} is in another network of the same numbers")
        return error

    def forget(self, peer: PeerID, address: Multiaddr) -> None:
        """The peer is not at this address any more."""
        known = self._known.get(peer, {})
        if known.pop(address, None) is not None:
            self._hosts.pop(peer, None)
            self._judges.get(peer, {}).pop(address, None)
            self.changes += 1
            if not known:
                del self._known[peer]

    def prefer(self, peer: PeerID, address: Multiaddr) -> None:
        """The peer has answered at this address: try it first next time."""
        known = self._known.get(peer, {})
        self._judges.get(peer, {}).pop(address, None)
        if is_anywhere(address):
            self._book[peer].is_near = True
        if address in known:
            self.changes += address != next(iter(known))
            del known[address]
            self._known[peer] = {address: True, **known}
            self._hosts.pop(peer, None)


@functools.lru_cache(4096)
def _parse(text: str) -> Multiaddr:
    """Parse an address; cached, because many peers tell the same addresses."""
    return Multiaddr(text)


def _without_peer(peer: PeerID, address: Multiaddr | str) -> Multiaddr:
    plain = address if isinstance(address, Multiaddr) else _parse(address)
    if "p2p" in plain:
        # A peer id in front of the circuit is the relay's.
        end = next((value for name, value in reversed(plain.items()) if name in ("p2p", CIRCUIT)), None)
        if end is not None:
            if end != peer.to_base58():
                raise ValueError(f"{plain} is not an address of peer {peer}")
            plain = plain.decapsulate(f"/p2p/{peer}")
        check_circuit(plain, peer)
    return plain


logger = logging.getLogger(__name__)

# Chosen: one failure may be chance, but not this many in a row with signs of life between them.
FAILURES_TO_TELL = 3


class UnreachablePeers:
    """Counts failed dials of peers that are alive, and tells the user about each such peer once.

    Args:
        book: keeps the counts.
    """

    def __init__(self, book: PeerBook) -> None:
        self._book = book
        self._warn_seldom = Seldom(logger.warning)

    def note_failure(
        self, peer: PeerID, error: BaseException, addresses: Sequence[Multiaddr], *, company: str, sign_of_life: float
    ) -> None:
        """A call to a peer has failed.

        Args:
            error: the failure; only a failed dial counts.
            addresses: the addresses known for the peer.
            company: what both peers take part in.
            sign_of_life: a number that grows with each new sign of life of that peer, compared within one company only.
        """
        if not isinstance(error, DialError):
            return
        record = self._book[peer]
        count, last_sign = record.uncalled.get(company, (0, float("-inf")))
        if sign_of_life <= last_sign:
            return  # without a new sign of life the peer may be gone
        record.uncalled[company] = count + 1, sign_of_life
        if count + 1 >= FAILURES_TO_TELL and not record.is_told_uncalled:
            record.is_told_uncalled = True
            self._warn_seldom(
                "peer %s of %s is online, but this peer cannot call it, so the two may not average with each other: "
                "%s. What to do: %s",
                peer,
                company,
                error,
                what_to_do(addresses),
                about=peer,
            )

    def note_connection(self, peer: PeerID) -> None:
        """A dial of the peer has succeeded."""
        self._book.find(peer).uncalled.clear()


def what_to_do(addresses: Sequence[Multiaddr]) -> str:
    """Advice on how a peer that announces these addresses becomes reachable."""
    client = "or run `shoal dht` on a machine that can be called from outside, which then passes calls on"
    if addresses and all(map(is_loopback, addresses)):
        return (
            "it listens on its own machine alone: start it with host_maddrs=['/ip4/0.0.0.0/tcp/0'], or without "
            f"SHOAL_HOST_MADDRS in its environment, {client}"
        )
    direct = [address for address in addresses if not is_circuit(address)]
    port = next((f" {port}" for address in direct if (port := address.get("tcp"))), "")
    return (
        f"open port{port} of that machine in its firewall, or forward it in its router (announce_maddrs), {client}; "
        "'shoal doctor' with its address, from here, says more"
    )
