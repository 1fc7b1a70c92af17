"""Strangers in the table: they withdraw what others have declared, fill it, crowd keys, and hide what is in it."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.records import (
    FindRequest,
    FindResponse,
    FindResult,
    Found,
    NewRecord,
    StoreRequest,
    StoreResponse,
    split_into_requests,
)
from shoal.dht.routing import DHTID
from shoal.dht.validation import PLAIN_VALUE, DHTRecord
from shoal.optim.progress.records import ProgressRecord, endorse
from shoal.p2p import Identity, P2PContext, PeerID
from tests.hostile.attacker import PACE, Attacker

YEAR, DAY = 365 * 86400.0, 86400.0
KEYS = ("_progress", *(f"_{what}_averager.{end}" for what in ("grad", "state") for end in ("0b", "all_averagers")))
IDENTITIES = 5
RECORDS, RECORD_BYTES = 16, 40_000
CROWD = 2500
"""Entries that a stranger stores under one key: more than an answer can carry, or anybody reads."""


async def withdraws_what_others_declared(me: Attacker) -> None:
    """A stranger. "They are not there any more", for a hundred years. Donors and groups must still be found."""

    async def withdraw(expiration: float) -> None:
        for key in (me.run + end for end in KEYS):
            found = await me.node.get(key, latest=True)
            for subkey in found.value if found is not None else ():
                await me.node.store(key, None, expiration, subkey=subkey)

    while True:
        for seconds in (100 * YEAR, DAY):
            await withdraw(get_dht_time() + seconds)
        me.has_struck.set()
        await asyncio.sleep(PACE)


async def fills_the_table(me: Attacker) -> None:
    """A stranger. Records of any key that live as long as they may. The memory is bounded, honest records are kept."""
    value, number = MSGPackSerializer.dumps(bytes(RECORD_BYTES)), 0

    async def store(peer: PeerID) -> None:
        nonlocal number
        number += RECORDS
        expiration = get_dht_time() + DAY - 60
        keys = [DHTID.generate(f"{me.p2p.peer_id} {index}") for index in range(number, number + RECORDS)]
        records = [NewRecord(key, PLAIN_VALUE, value, expiration, False) for key in keys]
        await me.node.protocol.call_store(peer, records)

    await me.strike_again_and_again(store, pace=0.05)


def false_records(run: str, count: int, identity: Identity) -> list[NewRecord]:
    """Records of progress under the key of a run, all of one peer, each under an owner tag of its own."""
    expiration, records = get_dht_time() + 3000.0, []
    for _ in range(count):
        signatures = SignatureValidator(PrivateKey())
        tag = signatures.local_public_key
        record = ProgressRecord(
            peer_id=identity.peer_id.to_bytes(),
            epoch=0,
            samples_accumulated=1,
            samples_per_second=1.0,
            time=get_dht_time(),
            client_mode=True,
            endorsement=endorse(identity, tag),
        )
        records.append(_signed(f"{run}_progress", tag, record.to_dict(), expiration, signatures))
    return records


def false_averagers(run: str, count: int) -> list[NewRecord]:
    """Records of averagers that look for a group, of peers that do not exist."""
    expiration, records = get_dht_time() + 3000.0, []
    for _ in range(count):
        signatures = SignatureValidator(PrivateKey(Identity.generate().private_key))
        tag = signatures.local_public_key
        records.append(_signed(f"{run}_grad_averager.0b", tag, ["/ip4/192.0.2.1/tcp/9"], expiration, signatures))
    return records


def _signed(key: str, tag: bytes, value: Any, expiration: float, signatures: SignatureValidator) -> NewRecord:
    key_id, subkey = DHTID.generate(key), MSGPackSerializer.dumps(tag)
    unsigned = DHTRecord(key_id.to_bytes(), subkey, MSGPackSerializer.dumps(value), expiration)
    return NewRecord(key_id, subkey, signatures.sign_value(unsigned), expiration)


async def crowds_the_keys_of_a_run(me: Attacker) -> None:
    """A stranger. Thousands of well-formed records beside those of the run. Newcomers must find it nevertheless."""
    records = false_records(me.run, CROWD, me.p2p.identity) + false_averagers(me.run, CROWD)
    while True:
        peers = await me.victims()
        for batch in split_into_requests(records):
            await me.strike(lambda peer, batch=batch: me.node.protocol.call_store(peer, batch), peers)  # type: ignore[misc]
        await asyncio.sleep(600.0)


class _Forgetful:
    """Says that it has stored everything, and knows nothing."""

    def __init__(self, protocol: Any) -> None:
        self._protocol, self.rpc_ping = protocol, protocol.rpc_ping

    async def rpc_store(self, request: StoreRequest, context: P2PContext) -> StoreResponse:
        return StoreResponse(refusals=[None] * len(request.records), node_id=self._protocol.node_id.to_bytes())

    async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
        nothing = [FindResult(Found.NOTHING, b"", 0.0, []) for _ in request.keys]
        return FindResponse(nothing, b"", [], node_id=self._protocol.node_id.to_bytes())


async def hides_what_is_stored(me: Attacker) -> None:
    """Five nodes next to each key of the run, that accept everything and know nothing. Newcomers must find the run."""
    places = [int(DHTID.generate(me.run + end)) for end in ("_progress", "_grad_averager.0b")]
    numbers = range(1, IDENTITIES + 1)
    nodes = [await me.make_node(node_id=DHTID(place ^ number)) for place in places for number in numbers]
    try:
        for node in nodes:
            await node.protocol.remove_p2p_handlers(node.p2p)
            await node.protocol.add_p2p_handlers(node.p2p, _Forgetful(node.protocol))
        me.has_struck.set()
        await asyncio.Event().wait()
    finally:
        await asyncio.gather(*(node.shutdown() for node in nodes))
