"""One round in one group, from the agreed group to the result; and all rounds of an averager, by id."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence

from shoal.averaging.allreduce import AllReduce
from shoal.averaging.completion import Completion
from shoal.averaging.control import RoundResult
from shoal.averaging.group_info import GROUP_ID_BYTES
from shoal.averaging.protocol import BeginReduce, RoundKind, RoundMessage, RoundStatus
from shoal.errors import AllreduceException, ProtocolError
from shoal.p2p import Call, PeerID
from shoal.tasks import all_of, cancel_and_wait, first_completed

MAX_WAITING_CALLS = 1024
MAX_REMEMBERED_ROUNDS = 256


class Round:
    """Exchange of parts, then completion; and what other members call in the meantime."""

    def __init__(self, allreduce: AllReduce) -> None:
        self._allreduce, self._completion = allreduce, Completion(allreduce)
        self._work: asyncio.Future[None] | None = None

    async def run(self, failed_before: Sequence[int] = ()) -> RoundResult:
        """Average; afterwards the tensors hold the result. :meth:`finish` must follow.

        Args:
            failed_before: members that are not waited for, because they failed in an earlier phase.

        Raises:
            AllreduceException: nothing at all was averaged; the tensors are as they were.
        """
        started = asyncio.get_running_loop().time()
        for member in failed_before:
            self._allreduce.member_failed(member, "failed in an earlier phase")
        # the call to the coordinator first: it takes the connection that is there, so that all hear of the end together
        self._work = work = asyncio.ensure_future(all_of(self._complete(), self._allreduce.run()))
        try:
            await first_completed(asyncio.shield(work), self._allreduce.all_complete.wait())
            if work.done():
                work.result()
        except BaseException:
            await cancel_and_wait(work)
            raise
        return self._allreduce.result(asyncio.get_running_loop().time() - started)

    async def _complete(self) -> None:
        try:
            await self._completion.run()
        finally:
            self._allreduce.end()

    async def finish(self, linger: float) -> None:
        """End politely; the result is there, and the tensors are not touched any more.

        Args:
            linger: seconds for which members that were late may come for the result.
        """
        if self._work is None:
            return
        try:
            await asyncio.wait([self._work])
            if self._completion.closed_early:
                await asyncio.sleep(linger)
        finally:
            await cancel_and_wait(self._work)

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


class Rounds:
    """The rounds in which this averager takes part, by id. Calls of other members may come before the round begins.

    The id of a round is the id of its group and the number of its phase.
    """

    def __init__(self) -> None:
        self._running: dict[bytes, Round] = {}
        self._waiting: dict[bytes, set[asyncio.Future[Round]]] = {}
        """Calls that are earlier than the round, by its id."""
        self._lingering: dict[bytes, tuple[Round, asyncio.Task[None]]] = {}
        """Rounds whose result is there, until they have ended politely."""
        self._finished: OrderedDict[bytes, None] = OrderedDict()
        """Ids of rounds, and of groups that this averager has left."""

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting) + len(self._lingering)

    async def run(
        self, round_id: bytes, current: Round, failed_before: Sequence[int] = (), linger: float = 0.0
    ) -> RoundResult:
        """Run a round while others can find it, and members that are late for it so many seconds longer.

        Raises:
            AllreduceException: nothing was averaged.
        """
        self._running[round_id] = current
        for call in self._waiting.get(round_id, ()):
            if not call.done():
                call.set_result(current)
        try:
            return await current.run(failed_before)
        finally:
            del self._running[round_id]
            self._remember(round_id)
            self._lingering[round_id] = current, asyncio.ensure_future(self._finish(round_id, current, linger))

    async def _finish(self, round_id: bytes, current: Round, linger: float) -> None:
        try:
            await current.finish(linger)
        finally:
            self._lingering.pop(round_id, None)

    def leave_group(self, group_id: bytes) -> None:
        """No further round will begin in this group."""
        for round_id, calls in self._waiting.items():
            if round_id.startswith(group_id):
                self._refuse(calls, "this member has left the group")
        self._remember(group_id)

    async def close(self) -> None:
        """No further round will begin at all."""
        for calls in self._waiting.values():
            self._refuse(calls, "this averager was shut down")
        await cancel_and_wait(*[task for _, task in self._lingering.values()])

    def _refuse(self, calls: set[asyncio.Future[Round]], reason: str) -> None:
        for call in calls:
            if not call.done():
                call.set_exception(AllreduceException(reason))

    def _remember(self, finished_id: bytes) -> None:
        self._finished[finished_id] = None
        while len(self._finished) > MAX_REMEMBERED_ROUNDS:
            self._finished.popitem(last=False)

    def _is_finished(self, round_id: bytes) -> bool:
        return round_id in self._finished or round_id[:GROUP_ID_BYTES] in self._finished

    async def find(self, round_id: bytes, patience: float) -> Round:
        """The round that another member means.

        Args:
            patience: seconds to wait for its beginning here.

        Raises:
            AllreduceException: it is over, or there are too many calls for rounds that do not exist.
            TimeoutError: it did not begin.
        """
        if round_id in self._running:
            return self._running[round_id]
        if round_id in self._lingering:
            return self._lingering[round_id][0]
        if self._is_finished(round_id):
            raise AllreduceException("this member has finished the round already, or has left it")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING_CALLS:
            raise AllreduceException("too many calls wait for rounds that this member does not know")
        call: asyncio.Future[Round] = asyncio.get_running_loop().create_future()
        calls = self._waiting.setdefault(round_id, set())
        calls.add(call)
        try:
            async with asyncio.timeout(None if math.isinf(patience) else patience):
                return await call
        finally:
            calls.remove(call)
            if not calls:
                self._waiting.pop(round_id, None)

    def status(self, round_id: bytes) -> RoundStatus:
        """How far a round is here."""
        if round_id in self._running:
            return RoundStatus.RUNNING
        return RoundStatus.FINISHED if self._is_finished(round_id) else RoundStatus.UNKNOWN
