"""Members of recent groups, who are asked directly: the table is for those who do not know each other yet.

A node near a key of the table may hide the records under that key. So a peer that looks for a group and misses others
calls some of the peers with which it averaged in the last minutes. It invites them, as it does with peers from the
table. A peer that cannot lead asks them to lead it instead. A few calls are enough: an invitation that comes too early
is remembered, and a peer that is called names the leader that it follows.

Peers that change their bucket after each round do not do this. Their last companions look in other buckets, and nobody
can hide all of the buckets.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.averaging.control import AveragingMode, GroupInfo
from shoal.averaging.groups.candidates import GroupSearch
from shoal.averaging.groups.leading import Invitations
from shoal.averaging.messages import Invitation
from shoal.base.clock import get_dht_time
from shoal.p2p import P2P, PeerID

# A search relies on the table alone for so many seconds.
SECONDS_FOR_TABLE = 1.0
# For so many seconds a peer is called without having been seen in the table.
REMEMBERED_SECONDS = 600.0

MAX_REMEMBERED = 1024
# So many are asked at a time.
ASKED_AT_ONCE = 4
# A peer that cannot lead asks an acquaintance without knowing when that one starts. It supposes so many seconds from
# now, and asks again after that.
SUPPOSED_SECONDS = 2.0


class FormerMembers:
    """The memory of one averager, or of one of its tags."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        # By peer: when it was last in a round with this one, the latest at the end. Only peers that can be called.
        self.met: dict[PeerID, float] = {}
        # By peer: its invitation, which came while this peer did not look for a group yet.
        self._invitations: dict[PeerID, Invitation] = {}

    def __len__(self) -> int:
        return len(self.met)

    def note_round(self, group: GroupInfo, failed: Collection[PeerID]) -> None:
        """Note the members of a round that has ended, except those that failed."""
        now = get_dht_time()
        for peer, mode in zip(group.peer_ids, group.modes, strict=True):
            if mode != AveragingMode.CLIENT and peer not in failed and peer != self._p2p.peer_id:
                self.met.pop(peer, None)
                self.met[peer] = now
        while len(self.met) > MAX_REMEMBERED:
            longest_ago = next(iter(self.met))
            del self.met[longest_ago]
            self._invitations.pop(longest_ago, None)

    def note_invitation(self, peer: PeerID, invitation: Invitation) -> None:
        """Remember an invitation that has come while this peer does not look for a group under its key."""
        if peer in self.met:
            self._invitations[peer] = invitation

    def tell_invitations(self, search: GroupSearch) -> None:
        """Tell a new search of the peers whose early invitations still hold."""
        for peer, invitation in self._invitations.items():
            if invitation.group_key == search.key and invitation.expiration > get_dht_time():
                search.note_candidate(peer, invitation.expiration)
        self._invitations.clear()

    def ask(self, search: GroupSearch, invitations: Invitations) -> None:
        """Call some acquaintances that this search has not seen, if the search still misses members."""
        now = get_dht_time()
        # A table that shows some peers is more likely to be sound, so it gets more time.
        patience = SECONDS_FOR_TABLE * (2 if search.candidates else 1)
        if now < search.began_at + patience or search.leader is not None or search.has_seen_enough():
            return
        # A peer that cannot lead asks one peer at a time, and those that are known to look come first.
        if not search.settings.leads and search.best_candidate() is not None:
            return
        unseen = [
            peer
            for peer, met_at in self.met.items()
            if met_at + REMEMBERED_SECONDS > now and search.may_ask_unseen(peer)
        ]
        for peer in self._p2p.rng.sample(unseen, min(len(unseen), ASKED_AT_ONCE)):
            if search.settings.leads:
                invitations.invite(search, peer, is_seen=False)
            else:
                search.suppose_candidate(peer, now + SUPPOSED_SECONDS)
