"""What peers and relays tell each other, see :mod:`shoal.reach.relay.server`. Every field is bounded.

A class whose only fields are those that its kinds have in common stands for any of them where a message is received.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.net.transport import COOKIE_BYTES, Amount, Count, Header, PeerIDBytes
from shoal.reach.reachability import Reach as Reach

MEETING_SECONDS = 5.0
"""How long the two sides of a circuit wait for each other."""
LOWEST_PORT = 1024
"""Services of systems are below; no system gives such a port to a connection."""
MAX_AT_ONCE = 8
"""Circuits that one request may ask for."""
MAX_TEXT = 256
MAX_PLACES = 4
"""Addresses at which somebody asks to be called in reverse."""


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
    """I cannot be called: tell me which peers want to."""

    reach: ReachNumber = int(Reach.EASY)
    others: Count = 0
    """Relays that have told, or are asked, to do the same."""
    may_go_elsewhere: bool = False
    """There may be a relay with more room that has not been asked: a crowded one refuses."""


class ReserveAnswer(Header, tag=True):
    """What a relay says to :class:`Reserve`."""


class Reserved(ReserveAnswer):
    """You have a reservation as long as this call lasts; from now on there are notices."""

    seen_at: Text = ""
    """The address from which the call has come."""
    rate: Amount = 0.0
    """Bytes per second that all circuits share; 0 = no limit."""
    circuits: Count = 0
    """How many there may be."""


class NotReserved(ReserveAnswer):
    """You have none."""

    code: CodeNumber
    text: Text = ""


class Notice(Header, tag=True):
    """What a relay says to a guest."""


class Alive(Notice):
    """Nothing, but that it works."""


class Ended(Notice):
    """The reservation is over."""

    why: Text


class Incoming(Notice):
    """Somebody wants to reach this peer, through the relay."""

    peer: PeerIDBytes
    cookies: Cookies
    """Of sessions to the relay, one for each circuit."""
    punch: bool = False
    """Both are to try for direct connections, with an exchange on the first circuit."""
    reach: ReachNumber = int(Reach.EASY)
    """Of the other peer."""


class IncomingReverse(Notice):
    """Somebody wants to be called by this peer."""

    peer: PeerIDBytes
    places: Places
    """Where, the best first."""
    cookies: SomeCookies
    """Of sessions to there."""


class ConnectRequest(Header, tag=True):
    """I want to reach a peer."""

    target: PeerIDBytes


class Connect(ConnectRequest):
    """Through the relay."""

    count: Annotated[int, Meta(ge=1, le=MAX_AT_ONCE)] = 1
    """How many connections."""
    punch: bool = False
    reach: ReachNumber = int(Reach.EASY)
    """Of the asking peer."""


class ConnectReverse(ConnectRequest):
    """Let it call me."""

    places: Places
    """Where, the best first."""
    cookies: SomeCookies
    """One for each connection."""


class ConnectAnswer(Header, tag=True):
    """What a relay says to a :class:`ConnectRequest`."""


class Connected(ConnectAnswer):
    """The other peer was told."""

    cookies: Cookies = msgspec.field(default_factory=list)
    """One for each circuit, perhaps fewer than asked for; none where the other peer is to call."""
    rate: Amount = 0.0
    reach: ReachNumber = int(Reach.EASY)
    """Of the peer that is asked for."""


class NotConnected(ConnectAnswer):
    """There will be no connection."""

    code: CodeNumber
    text: Text = ""


class Ready(Header):
    """Both sides of a circuit have come; what follows is theirs."""

    seen_at: Text = ""
    """The address from which this side has come."""
    other_seen_at: Text = ""


class Observe(Header):
    """At which address am I seen?"""


class OpenObservation(Header):
    """Open a session with this cookie: it begins with :class:`Observed`, and ends."""

    cookie: Cookie


class Observed(Header):
    seen_at: Text = ""
