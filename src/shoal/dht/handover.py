"""Which records a node passes on to a newcomer, so that lookups that end there find them."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.clock import DHTExpiration
from shoal.dht.routing import DHTID, ID_BITS, RoutingTable
from shoal.dht.storage import DHTLocalStorage, StoredValue


def records_for_newcomer(
    newcomer: DHTID, storage: DHTLocalStorage, table: RoutingTable, num_replicas: int
) -> Iterator[tuple[DHTID, StoredValue, DHTExpiration]]:
    """The records that a newcomer should hold and that nobody is nearer to pass on than this node."""
    own_id = table.node_id
    bits_not_shared = ID_BITS - _bits_shared_by_neighborhood(newcomer, table, num_replicas)
    newcomer_is_near = not (own_id ^ newcomer) >> bits_not_shared
    for key, item in storage.items():
        # Keys from the own neighborhood have all their replicas in it: a newcomer from elsewhere is none of them.
        if not newcomer_is_near and not (own_id ^ key) >> bits_not_shared:
            continue
        if _should_pass_on(key, newcomer, table, num_replicas):
            yield key, item.value, item.expiration_time


def _bits_shared_by_neighborhood(newcomer: DHTID, table: RoutingTable, num_replicas: int) -> int:
    """Leading bits that this node has in common with its ``num_replicas`` nearest neighbors; 0 if it has fewer."""
    nearest = table.get_nearest_neighbors(table.node_id, num_replicas, exclude=newcomer)
    if len(nearest) < num_replicas:
        return 0
    return DHTID.longest_common_prefix_length(table.node_id, *(node_id for node_id, _ in nearest))


def _should_pass_on(key: DHTID, newcomer: DHTID, table: RoutingTable, num_replicas: int) -> bool:
    neighbors = table.get_nearest_neighbors(key, num_replicas, exclude=newcomer)
    if not neighbors:
        return True
    nearest, farthest = neighbors[0][0], neighbors[-1][0]
    is_replica = len(neighbors) < num_replicas or newcomer ^ key < farthest ^ key
    return is_replica and table.node_id ^ key < nearest ^ key
