"""What an averager remembers from one search to the next: former members, and the peers that it refuses.

*Former members.* A node near a key of the table may hide the records under that key. So a peer that looks for a group
and misses members calls some of the peers with which it averaged in the last minutes. It invites them, as it does with
peers from the table. A peer that cannot lead asks them to lead it instead. A few calls are enough: an early invitation
is remembered, and a peer that is called names the leader that it follows. Peers that change their bucket after each
round do not do this: their last companions look in other buckets, and no node can hide all of those.

*Refusals.* A peer that has sent values that are not finite is refused for a while. Honest peers check their values
before they send them, so this never hits them. A peer that has misbehaved towards this one is refused for
``SEEN_SEARCHES`` searches; then it may show that it has been repaired. A peer that others accuse is refused for one
search. Accusations are ignored if they hit half of the group or more; otherwise one liar could scatter the swarm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.averaging.control import AveragingMode, GroupInfo
from shoal.averaging.messages import Invitation
from shoal.base.bounded import Bounded
from shoal.base.clock import get_dht_time
from shoal.p2p import PeerID

# For this many seconds a former member is called although the table does not list it. Chosen: a tracker, too, forgets
# a peer after this time.
REMEMBERED_SECONDS = 600.0
# The members of four rounds of 256 peers (chosen). They take less than 200 kB.
MAX_REMEMBERED = 1024

# The number of searches for which a peer is refused. Chosen. If it sent bad values to this peer: long enough for its
# user to see the warning and update it. If only others accuse it: one, after which they must accuse it again.
SEEN_SEARCHES, TOLD_SEARCHES = 10, 1
# The most refused peers that are remembered (chosen: a full group of the usual size).
MAX_REFUSED_PEERS = 256
# Why a peer is refused, in words for its user.
NOT_FINITE = (
    "in a round it sent values that are NaN or infinite, which peers leave out before they send. Update it, or look at "
    "its machine. It is taken again after some rounds"
)
UNTRUE = (
    "in a round it sent other values than it had announced. Its machine may be broken. It is taken again after some "
    "rounds"
)
NO_GROUP = "it announced a group that cannot be. Update it, or look at its machine"
TOO_SLOW = (
    "several rounds ended without a result because it sent too slowly. Give all peers a larger allreduce_timeout, a "
    "codec, or fewer bytes per round. It is taken again after a while"
)


class FormerMembers(Bounded[PeerID, Invitation | None]):
    """Members of recent groups of one averager (or of one of its tags) that can be called.

    The value is the invitation that the member sent while this peer was not looking for a group.
    """

    def __init__(self) -> None:
        super().__init__(MAX_REMEMBERED, seconds=REMEMBERED_SECONDS, now=get_dht_time)

    def note_round(self, group: GroupInfo, failed: Collection[PeerID], own: PeerID) -> None:
        """Note the members of a round that has ended, except those that failed."""
        for peer, mode in zip(group.peer_ids, group.modes, strict=True):
            if mode != AveragingMode.CLIENT and peer not in failed and peer != own:
                self[peer] = self.get(peer)

    def note_invitation(self, peer: PeerID, invitation: Invitation) -> None:
        """Remember an invitation that came while this peer was not looking for a group under its key."""
        if peer in self:
            self[peer] = invitation

    def take_invitations(self, key: str, now: float) -> list[tuple[PeerID, float]]:
        """The peers whose early invitations are still valid, with their promises."""
        held = [(peer, each) for peer, each in self.items() if each is not None]
        self.update({peer: None for peer, _ in held})
        return [(peer, i.expiration) for peer, i in held if i.group_key == key and i.expiration > now]


@dataclass
class RefusedPeer:
    """Why a peer is refused, and for how long."""

    reason: str
    """In words for its user."""
    counts: bool = True
    """Others count it as an expected member. False for auxiliaries."""
    searches: int = 1
    """The number of searches in which it is still refused."""


class Refusals(Bounded[PeerID, RefusedPeer]):
    """The peers that one averager refuses, or one of its tags."""

    def __init__(self) -> None:
        super().__init__(MAX_REFUSED_PEERS)

    def note(
        self,
        seen: Collection[PeerID],
        told: Collection[PeerID],
        group: Collection[PeerID],
        aux: Collection[PeerID],
        reason: str = NOT_FINITE,
    ) -> list[PeerID]:
        """Note members of a round that have sent bad values.

        Args:
            seen: members that have sent this peer bad values.
            told: members that others accuse of the same.
            group: all members.
            aux: the auxiliaries among them.
            reason: the reason that they get when they are refused.

        Returns:
            The members that are refused from now on and were not before.
        """
        believed = [peer for peer in group if peer in told and peer not in seen]
        if 2 * (len(seen) + len(believed)) >= len(group):
            believed = []
        accused = {**dict.fromkeys(believed, TOLD_SEARCHES), **dict.fromkeys(seen, SEEN_SEARCHES)}
        news = [peer for peer in group if peer in accused and peer not in self]
        for peer, searches in accused.items():
            known = self.get(peer)
            self[peer] = RefusedPeer(reason, peer not in aux, max(searches, 0 if known is None else known.searches))
        return news

    def next_search(self) -> Mapping[PeerID, RefusedPeer]:
        """The peers to refuse in the search that starts now."""
        refused = {peer: each for peer, each in self.items() if each.searches > 0}
        for peer in [peer for peer in self if peer not in refused]:
            del self[peer]
        for each in self.values():
            each.searches -= 1
        return refused
