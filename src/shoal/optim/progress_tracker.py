"""The training thread's view of the swarm's progress, from which it decides when to make the next global step. The view
is a ``ProgressBoard``, which a ``ProgressExchange`` keeps up to date in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.averaging import RoundResult
from shoal.averaging.groups.settings import Trust
from shoal.base.clock import get_dht_time
from shoal.base.closeable import Facade
from shoal.base.reactor import Portal
from shoal.base.tasks import wait_at_most
from shoal.dht.dht import check_dht
from shoal.dht.validation import SHORT_LIFETIME_SECONDS
from shoal.errors import ReactorError
from shoal.guard.budget import check_share
from shoal.guard.policy import Members
from shoal.optim.history.fork_choice import ForkChoice, weights_of
from shoal.optim.history.journal import Lineage
from shoal.optim.progress.board import EpochRule, ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import (
    GlobalTrainingProgress,
    LocalTrainingProgress,
    PerformanceEMA,
    RefreshPolicy,
    SwarmRecords,
    count_of_samples,
)
from shoal.optim.progress.run_list import RunList
from shoal.optim.progress.run_settings import Company
from shoal.p2p import PeerID
from shoal.peers.book import SHARE_WASTED

if TYPE_CHECKING:
    from shoal.averaging.node import AveragerNode
    from shoal.dht import DHT
    from shoal.dht.crypto import PrivateKey, SignatureValidator
    from shoal.dht.schema import SchemaValidator
    from shoal.optim.progress.schema import TrainingProgressSchema

__all__ = ["GlobalTrainingProgress", "LocalTrainingProgress", "ProgressTracker", "TrainingProgressSchema"]

logger = logging.getLogger(__name__)

# The longest that the first step waits to learn which peers are there, in seconds. Chosen: several DHT lookups.
FIRST_LOOK_SECONDS = 5.0


def __getattr__(name: str) -> Any:
    """Load the schema at first use: it imports pydantic, which takes a while."""
    if name == "TrainingProgressSchema":
        from shoal.optim.progress.schema import TrainingProgressSchema

        return TrainingProgressSchema
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


GUARDS = ("members", "open")
# How long a peer that believes the epoch to be over waits for the others' progress, in seconds. Chosen: about one round
# trip across the world.
SECONDS_TO_ASK = 0.25
# Donors with another frozen base or agreement refuse. They are asked too, because a refusal tells both users why, but
# last: after unknown donors, whose rank is -1.
RANK_OF_REFUSING = -2.0


def check_guard(guard: str) -> None:
    """Check the option of this name.

    Raises:
        ValueError: there is no such guard.
    """
    if guard not in GUARDS:
        raise ValueError(f'guard must be "members" or "open", got {guard!r}')


def make_guard(guard: str) -> type[Members]:
    """The class that decides how far others are believed, by the name of the option."""
    if guard == "members":
        return Members
    from shoal.guard.open import OpenGuard  # most runs need none of its rules

    return OpenGuard


class TrackedTrust(Trust):
    """How far an averager trusts others whose progress is tracked.

    Args:
        tracker: knows them.
        limits_weights: the weight of a member is its number of samples, and the guard may limit it.
    """

    def __init__(self, tracker: ProgressTracker, *, limits_weights: bool = False) -> None:
        self._tracker, self._guard, self._limits_weights = tracker, tracker.board.guard, limits_weights

    def largest_weight(self, peer: PeerID) -> float:
        return self._guard.largest_weight(peer.to_bytes()) if self._limits_weights else math.inf

    def rank_donors(self, donors: Mapping[PeerID, float]) -> Mapping[PeerID, float]:
        return self._tracker.rank_donors(donors)

    def depth(self) -> int:
        exchange = self._tracker.exchange
        return 0 if exchange is None else exchange.spread.depth


class GuardedTrust(TrackedTrust):
    """The same for runs in which all peers train one model: it avoids peers that train another one, or waste time."""

    async def admits(self, peer: PeerID) -> bool:
        return await self._tracker.trains_the_same_model(peer)

    def is_proven(self, peer: PeerID) -> bool:
        return self._guard.is_proven(peer.to_bytes())

    def has_time_for(self, peer: PeerID) -> bool:
        return self._guard.has_time_for(peer.to_bytes(), get_dht_time())

    def note_waste(self, leader: PeerID, seconds: float) -> None:
        self._guard.note_waste([leader.to_bytes()], seconds, get_dht_time())


class ProgressTracker(Facade):
    """Counts the samples of all peers of a training run, and says when they make a global step.


    Args:
        dht: connected DHT of this peer.
        prefix: name of the training run; its records are stored under ``{prefix}_progress``.
        target_batch_size: samples of all peers together that make an epoch.
        client_mode: whether others cannot call this peer; default: as in the DHT.
        min_refresh_period: least time between two refreshes, and between two records of this peer, in seconds.
        max_refresh_period: most time between two refreshes, in seconds.
        default_refresh_period: seconds between two refreshes while there are no records.
        expected_drift_peers: how many peers may join or leave unnoticed in an epoch.
        expected_drift_rate: the same as a share of all peers; the larger of the two counts.
        performance_ema_alpha: weight of the newest measurement in the estimate of this peer's speed, from 0 to 1.
        metadata_expiration: seconds for which a record is valid, an hour at most.
        status_loglevel: level of the log messages about epochs.
        private_key: signs this peer's records; default: a new one.
        daemon: without effect, kept for compatibility.
        guard: ``"members"``: believe what members of the run say. ``"open"``, for a run that anybody may join: bound it
            by what each has brought to rounds (:mod:`shoal.guard.open`).
        waiting_share: the share of its time that this peer may spend on waiting for others: absent peers, peers that
            stall a group, stragglers that cost more than they add, and newcomers while it trains alone.
        rule: when an epoch is over; default: when all peers together have made ``target_batch_size`` samples.
        start: begin at once; otherwise call :meth:`run_in_background`.
    """

    instead_of_a_copy = "make another one; what it knows, it learns from the others"

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        client_mode: bool | None = None,
        min_refresh_period: float = 0.5,
        max_refresh_period: float = 10,
        default_refresh_period: float = 3,
        expected_drift_peers: float = 3,
        expected_drift_rate: float = 0.2,
        performance_ema_alpha: float = 0.1,
        metadata_expiration: float = 60.0,
        status_loglevel: int = logging.DEBUG,
        private_key: PrivateKey | None = None,
        daemon: bool = True,
        guard: str = "members",
        waiting_share: float = SHARE_WASTED,
        rule: EpochRule | None = None,
        start: bool,
    ) -> None:
        check_guard(guard)
        check_share(waiting_share)
        target_batch_size = count_of_samples("target_batch_size", target_batch_size)
        check_dht(dht)
        self.dht, self.prefix, self.target_batch_size = dht, prefix, target_batch_size
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        self.status_loglevel, self.guard = status_loglevel, guard
        self.performance_ema = PerformanceEMA(alpha=performance_ema_alpha)
        if metadata_expiration > SHORT_LIFETIME_SECONDS:
            logger.warning("metadata_expiration is %.0f s: records of progress live an hour", metadata_expiration)
        self.metadata_expiration = min(metadata_expiration, SHORT_LIFETIME_SECONDS)
        self.fetched_global_progress_this_epoch = threading.Event()
        """Set when the swarm's progress has been refreshed since this peer's last global step."""
        self.min_refresh_period, self.max_refresh_period = min_refresh_period, max_refresh_period
        self.default_refresh_period = default_refresh_period
        self.expected_drift_peers, self.expected_drift_rate = expected_drift_peers, expected_drift_rate
        refresh = RefreshPolicy(
            min_refresh_period, max_refresh_period, default_refresh_period, expected_drift_peers, expected_drift_rate
        )
        self.board = ProgressBoard(
            dht.peer_id.to_bytes(),
            self.client_mode,
            target_batch_size,
            refresh,
            self.performance_ema,
            *(get_dht_time(), lambda peer: dht.p2p.host_of(PeerID(peer)), lambda: dht.p2p.is_callable),
            functools.partial(make_guard(guard), share=waiting_share),
            rule,
        )
        if type(self)._parse_swarm_progress_data is not ProgressTracker._parse_swarm_progress_data:
            # Weak, because the board is in use in the event loop, which must not keep the tracker alive.
            parse = weakref.WeakMethod(self._parse_swarm_progress_data)

            def parse_records(records: SwarmRecords) -> GlobalTrainingProgress:
                method = parse()
                return records.usual if method is None else method(records)

            self.board.parse_records = parse_records
        self._private_key, self._in_pause = private_key, False
        self._has_looked_at_company = False
        self.exchange: ProgressExchange | None = None
        self._portal = Portal(f"progress tracker of {prefix}")
        self._started: concurrent.futures.Future[None] | None = None
        if start:
            try:
                self.run_in_background()
            except BaseException:
                self._portal.begin_close()
                raise

    # --- life ---------------------------------------------------------------------------------------------------------

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Start to publish and to read. Returns when others can call this tracker. Idempotent.

        Raises:
            ValueError: another tracker with this prefix is active on this DHT.
        """
        # These imports load pydantic and more, and would block the event loop.
        from shoal.dht.crypto import PrivateKey
        from shoal.optim.progress.schema import progress_validators

        if self._started is None:
            self.be_the_only(f"a progress tracker with prefix {self.prefix!r}", self.dht)
            schema, signatures = progress_validators(self.prefix, self._private_key or PrivateKey())
            self._started = self._portal.submit(self._start(schema, signatures))
        if await_ready:
            self._started.result(timeout)

    async def _start(self, schema: SchemaValidator, signatures: SignatureValidator) -> None:
        from shoal.optim.progress.schema import endorse

        self.board.guard.troubles = self.dht.p2p.metrics.troubles
        self.dht.add_validators([schema, signatures])
        exchange = ProgressExchange(
            self.dht.node,
            self.dht.p2p,
            self.prefix,
            self.board,
            owner_tag=signatures.local_public_key,
            endorsement=endorse(self.dht.p2p.identity, signatures.local_public_key),
            min_period=self.min_refresh_period,
            metadata_expiration=self.metadata_expiration,
        )
        exchange.on_fetch = self.fetched_global_progress_this_epoch.set
        self.exchange = exchange
        self._equip()
        await exchange.start()
        self._portal.on_close(exchange.stop)

    def _equip(self) -> None:
        """List the run, if its settings are compared. Called before the start and after it."""
        # A private run keeps its name to itself.
        exchange, is_listed = self.exchange, self.dht.p2p.membership is None and self.board.rule.is_listed
        if exchange is not None and exchange.runs is None and is_listed and self.board.company is not None:
            exchange.runs = RunList(self.dht.node, self.dht.p2p, self.prefix, self.board)

    def is_alive(self) -> bool:
        """Whether the tracker works in the background."""
        return not self._portal.closed and self.exchange is not None and self.exchange.is_alive

    def shutdown(self, timeout: float | None = None) -> None:
        """Tell the others that this peer leaves, and stop. Idempotent.

        Args:
            timeout: the longest time to wait for it, in seconds.
        """
        self._portal.close(timeout)

    def __del__(self) -> None:
        portal: Portal | None = getattr(self, "_portal", None)
        if portal is not None and not portal.closed:
            portal.begin_close()

    def _wake(self, *, calls: bool = False) -> None:
        """There is news to publish, and with ``calls`` also news to tell others at once."""
        exchange = self.exchange
        if exchange is None or self._portal.closed:
            return
        # The loop may just have ended: then nothing is left to wake.
        with contextlib.suppress(RuntimeError):
            self._portal.reactor.loop.call_soon_threadsafe(exchange.report_due.set)
            if calls:
                self._portal.reactor.loop.call_soon_threadsafe(exchange.call_due.set)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _parse_swarm_progress_data(self, metadata: SwarmRecords) -> GlobalTrainingProgress:
        """Progress of the swarm, from the records of its peers. All decisions of this tracker follow from it.

        A subclass may count in another way. It is called often, in any thread, while the records do not change.

        Args:
            metadata: the records by peer, each as plain values with its expiration, this peer's own among them once it
                is published. Only peers that count are there, with what is believed of them.
        """
        return metadata.usual

    @property
    def training_progress_key(self) -> str:
        """The DHT key of the records."""
        return f"{self.prefix}_progress"

    @property
    def global_state_updated(self) -> threading.Event:
        """Another name of :attr:`fetched_global_progress_this_epoch`."""
        return self.fetched_global_progress_this_epoch

    @property
    def should_report_progress(self) -> asyncio.Event:
        """Set, in the event loop, while there is news of this peer that has not been published yet."""
        return self._exchange_at_work().report_due

    def _exchange_at_work(self) -> ProgressExchange:
        if self.exchange is None:
            raise ReactorError("this progress tracker was made with start=False: call run_in_background() first")
        return self.exchange

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        """Progress of the swarm."""
        return self.board.global_progress(get_dht_time())

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """Progress of this peer, as last reported."""
        return self.board.own

    @property
    def global_epoch(self) -> int:
        """The swarm's epoch."""
        return self.global_progress.epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer should make a global step now."""
        return self.board.epoch_is_over(get_dht_time())

    @property
    def estimated_next_update_time(self) -> float:
        """DHT time at which the next global step is due; now if it is overdue."""
        return self.board.end_of_epoch(get_dht_time())

    def should_stop(self, patience: float) -> bool:
        """Whether this peer should make the global step rather than begin another batch.

        It should if the epoch is over, or will be before half of that batch is done: each peer stops after the batch
        that ends closest to the end of the epoch.

        Args:
            patience: the longest time to wait for the end of the epoch, in seconds.
        """
        if self.board.ends_when_introduced(get_dht_time()):
            self.await_introduction()
        if not self.board.should_stop(get_dht_time(), patience):
            if self.board.should_ask(get_dht_time()):
                self._wake(calls=True)
            return False
        if self.board.rests_on_guesses(get_dht_time()):
            self.ask_others(min(patience, SECONDS_TO_ASK))
            return self.board.should_stop(get_dht_time(), patience)
        return True

    def await_introduction(self) -> None:
        """Wait a few seconds at most until others know this peer, which has done its share of the epoch.

        Nobody waits for a peer that is not known yet, so it may not step; and with another batch it would do more than
        its share.
        """
        exchange = self.exchange
        if exchange is not None and not self.board.introduced:
            self._run_in_loop(wait_at_most(exchange.introduced, FIRST_LOOK_SECONDS), 2 * FIRST_LOOK_SECONDS)

    def ask_others(self, seconds: float, *, reads: bool = False) -> None:
        """Learn how far others are at this moment. It takes twice as many seconds at most.

        Args:
            reads: find out first who they are, because this peer has just come.
        """
        exchange = self.exchange
        if exchange is not None:
            self._run_in_loop(exchange.ask_all(seconds, reads=reads), 2 * seconds)

    def _run_in_loop(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """Wait for work in the event loop. If it takes too long, continue with what is known."""
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError, ReactorError):
            self._portal.submit(work).result(seconds)

    def is_awaited(self, patience: float) -> bool:
        """Whether another peer is ready for the next global step, and waits for this one.

        Args:
            patience: as for :meth:`should_stop`.
        """
        return self.board.is_awaited(get_dht_time(), patience)

    @property
    def knows_others(self) -> bool:
        """Whether this peer has a record of another peer that can be called."""
        return bool(self.board.companions_to_call(get_dht_time()))

    def is_first(self) -> bool:
        """Whether nobody else is in the run. Waits until the records of others have been read once."""
        self.fetched_global_progress_this_epoch.wait(FIRST_LOOK_SECONDS)
        return not self.board.believed_epochs(get_dht_time()) and not self.board.strangers

    @property
    def is_introduced(self) -> bool:
        """Whether all peers that can be called have been told that this one takes part."""
        return self.board.introduced

    @property
    def epoch_when_introduced(self) -> int:
        """The swarm's epoch when this peer was introduced. From then on others wait for it."""
        return self.board.epoch_when_introduced

    @property
    def had_others(self) -> bool:
        """Whether other peers were in the round that led to this peer's epoch."""
        return self.board.had_others

    @property
    def expected_group_size(self) -> int:
        """How many peers are expected in the next round, this one included."""
        return 1 + len(self.board.expected_members(get_dht_time()))

    def expected_members(self, until_epoch: int | None = None) -> set[PeerID]:
        """Other peers that are expected in the next round.

        Args:
            until_epoch: a peer beyond this epoch has finished the round; default: this peer's epoch.
        """
        return {PeerID(peer) for peer in self.board.expected_members(get_dht_time(), until_epoch)}

    def still_expected(self, last_epochs: Mapping[PeerID, int]) -> set[PeerID]:
        """The given peers that have not left and are not beyond the epoch given for each."""
        by_id = {peer.to_bytes(): epoch for peer, epoch in last_epochs.items()}
        return {PeerID(peer) for peer in self.board.still_expected(get_dht_time(), by_id)}

    @property
    def unreachable_peers(self) -> list[PeerID]:
        """Peers whose records are valid, but which did not answer this one's last call."""
        return [PeerID(peer) for peer in self.board.unreachable_peers(get_dht_time())]

    def watch(self, callback: Callable[[], object]) -> None:
        """Call this callback, in any thread, whenever something about other peers changes."""
        self.board.on_change.append(callback)

    def unwatch(self, callback: Callable[[], object]) -> None:
        """Stop calling this callback."""
        if callback in self.board.on_change:
            self.board.on_change.remove(callback)

    # --- partitions of the run ----------------------------------------------------------------------------------------

    def compare_settings(self, company: Company) -> None:
        """Begin to compare settings with other peers. Call this before the first report of progress."""
        self.board.company = company
        self._equip()

    def look_at_company(self) -> None:
        """Warn of peers that do not fit. Called by the training thread before each step.

        Raises:
            SettingsMismatch: this peer does not fit the others.
        """
        company = self.board.company
        if company is None:
            return
        if not self._has_looked_at_company:
            self._has_looked_at_company = True
            # A peer that does not fit should stop before it has trained with others.
            self.fetched_global_progress_this_epoch.wait(FIRST_LOOK_SECONDS)
        board = self.board

        def host_of(peer: bytes) -> Hashable:
            return self.dht.p2p.host_of(PeerID(peer))

        def present() -> Collection[bytes]:
            return board.present(get_dht_time())

        company.look(present, board.last_members, time.monotonic(), host_of)

    def compare_rounds(self) -> None:
        """Begin to compare the rounds of peers (:mod:`shoal.optim.history.fork_choice`), and to note their members."""
        self.board.fork_tracker.begin()

    def note_round(self, result: RoundResult | None, *, weights_are_samples: bool = True) -> None:
        """The round that ends this peer's epoch is over.

        Args:
            result: of the round; ``None`` if it failed or nobody else came.
            weights_are_samples: the weight of a member is its number of samples; otherwise samples are not counted.
        """
        self._note_failures(result)
        self.board.fork_tracker.note_round(result, self.board.own.epoch + 1, get_dht_time())
        if self.board.fork_tracker.has_begun or self.guard != "members":
            weights = {} if result is None else weights_of(result)
            samples = weights if weights_are_samples else dict.fromkeys(weights, math.inf)
            seconds, waits = (0.0, {}) if result is None else (result.duration, result.waits)
            waits_by_id = {peer.to_bytes(): each for peer, each in waits.items()}
            self.board.note_round(samples, get_dht_time(), seconds, waits_by_id)
            if weights_are_samples and result is not None:
                self.board.guard.note_weights(weights)

    def note_repair(self, result: RoundResult) -> None:
        """Parameters were averaged: that makes up for rounds of gradients that failed."""
        self._note_failures(result)
        self.board.fork_tracker.note_repair(result)

    def _note_failures(self, result: RoundResult | None) -> None:
        if result is not None and self.board.fork_tracker.has_begun:
            failed = [peer.to_bytes() for peer in result.seen_failing]
            self.board.guard.note_failures(failed, result.duration, get_dht_time())

    @property
    def lineage(self) -> Lineage:
        """The rounds behind this peer's parameters."""
        return self.board.fork_tracker.lineage(get_dht_time())

    def adopt_lineage(self, lineage: Lineage, epoch: int) -> None:
        """This peer has taken over a state of this epoch, and with it the rounds behind it."""
        self.board.fork_tracker.adopt(lineage, epoch, get_dht_time())

    @property
    def gives_way_to(self) -> ForkChoice | None:
        """The verdict whose winners' state this peer must take over; ``None`` if it is not on a losing side."""
        verdict = self.board.verdict(get_dht_time())
        return verdict if self.dht.peer_id.to_bytes() in verdict.losers else None

    @property
    def epochs_given_up(self) -> int:
        """How many epochs this peer has trained since the last round common with the side that it gives way to."""
        return self.board.fork_tracker.epochs_given_up(self.board.own.epoch)

    def rank_donors(self, peers: Iterable[PeerID]) -> dict[PeerID, float]:
        """Rank the donors of a state, for a newcomer or a peer that gives way; the highest rank is the best.

        Returns:
            Their epochs, as far as this peer believes them. Peers whose state must not be taken over are missing.
        """
        now = get_dht_time()
        verdict, epochs = self.board.verdict(now), self.board.believed_epochs(now)
        strangers = self.board.strangers
        refusing = frozenset[bytes]() if self.board.company is None else self.board.company.refusing
        gives_way = self.dht.peer_id.to_bytes() in verdict.losers
        ranks: dict[PeerID, float] = {}
        for peer in peers:
            tag = peer.to_bytes()
            if tag in verdict.losers or (gives_way and tag not in verdict.winners):
                continue
            if tag in refusing:
                ranks[peer] = RANK_OF_REFUSING
            elif tag in strangers:
                continue
            elif self.board.time_of_record(tag) is None:
                ranks[peer] = -1.0  # it is not known yet
            elif tag in epochs:
                ranks[peer] = epochs[tag]
        return ranks

    def note_vain_attempt(self, seconds: float) -> None:
        """No peer gave this one the state of the epoch that others claim; the attempt took this many seconds."""
        self.board.guard.note_vain_attempt(get_dht_time(), seconds)

    async def trains_the_same_model(self, peer: PeerID) -> bool:
        """Whether this peer may average with another one. Called inside the event loop."""
        return self.exchange is None or await self.exchange.trains_the_same_model(peer)

    def advise(self, averager: AveragerNode, weighs_samples: bool, trains_one: bool) -> None:
        """Let an averager judge other peers by what this tracker knows about them.

        Args:
            weighs_samples: the weight of a member is its number of samples; otherwise all weights are equal.
            trains_one: all peers should train one model, so the averager keeps away from peers that train another one.
        """
        self.board.guard.full_group = averager.config.target_group_size
        averager.believe((GuardedTrust if trains_one else TrackedTrust)(self, limits_weights=weighs_samples))

    # --- reporting ----------------------------------------------------------------------------------------------------

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """Tell the swarm how many samples this peer has accumulated.

        Args:
            local_epoch: how many global steps this peer has made.
            samples_accumulated: samples since the last one.
            update_global_samples: without effect, because the sum over all peers always contains the latest report.
        """
        self.board.report(local_epoch, samples_accumulated, get_dht_time())
        self._wake()

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Time inside this context does not count for this peer's speed. The epoch can change only inside it."""
        assert not self._in_pause, "pause_updates() is not reentrant"
        self._in_pause = True
        try:
            with self.performance_ema.pause():
                yield
        finally:
            self._in_pause = False
            self.board.cancel_update()

    def declare_epoch_over(self, patience: float = 0.0, *, in_advance: bool = False) -> None:
        """Tell the others at once that this peer is ready for the global step, and until when they may continue.

        Args:
            patience: as for :meth:`should_stop`; by default they should stop at once.
            in_advance: this peer waits elsewhere, and only contributes to the round of gradients.
        """
        self.board.begin_update(get_dht_time(), patience, in_advance)
        self._wake(calls=True)

    def announce(self) -> None:
        """This peer has just taken over a state, and makes its first batch: tell others, so that they wait for it."""
        self.board.announce()
        self._wake(calls=True)

    def others_can_come(self) -> bool:
        """Whether this peer, whose round has failed, should train on and try again, rather than make a step alone.

        It should if reachable peers are at its epoch, or have ended it; in the second case it takes over their state.
        """
        return self.global_epoch > self.board.own.epoch or bool(self.board.expected_members(get_dht_time()))

    def train_on(self) -> None:
        """Withdraw the declaration that the epoch is over, and tell the others. Inside :meth:`pause_updates`."""
        self.board.cancel_update()
        self._wake(calls=True)

    def may_hold(self, *, has_reason: bool) -> bool:
        """Whether this peer may wait, or keep waiting, for newcomers; see :meth:`~shoal.guard.budget.Budget.holds`."""
        return self.board.guard.budget.holds(get_dht_time(), has_reason=has_reason)

    def look_after_others(self) -> None:
        """Call all known peers to learn which are still there. The answers arrive soon, in the background."""
        self._wake(calls=True)

    def update_epoch(self, new_epoch: int | None = None, members: Collection[PeerID] = ()) -> int:
        """This peer has made a global step.

        Args:
            new_epoch: its epoch now; default: the next one.
            members: the other peers in the round that led there. They are expected in the next round.

        Returns:
            The new epoch.

        Raises:
            AssertionError: called outside of :meth:`pause_updates`.
        """
        assert self._in_pause, "update_epoch() must be called inside pause_updates()"
        if new_epoch is None:
            new_epoch = self.board.own.epoch + 1
        self.board.finish_update(new_epoch, [peer.to_bytes() for peer in members], get_dht_time())
        self.fetched_global_progress_this_epoch.clear()
        self._wake(calls=True)
        logger.log(self.status_loglevel, "%s: this peer is at epoch %d", self.prefix, new_epoch)
        return new_epoch
