"""Node ids, buckets and the routing table: the nodes that a node knows, many near its own id and few far away.

Ids are 160-bit numbers, and their distance is XOR. The table is a list of buckets, each responsible for a half-open,
power-of-two range of ids. It starts with one bucket for all ids. A full bucket is split in halves if it covers the own
id, or if its depth is not divisible by ``depth_modulo``. A node that finds no room waits in the bucket's replacement
list until a member is found dead.

Anyone may choose the id of a node, but a node whose id follows from its peer's id did not choose its place. So chosen
ids come last in the lists of the nearest nodes, and when places are few.

A member that does not answer becomes a suspect. It keeps its place until a living node wants it, so that even after a
long outage there is a node to ask. Other nodes are not told of a suspect, and walks start with one only if there is no
other node.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import os
import random
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, overload

from shoal.base.bounded import MOST
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.peers.identity import PeerID

DHTKey = Any
"""A user's key for a record: raw bytes, or anything that msgpack can pack."""

# The length of a SHA-1 hash, as in Kademlia.
ID_BITS = 160

# A full bucket pings at most one member in this time, however many nodes want its place. Chosen.
SECONDS_BETWEEN_CHECKS = 5.0


class DHTID(int):
    """A 160-bit id of a node or of a key."""

    HASH_NBYTES: ClassVar[int] = ID_BITS // 8
    MIN: ClassVar[int] = 0
    MAX: ClassVar[int] = 2**ID_BITS

    __slots__ = ()

    def __new__(cls, value: int) -> DHTID:
        assert not value >> ID_BITS, f"a DHT id is a number from 0 to 2**{ID_BITS} - 1, got {value}"
        return int.__new__(cls, value)

    @classmethod
    def generate(cls, source: DHTKey = None, nbits: int = 255, rng: random.Random | None = None) -> DHTID:
        """The id of a key, or a random id.

        Args:
            source: the key; ``bytes`` are hashed as they are, anything else in its msgpack form. ``None`` = random.
            nbits: how many random bits are hashed when there is no source.
            rng: source of the random bits; default: the operating system.

        Raises:
            TypeError: the key cannot be packed.
        """
        if source is None:
            nbytes = (nbits + 7) // 8
            raw = os.urandom(nbytes) if rng is None else rng.getrandbits(nbits).to_bytes(nbytes, "big")
        else:
            raw = source if isinstance(source, bytes) else MSGPackSerializer.dumps(source)
        return cls.from_bytes(hashlib.sha1(raw, usedforsecurity=False).digest())

    @classmethod
    def of_peer(cls, peer: PeerID) -> DHTID:
        """The default id of a peer's node: knowing the peer is enough to find its node."""
        return _place_of(peer.to_bytes())

    @classmethod
    def of_peer_bytes(cls, peer: bytes) -> DHTID:
        """As :meth:`of_peer`, from the bytes of the peer id."""
        return _place_of(peer)

    @overload
    def xor_distance(self, other: int) -> int: ...

    @overload
    def xor_distance(self, other: Iterable[int]) -> list[int]: ...

    def xor_distance(self, other: int | Iterable[int]) -> int | list[int]:
        """Distance to one id, or the list of distances to several."""
        if isinstance(other, int):
            return int(self) ^ int(other)
        return [int(self) ^ int(one) for one in other]

    @classmethod
    def longest_common_prefix_length(cls, *ids: int) -> int:
        """Number of leading bits that all these ids share."""
        differing = 0
        for one in ids[1:]:
            differing |= ids[0] ^ one
        return ID_BITS - differing.bit_length()

    def to_bytes(self, length: Any = HASH_NBYTES, byteorder: Any = "big", *, signed: bool = False) -> bytes:
        """20 bytes, big-endian."""
        return int.to_bytes(self, length, byteorder, signed=signed)

    @classmethod
    def from_bytes(cls, raw: Any, byteorder: Any = "big", *, signed: bool = False) -> DHTID:
        """Read what :meth:`to_bytes` made."""
        return cls(int.from_bytes(raw, byteorder, signed=signed))

    def __bytes__(self) -> bytes:
        return self.to_bytes()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self):#x})"


@functools.lru_cache(MOST)
def id_of(packed: bytes) -> DHTID:
    """The id in 20 bytes of a message. Cached, because the same few ids occur again and again."""
    return DHTID.from_bytes(packed)


@functools.lru_cache(MOST)
def _place_of(peer: bytes) -> DHTID:
    return DHTID.generate(peer)


class KBucket:
    """Up to ``size`` nodes whose ids lie in ``lower <= id < upper``, the least recently seen first.

    Args:
        lower: first id of the range, a multiple of the range's width.
        upper: first id after the range; the width is a power of two.
        size: most members.
        depth: how many splits led here.
    """

    __slots__ = (
        "depth",
        "last_checked",
        "last_updated",
        "lower",
        "nodes_being_checked",
        "nodes_to_peer_id",
        "replacement_nodes",
        "size",
        "suspects",
        "upper",
    )

    def __init__(self, lower: int, upper: int, size: int, depth: int = 0) -> None:
        assert upper - lower == 1 << (ID_BITS - depth), f"a bucket at depth {depth} spans 2**{ID_BITS - depth} ids"
        self.lower, self.upper, self.size, self.depth = lower, upper, size, depth
        self.nodes_to_peer_id: dict[DHTID, PeerID] = {}
        self.replacement_nodes: dict[DHTID, PeerID] = {}
        self.suspects: dict[DHTID, PeerID] = {}  # in the order in which they fell silent
        self.nodes_being_checked: dict[DHTID, None] = {}
        self.last_updated = get_dht_time()
        self.last_checked = float("-inf")

    def has_in_range(self, node_id: int) -> bool:
        """Whether this bucket is responsible for the id."""
        return self.lower <= node_id < self.upper

    def add_or_update_node(self, node_id: DHTID, peer_id: PeerID, *, is_news: bool = True) -> bool:
        """Make a node the most recently seen member; False if there is no room and it waits as a replacement."""
        self.nodes_being_checked.pop(node_id, None)
        self.replacement_nodes.pop(node_id, None)
        self.suspects.pop(node_id, None)
        if self.nodes_to_peer_id.pop(node_id, None) is not None or len(self.nodes_to_peer_id) < self.size:
            self.nodes_to_peer_id[node_id] = peer_id
            if is_news:
                self.last_updated = get_dht_time()
            return True
        self.replacement_nodes[node_id] = peer_id
        return False

    def choose_node_to_check(self) -> tuple[DHTID, PeerID] | None:
        """The least recently seen member that is not being pinged yet; ``None`` if it is too early for another ping."""
        if get_dht_time() - self.last_checked < SECONDS_BETWEEN_CHECKS:
            return None
        for node_id, peer_id in self.nodes_to_peer_id.items():
            if node_id not in self.nodes_being_checked:
                return self.begin_check(node_id, peer_id)
        return None

    def begin_check(self, node_id: DHTID, peer_id: PeerID) -> tuple[DHTID, PeerID] | None:
        """Note that this node is about to be pinged; ``None`` if it is being pinged already."""
        if node_id in self.nodes_being_checked:
            return None
        self.nodes_being_checked[node_id] = None
        self.last_checked = get_dht_time()
        return node_id, peer_id

    def end_check(self, node_id: DHTID) -> None:
        """Note that the ping of a node has ended, with or without an answer."""
        self.nodes_being_checked.pop(node_id, None)

    def suspect(self, node_id: DHTID) -> None:
        """Turn a member that does not answer into a suspect; a node that is not a member is forgotten."""
        peer_id = self.nodes_to_peer_id.get(node_id)
        self.remove(node_id)
        if peer_id is not None:
            self.suspects[node_id] = peer_id

    def give_up_suspect(self) -> PeerID | None:
        """Forget the suspect that fell silent first, if living nodes need its place."""
        if not self.suspects or len(self.nodes_to_peer_id) + len(self.suspects) <= self.size:
            return None
        return self.suspects.pop(next(iter(self.suspects)))

    def remove(self, node_id: DHTID) -> None:
        """Forget a node; the latest replacement takes the place of a member."""
        self.end_check(node_id)
        self.replacement_nodes.pop(node_id, None)
        self.suspects.pop(node_id, None)
        if self.nodes_to_peer_id.pop(node_id, None) is not None and self.replacement_nodes:
            newest, peer_id = self.replacement_nodes.popitem()
            self.nodes_to_peer_id[newest] = peer_id

    def split(self) -> tuple[KBucket, KBucket]:
        """The two halves of this bucket, with all its nodes."""
        middle = (self.lower + self.upper) // 2
        halves = (
            KBucket(self.lower, middle, self.size, self.depth + 1),
            KBucket(middle, self.upper, self.size, self.depth + 1),
        )
        for half in halves:
            half.last_updated, half.last_checked = self.last_updated, self.last_checked
        for node_id, peer_id in self.nodes_to_peer_id.items():
            halves[node_id >= middle].nodes_to_peer_id[node_id] = peer_id
        for node_id in self.nodes_being_checked:
            halves[node_id >= middle].nodes_being_checked[node_id] = None
        for node_id, peer_id in self.suspects.items():
            halves[node_id >= middle].suspects[node_id] = peer_id
        for node_id, peer_id in self.replacement_nodes.items():
            halves[node_id >= middle].add_or_update_node(node_id, peer_id)
        return halves

    def __len__(self) -> int:
        return len(self.nodes_to_peer_id)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.nodes_to_peer_id)} nodes, {len(self.suspects)} suspects, "
            f"{len(self.replacement_nodes)} replacements, "
            f"depth={self.depth}, lower={self.lower:#x}, upper={self.upper:#x})"
        )


def _members_of(buckets: Iterable[KBucket]) -> dict[DHTID, PeerID]:
    return {node_id: peer for bucket in buckets for node_id, peer in bucket.nodes_to_peer_id.items()}


class RoutingTable:
    """The nodes that one node knows. Each peer has one node id here, and each node id one peer.

    Args:
        node_id: this node's own id; the table is dense around it.
        bucket_size: most members of a bucket, and most replacements.
        depth_modulo: buckets without the own id stop splitting at depths divisible by this.
    """

    def __init__(self, node_id: DHTID, bucket_size: int, depth_modulo: int) -> None:
        if bucket_size < 1 or depth_modulo < 1:
            raise ValueError(f"bucket_size and depth_modulo must be at least 1, got {bucket_size} and {depth_modulo}")
        self.node_id, self.bucket_size, self.depth_modulo = node_id, bucket_size, depth_modulo
        self.buckets: list[KBucket] = [KBucket(DHTID.MIN, DHTID.MAX, bucket_size)]
        self.peer_id_to_node: dict[PeerID, DHTID] = {}
        """Members, suspects and replacements."""
        self.chosen: set[int] = set()
        """Ids that do not follow from the peer's; some may be gone."""
        self._lower_bounds: list[int] = [DHTID.MIN]

    def get_bucket_index(self, node_id: int) -> int:
        """Index of the bucket that is responsible for the id."""
        return bisect.bisect_right(self._lower_bounds, node_id) - 1

    def bucket_of(self, node_id: int) -> KBucket:
        """The bucket that is responsible for the id."""
        return self.buckets[self.get_bucket_index(node_id)]

    def refresh(self, node_id: DHTID, peer_id: PeerID, *, is_news: bool = True) -> bool:
        """Note that a member was just seen: a fast path of :meth:`add_or_update_node`. False if it is not a member."""
        bucket = self.bucket_of(node_id)
        if bucket.nodes_to_peer_id.get(node_id) != peer_id:
            return False
        return bucket.add_or_update_node(node_id, peer_id, is_news=is_news)

    def add_or_update_node(
        self, node_id: DHTID, peer_id: PeerID, *, is_news: bool = True
    ) -> tuple[DHTID, PeerID] | None:
        """Note that a node was just seen.

        Args:
            node_id: its id.
            peer_id: its peer.
            is_news: whether this refreshes the bucket; after a mere sign of life the bucket may still grow stale.

        Returns:
            A node to ping because its place is wanted, if any. Call this method if it answers, and
            ``del table[node_id]`` if it does not.
        """
        if node_id == self.node_id:
            return None
        bucket = self.bucket_of(node_id)
        holder = bucket.nodes_to_peer_id.get(node_id) or bucket.replacement_nodes.get(node_id)
        # A peer must not take over the id of a node that may be alive.
        if holder is not None and holder != peer_id:
            return bucket.begin_check(node_id, holder)
        if bucket.suspects.get(node_id, peer_id) != peer_id:
            del self[node_id]
        former_id = self.peer_id_to_node.get(peer_id)
        if former_id is not None and former_id != node_id:
            del self[former_id]
        self.peer_id_to_node[peer_id] = node_id
        self.note_choice(node_id, peer_id)
        while not bucket.add_or_update_node(node_id, peer_id, is_news=is_news):
            if not self._may_split(bucket):
                if self._takes_place_of_chosen(bucket, node_id):
                    break
                self._limit_replacements(bucket)
                return bucket.choose_node_to_check()
            self._split(bucket)
            bucket = self.bucket_of(node_id)
        self._make_room(bucket)
        return None

    def note_choice(self, node_id: DHTID, peer_id: PeerID) -> None:
        """Find out whether a node was given the id that follows from its peer's."""
        if node_id == DHTID.of_peer(peer_id):
            self.chosen.discard(node_id)
            return
        self.chosen.add(node_id)
        if len(self.chosen) > 2 * len(self.peer_id_to_node) + 16:
            self.chosen.intersection_update((self.node_id, node_id, *self.peer_id_to_node.values()))

    def _takes_place_of_chosen(self, bucket: KBucket, node_id: DHTID) -> bool:
        """Whether a newcomer that waits for a place in a full bucket replaces a member whose id was chosen."""
        if not self.chosen or node_id in self.chosen:
            return False
        member = next((member for member in bucket.nodes_to_peer_id if member in self.chosen), None)
        if member is None:
            return False
        del self[member]  # the newcomer is the latest replacement
        return True

    def rank(self, node_id: int, query_id: int) -> tuple[bool, int]:
        """A sort key: nodes with a smaller rank are asked first, to hold a key or to find it."""
        return node_id in self.chosen, node_id ^ query_id

    def suspect(self, node_id: DHTID) -> None:
        """Note that a node does not answer. After a sign of life :meth:`add_or_update_node` makes it a member again."""
        bucket, peer_id = self.bucket_of(node_id), self[node_id]
        bucket.suspect(node_id)
        if node_id not in bucket.suspects:
            del self.peer_id_to_node[peer_id]
        self._make_room(bucket)

    def _make_room(self, bucket: KBucket) -> None:
        while (given_up := bucket.give_up_suspect()) is not None:
            del self.peer_id_to_node[given_up]

    @property
    def suspects(self) -> dict[DHTID, PeerID]:
        """Former members that do not answer."""
        return {node_id: peer for bucket in self.buckets for node_id, peer in bucket.suspects.items()}

    def _may_split(self, bucket: KBucket) -> bool:
        return bucket.depth < ID_BITS and (bucket.has_in_range(self.node_id) or bucket.depth % self.depth_modulo != 0)

    def _split(self, bucket: KBucket) -> None:
        index = self.get_bucket_index(bucket.lower)
        first, second = bucket.split()
        self.buckets[index : index + 1] = [first, second]
        self._lower_bounds.insert(index + 1, second.lower)

    def _limit_replacements(self, bucket: KBucket) -> None:
        while len(bucket.replacement_nodes) > self.bucket_size:
            oldest = next(iter(bucket.replacement_nodes))
            del self.peer_id_to_node[bucket.replacement_nodes.pop(oldest)]

    def get_nearest_neighbors(self, query_id: int, k: int, exclude: DHTID | None = None) -> list[tuple[DHTID, PeerID]]:
        """The ``k`` members nearest to an id, nearest first; exact among the members. Chosen ids come after all others.

        Args:
            query_id: the id to measure from; a member with this very id counts, unless excluded.
            k: most results.
            exclude: this node is left out.
        """
        distance_to = int(query_id).__xor__
        nearest: list[tuple[DHTID, PeerID]] = []
        chosen: list[tuple[DHTID, PeerID]] = []
        for buckets in self._groups_by_distance(query_id):
            members = buckets[0].nodes_to_peer_id if len(buckets) == 1 else _members_of(buckets)
            nearest += [(node_id, members[node_id]) for node_id in sorted(members, key=distance_to)]
            if exclude is not None and exclude in members:
                nearest.remove((exclude, members[exclude]))
            if self.chosen:
                chosen += [node for node in nearest if node[0] in self.chosen]
                nearest = [node for node in nearest if node[0] not in self.chosen]
            if len(nearest) >= k:
                break
        return [*nearest, *chosen][:k]

    def _groups_by_distance(self, query_id: int) -> Iterator[list[KBucket]]:
        """Groups of buckets; every id in a group is nearer than every id in the next one."""
        index = self.get_bucket_index(query_id)
        bucket = self.buckets[index]
        yield [bucket]
        # Then the ids that share fewer and fewer leading bits with the query.
        first, last = index, index + 1
        for shared_bits in range(bucket.depth - 1, -1, -1):
            width = 1 << (ID_BITS - shared_bits)
            lower = query_id & -width
            if self._lower_bounds[first] > lower:
                middle, first = first, bisect.bisect_left(self._lower_bounds, lower)
                yield self.buckets[first:middle]
            else:
                middle, last = last, bisect.bisect_left(self._lower_bounds, lower + width, last)
                yield self.buckets[middle:last]

    def get(self, node_id: DHTID, default: PeerID | None = None) -> PeerID | None:
        """The peer of a member or replacement; suspects do not count."""
        bucket = self.bucket_of(node_id)
        return bucket.nodes_to_peer_id.get(node_id) or bucket.replacement_nodes.get(node_id) or default

    def __contains__(self, item: DHTID | PeerID) -> bool:
        node_id = item if isinstance(item, DHTID) else self.peer_id_to_node.get(item)
        return node_id is not None and self.get(node_id) is not None

    def __getitem__(self, node_id: DHTID) -> PeerID:
        peer_id = self.get(node_id)
        if peer_id is None:
            raise KeyError(node_id)
        return peer_id

    def __delitem__(self, node_id: DHTID) -> None:
        bucket = self.bucket_of(node_id)
        del self.peer_id_to_node[bucket.suspects.get(node_id) or self[node_id]]
        bucket.remove(node_id)

    def __iter__(self) -> Iterator[tuple[DHTID, PeerID]]:
        """Members, without suspects and replacements, from the lowest bucket to the highest."""
        for bucket in self.buckets:
            yield from bucket.nodes_to_peer_id.items()

    def __len__(self) -> int:
        return sum(map(len, self.buckets))

    def __repr__(self) -> str:
        lines = "".join(f"\n  {bucket!r}" for bucket in self.buckets)
        return f"{type(self).__name__}(node_id={self.node_id:#x}, members={len(self)}){lines}"
