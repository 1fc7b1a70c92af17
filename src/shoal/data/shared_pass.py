"""A pass over a data set that a whole swarm makes together, each sample once."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler, default_collate

from shoal.base import standby
from shoal.base.closeable import Facade
from shoal.base.reactor import Portal
from shoal.data.chunks import LONGEST_CHUNK, MOST_CHUNKS, PassName, order_of, pack_bits, parse_state, unpack_bits
from shoal.data.leases import WAITING, Leases
from shoal.data.shuffled import shuffler
from shoal.dht import DHT
from shoal.dht.crypto import tag_of
from shoal.dht.dht import check_dht

logger = logging.getLogger(__name__)

# The most seconds that shutdown() takes to tell others that this peer's chunks are free. Chosen.
SHUTDOWN_SECONDS = 5.0


class SharedPass(Facade, Sampler[list[int]]):
    """Batches of a data set over which all peers of a run pass once, together.

    The data set is cut into chunks, and each peer leases its next chunks through the DHT. Peers may come and go: the
    chunks of a peer that is gone are free again after half a minute. Each chunk is used at least once, and rarely
    twice. It is a batch sampler for map-style data sets::

        with shoal.data.SharedPass(dataset, dht, "my_run", batch_size=32) as shared:
            for epoch in range(10):
                for batch in shared.loader(num_workers=4):
                    ...

    Each iteration is one pass, or the rest of one that was left early. It ends when the whole swarm has passed over
    everything, so peers get different numbers of batches, and there is no ``len()``. A peer that joins later begins
    with the pass that the others are at; its iterations for earlier passes have no batches. If the network is
    partitioned, both sides may repeat each other's work. A peer that waits for the last chunks of others still takes
    part in the steps of its optimizers.

    A chunk is done when the loop asks for the batch after its last one. If a loop ends early, its unfinished chunks are
    repeated in the next iteration.

    Any peer that can write to the DHT can claim that a chunk is done. A run with a token is closed to strangers.

    Args:
        dataset: map-style, with ``len()``, the same one at each peer; or a stream such as an ``IterableDataset``, which
            yields the same samples in the same order at each peer. Each peer reads a stream completely and trains on
            its own chunks.
        dht: this peer's DHT.
        run_id: peers with the same name share the passes.
        batch_size: samples of a batch; each peer may choose its own.
        chunk: samples of a chunk, the same at each peer. Choose a chunk that takes at least a second.
        shuffle: pass over a map-style data set in a random order, a new one in each pass.
        seed: decides this order; the same at each peer.
        drawn_ahead: batches that are drawn before the loop asks for them, if you use another loader than
            :meth:`loader`: ``num_workers * prefetch_factor`` for a ``DataLoader``; plus one in a Lightning ``Trainer``,
            or plus ``gradient_accumulation_steps`` in a Hugging Face ``Trainer``. Without it, the batches that a dying
            peer has drawn are lost for this pass. If the loader has drawn everything, all of it counts as done when the
            next iteration begins.

    Raises:
        TypeError: ``dataset`` has neither a length nor an iterator, or ``dht`` is not a DHT.
        ValueError: a size is not positive, or there is another SharedPass for this run on this DHT.
    """

    instead_of_a_copy = "save its state_dict()"

    def __init__(
        self,
        dataset: Any,
        dht: DHT,
        run_id: str,
        *,
        batch_size: int = 1,
        chunk: int = 256,
        shuffle: bool = True,
        seed: int = 0,
        drawn_ahead: int = 0,
    ) -> None:
        check_dht(dht)
        is_stream = not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
        if is_stream and not hasattr(dataset, "__iter__"):
            raise TypeError(f"dataset must have len() and [], or be iterable, got a {type(dataset).__name__}")
        for name, value, least in (("batch_size", batch_size, 1), ("chunk", chunk, 1), ("drawn_ahead", drawn_ahead, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
        self.samples = None if is_stream else len(dataset)
        if self.samples == 0:
            raise ValueError("the data set is empty")
        if chunk > LONGEST_CHUNK:
            raise ValueError(f"chunk must be at most {LONGEST_CHUNK}, got {chunk}")
        if self.samples is not None and -(-self.samples // chunk) > MOST_CHUNKS:
            raise ValueError(
                f"{self.samples} samples in chunks of {chunk} are more than {MOST_CHUNKS} chunks: use larger ones"
            )
        # Many attributes, because the user can read back all options.
        self.dataset, self.run_id, self.batch_size, self.chunk = dataset, run_id, batch_size, chunk
        self.shuffle, self.seed, self.drawn_ahead = shuffle and not is_stream, seed, drawn_ahead
        self.number = 0
        """The number of the next pass, or of the one that is under way."""
        self._dht, self._loaded = dht, 0
        self._leases: Leases | None = None
        self._last: _Batches | None = None
        self._told = False
        self.be_the_only(f"a SharedPass with run_id {run_id!r}", dht)
        self._portal = Portal("SharedPass")
        self._portal.on_close(self._close)

    @property
    def is_stream(self) -> bool:
        """Whether the data set has no indices."""
        return self.samples is None

    @property
    def _order(self) -> str:
        return order_of(self.run_id, self.seed) if self.shuffle else ""

    # --- the loop -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of indices, for a ``DataLoader`` as its ``batch_sampler``."""
        if self.is_stream:
            raise TypeError("a stream has no indices: iterate over loader() instead")
        last, self._last = self._last, _Batches(self, self.drawn_ahead)
        if last is not None and last.confirm_all_if_ended():
            # Wait until no peer has anything left, because otherwise the loop might get an iteration without batches.
            # A chunk that others release is not lost: it counts as begun, and is repeated.
            self.next_chunk(wait=True)
        return iter(self._last)

    def loader(self, **options: Any) -> Iterable[Any]:
        """Batches of samples, of one pass for each iteration.

        Args:
            options: those of a ``torch.utils.data.DataLoader``, such as ``num_workers``. A stream is read in this
                process, and takes only ``collate_fn``.

        Raises:
            TypeError: an option that decides what is in a batch, or one that a stream cannot have.
            ValueError: batches would come in another order than they are drawn.
        """
        taken = {"batch_sampler", "batch_size", "dataset", "drop_last", "sampler", "shuffle"} & options.keys()
        if taken:
            raise TypeError(f"SharedPass itself decides about {', '.join(sorted(taken))}: pass it there")
        if self.is_stream:
            if options.keys() - {"collate_fn"}:
                raise TypeError(
                    f"a stream is read in this process, so it cannot have {', '.join(sorted(options))}: preprocess it, "
                    "or use a map-style data set"
                )
            return _StreamLoader(self, options.get("collate_fn") or default_collate)
        if not options.get("in_order", True):
            raise ValueError("in_order=False: the batches that the loop has had would not be known. Leave it out")
        return _Loader(self, options)

    @property
    def progress(self) -> float:
        """Share of the chunks of this pass that are done, 0 to 1, as far as this peer knows; ``nan`` for a stream
        without a known end."""
        if self._leases is None:
            return 0.0
        if self._leases.samples is None:
            return float("nan")
        return self._leases.done.bit_count() / max(1, -(-self._leases.samples // self.chunk))

    def leases(self) -> Leases:
        """The leases of the pass that is under way; begins a pass if there is none.

        Raises:
            ValueError: the data set has changed its size.
        """
        if self._leases is None:
            if not self.is_stream and len(self.dataset) != self.samples:
                raise ValueError(
                    f"the data set had {self.samples} samples when this SharedPass was made, and now it has "
                    f"{len(self.dataset)}: all peers must have the same data, so make a new SharedPass in each of them"
                )
            self._leases = self._portal.call(self._begin())
        return self._leases

    def begin(self) -> None:
        """Begin the next pass if the last one is over; otherwise continue it."""
        self.finish_if_over()
        self.go_on()

    def go_on(self) -> None:
        """Repeat the chunks that were begun but are not done."""
        self._in_loop(self.leases().begin_again)

    def finish_if_over(self) -> bool:
        """Whether the pass is over. The next iteration begins the next one."""
        if self._leases is None or not self._leases.is_over:
            return False
        leases, self._leases, self._loaded = self._leases, None, 0
        if leases.found_at > self.number and not self._told:
            self._told = True
            logger.info(
                "run %r is at pass %d already: the iterations of this peer for pass %d and up to then have no "
                "batches. To begin again at pass 0, choose another run_id",
                self.run_id, leases.found_at, self.number,
            )  # fmt: skip
        self.number += 1
        self._portal.call(leases.close())
        return True

    def next_chunk(self, wait: bool) -> int | None:
        """Like :meth:`Leases.next`. A thread that waits here for other peers still takes part in their rounds."""
        chunk = self._portal.submit(self.leases().next(wait))
        return standby.wait_between_batches(chunk, chunk.cancel)

    def mark(self, chunks: Iterable[int]) -> None:
        """Note that these chunks are done. Without any, only note that the loop makes progress."""
        leases = self.leases()
        leases.note_life()
        if done := list(chunks):
            self._in_loop(leases.finish, *done)

    def end_at(self, samples: int) -> None:
        """The stream has ended after this many samples."""
        self._in_loop(self.leases().end_at, samples)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        async def run() -> None:
            function(*arguments)

        self._portal.call(run())

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The chunks that are done, for a checkpoint from which a run that has lost all its peers can continue."""
        done = self._loaded if self._leases is None else self._leases.done
        return {
            "number": self.number,
            "samples": self.samples,
            "chunk": self.chunk,
            "done": pack_bits(done),
            "order": self._order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, plus what others have done since.

        Raises:
            ValueError: the state is malformed; or it is of another data set, chunk size or order, or of a later pass
                while one is under way.
        """
        found = parse_state(state, self.samples, self.chunk, self._order)
        if found.number > self.number:
            if self._leases is not None:
                raise ValueError(
                    f"this peer is in the middle of pass {self.number}, but the state is of pass {found.number}: load "
                    "it before the first iteration"
                )
            self.number, self._loaded = found.number, 0
        if found.number < self.number:
            return
        self._loaded |= unpack_bits(found.done)
        if self._leases is not None:
            self._in_loop(self._leases.add_done, self._loaded)

    # --- beginning and ending -----------------------------------------------------------------------------------------

    async def _begin(self) -> Leases:
        name = PassName(self.run_id, self.number, self.samples, self.chunk, self._order)
        leases = Leases(self._dht.node, name, random.Random(f"{tag_of(self._dht.peer_id)!r}/{self.number}"))
        leases.add_done(self._loaded)
        return leases

    async def _close(self) -> None:
        if self._leases is not None:
            await self._leases.close()

    def is_alive(self) -> bool:
        """Whether it can be iterated."""
        return not self._portal.closed

    def shutdown(self) -> None:
        """Release all chunks, so that others can take them at once. Idempotent."""
        self._portal.close(SHUTDOWN_SECONDS)

    def __del__(self) -> None:
        if hasattr(self, "_portal") and not self._portal.closed:  # there is none if the constructor failed early
            self._portal.begin_close()


class _Batches(Sampler[list[int]]):
    """Batches of indices of a map-style data set; each iteration continues where the pass is.

    Args:
        drawn_ahead: batches that are drawn before the loop asks for them; infinite = the loop itself reports what it
            has done.
    """

    def __init__(self, shared: SharedPass, drawn_ahead: float) -> None:
        self._shared, self._drawn_ahead = shared, drawn_ahead
        self._samples: deque[int] = deque()
        # For each unfinished chunk: its number, and the count of given samples at its end.
        self._chunks: deque[tuple[int, int]] = deque()
        self._open: deque[list[int]] = deque()  # for each unfinished batch, the chunks that end in it
        self._given = self._calls = self._confirmed = 0
        self._has_ended = False
        self._place: Callable[[int], int] = int

    def __iter__(self) -> Iterator[list[int]]:
        shared = self._shared
        if self._drawn_ahead < math.inf:
            shared.begin()
        else:
            shared.go_on()
        self._samples.clear()
        self._chunks.clear()
        self._open.clear()
        self._given = self._calls = self._confirmed = 0
        self._has_ended = False
        if shared.shuffle:
            self._place = shuffler(shared.samples or 1, f"{shared.run_id}/{shared.number}/{shared.seed}")
        return self

    def __next__(self) -> list[int]:
        # A loader with workers calls this for each batch that the loop gets, even after it has drawn the last one.
        while self._open and self._confirmed < self._calls - self._drawn_ahead:
            self.confirm_first()
        self._calls += 1
        size = self._shared.batch_size
        while len(self._samples) < size and self._add_chunk():
            pass
        if not self._samples:
            self._has_ended = True
            raise StopIteration
        batch = [self._samples.popleft() for _ in range(min(size, len(self._samples)))]
        self._given += len(batch)
        ended = []
        while self._chunks and self._chunks[0][1] <= self._given:
            ended.append(self._chunks.popleft()[0])
        self._open.append(ended)
        return batch

    def _add_chunk(self) -> bool:
        shared = self._shared
        # Others may wait for chunks that this peer has begun, so it must finish those before it waits for others.
        chunk = shared.next_chunk(wait=not self._samples and not self._open)
        if chunk is None or chunk == WAITING:
            return False
        start = chunk * shared.chunk
        self._samples.extend(map(self._place, range(start, min(start + shared.chunk, shared.samples or 0))))
        self._chunks.append((chunk, self._given + len(self._samples)))
        return True

    def confirm_first(self) -> None:
        """The loop has done the first unfinished batch."""
        self._shared.mark(self._open.popleft())
        self._confirmed += 1

    def confirm_all_if_ended(self) -> bool:
        """The loop starts again: if no chunk was left, everything drawn is done. Returns whether it is."""
        while self._has_ended and self._open:
            self.confirm_first()
        return self._has_ended


class _Loader(Iterable[Any]):
    """A ``DataLoader`` whose loop tells the sampler what it has done."""

    def __init__(self, shared: SharedPass, options: dict[str, Any]) -> None:
        self._shared = shared
        self._batches = _Batches(shared, math.inf)
        self._loader: DataLoader[Any] = DataLoader(shared.dataset, batch_sampler=self._batches, **options)

    def __iter__(self) -> Iterator[Any]:
        self._shared.begin()
        is_over = False
        while not is_over:  # a loader with workers ends instead of waiting for others
            for batch in self._loader:
                yield batch
                self._batches.confirm_first()
            is_over = self._shared.finish_if_over()


class _StreamLoader(Iterable[Any]):
    """Batches of a stream: it is read from its beginning, and the chunks of others are skipped."""

    def __init__(self, shared: SharedPass, collate: Any) -> None:
        self._shared, self._collate = shared, collate

    def __iter__(self) -> Iterator[Any]:
        shared = self._shared
        shared.begin()
        self._stream, self._position = iter(shared.dataset), 0
        batch: list[Any] = []
        ended: list[int] = []  # chunks whose last sample is in the batch
        while (chunk := shared.next_chunk(wait=not batch)) is not None:
            for sample in () if chunk == WAITING else self._read(chunk):
                batch.append(sample)
                if len(batch) == shared.batch_size:
                    yield self._collate(batch)
                    shared.mark(ended)
                    batch, ended = [], []
            if chunk == WAITING:  # others may wait for samples of this batch
                yield self._collate(batch)
                batch = []
            else:
                ended.append(chunk)
            if not batch:
                shared.mark(ended)
                ended = []
        if batch:
            yield self._collate(batch)
            shared.mark(ended)
        shared.finish_if_over()

    def _read(self, chunk: int) -> Iterator[Any]:
        """The samples of one chunk; those before it are read and skipped."""
        shared, start = self._shared, chunk * self._shared.chunk
        if start < self._position:
            self._stream, self._position = iter(shared.dataset), 0
        while self._position < start + shared.chunk:
            try:
                sample = next(self._stream)
            except StopIteration:
                shared.end_at(self._position)
                return
            self._position += 1
            if self._position > start:
                yield sample
        shared.leases().position = self._position // shared.chunk
