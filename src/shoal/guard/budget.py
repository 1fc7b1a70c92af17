"""One budget for the time that this peer loses to others: a share of all its time.

Five things are paid from it: waiting for unproven peers that do not show up; groups that such peers stall; epochs that
end early because of their claims, so that no peer comes to the round; a member that others wait for longer than it is
worth; and the time that a lone peer waits for newcomers that download its state.

A peer that has cost time pauses until its cost is at most the share of the time since. The unproven peers of a host
have one account together. If several such hosts have to pause, all unproven peers do; otherwise an attacker with many
hosts could cost any amount of time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple

from shoal.base.bounded import Bounded, K
from shoal.peers.book import SHARE_WASTED

LONGEST_HOLD = 30.0
"""The longest wait of a lone peer at a time, in seconds (chosen: a slow download). It starts with this much saved."""

LEAST_HOLD = 2.0
"""With fewer seconds than this left, a lone peer does not start to wait (chosen): few newcomers would make it."""

# If this many hosts of strangers have to pause, all strangers do (chosen).
_HOSTS_TO_STOP_ALL = 2


class _Pause(NamedTuple):
    until: float
    """Until then this peer does not wait for the other one, and its samples do not count."""
    joins_at: float
    """Until then it may not join or lead a group."""


def check_share(share: float) -> float:
    """Check the option ``waiting_share``, and return it.

    Raises:
        ValueError: it is no share.
    """
    if not 0 < share < 1:
        raise ValueError(f"waiting_share must be a share of the time between 0 and 1, such as 0.05: got {share!r}")
    return share


class Budget:
    """The time that one peer may lose. Times are seconds of any clock. Not thread-safe: its owner locks it.

    Args:
        host_of: the host of a peer.
        now: when this peer began.
        share: the share of all time that it may lose.
    """

    def __init__(self, host_of: Callable[[bytes], Hashable], now: float, share: float = SHARE_WASTED) -> None:
        self.share = share
        self._host_of = host_of
        # By host of unproven peers, and by id of a member.
        self._hosts: dict[Hashable, _Pause] = {}
        self._members: dict[bytes, _Pause] = {}
        # The seconds left for a lone donor, and when they were counted; and since when it waits.
        self._saved, self._since = LONGEST_HOLD, now
        self._held_since: float | None = None

    # --- what others cost ---------------------------------------------------------------------------------------------

    def charge(self, peers: Collection[bytes], seconds: float, now: float, *, bars: bool) -> None:
        """Charge unproven peers with ``seconds`` that they have cost together.

        Args:
            bars: they have cost it inside a group, so they may not join one either.
        """
        hosts = self._not_over(self._hosts, now)
        for host in dict.fromkeys(map(self._host_of, peers)):
            hosts[host] = self._extend(hosts.get(host), seconds, now, bars=bars)
        self._hosts = dict(hosts)  # in one go: the event loop may be reading the dictionary without a lock

    def charge_member(self, peer: bytes, seconds: float, now: float) -> None:
        """Charge a member with ``seconds`` that the others need not have lost."""
        members = self._not_over(self._members, now)
        members[peer] = self._extend(members.get(peer), seconds, now, bars=True)
        self._members = dict(members)

    def _not_over(self, pauses: Mapping[K, _Pause], now: float) -> Bounded[K, _Pause]:
        found = Bounded[K, _Pause]()
        found.update({each: pause for each, pause in pauses.items() if pause.until > now})
        return found

    def _extend(self, pause: _Pause | None, seconds: float, now: float, *, bars: bool) -> _Pause:
        until, joins_at = (now, now) if pause is None else pause
        until = max(now, until) + seconds / self.share
        return _Pause(until, until if bars else joins_at)

    def allows(self, peer: bytes, now: float, *, is_stranger: bool, joins: bool = False) -> bool:
        """Whether there is time for a peer.

        Args:
            is_stranger: the peer is unproven.
            joins: whether it wants to join or lead a group; otherwise, whether to wait for it.
        """
        until = 1 if joins else 0
        member = self._members.get(peer)
        if member is not None and member[until] > now:
            return False
        if not is_stranger:
            return True
        pausing = {host for host, pause in self._hosts.items() if pause[until] > now}
        return len(pausing) < _HOSTS_TO_STOP_ALL and self._host_of(peer) not in pausing

    # --- how long a lone donor waits ----------------------------------------------------------------------------------

    def holds(self, now: float, *, has_reason: bool) -> bool:
        """Whether a lone peer starts or continues to wait. Ask again after a moment, until the answer is no.

        Args:
            has_reason: a newcomer is downloading its state, and there is no other peer to train with.
        """
        if self._held_since is None:
            saved = min(LONGEST_HOLD, self._saved + self.share * (now - self._since))
            if not has_reason or saved < LEAST_HOLD:
                return False
            self._saved, self._held_since = saved, now
        left = self._saved - (now - self._held_since)
        if has_reason and left > 0:
            return True
        # It may be negative, because the caller asks only now and then.
        self._saved, self._since, self._held_since = left, now, None
        return False
