"""What the optimizers of a run have in common: they are torch optimizers, shut down only once, and begin to search for
a group before a round is due."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch

from shoal.averaging import AveragingStage, DecentralizedAverager, StepControl
from shoal.base import standby
from shoal.base.clock import get_dht_time
from shoal.base.logs import words_of
from shoal.errors import ReactorError, ShoalError
from shoal.optim.grad_scaler import SwarmOptimizer
from shoal.optim.progress.run_settings import Company, RunSettings
from shoal.optim.setup.optimizer_state import without_gradients
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT
    from shoal.optim.options import SwarmOptions
    from shoal.optim.progress_tracker import ProgressTracker
    from shoal.optim.report import HasPeers, Reporting

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Let a compiled function that calls this method run it, and all that it calls, as plain Python.

    Otherwise the compiler would go through locks, sockets and threads, and fail there. What the method calls may be
    compiled itself, such as the step of an inner optimizer.
    """
    plain: Callable[P, T] | None = None

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal plain
        if plain is None:
            # Not at import: this loads the compiler, which takes a second. Any torch optimizer loads it anyway.
            plain = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
        return plain(*args, **kwargs)

    return call


def option(name: str) -> Any:
    """An attribute that returns an option, for programs that read it there; all are in ``options``."""
    return property(lambda optimizer: getattr(optimizer.options, name))


class JointOptimizer(SwarmOptimizer):
    """Base of the optimizers that train with other peers.

    Its groups and statistics are those of the optimizers that make the steps.
    """

    kind: ClassVar[str]
    """Its name in errors."""
    dht: DHT
    options: SwarmOptions
    run_id: str = option("run_id")
    client_mode: bool = option("client_mode")
    auxiliary: bool = option("auxiliary")
    tracker: ProgressTracker
    _reporting: Reporting
    # Torch's base class fills this list in its constructor; ``None`` afterwards.
    _groups_under_construction: list[dict[str, Any]] | None
    _thread_lock: threading.Lock
    """Held to change :attr:`thread`, and while a helper acts for that thread."""
    _closing: threading.Event
    """Set when this begins to shut down."""
    _auxiliary: Auxiliary | None
    """``None``: this peer has data."""
    _company: Company | None = None

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _averagers(self) -> Sequence[tuple[DecentralizedAverager, bool]]:
        """Its averagers, each with whether a member's weight is its number of samples."""
        raise NotImplementedError

    def _describe(self) -> RunSettings:
        """What other peers must have in common with this one."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Announce this peer to others. Called last, after all arguments have been checked."""
        try:
            for averager, weighs_samples in self._averagers():
                averager.run_in_background()
                self.tracker.advise(averager.node, weighs_samples, trains_one=not self.options.draws_groups)
            self._company = Company(self.options.run_id, self._describe(), self.options.on_mismatch)
            self.tracker.compare_settings(self._company)
            self.tracker.run_in_background()
        except BaseException:
            self.shutdown()
            raise

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Let archives of the run know the parameters by their names in this model, unless they came with names."""
        self._take_names(model)
        if self._company is not None:
            self._company.change(self._describe())

    def _take_names(self, model: torch.nn.Module) -> None:
        raise NotImplementedError

    # --- as a torch optimizer -----------------------------------------------------------------------------------------

    def _become_torch_optimizer(self, defaults: dict[str, Any]) -> None:
        """Called at the end of a constructor, before others hear of this peer."""
        self._thread_lock = threading.Lock()
        self._groups_under_construction = []
        torch.optim.Optimizer.__init__(self, [dict(group) for group in self._inner_groups()], defaults)
        self._groups_under_construction = None

    @property
    def local_epoch(self) -> int:
        """How many joint steps this peer has made."""
        raise NotImplementedError

    def _inner_groups(self) -> Sequence[Any]:
        """The groups of the optimizers that make the steps, with the user's parameters."""
        raise NotImplementedError

    def _inner_state(self) -> Any:
        """The statistics of these optimizers."""
        raise NotImplementedError

    @property
    def param_groups(self) -> Any:
        """The parameter groups with the user's parameters, as a tuple."""
        if self._groups_under_construction is not None:
            return self._groups_under_construction
        return self._inner_groups()

    @param_groups.setter
    def param_groups(self, _: Any) -> None:
        """Ignored: the base class sets an empty list, but the groups are those of the inner optimizers."""

    @property
    def state(self) -> Any:
        """Statistics of the optimizers that make the steps."""
        return self._inner_state()

    @state.setter
    def state(self, _: Any) -> None:
        """Ignored, as for the groups."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: all peers must agree on the parameters.

        Raises:
            ValueError: always.
        """
        if self._groups_under_construction is None:
            raise ValueError("parameters cannot be added to a run in progress: all peers must have the same ones")
        super().add_param_group(param_group)

    # --- while its thread waits elsewhere -----------------------------------------------------------------------------

    thread: threading.Thread | None = None
    """The thread that called :meth:`step` last."""

    def _note_thread(self) -> None:
        """Called first in a step: this thread looks after this optimizer, see :mod:`shoal.base.standby`."""
        thread = threading.current_thread()
        if self.thread is not thread:
            with self._thread_lock:
                self.thread = thread
            standby.add(self)

    def begin_round_if_awaited(self, thread: threading.Thread) -> None:
        """See :class:`~shoal.base.standby.Trained`."""
        with self._thread_lock:
            if self.thread is thread and self.is_alive():
                self._begin_round_if_awaited()

    def _begin_round_if_awaited(self) -> None:
        """The model stays as it is, because its thread may be using it."""

    def _is_awaited(self) -> bool:
        """Whether others wait for work that :meth:`step` does even without a batch."""
        return False

    def step_if_awaited(self) -> None:
        """See :class:`~shoal.base.standby.Trained`."""
        if self.is_alive() and self._is_awaited():
            step: Any = self.step
            with self._gradients_kept():
                step(batch_size=0)

    def _gradients_kept(self) -> contextlib.AbstractContextManager[None]:
        """Context that keeps ``.grad`` of the parameters: a program may accumulate gradients there before it calls
        :meth:`step`."""
        return without_gradients([parameter for group in self.param_groups for parameter in group["params"]])

    # --- a step -------------------------------------------------------------------------------------------------------

    def _begin_step(self, closure: object, batch_size: int | None, grad_scaler: Any) -> int | None:
        """Check the arguments of a step and the settings of others.

        Returns:
            The samples of the batch; ``None`` if this peer has no data, and its part is done.

        Raises:
            TypeError, ValueError: wrong arguments.
            SettingsMismatch: this peer's settings are not those of its run.
            ReactorError: this optimizer or its DHT is shut down.
        """
        self._check_open()
        self.tracker.look_at_company()
        samples = self.options.check_step(closure, batch_size, grad_scaler)
        if self._auxiliary is None:
            return samples
        self._help_others(self._auxiliary)
        return None

    def _help_others(self, auxiliary: Auxiliary) -> None:
        """Without data: take part in the others' rounds, and follow their epoch."""
        auxiliary.look_for_groups()
        epoch = self.tracker.global_epoch
        if epoch > self.local_epoch:
            self._follow(epoch)
            with self.tracker.pause_updates():
                self.tracker.update_epoch(epoch)
            logger.debug("the swarm is at epoch %d", epoch)

    def _follow(self, epoch: int) -> None:
        """Go to the epoch of the others."""
        raise NotImplementedError

    # --- for programs that know by themselves when an epoch is over ---------------------------------------------------

    def end_epoch(self) -> bool:
        """End the epoch (of DiLoCo: the slot) with all peers now, however many samples there are.

        Returns:
            Whether this peer is at another epoch. It is not if the round failed and others can still be met, or if a
            download failed: call it again.
        """
        self.tracker.await_introduction()
        epoch = self.local_epoch
        if not self.catch_up():
            self._end_epoch_now()
        return self.local_epoch != epoch

    def _end_epoch_now(self) -> None:
        raise NotImplementedError

    def catch_up(self) -> bool:
        """Download what this peer lacks, if it is behind the others. Returns whether it was behind.

        After failed attempts this waits for a moment instead.

        Raises:
            SettingsMismatch: this peer's settings are not those of its run.
        """
        self._check_open()
        self.tracker.look_at_company()
        return self._catch_up()

    def _catch_up(self) -> bool:
        """Download the state of the swarm if it is ahead of this peer; returns whether it is."""
        raise NotImplementedError

    # --- reports to monitors ------------------------------------------------------------------------------------------

    def report(self, **metrics: Any) -> None:
        """Report figures of this peer, such as ``loss=loss``, to ``shoal monitor``.

        Call it after each step. Every five seconds at most, it publishes the means since the last time, together with
        what this peer has counted: samples, bytes, rounds, the time from step to step, failures. Until the first call,
        monitors see only the progress of this peer.

        Args:
            metrics: a number each, or a tensor with one number; at most 24 of them, with names of 48 characters at
                most. Reading a tensor waits for its device; see :attr:`report_is_due`.

        Raises:
            TypeError: a figure is not one number.
            ValueError: there are too many figures, or a name is too long.
        """
        self._check_open()
        self._reporting.report(metrics, self._latest_round)

    @property
    def _latest_round(self) -> HasPeers | None:
        """The last round of this peer; ``None`` if there was none."""
        raise NotImplementedError

    @property
    def report_is_due(self) -> bool:
        """Whether :meth:`report` would publish now. Check it before you compute costly figures."""
        return self._reporting.is_due

    # --- the end ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raise an error if this optimizer or its DHT is closed: it would train alone, and nobody would notice."""
        if self._closing.is_set():
            raise ReactorError(f"this {self.kind} is shut down and trains with nobody any more: make a new one")
        if not self.dht.is_alive():
            self.dht.check()
            raise ReactorError(f"the DHT of this {self.kind} has failed: make a new DHT and a new {self.kind}")

    def _takes_part(self) -> bool:
        """Whether it works in the background."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Leave the run. Called once."""
        raise NotImplementedError

    def is_alive(self) -> bool:
        """Whether this peer takes part."""
        return getattr(self, "_groups_under_construction", 0) is None and self._takes_part()

    def shutdown(self) -> None:
        """Leave the run, without making others wait. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._leave()

    def __del__(self) -> None:
        if self.is_alive():
            self.shutdown()


# --- searches for groups ----------------------------------------------------------------------------------------------


def usable(control: StepControl | None) -> bool:
    """Whether a scheduled step can still be used."""
    return control is not None and not control.done() and not control.triggered


def log_failure(message: str, epoch: int, error: Exception, *, may_be_late: bool = False) -> None:
    """Warn that a round failed, with the reason in words. An unexpected error is logged with its traceback.

    Args:
        message: format of the message, with a place for the epoch and one for the reason.
        epoch: the epoch that the round ends.
        error: what the round raised.
        may_be_late: if the others have finished the round without this peer, log no warning: this peer catches up.
    """
    reason, unexpected, level = words_of(error), False, logging.WARNING
    if isinstance(error, concurrent.futures.CancelledError):
        reason, level = "the others have left or continued", logging.INFO if may_be_late else level
    elif isinstance(error, TimeoutError):
        reason = "it took too long"
    elif not isinstance(error, ShoalError):
        unexpected = True
    logger.log(level, message, epoch, reason, exc_info=error if unexpected else None)


def let_go(controls: Iterable[StepControl | None], timeout: float) -> None:
    """Withdraw from scheduled steps without making their groups wait.

    A group that is complete would wait for this peer, so this peer takes part in it with weight 0.

    Args:
        controls: the steps; ``None`` is ignored.
        timeout: the longest time to take part in all of them together, in seconds.
    """
    begun = []
    for control in controls:
        if control is None or control.done():
            continue
        if control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()
            continue
        if not control.triggered:
            control.weight = 0.0
            control.allow_allreduce()
        begun.append(control)
    try:
        concurrent.futures.wait(begun, timeout)
    finally:
        for control in begun:
            control.cancel()


def watch_search(
    control: StepControl,
    tracker: ProgressTracker,
    last_epochs: Mapping[PeerID, int] | None = None,
    electorate: Mapping[PeerID, int] | None = None,
) -> None:
    """Until a step is done, tell it how many members to wait for, and cancel it when no other peer will come.

    Args:
        control: the step.
        tracker: knows which peers are alive, and their epochs.
        last_epochs: the only peers that can come. A peer beyond the epoch given for it has finished the round without
            this peer. Default: the peers that the tracker expects.
        electorate: of these and this peer, more than half must come. Its numbers mean the same as in ``last_epochs``.
            Default: none.
    """
    voters = electorate or {}
    majority = (1 + len(voters)) // 2 + 1

    def look() -> None:
        if control.done() or control.began_allreduce:
            return
        expected = tracker.expected_members() if last_epochs is None else tracker.still_expected(last_epochs)
        if expected and 1 + len(tracker.still_expected(voters)) >= majority:
            # If two halves of a run expected only their own members, both groups would be complete, and never meet.
            control.expect(expected, least=majority)
        elif control.stage <= AveragingStage.LOOKING_FOR_GROUP:
            control.cancel()

    def look_again() -> None:
        tracker.look_after_others()  # otherwise this search might wait for a dead peer until the next regular look
        look()  # a peer that has left in the meantime will not come

    tracker.watch(look)
    control.on_loss = look_again
    control.add_done_callback(lambda _: tracker.unwatch(look))
    look()


class Auxiliary:
    """Takes part in all rounds of the others without data, and never keeps them waiting. Used only by the training
    thread.

    It has no batches to wait for, so it always looks for a group for each kind of round, and is ready as soon as it has
    found one. It announces a late start, so that others lead.

    Args:
        searches: for each kind of round, begins to look for a group. Takes ``scheduled_time`` and ``timeout``, and
            returns a control that waits for a trigger.
        averaging_timeout: how long one search for a group lasts, in seconds.
    """

    def __init__(self, searches: Sequence[Callable[..., StepControl]], averaging_timeout: float) -> None:
        self._searches, self._averaging_timeout = searches, averaging_timeout
        self._controls: list[StepControl | None] = [None] * len(searches)

    def look_for_groups(self) -> None:
        """Start the searches that are not under way. Returns at once."""
        for index, search in enumerate(self._searches):
            control = self._controls[index]
            if control is None or control.done():
                self._controls[index] = self._look_for_group(search)

    def _look_for_group(self, search: Callable[..., StepControl]) -> StepControl:
        # The peer with the earliest announced start leads, so this one announces a start that is late, but in time.
        late = get_dht_time() + 0.9 * self._averaging_timeout
        control = search(scheduled_time=late, timeout=self._averaging_timeout)
        control.weight = 0.0
        control.allow_allreduce()
        return control

    def let_go_of_rounds(self) -> None:
        """Look for no more groups, and finish the rounds that have begun."""
        controls, self._controls = self._controls, [None] * len(self._controls)
        let_go(controls, self._averaging_timeout)
