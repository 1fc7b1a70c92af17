"""The DHT keys under which averagers find each other: one key for each bucket of peers.

Peers with the same bits look under the same key. After every group each member takes new bits, drawn with the group id
as the seed, and meets members of other groups in the next round. So an average spreads over N peers in a number of
rounds that grows with log N (Moshpit SGD, https://arxiv.org/abs/2103.03239).

A run with a target group size but without bits need not know how many peers there will be. Once there are too many
for one key, each peer draws new random bits for every search; the size of the run decides how many. Peers with
different estimates of the size draw different numbers of bits. A peer that finds too few others under its key checks
the key above (one bit less) and a key below (one bit more), and moves to the key with more peers.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.averaging.control import GroupInfo
from shoal.base.clock import DHTExpiration
from shoal.base.logs import Seldom, one_line
from shoal.dht import DHT, DHTNode
from shoal.dht.crypto import peer_of, tag_of
from shoal.dht.key_sharding import any_place
from shoal.dht.validation import is_short_lived
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p import P2P, PeerID

logger = logging.getLogger(__name__)

GroupKey = str
GROUP_PATTERN = re.compile(r"^(([^.])+)[.]0b[01]*$")
# Averager keys have this many bits less than progress keys (chosen). A progress record is always present, but an
# averager looks for a group for a few seconds only, and peers reach the end of an epoch at different times. So among
# the peers of one progress key, too few look at once to fill a group. With even fewer bits, the holders of a key would
# send too much.
_BITS_LESS = 1
# Each node is asked for at most this many full groups of averagers. Chosen: enough to find one group.
_GROUPS_READ = 4
# For quick lookups: one more than the default number of nodes that hold a record.
_FEW_NODES = 6


def is_valid_group(key: str) -> bool:
    """Whether this is a key such as ``"my_run.0b0101"``."""
    return GROUP_PATTERN.match(key) is not None


class Table(Protocol):
    """The part of :class:`~shoal.dht.DHTNode` that finding peers needs."""

    async def get(self, key: Any, latest: bool = False, **how: Any) -> Any: ...
    async def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool: ...


class GroupKeyManager:
    """Declares and finds averagers under the keys of one prefix.

    Args:
        dht: the table: a node in the caller's event loop, or a :class:`~shoal.DHT`, whose coroutines may be awaited
            in any loop.
        prefix: namespace of the keys, without dots.
        initial_group_bits: the first bucket, such as ``"010"``; empty: one bucket for all.
        target_group_size: size of a full group; ``None``: groups have no limit.
        p2p: this peer, which learns the addresses of the averagers it finds. Default: the table's own.
    """

    def __init__(
        self,
        dht: DHT | DHTNode | Table,
        prefix: str,
        initial_group_bits: str,
        target_group_size: int | None,
        p2p: P2P | None = None,
    ) -> None:
        assert re.fullmatch("[01]*", initial_group_bits), f"group bits are 0 and 1 only, got {initial_group_bits!r}"
        if p2p is None:
            assert isinstance(dht, (DHT, DHTNode)), "pass p2p= with another kind of table"
            p2p = dht.p2p
        self._p2p = p2p
        self._node: Table = dht.node if isinstance(dht, DHT) else dht
        self._portal = dht.portal if isinstance(dht, DHT) else None
        self._warn_seldom = Seldom(logger.warning)
        self.prefix = prefix
        self.group_bits = initial_group_bits
        self.target_group_size = target_group_size
        # Without a target size all peers make one group, so all of them must look under one key.
        self._draws_bits = not initial_group_bits and target_group_size is not None
        self._drawn = ""
        self._looks_up = False

    @property
    def current_key(self) -> GroupKey:
        """The key under which this peer looks now."""
        return f"{self.prefix}.0b{self.group_bits}"

    def draw_key(self, depth: int) -> GroupKey:
        """The key for the next search.

        Args:
            depth: the depth of the progress keys, which decides the number of random bits; ignored if this peer was
                given bits.
        """
        bits = max(0, depth - _BITS_LESS)
        if self._draws_bits and (bits or self._drawn):
            self.group_bits = self._drawn = any_place(bits, self._p2p.rng)
        return self.current_key

    async def find_more(self, key: GroupKey, count: int) -> GroupKey:
        """The key with the most averagers: the given key, or if it has only a few, perhaps one a bit above or below.

        Args:
            key: the key under which this averager looks now.
            count: the number of averagers under it, this one included.
        """
        bits = key.rpartition("0b")[2]
        if not self._drawn or self.target_group_size is None or count >= self.target_group_size:
            return key
        self._looks_up = not self._looks_up
        other = bits[:-1] if self._looks_up else bits + any_place(1, self._p2p.rng)
        other_key = f"{self.prefix}.0b{other}"
        others = await self._find(other_key, only_active=True, quickly=True)
        return other_key if len(others) > count else key

    async def declare_averager(
        self, group_key: GroupKey, peer_id: PeerID, expiration_time: DHTExpiration, looking_for_group: bool = True
    ) -> bool:
        """Publish that an averager looks for a group, or that it no longer does.

        Args:
            group_key: the key under which it looks.
            peer_id: the averager, which must be this peer.
            expiration_time: DHT time by which it promises to start. Others ignore records that are more than an hour
                ahead.
            looking_for_group: ``False``: withdraw the record.

        Returns:
            Whether the record was accepted.

        Raises:
            ValueError: ``peer_id`` is another peer, and this one cannot sign for it.
        """
        work = self._declare(group_key, peer_id, expiration_time, looking_for_group)
        return await (work if self._portal is None else self._portal.submit(work))

    async def _declare(
        self, group_key: GroupKey, peer_id: PeerID, expiration_time: DHTExpiration, looking_for_group: bool
    ) -> bool:
        if peer_id != self._p2p.peer_id:
            raise ValueError(
                f"only {peer_id} itself can declare that it looks for a group: this is {self._p2p.peer_id}"
            )
        if not looking_for_group:  # a record is only replaced by one with a later expiration
            expiration_time = math.nextafter(expiration_time, math.inf)
        addresses = [str(address) for address in self._p2p.get_addresses(peer_id)][:MAX_ADDRESSES_PER_PEER]
        value = addresses if looking_for_group else None
        return await self._node.store(group_key, value, expiration_time, subkey=tag_of(peer_id))

    async def get_averagers(
        self,
        group_key: GroupKey,
        only_active: bool,
        quickly: bool = False,
        gone: list[tuple[PeerID, DHTExpiration]] | None = None,
    ) -> list[tuple[PeerID, DHTExpiration]]:
        """The averagers under a key, each with the DHT time at which it promises to start.

        Args:
            group_key: the key, such as ``"my_run.0b01"``.
            only_active: leave out averagers that have withdrawn.
            quickly: ask only the few nodes that should hold the records.
            gone: filled with the averagers that have withdrawn, each with the time up to which its promises are void.

        Raises:
            AssertionError: the key is not valid.
        """
        assert is_valid_group(group_key), f"{group_key!r} is not a group key such as 'my_run.0b01'"
        work = self._find(group_key, only_active, quickly, gone)
        return await (work if self._portal is None else self._portal.submit(work))

    async def _find(
        self,
        group_key: GroupKey,
        only_active: bool,
        quickly: bool,
        gone: list[tuple[PeerID, DHTExpiration]] | None = None,
    ) -> list[tuple[PeerID, DHTExpiration]]:
        how: dict[str, Any] = {"beam_size": _FEW_NODES if quickly else None, "keep_copies": False}
        most = _GROUPS_READ * (self.target_group_size or 0)
        found = await self._node.get(group_key, latest=True, most_entries=most, **how)
        if found is None or not isinstance(found.value, dict):
            return []
        averagers = []
        for key, entry in found.value.items():
            if not is_short_lived(entry.expiration_time):
                continue
            try:
                peer_id = peer_of(key)
                if entry.value is None and gone is not None:
                    gone.append((peer_id, float(entry.expiration_time)))
                if entry.value is None and only_active:
                    continue
                if entry.value is not None and peer_id != self._p2p.peer_id:
                    self._p2p.add_addresses(peer_id, entry.value[:MAX_ADDRESSES_PER_PEER])
                averagers.append((peer_id, float(entry.expiration_time)))
            except (KeyError, TypeError, ValueError) as e:  # KeyError: a dictionary, since Python 3.12
                reason = one_line(str(e))
                self._warn_seldom("skipped a malformed record of an averager under %s: %s", group_key, reason)
        return averagers

    def update_key_on_group_assembled(self, group: GroupInfo) -> None:
        """Move to the bucket that follows from this peer's position in the group."""
        self.group_bits = next_group_bits(
            self.group_bits,
            group.group_id,
            group.peer_ids.index(self._p2p.peer_id),
            group.group_size,
            self.target_group_size,
        )


def next_group_bits(bits: str, group_id: bytes, position: int, group_size: int, target_group_size: int | None) -> str:
    """The new bits of a member. All members draw distinct numbers, with the group id as the common seed."""
    if not bits:
        return bits
    slots = max(target_group_size or 1, 2 ** math.ceil(math.log2(max(group_size, 1))))
    if target_group_size is not None and group_size <= target_group_size:
        slots = target_group_size
    num_bits = math.ceil(math.log2(slots)) if slots > 1 else 0
    numbers: Sequence[int] = random.Random(group_id).sample(range(slots), group_size)
    new_bits = f"{numbers[position]:0{num_bits}b}" if num_bits else ""
    return (bits + new_bits)[-len(bits) :]
