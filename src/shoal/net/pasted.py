"""Addresses as people write and paste them.

Besides the full form of :mod:`~shoal.peers.multiaddr` there is a short one, ``203.0.113.7:31337``,
``[2001:db8::7]:31337`` or ``example.org:31337``. It does not say which peer is there, so it stands for any peer that
answers there. A list of addresses may also be one text; quotes, commas and line ends around the addresses are ignored.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.base.logs import one_line
from shoal.peers.identity import PeerID, is_circuit, split_peer_address
from shoal.peers.multiaddr import Multiaddr, shown_address

Target = tuple[Multiaddr, "PeerID | None"]
"""An address and the peer expected there; ``None`` = any peer."""

LOCAL = "local"
"""Stands for all peers in the local network, in place of an address."""
# The port of ``shoal dht``, if it is free. Chosen, see :data:`shoal.cli.dht.FIRST_PORT`.
USUAL_PORT = 31337

_QUOTES = "\"'`“”‘’«»"
_AROUND = re.compile(rf"^\[?[{_QUOTES}]+|[{_QUOTES}]+\]?$")
_IN_BRACKETS = re.compile(r"\[([^\[\]]+)\]:([0-9]{1,5})")
_WITH_PORT = re.compile(r"([^:/\[\]]+):([0-9]{1,5})")
_LIKE_IPV4 = re.compile(r"[0-9.]+")


def split_addresses(given: Any, name: str = "initial_peers") -> list[str | Multiaddr]:
    """Split what a user has given into single addresses: a list, or a text with one or more of them.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, (str, Multiaddr)):
        given = [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list of addresses, or a text with some, got {given!r}")
    found: list[str | Multiaddr] = []
    for each in given:
        if isinstance(each, Multiaddr):
            found.append(each)
        elif isinstance(each, str):
            pieces = [_AROUND.sub("", piece) for piece in re.split(r"[\s,]+", each.strip())]
            found += [piece for piece in pieces if piece] or [""]  # an empty text is an error: a variable may be unset
        else:
            raise TypeError(f"{name} must contain str or Multiaddr, got {each!r}")
    return found


def read_address(text: str | Multiaddr) -> Multiaddr:
    """An address in its full or its short form.

    Raises:
        ValueError: it is neither; the text shows it and says what is wrong.
    """
    if isinstance(text, Multiaddr) or text.startswith("/"):
        return Multiaddr(text)
    found = _IN_BRACKETS.fullmatch(text) or _WITH_PORT.fullmatch(text)
    if found is None or not int(found[2]) < 2**16:
        raise ValueError(f"{shown_address(text)} is no address of a peer: {_what_is_missing(text)}")
    host, port = found.groups()
    try:
        if text.startswith("["):
            return Multiaddr(f"/ip6/{host}/tcp/{int(port)}")
        return Multiaddr(f"/{'ip4' if _LIKE_IPV4.fullmatch(host) else 'dns'}/{host}/tcp/{int(port)}")
    except ValueError as e:
        reason = str(e).partition(": ")[2]
        raise ValueError(f"{shown_address(text)} is no address of a peer: {reason}") from None


def _what_is_missing(text: str) -> str:
    if not text:
        return "it is empty; give none at all to begin a new swarm"
    forms = "give HOST:PORT, such as 203.0.113.7:31337, or all of /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW…"
    host, _, port = text.rpartition(":")
    if "://" in text:
        return f"leave out {one_line(text.partition('://')[0][:20])}://, and {forms}"
    if ":" in host and not host.startswith("["):
        return "put an IPv6 address in brackets before its port, such as [2001:db8::7]:31337"
    if host and port.isdigit():
        return "a port is a number up to 65535"
    if _is_ip(text) or "." in text:
        example = one_line((f"[{text}]" if ":" in text else text)[:80])
        return f"its port is missing. Write {example}:PORT; a shoal dht has port {USUAL_PORT} if it was free"
    return forms


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_addresses(given: Any, name: str) -> list[Multiaddr]:
    """Addresses that need not say which peer is there, such as those to listen at.

    Raises:
        TypeError, ValueError: as for :func:`split_addresses` and :func:`read_address`.
    """
    return [read_address(each) for each in split_addresses(given, name)]


def read_targets(given: Any, name: str = "initial_peers", *, may_be_local: bool = False) -> list[Target]:
    """Parse addresses into targets.

    A full address without a peer id is refused: most likely its end got lost, and with it the check of the identity.

    Args:
        may_be_local: skip :data:`LOCAL`, which stands for no particular peer; otherwise it is an error.

    Raises:
        TypeError, ValueError: as for :func:`split_addresses` and :func:`read_address`.
    """
    found = split_addresses(given, name)
    if LOCAL in found and not may_be_local:
        raise ValueError(f"{name} takes addresses of certain peers, and {LOCAL!r} stands for none")
    return [_read_target(each) for each in found if each != LOCAL]


def _read_target(given: str | Multiaddr) -> Target:
    address = read_address(given)
    if isinstance(given, str) and not given.startswith("/"):
        return address, None
    try:
        return split_peer_address(address)
    except ValueError as e:
        short = short_form(address)
        if short is None or "p2p" in address:
            raise
        raise ValueError(f"{e}; or write {short}, which stands for any peer that answers there") from None


def wants_local(given: Any, name: str = "initial_peers") -> bool:
    """Whether the user also wants peers in the local network."""
    return LOCAL in split_addresses(given, name)


def short_form(address: Multiaddr) -> str | None:
    """The short form of an address; ``None`` if it has none, such as an address that leads through a relay."""
    items = address.items()
    if is_circuit(address) or len(items) not in (2, 3) or items[1][0] != "tcp":
        return None
    (kind, host), (_, port) = items[:2]
    return f"[{host}]:{port}" if kind == "ip6" else f"{host}:{port}"


def describe_target(target: Target) -> str:
    """A target as users write it."""
    address, peer = target
    return f"{address}/p2p/{peer}" if peer is not None else short_form(address) or str(address)


def reach_of(address: Multiaddr) -> int:
    """Rank of an address by its reach: this machine, this network, anywhere."""
    for protocol in ("ip4", "ip6"):
        if protocol in address:
            ip = ipaddress.ip_address(address[protocol] or "")
            # A global IPv6 address reaches as far, but not everybody has IPv6.
            far = 3 if protocol == "ip4" else 2
            return far if ip.is_global else 0 if ip.is_loopback else 1 if ip.is_link_local else 2
    return 4  # a host name


def line_to_paste(addresses: Sequence[Multiaddr]) -> str:
    """The address that reaches furthest, as short as it can be."""
    best = max(addresses, key=reach_of)
    return short_form(best) or str(best)
