"""A stranger stores thousands of entries under the keys of a run: those of the others are found all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from shoal.base.serializer import MSGPackSerializer
from shoal.dht import DHTNode, Reason
from shoal.dht.crypto import PrivateKey
from shoal.dht.local_records import DEFAULT_ROOM
from shoal.dht.records import NewRecord
from shoal.dht.validation import CompositeValidator
from shoal.optim.progress.exchange import MOST_READ
from shoal.optim.progress.schema import progress_validators
from shoal.p2p import Identity, Multiaddr
from tests.drills import mostly_drills
from tests.hostile.attacks.table import CROWD, false_averagers, false_records

RUN, PEERS = "crowded", 4


@asynccontextmanager
async def _nodes() -> AsyncIterator[tuple[list[DHTNode], list[Multiaddr]]]:
    """Nodes on real sockets that know the rules of the run, and where they are."""
    async with AsyncExitStack() as stack:
        nodes: list[DHTNode] = []
        places: list[Multiaddr] = []
        for _ in range(PEERS):
            nodes.append(await _node(initial_peers=places))
            stack.push_async_callback(nodes[-1].shutdown)
            places += await nodes[-1].get_visible_maddrs()
        yield nodes, places


async def _node(**options: object) -> DHTNode:
    validator = CompositeValidator(progress_validators(RUN, PrivateKey()))
    # All of them share one loop, and a slow machine may be busy with signatures for a while.
    return await DHTNode.create(record_validator=validator, wait_timeout=60.0, **options)  # type: ignore[arg-type]


async def _store(node: DHTNode, others: Sequence[DHTNode], records: list[NewRecord]) -> None:
    for other in others:
        await node.protocol.call_store(other.peer_id, records)


@pytest.mark.parametrize("key", mostly_drills(["_progress", "_grad_averager.0b"]))
async def test_the_records_of_a_run_are_found_among_thousands_of_others(key: str) -> None:
    is_progress = key == "_progress"
    async with AsyncExitStack() as stack:
        peers, places = await stack.enter_async_context(_nodes())
        honest = []
        for peer in peers:
            [record] = false_records(RUN, 1, peer.p2p.identity) if is_progress else false_averagers(RUN, 1)
            honest.append(MSGPackSerializer.loads(record.subkey))
            await _store(peer, [other for other in peers if other is not peer], [record])
        stranger = await _node(initial_peers=places, client_mode=True)
        stack.push_async_callback(stranger.shutdown)
        crowd = false_records(RUN, CROWD, Identity.generate()) if is_progress else false_averagers(RUN, CROWD)
        await _store(stranger, peers, crowd)
        newcomer = await _node(initial_peers=places, client_mode=True)
        stack.push_async_callback(newcomer.shutdown)
        for most in (0, MOST_READ):
            found = await newcomer.get(RUN + key, latest=True, keep_copies=False, most_entries=most)
            assert found is not None
            missing = [tag for tag in honest if tag not in found.value]
            assert not missing, f"{len(missing)} of {PEERS} peers are hidden where {most or 'all'} entries are read"
        for peer in peers:
            entries = sum(len(item.value) for _, item in peer.protocol.storage.items())
            assert entries <= DEFAULT_ROOM.entries_per_key + PEERS
            assert peer.p2p.metrics.records_refused[Reason.CROWDED_KEY] >= CROWD - DEFAULT_ROOM.entries_per_key - PEERS
