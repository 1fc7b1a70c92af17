"""Telling a peer that is gone from a moment in which this machine can hear nobody.

A call without an answer has one of two causes. The peer is gone: then others answer as usual. Or this machine is
offline, or too busy to listen: then most calls fail, whomever they are for. Only the first is held against the peer. A
peer that is silent twice, ten seconds apart, while somebody else was heard in between is gone in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.p2p.identity import PeerID

# Calls of this time are compared with each other; after so long without any answer the swarm may be lost.
WINDOW_SECONDS = 10.0
# One silent peer alone is never taken for an outage.
FEWEST_SILENT = 2
# A loop that is later than this may have missed answers that were there in time.
LATE_SECONDS = 0.5

# How often it is looked whether the loop is late.
HEARTBEAT_SECONDS = 0.25
MAX_EXCUSED = 4096


class Reception:
    """What this node has heard lately, and from whom not."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The last call to each peer; the oldest first.
        self._outcomes: dict[PeerID, tuple[float, bool]] = {}
        self._silent = 0  # how many of them had no answer
        # Peers whose silence was not held against them, and since when.
        self._excused: dict[PeerID, float] = {}
        self._in_flight = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._was_late_at = float("-inf")
        self._began_at = self._loop.time()
        self._heard_at: float | None = None
        self._silent_since: float | None = None
        self._silence_noted_at = 0.0
        self._has_asked_again = False
        self.on_heard: Callable[[], None] | None = None
        """Called for each answer that ends a silence."""

    @property
    def is_silent(self) -> bool:
        """Nobody has answered since a call has failed."""
        return self._silent_since is not None

    @property
    def is_lost(self) -> bool:
        """Somebody has answered once, but for a while nobody has, not even somebody who was asked since.

        Without that question it could be that nobody was asked anything: one failure and ten idle seconds.
        """
        if self._silent_since is None or self._heard_at is None or not self._has_asked_again:
            return False
        return self._loop.time() - self._silent_since >= WINDOW_SECONDS

    @property
    def heard_at(self) -> float:
        """When somebody answered last; when this node began, if nobody ever has."""
        return self._began_at if self._heard_at is None else self._heard_at

    # --- while a call is on its way -----------------------------------------------------------------------------------

    def begin_call(self) -> float:
        """Listen closely from now on; returns the time. End it with :meth:`end_call`."""
        self._in_flight += 1
        now = self._loop.time()
        if self._heartbeat is None:
            self._schedule_heartbeat(now)
        return now

    def end_call(self) -> None:
        """The call is over."""
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

    # --- what came of it ----------------------------------------------------------------------------------------------

    def note_answer(self, peer: PeerID) -> None:
        """A peer has answered a call."""
        self._note(peer, answered=True)
        self._excused.pop(peer, None)
        self._heard_at = self._loop.time()
        if self._silent_since is not None:
            self._silent_since = None
            if self.on_heard is not None:
                self.on_heard()

    def note_silence(self, peer: PeerID, asked_at: float) -> bool:
        """A peer has not answered a call; whether that is to be held against it.

        Args:
            peer: who was called.
            asked_at: when, as :meth:`begin_call` has told.
        """
        now = self._loop.time()
        if self._is_late(asked_at, now):
            return False  # the answer may be there, unread
        self._note(peer, answered=False)
        if self._silent_since is None:
            self._silent_since, self._silence_noted_at, self._has_asked_again = asked_at, now, False
        elif asked_at >= self._silence_noted_at:
            self._has_asked_again = True
        if self._silent < FEWEST_SILENT or 2 * self._silent <= len(self._outcomes):
            return True
        since = self._excused.setdefault(peer, asked_at)
        if len(self._excused) > MAX_EXCUSED:
            del self._excused[next(iter(self._excused))]
        return asked_at - since >= WINDOW_SECONDS and self.heard_at > since

    def _is_late(self, asked_at: float, now: float) -> bool:
        """Whether the loop was late while the call was on its way, or is so now and has not had the time to notice."""
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
