"""Notices connections that have broken without a sign, as when a router forgets them or a relay loses its power.

While a call of a round has nothing to carry, both sides show every second that the connection works. If nothing at all
comes on a call for some seconds, the other member is asked over a new connection whether it lives. If it answers, and
the call stays silent all the same, the call is cut on both sides, and begins anew as after any other break
(:mod:`~shoal.averaging.round.pair`). If it does not answer, nothing is cut: its machine may only be slow.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.averaging.control import AveragingMode
from shoal.averaging.messages import PEER_FAILURES, RoundStatus, StatusRequest
from shoal.base.tasks import cancel_and_wait
from shoal.p2p import Call, PeerID

if TYPE_CHECKING:
    from shoal.averaging.round.exchange import AllReduce
    from shoal.averaging.round.members import RoundMember

logger = logging.getLogger(__name__)

# Each side of a call that has nothing to carry shows this often that the connection works.
PULSE_SECONDS = 1.0
# A call on which nothing comes for so long is silent.
SILENT_SECONDS = 4.0
# A member has so long to answer over a new connection; then it is asked again.
ANSWER_SECONDS = 4.0

# A call that has begun so recently is not the one of which the other member says that it is broken.
NEW_CALL_SECONDS = 1.0


@dataclass
class _Ear:
    """When something came on a call for the last time, as far as anybody has looked."""

    received: int
    since: float
    begun: float
    heard_at: float = -math.inf


class MemberCalls:
    """Calls between this member and another one."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._ears: dict[Call, _Ear] = {}
        self.are_arranged = False
        """Relays have brought the newest of them about, or carry it."""

    @contextmanager
    def watching(self, call: Call) -> Iterator[None]:
        """Watch a call while this block runs."""
        stream = call.connection.stream
        self.are_arranged = stream.is_arranged or stream.is_relayed
        self._ears[call] = _Ear(stream.received, self._now(), self._now())
        try:
            yield
        finally:
            del self._ears[call]

    def look(self) -> None:
        """Show life on calls that have nothing to carry, and note on which of them something has come."""
        for call, ear in self._ears.items():
            stream = call.connection.stream
            if not call.sent_end:
                call.connection.show_life()
            # What nobody reads stays on its way, so that shows nothing.
            if stream.received != ear.received:
                ear.heard_at = self._now()
            if stream.received != ear.received or not stream.is_awaited or stream.closed:
                ear.received, ear.since = stream.received, self._now()

    @property
    def heard_at(self) -> float:
        """When something came on a call that still lasts, as far as anybody has looked."""
        return max((ear.heard_at for ear in self._ears.values()), default=-math.inf)

    @property
    def silent(self) -> list[Call]:
        """Calls on which nothing comes."""
        limit = self._now() - SILENT_SECONDS
        return [call for call, ear in self._ears.items() if ear.since <= limit]

    def cut(self, *, older_than: float = 0.0) -> None:
        """Cut all calls that have lasted for so many seconds."""
        limit = self._now() - older_than
        cut([call for call, ear in self._ears.items() if ear.begun <= limit])


def cut(calls: list[Call]) -> None:
    """Let calls end as if their connections had broken."""
    for call in calls:
        call.connection.stream.abort()


class Watchdog:
    """Looks after all calls of a round.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self._asking: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look every second."""
        try:
            while True:
                await asyncio.sleep(PULSE_SECONDS)
                for member in self.allreduce.roster.members:
                    if member is not self.allreduce.roster.own:
                        self._look(member)
        finally:
            await cancel_and_wait(*self._asking.values())

    def take_question(self, told: StatusRequest, asker: PeerID) -> bool:
        """Somebody asks about the round. It may know of broken calls that still seem to work here.

        Returns:
            Whether this member has given the asker up.
        """
        if asker not in self.allreduce.group.peer_ids:
            return False
        index = self.allreduce.group.peer_ids.index(asker)
        if index == self.allreduce.own_index:
            return False
        pair = self.allreduce.pairs[index]
        pair.note_life(comes_anew=told.resume > 0 or told.is_link_broken)
        if told.resume > pair.generation:
            pair.lines.cut()
        if told.is_link_broken:
            pair.link.cut(older_than=NEW_CALL_SECONDS)
        return self.allreduce.has_given_up(self.allreduce.roster.members[index])

    def _look(self, member: RoundMember) -> None:
        pair = self.allreduce.pairs[member.index]
        for lines in (pair.lines, pair.link):
            lines.look()
        can_be_asked = member.mode is not AveragingMode.CLIENT and not member.failed
        if not (pair.lines.silent or pair.link.silent) or not can_be_asked or member.index in self._asking:
            return
        asking = asyncio.ensure_future(self._ask(member))
        self._asking[member.index] = asking
        asking.add_done_callback(lambda _: self._asking.pop(member.index))

    async def _ask(self, member: RoundMember) -> None:
        """Cut what is silent if the member answers over a new connection."""
        pair, stub = self.allreduce.pairs[member.index], self.allreduce.get_stub(member.peer_id)
        if self.allreduce.ended.is_set():  # nobody needs these calls any more
            cut([*pair.lines.silent, *pair.link.silent])
            return
        question, generation = StatusRequest(round_id=self.allreduce.round_id), pair.generation
        stub.note_silence()
        try:
            answer = await stub.rpc_round_status(question, timeout=ANSWER_SECONDS)
            if answer.status == RoundStatus.UNKNOWN:  # it has not begun
                return
            pair.note_life(comes_anew=True)
            # What it has said before may still be on its way.
            await asyncio.sleep(PULSE_SECONDS / 2)
            for lines in (pair.lines, pair.link):
                lines.look()
            exchange = pair.lines.silent if pair.generation == generation else []
            silent = [*exchange, *pair.link.silent]
            if silent:
                logger.info("the connection to group member %s is silent, and is cut", member.peer_id)
                question.resume, question.is_link_broken = generation + 1 if exchange else 0, bool(pair.link.silent)
                cut(silent)
                await stub.rpc_round_status(question, timeout=ANSWER_SECONDS)
        except PEER_FAILURES as e:
            logger.debug("asked a silent member whether it lives: %r", e)
