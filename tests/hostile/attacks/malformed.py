"""Strangers who send a message of most of a megabyte that costs much to read."""

from __future__ import annotations

import math
import struct

from shoal.averaging.messages import InvitationReply, JoinRequest, PeerAddresses
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.crypto import tag_of
from shoal.dht.records import NewRecord
from shoal.dht.routing import DHTID
from shoal.dht.validation import PLAIN_VALUE, WHOLE_DICTIONARY
from shoal.p2p import PeerID
from tests.hostile.attacker import Attacker


async def _store(me: Attacker, peer: PeerID, value: bytes, subkey: bytes = PLAIN_VALUE) -> None:
    record = NewRecord(DHTID.generate(f"{me.run}_progress"), subkey, value, get_dht_time() + 600, False)
    await me.node.protocol.call_store(peer, [record])


async def sends_huge_peer_ids(me: Attacker) -> None:
    """A stranger. Peer ids of hundreds of kB: in a record, in an answer, in a request. No loop stands still."""
    huge = bytes(range(256)) * 1700

    async def send(peer: PeerID) -> None:
        record = {"peer_id": huge, "epoch": 1, "samples_accumulated": 1, "samples_per_second": 1.0, "addresses": []}
        record |= {"time": get_dht_time(), "client_mode": False, "endorsement": huge[:64], "rounds": b""}
        tag = MSGPackSerializer.dumps(tag_of(me.p2p.peer_id))
        await _store(me, peer, MSGPackSerializer.dumps(record), subkey=tag)
        async with me.averager(peer).rpc_join_group() as call:
            leader = PeerAddresses(peer_id=2 * huge)
            await call.send(InvitationReply(better_leader=leader, expiration=get_dht_time()), end=True)
            await call.receive(InvitationReply)
        async with me.averager(peer).rpc_join_group() as call:
            settings = {"z" * 450_000: "1" * 450_000}
            await call.send(JoinRequest(f"{me.run}_grad_averager.0b", settings, get_dht_time() + 60, 0), end=True)
            await call.receive(JoinRequest)

    await me.strike_again_and_again(send)


async def sends_colliding_keys(me: Attacker) -> None:
    """A stranger. 190 kB of a dictionary whose keys have one hash. To read it must take milliseconds, not seconds."""
    # Numbers have the same hash if they differ by a multiple of 2⁶¹ - 1: so have powers of two 61 exponents apart, and
    # these times the same whole number.
    keys = [math.ldexp(number, exponent) for number in range(1, 1300) for exponent in range(0, 1000, 61)]
    packed = b"\xdf" + struct.pack(">I", len(keys)) + b"".join(b"\xcb" + struct.pack(">d", k) + b"\x01" for k in keys)

    async def send(peer: PeerID) -> None:
        await _store(me, peer, packed)
        await _store(me, peer, packed, subkey=WHOLE_DICTIONARY)

    await me.strike_again_and_again(send)


async def sends_unknown_extensions(me: Attacker) -> None:
    """A stranger. A list of 170,000 msgpack extensions that nobody knows. At most a line in the log comes of it."""
    count = 170_000
    packed = b"\xdd" + struct.pack(">I", count) + b"\xd4\x55\x00" * count

    async def send(peer: PeerID) -> None:
        await _store(me, peer, packed)
        await _store(me, peer, packed, subkey=b"\xd4\x55\x00")

    await me.strike_again_and_again(send)
