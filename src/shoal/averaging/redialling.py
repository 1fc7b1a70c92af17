"""Calls to another member of a round that begin anew: after a failed dial, or when a connection broke."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

from shoal.errors import DialError, InterruptedDialError, RefusedDialError
from shoal.p2p import Call

MAX_DIALS = 3
# The pause before the first repeated dial, in seconds.
REDIAL_PAUSE = 0.1
# After so many seconds no dial is repeated, because a peer that has not answered by then will hardly answer at all.
REDIAL_WITHIN = 2.0
# Both limits are larger by this factor if the peer has answered and the connection broke then, which is mostly chance.
ANSWERED_FACTOR = 2
# A member whose connection broke is waited for so many seconds, unless it is known that it is dead.
RESUME_SECONDS = 3.0
# Or so many, as long as it shows in some other way that it lives. A router that has forgotten its connections may leave
# it unreachable until its relays hear of it again.
RETURN_SECONDS = 15.0


@asynccontextmanager
async def open_patiently(open_call: Callable[[], AbstractAsyncContextManager[Call]]) -> AsyncIterator[Call]:
    """Open a call to another member. A dial that fails quickly is repeated; nothing has been sent by then.

    Raises:
        DialError: the member could not be reached.
    """
    now = asyncio.get_running_loop().time
    begun = now()
    async with AsyncExitStack() as stack:
        for attempt in itertools.count(1):
            try:
                call = await stack.enter_async_context(open_call())
                break
            except DialError as e:
                factor = ANSWERED_FACTOR if isinstance(e, InterruptedDialError) else 1
                if attempt >= factor * MAX_DIALS or now() - begun > factor * REDIAL_WITHIN:
                    raise
                await asyncio.sleep(attempt * REDIAL_PAUSE)
        yield call


class Life(Protocol):
    """What is known of the life of a member whose connection broke."""

    def is_heard(self) -> bool:
        """Whether anything has come from it in the last ``RESUME_SECONDS``, in whatever way."""

    def has_come_after(self, moment: float) -> bool:
        """Whether it has shown life over a new connection, while another one was broken, after a moment of the loop."""


def may_be_dead(error: DialError, life: Life, since: float) -> bool:
    """Whether a refused dial shows that a member is dead, when its connection broke at ``since``.

    Not if it has just shown in a new way that it lives: its relays may not know it again yet, and at its address in a
    private network there may be somebody else here.
    """
    lives = life.has_come_after(since - RESUME_SECONDS) and life.is_heard()
    return isinstance(error, RefusedDialError) and not lives


@asynccontextmanager
async def open_again(open_call: Callable[[], AbstractAsyncContextManager[Call]], life: Life) -> AsyncIterator[Call]:
    """Open a call to a member whose connection has just broken.

    It is dialled for ``RESUME_SECONDS``, and longer as long as it is heard, for ``RETURN_SECONDS`` at most.

    Raises:
        RefusedDialError: it is dead.
        DialError, TimeoutError: it could not be reached in time.
    """
    now = asyncio.get_running_loop().time
    begun = since = now()
    async with AsyncExitStack() as stack:
        while True:
            try:
                async with asyncio.timeout_at(since + RESUME_SECONDS):
                    call = await stack.enter_async_context(open_call())
                break
            except (DialError, TimeoutError) as e:
                if isinstance(e, DialError) and may_be_dead(e, life, begun):
                    raise
                if now() + REDIAL_PAUSE > since + RESUME_SECONDS:
                    if not life.is_heard() or now() > begun + RETURN_SECONDS:
                        raise
                    since = now()
                await asyncio.sleep(REDIAL_PAUSE)
        yield call
