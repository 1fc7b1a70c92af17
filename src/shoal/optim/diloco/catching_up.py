"""How a peer gets what it lacks, and gives others what they lack.

A newcomer downloads the outer parameters with all that belongs to them. So does a peer whose branch has lost. A peer
that lacks a few updates downloads only these (:mod:`~.messages`) while it trains, and makes them itself. It does the
same with updates that others have made during a download.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.state.download import OwnedState, State, check_bytes, check_fit
from shoal.base.logs import Seldom
from shoal.compression import CompressionInfo, TensorMetadata, TensorRole
from shoal.compression.base import copies_of
from shoal.errors import ShoalError
from shoal.optim.diloco.contribution import PARAMETERS
from shoal.optim.diloco.fragment_updates import FragmentUpdates
from shoal.optim.diloco.fragments import ExtraTensors, Fragment
from shoal.optim.diloco.inner import InnerOptimizers
from shoal.optim.diloco.messages import OuterParameters, Wanted, answer, parse_answer, parse_request, request_for
from shoal.optim.diloco.slots import SlotCounter
from shoal.optim.history.journal import MOST, SHARE_FOR_NEWCOMERS, Update
from shoal.optim.history.window import Relation, window_of
from shoal.optim.recovery.adopt import first_accepted, refusing_nonsense
from shoal.optim.recovery.when import needs_state
from shoal.optim.setup.optimizer_state import statistics_of
from shoal.optim.setup.training_state import OlderStateError

if TYPE_CHECKING:
    from shoal.optim.diloco.rounds import OuterRounds

logger = logging.getLogger(__name__)

# The most statistics that an inner optimizer keeps of a value.
MOST_STATISTICS = 8
# The name of the part of the state that has the statistics of the inner optimizers.
STATISTICS = b"inner"
# That of the part that has the extra tensors.
EXTRA = b"extra"
# After this many attempts in a row without the missing updates, the whole state is downloaded.
MOST_IN_VAIN = 2
# Of the tensors of a fragment, that of the first one and that of all others.
ROLES = TensorRole.PARAMETER, TensorRole.OPTIMIZER


@dataclass(frozen=True)
class Giving:
    """What this peer has for others. Called in worker threads."""

    counter: SlotCounter
    fragments: Sequence[FragmentUpdates]
    lock: threading.RLock
    """Held while outer parameters, or statistics of inner optimizers, change."""
    inner: InnerOptimizers
    shares_inner_state: bool
    extra: ExtraTensors

    def _layout_of(self, fragment: Fragment) -> list[list[Any]]:
        """The number of each parameter of a fragment, where it begins and its shape, for archives."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.inner.parameters)}
        places = zip(fragment.parameters, fragment.offsets, strict=True)
        return [[numbers[id(parameter)], offset, list(parameter.shape)] for parameter, offset in places]

    def everything(self) -> OwnedState:
        """The state for newcomers: outer parameters and what belongs to them, all of one moment."""
        with self.lock:
            found = [each.dump() for each in self.fragments]
            tensors = copies_of([tensor for _, own in found for tensor in own])
            layouts = [self._layout_of(each.fragment) for each in self.fragments]
            parts = zip(found, layouts, strict=True)
            described = [{**metadata, "tensors": len(own), "layout": layout} for (metadata, own), layout in parts]
            names = list(self.inner.names)
            infos = [
                CompressionInfo.from_tensor(tensor, key=index, role=ROLES[index > 0])
                for _, own in found
                for index, tensor in enumerate(own)
            ]
            return OwnedState({"slot": self.counter.slot, "fragments": described, "names": names}, tensors, infos)

    def part(self, part: bytes) -> OwnedState | None:
        """The statistics of the inner optimizers; or what another peer lacks, as far as it is here.

        ``None``: there is something, and nothing of that is here any more.
        """
        if part == STATISTICS:
            if not self.shares_inner_state:
                return OwnedState(None, [])
            with self.lock:
                described, tensors = self.inner.dump_statistics()
                copies = copies_of(tensors)
                infos = [CompressionInfo.from_tensor(tensor, key=n, role=ROLES[1]) for n, tensor in enumerate(copies)]
                return OwnedState(described, copies, infos)
        if part == EXTRA:
            return OwnedState(None, [self.extra.read()] if self.extra else [])
        found, whole, is_far_behind = dict[int, list[Update]](), dict[int, OuterParameters](), False
        wanted = parse_request(part, len(self.fragments))
        with self.lock:
            for number, (version, known) in wanted.items():
                each = self.fragments[number]
                if updates := each.journal.since(version):
                    found[number] = updates
                elif known is not None and known in each.journal.entries:
                    metadata, tensors = each.dump()
                    whole[number] = metadata, copies_of(tensors)
                else:
                    is_far_behind |= version < each.state.version
        if not found and not whole and (is_far_behind or any(known is not None for _, known in wanted.values())):
            return None
        return answer(found, whole)

    def check(self, part: bytes, given: Sequence[TensorMetadata]) -> None:
        """Check what another peer offers of a part of the state, before it is downloaded. Called in the event loop.

        Raises:
            ValueError: this peer has no use for such tensors.
        """
        own = [each for fragment in self.fragments for each in fragment.state.layout]
        if not part:
            check_fit(given, own)
        elif part == EXTRA:
            check_fit(given, [((self.extra.length,), torch.float32)] if given else [])
        elif part == STATISTICS:
            # They may not exist here yet, so only their size is checked. The training thread waits for this download.
            known = sum(each.nbytes for optimizer in self.inner.optimizers for each in statistics_of(optimizer))
            usual = MOST_STATISTICS * sum(each.numel() * 8 for each in self.inner.parameters)
            check_bytes(given, max(known, usual) + 2**20)
        else:
            # A donor keeps at most this many bytes of updates, or the latest one.
            vectors = 4 * sum(fragment.fragment.length for fragment in self.fragments)
            whole = sum(math.prod(shape) * dtype.itemsize for shape, dtype in own)
            check_bytes(given, whole + SHARE_FOR_NEWCOMERS * vectors)


@dataclass
class CatchingUp:
    """Gets what this peer lacks. Used only by the training thread."""

    rounds: OuterRounds
    load_state_timeout: float
    shares_inner_state: bool
    """Whether newcomers also take over the statistics of the inner optimizers."""
    extra: ExtraTensors
    _fetching: concurrent.futures.Future[State | None] | None = None
    _in_vain: int = 0
    """How many times in a row nobody had the updates that this peer lacks."""
    _warn_seldom: Seldom = field(default_factory=lambda: Seldom(logger.warning))

    def is_needed(self) -> bool:
        """Whether this peer must stop to get what it lacks."""
        rounds = self.rounds
        has_lost = any(each.standing is Relation.ELSEWHERE for each in rounds.fragments)
        must_download = has_lost or self._in_vain >= MOST_IN_VAIN
        return needs_state(rounds.counter.slot, rounds.tracker.global_epoch, self._most_behind, has_lost=must_download)

    @property
    def _most_behind(self) -> int:
        """How many slots a peer may be behind the swarm without having missed anything."""
        rounds = self.rounds
        return int(window_of(overlaps=rounds.settings.others_may_be_ahead and rounds.has_trained).behind)

    def run(self) -> bool:
        """Get what this peer lacks, in the way that takes fewest bytes; returns whether it has all now."""
        rounds = self.rounds
        rounds.end_flights()
        lost = [each for each in rounds.fragments if each.standing is Relation.ELSEWHERE]
        if not rounds.has_trained or (lost and not self._go_over(lost)) or self._in_vain >= MOST_IN_VAIN:
            return self.download()
        if rounds.settings.average != PARAMETERS:  # there each peer has outer parameters of its own
            behind = {each.number for each in rounds.fragments if each.standing is Relation.BEHIND}
            missed = self._missed()
            if missed is None or not (lost or behind or missed):
                return self.download()
            with rounds.tracker.pause_updates():
                parts = [numbers for numbers in (behind, missed - behind) if numbers]
                made = [self._make(self._begin_to_fetch(numbers)) for numbers in parts]
            if None in made:  # the others keep no updates so old, or nobody was reached
                return self.download()
        with rounds.tracker.pause_updates():
            self._go_along()
        return True

    def _go_over(self, lost: Sequence[FragmentUpdates]) -> bool:
        """Take over the outer parameters of the winning branch; returns whether others have given all of them."""
        versions = max(each.state.version for each in lost)
        with self.rounds.tracker.pause_updates():
            self._make(self._begin_to_fetch([each.number for each in lost]))
        if any(each.standing is Relation.ELSEWHERE for each in lost):
            return False
        self._tell_what_is_lost(versions)
        return True

    @staticmethod
    def _tell_what_is_lost(versions: int) -> None:
        if versions:
            logger.warning("the swarm goes on from other parameters: up to %d updates of this peer are lost", versions)

    def _missed(self) -> set[int] | None:
        """The fragments that others may have updated in slots that this peer has missed; ``None``: too many slots."""
        rounds, schedule = self.rounds, self.rounds.counter.schedule
        slots = range(rounds.counter.slot, rounds.tracker.global_epoch)
        if len(slots) > rounds.settings.rules.max_staleness * schedule.fragments:
            return None
        return {schedule.fragment_of(slot) for slot in slots}

    def keep_up(self) -> None:
        """Get single updates that this peer lacks, while it trains. Called in each step."""
        fragments = self.rounds.fragments
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
        fragments = [self.rounds.fragments[number] for number in numbers]
        for each in fragments:
            each.may_lack_updates = False
        # A peer that has lost does not continue what it has: no updates would do.
        versions = [MOST if each.standing is Relation.ELSEWHERE else each.state.version for each in fragments]
        pairs = zip(fragments, versions, strict=True)
        part = request_for({each.number: Wanted(version, each.heard_of) for each, version in pairs})
        return self.rounds.averager.load_part_from_peers(part, self.load_state_timeout)

    def _make(self, fetching: concurrent.futures.Future[State | None]) -> int | None:
        """Make the updates that come; returns how many there were, ``None``: nobody gives any."""
        fragments, found, made = self.rounds.fragments, self._tried(fetching.result), 0
        updates, whole = dict[int, list[Update]](), dict[int, OuterParameters]()
        try:
            if found is not None:
                with refusing_nonsense():
                    updates, whole = parse_answer(found[0], found[1], len(fragments))
            for each in fragments:
                made += each.make_up(updates.get(each.number, ()), whole.get(each.number))
        except ValueError as e:
            self._warn_seldom("the updates of another peer make no sense: %s", e)
        if made:
            logger.info("this peer has made up for %d updates", made)
        return None if found is None else made

    def let_go(self) -> None:
        """Fetch nothing more."""
        if self._fetching is not None:
            self._fetching.cancel()

    def download(self, **options: Any) -> bool:
        """Download the outer parameters of another peer, and all that belongs to them.

        A peer that only lacks some updates keeps what it has done since.

        Args:
            options: of the download, such as ``timeout`` in seconds.

        Returns:
            Whether there was a donor whose state fits.
        """
        rounds, began_at, self._in_vain = self.rounds, time.monotonic(), 0
        rounds.end_flights()
        timeout, is_new = options.pop("timeout", self.load_state_timeout), not rounds.has_trained
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
                if rounds.settings.average != PARAMETERS:
                    # What has ended meanwhile, or was under way at the donor.
                    self._make(self._begin_to_fetch(range(len(rounds.fragments))))
                if is_new and self.shares_inner_state:
                    self._take_over_statistics()
                if is_new and self.extra:
                    self._take_over_extra()
                self._go_along()
                return True
            rounds.tracker.note_vain_attempt(time.monotonic() - began_at)
            rounds.tracker.look_after_others()  # those that were ahead may be gone
            if not rounds.tracker.expected_members(until_epoch=rounds.tracker.global_epoch):
                for each in rounds.fragments:  # nobody that has more is left
                    each.standing = Relation.WITH
            return False

    def _take_over_statistics(self) -> None:
        """Begin with the statistics of another peer's inner optimizers. Training continues without them, too."""
        rounds = self.rounds
        download = rounds.averager.load_part_from_peers
        found = self._tried(download(STATISTICS, self.load_state_timeout, differs=True).result)
        if found is None or not found[1]:
            return
        try:
            with rounds.lock, refusing_nonsense():
                rounds.inner.load_statistics(found[0], found[1])
        except ValueError as e:
            self._warn_seldom("the inner optimizers begin without the statistics of another peer: %s", e)

    def _take_over_extra(self) -> None:
        """Begin with the extra tensors of another peer. They soon are those of all anyhow."""
        found = self._tried(
            self.rounds.averager.load_part_from_peers(EXTRA, self.load_state_timeout, differs=True).result
        )
        if found is None or not found[1]:
            return
        try:
            self.extra.load(list(found[1]))
        except ValueError as e:
            self._warn_seldom("this peer begins with extra tensors of its own: %s", e)

    def _tried(self, download: Callable[[], Any]) -> Any:
        """What a download brings; ``None`` if it fails."""
        try:
            return download()
        except (ShoalError, TimeoutError, ValueError) as e:
            self._warn_seldom("a download from other peers has failed: %s", e)
            return None

    def _go_along(self) -> None:
        """Go to the slot of the swarm."""
        rounds = self.rounds
        rounds.go_to(max(rounds.tracker.global_epoch, rounds.counter.slot))
        rounds.inner.move_schedules(rounds.counter.position)

    def adopt(self, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Go on from a state that may be followed by the statistics of inner optimizers, as archives keep it.

        Raises:
            ValueError: it does not fit.
        """
        rounds = self.rounds
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
            is_new: what this peer has done counts for nothing.
            least_slot: a state of an earlier slot is refused.

        Returns:
            How many of the tensors are in it.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        rounds = self.rounds
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
        with rounds.lock:
            lost = [each.take_over(own, theirs, is_new=is_new) for each, own, theirs in parts]
        self._tell_what_is_lost(max(lost))
        rounds.go_to(max(slot, rounds.counter.slot))
        rounds.has_trained = True
        return len(tensors) - len(left)
