"""Strangers who take what newcomers need: the attention of donors."""

from __future__ import annotations

import asyncio

from shoal.averaging.messages import ChunkRequest, DownloadRequest, StateAnswer, StateChunk, StateHeader
from shoal.p2p import PeerID
from tests.hostile.attacker import FAILURES, Attacker

DOWNLOADS = 10
SECONDS_BETWEEN_CHUNKS = 8.0


async def asks_for_a_chunk_now_and_then(me: Attacker) -> None:
    """A stranger. Ten downloads from every donor, of one chunk in 8 seconds. Newcomers must get a state."""

    async def dawdle(peer: PeerID) -> None:
        while True:
            try:
                async with me.averager(peer, me.state_of).rpc_download_state() as call:
                    await call.send(DownloadRequest())
                    header = await call.receive(StateAnswer)
                    await call.read_payload(2**30)
                    me.has_struck.set()
                    while isinstance(header, StateHeader):
                        await call.send(ChunkRequest(index=0))
                        await call.receive(StateChunk)
                        await call.read_payload(2**30)
                        await asyncio.sleep(SECONDS_BETWEEN_CHUNKS)
            except FAILURES:
                await asyncio.sleep(1.0)

    await asyncio.gather(*(dawdle(peer) for peer in await me.victims() for _ in range(DOWNLOADS)))
