"""Direct connections between two peers behind routers, from the ports of the circuits that a relay has joined for them.

Over the first circuit the two tell each other where these ports may be reachable. It is not encrypted: the relay knows
all of it anyway, and it cannot forge an identity::

    dialler ► target    Candidates
    target ► dialler    Candidates    without any host if it will not punch

The relay joins both sides at the same moment, and both send at once, so each hears from the other at nearly the same
time. Then both punch: their first packets cross, or those of the earlier side open its router for those of the later
one. Each connection goes through the ordinary handshake, while the circuits do the same; for each port, the first
connection that leads to the other peer counts.

Candidates come through a relay, and both the relay and the other side may lie. So a peer sends connection attempts only
to addresses that may belong to the other side: on the public internet, or in a network that both share.

To find out what the router does to outgoing ports, two observers outside look at one local port
(:func:`is_mapping_hard`). If both see the same outer port, others can predict it, and punches are likely to succeed. If
they see different ones, each connection gets its own, and two peers behind such routers need not even try.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from shoal.base.backoff import Backoff
from shoal.base.bounded import Bounded
from shoal.base.tasks import all_of, cancel_and_wait, has_succeeded
from shoal.errors import DialError, ProtocolError, ShoalError, StreamClosedError
from shoal.metrics import Metrics
from shoal.net.addresses import ip_to_dial, is_global, is_ipv6, is_loopback, is_name
from shoal.net.endpoint import Endpoint
from shoal.net.transport import MAY_CONNECT, Header, OnStream, Session, Stream, Transport, receive_frame, send_frame
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.messages import LOWEST_PORT, MAX_AT_ONCE, Observe, Observed, OpenObservation, Reach
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)

# --- candidates -------------------------------------------------------------------------------------------------------

MAX_CANDIDATES = 4
"""The most addresses that one side names for each port. Chosen."""
MEMORY = "memory"
"""Stands for a host on the in-memory network, where the number of an address is its port."""

HostPort = tuple[str, int]
"""A host and a port."""


class CandidateHost(msgspec.Struct):
    """A host of one side, and the port there for each circuit in order; 0 if there is none."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=45)]
    ports: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**16)]], msgspec.Meta(max_length=MAX_AT_ONCE)]


class Candidates(Header):
    """Where the sender may be reachable. Without hosts from the target of a call: it will not punch."""

    hosts: Annotated[list[CandidateHost], msgspec.Meta(max_length=MAX_CANDIDATES)] = msgspec.field(default_factory=list)

    def of_port(self, number: int) -> list[HostPort]:
        """The candidates of one port."""
        return [(each.host, each.ports[number]) for each in self.hosts if number < len(each.ports)]


def endpoint_of(address: Multiaddr | None) -> HostPort | None:
    """Host and port of an address; ``None`` if it has no such parts."""
    if address is None:
        return None
    host, port = address.get("ip4") or address.get("ip6"), address.get("tcp")
    if host is None or port is None:
        number = address.get(MEMORY)
        return None if number is None else (MEMORY, int(number) % 2**16)
    return host, int(port)


def address_of(endpoint: HostPort) -> Multiaddr:
    """The multiaddr of an endpoint with a valid host."""
    host, port = endpoint
    if host == MEMORY:
        return Multiaddr(f"/memory/{port}")
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def global_ipv6(addresses: Iterable[Multiaddr]) -> str | None:
    """The first global IPv6 address."""
    hosts = (address.get("ip6") for address in addresses)
    return next((host for host in hosts if host is not None and ipaddress.IPv6Address(host).is_global), None)


def own_candidates(ports: Sequence[tuple[Multiaddr | None, Multiaddr | None]], ipv6: str | None) -> Candidates:
    """The candidates to tell the other side.

    Args:
        ports: for each port, the address at which the relay sees it, and its local address; ``None`` if unknown.
        ipv6: a global IPv6 address of this machine, on which the same port numbers are used.
    """
    found: dict[str, list[int]] = {}
    seen = [endpoint_of(seen_at) for seen_at, _ in ports]
    local = [endpoint_of(address) for _, address in ports]
    fresh = [None if each is None or ipv6 is None else (ipv6, each[1]) for each in local]
    for kind in (seen, local, fresh):
        for number, endpoint in enumerate(kind):
            if endpoint is not None:
                of_host = found.setdefault(endpoint[0], [0] * len(ports))
                of_host[number] = of_host[number] or endpoint[1]
    return Candidates([CandidateHost(host, numbers) for host, numbers in list(found.items())[:MAX_CANDIDATES]])


def worth_punching(
    candidates: Iterable[HostPort],
    *,
    have_same_host: bool,
    is_inside: Callable[[Multiaddr], bool],
    is_relay_on_loopback: bool,
) -> list[Multiaddr]:
    """The candidates of one port that are worth dialling.

    Args:
        have_same_host: whether the relay sees both sides at one host: behind the same router, or on one machine.
        is_inside: whether an address is in a network of this machine.
        is_relay_on_loopback: if so, every peer that the relay can join to this one is on the loopback, too.
    """
    found: dict[Multiaddr, None] = {}
    for host, port in candidates:
        if host == MEMORY:
            found[address_of((host, port))] = None
        elif port >= LOWEST_PORT and (ip := ip_to_dial(host)) is not None:
            address = address_of((str(ip), port))
            if is_relay_on_loopback if ip.is_loopback else ip.is_global or have_same_host or is_inside(address):
                found[address] = None
    return list(found)[:MAX_CANDIDATES]


# --- what routers do to ports -----------------------------------------------------------------------------------------

OBSERVERS = 2  # derived: the fewest whose answers can be compared
MOST_OBSERVERS = 4
"""One may lie, so if two differ, others are asked until two agree. Behind a hard router none agree. Chosen."""
OBSERVE_SECONDS = 5.0  # chosen


def places_of(endpoint: Endpoint, peer: PeerID) -> list[Multiaddr]:
    """The addresses at which a peer can observe. Only IPv4 addresses: for IPv6 routers do not translate."""
    known = endpoint.transport.worth_dialling(endpoint.address_book.peek(peer))
    return [address for address in known if is_global(address) and not is_ipv6(address)]


async def is_mapping_hard(endpoint: Endpoint, observers: Sequence[PeerID]) -> bool | None:
    """Whether each connection gets another outer port; ``None`` if fewer than two observers answer."""
    seen = [there for _, there in await observe(endpoint, observers)]
    return seen[0] != seen[1] if len(seen) == OBSERVERS else None


async def observe(endpoint: Endpoint, observers: Sequence[PeerID]) -> list[tuple[Multiaddr | None, Multiaddr]]:
    """One local address, as this machine sees it and as up to two observers do; if possible, two that agree.

    Args:
        observers: peers on different hosts that may be asked, the best first.
    """
    sessions: list[Session] = []
    seen: list[tuple[Multiaddr | None, Multiaddr]] = []
    try:
        for observer in observers:
            try:
                async with asyncio.timeout(OBSERVE_SECONDS):
                    there = await _be_observed(endpoint, observer, sessions)
                    seen.append((sessions[-1].local_address, there))
            except (ShoalError, ConnectionError, TimeoutError, ValueError) as e:
                logger.debug("%s does not observe: %s", observer, e)
            agreeing = next((list(pair) for pair in itertools.combinations(seen, 2) if pair[0][1] == pair[1][1]), None)
            if agreeing is not None:
                return agreeing
            if len(seen) == MOST_OBSERVERS:
                break
        return seen[:OBSERVERS]
    finally:
        for session in sessions:
            session.abort()


async def _be_observed(endpoint: Endpoint, observer: PeerID, sessions: list[Session]) -> Multiaddr:
    handle = RelayServer.handle_name("rpc_observe", None)
    given = await endpoint.call(observer, handle, Observe(), OpenObservation, OBSERVE_SECONDS, roles=RelayServer.roles)
    places = places_of(endpoint, observer)
    if not places:
        raise ProtocolError(f"peer {observer} has no address at which it could observe")
    beside = sessions[0] if sessions else None
    # A host name may lead into a network of this machine.
    judging = MAY_CONNECT.set(endpoint.judge_for(None) if is_name(places[0]) else None)
    try:
        session = await endpoint.transport.open_session(places[0], given.cookie, punchable=True, beside=beside)
    finally:
        MAY_CONNECT.reset(judging)
    sessions.append(session)
    return Multiaddr((await receive_frame(session, Observed)).seen_at)


# --- punches ----------------------------------------------------------------------------------------------------------

FIRST_PAUSE, LONGEST_PAUSE = 120.0, 3600.0
"""Seconds until the next punch after the first failure, and after many. Chosen: routers rarely change."""

PUNCH_SECONDS = 2.5
"""How long both sides try to connect. Chosen."""
HEAD_START, HEAD_START_SHARE = 0.5, 0.75
"""How much longer than the relayed connection a direct one may take: seconds, or a share of the time since the dial
began if that is more. Chosen: on long lines and busy machines both take longer."""
EXCHANGE_SECONDS = 3.0
"""How long each side waits for the other one's candidates. Chosen."""


@dataclass(frozen=True)
class Circuit:
    """One side of a pair of sessions that a relay has joined, before any handshake."""

    session: Session
    relay: PeerID
    seen_at: Multiaddr | None
    """Where the relay claims to see this side; it may lie."""
    other_seen_at: Multiaddr | None
    """Where the relay claims to see the other side."""

    def abort(self) -> None:
        """End it now, unless the session was taken over."""
        self.session.abort()


Hosts = tuple[str, str]
"""The hosts at which a relay has seen this side and the other one."""


@dataclass
class _PunchOutcome:
    hosts: Hosts
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE))


def head_start(seconds: float) -> float:
    """How long to wait for a direct connection; ``seconds`` have passed since the dial began."""
    return max(HEAD_START, HEAD_START_SHARE * seconds)


class PunchPolicy:
    """Remembers the outcomes of punches, by peer, and says when to try again.

    A failure means that these two routers do not let a punch through, which rarely changes. So punches are rare until
    one of the two sides is seen at another host, or this machine moves to another network.

    Args:
        now: a clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._outcomes: Bounded[PeerID, _PunchOutcome] = Bounded()

    def __len__(self) -> int:
        return len(self._outcomes)

    def allows(self, peer: PeerID) -> bool:
        """Whether to punch towards a peer."""
        last = self._outcomes.get(peer)
        return last is None or last.backoff.is_due(self._now())

    def expects_success(self, peer: PeerID) -> bool:
        """Whether the last punch towards a peer has made a connection."""
        last = self._outcomes.get(peer)
        return last is not None and not last.backoff.failures

    def note_hosts(self, peer: PeerID, hosts: Hosts) -> None:
        """Forget the outcome if either side is behind another router now."""
        last = self._outcomes.get(peer)
        if last is not None and any(map(_has_moved, last.hosts, hosts)):
            del self._outcomes[peer]

    def note_success(self, peer: PeerID, hosts: Hosts) -> None:
        """A punch has made a connection."""
        self._outcomes[peer] = _PunchOutcome(hosts)

    def note_failure(self, peer: PeerID, hosts: Hosts) -> None:
        """A punch has made no connection."""
        last = self._outcomes.get(peer)
        outcome = self._outcomes[peer] = _PunchOutcome(hosts)
        if last is not None:
            outcome.backoff.failures = last.backoff.failures
        outcome.backoff.fail(self._now())

    def note_hopeless(self, peer: PeerID, hosts: Hosts) -> None:
        """Both routers give each connection another port, so neither side can predict the other's."""
        self._outcomes[peer] = _PunchOutcome(
            hosts, Backoff(FIRST_PAUSE, LONGEST_PAUSE, failures=1, rests_until=math.inf)
        )

    def clear(self) -> None:
        """Forget all outcomes: this machine is in another network."""
        self._outcomes.clear()


def _has_moved(before: str, now: str) -> bool:
    """Whether a host has changed. Addresses of different IP versions may belong to the same machine."""
    return before != now and (":" in before) == (":" in now)


@dataclass(eq=False)
class _Plan:
    """A punch: what is dialled from each port, and the results."""

    targets: list[list[Multiaddr]]
    round_trip: float
    hosts: Hosts
    since: float
    begun_at: float
    going_on: int = 0
    reasons: list[str] = field(default_factory=list)
    """Why ports have failed, one reason for each."""
    is_given_up: bool = False
    """Whether the wait for a port was cancelled, so that the punch proves nothing about the routers."""
    has_succeeded: bool = False

    def is_late(self, now: float) -> bool:
        """Whether it should have connected by now. While it lasts, no dial waits for another punch to that peer."""
        return now - self.begun_at > head_start(self.begun_at - self.since)


class Puncher:
    """Finds direct connections for circuits, on both sides.

    Args:
        transport: of this peer.
        metrics: counts the results.
        on_stream: gets each stream whose other side has dialled and proven its identity.
        own_reach: the reach that this peer announces.
    """

    def __init__(
        self,
        transport: Transport,
        metrics: Metrics,
        on_stream: OnStream,
        own_reach: Callable[[], Reach],
    ) -> None:
        self._transport = transport
        self._metrics = metrics
        self._on_stream = on_stream
        self._own_reach = own_reach
        self.policy = PunchPolicy(asyncio.get_running_loop().time)
        """Says which peers are worth a punch."""
        self._punching: set[asyncio.Task[Stream]] = set()
        self._unsuccessful: dict[_Plan, PeerID] = {}  # so far, as a dialler
        self._is_closed = False

    def forget_routers(self) -> None:
        """Forget all outcomes: this machine is behind other routers."""
        self.policy.clear()

    def is_worth_it(self, peer: PeerID) -> bool:
        """Whether to ask for a punch when dialling a peer."""
        if self._transport.is_proxied:
            return False
        if self.policy.expects_success(peer):
            return True
        now = asyncio.get_running_loop().time()
        is_late = any(whose == peer and plan.is_late(now) for plan, whose in self._unsuccessful.items())
        return not is_late and self.policy.allows(peer)

    def expects_success(self, peer: PeerID) -> bool:
        """Whether the routers on both sides have let a connection through before."""
        return self.policy.expects_success(peer)

    def note_unpunched(self, peer: PeerID, circuits: Sequence[Circuit]) -> None:
        """Note circuits without a punch: they show whether either side has moved."""
        self.policy.note_hosts(peer, _hosts_of(circuits))

    async def close(self) -> None:
        """Give up all punches that this side has dialled, and end connections that nobody has taken."""
        self._is_closed = True
        await _drop(*self._punching)

    def _are_both_hard(self, reach: Reach) -> bool:
        return self._own_reach() == Reach.HARD == reach

    # --- the side that dials ------------------------------------------------------------------------------------------

    async def as_dialler(
        self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit], since: float
    ) -> Sequence[asyncio.Future[Stream]]:
        """Exchange candidates on the first circuit, and begin to punch from the ports of all of them.

        Args:
            peer: the other peer, which has not proven its identity yet.
            reach: its reach, as far as known.
            circuits: circuits on which nothing was sent yet. Afterwards, the handshake begins on each.
            since: when the dial began, in the time of the loop.

        Returns:
            For each circuit, a future of the first stream on which the other peer has proven its identity. It fails
            with a ``DialError`` if there is none. Cancelling it gives up that port. Empty if there is no punch.
        """
        hosts = _hosts_of(circuits)
        self.policy.note_hosts(peer, hosts)
        plan = await self._exchange(peer, circuits, self._own_candidates(circuits), since)
        if plan is None:
            self._metrics.punches_failed["no exchange"] += 1
        if self._are_both_hard(reach):
            self.policy.note_hopeless(peer, hosts)
        elif plan is not None and not any(plan.targets):
            self._metrics.punches_failed["no candidates"] += 1
            self.policy.note_failure(peer, hosts)
        if plan is None or not any(plan.targets) or self._is_closed:
            return []
        return [self._begin(peer, circuit, number, plan) for number, circuit in enumerate(circuits)]

    def _begin(self, peer: PeerID, circuit: Circuit, number: int, plan: _Plan) -> asyncio.Future[Stream]:
        """Begin to punch from the port of a circuit."""
        targets = plan.targets[number] if number < len(plan.targets) else []
        if not targets:
            nothing: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
            nothing.set_exception(DialError(f"no address for a direct connection to peer {peer} is known"))
            nothing.exception()  # marks it as retrieved, so that asyncio does not log it
            return nothing
        plan.going_on += 1
        self._unsuccessful[plan] = peer
        direct = asyncio.ensure_future(self._first_direct(peer, circuit.session, targets, plan.round_trip))
        self._punching.add(direct)
        direct.add_done_callback(lambda task: self._note_outcome(peer, plan, task))
        return direct

    def _note_outcome(self, peer: PeerID, plan: _Plan, direct: asyncio.Task[Stream]) -> None:
        self._punching.discard(direct)
        plan.going_on -= 1
        if direct.cancelled():
            plan.is_given_up = True
        elif (error := direct.exception()) is not None:
            plan.reasons.append("no connection" if type(error) is DialError else "not that peer")
            if not isinstance(error, ShoalError | OSError):
                logger.error("a punch towards %s has failed", peer, exc_info=error)
        else:
            plan.has_succeeded = True
            self._metrics.seconds_to_direct += asyncio.get_running_loop().time() - plan.since
            self.policy.note_success(peer, plan.hosts)
        if plan.has_succeeded or not plan.going_on:
            self._unsuccessful.pop(plan, None)
        if not plan.going_on and not plan.has_succeeded and not plan.is_given_up:
            self._metrics.punches_failed[plan.reasons[-1]] += 1
            self.policy.note_failure(peer, plan.hosts)

    async def _first_direct(
        self, peer: PeerID, session: Session, targets: Sequence[Multiaddr], round_trip: float
    ) -> Stream:
        """The first connection of one port that leads to the peer.

        Raises:
            DialError: there was none, or none led there.
        """
        proven: list[Stream] = []
        ends_at = asyncio.get_running_loop().time() + PUNCH_SECONDS
        try:
            async with aclosing(self._transport.punch(session, targets, PUNCH_SECONDS, round_trip)) as sessions:
                await self._prove_one(peer, sessions, proven)
        except DialError:
            # The other side has named these addresses. The timing must not tell it whether something listens there.
            await asyncio.sleep(max(0.0, ends_at - asyncio.get_running_loop().time()))
            raise
        except BaseException:
            # If this was cancelled while the rest was being dropped, nobody gets the streams that were found.
            for stream in proven:
                stream.abort()
            raise
        return proven[0]

    async def _prove_one(self, peer: PeerID, sessions: AsyncGenerator[Session, None], proven: list[Stream]) -> None:
        """Shake hands on each connection until the peer has proven its identity on one; add that one to ``proven``."""
        error: BaseException = DialError(f"no direct connection to peer {peer} came about in {PUNCH_SECONDS:g} s")
        coming: asyncio.Task[Session | None] = asyncio.ensure_future(anext(sessions, None))
        proving: set[asyncio.Task[Stream]] = set()
        try:
            while True:
                waiting: list[asyncio.Task[Any]] = [coming, *proving]
                if all(task.done() for task in waiting):
                    raise error
                await asyncio.wait([task for task in waiting if not task.done()], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in proving if task.done()]:
                    if (wrong := task.exception()) is None:
                        proving.discard(task)
                        proven.append(task.result())
                        return
                    if not isinstance(wrong, ShoalError | OSError):
                        raise wrong
                    proving.discard(task)
                    error = wrong
                if coming.done() and (found := coming.result()) is not None:
                    proving.add(asyncio.ensure_future(self._transport.authenticate(found, peer)))
                    coming = asyncio.ensure_future(anext(sessions, None))
        finally:
            await _drop(coming, *proving)

    # --- the side that is dialled -------------------------------------------------------------------------------------

    async def as_target(self, peer: PeerID, reach: Reach, circuits: Sequence[Circuit]) -> Awaitable[None]:
        """Exchange candidates as the target; afterwards the handshakes may begin on the circuits.

        Returns:
            The punch: it lasts while it is awaited, and hands on each proven stream.
        """
        own = Candidates() if self._are_both_hard(reach) else self._own_candidates(circuits)
        plan = await self._exchange(peer, circuits, own, asyncio.get_running_loop().time())
        return _nothing() if plan is None or not own.hosts else self._punch_as_target(peer, circuits, plan)

    async def _punch_as_target(self, peer: PeerID, circuits: Sequence[Circuit], plan: _Plan) -> None:
        await all_of(
            *(
                self._receive_direct(peer, circuit.session, targets, plan)
                for circuit, targets in zip(circuits, plan.targets, strict=False)
                if targets
            )
        )

    async def _receive_direct(self, peer: PeerID, session: Session, targets: Sequence[Multiaddr], plan: _Plan) -> None:
        """Hand on each proven stream to a port, until the dialler has the connection that it wanted."""
        has_come = asyncio.Event()

        def on_direct(stream: Stream) -> None:
            if stream.remote == peer:
                self.policy.note_success(peer, plan.hosts)
                has_come.set()
            stream.is_arranged = True
            self._on_stream(stream)

        receiving = asyncio.ensure_future(self._receive_all(session, targets, plan.round_trip, on_direct))
        enough = asyncio.ensure_future(has_come.wait())
        try:
            await asyncio.wait([receiving, enough], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(receiving, enough)
        if not receiving.cancelled():
            receiving.result()

    async def _receive_all(
        self, session: Session, targets: Sequence[Multiaddr], round_trip: float, on_direct: OnStream
    ) -> None:
        async with aclosing(self._transport.punch(session, targets, PUNCH_SECONDS, round_trip)) as sessions:
            async for each in sessions:
                self._transport.receive(each, on_direct)

    # --- both ---------------------------------------------------------------------------------------------------------

    async def _exchange(self, peer: PeerID, circuits: Sequence[Circuit], own: Candidates, since: float) -> _Plan | None:
        """Exchange candidates with the other side; ``None`` if that failed."""
        loop, first = asyncio.get_running_loop(), circuits[0].session
        begun_at = loop.time()
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                await send_frame(first, own)
                theirs = await receive_frame(first, Candidates)
        except (TimeoutError, ProtocolError, StreamClosedError) as e:
            first.abort()  # the two sides may be out of step on it
            logger.debug("no candidates exchanged with %s: %r", peer, e)
            return None
        # Both sides send at the same moment, so the wait was one way. If the other side was late, pauses are longer.
        return self._plan(circuits, theirs, 2 * (loop.time() - begun_at), since)

    def _own_candidates(self, circuits: Sequence[Circuit]) -> Candidates:
        if self._transport.is_proxied:
            return Candidates()  # others see the proxy, and connections that bypass it are not wanted
        ports = [(each.seen_at, each.session.local_address) for each in circuits[:MAX_AT_ONCE]]
        return own_candidates(ports, global_ipv6(self._transport.addresses()))

    def _plan(self, circuits: Sequence[Circuit], theirs: Candidates, round_trip: float, since: float) -> _Plan:
        targets: list[list[Multiaddr]] = []
        for number, circuit in enumerate(circuits[:MAX_AT_ONCE]):
            seen, other, relay = circuit.seen_at, circuit.other_seen_at, circuit.session.remote_address
            found = worth_punching(
                theirs.of_port(number),
                have_same_host=seen is not None and _host_of(seen) == _host_of(other),
                is_inside=self._transport.is_inside,
                is_relay_on_loopback=relay is not None and is_loopback(relay),
            )
            targets.append([address for address in found if self._transport.supports(address)])
        return _Plan(targets, round_trip, _hosts_of(circuits), since, asyncio.get_running_loop().time())


def _host_of(address: Multiaddr | None) -> str:
    endpoint = endpoint_of(address)
    return "" if endpoint is None else endpoint[0]


def _hosts_of(circuits: Sequence[Circuit]) -> Hosts:
    """The hosts at which the relay sees both sides on the first circuit."""
    return _host_of(circuits[0].seen_at), _host_of(circuits[0].other_seen_at)


async def _nothing() -> None:
    """Stand in for a punch when there is none."""


async def _drop(*work: asyncio.Task[Any]) -> None:
    """Cancel tasks that make streams or sessions, and end those that they have already made."""
    try:
        await cancel_and_wait(*work)
    finally:  # the caller may be cancelled, but the tasks have ended all the same
        for task in work:
            if has_succeeded(task) and task.result() is not None:
                task.result().abort()
