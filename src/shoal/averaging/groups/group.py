"""A group that starts: what its leader announces, and how a member checks it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shoal.averaging.control import GROUP_ID_BYTES, AveragingMode, GroupInfo
from shoal.averaging.groups.search import Follower
from shoal.averaging.groups.settings import MatchmakingSettings, Trust
from shoal.averaging.messages import GroupStart, JoinRequest, Member, PeerAddresses
from shoal.averaging.round.parts import load_balance_peers, rescale_shares
from shoal.base.logs import quoted
from shoal.errors import ProtocolError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, PeerID
from shoal.reach.reachability import Reach

# The part of its usual share that a member behind a narrow relay reduces (chosen).
NARROW_SHARE = 0.25

# The size of a member's entry in a group's description without its addresses and gathered value: 38 bytes of id, and
# room for numbers and field names.
_MEMBER_BYTES = 100


def record_of(p2p: P2P, peer: PeerID) -> PeerAddresses:
    """A peer and the addresses under which others can dial it."""
    return PeerAddresses(peer_id=peer.to_bytes(), addresses=[str(address) for address in p2p.get_addresses(peer)])


def learn(p2p: P2P, record: PeerAddresses) -> PeerID:
    """Learn the addresses of a peer from a record, and return the peer.

    Raises:
        ProtocolError: an address is malformed.
    """
    peer = PeerID(record.peer_id)
    if peer != p2p.peer_id:
        try:
            p2p.add_addresses(peer, record.addresses[:MAX_ADDRESSES_PER_PEER])
        except ValueError as e:
            raise ProtocolError(f"an address of {peer} is malformed: {e}") from None
    return peer


def bytes_of_member(p2p: P2P, peer: PeerID, request: JoinRequest) -> int:
    """The size of a member's entry in the description of the group."""
    return _MEMBER_BYTES + len(request.gathered) + sum(len(str(address)) for address in p2p.get_addresses(peer))


def describe_group(
    p2p: P2P, own: MatchmakingSettings, followers: Mapping[PeerID, Follower], gathered: bytes
) -> GroupStart:
    """The description of the group that a leader announces. It decides order, modes and shares for all members.

    Args:
        p2p: this peer, which leads.
        own: its settings.
        followers: the other members.
        gathered: this peer's gathered value, which all members receive.
    """
    links = {p2p.peer_id: (int(own.reach), own.relay_rate)}
    entries = [(p2p.peer_id, int(own.mode), own.bandwidth, gathered)]
    for peer, follower in followers.items():
        request = follower.request
        # A new peer could claim any bandwidth, so it reduces nothing yet. Auxiliaries do, because it is their only job.
        links[peer] = request.reach, request.relay_rate
        is_trusted = follower.is_proven or request.mode == AveragingMode.AUX
        entries.append((peer, request.mode, request.bandwidth if is_trusted else 0.0, request.gathered))
    # The first member becomes the coordinator, and positions decide the next buckets. So the order is random, but
    # members that are not fit to lead come last.
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
        leader: the peer that announced it; ``None``: this peer.

    Raises:
        ProtocolError: the announcement is not valid.
    """
    peers = tuple(PeerID(member.peer.peer_id) for member in start.members)
    if p2p.peer_id not in peers or len(set(peers)) != len(peers) or len(start.group_id) != GROUP_ID_BYTES:
        raise ProtocolError("the leader published a group without this peer, with duplicates, or without a valid id")
    if leader is not None and leader not in peers:
        # It could send others to peers that do not exist, and would never count as a member that failed.
        raise ProtocolError("it leads a group that does not contain it")
    shares = tuple(member.share for member in start.members)
    modes = tuple(member.mode for member in start.members)
    useless = any(member.share and member.mode == AveragingMode.CLIENT for member in start.members)
    if sum(shares) != total_size or useless:
        raise ProtocolError(f"the leader published shares {quoted(list(shares))} for a vector of {total_size} values")
    for member in start.members:
        learn(p2p, member.peer)
    limits = tuple(map((trust or Trust()).largest_weight, peers))
    gathered = tuple(member.gathered for member in start.members)
    has_limits = any(map(math.isfinite, limits))
    return GroupInfo(start.group_id, peers, gathered, modes, shares, limits if has_limits else (), leader)


def spare_relays(
    members: Sequence[tuple[int, float | None]], links: Sequence[tuple[int, float]]
) -> list[tuple[int, float | None]]:
    """Give a small share to members that reach other private members only through a rate-limited relay.

    Args:
        members: the mode and bandwidth of each member.
        links: for each member, how others call it and the rate of its relays.
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
    # If all members ask to be spared, split evenly, because some member has to reduce.
    if not any(bandwidth is None or bandwidth > 0 for bandwidth in able):
        able = [0.0 if mode == AveragingMode.CLIENT else None for mode, _ in members]
    welcome = [bandwidth if part else 0.0 for bandwidth, part in zip(able, wanted, strict=True)]
    # If only members with a failure record can reduce, they are tried again.
    if not any(bandwidth is None or bandwidth > 0 for bandwidth in welcome):
        return load_balance_peers(total_size, able, min_size)
    shares = load_balance_peers(total_size, welcome, min_size)
    trusted = [share if part == 1 else 0 for share, part in zip(shares, wanted, strict=True)]
    if trusted == list(shares) or not any(trusted):
        return shares
    # Members with a full share take over what those with a reduced share give up.
    kept = [int(part * share) for share, part in zip(shares, wanted, strict=True)]
    more = rescale_shares(trusted, total_size - sum(kept))
    return tuple(map(sum, zip(kept, more, strict=True)))
