"""How a peer gets what it lacks.

A newcomer, or a peer whose branch has lost, downloads the outer parameters with all that belongs to them. A peer that
lacks a few updates downloads only these (:mod:`~.messages`) while it trains, and makes them itself. It does the same
with updates that others made during a download.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from shoal.averaging.state.download import State
from shoal.base.logs import Seldom
from shoal.errors import ShoalError
from shoal.optim.diloco.messages import (
    EXTRA,
    PARAMETERS,
    STATISTICS,
    Wanted,
    parse_answer,
    request_for,
)
from shoal.optim.diloco.rounds import OuterRounds
from shoal.optim.history.journal import Update
from shoal.optim.history.window import Relation, window_of
from shoal.optim.progress_tracker import FIRST_LOOK_SECONDS
from shoal.optim.recovery.adopt import check, first_accepted, refusing_nonsense
from shoal.optim.recovery.when import needs_state
from shoal.optim.setup.training_state import OlderStateError

logger = logging.getLogger(__name__)

# After this many attempts in a row without the missing updates, the whole state is downloaded. Chosen: one may fail by
# chance, if the only donor that has them has just left.
MOST_IN_VAIN = 2


class CatchingUp:
    """Gets what this peer lacks. Used only by the training thread.

    Args:
        rounds: of this peer.
    """

    def __init__(self, rounds: OuterRounds) -> None:
        self._rounds, self._settings = rounds, rounds.settings
        self._has_looked = False
        self._fetching: concurrent.futures.Future[State | None] | None = None
        # How many attempts in a row did not bring the updates that this peer lacks.
        self._in_vain = 0
        self._warn_seldom = Seldom(logger.warning)

    def is_needed(self) -> bool:
        """Whether this peer must stop to get what it lacks."""
        rounds = self._rounds
        must_download = self._has_lost or self._in_vain >= MOST_IN_VAIN
        return needs_state(rounds.counter.slot, rounds.tracker.global_epoch, self._most_behind, has_lost=must_download)

    @property
    def _has_lost(self) -> bool:
        """Whether others continue from outer parameters that this peer does not have."""
        return any(each.standing is Relation.ELSEWHERE for each in self._rounds.fragments)

    @property
    def _most_behind(self) -> int:
        """How many slots a peer may be behind the swarm without having missed anything."""
        rounds = self._rounds
        return int(window_of(overlaps=self._settings.others_may_be_ahead and rounds.has_trained).behind)

    def run(self) -> bool:
        """Get what this peer lacks, in the way that takes the fewest bytes; returns whether it now has everything."""
        rounds = self._rounds
        rounds.end_flights()
        if not rounds.has_trained or self._has_lost or self._in_vain >= MOST_IN_VAIN:
            return self.download()
        if self._settings.average != PARAMETERS:  # otherwise each peer has outer parameters of its own
            behind = {each.number for each in rounds.fragments if each.standing is Relation.BEHIND}
            missed = self._missed()
            if missed is None or not (behind or missed):
                return self.download()
            with rounds.tracker.pause_updates():
                parts = [numbers for numbers in (behind, missed - behind) if numbers]
                made = [self._make(self._begin_to_fetch(numbers)) for numbers in parts]
            if None in made:  # nobody was reached, or nobody keeps such old updates
                return self.download()
        with rounds.tracker.pause_updates():
            self._go_along()
        return True

    def _missed(self) -> set[int] | None:
        """The fragments that others may have updated in slots that this peer has missed; ``None``: too many slots."""
        rounds, schedule = self._rounds, self._rounds.counter.schedule
        slots = range(rounds.counter.slot, rounds.tracker.global_epoch)
        if len(slots) > self._settings.max_staleness * schedule.fragments:
            return None
        return {schedule.fragment_of(slot) for slot in slots}

    def keep_up(self) -> None:
        """Get single updates that this peer lacks, while it trains. Called in each step."""
        fragments, tracker = self._rounds.fragments, self._rounds.tracker
        if not self._has_looked:
            self._has_looked = True
            self._rounds.begin_run()
            tracker.fetched_global_progress_this_epoch.wait(FIRST_LOOK_SECONDS)
        if self._fetching is None:
            lacking = [each.number for each in fragments if each.lacks_updates]
            missed = [each.number for each in fragments if each.may_lack_updates and not each.is_being_updated]
            if lacking or missed:
                self._fetching = self._begin_to_fetch(lacking or missed)
        elif self._fetching.done():
            fetching, self._fetching = self._fetching, None
            made = self._make(fetching)
            self._in_vain = 0 if made or not any(each.lacks_updates for each in fragments) else self._in_vain + 1

    def _begin_to_fetch(self, numbers: Collection[int]) -> concurrent.futures.Future[State | None]:
        fragments = [self._rounds.fragments[number] for number in numbers]
        for each in fragments:
            each.may_lack_updates = False
        part = request_for({each.number: Wanted(each.state.version, each.heard_of) for each in fragments})
        return self._rounds.averager.load_part_from_peers(part, self._settings.load_state_timeout)

    def _make(self, fetching: concurrent.futures.Future[State | None]) -> int | None:
        """Make the downloaded updates; returns how many there were, ``None``: nobody gave any."""
        fragments, found, made = self._rounds.fragments, self._tried(fetching.result), 0
        updates = dict[int, list[Update]]()
        try:
            if found is not None:
                with refusing_nonsense():
                    updates = parse_answer(found[0], found[1], len(fragments))
            for each in fragments:
                each.journal.serves_newcomers = self._rounds.averager.is_giving
                made += each.make_up(updates.get(each.number, ()))
        except ValueError as e:
            self._warn_seldom("the updates of another peer are malformed: %s", e)
        if made:
            logger.info("this peer has made up for %d updates", made)
        return None if found is None else made

    def let_go(self) -> None:
        """Cancel the fetch under way."""
        if self._fetching is not None:
            self._fetching.cancel()

    def download(self, **options: Any) -> bool:
        """Download the outer parameters of another peer, and all that belongs to them.

        A peer that only lacks some updates keeps its own work since.

        Args:
            options: of the download, such as ``timeout`` in seconds.

        Returns:
            Whether there was a donor whose state fits.
        """
        rounds, began_at, self._in_vain = self._rounds, time.monotonic(), 0
        rounds.end_flights()
        timeout, is_new = options.pop("timeout", self._settings.load_state_timeout), not rounds.has_trained
        # A donor may be a newcomer itself, and know of nobody yet.
        least_slot = rounds.tracker.global_epoch - self._most_behind if self.is_needed() else 0

        def find_state() -> bool:
            return first_accepted(
                lambda left, asked: rounds.averager.load_state_from_peers(timeout=left, skip=asked, **options),
                lambda state: self._take_over(*state[:2], is_new=is_new, least_slot=least_slot),
                rounds.averager.leave_out,
                timeout,
                self._warn_seldom,
                rounds.tracker.is_first,
            )

        with rounds.tracker.pause_updates():
            if self._tried(find_state):
                if self._settings.average != PARAMETERS:
                    # Updates that were made meanwhile, or were in flight at the donor.
                    self._make(self._begin_to_fetch(range(len(rounds.fragments))))
                if is_new and self._settings.share_inner_state:
                    self._take_over_statistics()
                if is_new and rounds.averager.donor.extra:
                    self._take_over_extra()
                self._go_along()
                return True
            rounds.tracker.note_vain_attempt(time.monotonic() - began_at)
            rounds.tracker.look_after_others()  # the peers that were ahead may be gone
            if not rounds.tracker.expected_members(until_epoch=rounds.tracker.global_epoch):
                for each in rounds.fragments:  # no peer that has more is left
                    each.standing = Relation.WITH
            return False

    def _take_over_statistics(self) -> None:
        """Begin with the statistics of another peer's inner optimizers. Without them, training continues all the
        same."""
        rounds = self._rounds
        download = rounds.averager.load_part_from_peers
        found = self._tried(download(STATISTICS, self._settings.load_state_timeout, differs=True).result)
        if found is None or not found[1]:
            return
        try:
            with rounds.lock, refusing_nonsense():
                rounds.inner.load_statistics(found[0], found[1])
        except ValueError as e:
            self._warn_seldom("the inner optimizers begin without the statistics of another peer: %s", e)

    def _take_over_extra(self) -> None:
        """Begin with the extra tensors of another peer. The next rounds average them anyway."""
        found = self._tried(
            self._rounds.averager.load_part_from_peers(EXTRA, self._settings.load_state_timeout, differs=True).result
        )
        if found is None or not found[1]:
            return
        try:
            self._rounds.averager.donor.extra.load(list(found[1]))
        except ValueError as e:
            self._warn_seldom("this peer begins with extra tensors of its own: %s", e)

    def _tried(self, download: Callable[[], Any]) -> Any:
        """The result of a download; ``None`` if it fails."""
        try:
            return download()
        except (ShoalError, TimeoutError, ValueError) as e:
            self._warn_seldom("a download from other peers has failed: %s", e)
            return None

    def _go_along(self) -> None:
        """Go to the slot of the swarm."""
        rounds = self._rounds
        rounds.go_to(max(rounds.tracker.global_epoch, rounds.counter.slot))
        rounds.inner.move_schedules(rounds.counter.position)

    def adopt(self, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Continue from the state of an archive, which may have the statistics of inner optimizers at its end.

        Raises:
            ValueError: it does not fit.
        """
        rounds = self._rounds
        rounds.end_flights()
        with rounds.tracker.pause_updates():
            used = self._take_over(metadata, tensors, is_new=True)
            if metadata.get("inner") is not None:
                with rounds.lock:
                    rounds.inner.load_statistics(metadata["inner"], tensors[used:])
            rounds.inner.move_schedules(rounds.counter.position)

    def _take_over(self, metadata: Any, tensors: Sequence[torch.Tensor], *, is_new: bool, least_slot: int = 0) -> int:
        """Put a downloaded state in place.

        Args:
            is_new: this peer's own work is dropped.
            least_slot: a state of an earlier slot is refused.

        Returns:
            How many of the tensors are in it.

        Raises:
            ValueError: it does not fit, or the user's hook refuses it; nothing has been changed.
        """
        rounds = self._rounds
        if not isinstance(metadata, Mapping) or not isinstance(slot := metadata.get("slot"), int):
            raise ValueError("it has no slot")
        if slot < least_slot:
            raise OlderStateError(f"it is of slot {slot}, and the swarm was at slot {least_slot} before")
        described, left = metadata.get("fragments"), list(tensors)
        if not isinstance(described, list) or len(described) != len(rounds.fragments) or slot < 0:
            raise ValueError(f"it is not one of {len(rounds.fragments)} fragments")
        parts = []
        for each, own in zip(rounds.fragments, described, strict=True):
            count = own.get("tensors") if isinstance(own, Mapping) else None
            if not isinstance(count, int) or not 0 < count <= len(left):
                raise ValueError("a fragment of it has no tensors")
            parts.append((each, own, left[:count]))
            del left[:count]
            with refusing_nonsense():
                each.check(own, parts[-1][2])
        check_state = self._settings.check_state
        with rounds.lock:
            put_back = [] if check_state is None else [each.remember() for each in rounds.fragments]
            lost = [each.take_over(own, theirs, is_new=is_new) for each, own, theirs in parts]
            try:
                check(check_state)
            except BaseException:
                for undo in put_back:
                    undo()
                raise
        if any(lost):
            logger.warning("the swarm has other parameters: up to %d updates of this peer are lost", max(lost))
        rounds.go_to(max(slot, rounds.counter.slot))
        rounds.has_trained = True
        return len(tensors) - len(left)
