"""An optimizer for slow connections: each peer makes many inner steps of its own between two exchanges with others."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging import Aggregation, DecentralizedAverager
from shoal.averaging.state.download import State
from shoal.base import standby
from shoal.base.closeable import at_the_door
from shoal.compression import CompressionBase, Float16Compression
from shoal.compression.base import bytes_of
from shoal.optim.consistency import OtherTensors
from shoal.optim.diloco.catching_up import CatchingUp
from shoal.optim.diloco.checkpoint import OuterCheckpoint
from shoal.optim.diloco.fragment_updates import FragmentUpdates, OuterRound
from shoal.optim.diloco.fragments import (
    ExtraTensors,
    Fragments,
    OuterOptimizerFactory,
    OuterState,
    default_outer_optimizer,
    warn_of_momentum,
)
from shoal.optim.diloco.inner import InnerOptimizer, InnerOptimizers
from shoal.optim.diloco.messages import Staleness
from shoal.optim.diloco.outer_averager import OuterAverager, OuterDonor
from shoal.optim.diloco.rounds import OuterRounds
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.diloco.slots import Schedule, SlotCounter, StepRule
from shoal.optim.history.journal import Entry, hash_of
from shoal.optim.joint_optimizer import JointOptimizer, uncompiled
from shoal.optim.options import resolved_by
from shoal.optim.progress.run_settings import RunSettings, describe_optimizer, settings_of
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.recovery.adopt import CheckState
from shoal.optim.recovery.when import Retries
from shoal.optim.report import Reporting
from shoal.optim.setup.devices import BatchesAhead
from shoal.optim.setup.optimizer_state import zero_gradients
from shoal.optim.setup.schedules import describe_schedule
from shoal.optim.setup.training_setup import Parameters, ParamGroups, SchedulerFactory
from shoal.optim.setup.training_state import OWN

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)

DEFAULT_COMPRESSION = Float16Compression()


class DiLoCo(JointOptimizer):
    """Trains a model together with all peers of a run, and exchanges little.

    Each peer makes inner steps on its own batches. After ``sync_every`` of them, it sends how far its parameters have
    moved from the *outer* parameters, on which all agree. The mean is a gradient for the outer optimizer. All peers
    take the same outer step and continue from the result.

    Args:
        dht: connected DHT of this peer.
        run_id: name of the training run; no dots.
        optimizer: makes the inner steps: a torch optimizer, a list of them, or a function of parameter groups.
        params: parameters or groups; required with a function.
        scheduler: schedule of the inner learning rate, or a function that makes it. With ``sync_every`` it counts the
            inner steps of the run, otherwise the slots.
        outer_optimizer: a function of parameters that makes the outer optimizer. Default:
            ``SGD(lr=0.7, momentum=0.9, nesterov=True)``; for ``average="parameters"`` ``SGD(lr=0.7, momentum=0.5)``;
            for ``TopKCompression`` ``SGD(lr=0.7)``.
        outer_scheduler: a function that makes a schedule of an outer optimizer's learning rate. It counts updates of
            a fragment.
        sync_every: inner steps between two exchanges of the same parameters.
        target_batch_size: instead of ``sync_every``: samples of all peers together between two exchanges.
        batch_size_per_step: samples in each call of :meth:`step`; or give ``batch_size`` there.
        fragments: exchange the parameters in this many fragments, one after another; or the parameters of each.
        fragment_sync_delay: apply the result of an exchange only after this many further inner steps, and keep training
            meanwhile. ``None``: apply it as soon as it is there.
        fragment_update_alpha: weight of the model's own values when a result is applied, from 0 to 1; or ``"rebase"``:
            keep the progress made since they were sent. Default: 0 without delay, else ``"rebase"``.
        compression: codec of what peers send.
        return_compression: codec of averages. Default: the same, or ``BlockwiseQuantization`` if that is coarse. If
            messages are short, reducers pass them on instead.
        error_feedback: the share of what a message has left out that is added to the next one, from 0 to 1. Default: 1
            with 4 bits, 0.95 with ``TopKCompression``, otherwise 0.
        sparse_mean: which peers the mean of a value is over, if not all have sent it: ``"senders"`` or ``"members"``.
        check_every: updates after which peers compare the bits of their outer parameters; the majority wins.
        average: ``"pseudo_gradients"``, or ``"parameters"``. With the latter each peer has outer parameters of its own,
            and groups need not be the whole swarm.
        weighting: how peers count: ``"batch"``: every sample the same; ``"samples"``: fast peers more.
        straggler_patience: for how many seconds the first peer that has made its steps waits for the others. Default:
            ``matchmaking_time``.
        staleness: a function that returns the factor for an old contribution, from its age in versions.
        max_staleness: contributions older than this many versions do not count.
        share_inner_state: newcomers begin with the statistics of another peer's inner optimizers.
        matchmaking_time: for how many seconds a group waits for members that do not come.
        averaging_timeout: a round is given up after this many seconds.
        allreduce_timeout: the same for the all-reduce alone; default: ``averaging_timeout``.
        next_chunk_timeout: a member is given up after this many seconds of silence. Default: ``matchmaking_time``, but
            between a quarter and a third of ``averaging_timeout``.
        load_state_timeout: a download of the state is given up after this many seconds.
        load_state_compression: codec for downloads of the state.
        extra_tensors: further tensors, such as the running means of batch norms. They are averaged as they are, and
            without loss, whenever the first fragment is exchanged.
        client_mode: connect to others, but accept no connections; default: as in the DHT.
        auxiliary: help others to average, without own batches: call :meth:`step` without arguments now and then.
        model: the module that the parameters belong to. Its buffers, and its parameters that the optimizer does not
            have, become extra tensors; archives name the parameters as this module does. Frozen parameters are not
            sent: load the same in all peers.
        aggregation: how the messages of all peers become one, as for :class:`~shoal.Optimizer`. ``None`` = their mean.
            It needs a codec whose averages are encoded again: not ``Blockwise4BitQuantization`` or ``TopKCompression``.
        frozen_base: names the frozen model beneath the parameters, as for :class:`~shoal.Optimizer`.
        guard: how far others are believed. ``"members"``: the run trusts its members, and withstands strangers and
            faults. ``"open"``, for a run that anybody may join: what a peer claims is bounded by what it has delivered,
            which costs a fast newcomer its first rounds. The same in all peers.
        on_mismatch: what :meth:`step` does if this peer's settings are not those of its run: ``"raise"``
            :class:`~shoal.errors.SettingsMismatch`, or ``"warn"`` and continue.
        check_state: can refuse a downloaded state, as for :class:`~shoal.Optimizer`. The model has the parameters of
            that state while it is called. Updates that this peer has missed are not checked.
        state_download_rate: the most bytes per second that this peer downloads of a state when it joins or catches up.
            Default: no limit.
        averager_opts: further options of the averager.
        tracker_opts: further options of the progress tracker.
        performance_ema_alpha: weight of the newest measurement in the estimate of this peer's speed, from 0 to 1.
        shutdown_timeout: how long :meth:`shutdown` may take to leave the run in order, in seconds.
        verbose: log what happens at level INFO.

    Raises:
        ValueError: options contradict each other.
        TypeError: an option has a wrong type.
        ReactorError: the DHT is shut down.
    """

    kind = "DiLoCo"
    steps_each_batch = True
    options: OuterSettings
    instead_of_a_copy = "save its state_dict()"

    @at_the_door
    @resolved_by(OuterSettings)
    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        optimizer: InnerOptimizer | Sequence[InnerOptimizer],
        params: Parameters | ParamGroups | None = None,
        scheduler: Any | None = None,
        outer_optimizer: OuterOptimizerFactory | None = None,
        outer_scheduler: SchedulerFactory | None = None,
        sync_every: int | None = None,
        target_batch_size: int | None = None,
        batch_size_per_step: int | None = None,
        fragments: int | Sequence[Iterable[torch.Tensor]] = 1,
        fragment_sync_delay: int | None = 0,
        fragment_update_alpha: float | str | None = None,
        compression: CompressionBase | None = DEFAULT_COMPRESSION,
        return_compression: CompressionBase | None = None,
        error_feedback: float | None = None,
        sparse_mean: str = "senders",
        average: str = "pseudo_gradients",
        weighting: str = "batch",
        straggler_patience: float | None = None,
        staleness: Staleness | None = None,
        max_staleness: int = 4,
        check_every: int = 10,
        share_inner_state: bool = True,
        matchmaking_time: float = 15.0,
        averaging_timeout: float = 60.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        load_state_timeout: float = 600.0,
        load_state_compression: CompressionBase | None = None,
        extra_tensors: Sequence[torch.Tensor] = (),
        client_mode: bool | None = None,
        auxiliary: bool = False,
        averager_opts: dict[str, Any] | None = None,
        tracker_opts: dict[str, Any] | None = None,
        performance_ema_alpha: float = 0.1,
        shutdown_timeout: float = 5.0,
        verbose: bool = False,
        model: torch.nn.Module | None = None,
        aggregation: Aggregation | None = None,
        frozen_base: str | None = None,
        guard: str = "members",
        on_mismatch: str = "raise",
        check_state: CheckState | None = None,
        state_download_rate: float = math.inf,
    ) -> None:
        options = self.options
        self.inner = InnerOptimizers(optimizer, params, scheduler)
        """The optimizers that make the inner steps."""
        parts = Fragments(self.inner.parameters, fragments, options.codec.block or 1)
        schedule = Schedule(len(parts), sync_every, options.target_batch_size)
        others = OtherTensors() if model is None else OtherTensors.find(model, self.inner.parameters, extra_tensors)
        if frozen_base is not None:
            others.leave_at_home(frozen_base, buffers=model is None)
        extra_tensors = [*extra_tensors, *(tensor for _, tensor in others.take_what_changes())]
        extra = ExtraTensors(extra_tensors, self.inner.parameters)
        if model is not None:
            self.inner.name_parameters(model)
        self.be_the_only(f"a DiLoCo with run_id {run_id!r}", dht)
        self.dht, self._closing = dht, threading.Event()
        self._batches, self._retries = BatchesAhead(self.inner.parameters), Retries(self._closing)
        # The model's own parameters, one vector for each fragment, while it holds the outer ones.
        self._set_aside: list[torch.Tensor] | None = None
        factory = outer_optimizer or default_outer_optimizer(average, is_sparse=options.is_sparse)
        lock = threading.RLock()
        states = [OuterState(part.read(), factory, outer_scheduler) for part in parts]
        updates = [
            self._make_fragment(number, part, state, options, lock, dht.peer_id)
            for number, (part, state) in enumerate(zip(parts, states, strict=True))
        ]
        warn_of_momentum([state.optimizer for state in states], average, is_sparse=options.is_sparse)
        tracker_options = {"client_mode": options.client_mode, "start": False, **options.for_tracker()}
        target = options.target_batch_size
        if target is None:
            target = schedule.steps_of(0)
            rule = StepRule(options.straggler_patience, overlaps=options.others_may_be_ahead)
            tracker_options = {"rule": rule, **tracker_options}
        self.tracker = ProgressTracker(dht, run_id, target, **tracker_options)
        self.averager = self._make_averager(
            OuterDonor(SlotCounter(schedule), updates, lock, self.inner, share_inner_state, extra),
            f"{average} of {schedule}, {parts.fingerprint}, weighting {weighting}",
            dht,
            prefix=f"{run_id}_outer_averager",
            compression=extra.codec(options.codec) if extra else options.codec,
            state_compression=load_state_compression,
            state_download_rate=state_download_rate,
            **options.for_averagers(),
            aggregation=aggregation,
            **options.own_averager_opts(),
        )
        self._rounds = OuterRounds(options, self.tracker, self.averager)
        self._catching_up = CatchingUp(self._rounds)
        self._auxiliary = self._rounds.helping() if auxiliary else None
        self._reporting = Reporting(dht, run_id, self.tracker, target_batch_size=options.target_batch_size or 0)
        self._become_torch_optimizer({})
        self._begin()

    def _averagers(self) -> Sequence[tuple[DecentralizedAverager, bool]]:
        return [(self.averager, True)]

    # --- its parts, which differ if a process has only a part of the model --------------------------------------------

    def _make_fragment(self, *args: Any) -> FragmentUpdates:
        return FragmentUpdates(*args)

    def _make_averager(self, *args: Any, **options: Any) -> OuterAverager:
        return OuterAverager(*args, **options)

    def _describe(self) -> RunSettings:
        options, schedule = self.options, self.schedule
        outer = self._rounds.fragments[0].state
        shared = {
            "sync_every": schedule.sync_every,
            "guard": self.tracker.guard,
            "target_batch_size": schedule.target_batch_size,
            "outer_optimizer": describe_optimizer(outer.optimizer),
            "outer_scheduler": describe_schedule(outer.scheduler),
        }
        return settings_of(
            self.kind,
            self.averager.node,
            self.inner.parameters,
            self.inner.names,
            {},
            needed={
                "average": options.average,
                "fragments": schedule.fragments,
                "weighting": options.weighting,
            },
            shared={} if self.options.auxiliary else shared,
        )

    # --- training -----------------------------------------------------------------------------------------------------

    @at_the_door
    @uncompiled
    def step(
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: Any = None
    ) -> Any:
        """Make an inner step, and exchange parameters with the others when it is time.

        Args:
            closure: computes the loss and its gradients, if they have not been computed before.
            batch_size: number of samples in the batch; default: ``batch_size_per_step``. 0 = no new gradients: only
                take part in exchanges.
            grad_scaler: the scaler of the loss, if there is one; a step whose gradients overflow is skipped.

        Returns:
            The result of the closure.

        Raises:
            RuntimeError: the model holds the outer parameters.
            SettingsMismatch: this peer's settings are not those of its run.
        """
        batch_size = self._begin_step(closure, batch_size, grad_scaler)
        if batch_size is None:
            return None
        if self._set_aside is not None:
            raise RuntimeError(
                "the model holds the outer parameters, which only exchanges may change: leave use_outer_parameters(), "
                "or call show_own_parameters(), before step()"
            )
        self._note_thread()
        scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if batch_size and self.inner.has_no_gradients():
            return loss
        if self._catch_up():
            return loss
        if batch_size:
            self._make_inner_step(batch_size, scaler)
        self._exchange(self._slot_is_over)
        return loss

    def _exchange(self, slot_is_over: Callable[[], bool]) -> None:
        """End the slot if it is over, and apply results of rounds that are due."""
        slot = self.local_epoch
        with self._reporting.joint_work(), standby.standing_by(self):
            if slot_is_over() and not self._catching_up.is_needed():
                self._batches.finish()  # before this peer tells others that it is ready
                self._rounds.end_slot()
            self._rounds.apply_what_is_due()
        if self.local_epoch != slot:
            # The samples of a fragment's round are those of all slots since its previous round: one slot per fragment.
            done = self.last_round
            self._reporting.note_step(0.0 if done is None else done.samples / len(self._rounds.fragments))

    # --- for programs that know by themselves when a slot is over -----------------------------------------------------

    def take_batch(self, batch_size: int) -> bool:
        """Make an inner step, and leave the end of the slot to :meth:`end_epoch`; as in :class:`~shoal.Optimizer`.

        With a ``fragment_sync_delay``, this waits for the result of a round that is due.

        Returns:
            Whether the batch is used. It is not if it has no gradients, or if this peer is behind the others: then
            :meth:`catch_up` is needed.
        """
        self._begin_step(None, batch_size, None)
        self._catching_up.keep_up()
        if self.inner.has_no_gradients() or self._catching_up.is_needed():
            return False
        self._make_inner_step(batch_size, None)
        self._rounds.apply_what_is_due()
        return True

    def _end_epoch_now(self) -> None:
        self._exchange(lambda: True)

    def go_to(self, epoch: int) -> None:
        """Take this slot without those before it, because nobody has a state of them any more."""
        self._check_open()
        with self.tracker.pause_updates():
            self._rounds.go_to(epoch)

    def _follow(self, epoch: int) -> None:
        self._rounds.counter.go_to(epoch)

    def _make_inner_step(self, batch_size: int, scaler: Any) -> None:
        with self._rounds.lock:
            samples = batch_size if self.inner.step(self, scaler) else 0
        self._batches.launched_one()
        self._reporting.count(samples)
        self._rounds.counter.count(samples)
        for each in self._rounds.fragments:
            each.count(samples)
        self.inner.move_schedules(self._rounds.counter.position)
        self._rounds.has_trained = True
        self._rounds.report()

    def _is_awaited(self) -> bool:
        return self._set_aside is None and self.tracker.is_awaited(self.options.straggler_patience)

    def _slot_is_over(self) -> bool:
        if self._rounds.counter.is_full:
            self.tracker.await_introduction()
        return self.tracker.should_stop(self.options.straggler_patience)

    # --- keeping up with the swarm ------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """How long slots are."""
        return self._rounds.counter.schedule

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedule of each inner optimizer; empty if there are none."""
        return self.inner.schedulers

    @property
    def outer_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer of each fragment's outer parameters."""
        return tuple(each.state.optimizer for each in self._rounds.fragments)

    @property
    def inner_steps(self) -> int:
        """Inner steps of this peer."""
        return self._rounds.counter.inner_steps

    @property
    def local_epoch(self) -> int:
        """The slot at which this peer is."""
        return self._rounds.counter.slot

    @property
    def position(self) -> int:
        """The position of schedules of the inner learning rate."""
        return self._rounds.counter.position

    def is_synchronized_with_peers(self) -> bool:
        """Whether this peer lacks nothing that others have, as far as it knows."""
        is_behind = any(each.lacks_updates for each in self._rounds.fragments)
        return not is_behind and not self._catching_up.is_needed()

    def _catch_up(self) -> bool:
        self._catching_up.keep_up()
        if not self._catching_up.is_needed():
            return False
        if self._retries.is_time():
            logger.info("this peer is at slot %d, the swarm at %d", self.local_epoch, self.tracker.global_epoch)
            self._retries.note(succeeded=self._catching_up.run())
        self.tracker.performance_ema.reset_timer()  # this batch is lost: its time must not count for the next one
        return True

    def load_state_from_peers(self, **options: Any) -> bool:
        """Download the outer parameters of another peer, and all that belongs to them.

        Args:
            options: of the download, such as ``timeout`` in seconds.

        Returns:
            Whether there was a donor whose state fits.
        """
        return self._catching_up.download(**options)

    def _take_names(self, model: torch.nn.Module) -> None:
        self.inner.name_parameters(model)

    def load_state(self, state: State) -> None:
        """Continue from a state in the form that peers share, such as one from an archive.

        Raises:
            ValueError: it does not fit.
        """
        self._catching_up.adopt(*state[:2])

    @property
    def last_round(self) -> OuterRound | None:
        """The outer update that was applied last."""
        return self._rounds.last

    @property
    def _latest_round(self) -> OuterRound | None:
        return self._rounds.last

    # --- as a torch optimizer -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use_outer_parameters(self) -> Iterator[None]:
        """Inside this context the model holds the outer parameters, for evaluation and for publishing."""
        if self._set_aside is not None:
            yield
            return
        self.show_outer_parameters()
        try:
            yield
        finally:
            self.show_own_parameters()

    def show_outer_parameters(self) -> None:
        """Put the outer parameters into the model, until :meth:`show_own_parameters`.

        For callbacks, and other places where a context does not fit.
        """
        if self._set_aside is not None:
            return
        self._rounds.begin_run()
        self._rounds.end_flights()
        self._set_aside = [each.fragment.read() for each in self._rounds.fragments]
        for each in self._rounds.fragments:
            each.fragment.write(each.state.values)

    def show_own_parameters(self) -> None:
        """Put this peer's own parameters back into the model, to continue training."""
        if self._set_aside is None:
            return
        for each, values in zip(self._rounds.fragments, self._set_aside, strict=True):
            each.fragment.write(values)
        self._set_aside = None

    def outer_versions(self) -> list[tuple[Entry, bytes]]:
        """For each fragment, the entry of its outer parameters and a hash of their bits. The same entry in two peers
        implies the same hash."""
        return [(each.journal.newest, hash_of(bytes_of(each.state.values))) for each in self._rounds.fragments]

    def _inner_groups(self) -> Sequence[Any]:
        return self.inner.param_groups

    def _inner_state(self) -> Any:
        return {key: value for each in self.inner.optimizers for key, value in each.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the last batch."""
        zero_gradients(self.inner.parameters, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint from which this peer can resume the run. Save the model beside it.

        It is the state of the inner optimizer; with a list of them, ``"optimizers"`` has the state of each. Under
        ``"shoal"`` it has the outer parameters with all that belongs to them, and the schedules. It does not wait for
        an exchange in flight, which is not in it and counts as missed. While the model holds the outer parameters, its
        own ones are in the checkpoint.
        """
        self._rounds.begin_run()
        outer = OuterCheckpoint.dump(self._rounds.counter, self.options.average, self._rounds.fragments)
        own = {"outer": outer, "schedulers": self.inner.dump_schedules()}
        if self._set_aside is not None:
            own["model"] = self._set_aside
        return {**self.inner.state_dict(), OWN: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a checkpoint from :meth:`state_dict`. The argument is not changed, and neither is the model: load
        that first. Only if it held the outer parameters when it was saved, its own ones are put into it here.

        The checkpoint of plain torch optimizers works, too: then the outer parameters stay as they are. If the swarm is
        ahead of the checkpoint, the next step downloads what this peer lacks.

        Raises:
            ValueError: it is a checkpoint of something else; nothing has been changed.
        """
        own = state_dict.get(OWN) or {}
        fragments, saved = self._rounds.fragments, None
        if "outer" in own:
            saved = OuterCheckpoint.parse(own["outer"], self.options.average, self.schedule, fragments)
        lengths, model = [each.fragment.length for each in fragments], own.get("model")
        given = lengths if model is None else [values.numel() for values in model]
        if given != lengths:
            raise ValueError(f"it is of another model: fragments of {given} values, and this peer's has {lengths}")
        self.inner.load_state_dict(state_dict, own.get("schedulers") if saved is not None else None)
        if saved is not None:
            self._rounds.restore(saved, self.options.shutdown_timeout)
            self.inner.move_schedules(self._rounds.counter.position)
            self._set_aside = model
            self.show_own_parameters()

    def __repr__(self) -> str:
        return f"DiLoCo(run_id={self.options.run_id!r}, slot={self.local_epoch}, inner={self.inner.optimizers!r})"

    # --- the end ------------------------------------------------------------------------------------------------------

    def _takes_part(self) -> bool:
        return self.averager.is_alive()

    def _leave(self) -> None:
        """Leave the run. Rounds in flight continue without this peer."""
        try:
            self._catching_up.let_go()
            if self._auxiliary is not None:
                self._auxiliary.let_go_of_rounds()
            self._rounds.let_go(self.options.shutdown_timeout)
        finally:
            self.tracker.shutdown(self.options.shutdown_timeout)
            self.averager.shutdown()
