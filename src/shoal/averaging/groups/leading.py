"""Leading a group: which peers to invite, which to refuse, and what the leader announces in the end.

*Invitations.* A peer that may lead calls peers that may follow it, and they join on that very call. So the peer that
sees the other first makes the connection: two peers meet if only one of them sees the other, and if only one of them
can connect to the other. A peer that declines names the leader that it follows instead, so groups that form at the same
time find each other.

*Refusals.* A peer that has sent values that are not finite is refused for a while. Honest peers check their values
before they send them, so they never get here. What this peer has seen itself counts for ``SEEN_SEARCHES`` searches;
then the other one may show that it has been repaired. What others say counts for one search, and not at all if half of
the group or more would be accused. Otherwise one liar could scatter the swarm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.averaging.control import GROUP_ID_BYTES, AveragingMode, GroupInfo
from shoal.averaging.groups.candidates import MAX_GROUP_SIZE, Follower, GroupSearch, Offer, Trust
from shoal.averaging.messages import (
    CALL_FAILURES,
    Code,
    GroupStart,
    Invitation,
    InvitationReply,
    JoinReply,
    JoinRequest,
    Member,
    PeerRecord,
)
from shoal.averaging.round.parts import load_balance_peers, rescale_shares
from shoal.base.clock import get_dht_time
from shoal.base.logs import quoted
from shoal.errors import ProtocolError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, Call, PeerID, StubBase
from shoal.reach.reachability import Reach

logger = logging.getLogger(__name__)

# What a member behind a narrow relay reduces, in parts of what it would reduce otherwise.
NARROW_SHARE = 0.25

# Why a peer is refused, for its user to read.
NOT_FINITE = (
    "in a round it sent values that are NaN or infinite, which peers leave out before they send. Update it, or look at "
    "its machine. It is taken again after some rounds"
)
UNTRUE = (
    "in a round it sent other values than it had announced. Its machine may be broken. It is taken again after some "
    "rounds"
)
TOO_SLOW = (
    "several rounds ended without a result because it sent too slowly. Give all peers a larger allreduce_timeout, a "
    "codec, or fewer bytes per round. It is taken again after a while"
)
# The description of a group must fit into one message.
MAX_GROUP_BYTES = 3 * 2**18
# The bytes that a member takes in it besides its addresses and its gathered value.
_MEMBER_BYTES = 100
# A member of the group has so many seconds to end a call of an invitation that is not needed any more.
MEMBER_PATIENCE = 1.0

AnswerJoin = Callable[[Call, JoinRequest, PeerID], Awaitable[None]]


def record_of(p2p: P2P, peer: PeerID) -> PeerRecord:
    """A peer and the addresses under which others can dial it."""
    return PeerRecord(peer_id=peer.to_bytes(), addresses=[str(address) for address in p2p.get_addresses(peer)])


def learn(p2p: P2P, record: PeerRecord) -> PeerID:
    """Learn the addresses of a peer from a record, and return the peer.

    Raises:
        ProtocolError: an address is malformed.
    """
    peer = PeerID(record.peer_id)
    if peer != p2p.peer_id:
        try:
            p2p.add_addresses(peer, record.addresses[:MAX_ADDRESSES_PER_PEER])
        except ValueError as e:
            raise ProtocolError(f"an address of {peer} makes no sense: {e}") from None
    return peer


@dataclass(frozen=True)
class StartedGroup:
    """A group that this peer has started, and the requests of its followers."""

    start: GroupStart
    requests: dict[PeerID, JoinRequest]

    def is_for(self, peer: PeerID, request: JoinRequest) -> bool:
        """Whether a peer was in it with this request, and does not begin another search."""
        known = self.requests.get(peer)
        return known is not None and (known.expiration, known.search) == (request.expiration, request.search)


def follower_of(p2p: P2P, peer: PeerID, request: JoinRequest, trust: Trust) -> Follower:
    """The entry for a peer that asks to join."""
    size, is_proven = _bytes_of_member(p2p, peer, request), trust.is_proven is None or trust.is_proven(peer)
    return Follower(request, asyncio.get_running_loop().create_future(), request.expected_group_size, size, is_proven)


def _bytes_of_member(p2p: P2P, peer: PeerID, request: JoinRequest) -> int:
    return _MEMBER_BYTES + len(request.gathered) + sum(len(str(address)) for address in p2p.get_addresses(peer))


def is_full(search: GroupSearch, p2p: P2P, peer: PeerID, request: JoinRequest) -> bool:
    """Whether the group has no room for this peer, by its number of members or by the size of its description."""
    if not search.has_time_for(peer):
        return True
    if 1 + len(search.followers) >= (search.settings.target_group_size or MAX_GROUP_SIZE):
        return True
    return search.group_bytes + _bytes_of_member(p2p, peer, request) > MAX_GROUP_BYTES


def take_back_lost(search: GroupSearch, p2p: P2P) -> None:
    """Make followers whose connections have just broken members, as far as there is still room: they may return."""
    for peer, (lost_at, follower) in search.lost.items():
        may_return = lost_at + search.return_seconds > get_dht_time()
        if may_return and not is_full(search, p2p, peer, follower.request):
            search.followers[peer] = follower


def describe_group(p2p: P2P, search: GroupSearch) -> GroupStart:
    """The description of the group that a leader announces. It decides order, modes and shares for all members."""
    own = search.settings
    links = {p2p.peer_id: (int(own.reach), own.relay_rate)}
    entries = [(p2p.peer_id, int(own.mode), own.bandwidth, search.control.data_for_gather)]
    for peer, follower in search.followers.items():
        request = follower.request
        # A new peer could claim any bandwidth, so it reduces nothing yet. Auxiliaries may, because it is all they do.
        links[peer] = request.reach, request.relay_rate
        is_trusted = follower.is_proven or request.mode == AveragingMode.AUX
        entries.append((peer, request.mode, request.bandwidth if is_trusted else 0.0, request.gathered))
    # The first member becomes the coordinator, and positions decide the next buckets. So the order is left to chance,
    # but those that are not fit to lead come last.
    p2p.rng.shuffle(entries)
    entries.sort(key=lambda entry: not p2p.behaviour.may_lead(entry[0]))
    wanted = [1.0 if peer == p2p.peer_id else p2p.behaviour.share_of(peer) for peer, *_ in entries]
    modes = [(mode, bandwidth) for _, mode, bandwidth, _ in entries]
    modes = spare_relays(modes, [links[peer] for peer, *_ in entries])
    shares = _split(own.total_size, modes, wanted, own.min_vector_size)
    members = [
        Member(peer=record_of(p2p, peer), mode=mode, share=share, gathered=gathered)
        for (peer, mode, _, gathered), share in zip(entries, shares, strict=True)
    ]
    return GroupStart(group_id=p2p.rng.randbytes(GROUP_ID_BYTES), members=members)


def read_group(
    p2p: P2P, start: GroupStart, total_size: int, trust: Trust | None = None, leader: PeerID | None = None
) -> GroupInfo:
    """Check the group that a leader has announced, and learn the addresses of its members.

    Args:
        p2p: this peer.
        start: the leader's announcement.
        total_size: number of values in the averaged vector.
        trust: limits the weights of members.
        leader: who has announced it, if not this peer.

    Raises:
        ProtocolError: the announcement is not valid.
    """
    peers = tuple(PeerID(member.peer.peer_id) for member in start.members)
    if p2p.peer_id not in peers or len(set(peers)) != len(peers) or len(start.group_id) != GROUP_ID_BYTES:
        raise ProtocolError("the leader published a group without this peer, with duplicates, or without a valid id")
    if leader is not None and leader not in peers:
        raise ProtocolError("it leads a group in which it is not itself")
    shares = tuple(member.share for member in start.members)
    modes = tuple(member.mode for member in start.members)
    useless = any(member.share and member.mode == AveragingMode.CLIENT for member in start.members)
    if sum(shares) != total_size or useless:
        raise ProtocolError(f"the leader published shares {quoted(list(shares))} for a vector of {total_size} values")
    for member in start.members:
        learn(p2p, member.peer)
    limit = None if trust is None else trust.largest_weight
    limits = () if limit is None else tuple(map(limit, peers))
    gathered = tuple(member.gathered for member in start.members)
    return GroupInfo(start.group_id, peers, gathered, modes, shares, limits, leader)


def note_lead(
    p2p: P2P, search: GroupSearch, leader: PeerID, reply: JoinReply, promised: float, accepted_at: float
) -> None:
    """Remember whether a leader has started the group as promised.

    Args:
        p2p: this peer.
        search: the search that followed the leader.
        leader: that leader.
        reply: its last answer.
        promised: DHT time at which it had to start at the latest.
        accepted_at: DHT time at which it accepted this peer.
    """
    now, has_started = get_dht_time(), reply.code == Code.GROUP_STARTS
    lost = search.seconds_lost(accepted_at)
    # With this peer it has a group of two, and may still wait for a third one that never comes.
    breaks_promise = now >= promised and search.settings.min_group_size <= 2 and reply.better_leader is None
    if has_started or (breaks_promise and lost > 0):
        p2p.behaviour.note_lead(leader, lost, started=has_started)


def spare_relays(
    members: Sequence[tuple[int, float | None]], links: Sequence[tuple[int, float]]
) -> list[tuple[int, float | None]]:
    """Let members reduce little whose way to other private members leads through a relay with a limit.

    Args:
        members: the mode and bandwidth of each member.
        links: how others call it, and the rate of its relays.
    """
    num_private = sum(reach in (Reach.EASY, Reach.HARD) for reach, _ in links)
    narrow = [
        bandwidth is None and reach == Reach.HARD and rate > 0 and num_private > 1
        for (_, bandwidth), (reach, rate) in zip(members, links, strict=True)
    ]
    if not any(narrow):
        return list(members)
    known = [bandwidth for mode, bandwidth in members if bandwidth and mode != AveragingMode.CLIENT]
    mean = sum(known) / len(known) if known else 1.0
    usual = [(mode, mean if bandwidth is None else bandwidth) for mode, bandwidth in members]
    return [
        (mode, bandwidth * NARROW_SHARE if is_narrow else bandwidth)
        for (mode, bandwidth), is_narrow in zip(usual, narrow, strict=True)
    ]


def _split(
    total_size: int, members: Sequence[tuple[int, float | None]], wanted: Sequence[float], min_size: int
) -> tuple[int, ...]:
    """The number of values that each member reduces.

    Args:
        total_size: number of values in the averaged vector.
        members: the mode and bandwidth of each member.
        wanted: for each member, the fraction of its usual share that it gets, see :mod:`shoal.peers.scores`.
        min_size: a member that would get fewer values gets none.
    """
    able = [0.0 if mode == AveragingMode.CLIENT else bandwidth for mode, bandwidth in members]
    # If all members ask to be spared, somebody still has to reduce: split evenly.
    if not any(bandwidth is None or bandwidth > 0 for bandwidth in able):
        able = [0.0 if mode == AveragingMode.CLIENT else None for mode, _ in members]
    welcome = [bandwidth if part else 0.0 for bandwidth, part in zip(able, wanted, strict=True)]
    # If only members that have failed before can reduce, they are tried again.
    if not any(bandwidth is None or bandwidth > 0 for bandwidth in welcome):
        return load_balance_peers(total_size, able, min_size)
    shares = load_balance_peers(total_size, welcome, min_size)
    trusted = [share if part == 1 else 0 for share, part in zip(shares, wanted, strict=True)]
    if trusted == list(shares) or not any(trusted):
        return shares
    # Members with a full share take over what members that have failed lose.
    kept = [int(part * share) for share, part in zip(shares, wanted, strict=True)]
    more = rescale_shares(trusted, total_size - sum(kept))
    return tuple(map(sum, zip(kept, more, strict=True)))


async def receive_answer(call: Call) -> JoinReply:
    """Wait for the next answer of a leader.

    Raises:
        ProtocolError: the leader has ended the call without one.
    """
    reply = await call.receive(JoinReply)
    if reply is None:
        raise ProtocolError("the leader ended without an answer")
    return reply


class Invitations:
    """Invites other peers, and holds the invitations of others.

    Args:
        p2p: this peer.
        get_stub: makes a stub of the averager protocol.
        answer_join: answers a request to join, on whichever call it comes.
    """

    def __init__(self, p2p: P2P, get_stub: Callable[[PeerID], StubBase], answer_join: AnswerJoin) -> None:
        self._p2p, self._get_stub, self._answer_join = p2p, get_stub, answer_join
        # A dictionary used as an ordered set: the order of cancellation is the same in every run of a simulation.
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Calls of invitations that are not over, including those on which followers have joined."""
        return list(self._tasks)

    def invite_followers(self, search: GroupSearch) -> None:
        """Invite all peers that should follow this one and have not joined, as far as there is room."""
        for peer in search.whom_to_invite():
            self.invite(search, peer)

    def invite(self, search: GroupSearch, peer: PeerID, *, is_seen: bool = True) -> None:
        """Invite a peer.

        Args:
            search: the search in progress.
            peer: the peer to call.
            is_seen: whether the peer is known to look for a group.
        """
        task = asyncio.ensure_future(self._invite(search, peer))
        search.note_invitation(peer, task, is_seen=is_seen)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _invite(self, search: GroupSearch, peer: PeerID) -> None:
        try:
            async with self._get_stub(peer).rpc_invite() as call:
                await call.send(Invitation(group_key=search.key, expiration=search.expiration), end=False)
                reply = await call.receive(InvitationReply)
                search.end_invitation(peer)
                if reply is not None and reply.request is not None:
                    await self._let_in(call, reply.request)
                else:
                    await call.send_end()
                    self._take_refusal(search, reply)
        except CALL_FAILURES as e:
            logger.debug("could not invite %s: %r", peer, e)
            if peer in search.candidates:
                promised, company = search.candidates[peer], search.key.partition(".")[0]
                self._p2p.note_uncalled(peer, e, company=company, sign_of_life=promised)
            search.allow_invitation(peer)
        finally:
            search.end_invitation(peer)
            search.control.changed.set()

    async def _let_in(self, call: Call, request: JoinRequest) -> None:
        """Answer an invited peer that joins. It leaves when its connection ends, like a peer that has called itself."""
        me = asyncio.current_task()
        assert me is not None
        # A served call ends its handler when the connection closes. This call is our own, so that is done here.
        call.connection.stream.on_closed(me.cancel)
        try:
            await self._answer_join(call, request, call.remote)
            await call.drain()
        finally:
            call.connection.stream.on_closed(None)

    def _take_refusal(self, search: GroupSearch, reply: InvitationReply | None) -> None:
        if reply is not None and reply.better_leader is not None:
            leader = learn(self._p2p, reply.better_leader)
            if leader != self._p2p.peer_id:
                search.note_candidate(leader, reply.expiration)

    async def hold(self, search: GroupSearch, call: Call, invitation: Invitation) -> None:
        """Hold the call of a peer that offers to lead, until this peer joins on it or follows another leader."""
        offer = Offer(call, asyncio.get_running_loop().create_future())
        search.add_offer(call.remote, offer, invitation.expiration)
        try:
            better = await offer.outcome
            if better is not None:
                leader, expiration = better
                reply = InvitationReply(better_leader=record_of(self._p2p, leader), expiration=expiration)
                await call.send(reply, end=True)
        finally:
            if search.offers.get(call.remote) is offer:
                del search.offers[call.remote]

    @staticmethod
    def end(search: GroupSearch) -> None:
        """End all invitations, because the search is over.

        Members of the group have ended their searches, too, and end these calls themselves. They get a moment for that:
        cutting a call cuts its connection, and the round would need a new one.
        """
        members = search.group.result().peer_ids if search.group.done() and not search.group.cancelled() else ()
        for peer, task in [*search.pending.items(), *search.unseen.items()]:
            if peer in members:
                asyncio.get_running_loop().call_later(MEMBER_PATIENCE, task.cancel)
            else:
                task.cancel()
        for offer in list(search.offers.values()):
            if not offer.is_used:
                offer.close(None)


# A peer is refused for so many searches if it has sent bad values to this peer, or if others accuse it.
SEEN_SEARCHES = 10
TOLD_SEARCHES = 1
# The most refused peers that are remembered; the one that was refused first is forgotten first.
MAX_REFUSED_PEERS = 256


class Refusals:
    """The memory of one averager, or of one of its tags."""

    def __init__(self) -> None:
        self.left: dict[PeerID, int] = {}
        """By peer: the number of further searches in which it is refused."""
        self._reasons: dict[PeerID, str] = {}
        self._auxiliaries: set[PeerID] = set()

    def __len__(self) -> int:
        return len(self.left)

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
            reason: what they are told when they are refused.

        Returns:
            The members that are refused from now on and were not before.
        """
        others = [peer for peer in group if peer not in seen]
        believed = [peer for peer in others if peer in told]
        if 2 * (len(seen) + len(believed)) >= len(group):
            believed = []
        accused = {**dict.fromkeys(believed, TOLD_SEARCHES), **dict.fromkeys(seen, SEEN_SEARCHES)}
        news = [peer for peer in group if peer in accused and peer not in self.left]
        for peer, searches in accused.items():
            self.left[peer] = max(searches, self.left.pop(peer, 0))
            self._reasons.pop(peer, None)
            self._reasons[peer] = reason
        self._auxiliaries.update(peer for peer in accused if peer in aux)
        while len(self.left) > MAX_REFUSED_PEERS:
            del self.left[next(iter(self.left))]
        while len(self._reasons) > MAX_REFUSED_PEERS:
            del self._reasons[next(iter(self._reasons))]
        self._auxiliaries &= self.left.keys()
        return news

    def reason_of(self, peer: PeerID) -> str:
        """Why a peer is refused: for the values that it sent, or because it is too slow."""
        return self._reasons.get(peer, TOO_SLOW)

    def next_search(self) -> Mapping[PeerID, bool]:
        """The peers to refuse in the search that begins now. By peer: whether others count it as an expected member.

        Auxiliaries are not counted among the expected members.
        """
        refused = {peer: peer not in self._auxiliaries for peer in self.left}
        self.left = {peer: left - 1 for peer, left in self.left.items() if left > 1}
        self._auxiliaries &= self.left.keys()
        return refused
