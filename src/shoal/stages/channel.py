"""The tensors of all microbatches between two peers take one connection.

A connection that has rested begins slowly (slow start, RFC 5681, section 4.1): a microbatch of a quarter of a megabyte
would take three to five round trips. One that all microbatches share hardly ever rests. It is opened by the peer that
sends microbatches, and leads both ways::

    caller ► callee   ChannelStart
    caller ► callee   ChannelItem and a message of tensors: the inputs of a stage          any number
    callee ► caller   ChannelItem and a message of tensors: the losses and the gradients   any number

Large tensors take several messages. Those of several microbatches take turns, so none has to wait until a larger one is
through. What goes wrong with the tensors of one microbatch concerns that one alone.

Everything else about a microbatch is said in a call of its own, see :mod:`~shoal.stages.hop`. A microbatch whose
channel breaks is asked for once more, over another channel.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.base.logs import words_of
from shoal.base.tasks import BackgroundTasks, all_of, cancel_and_wait, mark_retrieved, wait_at_most
from shoal.errors import BusyError, P2PDaemonError, P2PHandlerError, ProtocolError, ShoalError, StreamClosedError
from shoal.net.transport import Count, Header, PeerIDBytes
from shoal.p2p import Call, PeerID
from shoal.serving.tensors import Arriving, CodecFor, Departing, Pieces, TensorList, TensorsTooLargeError
from shoal.stages.directory import MAX_STAGES

logger = logging.getLogger(__name__)

# The ways in which a call fails because of the other peer. The last two come from malformed tensors.
CALL_FAILURES = (P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError, ValueError, RuntimeError)
# Heartbeats within the time after which a silent peer is given up.
PULSES = 4
# Afterwards, new microbatches take a new channel, in seconds. Chosen: there may be a way without a relay by now.
CHANNEL_SECONDS = 60.0
# The most memory of the tensors of a microbatch (chosen).
MAX_BYTES = 2**32


class SilentPeerError(StreamClosedError):
    """A call was cut, because the other peer showed no sign of life."""


class UnsendableError(ShoalError):
    """These tensors cannot be sent. That is not the other peer's doing."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {words_of(cause)}")


class ChannelStart(Header):
    """The first message of a channel."""

    number: Count


class ChannelItem(Header):
    """A message with tensors of a microbatch follows."""

    stage: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
    driver: PeerIDBytes
    sequence: Count
    begins: bool
    """It is the first one, a ``TensorList``; the others are ``Pieces``."""


class Key(NamedTuple):
    """What tensors belong to: a microbatch at a stage."""

    stage: int
    driver: bytes
    sequence: int


class _Outgoing(NamedTuple):
    key: Key
    departing: Departing
    sent: asyncio.Future[Any]


class _Expected:
    def __init__(self, arrival: asyncio.Future[Any]) -> None:
        self.arrival = arrival
        self.arriving: Arriving | None = None


@asynccontextmanager
async def lively(call: Call, silence: float) -> AsyncIterator[None]:
    """Send heartbeats on a call, and cut it if nothing arrives for some seconds while something is waited for.

    Raises:
        SilentPeerError: it was cut.
    """
    stream, now = call.connection.stream, asyncio.get_running_loop().time
    is_silent = False

    async def watch() -> None:
        nonlocal is_silent
        received, since = stream.received, now()
        while not stream.closed:
            await asyncio.sleep(silence / PULSES)
            if not call.sent_end:
                call.connection.show_life()
            if stream.received != received or not stream.is_awaited:
                received, since = stream.received, now()
            elif now() - since >= silence:
                is_silent = True
                stream.abort()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except StreamClosedError as e:
        if is_silent:
            raise SilentPeerError(str(e)) from e
        raise
    finally:
        await cancel_and_wait(watching)


class Channel:
    """One end of a channel.

    Args:
        number: tells channels of the same peers apart.
        silence: a peer that shows no sign of life for so many seconds has failed.
    """

    def __init__(self, number: int, silence: float) -> None:
        self.number, self.users, self.opened_at = number, 0, asyncio.get_running_loop().time()
        self.has_begun = False
        """Whether the other peer was reached."""
        self.closing: asyncio.TimerHandle | None = None
        """Closes it soon, unless somebody uses it."""
        self._silence = silence
        self._call: Call | None = None
        self._outgoing: asyncio.Queue[_Outgoing | None] = asyncio.Queue()
        self._expected: dict[Key, _Expected] = {}
        self._promises: dict[asyncio.Future[Any], None] = {}
        self._error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it carries nothing more."""
        return self._error is not None

    @contextmanager
    def used(self) -> Iterator[None]:
        """A microbatch uses it."""
        self.users += 1
        self._mark_use()
        try:
            yield
        finally:
            self.users -= 1
            self._mark_use()

    def _mark_use(self) -> None:
        if self._call is not None:
            self._call.is_premature = not self.users  # strangers' calls are many, and places are few

    async def run(self, call: Call) -> None:
        """Carry tensors over a call, until one side has ended it."""
        self._call, self.has_begun = call, True
        self._mark_use()
        async with lively(call, self._silence):
            await all_of(self._write(call), self._read(call))

    def close(self) -> None:
        """Carry what has been sent, and then nothing more."""
        self._outgoing.put_nowait(None)

    def end(self, error: Exception) -> None:
        """The call has ended: those that wait fail."""
        self._error = error
        for promise in self._promises:
            if not promise.done():
                promise.set_exception(copy.copy(error))  # each one gets a traceback of its own

    @contextmanager
    def _promise(self) -> Iterator[asyncio.Future[Any]]:
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._promises[promise] = None
        if self._error is not None:
            promise.set_exception(copy.copy(self._error))
        try:
            yield promise
        finally:
            del self._promises[promise]
            promise.cancel()
            mark_retrieved(promise)

    @contextmanager
    def expecting(self, key: Key) -> Iterator[asyncio.Future[Any]]:
        """Tensors may come while this lasts. Others are thrown away.

        Returns:
            Their structure, later. It fails with ``TensorsTooLargeError`` or ``ProtocolError`` because of the tensors,
            or as the call has failed.
        """
        with self._promise() as arrival:
            before = self._expected.get(key)
            if before is not None and not before.arrival.done():
                before.arrival.set_exception(StreamClosedError("the same tensors are expected once more"))
            expected = self._expected[key] = _Expected(arrival)
            try:
                yield arrival
            finally:
                if self._expected.get(key) is expected:
                    del self._expected[key]

    async def send(self, key: Key, structure: Any, codec_for: CodecFor) -> None:
        """Send tensors, in turns with those of others.

        Raises:
            UnsendableError: they cannot be sent.
            P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError: the call has failed.
        """
        try:
            departing = Departing(structure, codec_for)
        except Exception as e:
            raise UnsendableError(e) from e
        del structure
        try:
            with self._promise() as sent:
                self._outgoing.put_nowait(_Outgoing(key, departing, sent))
                await sent
        finally:
            await departing.stop()

    async def _write(self, call: Call) -> None:
        while True:
            outgoing = await self._outgoing.get()
            if outgoing is None:
                if self._outgoing.empty():
                    break
                self.close()  # the rest first
                continue
            key, departing, sent = outgoing
            if sent.done():
                await departing.stop()
                continue
            try:
                await departing.send(call, ChannelItem(*key, begins=not departing.has_begun))
            except StreamClosedError:
                raise
            except Exception as e:  # it cannot be encoded: nothing of this message was sent
                if not sent.done():
                    sent.set_exception(UnsendableError(e))
                continue
            if not departing.has_left:
                self._outgoing.put_nowait(outgoing)
            elif not sent.done():
                sent.set_result(None)
            del outgoing, departing, sent  # the next one may be long in coming
        await call.send_end()

    async def _read(self, call: Call) -> None:
        while (item := await call.receive(ChannelItem)) is not None:
            expected = self._expected.get(Key(item.stage, item.driver, item.sequence))
            if expected is None or expected.arrival.done():
                expected, kind = None, Header
            else:
                kind = TensorList if item.begins else Pieces
            message = await call.receive(kind)
            if message is None:
                raise ProtocolError("a channel that ended in the middle of tensors")
            if expected is not None:
                await self._take(call, expected, message)
            await call.skip_payload()  # if it was not taken
            del expected, message
        self.close()

    async def _take(self, call: Call, expected: _Expected, message: Any) -> None:
        try:
            if isinstance(message, TensorList):
                expected.arriving = Arriving(message, MAX_BYTES)
            if expected.arriving is None:
                return
            await expected.arriving.take(call, message)
            if expected.arriving.is_complete:
                structure = await expected.arriving.structure()
                if not expected.arrival.done():
                    expected.arrival.set_result(structure)
        except (TensorsTooLargeError, ProtocolError) as e:
            if not expected.arrival.done():
                expected.arrival.set_exception(e)


class Channels:
    """The channels of this peer.

    Args:
        open_call: calls a peer that serves channels; ``anew``: over a new connection.
        silence: as for :class:`Channel`.
    """

    def __init__(
        self,
        open_call: Callable[[PeerID, bool], AbstractAsyncContextManager[Call]],
        rng: random.Random,
        silence: float,
    ) -> None:
        self._open_call, self._rng, self._silence = open_call, rng, silence
        self._now = asyncio.get_running_loop().time
        # To each peer, the one that new microbatches take.
        self._own: dict[PeerID, Channel] = {}
        # Those that others have opened. Bounded by the calls that each peer may have.
        self._served: dict[tuple[PeerID, int], Channel] = {}
        self._has_new = asyncio.Event()
        self._is_stopped = False
        self._tasks = BackgroundTasks(logger, "the channels of stages")

    async def stop(self) -> None:
        """End all of them: their callers find the next ones elsewhere."""
        self._is_stopped = True
        for channel in self._served.values():
            channel.close()
        await self._tasks.close()
        for channel in self._own.values():  # also one whose task has not begun
            channel.end(StreamClosedError("this peer leaves"))

    @asynccontextmanager
    async def to(self, peer: PeerID, *, anew: bool) -> AsyncIterator[Channel]:
        """A channel to a peer. When nobody has used it for a while, it is closed.

        Raises:
            StreamClosedError: this peer has ended its channels.
        """
        if self._is_stopped:
            raise StreamClosedError("this peer leaves")
        channel = self._own.get(peer)
        if channel is None or channel.has_ended or channel.opened_at + CHANNEL_SECONDS < self._now():
            channel = self._own[peer] = Channel(self._rng.getrandbits(53), self._silence)
            self._tasks.spawn(self._keep(channel, peer, anew))
        if channel.closing is not None:
            channel.closing.cancel()
        try:
            with channel.used():
                yield channel
        finally:
            if not channel.users:
                delay = self._silence if self._own.get(peer) is channel else 0.0
                channel.closing = asyncio.get_running_loop().call_later(delay, self._close, peer, channel)

    def _close(self, peer: PeerID, channel: Channel) -> None:
        if self._own.get(peer) is channel:
            del self._own[peer]
        channel.close()

    async def _keep(self, channel: Channel, peer: PeerID, anew: bool) -> None:
        error: Exception = StreamClosedError(f"the channel to peer {peer} was closed")
        try:
            async with self._open_call(peer, anew) as call:
                await call.send(ChannelStart(number=channel.number))
                await channel.run(call)
        except CALL_FAILURES as e:
            error = e
        finally:
            channel.end(error)

    async def serve(self, call: Call, caller: PeerID) -> None:
        """Carry tensors to and from a caller."""
        start = await call.receive(ChannelStart)
        if start is None:
            raise ProtocolError("a channel without a beginning")
        channel = self._served[caller, start.number] = Channel(start.number, self._silence)
        self._has_new.set()
        self._has_new = asyncio.Event()
        try:
            await channel.run(call)
        finally:
            if self._served.get((caller, start.number)) is channel:
                del self._served[caller, start.number]
            channel.end(StreamClosedError(f"the channel of peer {caller} was closed"))

    @asynccontextmanager
    async def of(self, caller: PeerID, number: int) -> AsyncIterator[Channel]:
        """The channel that a caller has opened.

        Raises:
            BusyError: its beginning does not come.
        """
        until = self._now() + self._silence
        while (channel := self._served.get((caller, number))) is None:
            if not await wait_at_most(self._has_new, until - self._now()):
                raise BusyError(f"no channel {number} of peer {caller} is open")
        with channel.used():
            yield channel
