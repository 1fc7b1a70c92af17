"""Which peers are worth another punch: what came of the last one decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.base.backoff import Backoff
from shoal.base.bounded import Bounded
from shoal.peers.identity import PeerID

MAX_PEERS = 4096
FIRST_PAUSE = 120.0
"""Seconds without a punch after a failure."""
LONGEST_PAUSE = 3600.0
"""The pause doubles with each failure, up to this."""

Hosts = tuple[str, str]
"""Where a relay has seen this side and the other one."""


@dataclass
class _PunchOutcome:
    hosts: Hosts
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE))


class PunchPolicy:
    """Outcomes by peer; of many peers the latest.

    A failure says that these two routers do not let this through, which rarely changes. So punches are rare until one
    of the two sides, or the network of this machine, is another one.

    Args:
        now: a clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._outcomes: Bounded[PeerID, _PunchOutcome] = Bounded(MAX_PEERS)

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
        """Forget the outcome if one of both sides is behind another router now."""
        last = self._outcomes.get(peer)
        if last is not None and any(map(_has_moved, last.hosts, hosts)):
            del self._outcomes[peer]

    def note_success(self, peer: PeerID, hosts: Hosts) -> None:
        """A punch has made a connection."""
        self._outcomes[peer] = _PunchOutcome(hosts)

    def note_failure(self, peer: PeerID, hosts: Hosts) -> None:
        """A punch has made none."""
        last = self._outcomes.get(peer)
        outcome = self._outcomes[peer] = _PunchOutcome(hosts)
        if last is not None:
            outcome.backoff.failures = last.backoff.failures
        outcome.backoff.fail(self._now())

    def note_hopeless(self, peer: PeerID, hosts: Hosts) -> None:
        """The routers of both sides give each connection another port, so nobody can guess any."""
        self._outcomes[peer] = _PunchOutcome(
            hosts, Backoff(FIRST_PAUSE, LONGEST_PAUSE, failures=1, rests_until=math.inf)
        )

    def clear(self) -> None:
        """This machine is in another network: nothing of before holds."""
        self._outcomes.clear()


def _has_moved(before: str, now: str) -> bool:
    """Whether a host is another one. A machine is seen at an IPv4 or an IPv6 address, depending on how it has come."""
    return before != now and (":" in before) == (":" in now)
