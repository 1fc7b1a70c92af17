"""Who may begin a handshake: strangers wait in a room of fixed size until they have proven who they are.

Neither of these two can be used by a crowd on a few machines to keep others out: the waiting room makes the host leave
that has most guests in it, its oldest guest first, and the rate is that of one host.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

MAX_HOSTS = 4096


class Guest(Protocol):
    """A connection that has not proven who it is."""

    host: str


G = TypeVar("G", bound=Guest)


class WaitingRoom(Generic[G]):
    """Guests by host, the oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_host: dict[str, dict[G, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, guest: G) -> bool:
        return guest in self._by_host.get(guest.host, ())

    def guests(self) -> list[G]:
        """Everybody in the room."""
        return [guest for guests in self._by_host.values() for guest in guests]

    def enter(self, guest: G) -> None:
        """Let somebody in, even if it is one too many: see :meth:`one_too_many`."""
        self._by_host.setdefault(guest.host, {})[guest] = None
        self._size += 1

    def one_too_many(self) -> G | None:
        """Who has to leave, if somebody does."""
        if self._size <= self._capacity:
            return None
        return self.least_welcome()

    def least_welcome(self) -> G | None:
        """The oldest guest of the host that has most, or ``None`` in an empty room."""
        crowd = max(self._by_host.values(), key=len, default=None)
        return None if crowd is None else next(iter(crowd))

    def leave(self, guest: G) -> None:
        """Somebody goes. Does nothing for who is not here."""
        guests = self._by_host.get(guest.host)
        if guests is None or guest not in guests:
            return
        del guests[guest]
        self._size -= 1
        if not guests:
            del self._by_host[guest.host]


class HostRates:
    """How much each host may still take, such as handshakes: some at once, and more as time goes by."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second, self._burst = per_second, burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many were left, and when

    def is_exhausted(self, host: str, now: float) -> bool:
        """Whether this host has to wait before the next one."""
        return self._left_at(host, now) < 1

    def spend(self, host: str, now: float, amount: float = 1.0) -> None:
        """Something has been done for this host, such as a handshake."""
        self._left[host] = (self._left_at(host, now) - amount, now)
        self._left.move_to_end(host)
        while len(self._left) > MAX_HOSTS:
            self._left.popitem(last=False)

    def _left_at(self, host: str, now: float) -> float:
        left, since = self._left.get(host, (self._burst, now))
        return min(self._burst, left + (now - since) * self._per_second)


def host_of(address: str) -> str:
    """What counts as one host: an IPv4 address, or the /64 network that one subscriber of IPv6 has for himself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))
