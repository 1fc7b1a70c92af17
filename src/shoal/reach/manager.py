"""Keeps checking whether others can call this peer, and makes sure that they can.

:mod:`~.reachability` draws the conclusions. This module collects the evidence and acts on the conclusions. Evidence is:

- every connection with a peer outside, at no extra cost; so a swarm in one network costs nothing;
- the first peers of a swarm, which dial back while this one joins (``rpc_ping`` of the table, see
  ``shoal.dht.joining``);
- from then on, two witnesses that are asked to dial back (``Checkup.rpc_call_back``) every quarter of an hour, and at
  once after an upheaval: this machine has other addresses, or is seen at another one; all connections are gone; it
  slept.

While nobody can dial this peer, it asks relays for reservations. Connected peers hear of each change in a new greeting.
If no relay is left, some peer has to become one, and the others have to hear of it. So each peer checks often whether
it can be dialled, and asks some others whether they are relays.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shoal.base.logs import Seldom
from shoal.base.tasks import cancel_and_wait, wait_at_most
from shoal.errors import P2PDaemonError, ProtocolError, ShoalError
from shoal.net.addresses import ip_text_of, is_global
from shoal.net.connection_pool import DIRECT_ONLY
from shoal.net.endpoint import Endpoint
from shoal.net.own_addresses import MAX_ADDRESSES_PER_PEER
from shoal.net.pasted import Target, read_targets
from shoal.net.transport import Stream
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.checkup import CALL_BACK_SECONDS, CallBack, CallMe, Checkup
from shoal.reach.nat.port_mapping import PortMapping, forward_port
from shoal.reach.presence import Announcements
from shoal.reach.punching import MOST_OBSERVERS, is_mapping_hard, places_of
from shoal.reach.reachability import WITNESSES_TO_REFUTE, AddressStatus, Contacts, Evidence, Reach, Reachability
from shoal.reach.relay.circuits import OutgoingCircuits
from shoal.reach.relay.client import RelayClient
from shoal.reach.relay.server import RelayServer

logger = logging.getLogger(__name__)

# Parameters of a libp2p daemon that existing programs pass. Those about routers and relays have the same effect here;
# these have none, because there is no daemon underneath. Each has the value that needs no warning.
_WITHOUT_EFFECT: dict[str, Any] = {
    "conn_manager": True,
    "dht_mode": "server",
    "tls": True,
    "use_ipfs": False,
    "persistent_conn_max_msg_size": 4 * 2**20,
    "quic": None,
    "use_relay_hop": None,
    "use_relay_discovery": None,
}
_DHT_MODES = ("server", "client", "auto")
_REACHABILITIES = (None, "public", "private")


@dataclass(frozen=True)
class Libp2pOptions:
    """The user's options about how others can call this peer."""

    auto_nat: bool = True
    """Ask others from time to time whether they can dial this peer."""
    force_reachability: str | None = None
    """``"public"`` or ``"private"`` if the user knows it; ``None`` = find out."""
    nat_port_map: bool = True
    """Ask the router for an open port."""
    use_relay: bool = True
    """Dial others through relays if there is no other way."""
    use_auto_relay: bool = True
    """Let others call this peer through relays while nobody can dial it."""
    trusted_relays: tuple[Target, ...] = ()
    """Relays to use first, if they have room."""
    relay_hop_limit: int | None = None
    """0: never be a relay for others; by default every public peer is one."""

    @property
    def forced(self) -> bool | None:
        """Whether this peer is public, if the user has said so."""
        return None if self.force_reachability is None else self.force_reachability == "public"

    @classmethod
    def names(cls) -> set[str]:
        """The names of all parameters, including those without effect."""
        return {field.name for field in fields(cls)} | _WITHOUT_EFFECT.keys()

    @classmethod
    def chosen(cls, arguments: Mapping[str, Any]) -> Libp2pOptions:
        """Take the parameters that have an effect, and warn about values of others that ask for one.

        Raises:
            TypeError: there is no such parameter.
            ValueError: a parameter cannot have this value.
        """
        names = {field.name for field in fields(cls)}
        unknown = arguments.keys() - _WITHOUT_EFFECT.keys() - names
        if unknown:
            raise TypeError(f"P2P has no parameter {', '.join(sorted(unknown))}")
        chosen = {name: value for name, value in arguments.items() if name in names}
        if chosen.get("force_reachability") not in _REACHABILITIES:
            raise ValueError(
                f"force_reachability is {chosen['force_reachability']!r}: give 'public', 'private' or None"
            )
        if arguments.get("dht_mode", "server") not in _DHT_MODES:
            raise ValueError(f"dht_mode is {arguments['dht_mode']!r}: give 'server', 'client' or 'auto'")
        chosen["trusted_relays"] = tuple(read_targets(chosen.get("trusted_relays") or (), "trusted_relays"))
        others = {name: value for name, value in arguments.items() if name not in names}
        asked = [name for name, value in others.items() if value != _WITHOUT_EFFECT[name]]
        if asked:
            logger.warning("%s: no effect here, because there is no libp2p daemon underneath", ", ".join(asked))
        return cls(**chosen)


TICK_SECONDS = 10.0  # chosen
# How long a join waits for a reservation. Chosen: a few round trips.
RESERVE_SECONDS = 1.5
SEEN = "seen over"
"""Prefix of the sources of offers that come from witnesses, which may lie."""


class CheckTimes:
    """When witnesses are asked to dial back: rarely, soon after a change, and never too often. All numbers are chosen.

    Args:
        now: the time in seconds.
        rng: varies the times, so that peers do not all ask at the same moment.
    """

    usual: ClassVar = 900.0
    """Seconds from one check to the next, give or take a fifth."""
    first: ClassVar = 5.0
    """Seconds after the first connection with a peer outside; the join has usually found out by then."""
    least: ClassVar = 15.0
    """Least seconds between two checks, whatever happens."""

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self._now, self._rng = now, rng
        self._checked_at, self._due_at = -math.inf, math.inf

    @property
    def seconds_left(self) -> float:
        """Seconds until the next check; 0 if it is due."""
        return max(0.0, max(self._due_at, self._checked_at + self.least) - self._now())

    def check_within(self, seconds: float) -> None:
        """Make the next check due within this many seconds."""
        self._due_at = min(self._due_at, self._now() + seconds)

    def note_check(self) -> None:
        """A check begins."""
        spread = self.usual / 5
        self._checked_at, self._due_at = self._now(), self._now() + self.usual + self._rng.uniform(-spread, spread)

    def note_no_answer(self) -> None:
        """No witness has answered: all may have been busy, so ask again soon."""
        self._due_at = self._now() + self.least * self._rng.uniform(1.0, 3.0)


class ReachabilityManager:
    """What a peer knows about how others reach it.

    It has many attributes, because it holds both sides: the evidence with its sources, and the parts that act on it.

    Args:
        endpoint: of the peer.
        options: the user's options.
        relay: serves others as a relay once this peer is public.
        reservations: holds relays through which this peer is called while it is not public.
        circuits: dials others through relays.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: Libp2pOptions,
        relay: RelayServer,
        reservations: RelayClient,
        circuits: OutgoingCircuits,
    ) -> None:
        self._endpoint, self.options = endpoint, options
        self._relay, self._reservations, self._circuits = relay, reservations, circuits
        self.evidence = Evidence(options.forced)
        self.mapping: PortMapping | None = None
        """The port that the router of this network forwards, if this peer asks for one."""
        self.is_hard = False
        """Whether the router gives each connection another outer port; ``None`` = unknown."""
        self._rng = random.Random(endpoint.peer_id.to_bytes())
        self.now = asyncio.get_running_loop().time
        """The time that the evidence goes by."""
        self.contacts = Contacts()
        """The peers with which it has had connections."""
        self._seen_elsewhere_at = -math.inf
        self._checks = CheckTimes(self.now, self._rng)
        self._looked_for_relays_at = self.now()
        # What others were told last: the state, the addresses and the reach of this peer.
        self._told: tuple[Reachability, list[Multiaddr], Reach] | None = None
        self._changed, self._wake = asyncio.Event(), asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._announcements = Announcements(endpoint)
        self._warn_seldom = Seldom(logger.warning)

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Reachability:
        """Whether, and how, others can call this peer."""
        return Reachability.CLIENT if self._endpoint.client_mode else self.evidence.state

    @property
    def reach(self) -> Reach:
        """The state in the form of greetings."""
        if self.state is Reachability.PUBLIC:
            return Reach.PUBLIC
        if self.state is Reachability.CLIENT:
            return Reach.CLIENT
        return Reach.HARD if self.is_hard else Reach.EASY

    @property
    def relay_rate(self) -> float:
        """Bytes per second that this peer's relays carry in total; 0 if one sets no limit, or there are none."""
        rates = [held.rate for held in self._reservations.held.values()]
        return max(rates) if rates and all(rates) else 0.0

    def seen_at(self) -> list[str]:
        """The hosts at which others outside see this machine."""
        seen = (record.sees_me_at for record in self._endpoint.book.values())
        return list(dict.fromkeys(filter(None, seen)))

    def announced(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses to tell others; they change as this machine moves from one network to another.

        Args:
            latest: look at this machine's networks again.
        """
        if self._endpoint.client_mode:
            return []
        self.evidence.own = self._endpoint.transport.addresses(latest)
        return self.evidence.announced(self.now(), self._reservations.addresses(), MAX_ADDRESSES_PER_PEER)

    def public_addresses(self) -> list[Multiaddr]:
        """The announced addresses while others can call this peer directly; otherwise none."""
        return self.announced() if self._told is not None and self.state is Reachability.PUBLIC else []

    def confirmed(self) -> list[Multiaddr]:
        """The addresses at which peers outside are known to reach this one."""
        return self.evidence.confirmed(self.now())

    def outer_hosts(self) -> set[str]:
        """The hosts in front of this machine, as its user or router says; other peers behind them are neighbours."""
        offers = [offer for source, offer in self.evidence.offers.items() if not source.startswith(SEEN)]
        return {host for each in (*self.evidence.announcement, *offers) if (host := ip_text_of(each)) is not None}

    # --- listening ----------------------------------------------------------------------------------------------------

    async def listen(self, hosts: Sequence[Multiaddr], announced: list[Multiaddr]) -> None:
        """Accept connections.

        Args:
            hosts: where to listen.
            announced: addresses that the user announces in place of these.

        Raises:
            P2PDaemonError: there is no place to listen.
        """
        transport = self._endpoint.transport
        usable = [address for address in hosts if transport.supports(address)]
        for address in hosts:
            if address not in usable:
                logger.info("there is no transport for %s yet; listening on the other addresses", address)
        if not usable:
            raise P2PDaemonError(
                f"no usable address to listen on in {[str(a) for a in hosts]}: give /ip4/0.0.0.0/tcp/0"
            )
        for address in usable:
            await transport.listen(address, self._endpoint.server.accept)
        self.evidence.announcement = announced
        self.begin()

    def begin(self) -> None:
        """Let others call this peer from now on: at the addresses where it listens, or else through relays."""
        self._endpoint.transport.on_addresses_changed = self._note_move
        self._told = self.evidence.state, self.announced(), self.reach
        if self.options.nat_port_map and not self.evidence.announcement and self.evidence.forced is None:
            self.mapping = forward_port(self._endpoint.transport, self._note_mapped)
        self.update()

    def _note_mapped(self, addresses: Sequence[Multiaddr]) -> None:
        """The router has begun or stopped to forward a port."""
        for version in ("ip4", "ip6"):
            # An address that a router has from another router leads nowhere.
            claimed = next((each for each in addresses if version in each and is_global(each)), None)
            self.offer(f"router, {version}", claimed)
            if claimed in self.evidence.own:
                self.check_soon()  # the router has opened its firewall

    # --- evidence -----------------------------------------------------------------------------------------------------

    def note_stream(self, stream: Stream) -> None:
        """A connection with another peer was made."""
        address, local = stream.remote_address, stream.local_address
        if address is None or stream.is_relayed or self._endpoint.client_mode:
            return
        is_outside = not self._endpoint.transport.is_inside(address)
        self.contacts.note(stream, address, is_outside=is_outside)
        if is_outside:
            self.evidence.note_outside(self.now())
            self._begin()
        ports = {own.get("tcp") for own in self.evidence.own}
        if local is not None and local.get("tcp") in ports:
            is_clear = self.evidence.note_accepted(self.now(), local, is_outside=is_outside)
            if not is_clear:
                self.check_soon()
        if is_outside or self.evidence.state is not Reachability.PUBLIC:
            self.update()

    def note_called_back(self, witness: PeerID, addresses: Sequence[Multiaddr], *, reached: bool) -> None:
        """A witness has tried to call this peer at the addresses that it announces, or at some of them."""
        now, (network, is_outside) = self.now(), self.contacts.place_of(witness)
        if not is_outside:
            self.evidence.note_inside(now, reached=reached)
            self.update()
            return
        far = [address for address in addresses if is_global(address)]
        if not reached or len(far) == 1:
            for address in far:
                self.evidence.note_verdict(now, network, address, reached=reached)
        self.evidence.note_judged()
        self.update()

    def note_seen(self, witness: PeerID, text: str) -> None:
        """A witness tells the address at which it sees this peer: a router there may forward a port."""
        try:
            seen = Multiaddr(text)
        except ValueError:
            return
        version = next((version for version in ("ip4", "ip6") if version in seen), None)
        if version is None or not self.contacts.place_of(witness)[1] or self._endpoint.transport.is_inside(seen):
            return
        record, host = self._endpoint.book[witness], str(seen[version])
        former, record.sees_me_at = record.sees_me_at, host
        if former not in ("", host) and self.now() - self._seen_elsewhere_at >= 60.0:  # one may lie
            self._seen_elsewhere_at = self.now()
            self.note_upheaval(f"this machine is seen at {host}, no longer at {former}")
        port = next((own.get("tcp") for own in self.evidence.own if version in own), None)
        if port is not None:
            source, address = f"{SEEN} {version}", Multiaddr(f"/{version}/{host}/tcp/{port}")
            present = self.evidence.offers.get(source)
            if present in (None, address) or self.evidence.standing(self.now(), present) is not AddressStatus.CONFIRMED:
                self.offer(source, address)
            else:  # one liar must not talk this peer out of an address that works
                self.offer(f"{source} lately", address)

    def offer(self, source: str, address: Multiaddr | None) -> None:
        """Another address may lead here; witnesses will try it. ``None`` withdraws it.

        Args:
            source: where the address comes from; each source has one address at a time.
        """
        if address == self.evidence.offers.get(source):
            return
        if address is None:
            del self.evidence.offers[source]
        else:
            self.evidence.offers[source] = address
            if address not in self.evidence.own and self._life is not None:
                self._checks.check_within(CheckTimes.first)
        self.update()

    # --- consequences -------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Draw the conclusions again, and act on a change."""
        if self._endpoint.client_mode or not self._endpoint.is_alive:
            return
        is_called = (
            bool(self._reservations.addresses()) or self._endpoint.server.has_arranged()
        )  # these stay without a relay
        state = self.evidence.conclude(self.now(), is_reserved=is_called)
        metrics, reservations = self._endpoint.metrics, self._reservations
        metrics.reachability, metrics.reservations = state.value, len(reservations.held)
        self._relay.is_public = state is Reachability.PUBLIC
        reservations.want(self.options.use_auto_relay and state in (Reachability.RELAYED, Reachability.CLIENT))
        self._warn_of_announcement()
        now_told = state, self.announced(), self.reach
        former, self._told = self._told, now_told
        if former is None or former == now_told:
            return
        if former[0] is not state:
            logger.info("others can call this peer: %s (before: %s)", state.value, former[0].value)
            self._changed.set()
            if state is Reachability.CLIENT and former[0] is Reachability.RELAYED:
                self.warn_client()
            if self._endpoint.directory is not None:
                self._endpoint.directory.note_reachability()
        if former[1] != now_told[1] or Reachability.UNKNOWN not in (former[0], state):
            self.announce_anew()

    def _note_move(self) -> None:
        self.note_upheaval("this machine has other addresses")
        self.announce_anew()
        self.update()

    def note_upheaval(self, reason: str, *, has_moved: bool = True) -> None:
        """Check again, because what is known about routers and relays may be wrong now.

        Args:
            has_moved: this machine is in another network. Otherwise a check has to find out, and the known ways through
                routers stay, because a peer that lost all connections is in a hurry.
        """
        if self._life is None:
            return
        logger.debug("reachability is checked again: %s", reason)
        self._announcements.remember(self._endpoint.pool.renew())  # open connections may be dead already
        self.check_soon()
        if has_moved:
            self.forget_routers()

    def forget_routers(self) -> None:
        """Forget what was learnt about routers."""
        self._circuits.forget_routers()
        if self.mapping is not None:
            self.mapping.look_again()

    def announce_anew(self) -> None:
        """Tell connected peers where this one is now."""
        if self._endpoint.is_alive:
            self._announcements.tell(self._endpoint.pool.renew())

    async def settle(self) -> Reachability:
        """After the first verdicts, wait until it is clear how others call this peer.

        Meanwhile relays are asked, and witnesses dial back where they see this peer: a router may forward the port.
        """
        self.update()
        if self.state is not Reachability.CLIENT:
            return self.state
        self._begin()
        has_offers = any(offer not in self.evidence.own for offer in self.evidence.offers.values())
        if has_offers:
            self.check_soon()
        if has_offers or self.options.use_auto_relay:
            try:
                async with asyncio.timeout(RESERVE_SECONDS):
                    while self.state is Reachability.CLIENT:
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                pass  # the background task keeps looking
        if self.state is Reachability.CLIENT:
            self.warn_client()
        return self.state

    def warn_client(self) -> None:
        """Tell the user that nobody can call this peer, and what to do."""
        if self._endpoint.client_mode:
            return
        if not self._endpoint.transport.addresses():
            self._warn_seldom(
                "nobody can call this peer: it does not listen (no_listen), and none of %d peers relays. Leave "
                "no_listen out, or run a public `shoal dht`",
                len(self.contacts),
            )
            return
        seen = ", ".join(self.seen_at()) or "not known"
        port = next((port for own in self.evidence.own if (port := own.get("tcp"))), "PORT")
        self._warn_seldom(
            "nobody can call this peer (seen at: %s), and none of %d peers relays. Open TCP port %s, turn on UPnP in "
            "the router, or run a public `shoal dht`",
            seen,
            len(self.contacts),
            port,
        )

    def _warn_of_announcement(self) -> None:
        for address in self.evidence.announcement:
            if self.evidence.standing(self.now(), address) is AddressStatus.REFUTED:
                self._warn_seldom(
                    "others cannot dial this peer at %s, which it announces (announce_maddrs): open or forward the "
                    "port, or announce another address",
                    address,
                    about=address,
                )

    # --- life ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._life is None and self._endpoint.is_alive:
            self._checks.check_within(CheckTimes.first)
            self._life = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        """Look at the evidence every few seconds, and check when it is due."""
        DIRECT_ONLY.set(False)  # this task may have been started by a connection to a relay
        while True:
            pause = min(TICK_SECONDS, self._checks.seconds_left)
            due = self.now() + pause
            self._wake.clear()
            await wait_at_most(self._wake, pause)
            if self.now() - due > 30.0:  # even a busy loop is never that late
                self.note_upheaval("this machine slept")
            self._look_at_connections()
            self._look_for_relays()
            if not self._checks.seconds_left:
                await self.check()
            self.update()

    def _look_for_relays(self) -> None:
        """Without any relay: ask some peers whether they are relays by now, and check whether this one could be one."""
        is_due = self.now() - self._looked_for_relays_at >= 30.0
        reservations = self._reservations
        if is_due and reservations.is_wanted and not reservations.held:
            self._looked_for_relays_at = self.now()
            self._announcements.tell(self.contacts.draw(self._rng, 8, self._endpoint.is_reachable))
            self.check_soon()

    def check_soon(self) -> None:
        """Let witnesses dial back soon."""
        self._checks.check_within(0.0)
        self._wake.set()

    def _look_at_connections(self) -> None:
        is_connected, have_all_gone = self.contacts.look_outside()
        if is_connected:
            self.evidence.note_outside(self.now())
        elif have_all_gone:
            self.note_upheaval("all connections are gone", has_moved=False)

    async def check(self) -> None:
        """Let witnesses dial back."""
        self._checks.note_check()
        if not self.options.auto_nat or self.evidence.forced is not None:
            return
        witnesses, is_outside = self.contacts.witnesses(self._rng, WITNESSES_TO_REFUTE, self._endpoint.is_reachable)
        self.evidence.witnesses = self.contacts.num_hosts(self._endpoint.is_reachable)
        addresses = self.evidence.to_check() if is_outside else []
        answers = await asyncio.gather(*(self._ask(witness, addresses) for witness in witnesses))
        for witness, answer in zip(witnesses, answers, strict=True):
            if answer is not None:
                self._note_answer(witness, answer)
        if answers and all(answer is None for answer in answers):
            self._checks.note_no_answer()
        await self._observe()
        self.update()

    async def _observe(self) -> None:
        """Find out what the router does to outgoing ports, if that matters now."""
        if self.state in (Reachability.PUBLIC, Reachability.UNKNOWN):
            return

        def may_observe(peer: PeerID) -> bool:
            return self._endpoint.book.find(peer).reach == Reach.PUBLIC and bool(places_of(self._endpoint, peer))

        observers, is_outside = self.contacts.witnesses(self._rng, MOST_OBSERVERS, may_observe)
        is_hard = await is_mapping_hard(self._endpoint, observers) if is_outside else None
        if is_hard is not None:
            self.is_hard = is_hard
            self._endpoint.metrics.nat = "hard" if is_hard else "easy"

    async def _ask(self, witness: PeerID, addresses: Sequence[Multiaddr]) -> CallBack | None:
        handle = Checkup.handle_name("rpc_call_back", None)
        request, transport = CallMe(addresses=[str(address) for address in addresses]), self._endpoint.transport
        before = transport.arrivals
        try:
            limit = 2 * CALL_BACK_SECONDS
            answer = await self._endpoint.call(witness, handle, request, CallBack, limit, roles=Checkup.roles)
            if any(answer.reached.values()) and transport.arrivals == before:
                raise ProtocolError("it says that it has reached this peer, but nobody has connected")
            return answer
        except (ShoalError, ConnectionError, TimeoutError) as e:
            logger.debug("%s did not dial back: %s", witness, e)
            return None

    def _note_answer(self, witness: PeerID, answer: CallBack) -> None:
        network, is_outside = self.contacts.place_of(witness)
        if not is_outside:
            if answer.reached:  # otherwise it had nothing to try
                self.note_called_back(witness, (), reached=any(answer.reached.values()))
            return
        self.note_seen(witness, answer.seen_at)
        asked = {str(address): address for address in self.evidence.to_check()}
        for text, reached in answer.reached.items():
            if text in asked:
                self.evidence.note_verdict(self.now(), network, asked[text], reached=reached)
        self.evidence.note_judged()

    async def close(self) -> None:
        """Stop checking, and end its parts."""
        if self.mapping is not None:
            await self.mapping.close()
        await cancel_and_wait(*([] if self._life is None else [self._life]))
