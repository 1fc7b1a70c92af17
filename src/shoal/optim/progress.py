"""Progress of one peer and of the swarm: how fast it is, the records, and what follows from them: pure functions."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from shoal.optim.epochs import takes_part
from shoal.optim.lineage import MAX_LINEAGE_BYTES, Lineage
from shoal.p2p.transport import Count, Moment, PeerIDBytes


class PerformanceEMA:
    """Running estimate of samples per second.

    Args:
        alpha: weight of the newest measurement, from 0 to 1.
        eps: smallest time per sample that is believed, in seconds.
        paused: begin with the clock stopped.
        clock: source of time in seconds.
    """

    def __init__(
        self, alpha: float = 0.1, eps: float = 1e-20, paused: bool = False, *, clock: Callable[[], float] | None = None
    ) -> None:
        self.alpha, self.eps, self.num_updates = alpha, eps, 0
        self.ema_seconds_per_sample = 0.0
        """The average without correction for its start at zero."""
        self.samples_per_second = eps
        self.paused = paused
        self._clock = clock if clock is not None else time.perf_counter
        self._timestamp = self._clock()
        self._lock = threading.Lock()

    def update(self, task_size: float, interval: float | None = None) -> float:
        """Take note that some samples have been processed.

        Args:
            task_size: how many samples.
            interval: how long they took, in seconds; default: the time since the previous update.

        Returns:
            The new estimate, in samples per second.

        Raises:
            AssertionError: nothing was processed, or the clock is paused and no interval is given.
        """
        assert task_size > 0, f"task_size must be positive, got {task_size}"
        if interval is None:
            assert not self.paused, "the clock is paused: give the interval"
            now = self._clock()
            interval, self._timestamp = max(0.0, now - self._timestamp), now
        self.ema_seconds_per_sample = self.alpha * interval / task_size + (1 - self.alpha) * self.ema_seconds_per_sample
        self.num_updates += 1
        self.samples_per_second = 1 / max(self.seconds_per_sample, self.eps)
        return self.samples_per_second

    @property
    def seconds_per_sample(self) -> float:
        """The average, corrected for its start at zero."""
        if self.num_updates == 0:
            return 0.0
        return self.ema_seconds_per_sample / (1 - (1 - self.alpha) ** self.num_updates)

    def reset_timer(self) -> None:
        """The next interval begins now."""
        self._timestamp = self._clock()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside this context does not count."""
        was_paused, self.paused = self.paused, True
        elapsed = self._clock() - self._timestamp
        try:
            yield
        finally:
            self._timestamp = self._clock() - elapsed
            self.paused = was_paused

    @contextmanager
    def update_threadsafe(self, task_size: float) -> Iterator[None]:
        """Measure a task that may run at the same time as others: what they do together counts once."""
        start = self._clock()
        yield
        with self._lock:
            self.update(task_size, interval=max(0.0, self._clock() - max(start, self._timestamp)))
            self._timestamp = self._clock()

    def __repr__(self) -> str:
        return f"PerformanceEMA({self.samples_per_second:.3g} samples/s after {self.num_updates} updates)"


Speed = Annotated[float, msgspec.Meta(ge=0.0, le=1e21)]

MAX_ADDRESSES = 8
# How many peers are called directly; in larger swarms the others learn from the DHT.
MAX_CALLED = 64
# How many of the nodes that hold the records are asked for them in passing.
HOLDERS_READ = 2

# As it stands in the DHT: owner tag, numbers, addresses and two signatures.
_BYTES_OF_RECORD = 450
# What either side sends on average when one tells the other its progress and hears the other's.
_BYTES_OF_CALL = 64
# For each doubling of the number of peers: what readings of the records, and calls, may cost in the long run.
_BYTES_PER_SECOND = 100.0
# Others are told anew when what they believe of a peer is off by this share of what it contributes to an epoch.
_TOLERANCE = 0.05

# Samples per second: nothing is divided by 0 where the swarm stands still.
_NO_SPEED = 1e-20


def count_of_samples(option: str, number: object) -> int:
    """A number of samples that a user gave.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is not positive.
    """
    try:
        count = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{option} must be a whole number of samples, such as 4096: got {number!r}") from None
    if count <= 0:
        raise ValueError(f"{option} must be positive, got {count}")
    return count


class LocalTrainingProgress(msgspec.Struct, frozen=True):
    """How far one peer is, as it says itself."""

    peer_id: PeerIDBytes
    epoch: Count
    """How many global steps it has made."""
    samples_accumulated: Count
    """Samples whose gradients it has in store for the next global step."""
    samples_per_second: Speed
    time: Moment
    """DHT time of the record."""
    client_mode: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the DHT."""
        return msgspec.structs.asdict(self)


class ProgressRecord(LocalTrainingProgress, frozen=True):
    """What a peer writes into the DHT."""

    addresses: Annotated[list[str], msgspec.Meta(max_length=MAX_ADDRESSES)] = []
    """Where it can be called; empty for a client."""
    endorsement: bytes = b""
    """The peer's signature, which says that the subkey of this record is its own."""
    rounds: Annotated[bytes, msgspec.Meta(max_length=MAX_LINEAGE_BYTES)] = b""
    """The rounds behind its parameters, see :class:`~shoal.optim.lineage.Lineage`; empty if it has none."""


def parse_record(value: object) -> ProgressRecord:
    """Check the form of a record that came from another peer.

    Raises:
        ValueError: it is not one, or its numbers are impossible.
    """
    try:
        record = msgspec.convert(value, ProgressRecord, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as e:
        raise ValueError(str(e)) from None
    Lineage.unpack(record.rounds)
    return record


@dataclass(frozen=True)
class GlobalTrainingProgress:
    """How far the swarm is, as this peer sees it."""

    epoch: int
    """The largest epoch of any peer that others can reach."""
    samples_accumulated: int
    """Samples that peers at this epoch have reported."""
    target_batch_size: int
    num_peers: int
    """Peers with a valid record that can be reached, this one included once it has published its own."""
    num_clients: int
    """How many of them are in client mode."""
    eta_next_epoch: float
    """DHT time at which the target will be reached, by extrapolation; infinite if nobody makes progress."""
    next_fetch_time: float
    """DHT time at which the records will be read again."""


@dataclass(frozen=True)
class RefreshPolicy:
    """How often the records are read."""

    min_period: float = 0.5
    max_period: float = 10.0
    default_period: float = 3.0
    """While there are no records."""
    expected_drift_peers: float = 3.0
    """How many peers may join or leave unseen in an epoch."""
    expected_drift_rate: float = 0.2
    """Which share of the peers may."""

    def reading_period(self, num_others: int, reaches_others: bool) -> float:
        """Least seconds between two readings of the records in the DHT.

        Each brings the records of all peers, and somebody has to send them: the more there are, the longer the pause.

        Args:
            num_others: how many records there are.
            reaches_others: some of them can be called, which is cheaper and tells the latest news.
        """
        cost = HOLDERS_READ * _BYTES_OF_RECORD * num_others
        least = 2 * self.max_period if reaches_others else self.default_period
        return max(least, _affordable(cost, num_others))

    def calling_period(self, num_called: int) -> float:
        """Least seconds between two rounds of calls to so many peers."""
        return max(self.min_period, _affordable(_BYTES_OF_CALL * num_called, num_called))

    def next_fetch_time(self, now: float, eta: float, num_peers: int) -> float:
        """When to read the records again: the nearer the end of the epoch, the sooner."""
        if num_peers == 0:
            return now + self.default_period
        surprised = max(num_peers + self.expected_drift_peers, num_peers * (1 + self.expected_drift_rate))
        period = (eta - now) * num_peers / surprised
        return now + min(max(period, self.min_period), self.max_period)


def _affordable(cost: float, num_peers: int) -> float:
    """Seconds after which so many bytes may be spent again, where twice as many peers may talk only a bit more."""
    return cost / (_BYTES_PER_SECOND * math.log2(2 + num_peers))


def estimate_is_off(told: LocalTrainingProgress, own: LocalTrainingProgress, share: float, batch_size: int) -> bool:
    """Whether those who extrapolate what a peer has told them are wrong about it.

    Args:
        told: what they have been told.
        own: how it is.
        share: samples of an epoch that come from this peer.
        batch_size: progress goes in steps of this size, which others cannot foresee.
    """
    if told.epoch != own.epoch:
        return True
    believed = told.samples_accumulated + max(0.0, own.time - told.time) * told.samples_per_second
    return abs(own.samples_accumulated - believed) > max(_TOLERANCE * share, batch_size)


def summarize(
    own: LocalTrainingProgress,
    others: Iterable[LocalTrainingProgress],
    *,
    published: bool,
    target_batch_size: int,
    now: float,
    next_fetch_time: float,
    stopped: Collection[bytes] = (),
    is_sketchy: bool = False,
) -> GlobalTrainingProgress:
    """Progress of the swarm from the records of its peers.

    Args:
        own: this peer's progress.
        others: valid records of other peers.
        published: others know of this peer.
        stopped: peers that cannot be reached: what they have accumulated will not come.
        is_sketchy: there are too many peers to hear of everybody in each epoch: those of whom nothing was heard are
            believed to be as far as the others, by their speed.
    """
    moving = [own, *(record for record in others if record.peer_id not in stopped)]
    epoch = max([own.epoch, *(record.epoch for record in moving[1:] if not record.client_mode)])
    present = [record for record in moving if record.epoch == epoch]
    samples = sum(record.samples_accumulated for record in present)
    estimate = samples + sum(max(0.0, now - record.time) * record.samples_per_second for record in present)
    speed = sum(record.samples_per_second for record in moving) + _NO_SPEED
    present_speed = sum(record.samples_per_second for record in present)
    if is_sketchy and present_speed > 0:
        samples, estimate = round(samples * speed / present_speed), estimate * speed / present_speed
    return GlobalTrainingProgress(
        epoch=epoch,
        samples_accumulated=samples,
        target_batch_size=target_batch_size,
        num_peers=len(moving) - 1 + published,
        num_clients=sum(record.client_mode for record in moving[1:]) + (published and own.client_mode),
        eta_next_epoch=now + max(0.0, target_batch_size - estimate) / speed,
        next_fetch_time=next_fetch_time,
    )


@dataclass
class Companion:
    """What this peer knows about another one beyond its record."""

    record: LocalTrainingProgress
    expiration: float
    """DHT time after which the record is worth nothing."""
    end: float | None = None
    """It has declared its epoch over and is on its way to the next one: others may go on until this DHT time."""
    heard_at: float = field(default=-math.inf)
    """DHT time of its last direct sign of life."""
    called_at: float = field(default=-math.inf)
    """DHT time of this peer's last call to it."""
    unreachable_since: float | None = None
    """DHT time of the first failed call since the last sign of life."""
    kept_until: float = field(default=-math.inf)
    """DHT time until which the record counts in any case, because nobody looks for a newer one before."""
    lineage: Lineage = field(default_factory=Lineage)
    """The rounds behind its parameters, as it told last."""
    lineage_time: float = -math.inf
    """DHT time of the record in which it did."""

    def is_valid(self, now: float) -> bool:
        """Whether the record still counts."""
        return max(self.expiration, self.kept_until) >= now

    def is_reachable(self, now: float) -> bool:
        """Whether it is still there, as far as this peer knows."""
        return self.is_valid(now) and self.unreachable_since is None


def expected_members(
    epoch: int, until_epoch: int, companions: Mapping[bytes, Companion], last_members: Collection[bytes], now: float
) -> set[bytes]:
    """Other peers that will take part in the round which ends ``epoch``, as far as this one can know.

    These are the peers that are known to be at this epoch, and those that were in the last round and may still be
    finishing it. A peer that died is left out as soon as it cannot be reached, and at the latest after one round,
    because nothing of it is heard at the next epoch. To expect too many costs a wait until the scheduled time; to
    expect too few would leave peers behind, so in doubt a peer is expected.

    Args:
        until_epoch: whoever is beyond this epoch has finished the round, see
            :func:`~shoal.optim.epochs.last_epoch_in_first_round`.
    """
    expected = set()
    for peer, companion in companions.items():
        if not companion.is_reachable(now):
            continue
        is_finishing = companion.end is not None or peer in last_members
        if takes_part(companion.record.epoch, epoch, until_epoch, is_finishing=is_finishing):
            expected.add(peer)
    return expected
