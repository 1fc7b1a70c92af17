"""Finds the experts of a grid that a gate rates best, without knowing which ones exist.

The score of an expert is the sum of the scores of its numbers, one for each dimension of the grid. The search walks
from dimension to dimension along the prefixes in the DHT (:mod:`~.declare`) and keeps the best few at each step::

    ffn.           scores of dimension 0: look up ffn.7., ffn.2., … until enough of them exist
    ffn.7.         lists the numbers that follow: 1, 5, …, each with an expert as an example
    ffn.7.5.       …

Each example counts as a candidate, so in a sparse grid more is found than the walk itself leads to. If every
combination of numbers exists, the result is that of an exhaustive search.

A prefix under which there is nothing is marked in the DHT as empty, so that the next search for it ends at the first
node. The mark is an entry beside those of experts, so it hides none. In a grid of one dimension it would take the place
of the expert's own entry, so there is none. Each searcher also remembers empty prefixes for a while. After that it asks
all nodes that may know better, because a copy of a mark would hide new experts as long as it lasts.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from shoal.base.bounded import Bounded
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.reactor import AwaitableFuture
from shoal.base.tasks import cancel_and_wait
from shoal.dht import DHT, DHTNode
from shoal.moe.expert import RemoteExpert
from shoal.moe.uids import (
    FLAT_EXPERT,
    UID_DELIMITER,
    Coordinate,
    ExpertInfo,
    ExpertPrefix,
    Score,
    is_valid_prefix,
    is_valid_uid,
)
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)
T = TypeVar("T")
Scores: TypeAlias = Any
"""The scores of the numbers of one dimension: a sequence, an array or a tensor."""
Successors = dict[Coordinate, ExpertInfo]
"""The numbers that follow a prefix, each with an expert as an example."""
Beam = list[tuple[Score, ExpertPrefix, Successors]]
SAMPLES_AT_ONCE = 64
"""How many samples of a batch are searched for together. Chosen: the loop is not held up for long."""
MAX_EMPTY = 2**16
"""The most empty prefixes that a searcher remembers. Chosen: more than a gate has numbers."""
EMPTY_SECONDS = 30.0
"""How long it remembers them at most, so that it sees new experts soon. Chosen: servers declare theirs as often."""


class MoEBeamSearcher:
    """Searches a grid of experts.

    Args:
        dht: a DHT of the swarm.
        uid_prefix: the uids of all experts begin with it; a missing dot at its end is added.
        grid_size: how many numbers each dimension has.
        num_workers: prefixes that are looked up ahead; default: as many as the DHT has workers.
        negative_caching: mark prefixes under which there is nothing.
        cache_expiration: how long such a mark holds, in seconds.
        is_usable: experts for which this is false are only used where no other is found.
        kwargs: options of :meth:`DHTNode.get_many`.

    Raises:
        AssertionError: the prefix is invalid.
    """

    def __init__(
        self,
        dht: DHT,
        uid_prefix: ExpertPrefix,
        grid_size: Sequence[int],
        num_workers: int | None = None,
        negative_caching: bool = True,
        cache_expiration: float = 300,
        *,
        is_usable: Callable[[ExpertInfo], bool] = lambda info: True,
        **kwargs: Any,
    ) -> None:
        if not uid_prefix.endswith(UID_DELIMITER):
            uid_prefix += UID_DELIMITER
            logger.info("a prefix of experts ends with a dot: using %r", uid_prefix)
        assert is_valid_prefix(uid_prefix), f"{uid_prefix!r} is not a valid prefix: expected one such as 'ffn.'"
        self.dht, self.uid_prefix, self.grid_size = dht, uid_prefix, tuple(grid_size)
        self.num_workers = dht.num_workers if num_workers is None else num_workers
        self.negative_caching, self.cache_expiration, self.dht_kwargs = negative_caching, cache_expiration, kwargs
        self._is_usable = is_usable
        seconds = min(cache_expiration, EMPTY_SECONDS)
        self._empty: Bounded[ExpertPrefix, None] = Bounded(MAX_EMPTY, seconds=seconds, now=get_dht_time)

    def get_initial_beam(
        self, scores: Scores, beam_size: int, return_future: bool = False
    ) -> Beam | AwaitableFuture[Beam]:
        """The best numbers of the first dimension under which there are experts.

        Args:
            scores: one for each number.
            beam_size: how many are wanted at most.
            return_future: return at once.

        Returns:
            The score, the prefix and what follows it, best first.

        Raises:
            AssertionError: the size is not positive.
        """
        assert beam_size > 0, f"beam_size must be positive, got {beam_size}"

        async def search(lookups: _Lookups) -> Beam:
            beam = await self._initial_beam(lookups, _as_floats(scores), beam_size)
            await lookups.wait_for_marks()
            return beam

        return self._run(search, return_future)

    def get_active_successors(
        self, prefixes: Sequence[ExpertPrefix], grid_size: int | None = None, return_future: bool = False
    ) -> dict[ExpertPrefix, Successors] | AwaitableFuture[dict[ExpertPrefix, Successors]]:
        """What follows these prefixes; empty for a prefix under which there is nothing.

        Args:
            prefixes: with a dot at the end.
            grid_size: ignore numbers from here on; default: keep all.
            return_future: return at once.

        Raises:
            AssertionError: ``prefixes`` is a single text, or one of them is invalid.
        """
        assert not isinstance(prefixes, str), "prefixes must be a list of prefixes, got a text"
        for prefix in prefixes:
            assert is_valid_prefix(prefix), f"{prefix!r} is not a valid prefix: expected one such as 'ffn.1.'"

        async def search(lookups: _Lookups) -> dict[ExpertPrefix, Successors]:
            found = await asyncio.gather(*map(lookups.successors, prefixes))
            await lookups.wait_for_marks()
            return {prefix: _within(each, grid_size) for prefix, each in zip(prefixes, found, strict=True)}

        return self._run(search, return_future)

    def find_best_experts(
        self, grid_scores: Sequence[Scores], beam_size: int, return_future: bool = False
    ) -> list[RemoteExpert] | AwaitableFuture[list[RemoteExpert]]:
        """The experts with the highest scores, best first.

        Args:
            grid_scores: for each dimension, the scores of its numbers. Minus infinity excludes a number.
            beam_size: how many experts are wanted at most.
            return_future: return at once.

        Raises:
            AssertionError: another number of dimensions is given, or the size is not positive.
        """
        self._check(grid_scores, beam_size)
        scores = [*map(_as_floats, grid_scores)]

        async def search(lookups: _Lookups) -> list[RemoteExpert]:
            return lookups.make_experts(await self._find(lookups, scores, beam_size))

        return self._run(search, return_future)

    def batch_find_best_experts(
        self, batch_grid_scores: Sequence[Scores], beam_size: int, return_future: bool = False
    ) -> list[list[RemoteExpert]] | AwaitableFuture[list[list[RemoteExpert]]]:
        """Like :meth:`find_best_experts` for each sample of a batch; each prefix is looked up once.

        Args:
            batch_grid_scores: for each dimension an array of shape (samples, numbers).
            beam_size: how many experts are wanted at most for each sample.
            return_future: return at once.
        """
        self._check(batch_grid_scores, beam_size)
        samples = [*zip(*[map(_as_floats, dimension) for dimension in batch_grid_scores], strict=True)]

        async def search(lookups: _Lookups) -> list[list[RemoteExpert]]:
            found: list[list[RemoteExpert]] = []
            for start in range(0, len(samples), SAMPLES_AT_ONCE):
                part = [self._find(lookups, scores, beam_size) for scores in samples[start : start + SAMPLES_AT_ONCE]]
                found += map(lookups.make_experts, await asyncio.gather(*part))
            return found

        return self._run(search, return_future)

    def _check(self, grid_scores: Sequence[Any], beam_size: int) -> None:
        assert len(grid_scores) == len(self.grid_size), (
            f"scores are needed for {len(self.grid_size)} dimensions, got {len(grid_scores)}"
        )
        assert beam_size > 0, f"beam_size must be positive, got {beam_size}"

    def _run(self, search: Callable[[_Lookups], Coroutine[Any, Any, T]], return_future: bool) -> T | AwaitableFuture[T]:
        async def run(handle: Any, node: DHTNode) -> T:
            lookups = _Lookups(self, node, self._empty)
            try:
                return await search(lookups)
            finally:
                await lookups.cancel()

        return self.dht.run_coroutine(run, return_future=True) if return_future else self.dht.run_coroutine(run)

    async def _initial_beam(self, lookups: _Lookups, scores: list[float], beam_size: int) -> Beam:
        numbers = [number for number, score in enumerate(scores) if score > -math.inf]
        waiting = deque(sorted(numbers, key=lambda number: -scores[number]))
        ahead: deque[tuple[Score, ExpertPrefix]] = deque()
        beam: Beam = []
        while len(beam) < beam_size and (waiting or ahead):
            while waiting and len(ahead) < self.num_workers:
                number = waiting.popleft()
                ahead.append((scores[number], f"{self.uid_prefix}{number}{UID_DELIMITER}"))
                lookups.begin(ahead[-1][1])
            score, prefix = ahead.popleft()
            if successors := await lookups.successors(prefix):
                beam.append((score, prefix, successors))
        return beam

    async def _next_beam(self, lookups: _Lookups, beam: Beam, scores: list[float], beam_size: int) -> Beam:
        """The best prefixes with one number more."""
        following = [
            (score + scores[number], f"{prefix}{number}{UID_DELIMITER}")
            for score, prefix, successors in beam
            for number in _within(successors, len(scores))
            if number != FLAT_EXPERT and scores[number] > -math.inf
        ]
        best = heapq.nlargest(beam_size, following)
        for _, prefix in best:
            lookups.begin(prefix)
        return [(score, prefix, await lookups.successors(prefix)) for score, prefix in best]

    async def _find(self, lookups: _Lookups, grid_scores: Sequence[list[float]], beam_size: int) -> list[ExpertInfo]:
        width, widest = beam_size, max(map(len, grid_scores))
        while True:
            scored = await self._candidates(lookups, grid_scores, width)
            usable = [each for each in scored if self._is_usable(each[1])]
            # Experts that cannot be used have taken the places of others.
            if len(usable) >= beam_size or len(usable) == len(scored) or width >= widest:
                best = heapq.nlargest(beam_size, usable or scored, key=lambda each: each[0])
                return [info for _, info in best]
            width *= 2

    async def _candidates(
        self, lookups: _Lookups, grid_scores: Sequence[list[float]], beam_size: int
    ) -> list[tuple[Score, ExpertInfo]]:
        beam = met = await self._initial_beam(lookups, grid_scores[0], beam_size)
        for scores in grid_scores[1:-1]:
            beam = await self._next_beam(lookups, beam, scores, beam_size)
            met = met + beam
        infos = {info.uid: info for _, _, successors in met for info in successors.values()}
        scored = [(self._score_of(info, grid_scores), info) for info in infos.values()]
        return [each for each in scored if each[0] > -math.inf]

    def _score_of(self, info: ExpertInfo, grid_scores: Sequence[list[float]]) -> Score:
        """The score of an expert; minus infinity if it is not in this grid."""
        numbers = info.uid[len(self.uid_prefix) :].split(UID_DELIMITER)
        if len(numbers) != len(grid_scores):
            warn_seldom(
                "expert %s has %d numbers, and the grid %s%s: give either another prefix",
                info.uid,
                len(numbers),
                self.uid_prefix,
                UID_DELIMITER.join(map(str, self.grid_size)),
                about=info.uid,
            )
            return -math.inf
        total = 0.0
        for number, scores in zip(map(int, numbers), grid_scores, strict=True):
            total += scores[number] if number < len(scores) else -math.inf
        return total


class _Lookups:
    """The look-ups of one search. Each prefix is looked up once.

    Args:
        searcher: has the settings.
        node: looks up.
        empty: prefixes under which there was nothing lately.
    """

    def __init__(self, searcher: MoEBeamSearcher, node: DHTNode, empty: Bounded[ExpertPrefix, None]) -> None:
        self._node, self._options, self._empty = node, searcher.dht_kwargs, empty
        self._marks_seconds = searcher.cache_expiration if searcher.negative_caching else 0.0
        self._is_flat = len(searcher.grid_size) == 1
        self._tasks: dict[ExpertPrefix, asyncio.Task[Successors]] = {}
        self._marking: list[asyncio.Task[bool]] = []
        self._experts: dict[ExpertInfo, RemoteExpert] = {}

    async def cancel(self) -> None:
        """End the look-ups that are still running."""
        await cancel_and_wait(*self._tasks.values())

    def begin(self, prefix: ExpertPrefix) -> asyncio.Task[Successors]:
        """Begin to look up a prefix."""
        if prefix not in self._tasks:
            self._tasks[prefix] = asyncio.ensure_future(self._look_up(prefix))
        return self._tasks[prefix]

    async def successors(self, prefix: ExpertPrefix) -> Successors:
        """What follows a prefix."""
        task = self.begin(prefix)
        return task.result() if task.done() else await asyncio.shield(task)

    def make_experts(self, infos: Sequence[ExpertInfo]) -> list[RemoteExpert]:
        """Experts to call, the same one for several samples."""
        for info in infos:
            if info not in self._experts:
                self._experts[info] = RemoteExpert(info, self._node.p2p)
        return [self._experts[info] for info in infos]

    async def wait_for_marks(self) -> None:
        """Wait until empty prefixes are marked in the DHT; a search itself does not wait for that."""
        await asyncio.gather(*self._marking)

    async def _look_up(self, prefix: ExpertPrefix) -> Successors:
        if prefix in self._empty:
            return {}
        item, found = await self._get(prefix)
        if item is not None and not found:
            item, found = await self._get(prefix, sufficient_expiration_time=math.inf)
        if not found and self._marks_seconds:
            self._empty[prefix] = None
            if item is None and not self._is_flat:
                until = get_dht_time() + self._marks_seconds
                mark = self._node.store(prefix, None, until, subkey=FLAT_EXPERT)
                self._marking.append(self._node.protocol.spawn(mark))
        return found

    async def _get(self, prefix: ExpertPrefix, **options: Any) -> tuple[Any, Successors]:
        """The record of a prefix, and the experts in it."""
        item = (await self._node.get_many([prefix], **{**self._options, **options}))[prefix]
        entries = item.value if item is not None and isinstance(item.value, Mapping) else {}
        infos = {number: _info_of(prefix, number, entry.value) for number, entry in entries.items()}
        return item, {number: info for number, info in infos.items() if info is not None}


def _info_of(prefix: ExpertPrefix, number: Any, value: Any) -> ExpertInfo | None:
    """What an entry of a prefix says; ``None`` if it is a mark, or malformed."""
    match number, value:
        case int(), (str(uid), str(peer)) if is_valid_uid(uid):
            is_flat = number == FLAT_EXPERT and uid + UID_DELIMITER == prefix
            if is_flat or (uid + UID_DELIMITER).startswith(f"{prefix}{number}{UID_DELIMITER}"):
                try:
                    return ExpertInfo(uid, PeerID.from_base58(peer))
                except ValueError:
                    return None
    return None


def _within(successors: Successors, grid_size: int | None) -> Successors:
    return {number: info for number, info in successors.items() if grid_size is None or number < grid_size}


def _as_floats(scores: Any) -> list[float]:
    return [float(score) for score in (scores.tolist() if hasattr(scores, "tolist") else scores)]
