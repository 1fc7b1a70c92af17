"""Distinguishes a peer that is gone from an outage of this machine.

A call without an answer has one of two causes. If the peer is gone, others answer as usual. If this machine is offline
or too busy to listen, most calls fail, no matter to which peer. Only the first is held against the peer. A peer that is
silent twice, ten seconds apart, counts as gone in any case if another peer was heard in between.
"""

from __future__ import annotations

import asyncio

from shoal.base.bounded import Bounded
from shoal.peers.identity import PeerID

# Calls within this window are compared with each other. After this time without any answer the swarm may be lost.
# Chosen: three times the timeout of a call.
WINDOW_SECONDS = 10.0
# Least number of silent peers for an outage: a single one never counts as one.
FEWEST_SILENT = 2
# An event loop that lags more than this may have failed to read answers that arrived in time. Chosen: well over the
# pauses of a garbage collection, well under the timeout of a call.
LATE_SECONDS = 0.5

# Interval of the checks whether the loop lags.
HEARTBEAT_SECONDS = 0.25
# Chosen: more peers than a process calls within the window.
MAX_EXCUSED = 4096


class Connectivity:
    """Which peers answered this node in the last seconds, and which did not."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Time of the last call to each peer, and whether it was answered; the oldest first.
        self._outcomes: dict[PeerID, tuple[float, bool]] = {}
        self._silent = 0  # how many of them were not answered
        self.excused: Bounded[PeerID, float] = Bounded(MAX_EXCUSED)
        """Peers whose silence was not held against them, and since when."""
        self._in_flight = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._was_late_at = float("-inf")
        self._began_at = self._loop.time()
        self._heard_at: float | None = None
        self._silent_since: float | None = None
        self._silence_noted_at = 0.0
        self._has_asked_again = False
        self.heard = asyncio.Event()
        """Set by each answer that ends a silence."""
        self.came_back = asyncio.Event()
        """Set when a suspect has given a sign of life: it may know more nodes."""

    @property
    def is_silent(self) -> bool:
        """Whether nobody has answered since a call failed."""
        return self._silent_since is not None

    @property
    def is_lost(self) -> bool:
        """Whether the swarm is lost: peers did answer earlier, but for a while none has, despite a further call.

        Without the further call this node might just have been idle: one failure and ten seconds without calls.
        """
        if self._silent_since is None or self._heard_at is None or not self._has_asked_again:
            return False
        return self._loop.time() - self._silent_since >= WINDOW_SECONDS

    @property
    def heard_at(self) -> float:
        """Time of the last answer from anybody, or of this node's start if there was none."""
        return self._began_at if self._heard_at is None else self._heard_at

    # --- calls in flight ----------------------------------------------------------------------------------------------

    def begin_call(self) -> float:
        """Note that a call begins, and watch the loop's lag until :meth:`end_call`; returns the time."""
        self._in_flight += 1
        now = self._loop.time()
        if self._heartbeat is None:
            self._schedule_heartbeat(now)
        return now

    def end_call(self) -> None:
        """Note that a call has ended."""
        self._in_flight -= 1

    def _schedule_heartbeat(self, now: float) -> None:
        self._heartbeat = self._loop.call_later(HEARTBEAT_SECONDS, self._beat, now + HEARTBEAT_SECONDS)

    def _beat(self, due: float) -> None:
        now = self._loop.time()
        if now - due > LATE_SECONDS:
            self._was_late_at = now
        self._heartbeat = None
        if self._in_flight:
            self._schedule_heartbeat(now)

    def close(self) -> None:
        """Stop listening."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def note_answer(self, peer: PeerID) -> None:
        """Note that a peer has answered a call."""
        self._note(peer, answered=True)
        if peer in self.excused:
            del self.excused[peer]
        self._heard_at = self._loop.time()
        if self._silent_since is not None:
            self._silent_since = None
            self.heard.set()

    def note_silence(self, peer: PeerID, asked_at: float) -> bool:
        """Note that a peer has not answered a call; returns whether that counts against it.

        Args:
            peer: the peer that was called.
            asked_at: the time that :meth:`begin_call` returned.
        """
        now = self._loop.time()
        if self._is_late(asked_at, now):
            return False  # the answer may have arrived, unread
        self._note(peer, answered=False)
        if self._silent_since is None:
            self._silent_since, self._silence_noted_at, self._has_asked_again = asked_at, now, False
        elif asked_at >= self._silence_noted_at:
            self._has_asked_again = True
        if self._silent < FEWEST_SILENT or 2 * self._silent <= len(self._outcomes):
            return True
        since = self.excused.setdefault(peer, asked_at)
        return asked_at - since >= WINDOW_SECONDS and self.heard_at > since

    def _is_late(self, asked_at: float, now: float) -> bool:
        """Whether the loop lagged while the call was in flight, or lags now and the heartbeat could not notice yet."""
        if self._heartbeat is not None and now - self._heartbeat.when() > LATE_SECONDS:
            return True
        return self._was_late_at >= asked_at

    def _note(self, peer: PeerID, *, answered: bool) -> None:
        now = self._loop.time()
        former = self._outcomes.pop(peer, None)
        if former is not None and not former[1]:
            self._silent -= 1
        self._outcomes[peer] = (now, answered)
        self._silent += not answered
        while True:
            oldest = next(iter(self._outcomes))
            at, was_answered = self._outcomes[oldest]
            if at > now - WINDOW_SECONDS:
                return
            del self._outcomes[oldest]
            self._silent -= not was_answered
