"""Calls between two peers about one task, such as a round, that survive broken connections.

Each side has one :class:`ResumableCall` for the task. Its user exchanges messages in order, and learns through
``on_gone`` that the other peer is gone, with the error that says why. A broken connection alone is no such error.

*Generations.* Any number of calls may carry the task, and all of them belong to one generation. When one breaks, the
peer that notices it cuts the others, because they take the same path, and starts the next generation::

    caller ── the generation, and what has not arrived here ──► callee
    caller ◄──────────────────── what has not arrived there ─── callee

From then on each side sends only what the other one lacks. The lists are made when all older calls have ended, so
nothing arrives twice and nothing is lost. A peer that hears of a newer generation follows at once. If both make calls,
each restarts its own.

*Return.* The callee can only wait for the caller to call again. It asks whether the caller is alive, and tells it what
is broken. A refused connection means that the program is gone. Otherwise the caller has ``RESUME_SECONDS`` to come
back, or ``RETURN_SECONDS`` while it shows signs of life.

*Silence.* A connection may break without a sign, as when a router forgets it. Both sides send a heartbeat every second
while a call has nothing to carry. If nothing arrives for ``SILENT_SECONDS``, the other peer is probed over a new
connection. If it answers and the call stays silent, the call is cut on both sides and restarts as after any other
break. If it does not answer, nothing is cut: its machine may only be slow. After several unanswered probes it is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shoal.base.tasks import TaskSet, cancel_and_wait
from shoal.errors import (
    DialError,
    InterruptedDialError,
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
    RefusedDialError,
    ShoalError,
    StreamClosedError,
)
from shoal.net.connection import Call
from shoal.net.service import StubBase

logger = logging.getLogger(__name__)

# All chosen, for networks where a round trip takes up to half a second.

# Dials of one peer before it counts as unreachable; two in a row rarely fail by chance.
MAX_DIALS = 3
# The pause before the first repeated dial, in seconds.
REDIAL_PAUSE = 0.1
# Seconds after which no dial is repeated: a peer that has not answered by then is unlikely to answer at all.
REDIAL_WITHIN = 2.0
# Both limits grow by this factor if the peer answered and the connection then broke, which is usually chance.
ANSWERED_FACTOR = 2
# Seconds that a peer has to come back after its connection broke, unless it is known to be dead.
RESUME_SECONDS = 3.0
# The same while it shows life in some other way. A router that forgot its connections may leave it unreachable until
# its relays hear from it again.
RETURN_SECONDS = 15.0
# The most generations of calls for one task.
MAX_RESUMES = 16
# Seconds between heartbeats on a call that has nothing to carry.
PULSE_SECONDS = 1.0
# A call on which nothing arrives for this long is silent.
SILENT_SECONDS = 4 * PULSE_SECONDS
# Seconds that a peer has to answer over a new connection before it is probed again.
ANSWER_SECONDS = SILENT_SECONDS
# A live peer shows a sign of life this many times within the time after which it would be given up.
ALIVE_PER_TIMEOUT = 3

GIVEN_UP = "has given this member up"

# Errors that another peer can cause here by failing.
_FAILURES = (P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError, ValueError, RuntimeError)


class SupersededError(ShoalError):
    """The calls of a generation were cut because the next one begins."""


class PeerLeftError(P2PDaemonError):
    """The other peer says that it does nothing more for the task."""


class GaveUpError(PeerLeftError):
    """The other peer has given up on this one; nothing else is wrong with it."""


class PeerSilentError(TimeoutError):
    """The other peer left several liveness probes unanswered."""


class LifeAnswer(NamedTuple):
    """The answer to a :class:`LifeQuestion`."""

    has_begun: bool
    """Whether it has begun the task."""
    has_given_up: bool
    """Whether it has given up on the peer that asks."""
    why_over: str | None
    """Why it makes no more calls of the exchange; ``None`` = it still may."""
    why_unlinked: str | None
    """Why it no longer holds a link to the peer that asks; ``None`` = it still may."""


class LifeQuestion(NamedTuple):
    """A liveness probe, which also tells which calls have broken."""

    resume: int = 0
    """All calls of the exchange in generations below this one have broken."""
    is_link_broken: bool = False


class AskPeer(Protocol):
    """Asks the other peer about the task; raises what a call raises."""

    async def __call__(self, question: LifeQuestion, timeout: float | None = None) -> LifeAnswer: ...


class Contents(Protocol):
    """What the calls of an exchange carry. It knows what has not arrived yet, on either side."""

    heard_at: float
    """Loop time of the other peer's last message."""

    def is_awaited(self) -> bool:
        """Whether the other peer has yet to deliver everything, or to say that it has."""

    def is_incomplete(self) -> bool:
        """Whether the other peer still has something to send."""

    def excuse(self) -> None:
        """Stop waiting: the other peer is alive and has delivered everything, but its last message was lost."""

    def restart(self, *, own: bool, others: bool) -> None:
        """Prepare for new calls; all older ones have ended.

        Args:
            own: whether this peer calls again.
            others: whether the other peer calls again, as far as this one knows.
        """

    def count_calls(self, round_trip: float) -> int:
        """The number of calls that this peer makes to the other one, if it makes any."""


class Life(Protocol):
    """Signs of life of a peer whose connection broke."""

    def is_heard(self) -> bool:
        """Whether anything has arrived from it in the last ``RESUME_SECONDS``, in any way."""

    def has_come_after(self, moment: float) -> bool:
        """Whether it came back over a new connection after this time of the loop, while another one was broken."""


@asynccontextmanager
async def open_patiently(
    open_call: Callable[[], AbstractAsyncContextManager[Call]], within: float = REDIAL_WITHIN
) -> AsyncIterator[Call]:
    """Open a call. A dial that fails is repeated; nothing has been sent by then.

    Args:
        within: seconds after which it is not repeated.

    Raises:
        DialError: the peer could not be reached.
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
                if attempt >= factor * MAX_DIALS or now() - begun > factor * within:
                    raise
                await asyncio.sleep(attempt * REDIAL_PAUSE)
        yield call


@asynccontextmanager
async def open_again(open_call: Callable[[], AbstractAsyncContextManager[Call]], life: Life) -> AsyncIterator[Call]:
    """Open a call to a peer whose connection has just broken.

    It is dialled for ``RESUME_SECONDS``, or for ``RETURN_SECONDS`` while it shows signs of life.

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
                if _is_death(e, life, begun):
                    raise
                if now() + REDIAL_PAUSE > since + RESUME_SECONDS:
                    if not life.is_heard() or now() > begun + RETURN_SECONDS:
                        raise
                    since = now()
                await asyncio.sleep(REDIAL_PAUSE)
        yield call


def _is_death(error: BaseException, life: Life, since: float) -> bool:
    """Whether a failed dial shows that a peer whose connection broke at ``since`` is dead.

    Not if it has just come back over a new connection: its relays may not know it yet, and another machine may have its
    address in the private network of this one.
    """
    lives = life.has_come_after(since - RESUME_SECONDS) and life.is_heard()
    return isinstance(error, RefusedDialError) and not lives


@dataclass
class _Ear:
    """When something last arrived on a call, as of the last look."""

    received: int
    since: float
    begun: float
    heard_at: float = -math.inf


class WatchedCalls:
    """Calls between two peers, and whether anything arrives on them."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._ears: dict[Call, _Ear] = {}
        self.are_arranged = False
        """Whether a relay arranged the newest of them, or carries it."""

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
        """Send heartbeats on calls that have nothing to carry, and note on which calls something has arrived."""
        for call, ear in self._ears.items():
            stream = call.connection.stream
            if not call.sent_end:
                call.connection.show_life()
            # While nobody reads, nothing arrives, so that proves nothing.
            if stream.received != ear.received:
                ear.heard_at = self._now()
            if stream.received != ear.received or not stream.is_awaited or stream.closed:
                ear.received, ear.since = stream.received, self._now()

    @property
    def calls(self) -> list[Call]:
        return [*self._ears]

    @property
    def heard_at(self) -> float:
        """When something last arrived on a call that is still open, as of the last look."""
        return max((ear.heard_at for ear in self._ears.values()), default=-math.inf)

    @property
    def silent(self) -> list[Call]:
        """Calls on which nothing has arrived for ``SILENT_SECONDS``."""
        limit = self._now() - SILENT_SECONDS
        return [call for call, ear in self._ears.items() if ear.since <= limit]

    def cut(self, *, older_than: float = 0.0) -> None:
        """Cut all calls that are at least this many seconds old."""
        limit = self._now() - older_than
        _cut([call for call, ear in self._ears.items() if ear.begun <= limit])


def _cut(calls: list[Call]) -> None:
    """End calls as if their connections had broken."""
    for call in calls:
        call.connection.stream.abort()


# It has many attributes, because generations, the return of a peer and its silence depend on each other.
class ResumableCall:
    """The calls between this peer and another one about one task: those of an exchange, and one *link*.

    On a link one peer follows the other: a single call that is simply made again when it breaks.

    Args:
        stub: calls the other peer.
        contents: what the calls of the exchange carry.
        ask: asks the other peer about the task.
        on_gone: called with the error that says why the other peer is gone, perhaps several times.
        can_be_called: whether this peer can call the other one.
    """

    def __init__(
        self,
        stub: StubBase,
        contents: Contents,
        ask: AskPeer,
        on_gone: Callable[[BaseException], object],
        *,
        can_be_called: bool = True,
    ) -> None:
        self._stub, self.contents, self._ask, self._on_gone = stub, contents, ask, on_gone
        self._can_be_called = can_be_called
        self.generation = 0
        """How often the calls of the exchange have restarted. Never smaller than ``_lost``."""
        # The newest generation in which a call has broken; -1 = none has.
        self._lost = -1
        # Set once the other peer has made a call of a newer generation than the lost one.
        self._returned = asyncio.Event()
        self.is_calling = False
        """Whether this peer makes calls of the exchange, and makes them again when they break."""
        self.is_over = False
        """The task is over: nothing restarts any more."""
        self.is_given_up = False
        """The exchange with the other peer has ended; a link to it may still last."""
        self.silent = asyncio.Event()
        """The other peer did not answer several questions whether it lives."""
        self.calls, self.link = WatchedCalls(), WatchedCalls()
        self._heard_at = self._came_at = -math.inf
        # The work on the calls of the present generation; all of it has ended when `_cutting` is done.
        self._work: dict[asyncio.Future[None], None] = {}
        self._cutting: asyncio.Future[None] | None = None
        # Tasks that look after the calls until `close`. Sets here keep their order, so that simulations repeat exactly.
        self._helpers = TaskSet()
        self._asking: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, silence: float, *, asks: bool = True) -> None:
        """Look after the calls until :meth:`close`.

        Args:
            silence: a living peer shows life at least this often, in seconds.
            asks: whether to ask the other peer when it is silent.
        """
        self._helpers.start(self._pulse())
        if asks and self._can_be_called:
            self._helpers.start(self._watch(silence))

    def close(self) -> list[asyncio.Future[None]]:
        """Start nothing more; returns the futures that still run, for the caller to cancel."""
        self.is_over = True
        return [*self._helpers, *([] if self._cutting is None else [self._cutting])]

    def note_life(self, *, is_new: bool = False) -> None:
        """The other peer has shown a sign of life.

        Args:
            is_new: it came over a new connection, while another one is broken.
        """
        self._heard_at = asyncio.get_running_loop().time()
        self._came_at = self._heard_at if is_new else self._came_at

    def _last_message(self) -> float:
        return max(self.contents.heard_at, self._heard_at)

    def has_come_after(self, moment: float) -> bool:
        return self._came_at > moment

    def is_heard(self) -> bool:
        heard_at = max(self._last_message(), self.calls.heard_at, self.link.heard_at)
        return heard_at > asyncio.get_running_loop().time() - RESUME_SECONDS

    async def _watch(self, limit: float) -> None:
        """Probe the other peer when it has sent nothing for a while; report it if it does not answer.

        It is probed more than once, because a single probe may get lost.
        """
        now = asyncio.get_running_loop().time
        last_sign, unanswered = now(), 0
        pause = limit / ALIVE_PER_TIMEOUT
        patience = max(pause, 1.5)  # the peer may have to be dialled first
        while unanswered < ALIVE_PER_TIMEOUT - 1:
            asked, last_sign = now(), max(last_sign, self._last_message())
            if asked < last_sign + pause:
                unanswered = 0
                await asyncio.sleep(last_sign + pause - asked)
                continue
            try:
                if (await self._ask(LifeQuestion(), patience)).has_given_up:
                    self._on_gone(GaveUpError(GIVEN_UP))
                    return
                last_sign = now()
            except P2PHandlerError:  # even an error shows that it lives
                last_sign = now()
            except _FAILURES as e:
                logger.debug("probed a quiet peer: %r", e)
                self._stub.dial_anew()
                await asyncio.sleep(asked + patience - now())
                unanswered = unanswered + 1 if self._last_message() < asked else 0
        self.silent.set()
        self._on_gone(PeerSilentError())

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            self.calls.look()
            self.link.look()
            is_silent = self.calls.silent or self.link.silent
            if is_silent and self._can_be_called and (self._asking is None or self._asking.done()):
                self._asking = self._helpers.start(self._cut_if_alive())

    async def _cut_if_alive(self) -> None:
        """Cut silent calls if the other peer answers over a new connection."""
        if self.is_over:  # nobody needs these calls any more
            _cut([*self.calls.silent, *self.link.silent])
            return
        generation = self.generation
        self._stub.note_silence()
        try:
            if not (await self._ask(LifeQuestion(), ANSWER_SECONDS)).has_begun:
                return
            self.note_life(is_new=True)
            # Earlier messages may still be in flight.
            await asyncio.sleep(PULSE_SECONDS / 2)
            self.calls.look()
            self.link.look()
            exchange, link = self.calls.silent if self.generation == generation else [], self.link.silent
            if exchange or link:
                logger.info("the connection to peer %s is silent and was cut", self._stub.peer)
                _cut([*exchange, *link])
                await self._ask(LifeQuestion(generation + 1 if exchange else 0, bool(link)), ANSWER_SECONDS)
        except _FAILURES as e:
            logger.debug("probed a silent peer: %r", e)

    def hear_question(self, question: LifeQuestion) -> None:
        """The other peer asks about the task. It may know of broken calls that still seem to work here."""
        self.note_life(is_new=question.resume > 0 or question.is_link_broken)
        if question.resume > self.generation:
            self.calls.cut()
        if question.is_link_broken:
            self.link.cut(older_than=1.0)  # a new link is not the one that the other peer reports as broken

    # --- the calls of the exchange ------------------------------------------------------------------------------------

    async def keep_calling(self, make_calls: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Make calls to the other peer; make them again in the next generation when they break.

        Args:
            make_calls: makes the calls of a generation, and returns when they have ended.

        Raises:
            P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError: the other peer failed.
        """
        self.is_calling = True
        try:
            while True:
                generation = await self._settle()
                try:
                    await self._run(generation, make_calls(generation))
                    return
                except SupersededError:
                    continue
                except StreamClosedError:
                    if not self._resume(generation):
                        raise
                    if generation:  # not the first break: perhaps the way to the other peer does not work yet
                        await asyncio.sleep(REDIAL_PAUSE)
        finally:
            self.is_calling = False

    async def serve(self, call: Call, generation: int, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Serve a call of the other peer. A failure goes to ``on_gone``, unless the exchange restarts.

        Args:
            begin: called when all calls of older generations have ended; returns what is done on this one.

        Raises:
            StreamClosedError: the call has broken, or was cut.
            ProtocolError, P2PDaemonError, TimeoutError: the other peer failed.
        """
        try:
            self._advance(generation)
            if await self._settle() != generation:
                raise SupersededError
            work = begin()
            self.note_life(is_new=generation > 0)
            if generation > self._lost:
                self._returned.set()
            try:
                call.connection.show_life()  # the first message may take a while
                with self.calls.watching(call):
                    await self._run(generation, work)
            except BaseException as e:
                self._note_failure(call, generation, e)
                raise
        except SupersededError as e:
            call.connection.abort()
            raise StreamClosedError("the exchange continues over other connections") from e

    def _note_failure(self, call: Call, generation: int, error: BaseException) -> None:
        if self.generation > generation:
            return
        # The end of a connection cancels its handler.
        is_broken = isinstance(error, StreamClosedError | asyncio.CancelledError) and call.connection.closed
        if not (is_broken and (self.is_over or self._resume(generation))):
            self._on_gone(error)

    @contextmanager
    def ending(self, call: Call, generation: int) -> Iterator[None]:
        """Wait inside this block for the end of a call on which everything was sent. If the call breaks first, the
        exchange restarts: the other peer may lack something, and does not know that nothing more comes."""
        try:
            with self.calls.watching(call):
                yield
        except (StreamClosedError, asyncio.CancelledError):  # the end of a connection cancels its handler
            if not self.is_calling and call.connection.closed:
                self._resume(generation)
            raise

    def _resume(self, generation: int) -> bool:
        """A call of this generation has broken before its time; returns whether the exchange restarts."""
        if self.is_over or self.is_given_up or generation >= MAX_RESUMES:
            return False
        if self._lost < generation:
            logger.info("the connection to peer %s broke; the exchange restarts over new ones", self._stub.peer)
            self._lost = generation
            self._returned.clear()
            if not self.calls.are_arranged:
                self._stub.dial_anew()
            else:  # one connection is for the liveness probe, which comes first
                count = self.contents.count_calls(self._stub.round_trip) if self.is_calling else 0
                self._stub.replace_arranged(1 + count)
            # A peer that does not call the other one anyway has to tell it, and to find out whether it is alive.
            if self.contents.is_awaited() or not self.is_calling:
                self._helpers.start(self._await_return(generation))
        if self.is_calling:
            self._advance(generation + 1)
        return True

    async def _await_return(self, generation: int) -> None:
        """Report the other peer if it is dead, or does not come back in time."""
        error = await self._wait_for_return(LifeQuestion(resume=generation + 1), self._returned)
        if self._lost != generation or self._returned.is_set() or not self.contents.is_awaited():
            return
        if error is None or (self.is_heard() and not self.contents.is_incomplete()):
            self.contents.excuse()
        else:
            self._on_gone(error)

    async def _wait_for_return(self, question: LifeQuestion, returned: asyncio.Event) -> BaseException | None:
        """Wait for a peer whose connection broke, for longer if it shows life in some other way.

        Returns:
            Why it is given up; ``None``: it has come back, or it is alive and has nothing to come back for.
        """
        now = asyncio.get_running_loop().time
        begun = now()
        if self._can_be_called:
            self._stub.dial_anew()
        while now() < begun + RETURN_SECONDS:
            has_answered = False
            try:
                async with asyncio.timeout(RESUME_SECONDS):
                    if self._can_be_called:
                        answer = await self._ask_until_answered(question, begun)
                        if not (question.is_link_broken or self.contents.is_incomplete()):
                            return None
                        if reason := answer.why_unlinked if question.is_link_broken else answer.why_over:
                            return PeerLeftError(reason)
                        has_answered = True
                    await returned.wait()
                    return None
            except RefusedDialError as e:
                return e
            except TimeoutError:
                if not (has_answered or self.is_heard()):
                    break
        return None if returned.is_set() else StreamClosedError("its connection broke, and it did not come back")

    async def _ask_until_answered(self, question: LifeQuestion, since: float) -> LifeAnswer:
        while True:
            try:
                return await self._ask(question)
            except _FAILURES as e:
                if _is_death(e, self, since):
                    raise
                logger.debug("asked a peer whose connection broke about the task: %r", e)
            await asyncio.sleep(REDIAL_PAUSE)

    async def _run(self, generation: int, work: Coroutine[Any, Any, None]) -> None:
        """Run work on a call of a generation; it is cut when the next generation begins.

        Raises:
            SupersededError: it was cut.
        """
        if generation != self.generation:
            work.close()
            raise SupersededError
        task = asyncio.ensure_future(work)
        self._work[task] = None
        try:
            await asyncio.wait([task])
        finally:
            await cancel_and_wait(task)
            self._work.pop(task, None)
        if task.cancelled():
            raise SupersededError
        task.result()

    def _advance(self, generation: int) -> None:
        """Cut all calls of older generations."""
        if generation > self.generation:
            self.generation = generation
            self._cutting = asyncio.ensure_future(self._end_work([*self._work], self._cutting))

    async def _end_work(self, work: list[asyncio.Future[None]], before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await before
        await cancel_and_wait(*work)
        self.contents.restart(own=self.is_calling, others=self.contents.is_awaited())

    async def _settle(self) -> int:
        """Wait until all calls of older generations have ended; returns the generation whose calls may begin."""
        while True:
            generation = self.generation
            if self._cutting is not None:
                await asyncio.shield(self._cutting)
            if generation == self.generation:
                return generation

    # --- the link -----------------------------------------------------------------------------------------------------

    async def follow(
        self,
        open_call: Callable[[], AbstractAsyncContextManager[Call]],
        use: Callable[[Call], Coroutine[Any, Any, None]],
        patience: float,
    ) -> None:
        """Hold a link to the other peer. When its connection breaks, it is made again, and used from the start.

        Args:
            use: what is done on the link.
            patience: seconds after which the first dial is not repeated.

        Raises:
            P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError: the other peer failed.
        """
        breaks = 0
        while True:
            try:
                async with open_again(open_call, self) if breaks else open_patiently(open_call, patience) as call:
                    with self.link.watching(call):
                        await use(call)
                    await call.send_end()
                return
            except StreamClosedError:
                breaks += 1
                if breaks > MAX_RESUMES:
                    raise
                self._stub.dial_anew()
                await asyncio.sleep(REDIAL_PAUSE if breaks > 1 else 0)

    async def wait_for_link(self, returned: asyncio.Event) -> BaseException | None:
        """Wait until the other peer, whose link broke, makes another one.

        Args:
            returned: set when it has.

        Returns:
            Why it is given up; ``None``: it has come back.
        """
        return await self._wait_for_return(LifeQuestion(is_link_broken=True), returned)
