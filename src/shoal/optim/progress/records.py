"""Progress of one peer and of the swarm: records, the estimate of a peer's speed, and what follows from them.

Each peer tells the others its epoch, the samples it has accumulated, and its speed in samples per second. All peers
extrapolate these records to the present. The epoch ends when the sum over all peers reaches the target batch size. Pure
functions here compute everything that follows from records. :mod:`shoal.optim.progress.board` holds what a peer knows
of the others at run time.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import msgspec

from shoal.base.logs import one_line
from shoal.dht.key_sharding import Depth
from shoal.dht.storage import ValueWithExpiration
from shoal.net.transport import Count, Moment, PeerIDBytes
from shoal.optim.history.journal import MAX_LINEAGE_BYTES, Lineage
from shoal.optim.history.window import takes_part
from shoal.p2p import PeerID
from shoal.peers.identity import Identity, Name, verify_signature

PlainValues = dict[str, Any]
"""The fields of a record, by name."""

# The least seconds that a measurement of the speed takes; shorter batches are measured together. Chosen, see
# PerformanceEMA.count.
SHORTEST_MEASUREMENT = 0.1


class PerformanceEMA:
    """Running estimate of samples per second: an exponential moving average of the seconds per sample.

    Its bias towards the start at zero is corrected as in Adam (Kingma & Ba, 2015, arXiv:1412.6980).

    Args:
        alpha: weight of the newest measurement, from 0 to 1.
        eps: lower bound of the time per sample, in seconds.
        paused: begin with the clock stopped.
        clock: source of time in seconds.
    """

    def __init__(
        self, alpha: float = 0.1, eps: float = 1e-20, paused: bool = False, *, clock: Callable[[], float] | None = None
    ) -> None:
        self.alpha, self.eps, self.num_updates = alpha, eps, 0
        self.ema_seconds_per_sample = 0.0
        """The average before it is corrected for its start at zero."""
        self.samples_per_second = eps
        self.paused = paused
        self._clock = clock if clock is not None else time.perf_counter
        self._timestamp = self._clock()
        self._uncounted = 0.0
        self.is_first_guess = False
        """The only measurement so far may include time before the first batch, such as for loading the data."""
        self._lock = threading.Lock()

    def update(self, task_size: float, interval: float | None = None) -> float:
        """Count samples that have been processed.

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

    def count(self, task_size: float) -> None:
        """Count samples that have just been processed. Many short batches make one measurement.

        The start of the first batch is unknown, so the first measurement is only a guess, and the second replaces it.
        The average is over about the latest ten measurements. If each took a millisecond, it would show the speed
        between two interruptions by other programs, and not the speed of the machine.
        """
        self._uncounted += task_size
        if self.num_updates == 0 or self._clock() - self._timestamp >= SHORTEST_MEASUREMENT:
            self._measure()

    def _measure(self) -> None:
        task_size, self._uncounted = self._uncounted, 0.0
        is_first = self.num_updates == 0
        if self.is_first_guess:
            self.num_updates, self.ema_seconds_per_sample = 0, 0.0
        self.update(task_size)
        self.is_first_guess = is_first

    @property
    def seconds_per_sample(self) -> float:
        """The average, corrected for its start at zero."""
        updates = self.num_updates  # read once: another thread may be measuring
        return self.ema_seconds_per_sample / (1 - (1 - self.alpha) ** updates) if updates else 0.0

    def reset_timer(self) -> None:
        """The next interval begins now."""
        self._timestamp, self._uncounted = self._clock(), 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside this context does not count."""
        if self._uncounted and not self.paused:
            self._measure()
        was_paused, self.paused = self.paused, True
        elapsed = self._clock() - self._timestamp
        try:
            yield
        finally:
            self._timestamp = self._clock() - elapsed
            self.paused = was_paused

    @contextmanager
    def update_threadsafe(self, task_size: float) -> Iterator[None]:
        """Measure a task that may run in several threads at once: time that tasks share is counted once."""
        start = self._clock()
        yield
        with self._lock:
            self.update(task_size, interval=max(0.0, self._clock() - max(start, self._timestamp)))
            self._timestamp = self._clock()

    def __repr__(self) -> str:
        return f"PerformanceEMA({self.samples_per_second:.3g} samples/s after {self.num_updates} updates)"


Speed = Annotated[float, msgspec.Meta(ge=0.0, le=1e21)]

# The most addresses in a record. Chosen: keeps records small.
MAX_ADDRESSES = 8
# The most peers that are called directly; the rest read the DHT. Chosen: calls to all peers of a large swarm would cost
# too much.
MAX_CALLED = 64
# The most peers that are remembered. Chosen: readings of a large swarm bring a few hundred, and the limit is needed
# because anybody can call under many names.
MAX_COMPANIONS = 2048
# How many of the DHT nodes that hold the records are asked in a regular reading. Chosen: one may be dead.
HOLDERS_READ = 2

# The estimated size of a record in the DHT: owner tag, numbers, addresses and two signatures.
_BYTES_OF_RECORD = 450
# The estimated size of what each side of a call sends.
_BYTES_OF_CALL = 64
# What readings, and calls, may cost in the long run. The budget grows by this with each doubling of the swarm. Chosen:
# little beside the traffic of training.
_BYTES_PER_SECOND = 100.0
# A peer tells its progress again when the others' estimate of it is off by this share of its part of an epoch. Chosen.
_TOLERANCE = 0.05

# Samples per second. Chosen: avoids a division by 0 if the swarm stands still.
_NO_SPEED = 1e-20


def count_of_samples(option: str, number: object) -> int:
    """Check a number of samples that the user gave as an option, and return it as an int.

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


ProgressT = TypeVar("ProgressT", bound="LocalTrainingProgress")


class LocalTrainingProgress(msgspec.Struct, frozen=True):
    """How far one peer is, by its own account."""

    peer_id: PeerIDBytes
    epoch: Count
    """How many global steps it has made."""
    samples_accumulated: Count
    """Samples that it has processed for the next global step."""
    samples_per_second: Speed
    time: Moment
    """DHT time of the record."""
    client_mode: bool
    is_donor: bool = False
    """It does not train: it only has the state of this epoch for others, and joins no round."""

    def to_dict(self) -> PlainValues:
        """Plain values, for the DHT. ``is_donor`` and ``name`` are left out if they are false or empty."""
        values = msgspec.structs.asdict(self)
        return {key: value for key, value in values.items() if value or key not in ("is_donor", "name")}

    def dict(self) -> PlainValues:
        """All fields as plain values."""
        return {name: getattr(self, name) for name in LocalTrainingProgress.__struct_fields__}

    @classmethod
    def parse_obj(cls: type[ProgressT], value: object) -> ProgressT:
        """Make one of plain values, such as those of :meth:`dict`.

        Raises:
            ValueError: a field is missing or has a wrong type.
        """
        try:
            return msgspec.convert(value, cls, strict=True, builtin_types=(bytes,))
        except msgspec.ValidationError as e:
            raise ValueError(one_line(str(e))) from None

    def at_most(self, samples: float, samples_per_second: float) -> LocalTrainingProgress:
        """A copy of this record with claims clipped to these limits."""
        if self.samples_accumulated <= samples and self.samples_per_second <= samples_per_second:
            return self
        return msgspec.structs.replace(
            self,
            samples_accumulated=int(min(self.samples_accumulated, samples)),
            samples_per_second=min(self.samples_per_second, samples_per_second),
        )

    @property
    def lineage(self) -> Lineage | None:
        """The rounds behind the peer's parameters, if the record tells them."""
        return None


class ProgressRecord(LocalTrainingProgress, frozen=True):
    """A peer's progress as stored in the DHT."""

    addresses: Annotated[list[str], msgspec.Meta(max_length=MAX_ADDRESSES)] = []
    """Where others can call it; empty for a client."""
    endorsement: bytes = b""
    """The peer's signature of the subkey of this record, which proves that the subkey is its own."""
    rounds: Annotated[bytes, msgspec.Meta(max_length=MAX_LINEAGE_BYTES)] = b""
    """The rounds behind its parameters, see :class:`~shoal.optim.history.journal.Lineage`; empty if it has
    none."""
    depth: Depth = 0
    """The depth of key sharding that its peer uses, see :mod:`shoal.dht.key_sharding`."""
    name: Name = ""
    """The peer's name, for the monitor."""

    @property
    def lineage(self) -> Lineage:
        return Lineage.unpack(self.rounds)


def parse_record(value: object) -> ProgressRecord:
    """Decode and check a record that came from another peer.

    Raises:
        ValueError: it is malformed, or its numbers are impossible.
    """
    record = ProgressRecord.parse_obj(value)
    Lineage.unpack(record.rounds)
    return record


# Part of the signed bytes, so that the signature is useless in any other place.
_PURPOSE = b"shoal progress owner 1"


def endorse(identity: Identity, owner_tag: bytes) -> bytes:
    """Sign that the records under this owner tag belong to this peer."""
    return identity.sign(_PURPOSE + owner_tag)


def is_endorsed(record: ProgressRecord, owner_tag: object) -> bool:
    """Whether the peer named in a record has signed that this owner tag is its own."""
    public_key = PeerID(record.peer_id).public_key
    if public_key is None or not isinstance(owner_tag, bytes):
        return False
    return verify_signature(public_key, record.endorsement, _PURPOSE + owner_tag)


@dataclass(frozen=True)
class GlobalTrainingProgress:
    """How far the swarm is, as this peer sees it."""

    epoch: int
    """The largest epoch of any peer that others can reach."""
    samples_accumulated: int
    """The sum of the samples that peers at this epoch have reported."""
    target_batch_size: int
    num_peers: int
    """Peers with a valid record that can be reached, this one included once it has published its own."""
    num_clients: int
    """How many of them are in client mode."""
    eta_next_epoch: float
    """DHT time at which the target will be reached, by extrapolation; in the far future if nobody makes progress."""
    next_fetch_time: float
    """DHT time at which the records will be read again."""
    samples_of_last_step: int = 0
    """How many samples were in the latest step of this peer; 0 before the first one, or if they are not counted."""


class SwarmRecords(dict[bytes, ValueWithExpiration[PlainValues]]):
    """The records of the peers that count, by peer id, for subclasses of the tracker that sum them up themselves.

    Args:
        records: what is believed of each peer, and until which DHT time.
        usual: the usual summary.
    """

    def __init__(self, records: Iterable[tuple[LocalTrainingProgress, float]], usual: GlobalTrainingProgress) -> None:
        super().__init__({each.peer_id: ValueWithExpiration(each.dict(), until) for each, until in records})
        self.usual = usual


@dataclass(frozen=True)
class RefreshPolicy:
    """How often a peer reads the records of the others. All periods are seconds."""

    min_period: float = 0.5
    max_period: float = 10.0
    default_period: float = 3.0
    """The period while there are no records."""
    expected_drift_peers: float = 3.0
    """How many peers may join or leave unnoticed in an epoch."""
    expected_drift_rate: float = 0.2
    """The same as a share of all peers; the larger of the two counts."""

    def reading_period(self, num_others: int, reaches_others: bool, is_moving: bool = False) -> float:
        """The least seconds between two readings of the records in the DHT.

        A reading transfers the records of all peers, so the pause grows with their number.

        Args:
            num_others: how many records a reading brings.
            reaches_others: some of these peers can be called, which is cheaper and brings the latest news.
            is_moving: this reading has led to other keys, or has shown that the swarm grows, so it is soon outdated.
        """
        cost = HOLDERS_READ * _BYTES_OF_RECORD * num_others
        least = 2 * self.max_period if reaches_others else self.default_period
        return least if is_moving else max(least, _affordable(cost, num_others))

    def calling_period(self, num_called: int) -> float:
        """The least time between two rounds of calls to this many peers, in seconds."""
        return max(self.min_period, _affordable(_BYTES_OF_CALL * num_called, num_called))

    def next_fetch_time(self, now: float, eta: float, num_peers: int) -> float:
        """DHT time of the next reading: the nearer the end of the epoch, the sooner."""
        if num_peers == 0:
            return now + self.default_period
        # If this many peers trained, the epoch would end earlier: look again before it could be over.
        surprised = max(num_peers + self.expected_drift_peers, num_peers * (1 + self.expected_drift_rate))
        period = (eta - now) * num_peers / surprised
        return now + min(max(period, self.min_period), self.max_period)


def _affordable(cost: float, num_peers: int) -> float:
    """After how many seconds this many bytes may be spent again. The budget grows with the logarithm of the swarm."""
    return cost / (_BYTES_PER_SECOND * math.log2(2 + num_peers))


def estimate_is_off(told: LocalTrainingProgress, own: LocalTrainingProgress, share: float, batch_size: int) -> bool:
    """Whether others that extrapolate a peer's last record are wrong about it by now.

    Args:
        told: the record that they have.
        own: the peer's progress now.
        share: how many samples of an epoch come from this peer.
        batch_size: its progress advances in steps of this size, which others cannot foresee.
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
    num_others: float | None = None,
) -> GlobalTrainingProgress:
    """Progress of the swarm from the records of its peers.

    Args:
        own: this peer's progress.
        others: valid records of other peers.
        published: others know of this peer.
        target_batch_size: samples of all peers together that make an epoch.
        now: DHT time.
        next_fetch_time: passed on as it is.
        stopped: peers that cannot be reached; what they have accumulated is lost.
        is_sketchy: there are too many peers to hear from all of them in each epoch. Peers whose last record is from an
            earlier epoch are then assumed to be as far as the rest, in proportion to their speed.
        num_others: estimated number of other peers, if ``others`` is only a sample of them.
    """
    moving = [record for record in others if record.peer_id not in stopped]
    epoch = max([own.epoch, *(record.epoch for record in moving if not record.client_mode)])
    present = [record for record in moving if record.epoch == epoch]
    # If only a sample is known, each of its peers stands for this many.
    factor = 1.0 if num_others is None else max(1.0, num_others / max(1, len(moving)))
    samples: float = sum(record.samples_accumulated for record in present)
    ahead = sum(max(0.0, now - record.time) * record.samples_per_second for record in present)
    present_speed = factor * sum(record.samples_per_second for record in present)
    speed = factor * sum(record.samples_per_second for record in moving) + own.samples_per_second + _NO_SPEED
    samples, estimate = factor * samples, factor * (samples + ahead)
    if own.epoch == epoch:
        samples += own.samples_accumulated
        estimate += own.samples_accumulated + max(0.0, now - own.time) * own.samples_per_second
        present_speed += own.samples_per_second
    if is_sketchy and present_speed > 0:
        samples, estimate = samples * speed / present_speed, estimate * speed / present_speed
    return GlobalTrainingProgress(
        epoch=epoch,
        samples_accumulated=round(samples),
        target_batch_size=target_batch_size,
        num_peers=round(factor * sum(not record.is_donor for record in moving)) + published,
        num_clients=round(factor * sum(record.client_mode for record in moving)) + (published and own.client_mode),
        eta_next_epoch=now + max(0.0, target_batch_size - estimate) / speed,
        next_fetch_time=next_fetch_time,
    )


@dataclass
class Companion:
    """What this peer knows about another one: its record, and its signs of life."""

    record: LocalTrainingProgress
    expiration: float
    """DHT time after which the record no longer counts."""
    known_since: float = -math.inf
    """DHT time at which this peer first heard of it."""
    end: float | None = None
    """It has declared its epoch over and is ready for the next one; others may continue until this DHT time."""
    in_advance: bool = False
    """It has contributed to the round of gradients that ends its epoch, but waits elsewhere."""
    heard_at: float = field(default=-math.inf)
    """DHT time of its last direct sign of life."""
    called_at: float = field(default=-math.inf)
    """DHT time at which this peer last called it."""
    unreachable_since: float | None = None
    """DHT time of the first failed call since its last sign of life; ``None`` if it can be reached."""
    is_refused: bool = False
    """That call, or one after it, was refused: its program has ended. Silence alone may also mean that this peer is
    offline."""
    kept_until: float = field(default=-math.inf)
    """DHT time until which the record counts even if it has expired, because the next reading is only then."""
    lineage: Lineage = field(default_factory=Lineage)
    """The rounds behind its parameters, as it told them last."""
    lineage_time: float = -math.inf
    """DHT time of the record that told them."""

    def is_valid(self, now: float) -> bool:
        """Whether the record still counts."""
        return self.expiration >= now or self.kept_until >= now

    def epoch_by_now(self, now: float, seconds_per_epoch: float) -> int:
        """The epoch that it has probably reached since it made its record."""
        record = self.record
        return (
            record.epoch
            if seconds_per_epoch == math.inf
            else record.epoch + int(max(0.0, now - record.time) / seconds_per_epoch)
        )

    def as_at_the_beginning(self, epoch: int, began_at: float) -> Companion:
        """This peer at the beginning of an epoch that it has probably ended by now. The rest follows from its speed."""
        record = msgspec.structs.replace(self.record, epoch=epoch, samples_accumulated=0, time=began_at)
        return replace(self, record=record)

    @property
    def is_heard(self) -> bool:
        """Whether this peer has heard from it directly. Otherwise it may be dead despite its record."""
        return self.heard_at > -math.inf

    @property
    def has_ended(self) -> bool:
        """Whether its program has ended, as far as this peer knows."""
        return self.unreachable_since is not None and self.is_refused

    def note_failed_call(self, called_at: float, *, is_refused: bool) -> bool:
        """A call to it has failed; returns whether that says anything new."""
        if self.heard_at >= called_at or (self.unreachable_since is not None and not is_refused) or self.has_ended:
            return False
        if self.unreachable_since is None:
            self.unreachable_since = called_at
        self.is_refused = is_refused  # it may have been frozen before
        return True

    def is_reachable(self, now: float) -> bool:
        """Whether it is still there, as far as this peer knows."""
        return self.unreachable_since is None and (self.expiration >= now or self.kept_until >= now)


def make_room(companions: dict[bytes, Companion], is_known: Callable[[bytes], bool]) -> None:
    """If there are too many peers, forget the one that was heard of first, of those that are not known from rounds."""
    if len(companions) >= MAX_COMPANIONS:
        del companions[next((peer for peer in companions if not is_known(peer)), next(iter(companions)))]


def expected_members(
    epoch: int, until_epoch: int, companions: Mapping[bytes, Companion], last_members: Collection[bytes], now: float
) -> set[bytes]:
    """Other peers that will take part in the round that ends ``epoch``, as far as this one can know.

    These are the peers known to be at this epoch, and those that were in the last round and may still be finishing it.
    A dead peer is left out as soon as it cannot be reached, and at the latest after one round, because it does not
    announce the next epoch. Expecting too many peers costs a wait until the scheduled time; expecting too few leaves
    peers behind. So in doubt a peer is expected.

    Args:
        epoch: this peer's epoch.
        until_epoch: a peer beyond this epoch has finished the round, see
            :func:`~shoal.optim.history.window.last_epoch_in_first_round`.
        companions: all other peers.
        last_members: the other members of the last round.
        now: DHT time.
    """
    expected = set()
    for peer, companion in companions.items():
        if not companion.is_reachable(now) or companion.record.is_donor:
            continue
        is_finishing = companion.end is not None or peer in last_members
        if takes_part(companion.record.epoch, epoch, until_epoch, is_finishing=is_finishing):
            expected.add(peer)
    return expected
