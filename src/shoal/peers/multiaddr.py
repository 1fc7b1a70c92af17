"""Addresses of peers: ``/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo…``.

A multiaddr (https://multiformats.io/multiaddr/) is a path of protocols, each with one value or none. This module
implements the small part of the format that peers of this library use, without the dozen packages that the reference
implementation needs. Unknown protocols are carried along as text: the word after one is its value, unless that word is
the name of a known protocol.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterator

import base58

from shoal.base.bounded import MOST
from shoal.base.logs import one_line, quoted

_CODES = {
    "ip4": 4,
    "tcp": 6,
    "ip6": 41,
    "dns": 53,
    "dns4": 54,
    "dns6": 55,
    "dnsaddr": 56,
    "udp": 273,
    "webrtc-direct": 280,
    "webrtc": 281,
    "p2p-circuit": 290,
    "p2p": 421,
    "https": 443,
    "tls": 448,
    "sni": 449,
    "noise": 454,
    "quic": 460,
    "quic-v1": 461,
    "webtransport": 465,
    "ws": 477,
    "wss": 478,
    "http": 480,
    "memory": 777,
}
_NAMES = {code: name for name, code in _CODES.items()}
_NAMES_WITHOUT_VALUE = frozenset(
    {
        "webrtc-direct",
        "webrtc",
        "p2p-circuit",
        "https",
        "tls",
        "noise",
        "quic",
        "quic-v1",
        "webtransport",
        "ws",
        "wss",
        "http",
    }
)
# Bytes of the value in binary form; a value of any other protocol is prefixed with its length.
_FIXED_SIZES = {"ip4": 4, "ip6": 16, "tcp": 2, "udp": 2, "memory": 8}

_MAX_LENGTH = 1024  # chosen: several times the longest address in use
_UNKNOWN_NAME, _UNKNOWN_VALUE = re.compile(r"[a-z][a-z0-9-]{0,49}"), re.compile(r"[!-.0-~]+")
_HOST_LABEL = re.compile(r"[^\W_]([\w-]{0,61}[^\W_])?|_[\w-]{1,61}")
DAMAGED = "is damaged: a character is missing or wrong. Copy the whole address"
"""The end of an error about a peer id that cannot be read."""


def shown_address(address: str | bytes) -> str:
    """An address in an error: whole if it is likely to be one, because the user has to find what is wrong with it."""
    is_short = isinstance(address, str) and len(address) <= 200 and address.isprintable()
    return repr(address) if is_short else quoted(address)


class ProtocolLookupError(LookupError):
    """The address has no such protocol."""


class Protocol(str):
    """The name of a protocol, with the attributes that protocols have in other implementations."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self)

    @property
    def code(self) -> int | None:
        """Its number in the binary form; ``None`` if the protocol is unknown here."""
        return _CODES.get(self)


def _parse_number(name: str, text: str) -> bytes:
    size = _FIXED_SIZES[name]
    if not (text.isascii() and text.isdigit()) or int(text) >= 256**size:
        raise ValueError(f"{name} takes a number from 0 to {256**size - 1}, got {quoted(text)}")
    return int(text).to_bytes(size, "big")


def _checked_host_name(name: str, text: str) -> str:
    """A host name that a resolver accepts. Any other name would fail much later, in the resolver."""
    labels = text.removesuffix(".").split(".")
    if len(text) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{name} takes a host name, got {quoted(text)}")
    return text


def _value_to_bytes(name: str, text: str) -> bytes:
    if name == "ip4":
        return ipaddress.IPv4Address(text).packed
    if name == "ip6":
        return ipaddress.IPv6Address(text).packed
    if name in _FIXED_SIZES:
        return _parse_number(name, text)
    if name == "p2p":
        try:
            raw = base58.b58decode(text)
        except ValueError:
            raise ValueError(f"the peer id {DAMAGED}") from None
        return _checked_peer(raw)
    return _checked_host_name(name, text).encode()


def _value_from_bytes(name: str, raw: bytes) -> str:
    if name == "ip4":
        return str(ipaddress.IPv4Address(raw))
    if name == "ip6":
        return str(ipaddress.IPv6Address(raw))
    if name in _FIXED_SIZES:
        return str(int.from_bytes(raw, "big"))
    return base58.b58encode(_checked_peer(raw)).decode() if name == "p2p" else _checked_host_name(name, raw.decode())


def _checked_peer(raw: bytes) -> bytes:
    if not 2 <= len(raw) <= 128:  # enough for any kind of key
        raise ValueError(f"p2p takes the id of a peer, got {len(raw)} bytes")
    return raw


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    number, shift = 0, 0
    for position in range(start, min(start + 5, len(data))):
        number |= (data[position] & 0x7F) << shift
        if data[position] < 0x80:
            return number, position + 1
        shift += 7
    raise ValueError("binary multiaddr is cut off or has a number that is too long")


_Items = tuple[tuple[Protocol, "str | None"], ...]


# Cached, because many peers send the same addresses again and again.
@functools.lru_cache(MOST)
def _parse_text(text: str) -> _Items:
    if len(text) > _MAX_LENGTH or not text.startswith("/"):
        raise ValueError("it must start with / and be no longer than 1024 characters")
    words = text.rstrip("/").split("/")[:0:-1]  # the next one is the last
    items: list[tuple[Protocol, str | None]] = []
    while words:
        name = words.pop()
        name = Protocol("p2p" if name == "ipfs" else name)
        if name not in _CODES:
            items.append((name, _take_unknown_value(name, words)))
        elif name in _NAMES_WITHOUT_VALUE:
            items.append((name, None))
        elif words:
            items.append((name, _value_from_bytes(name, _value_to_bytes(name, words.pop()))))
        else:
            raise ValueError(f"{name} needs a value")
    return tuple(items)


def _take_unknown_value(name: str, words: list[str]) -> str | None:
    if not _UNKNOWN_NAME.fullmatch(name):
        raise ValueError(f"{quoted(name)} is not the name of a protocol")
    if not words or words[-1] in _CODES:
        return None
    if not _UNKNOWN_VALUE.fullmatch(words[-1]):
        raise ValueError(f"{name} has the value {quoted(words[-1])}, which is not all printable ASCII")
    return words.pop()


def _parse_bytes(data: bytes) -> _Items:
    if len(data) > _MAX_LENGTH:
        raise ValueError("it must be no longer than 1024 bytes")
    items: list[tuple[Protocol, str | None]] = []
    position = 0
    while position < len(data):
        code, position = _read_varint(data, position)
        if code not in _NAMES:
            raise ValueError(f"unknown protocol code {code}, so the end of its value is unknown")
        name = Protocol(_NAMES[code])
        if name in _NAMES_WITHOUT_VALUE:
            items.append((name, None))
            continue
        size = _FIXED_SIZES.get(name)
        if size is None:
            size, position = _read_varint(data, position)
        raw = data[position : position + size]
        if len(raw) != size:
            raise ValueError("binary multiaddr is cut off")
        items.append((name, _value_from_bytes(name, raw)))
        position += size
    return tuple(items)


class Multiaddr:
    """An immutable network address.

    Args:
        address: text such as ``/ip4/127.0.0.1/tcp/1337``, the binary form, or another ``Multiaddr``.

    Raises:
        ValueError: not a multiaddr; the text shows the value and what is wrong with it.
        TypeError: neither text, bytes nor ``Multiaddr``.
    """

    __slots__ = ("_items", "_text")

    def __init__(self, address: str | bytes | Multiaddr) -> None:
        if isinstance(address, Multiaddr):
            self._items: _Items = address._items
        elif isinstance(address, (str, bytes)):
            try:
                self._items = _parse_text(address) if isinstance(address, str) else _parse_bytes(address)
            except ValueError as e:
                why = one_line(str(e))
                raise ValueError(
                    f"{shown_address(address)} is not a multiaddr such as /ip4/203.0.113.7/tcp/31337: {why}"
                ) from None
        else:
            raise TypeError(f"a multiaddr is made from str, bytes or Multiaddr, not from {quoted(address)}")
        self._text = "".join(f"/{name}" if value is None else f"/{name}/{value}" for name, value in self._items) or "/"

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Multiaddr {self._text}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Multiaddr) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[type[Multiaddr], tuple[str]]:
        return Multiaddr, (self._text,)

    def __contains__(self, protocol: str | int) -> bool:
        return any(protocol in (name, name.code) for name, _ in self._items)

    def __getitem__(self, protocol: str | int) -> str | None:
        """The first value of a protocol, by its name or code; ``None`` for a protocol without values.

        Raises:
            ProtocolLookupError: the address has no such protocol.
        """
        for name, value in self._items:
            if protocol in (name, name.code):
                return value
        raise ProtocolLookupError(f"{self._text} has no /{protocol}")

    value_for_protocol = __getitem__

    def __iter__(self) -> Iterator[Protocol]:
        return iter(self.protocols())

    def __len__(self) -> int:
        return len(self._items)

    def get(self, protocol: str) -> str | None:
        """Like ``self[protocol]``, but ``None`` where the protocol is missing."""
        for name, value in self._items:
            if name == protocol:
                return value
        return None

    def protocols(self) -> list[Protocol]:
        """Protocol names in order."""
        return [name for name, _ in self._items]

    keys = protocols

    def values(self) -> list[str | None]:
        """Values in the order of :meth:`protocols`."""
        return [value for _, value in self._items]

    def items(self) -> list[tuple[Protocol, str | None]]:
        """Pairs of protocol and value in order."""
        return list(self._items)

    def to_bytes(self) -> bytes:
        """The binary form.

        Raises:
            ValueError: the address has a protocol without a known code.
        """
        out = bytearray()
        for name, value in self._items:
            if name.code is None:
                raise ValueError(f"{self._text} has no binary form: the code of /{name} is not known here")
            out += _varint(name.code)
            if value is not None:
                raw = _value_to_bytes(name, value)
                out += raw if name in _FIXED_SIZES else _varint(len(raw)) + raw
        return bytes(out)

    def split(self, maxsplit: int = -1) -> list[Multiaddr]:
        """One address per protocol; after ``maxsplit`` of them, the rest stays in one piece."""
        head = len(self._items) if maxsplit < 0 else min(maxsplit, len(self._items))
        pieces = [self._from_items((item,)) for item in self._items[:head]]
        return pieces if head == len(self._items) else [*pieces, self._from_items(self._items[head:])]

    @classmethod
    def join(cls, *addresses: str | bytes | Multiaddr) -> Multiaddr:
        """Concatenate addresses."""
        return cls._from_items(tuple(item for address in addresses for item in cls(address)._items))

    def encapsulate(self, other: str | bytes | Multiaddr) -> Multiaddr:
        """This address followed by another one."""
        return self.join(self, other)

    def decapsulate(self, other: str | bytes | Multiaddr) -> Multiaddr:
        """The part of this address before the last occurrence of ``other``; the whole address if there is none."""
        tail = Multiaddr(other)._items
        for start in range(len(self._items) - len(tail), -1, -1):
            if self._items[start : start + len(tail)] == tail:
                return self._from_items(self._items[:start])
        return self

    @classmethod
    def _from_items(cls, items: _Items) -> Multiaddr:
        return cls("".join(f"/{name}" if value is None else f"/{name}/{value}" for name, value in items) or "/")
