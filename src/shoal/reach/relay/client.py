"""The relay client: lets others reach a peer that cannot be called, through relays.

It keeps reservations at two relays on different hosts, so that one may vanish unnoticed. A reservation is a call that
stays open; a relay that sends nothing for twelve seconds counts as dead. Relays end a reservation when it is an hour
old, and both of a peer's reservations are usually of the same age. So each gets a successor a minute before its end, at
the same relay, or at another one if that is crowded. Peers that know only the old address can still call meanwhile.

Relays that have refused rank last from then on, and relays that have long been silent rank after those of the routing
table. Otherwise peers would know only the relays from their start: in time those are full or dead, and newer ones stay
empty.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.access.badges import ANY_ROLE
from shoal.base.backoff import Backoff
from shoal.base.bounded import Bounded
from shoal.base.tasks import TaskSet
from shoal.errors import ProtocolError, ShoalError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER, ip_of, is_loopback
from shoal.net.connection import Call
from shoal.net.connection_pool import DIRECT_ONLY
from shoal.net.endpoint import Endpoint
from shoal.net.pasted import Target
from shoal.peers.identity import PeerID, circuit_address, is_circuit
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.messages import (
    Ended,
    Incoming,
    IncomingReverse,
    Notice,
    NotReserved,
    Reserve,
    ReserveAnswer,
    Reserved,
)
from shoal.reach.relay.server import ALIVE_SECONDS, RESERVATION_SECONDS, SUCCESSION_SECONDS, RelayServer

logger = logging.getLogger(__name__)

WANTED = 2  # chosen, so that one may vanish
# A relay counts as dead after two missed heartbeats, or after one while something else is known to have broken.
SILENCE_SECONDS = 2 * ALIVE_SECONDS + 2.0
DOUBTED_SECONDS = ALIVE_SECONDS + 2.0
# Chosen, like all that follow. How long a relay has to answer, and the backoff after it has refused.
ASK_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 300.0
# Without any candidate, look for new ones this often.
LOOK_SECONDS = 5.0
# The relay of a reservation that was held for this long may be asked again at once when it ends.
SETTLED_SECONDS = 60.0
# A relay that has not greeted for this long may have left.
RECENT_SECONDS = 600.0
# The most addresses of one relay: an IPv4 and an IPv6 address.
MAX_PLACES = 2

Answer = Callable[[PeerID, Sequence[Multiaddr], Incoming | IncomingReverse], object]


@dataclass(eq=False)
class Held:
    """A reservation."""

    relay: PeerID
    since: float
    seen_at: str
    """Where the relay claims to see this peer."""
    rate: float
    """Bytes per second that all circuits of the relay share; 0 = no limit."""
    places: tuple[Multiaddr, ...]
    """Addresses at which the relay can be dialled."""
    heard_at: float = 0.0
    """When the relay was last heard."""
    limit: asyncio.Timeout | None = None
    """When it counts as dead unless it is heard."""


@dataclass
class _Relay:
    """What is known about a peer that is, or may be, a relay."""

    is_relay: bool | None = None
    """Whether it says that it is a relay; ``None`` = it has not said."""
    said_at: float = -math.inf
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS))
    """Pauses after it has refused."""
    has_refused: bool = False
    """Whether it refused the last request."""
    is_ending: bool = False
    """Whether the reservation there is about to end, so that it is asked for another one."""


class RelayClient:
    """Keeps this peer reachable through relays, while that is wanted.

    Args:
        endpoint: of the peer.
        answer: called with the relay, its addresses and its message when a peer wants to reach this one.
        trusted: relays that are asked before all others.
        on_change: called when :meth:`addresses` has changed.
    """

    def __init__(
        self, endpoint: Endpoint, answer: Answer, trusted: Sequence[Target], on_change: Callable[[], object]
    ) -> None:
        self._endpoint, self.answer, self.trusted, self.on_change = endpoint, answer, trusted, on_change
        self._now = asyncio.get_running_loop().time
        self.held: dict[PeerID, Held] = {}
        """The reservations, the oldest first."""
        self._doubted_at = -math.inf
        self._known: Bounded[PeerID, _Relay] = Bounded()
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._holding: dict[PeerID, asyncio.Task[None]] = {}  # without those that seek a successor, or have one
        self._meeting: set[Multiaddr] = set()  # addresses of trusted relays without a peer id
        self._tasks = TaskSet()

    def want(self, wanted: bool) -> None:
        """Start or stop holding reservations."""
        if wanted and self._keeper is None and self._endpoint.is_alive:
            self._keeper = self._tasks.start(self._keep())
        elif not wanted:
            self._keeper = None
            for task in self._tasks:
                task.cancel()

    @property
    def is_wanted(self) -> bool:
        """Whether reservations are held or sought."""
        return self._keeper is not None

    def addresses(self) -> list[Multiaddr]:
        """Where this peer can be reached through its relays, without its own ``/p2p``: first the best of each relay."""
        found = [
            circuit_address(held.places[rank], held.relay)
            for rank in range(MAX_PLACES)
            for held in self.held.values()
            if rank < len(held.places)
        ]
        return found[:MAX_ADDRESSES_PER_PEER]

    def note_greeting(self, peer: PeerID, is_relay: bool) -> None:
        """Another peer has told whether it is a relay."""
        known = self._record(peer)
        if is_relay and not known.is_relay:
            self._wake.set()
        known.is_relay, known.said_at = is_relay, self._now()

    def _record(self, peer: PeerID) -> _Relay:
        """The record of a peer, which the caller may change."""
        record = self._known[peer] = self._known.get(peer) or _Relay()
        return record

    def look(self) -> None:
        """Look for relays again: there may be new candidates."""
        self._wake.set()

    # --- choosing -----------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            self._wake.clear()
            self._meet_trusted()
            for relay in self._next():
                self._record(relay).is_ending = False
                task = self._holding[relay] = self._tasks.start(self._hold(relay, self._request_to(relay)))
                task.add_done_callback(functools.partial(self._let_go, relay))
            # The event is set when a reservation ends, or when there are new candidates.
            try:
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _meet_trusted(self) -> None:
        for place, relay in self.trusted:
            if relay is None and place not in self._endpoint.met and place not in self._meeting:
                self._meeting.add(place)
                self._tasks.start(self._meet(place)).add_done_callback(functools.partial(self._have_met, place))

    def _have_met(self, place: Multiaddr, _: asyncio.Task[None]) -> None:
        self._meeting.discard(place)
        self._wake.set()

    async def _meet(self, place: Multiaddr) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        while True:
            try:
                await self._endpoint.meet(place)
            except (ShoalError, ConnectionError) as e:
                logger.debug("no relay answers at %s: %s", place, e)
                await asyncio.sleep(backoff.fail())
            else:
                return

    def _trusted(self) -> list[tuple[Multiaddr, PeerID]]:
        """Trusted relays whose peer ids are known."""
        known = [(place, named or self._endpoint.met.get(place)) for place, named in self.trusted]
        return [(place, relay) for place, relay in known if relay is not None]

    def _let_go(self, relay: PeerID, task: asyncio.Task[None]) -> None:
        if self._holding.get(relay) is task:
            del self._holding[relay]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the reservation at %s ended with a defect", relay, exc_info=error)
        self._wake.set()

    def _pause(self) -> float | None:
        if len(self._holding) >= WANTED:
            return None
        now = self._now()
        ends = [known.backoff.rests_until - now for known in self._known.values() if not known.backoff.is_due(now)]
        return min([LOOK_SECONDS, *ends])

    def _next(self) -> list[PeerID]:
        """The relays to ask now, on other hosts than those that are being asked or hold a reservation."""
        missing = WANTED - len(self._holding)
        if missing <= 0:
            return []
        candidates = self._in_order()
        hosts = {self._endpoint.host_of(relay) for relay in self._holding}
        ending = [relay for relay, known in self._known.items() if known.is_ending]
        chosen = [relay for relay in ending if relay not in self._holding][:missing]
        hosts.update(self._endpoint.host_of(relay) for relay in chosen)
        for relay in candidates:
            if len(chosen) < missing and self._endpoint.host_of(relay) not in hosts:
                chosen.append(relay)
                hosts.add(self._endpoint.host_of(relay))
        # Two on one host are better than one: processes end more often than hosts do.
        rest = [relay for relay in candidates if relay not in chosen]
        return [*chosen, *rest][:missing]

    def _request_to(self, relay: PeerID) -> Reserve:
        is_trusted = any(relay == trusted for _, trusted in self._trusted())
        return Reserve(
            reach=self._endpoint.announce().reach,
            others=len({*self._holding, *self.held} - {relay}),
            # A relay that has refused is asked again only when there is no other one.
            may_go_elsewhere=not is_trusted and not self._has_refused(relay),
        )

    def _has_refused(self, relay: PeerID) -> bool:
        known = self._known.get(relay)
        return known is not None and known.has_refused

    def _in_order(self) -> list[PeerID]:
        """Relays that may be asked now: trusted ones first, then the nearest of those that most likely have room."""
        now = self._now()

        def may_be_asked(relay: PeerID) -> bool:
            is_free, known = relay != self._endpoint.peer_id and relay not in self._holding, self._known.get(relay)
            return is_free and (known is None or known.backoff.is_due(now))

        for place, relay in self._trusted():
            self._endpoint.add_addresses(relay, [place])
        trusted = [relay for _, relay in self._trusted()]
        # A peer that has not said may be a relay if it can be dialled directly: relays are not behind other relays.
        dialled = self._endpoint.dialler.direct_addresses
        directory = self._endpoint.directory
        nodes = () if directory is None else directory.dialable_peers()
        said = {relay: known.is_relay for relay, known in self._known.items()}
        of_table = {relay: None for relay in nodes if said.get(relay) is not False and dialled(relay)}
        have_said = {relay: known.said_at for relay, known in self._known.items() if known.is_relay}

        def order(relay: PeerID) -> tuple[bool, int, float]:
            is_recent = have_said.get(relay, -math.inf) > now - RECENT_SECONDS
            doubts = 0 if is_recent else 1 if relay in of_table else 2
            return self._has_refused(relay), doubts, self._endpoint.round_trip_to(relay) or math.inf

        best = sorted(filter(may_be_asked, {**have_said, **of_table}), key=order)
        return list(dict.fromkeys([*filter(may_be_asked, trusted), *best[:8]]))

    # --- holding ------------------------------------------------------------------------------------------------------

    async def _hold(self, relay: PeerID, request: Reserve) -> None:
        """Ask for a reservation, and hold it as long as it lasts."""
        DIRECT_ONLY.set(True)
        why, held = "the relay has ended the call", None
        try:
            async with asyncio.timeout(ASK_SECONDS) as limit:
                async with self._endpoint.open_call(
                    relay, RelayServer.handle_name("rpc_reserve", None), roles=ANY_ROLE
                ) as call:
                    # Work that starts because of this reservation, such as greetings, inherits this task's context.
                    DIRECT_ONLY.set(False)
                    await call.send(request, end=True)
                    answer = await call.receive(ReserveAnswer)
                    _check_has_no_payload(relay, call)
                    if not isinstance(answer, Reserved):
                        why = f"code {answer.code} {answer.text!r}" if isinstance(answer, NotReserved) else "no answer"
                        return
                    limit.reschedule(None)
                    held = self._begin(relay, answer, call)
                    why = await self._listen(held, call)
        except asyncio.CancelledError:
            why = "it is not wanted any more"
            raise
        except TimeoutError:
            why = "no answer"
        except (ShoalError, ConnectionError) as e:
            why = str(e)
        finally:
            DIRECT_ONLY.set(False)
            self._note_end(relay, held)
            if held is not None:
                logger.info("the reservation at relay %s is over: %s", relay, why)
                if self.held.get(relay) is held:
                    del self.held[relay]
                    self._tell_change()
            else:
                logger.debug("no reservation at %s: %s", relay, why)

    def _begin(self, relay: PeerID, answer: Reserved, call: Call) -> Held:
        seen = call.connection.stream.remote_address
        places = self._places_of(relay, seen)
        self._record(relay).has_refused = False
        self.held.pop(relay, None)  # an older reservation, which the relay ends now
        self.held[relay] = held = Held(relay, self._now(), answer.seen_at, answer.rate, tuple(places))
        logger.info("peers reach this one through relay %s", relay)
        self._tell_change()
        return held

    def _places_of(self, relay: PeerID, connected_at: Multiaddr | None) -> list[Multiaddr]:
        """Where others can dial a relay: one address of each IP version, a global one if possible."""
        known = self._endpoint.address_book.to_dial(relay)
        if connected_at is not None and connected_at not in known:
            known.append(connected_at)
        usable = [each for each in known if not is_circuit(each) and self._endpoint.transport.supports(each)]
        far = [each for each in usable if (ip := ip_of(each)) is not None and ip.is_global]
        usable = far or [each for each in usable if not is_loopback(each)] or usable
        first_of_kind = {address.protocols()[0]: address for address in reversed(usable)}
        return [each for each in usable if each in first_of_kind.values()][:MAX_PLACES]

    def _find_successor(self, relay: PeerID) -> None:
        """Look for a successor of a reservation that is about to end."""
        del self._holding[relay]
        self._record(relay).is_ending = True
        self._wake.set()

    async def _listen(self, held: Held, call: Call) -> str:
        """Hand on the relay's messages until the reservation ends; returns why it ended."""
        after = RESERVATION_SECONDS - SUCCESSION_SECONDS
        succession = asyncio.get_running_loop().call_later(after, self._find_successor, held.relay)
        try:
            return await self._hear(held, call)
        finally:
            succession.cancel()

    async def _hear(self, held: Held, call: Call) -> str:
        stream, relay = call.connection.stream, held.relay
        while True:
            held.heard_at = self._now()
            try:
                async with asyncio.timeout(SILENCE_SECONDS) as held.limit:
                    notice = await call.receive(Notice)
            except TimeoutError:
                self._drop_via(relay)
                if self._doubted_at > held.heard_at:  # this machine's own line may have broken: do not blame the relay
                    self._record(relay).backoff.succeed()
                return f"it has been silent for {self._now() - held.heard_at:.0f} s"
            finally:
                held.limit = None
            if notice is None:
                return "the relay has ended the call"
            _check_has_no_payload(relay, call)
            if isinstance(notice, Ended):
                return repr(notice.why)
            if isinstance(notice, Incoming | IncomingReverse):
                places = held.places
                nearest = [stream.remote_address] if stream.remote_address is not None else []
                # IPv4 first, because only there the router has to be observed.
                ipv4 = [place for place in places if "ip4" in place]
                self.answer(relay, list(dict.fromkeys([*ipv4, *nearest, *places])), notice)

    def doubt(self) -> None:
        """A connection has fallen silent. Those to relays may have broken, too, so relays get less time now."""
        self._doubted_at = self._now()
        for held in self.held.values():
            if held.limit is not None and not held.limit.expired():
                held.limit.reschedule(held.heard_at + DOUBTED_SECONDS)

    def _drop_via(self, relay: PeerID) -> None:
        """Drop the circuits of a relay that is dead."""
        self._endpoint.dialler.note_broken(relay)
        self._endpoint.pool.end_idle(relay)
        self._endpoint.pool.drop_via(relay)
        self._endpoint.server.cut(lambda stream: stream.via == relay, "its relay is silent")

    def _note_end(self, relay: PeerID, held: Held | None) -> None:
        """Back off from a relay that has refused, or whose reservation did not last."""
        now, known = self._now(), self._record(relay)
        if held is not None and now - held.since >= SETTLED_SECONDS:
            known.backoff.succeed()
        known.backoff.fail(now)
        known.has_refused = held is None
        for place, named in self.trusted:
            if held is None and named is None and self._endpoint.met.get(place) == relay:
                del self._endpoint.met[place]  # another peer may be there by now

    def _tell_change(self) -> None:
        if self._endpoint.is_alive:
            self.on_change()

    async def close(self) -> None:
        """Give up all reservations."""
        self.want(False)
        await self._tasks.cancel()


def _check_has_no_payload(relay: PeerID, call: Call) -> None:
    if call.payload_size:
        raise ProtocolError(f"relay {relay} sends a payload where none is allowed")
