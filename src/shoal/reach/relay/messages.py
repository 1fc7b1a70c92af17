"""The messages between peers and relays, see :mod:`shoal.reach.relay.server`. Every field is bounded.

A base class with a tag stands for any of its subclasses where a message is received.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.net.transport import COOKIE_BYTES, Amount, Count, Header, PeerIDBytes
from shoal.reach.reachability import Reach as Reach

MEETING_SECONDS = 5.0
"""How long the two sides of a circuit wait for each other. Chosen."""
LOWEST_PORT = 1024
"""The lowest port outside the system ports (RFC 6335)."""
MAX_AT_ONCE = 8
"""Circuits that one request may ask for. Chosen."""
MAX_TEXT = 256  # chosen: a reason in a sentence
MAX_PLACES = 4
"""Addresses at which a peer may ask to be called in reverse. Chosen."""


class RelayCode(IntEnum):
    """Why a relay refuses."""

    NO_RESERVATION = 1
    BUSY = 2
    REFUSED = 3
    NOT_A_RELAY = 4


CodeNumber = Annotated[int, Meta(ge=0, le=255)]
ReachNumber = Annotated[int, Meta(ge=0, le=3)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Cookie = Annotated[bytes, Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]
Cookies = Annotated[list[Cookie], Meta(max_length=MAX_AT_ONCE)]
SomeCookies = Annotated[list[Cookie], Meta(min_length=1, max_length=MAX_AT_ONCE)]
Places = Annotated[list[Text], Meta(max_length=MAX_PLACES)]


class Reserve(Header):
    """Requests a reservation: tell me which peers want to call me."""

    reach: ReachNumber = int(Reach.EASY)
    others: Count = 0
    """The number of other relays that hold a reservation of this peer, or are being asked for one."""
    may_go_elsewhere: bool = False
    """Whether other relays remain to be asked: then a crowded relay refuses."""


class ReserveAnswer(Header, tag=True):
    """A relay's answer to :class:`Reserve`."""


class Reserved(ReserveAnswer):
    """The reservation is granted for as long as this call lasts; notices follow."""

    seen_at: Text = ""
    """The address from which the call has come."""
    rate: Amount = 0.0
    """Bytes per second that all circuits share; 0 = no limit."""
    circuits: Count = 0
    """The most circuits at a time."""


class NotReserved(ReserveAnswer):
    """The reservation is refused."""

    code: CodeNumber
    text: Text = ""


class Notice(Header, tag=True):
    """A relay's message to a guest."""


class Alive(Notice):
    """A heartbeat."""


class Ended(Notice):
    """The reservation is over."""

    why: Text


class Incoming(Notice):
    """A peer wants to reach this one through the relay."""

    peer: PeerIDBytes
    cookies: Cookies
    """Cookies of sessions to the relay, one for each circuit."""
    punch: bool = False
    """Whether both sides should punch, after an exchange on the first circuit."""
    reach: ReachNumber = int(Reach.EASY)
    """Of the other peer."""


class IncomingReverse(Notice):
    """A peer wants to be called by this one."""

    peer: PeerIDBytes
    places: Places
    """Where, the best first."""
    cookies: SomeCookies
    """Cookies of sessions to these addresses."""


class ConnectRequest(Header, tag=True):
    """Asks a relay for a connection to a peer."""

    target: PeerIDBytes


class Connect(ConnectRequest):
    """Asks for circuits through the relay."""

    count: Annotated[int, Meta(ge=1, le=MAX_AT_ONCE)] = 1
    """The number of connections wanted."""
    punch: bool = False
    reach: ReachNumber = int(Reach.EASY)
    """Of the asking peer."""


class ConnectReverse(ConnectRequest):
    """Asks that the other peer calls the sender."""

    places: Places
    """Where, the best first."""
    cookies: SomeCookies
    """One cookie for each connection."""


class ConnectAnswer(Header, tag=True):
    """A relay's answer to a :class:`ConnectRequest`."""


class Connected(ConnectAnswer):
    """The other peer was told."""

    cookies: Cookies = msgspec.field(default_factory=list)
    """One cookie for each circuit, perhaps fewer than asked for; none if the other peer is to call."""
    rate: Amount = 0.0
    reach: ReachNumber = int(Reach.EASY)
    """Of the peer that is asked for."""


class NotConnected(ConnectAnswer):
    """The connection is refused."""

    code: CodeNumber
    text: Text = ""


class Ready(Header):
    """Both sides of a circuit are connected; the bytes after this belong to them."""

    seen_at: Text = ""
    """The address from which this side has connected."""
    other_seen_at: Text = ""


class Observe(Header):
    """Asks at which address the sender is seen."""


class OpenObservation(Header):
    """Open a session with this cookie: it begins with :class:`Observed`, and ends."""

    cookie: Cookie


class Observed(Header):
    seen_at: Text = ""
