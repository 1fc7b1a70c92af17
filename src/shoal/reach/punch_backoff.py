"""Which peers are worth another punch: what came of the last one decides."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shoal.peers.identity import PeerID

MAX_PEERS = 4096
FIRST_PAUSE = 120.0
"""Seconds without a punch after a failure."""
LONGEST_PAUSE = 3600.0
"""The pause doubles with each failure, up to this."""

Hosts = tuple[str, str]
"""Where a relay has seen this side and the other one."""


@dataclass(frozen=True)
class _PunchOutcome:
    hosts: Hosts
    pause: float = 0.0
    not_before: float = 0.0


class PunchPolicy:
    """Outcomes by peer; of many peers the latest.

    A failure says that these two routers do not let this through, which rarely changes. So punches are rare until one
    of the two sides, or the network of this machine, is another one.

    Args:
        now: a clock that never goes back, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._outcomes: OrderedDict[PeerID, _PunchOutcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outcomes)

    def allows(self, peer: PeerID) -> bool:
        """Whether to punch towards a peer."""
        last = self._outcomes.get(peer)
        return last is None or self._now() >= last.not_before

    def expects_success(self, peer: PeerID) -> bool:
        """Whether the last punch towards a peer has made a connection."""
        last = self._outcomes.get(peer)
        return last is not None and not last.pause

    def note_hosts(self, peer: PeerID, hosts: Hosts) -> None:
        """Forget the outcome if one of both sides is behind another router now."""
        last = self._outcomes.get(peer)
        if last is not None and any(map(_has_moved, last.hosts, hosts)):
            del self._outcomes[peer]

    def note_success(self, peer: PeerID, hosts: Hosts) -> None:
        """A punch has made a connection."""
        self._note(peer, _PunchOutcome(hosts))

    def note_failure(self, peer: PeerID, hosts: Hosts) -> None:
        """A punch has made none."""
        last = self._outcomes.get(peer)
        pause = FIRST_PAUSE if last is None or not last.pause else min(2 * last.pause, LONGEST_PAUSE)
        self._note(peer, _PunchOutcome(hosts, pause, self._now() + pause))

    def note_hopeless(self, peer: PeerID, hosts: Hosts) -> None:
        """The routers of both sides give each connection another port, so nobody can guess any."""
        self._note(peer, _PunchOutcome(hosts, FIRST_PAUSE, math.inf))

    def _note(self, peer: PeerID, outcome: _PunchOutcome) -> None:
        self._outcomes[peer] = outcome
        self._outcomes.move_to_end(peer)
        while len(self._outcomes) > MAX_PEERS:
            self._outcomes.popitem(last=False)

    def clear(self) -> None:
        """This machine is in another network: nothing of before holds."""
        self._outcomes.clear()


def _has_moved(before: str, now: str) -> bool:
    """Whether a host is another one. A machine is seen at an IPv4 or an IPv6 address, depending on how it has come."""
    return before != now and (":" in before) == (":" in now)
