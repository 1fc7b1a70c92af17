"""Leading a group: whom to invite, whom to refuse, and what the leader publishes in the end.

Invitations: a peer that may lead calls those who may follow it, and they join on that very call.

Whoever sees the other first makes the connection, so that two peers meet if one of them sees the other, and if one of
them can connect to the other. Who declines tells whom it follows instead: so groups of one window find each other.

Refusals: with peers that have sent values that are not finite, this one does not average for a while. Whoever checks
its values before it sends them never gets here. What a peer has seen itself counts for ``SEEN_SEARCHES`` searches for a
group: then the other one may show that it has been mended. What it has only been told counts once, and not if half of
the others or more are accused: else one liar could scatter the swarm.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping

from shoal.averaging.allreduce.parts import load_balance_peers
from shoal.averaging.control import GROUP_ID_BYTES, AveragingMode, GroupInfo
from shoal.averaging.groups.candidates import MAX_GROUP_SIZE, Follower, Offer, Search, Trust
from shoal.averaging.messages import (
    CALL_FAILURES,
    GroupStart,
    Invitation,
    InvitationReply,
    JoinRequest,
    Member,
    PeerRecord,
)
from shoal.errors import ProtocolError
from shoal.p2p import P2P, Call, PeerID, StubBase
from shoal.p2p.addresses import MAX_ADDRESSES_PER_PEER

logger = logging.getLogger(__name__)

REFUSAL = (
    "it has sent values that are NaN or infinite in a round, although peers check theirs before. Is it of an older "
    "version, or its machine broken? It is taken again after some rounds"
)
# A group must fit into one message.
MAX_GROUP_BYTES = 3 * 2**18
# What a member takes there besides its addresses and what it gives.
_MEMBER_BYTES = 100
# What a request to join may name: a few more than any version has.
MAX_SETTINGS = 32
# Seconds in which a member of the group that has been found ends a call that is not needed any more.
MEMBER_PATIENCE = 1.0

AnswerJoin = Callable[[Call, JoinRequest, PeerID], Awaitable[None]]


def record_of(p2p: P2P, peer: PeerID) -> PeerRecord:
    """A peer and where it can be dialled, for others."""
    return PeerRecord(peer_id=peer.to_bytes(), addresses=[str(address) for address in p2p.get_addresses(peer)])


def learn(p2p: P2P, record: PeerRecord) -> PeerID:
    """A peer that somebody told of; it can be dialled from now on.

    Raises:
        ProtocolError: it cannot be dialled.
    """
    peer = PeerID(record.peer_id)
    if peer != p2p.peer_id:
        try:
            p2p.add_addresses(peer, record.addresses[:MAX_ADDRESSES_PER_PEER])
        except ValueError as e:
            raise ProtocolError(f"an address of {peer} makes no sense: {e}") from None
    return peer


def follower_of(p2p: P2P, peer: PeerID, request: JoinRequest, trust: Trust) -> Follower:
    """A peer that wants to be led."""
    size, is_proven = _bytes_of_member(p2p, peer, request), trust.is_proven is None or trust.is_proven(peer)
    return Follower(request, asyncio.get_running_loop().create_future(), request.expected_group_size, size, is_proven)


def _bytes_of_member(p2p: P2P, peer: PeerID, request: JoinRequest) -> int:
    return _MEMBER_BYTES + len(request.gathered) + sum(len(str(address)) for address in p2p.get_addresses(peer))


def is_full(search: Search, p2p: P2P, peer: PeerID, request: JoinRequest) -> bool:
    """Whether there is no room for one more peer, be it for their number or for the message that describes them."""
    if 1 + len(search.followers) >= (search.settings.target_group_size or MAX_GROUP_SIZE):
        return True
    return search.group_bytes + _bytes_of_member(p2p, peer, request) > MAX_GROUP_BYTES


def difference_of(own: dict[str, str], other: dict[str, str]) -> str:
    """Which settings differ, for both sides to read; empty if none does.

    What the other side has not named it is not told either: it may be somebody who only wants to know.
    """
    if len(other) > MAX_SETTINGS:
        return f"it names {len(other)} settings, more than there are"
    differences = [
        f"{name} is {own[name][:100]!r} there and {value[:100]!r} here"
        for name, value in sorted(other.items())
        if name in own and own[name] != value
    ]
    differences += [f"{name[:100]} is not known there" for name in sorted(other.keys() - own.keys())]
    if own.keys() - other.keys():
        differences.append("there are settings there that this peer does not have: is its shoal older?")
    return "; ".join(differences)


def describe_group(p2p: P2P, search: Search, trust: Trust) -> GroupStart:
    """What a leader publishes: order, modes and shares, so that nobody has to work them out for itself."""
    own = search.settings
    entries = [(p2p.peer_id, int(own.mode), own.bandwidth, search.control.data_for_gather)]
    for peer, follower in search.followers.items():
        request = follower.request
        entries.append((peer, request.mode, request.bandwidth, request.gathered))
    p2p.rng.shuffle(entries)
    shares = _split(own.total_size, [(mode, bandwidth) for _, mode, bandwidth, _ in entries], own.min_vector_size)
    limits = [
        trust.largest_weight(peer) if trust.largest_weight is not None and peer != p2p.peer_id else None
        for peer, *_ in entries
    ]
    members = [
        Member(peer=record_of(p2p, peer), mode=mode, share=share, gathered=gathered, largest_weight=limit)
        for (peer, mode, _, gathered), share, limit in zip(entries, shares, limits, strict=True)
    ]
    return GroupStart(group_id=p2p.rng.randbytes(GROUP_ID_BYTES), members=members)


def read_group(p2p: P2P, start: GroupStart, total_size: int) -> GroupInfo:
    """Check what a leader has published, and learn where its members are.

    Args:
        total_size: number of values in the averaged vector.

    Raises:
        ProtocolError: it cannot be right.
    """
    peers = tuple(PeerID(member.peer.peer_id) for member in start.members)
    if p2p.peer_id not in peers or len(set(peers)) != len(peers) or len(start.group_id) != GROUP_ID_BYTES:
        raise ProtocolError("the leader published a group without this peer, with duplicates, or without a valid id")
    shares = tuple(member.share for member in start.members)
    modes = tuple(member.mode for member in start.members)
    useless = any(member.share and member.mode == AveragingMode.CLIENT for member in start.members)
    if sum(shares) != total_size or useless:
        raise ProtocolError(f"the leader published shares {list(shares)} for a vector of {total_size} values")
    for member in start.members:
        learn(p2p, member.peer)
    limits = tuple(math.inf if m.largest_weight is None else m.largest_weight for m in start.members)
    return GroupInfo(start.group_id, peers, tuple(m.gathered for m in start.members), modes, shares, limits)


def _split(total_size: int, members: list[tuple[int, float | None]], min_size: int) -> tuple[int, ...]:
    able = [0.0 if mode == AveragingMode.CLIENT else bandwidth for mode, bandwidth in members]
    # All want to be spared: share it evenly.
    if not any(bandwidth is None or bandwidth > 0 for bandwidth in able):
        able = [0.0 if mode == AveragingMode.CLIENT else None for mode, _ in members]
    return load_balance_peers(total_size, able, min_size)


class Invitations:
    """Invites others, and takes the invitations of others.

    Args:
        get_stub: makes a stub of the averager protocol.
        answer_join: what is done with a request to join, wherever it comes in.
    """

    def __init__(self, p2p: P2P, get_stub: Callable[[PeerID], StubBase], answer_join: AnswerJoin) -> None:
        self._p2p, self._get_stub, self._answer_join = p2p, get_stub, answer_join
        # A dictionary keeps the order, so that simulations can be repeated.
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Calls that are not over, also those of followers who came on them."""
        return list(self._tasks)

    def invite_followers(self, search: Search) -> None:
        """Invite everybody who should follow this peer and has not come, as far as there is room."""
        for peer in search.whom_to_invite():
            task = asyncio.ensure_future(self._invite(search, peer))
            search.note_invitation(peer, task)
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _invite(self, search: Search, peer: PeerID) -> None:
        try:
            async with self._get_stub(peer).rpc_invite() as call:
                await call.send(Invitation(group_key=search.key, expiration=search.expiration), end=False)
                reply = await call.receive(InvitationReply)
                search.pending.pop(peer, None)
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
            search.pending.pop(peer, None)
            search.control.changed.set()

    async def _let_in(self, call: Call, request: JoinRequest) -> None:
        """Answer one who comes; when its connection ends it has left, as with one who has called by itself."""
        me = asyncio.current_task()
        assert me is not None
        call.connection.stream.on_closed(me.cancel)
        try:
            await self._answer_join(call, request, call.remote)
            await call.drain()
        finally:
            call.connection.stream.on_closed(None)

    def _take_refusal(self, search: Search, reply: InvitationReply | None) -> None:
        if reply is not None and reply.better_leader is not None:
            leader = learn(self._p2p, reply.better_leader)
            if leader != self._p2p.peer_id:
                search.note_candidate(leader, reply.expiration)

    async def hold(self, search: Search, call: Call, invitation: Invitation) -> None:
        """A peer offers to lead this one: hold its call until this one comes on it, or has decided otherwise."""
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
    def end(search: Search) -> None:
        """This peer looks for nobody any more; who has come gets an answer first.

        Members of its group look for nobody either and end the calls themselves, so that the connections can be used
        for the round: cutting them would cost round trips for new ones.
        """
        members = search.group.result().peer_ids if search.group.done() and not search.group.cancelled() else ()
        for peer, task in list(search.pending.items()):
            if peer in members:
                asyncio.get_running_loop().call_later(MEMBER_PATIENCE, task.cancel)
            else:
                task.cancel()
        for offer in list(search.offers.values()):
            if not offer.is_used:
                offer.close(None)


# For how many searches a peer is refused that has sent bad values here, or that others accuse.
SEEN_SEARCHES = 10
TOLD_SEARCHES = 1
# More are not remembered: those that have been refused for longest are forgotten.
MAX_REFUSED_PEERS = 256


class Refusals:
    """The memory of one averager, or of one of its tags."""

    def __init__(self) -> None:
        # For how many searches.
        self._left: dict[PeerID, int] = {}
        self._auxiliaries: set[PeerID] = set()

    def __len__(self) -> int:
        return len(self._left)

    def note(
        self, seen: Collection[PeerID], told: Collection[PeerID], group: Collection[PeerID], aux: Collection[PeerID]
    ) -> list[PeerID]:
        """What came out in a round.

        Args:
            seen: have sent this peer values that are not finite.
            told: of these, others say so.
            group: all members.
            aux: those that only helped.

        Returns:
            Those of whom this was not known.
        """
        others = [peer for peer in group if peer not in seen]
        believed = [peer for peer in others if peer in told]
        if 2 * (len(seen) + len(believed)) >= len(group):
            believed = []
        accused = {**dict.fromkeys(believed, TOLD_SEARCHES), **dict.fromkeys(seen, SEEN_SEARCHES)}
        news = [peer for peer in group if peer in accused and peer not in self._left]
        for peer, searches in accused.items():
            self._left[peer] = max(searches, self._left.pop(peer, 0))
        self._auxiliaries.update(peer for peer in accused if peer in aux)
        while len(self._left) > MAX_REFUSED_PEERS:
            del self._left[next(iter(self._left))]
        self._auxiliaries &= self._left.keys()
        return news

    def next_search(self) -> Mapping[PeerID, bool]:
        """Whom to refuse in the search that begins now, and whether others count on that peer to come."""
        refused = {peer: peer not in self._auxiliaries for peer in self._left}
        self._left = {peer: left - 1 for peer, left in self._left.items() if left > 1}
        self._auxiliaries &= self._left.keys()
        return refused
