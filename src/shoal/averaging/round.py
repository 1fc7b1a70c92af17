"""One round in one group, from the agreed group to the result."""

from __future__ import annotations

import asyncio
import math

from shoal.averaging.allreduce import AllReduce
from shoal.averaging.completion import Completion
from shoal.averaging.control import RoundResult
from shoal.averaging.protocol import BeginReduce, RoundKind, RoundMessage
from shoal.errors import ProtocolError
from shoal.p2p import Call, PeerID
from shoal.reactor import cancel_and_wait


class Round:
    """Exchange of parts, then completion; and what other members call in the meantime."""

    def __init__(self, allreduce: AllReduce) -> None:
        self._allreduce, self._completion = allreduce, Completion(allreduce)

    async def run(self) -> RoundResult:
        """Average; afterwards the tensors hold the result.

        Raises:
            AllreduceException: nothing at all was averaged; the tensors are as they were.
        """
        started = asyncio.get_running_loop().time()
        tasks = [asyncio.ensure_future(self._allreduce.run()), asyncio.ensure_future(self._completion.run())]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)
        return self._allreduce.result(asyncio.get_running_loop().time() - started)

    async def serve_sender(self, call: Call, begin: BeginReduce, sender: PeerID) -> None:
        """A member sends the parts that this one reduces."""
        await self._allreduce.serve(call, begin, sender)

    async def serve_member(self, call: Call, hello: RoundMessage, member: PeerID) -> None:
        """A member takes this one for the coordinator.

        Raises:
            ProtocolError: it is no member, or breaks the protocol.
        """
        peers = self._allreduce.group.peer_ids
        if hello.kind != RoundKind.HELLO or member not in peers or not 0 <= hello.weight < math.inf:
            raise ProtocolError("not the greeting of a member of this round")
        await self._completion.serve(call, hello, peers.index(member))
