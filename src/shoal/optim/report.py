"""What a peer reports to monitors of the run: its loss and other figures, bytes, rounds, and failures.

A program calls :meth:`Optimizer.report <shoal.Optimizer.report>` as often as it likes. The means of its figures are
published every few seconds, in one record with what the peer has counted itself. Only monitors read it::

    report(loss=...)  ──►  Reporting: means, samples, time of a step  ──►  {run}_reports  ──►  shoal monitor

The record is stored under the owner tag of the peer, so that no other peer can write it. In a large swarm its key has
the same bits as that of the peer's progress, see :mod:`shoal.dht.key_sharding`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from shoal.base import VERSION
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, one_line
from shoal.dht.crypto import tag_of
from shoal.dht.key_sharding import key_at
from shoal.errors import ShoalError
from shoal.net.transport import MOST, Count, Moment
from shoal.optim.progress.records import Speed
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT
    from shoal.dht.key_sharding import KeySharding

logger = logging.getLogger(__name__)

# The least seconds between two records of a peer; in a large swarm, times (1 + depth of the keys). Chosen: monitors
# stay current at little cost.
PERIOD = 5.0
# Seconds for which a record is valid. Chosen: a monitor still shows a peer two minutes after it has gone.
LIFETIME = 120.0
# Limits on what a node accepts from a peer. Chosen so that a report has less than 16 kB: monitors may hold thousands.
MAX_METRICS, MAX_NAME_CHARACTERS = 24, 48
MAX_TROUBLES, MAX_TROUBLE_CHARACTERS = 16, 64
MAX_REASON_CHARACTERS, MAX_WORD_CHARACTERS = 200, 32
MAX_LOST, LOST_BYTES = 16, 8

_Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
_Word = Annotated[str, Meta(max_length=MAX_WORD_CHARACTERS)]
# The largest figure. Chosen: no honest figure is larger, and sums of larger ones could be infinite.
LARGEST = 1e30
Figure = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]


class PeerReport(msgspec.Struct, array_like=True, frozen=True):
    """A peer's figures as stored in the DHT. The peer has counted all of them itself, except the user's ``metrics``."""

    time: Moment
    """DHT time of the record."""
    epoch: Count
    samples: Count
    """Processed by the peer since it began."""
    recent_samples: Count
    """Of these, those since its previous record: the weight of its ``metrics`` in means over peers."""
    samples_per_second: Speed
    """Over the same time, waiting included."""
    metrics: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)], Figure], Meta(max_length=MAX_METRICS)
    ] = {}
    """The user's figures by name, such as ``loss``: means since the previous record."""
    step_seconds: _Seconds = 0.0
    """The time between the last two joint steps; 0 if there were fewer."""
    joint_seconds: _Seconds = 0.0
    """The part of this time in which the peer did not compute, but looked for others, waited for them and averaged."""
    averaging_seconds: _Seconds = 0.0
    """How long all-reduces took in this time; they may run in the background."""
    group_size: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Members of the last round; 0 if there was none."""
    rounds: Count = 0
    rounds_failed: Count = 0
    failure: Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)] = ""
    """Why the last failed round failed."""
    troubles: Annotated[
        dict[Annotated[str, Meta(max_length=MAX_TROUBLE_CHARACTERS)], Count], Meta(max_length=MAX_TROUBLES)
    ] = {}
    """Warnings by kind, see :attr:`shoal.metrics.Metrics.troubles`."""
    bytes_sent: Count = 0
    bytes_received: Count = 0
    link: _Word = ""
    """How others reach it, see :attr:`shoal.metrics.Metrics.reachability`."""
    version: _Word = ""
    """The version of shoal."""
    step_samples: Count = 0
    """Samples of all peers in the last joint step; 0 if unknown."""
    step_target: Count = 0
    """How many samples the step should have had; 0 if steps are not counted in samples."""
    began: Moment = 0
    """DHT time at which the peer began; 0 if unknown."""
    lost: Annotated[list[Annotated[bytes, Meta(max_length=LOST_BYTES)]], Meta(max_length=MAX_LOST)] = []
    """The ends of the ids of peers that this one can no longer reach, see :func:`end_of_id`."""


def end_of_id(peer: PeerID) -> bytes:
    """The last bytes of an id, which are enough to tell the peers of a run apart."""
    return peer.to_bytes()[-LOST_BYTES:]


def parse_report(value: object) -> PeerReport:
    """Decode and check a record that came from another peer.

    Raises:
        ValueError: it is malformed, too large, or has impossible numbers.
    """
    try:
        return msgspec.convert(value, PeerReport, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as e:
        raise ValueError(one_line(str(e))) from None


def key_of_reports(run_id: str) -> str:
    """The DHT key of reports; in a large swarm, the beginning of their keys."""
    return f"{run_id}_reports"


def figure(name: str, value: object) -> float:
    """Check one of the user's figures, and return it as a float.

    Raises:
        TypeError: it is not a number, or a tensor with one number.
        ValueError: its name is too long.
    """
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(f"names of figures have 1 to {MAX_NAME_CHARACTERS} printable characters, got {name!r}")
    if hasattr(value, "detach"):
        value = value.detach()
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or hasattr(value, "item")):
        raise TypeError(f"{name} must be a number or a tensor with one number, got a {type(value).__name__}")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number may have any size
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be one number, got {type(value).__name__} with several: take its mean") from None


class HasPeers(Protocol):
    """A round of any kind."""

    @property
    def peers(self) -> Collection[object]:
        """Its members."""

    @property
    def weights(self) -> Collection[float]:
        """The weight of each."""


class _Sharded(Protocol):
    @property
    def spread(self) -> KeySharding:
        """How the keys of the swarm are divided."""


class _Progress(Protocol):
    @property
    def epoch(self) -> int:
        """The epoch of this peer."""


class ProgressSource(Protocol):
    """What a report needs to know of this peer's place in the swarm, such as a progress tracker."""

    @property
    def exchange(self) -> _Sharded | None:
        """``None`` before the tracker runs: nothing is published then."""

    @property
    def local_progress(self) -> _Progress:
        """This peer's own progress."""

    @property
    def unreachable_peers(self) -> Sequence[PeerID]:
        """Peers that this one has lost contact with."""


class Reporting:
    """Collects what one peer reports. Used only by the training thread. Most attributes are the total for one field of
    :class:`PeerReport`.

    Args:
        dht: where the record is published.
        run_id: name of the run.
        tracker: knows this peer's place in the swarm.
        clock: returns seconds.
        target_batch_size: samples that a joint step should have; 0 if steps are not counted in samples.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        tracker: ProgressSource,
        clock: Callable[[], float] = time.monotonic,
        *,
        target_batch_size: int = 0,
    ) -> None:
        self._dht, self._key, self._tracker = dht, key_of_reports(run_id), tracker
        self._target_batch_size, self._clock = target_batch_size, clock
        self._began = get_dht_time()
        self._samples = self._told_samples = 0
        self._told_at = clock()
        self._next = -math.inf
        # By name: the sum of the values, each times its weight, and the sum of the weights.
        self._sums: dict[str, tuple[float, float]] = {}
        self._not_finite = set[str]()
        self._warn_seldom = Seldom(logger.warning)
        self._samples_at_call = 0
        self._joint = self._step = self._joint_of_step = self._averaging_of_step = 0.0
        self._step_began: float | None = None
        self._averaging_before = self._step_samples = 0.0
        self._counted_round: HasPeers | None = None
        self._publication: Future[bool] | None = None

    # --- counting -----------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> None:
        """This peer has processed this many more samples."""
        self._samples += samples

    @contextlib.contextmanager
    def joint_work(self) -> Iterator[None]:
        """Time inside this context is spent with others, not on computing."""
        began = self._clock()
        try:
            yield
        finally:
            self._joint += self._clock() - began

    def samples_of_round(self, last: HasPeers | None, own: float) -> float:
        """Samples of all members of the last round, whose weights are samples.

        Args:
            last: the last round.
            own: this peer's samples: without a new round, it made the step alone.
        """
        before, self._counted_round = self._counted_round, last
        return own if last is None or last is before else sum(last.weights)

    def note_step(self, samples: float = 0.0) -> None:
        """A joint step is over.

        Args:
            samples: of all peers together in this step; 0 if that is not known.
        """
        self._step_samples = samples
        now, averaging = self._clock(), self._dht.p2p.metrics.seconds_averaging
        if self._step_began is not None:
            self._step, self._joint_of_step = now - self._step_began, self._joint
            self._averaging_of_step = averaging - self._averaging_before
        self._step_began, self._joint, self._averaging_before = now, 0.0, averaging

    # --- telling ------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a report would be published now."""
        return self._clock() >= self._next and (self._publication is None or self._publication.done())

    def report(self, figures: Mapping[str, Any], last: HasPeers | None = None) -> None:
        """Add the user's figures, and publish all if it is time.

        Args:
            last: the last round of this peer.

        Raises:
            TypeError, ValueError: a figure is not a number, or there are too many of them.
        """
        checked = {name: figure(name, value) for name, value in figures.items()}
        if len(checked) > MAX_METRICS:
            raise ValueError(f"at most {MAX_METRICS} figures can be reported, got {', '.join(checked)[:200]}")
        weight = max(1, self._samples - self._samples_at_call)
        self._samples_at_call = self._samples
        for name, value in checked.items():
            if name not in self._sums and len(self._sums) >= MAX_METRICS:
                # Not an error: how many names accumulate between two records depends on how long steps take.
                self._warn_seldom(
                    "more than %d names of figures in one report: %r and others are left out. Report fewer, or under "
                    "the same names", MAX_METRICS, name,
                )  # fmt: skip
            # A loss that overflows would spoil the mean. It is left out, and counted as a warning once.
            elif abs(value) <= LARGEST:
                total, weights = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + weight * value, weights + weight)
                self._not_finite.discard(name)
            elif name not in self._not_finite and len(self._not_finite) < MAX_METRICS:
                self._not_finite.add(name)
                told = " is NaN, or too large"
                self._dht.p2p.metrics.troubles[name[: MAX_TROUBLE_CHARACTERS - len(told)] + told] += 1
        if self.is_due:
            self._publish(last)

    def _publish(self, last: HasPeers | None) -> None:
        exchange = self._tracker.exchange
        if exchange is None:
            return
        self._note_outcome()
        spread, now = exchange.spread, self._clock()
        report = self._make_report(now, last)
        self._next = now + PERIOD * (1 + spread.depth)
        self._told_at, self._told_samples, self._sums = now, self._samples, {}
        key, tag = key_at(self._key, spread.place), tag_of(self._dht.peer_id)
        value, expiration = msgspec.to_builtins(report, builtin_types=(bytes,)), report.time + LIFETIME
        self._publication = self._dht.store(key, value, expiration, subkey=tag, return_future=True)

    def _note_outcome(self) -> None:
        """Log at level DEBUG if the last record was not stored: that only helps to find out why none is shown."""
        if self._publication is None:
            return
        try:
            if not self._publication.result():
                logger.debug("the report of this peer was not accepted by the DHT")
        except ShoalError as e:
            logger.debug("the report of this peer was not published: %s", e)

    def _make_report(self, now: float, last: HasPeers | None) -> PeerReport:
        metrics, seconds = self._dht.p2p.metrics, max(1e-3, now - self._told_at)
        recent = self._samples - self._told_samples
        return PeerReport(
            time=get_dht_time(),
            epoch=self._tracker.local_progress.epoch,
            samples=self._samples,
            recent_samples=recent,
            samples_per_second=recent / seconds,
            metrics={name: total / weights for name, (total, weights) in self._sums.items()},
            step_seconds=self._step,
            joint_seconds=self._joint_of_step,
            averaging_seconds=self._averaging_of_step,
            group_size=0 if last is None else len(last.peers),
            rounds=metrics.rounds_succeeded,
            rounds_failed=metrics.rounds_failed,
            failure=one_line(metrics.last_failure)[:MAX_REASON_CHARACTERS],
            troubles=dict(metrics.troubles.most_common(MAX_TROUBLES)),
            bytes_sent=min(metrics.bytes_sent, MOST - 1),
            bytes_received=min(metrics.bytes_received, MOST - 1),
            link=metrics.reachability,
            version=VERSION[:MAX_WORD_CHARACTERS],
            step_samples=min(round(self._step_samples), MOST - 1),
            step_target=self._target_batch_size,
            began=self._began,
            lost=[end_of_id(peer) for peer in self._tracker.unreachable_peers[:MAX_LOST]],
        )
