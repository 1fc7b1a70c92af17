"""How experts are declared in the DHT, and found there by their uids.

======================================  ===========================================  ==================================
record                                  key, subkey                                  value
======================================  ===========================================  ==================================
the expert ``e.1.2.3``                  ``e.1.2.3``                                  its peer
each shorter prefix with a number       ``e.1.2.``, 3 and ``e.1.``, 2                the uid of an example, its peer
an expert with one number, ``f.7``      ``f.7.``, -1                                 its uid, its peer
======================================  ===========================================  ==================================

Beam search walks along the second kind: under ``e.1.`` it reads which numbers may follow. Peers are written in base58.
Of several experts that share a record, the one that expires last is listed.

The records are not signed: the layout has no place for an owner, which the DHT expects in the subkey. In a private run,
only members can write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from shoal.base.clock import DHTExpiration, get_dht_time
from shoal.base.reactor import AwaitableFuture
from shoal.dht import DHT, DHTNode
from shoal.dht.storage import Subkey, ValueWithExpiration
from shoal.moe.expert import Experts, experts_from
from shoal.moe.uids import (
    FLAT_EXPERT,
    UID_DELIMITER,
    ExpertInfo,
    ExpertUID,
    is_valid_uid,
    split_uid,
)
from shoal.p2p import PeerID

Place = tuple[str, Subkey | None]
"""A key with its subkey."""


def declare_experts(
    dht: DHT, uids: Sequence[ExpertUID], expiration_time: DHTExpiration, wait: bool = True
) -> dict[Any, bool] | AwaitableFuture[dict[Any, bool]]:
    """Announce that this peer runs experts.

    Args:
        dht: a DHT of this peer.
        uids: the experts.
        expiration_time: the DHT time until which the announcement holds.
        wait: wait until it is stored; otherwise return a future.

    Returns:
        Whether each record was stored: by uid, and by ``(prefix, number)`` for the records of prefixes.

    Raises:
        AssertionError: ``uids`` is no sequence of valid uids.
    """
    assert not isinstance(uids, str), "uids must be a list of uids, got a text"
    for uid in uids:
        assert is_valid_uid(uid), f"{uid!r} is not a valid uid: expected a name and numbers, as in 'ffn.0.12'"
    declaring = partial(declare, uids=[*uids], until=expiration_time)
    return dht.run_coroutine(declaring) if wait else dht.run_coroutine(declaring, return_future=True)


def get_experts(
    dht: DHT, uids: Sequence[ExpertUID], expiration_time: DHTExpiration | None = None, return_future: bool = False
) -> Experts | AwaitableFuture[Experts]:
    """Find experts by their uids. Their servers are not called.

    Args:
        dht: a DHT of the swarm.
        uids: the experts.
        expiration_time: ignore records that expire before this DHT time; default: now.
        return_future: return at once.

    Returns:
        For each uid the expert, or ``None`` if nobody has declared it.

    Raises:
        AssertionError: ``uids`` is a single text.
    """
    assert not isinstance(uids, str), "uids must be a list of uids, got a text"
    limit = get_dht_time() if expiration_time is None else expiration_time
    get = partial(_get, uids=list(uids), limit=limit)
    return dht.run_coroutine(get, return_future=True) if return_future else dht.run_coroutine(get)


def _records_of(uids: Iterable[ExpertUID], peer: str) -> dict[Place, Any]:
    """The value of each record, by its place."""
    records: dict[Place, Any] = {}
    for uid in uids:
        records[uid, None] = peer
        prefix, number = split_uid(uid)
        if prefix.count(UID_DELIMITER) == 1:
            records[uid + UID_DELIMITER, FLAT_EXPERT] = (uid, peer)
        while prefix.count(UID_DELIMITER) > 1:
            records[prefix, number] = (uid, peer)
            prefix, number = split_uid(prefix)
    return records


async def _store(node: DHTNode, records: dict[Place, Any], expiration_time: DHTExpiration) -> dict[Any, bool]:
    keys, subkeys = [key for key, _ in records], [subkey for _, subkey in records]
    return await node.store_many(keys, list(records.values()), expiration_time, subkeys=subkeys)


async def declare(dht: DHT, node: DHTNode, *, uids: list[ExpertUID], until: DHTExpiration) -> dict[Any, bool]:
    """The same as :func:`declare_experts`, in the loop of a DHT."""
    return await _store(node, _records_of(uids, node.peer_id.to_base58()), until)


async def withdraw(dht: DHT, node: DHTNode, *, uids: list[ExpertUID], until: DHTExpiration) -> dict[Any, bool]:
    """Take back what this peer has declared, where no other peer has taken its place. Runs in the loop of a DHT.

    Args:
        uids: the experts.
        until: the latest expiration time with which they were declared.

    Returns:
        Whether each record that named this peer was withdrawn.
    """
    peer = node.peer_id.to_base58()
    places = _records_of(uids, peer)
    present = await node.get_many(list(dict.fromkeys(key for key, _ in places)), math.inf)

    def is_own(place: Place) -> bool:
        key, subkey = place
        item = present[key]
        if subkey is not None:
            item = item.value.get(subkey) if item is not None and isinstance(item.value, dict) else None
        listed = None if item is None else item.value
        return bool(listed == peer or (isinstance(listed, tuple) and len(listed) == 2 and listed[1] == peer))

    own = dict.fromkeys(filter(is_own, places))
    # Later than the declaration, because the DHT keeps what expires last.
    return await _store(node, own, math.nextafter(until, math.inf))


async def _get(dht: DHT, node: DHTNode, *, uids: list[ExpertUID], limit: DHTExpiration) -> Experts:
    found = await node.get_many(list(dict.fromkeys(filter(is_valid_uid, uids))), limit)
    return experts_from([_info_from(uid, found.get(uid), limit) for uid in uids], node.p2p)


def _info_from(uid: ExpertUID, item: ValueWithExpiration[Any] | None, limit: DHTExpiration) -> ExpertInfo | None:
    """What a uid's record says; ``None`` if it is absent, expires before the limit, or is malformed."""
    if item is None or item.expiration_time < limit or not isinstance(item.value, str):
        return None
    try:
        return ExpertInfo(uid, PeerID.from_base58(item.value))
    except ValueError:
        return None
