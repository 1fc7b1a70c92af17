"""The exchanges of one peer with the others: begun at the ends of slots, applied when it is time, caught up with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.state.download import OwnedState
from shoal.clock import get_dht_time
from shoal.compression.base import copies_of
from shoal.errors import ShoalError
from shoal.optim.epochs import last_epoch_in_first_round
from shoal.optim.outer.fragment_updates import FragmentUpdates, OuterRound, Standing
from shoal.optim.outer.inner import InnerOptimizers
from shoal.optim.outer.outer_averager import OuterAverager, tag_of
from shoal.optim.outer.schedule import SlotCounter
from shoal.optim.outer.settings import OuterSettings
from shoal.optim.outer.slot_tracker import SlotTracker
from shoal.optim.progress_tracker import ProgressTracker, RoundWatch
from shoal.optim.state_jobs import let_go, log_failure
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)


def describe_state(counter: SlotCounter, fragments: Sequence[FragmentUpdates], lock: threading.RLock) -> OwnedState:
    """The state for newcomers: outer parameters and what belongs to them, all of one moment. Any thread may call it."""
    with lock:
        found = [each.dump() for each in fragments]
        tensors = copies_of([tensor for _, own in found for tensor in own])
        described = [{**metadata, "tensors": len(own)} for metadata, own in found]
        return OwnedState({"slot": counter.slot, "fragments": described}, tensors)


@dataclass
class Rounds:
    """Makes rounds of fragments, and downloads what this peer has missed. Used only by the training thread."""

    dht: DHT
    settings: OuterSettings
    counter: SlotCounter
    fragments: Sequence[FragmentUpdates]
    inner: InnerOptimizers
    tracker: ProgressTracker
    averager: OuterAverager
    lock: threading.RLock
    """Held while outer parameters change."""
    matchmaking_time: float
    load_state_timeout: float
    loglevel: int
    last: OuterRound | None = None
    """The outer update that was applied last."""
    has_trained: bool = False
    """This peer has made inner steps, or has taken over a state."""

    def end_slot(self) -> None:
        """Begin the round that ends this slot, and go to the next one."""
        slot, overlaps = self.counter.slot, self.settings.overlaps
        each = self.fragments[self.counter.schedule.fragment_of(slot)]
        self._land(each)  # the round before, if it is still under way
        with self.tracker.pause_updates():
            self.tracker.declare_epoch_over(self.settings.straggler_patience)
            last = last_epoch_in_first_round(slot, overlaps=overlaps)
            expected = self.tracker.expected_members(until_epoch=last)
            self._take_off(each, slot, expected, last if overlaps else None)
            if not overlaps:
                self._land(each)
            self._go_to(slot + 1, expected)
        logger.log(self.loglevel, "slot %d begins", self.counter.slot)

    def _go_to(self, slot: int, members: Iterable[PeerID] = ()) -> None:
        """Tell the others that this peer is at another slot. Inside ``pause_updates()``."""
        self.counter.go_to(slot)
        if isinstance(self.tracker, SlotTracker):
            self.tracker.board.set_steps(self.counter.schedule.steps_of(slot))
        self.tracker.update_epoch(slot, members=list(members))
        if not self.averager.client_mode:
            self.averager.state_sharing_priority = slot

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _take_off(self, each: FragmentUpdates, slot: int, expected: set[PeerID], last: int | None) -> None:
        """Begin a round with the expected peers.

        Args:
            last: a peer beyond this slot does not come any more; ``None``: one beyond this peer's.
        """
        settings = self.settings
        delay = settings.fragment_sync_delay
        # A newcomer counts if it was there for half of the steps.
        least, each.is_fresh = -(-(self.counter.schedule.sync_every or 0) // 2) if each.is_fresh else 0, False
        flight = each.begin(slot, self.averager.vectors[each.number], delay, settings.weighting, least)
        if not expected:
            return
        timeout = settings.averaging_timeout
        patience = min(settings.straggler_patience + self.matchmaking_time, 0.9 * timeout)
        control = self.averager.step(
            gather=each.statement(1 + len(expected)).dump(),
            scheduled_time=get_dht_time() + patience,
            weight=flight.weight,
            timeout=timeout,
            wait=False,
            tag=tag_of(each.number),
        )
        assert not isinstance(control, dict)
        flight.control = control
        RoundWatch(control, self.tracker, None if last is None else dict.fromkeys(expected, last))

    def apply_what_is_due(self) -> None:
        for each in self.fragments:
            flight = each.flight
            if flight is None:
                continue
            is_over = flight.control is None or flight.control.done()
            if flight.left == 0 or (flight.left is None and is_over and flight.steps_since > 0):
                self._land(each)

    def _land(self, each: FragmentUpdates) -> None:
        """Wait for the result of a round, if one is under way, and bring it into the model."""
        flight = each.flight
        if flight is None:
            return
        result = None
        if flight.control is not None:
            try:
                flight.control.result(self.settings.averaging_timeout)
                result = flight.control.round
            except Exception as e:  # whatever has failed, training goes on
                flight.control.cancel()
                if flight.control.began_allreduce or self.tracker.expected_members(until_epoch=flight.slot + 2):
                    log_failure("the round of slot %d has failed (%s): it is made up for", flight.slot, e)
                    each.give_up()
                    return
            except BaseException:
                flight.control.cancel()
                raise
        done = each.land(self.averager.vectors[each.number], result, self.dht.peer_id)
        if not flight.is_finite:
            logger.warning("this peer's parameters were not finite: it goes on from those of the swarm")
            each.reset_model()
            self.inner.forget_what_is_not_finite()
        if done is not None:
            self.last = done
            self._tell(done)

    def _tell(self, done: OuterRound) -> None:
        logger.log(
            self.loglevel,
            "round %d of fragment %d: %d peers, %.2f s",
            done.slot,
            done.fragment,
            len(done.peers),
            done.seconds,
        )

    def end_flights(self) -> None:
        for each in self.fragments:
            self._land(each)

    def is_behind(self) -> bool:
        if any(each.standing is not Standing.GOOD for each in self.fragments):
            return True
        lag = 1 if self.settings.overlaps and self.has_trained else 0
        return self.tracker.global_epoch - self.counter.slot > lag

    def download(self, **options: Any) -> bool:
        """Download the outer parameters of another peer, and all that belongs to them.

        A peer that only lacks some updates keeps what it has done since.

        Args:
            options: of the download, such as ``timeout`` in seconds.

        Returns:
            Whether there was a donor whose state fits.
        """
        self.end_flights()
        with self.tracker.pause_updates():
            try:
                found = self.averager.load_state_from_peers(**{"timeout": self.load_state_timeout, **options})
                if found is not None:
                    self._take_over(*found[:2])
                    return True
                logger.warning("nobody shares the state of this run: this peer keeps its own")
            except (ShoalError, TimeoutError, ValueError) as e:
                logger.warning("could not take over the state of another peer: %s", str(e) or type(e).__name__)
            self.tracker.look_after_others()  # those that were ahead may be gone
            return False

    def _take_over(self, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Put a downloaded state in place.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        if not isinstance(metadata, Mapping) or not isinstance(slot := metadata.get("slot"), int):
            raise ValueError("the state has no slot")
        described, left = metadata.get("fragments"), list(tensors)
        if not isinstance(described, list) or len(described) != len(self.fragments) or slot < 0:
            raise ValueError(f"the state is not one of {len(self.fragments)} fragments")
        parts = []
        for each, own in zip(self.fragments, described, strict=True):
            count = own.get("tensors") if isinstance(own, Mapping) else None
            if not isinstance(count, int) or not 0 < count <= len(left):
                raise ValueError("a fragment of the state has no tensors")
            parts.append((each, own, left[:count]))
            del left[:count]
            each.check(own, parts[-1][2])
        with self.lock:
            lost = [each.take_over(own, theirs, is_new=not self.has_trained) for each, own, theirs in parts]
        if any(lost):
            logger.warning("the swarm goes on from other parameters: up to %d updates of this peer are lost", max(lost))
        self._go_to(max(slot, self.counter.slot))
        self.inner.move_schedules(self.counter.position)
        self.has_trained = True

    def let_go(self, timeout: float) -> None:
        """Leave all rounds without making others wait."""
        for each in self.fragments:
            if each.flight is not None:
                let_go(each.flight.control, timeout)
