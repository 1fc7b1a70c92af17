"""Questions to a member of a round whether it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from shoal.averaging.messages import ALIVE_PER_TIMEOUT, PEER_FAILURES, StatusReply, StatusRequest, reason_of
from shoal.averaging.redialling import REDIAL_PAUSE, RESUME_SECONDS, RETURN_SECONDS, Life, may_be_dead
from shoal.errors import P2PHandlerError, RefusedDialError
from shoal.p2p import StubBase

logger = logging.getLogger(__name__)

# A member has at least so many seconds to answer whether it lives, because it may have to be dialled first.
MIN_QUESTION_SECONDS = 1.5


async def wait_until_silent(stub: StubBase, round_id: bytes, heard_at: Callable[[], float], limit: float) -> bool:
    """Ask a member whether it lives when it has sent nothing for a while; return if it does not answer.

    A reducer or coordinator that waits for others may be silent for longer than a sender. The question tells such a
    member from a frozen one. It is asked more than once, because a single question may get lost.

    Args:
        stub: calls the member.
        round_id: names the round.
        heard_at: tells the loop time of the member's last sign of life.
        limit: a living member gives a sign at least every so many seconds.

    Returns:
        Whether it is silent; otherwise it lives, and has given the one who asks up.
    """
    now = asyncio.get_running_loop().time
    last_sign, unanswered = now(), 0
    pause = limit / ALIVE_PER_TIMEOUT
    patience = max(pause, MIN_QUESTION_SECONDS)
    while unanswered < ALIVE_PER_TIMEOUT - 1:
        asked, last_sign = now(), max(last_sign, heard_at())
        if asked < last_sign + pause:
            unanswered = 0
            await asyncio.sleep(last_sign + pause - asked)
            continue
        try:
            with suppress(P2PHandlerError):  # even an error shows that the member lives
                reply: StatusReply = await stub.rpc_round_status(StatusRequest(round_id=round_id), timeout=patience)
                if reply.has_given_up:
                    return False
            last_sign = now()
        except PEER_FAILURES as e:
            logger.debug("asked a member whether it lives: %r", e)
            stub.dial_anew()
            await asyncio.sleep(asked + patience - now())
            unanswered = unanswered + 1 if heard_at() < asked else 0
    return True


async def wait_for_return(
    stub: StubBase | None,
    question: StatusRequest,
    returned: asyncio.Event,
    life: Life,
    why_not: Callable[[StatusReply], str | None],
    is_missed: Callable[[], bool] = lambda: True,
) -> str | None:
    """Wait for a member whose connection broke, for longer if it shows in some other way that it lives.

    Args:
        stub: calls the member; ``None``: there is no need to ask, or no way.
        question: tells the member, which may not know it, what is broken.
        returned: set when it has come back.
        life: tells whether it lives.
        why_not: tells from its answer why it will not come; ``None``: it may come.
        is_missed: whether it has something to come back for, as far as this member knows.

    Returns:
        Why it is given up; ``None``: it has come back, or it lives and is not missed.
    """
    now = asyncio.get_running_loop().time
    begun = now()
    if stub is not None:
        stub.dial_anew()
    while now() < begun + RETURN_SECONDS:
        has_answered = False
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                if stub is not None:
                    reply = await _ask_for_status(stub, question, life, begun)
                    if not is_missed():
                        return None
                    if reason := why_not(reply):
                        return reason
                    has_answered = True
                await returned.wait()
                return None
        except RefusedDialError as e:
            return reason_of(e)
        except TimeoutError:
            if not (has_answered or life.is_heard()):
                break
    return None if returned.is_set() else "its connection broke, and it did not come back"


async def _ask_for_status(stub: StubBase, question: StatusRequest, life: Life, since: float) -> StatusReply:
    """Ask a member about a round until it answers.

    Raises:
        RefusedDialError: it is dead.
    """
    while True:
        try:
            reply: StatusReply = await stub.rpc_round_status(question)
            return reply
        except PEER_FAILURES as e:
            if isinstance(e, RefusedDialError) and may_be_dead(e, life, since):
                raise
            logger.debug("asked a member whose connection broke about the round: %r", e)
        await asyncio.sleep(REDIAL_PAUSE)
