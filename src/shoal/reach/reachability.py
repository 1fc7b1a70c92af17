"""Whether others can call this peer, concluded from evidence. Nothing here touches the network or looks at a clock.

A host in one of this machine's own networks is inside, any other is outside. Each address of this peer is unknown,
confirmed or refuted. The evidence, strongest first:

- a connection that was accepted from outside on the listening port. This peer never dials from that port, so a hole in
  a router cannot fake it;
- verdicts of witnesses that have dialled back. Two witnesses on different hosts refute an address together, or one if
  only one is known. A success outweighs refutations for a while, but counts only if a connection has arrived since the
  witness was asked. Witnesses inside prove nothing about the outside.

The state of this peer follows from that:

```
              an address is confirmed
 UNKNOWN ───────────────────────────────► PUBLIC      also while nobody outside is there at all: a swarm on one machine
    │  checked                           ▲      │     or in one network is public to itself
    ▼                          confirmed │      │ refuted, but not before a minute has passed
 CLIENT  ◄──────────────────────────► RELAYED ◄─┘     a relay holds a reservation, or did a minute ago
            reservations come and go
```
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from shoal.base.bounded import Bounded
from shoal.net.addresses import is_global, is_ipv6, network_of
from shoal.net.transport import Stream
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr

# How long an accepted connection confirms an address. Derived: 2 * 900, until the second check after it (`CheckTimes`).
ACCEPTED_SECONDS = 1800.0
# How long a verdict is remembered. Derived: 3 * 900, three checks.
VERDICT_SECONDS = 2700.0
# How long a success outweighs the refutations of others. Chosen: less than the 900 seconds between two checks.
SUCCESS_SECONDS = 600.0
# Chosen. PUBLIC and RELAYED last at least this long, so that others do not see the state flap.
HOLD_SECONDS = 60.0
# After this long without a connection to any peer outside, this peer takes its own networks for the whole world.
ALONE_SECONDS = HOLD_SECONDS

WITNESSES_TO_REFUTE = 2  # chosen: one alone may lie


class Reachability(Enum):
    """Whether, and how, others can call this peer."""

    UNKNOWN = "unknown"
    """Nobody outside has tried yet."""
    PUBLIC = "public"
    """Others can dial it."""
    RELAYED = "relayed"
    """Others can call it through a relay."""
    CLIENT = "client"
    """Others cannot call it."""


class Reach(IntEnum):
    """The reachability as told in greetings, with what the router of a private peer does to its ports."""

    PUBLIC = 0
    EASY = 1
    """Private; its router gives all connections of one local port the same outer port."""
    HARD = 2
    """Private; its router gives each connection another outer port."""
    CLIENT = 3


class AddressStatus(Enum):
    """What is known of one address of this peer."""

    UNKNOWN = "unknown"
    CONFIRMED = "confirmed"
    REFUTED = "refuted"


@dataclass
class _Record:
    """The evidence about one address."""

    accepted_at: float = -math.inf
    verdicts: Bounded[str, tuple[float, bool]] = field(default_factory=lambda: Bounded(16))
    """By witness: the time of its verdict, and whether it reached this peer."""

    def standing(self, now: float, needed: int) -> AddressStatus:
        if now - self.accepted_at <= ACCEPTED_SECONDS:
            return AddressStatus.CONFIRMED
        fresh = [verdict for verdict in self.verdicts.values() if now - verdict[0] <= VERDICT_SECONDS]
        success = max((at for at, reached in fresh if reached), default=-math.inf)
        if now - success <= SUCCESS_SECONDS:
            return AddressStatus.CONFIRMED
        if sum(at >= success for at, reached in fresh if not reached) >= needed:
            return AddressStatus.REFUTED
        return AddressStatus.CONFIRMED if success > -math.inf else AddressStatus.UNKNOWN


class Evidence:
    """The evidence for and against others being able to call this peer. The caller supplies all times.

    Args:
        forced: what the user has said: ``True`` = public, ``False`` = private, ``None`` = find out.
        announced: addresses that the user announces in place of this machine's. They count as confirmed until others
            refute them, and are told to others in any case.
    """

    def __init__(self, forced: bool | None = None, announced: Sequence[Multiaddr] = ()) -> None:
        self.forced = forced
        self.announcement = list(announced)
        self.own: list[Multiaddr] = []
        """The addresses on which this peer listens, the best first."""
        self.offers: dict[str, Multiaddr] = {}
        """Addresses in front of this machine that may lead here, by source, such as a mapping of the router."""
        self.witnesses = 0
        """The number of known hosts with possible witnesses."""
        self.state = Reachability.PUBLIC if forced is not False else Reachability.CLIENT
        self._records: dict[Multiaddr, _Record] = {}
        self._outside_at = -math.inf
        self._reserved_at = -math.inf
        self._public_at = -math.inf
        self._shut_inside_at = self._open_inside_at = -math.inf
        self._is_judged = False
        self._has_confirmed = False

    # --- evidence -----------------------------------------------------------------------------------------------------

    def note_outside(self, now: float) -> None:
        """There is a connection with a peer outside."""
        self._outside_at = now

    def note_accepted(self, now: float, at: Multiaddr, *, is_outside: bool) -> bool:
        """A peer has connected to the listening port.

        Args:
            at: the address of this end, as this machine sees it.

        Returns:
            Whether it is clear which address this confirms; otherwise a check has to find out.
        """
        if not is_outside:
            self._open_inside_at = now
            return True
        offers = [offer for offer in dict.fromkeys(self._offers()) if is_ipv6(offer) == is_ipv6(at)]
        candidates = [offer for offer in offers if self.standing(now, offer) is not AddressStatus.REFUTED]
        if is_global(at) or not candidates:
            candidates = [at]
        if len(candidates) == 1:
            self._record(candidates[0]).accepted_at = now
        return len(candidates) == 1

    def note_verdict(self, now: float, witness: str, address: Multiaddr, *, reached: bool) -> None:
        """A witness outside has dialled this peer at an address; ``witness`` is the same for all peers of one host."""
        self._record(address).verdicts[witness] = now, reached

    def note_judged(self) -> None:
        """All witnesses have answered; no further verdicts will confirm the addresses that are still unknown."""
        self._is_judged = True

    def note_inside(self, now: float, *, reached: bool) -> None:
        """A peer inside has dialled this one, or could not: then not even its own networks can call it."""
        if reached:
            self._open_inside_at = now
        elif now - self._open_inside_at > SUCCESS_SECONDS:
            self._shut_inside_at = now

    def is_shut(self, now: float) -> bool:
        """Whether not even this peer's own networks can call it."""
        return self._shut_inside_at > self._open_inside_at and now - self._shut_inside_at <= ACCEPTED_SECONDS

    def _record(self, address: Multiaddr) -> _Record:
        if address not in self._records:
            kept = {*self.own, *self._offers(), *self.announcement}
            self._records = {known: record for known, record in self._records.items() if known in kept}
        return self._records.setdefault(address, _Record())

    def _offers(self) -> list[Multiaddr]:
        """The offered addresses, the latest source first."""
        return [offer for offer in reversed(self.offers.values()) if offer not in self.own]

    # --- conclusions --------------------------------------------------------------------------------------------------

    def standing(self, now: float, address: Multiaddr) -> AddressStatus:
        """What is known of one address."""
        record = self._records.get(address)
        needed = max(1, min(WITNESSES_TO_REFUTE, self.witnesses))
        found = AddressStatus.UNKNOWN if record is None else record.standing(now, needed)
        if address in self.announcement and found is AddressStatus.UNKNOWN:
            return AddressStatus.REFUTED if self.is_shut(now) and not is_global(address) else AddressStatus.CONFIRMED
        return found

    def to_check(self) -> list[Multiaddr]:
        """The addresses that witnesses should dial: those that may be reachable from far away."""
        if self.announcement:
            return list(self.announcement)
        return [*dict.fromkeys([*filter(is_global, self.own), *self._offers()])]

    def is_alone(self, now: float) -> bool:
        """Whether no peer outside was connected for a while, and no peer inside has failed to dial this one."""
        return now - self._outside_at > ALONE_SECONDS and not self.is_shut(now)

    def confirmed(self, now: float) -> list[Multiaddr]:
        """The addresses of this peer that are known to work from outside."""
        every = dict.fromkeys([*self.announcement, *self.own, *self._offers()])
        return [address for address in every if self.standing(now, address) is AddressStatus.CONFIRMED]

    def conclude(self, now: float, *, is_reserved: bool) -> Reachability:
        """The state of this peer now.

        Args:
            is_reserved: whether a relay holds a reservation for it.
        """
        if is_reserved:
            self._reserved_at = now
        confirmed = self.confirmed(now) if self.forced is None else []
        former, self._has_confirmed = self._has_confirmed, bool(confirmed)
        if not former and any(address in self._records for address in confirmed):
            self._public_at = now
        self.state = self._concluded(now)
        return self.state

    def _concluded(self, now: float) -> Reachability:
        if self.forced is not None:
            if self.forced:
                return Reachability.PUBLIC
        elif self._has_confirmed or self.is_alone(now) or now - self._public_at < HOLD_SECONDS:
            return Reachability.PUBLIC
        if now - self._reserved_at < HOLD_SECONDS:
            return Reachability.RELAYED
        is_open = self.forced is None and not self._is_judged and not self.is_shut(now)
        return Reachability.UNKNOWN if is_open else Reachability.CLIENT

    def announced(self, now: float, circuits: Iterable[Multiaddr], most: int) -> list[Multiaddr]:
        """The addresses to tell others, the best first: confirmed global ones, private ones, circuits.

        Before the first verdict all addresses of this machine are told, because witnesses must know what to dial.
        """
        if self.announcement:
            direct = list(self.announcement)
        elif self.is_alone(now):
            direct = list(self.own)
        else:
            good = set(self.confirmed(now))
            if self.forced or self.state is Reachability.UNKNOWN:
                good.update(self.own, self._offers() if self.forced else ())
            far = [address for address in [*self.own, *self._offers()] if is_global(address) and address in good]
            near = [address for address in self.own if not is_global(address)]
            direct = [*sorted(far, key=is_ipv6, reverse=True), *near]
        behind = [] if self.state is Reachability.PUBLIC else list(circuits)[:most]
        return [*direct[: most - len(behind)], *behind]


class Contacts:
    """Remembers the peers that were connected most recently, and which of those outside are connected now."""

    def __init__(self) -> None:
        self._outside: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._had_several = False
        # By peer: its host, and whether it is outside; the latest last.
        self._places: Bounded[PeerID, tuple[str, bool]] = Bounded(256)

    def __len__(self) -> int:
        return len(self._places)

    def note(self, stream: Stream, address: Multiaddr, *, is_outside: bool) -> None:
        """A connection with a peer at this address was made."""
        peer = stream.remote
        if is_outside:
            self._outside.add(stream)
        self._places[peer] = network_of(address) or str(peer), is_outside

    def look_outside(self) -> tuple[bool, bool]:
        """Whether any peer outside is connected, and whether all of several have gone since the last look."""
        alive = [stream for stream in self._outside if not stream.closed]
        have_all_gone = not alive and self._had_several
        self._had_several = len({stream.remote for stream in alive}) > 1
        return bool(alive), have_all_gone

    def place_of(self, peer: PeerID) -> tuple[str, bool]:
        """The host of a peer, which is the same for all peers of one network, and whether it is outside."""
        return self._places.get(peer, ("", False))

    def draw(self, rng: random.Random, count: int, is_usable: Callable[[PeerID], bool]) -> list[PeerID]:
        """A random choice of them."""
        usable = [peer for peer in self._places if is_usable(peer)]
        return rng.sample(usable, min(count, len(usable)))

    def num_hosts(self, is_usable: Callable[[PeerID], bool]) -> int:
        """The number of hosts outside; if there are none, the number of hosts inside."""
        return len(self._by_host(is_usable)[0])

    def witnesses(
        self, rng: random.Random, count: int, is_usable: Callable[[PeerID], bool]
    ) -> tuple[list[PeerID], bool]:
        """Peers on different hosts, and whether they are outside. Peers inside only if none is outside."""
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
