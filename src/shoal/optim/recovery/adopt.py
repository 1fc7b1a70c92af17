"""Holds the training state: gives it to newcomers and checkpoints, and replaces it by a downloaded one.

A state is always that of one moment, because the optimizer steps, and its tensors are averaged, only inside
:meth:`StateHolder._state_access`.

:func:`first_accepted`, which both optimizers use, asks one donor after another. A downloaded state is tried before it
is trusted. If it fits, it is put in place. Then the user's hook can check it, for example by the loss of one batch, and
refuse it. In that case this peer's own state is restored, the donor is left out, and the next donor is asked. The own
state is kept until this peer has trained an epoch with the new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.averaging import DecentralizedAverager
from shoal.averaging.state.download import GivenState, Layout, OwnedState, State, layout_of
from shoal.base.logs import Seldom, one_line
from shoal.base.reactor import in_thread
from shoal.errors import StateRefusedError
from shoal.optim.history.journal import LineageKeeper
from shoal.optim.setup.devices import LaunchedWork
from shoal.optim.setup.optimizer_state import statistics_of
from shoal.optim.setup.schedules import catch_up, check_received_schedule, dump_scheduler_state, load_scheduler_state
from shoal.optim.setup.training_setup import names_in
from shoal.optim.setup.training_state import (
    OlderStateError,
    SharedBuffers,
    StateTensors,
    TrainingState,
    apply_state,
    check_epoch,
    describe_state,
    load_checkpoint,
    make_checkpoint,
)
from shoal.p2p import PeerID

if TYPE_CHECKING:
    import torch

    from shoal.dht import DHT

logger = logging.getLogger(__name__)

CheckState = Callable[[], object]
"""The user's hook, called when a downloaded state is in place. It refuses the state by returning a false value other
than ``None``, or by raising :class:`~shoal.errors.StateRefusedError`."""

Download = Callable[["float | None", frozenset[PeerID]], "State | None"]

# After this many states older than its own, a peer stops instead of asking the next donor at once. Chosen: donors may
# be between two epochs.
MOST_OLDER = 2


class _CheckFailed(Exception):
    """Wraps a ``ValueError`` of the user's hook, which would otherwise be taken for the error of a bad state."""

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


def check(check_state: CheckState | None) -> None:
    """Call the user's hook, if there is one.

    Raises:
        StateRefusedError: the hook refuses the state.
    """
    try:
        verdict = None if check_state is None else check_state()
    except StateRefusedError:
        raise
    except ValueError as e:
        raise _CheckFailed(e) from e
    if verdict is not None and not verdict:
        raise StateRefusedError(f"check_state returned {verdict!r}")


@contextmanager
def refusing_nonsense() -> Iterator[None]:
    """Context for parsing what another peer has sent: errors that only malformed data can cause become ``ValueError``.

    Raises:
        ValueError: it is malformed.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(f"it is malformed: {type(e).__name__}: {one_line(str(e))}") from e


def first_accepted(
    download: Download,
    take_over: Callable[[State], object],
    leave_out: Callable[[PeerID, bytes | None], None],
    timeout: float | None,
    warn: Seldom,
    is_first: Callable[[], bool],
) -> bool:
    """Download states, one after another, until one can be taken over.

    Args:
        download: downloads a state within some seconds, without asking certain peers.
        take_over: puts a state in place; raises ``ValueError`` if it is refused.
        leave_out: called with the donor of a refused state, and the state's version if the user's hook refused it.
        timeout: the longest time for all downloads, in seconds.
        warn: warns of donors whose state is refused.
        is_first: whether nobody else is in the run, so that nobody can share a state.

    Returns:
        Whether a state was taken over.
    """
    older = 0
    ends_at = None if timeout is None else time.monotonic() + timeout
    asked: frozenset[PeerID] = frozenset()
    while True:
        left = None if ends_at is None else ends_at - time.monotonic()
        if asked and left is not None and left <= 0:
            return False
        state = download(left, asked)
        if state is None:
            if not asked and is_first():
                logger.info("this peer is the first of its run: it begins with its own state")
            elif not asked:
                logger.warning("nobody shares a training state: this peer keeps its own")
            return False
        try:
            take_over(state)
        except _CheckFailed as e:
            raise e.error from None
        except ValueError as e:
            donor, version = origin_of(state)
            if donor is None:
                warn("a downloaded state is refused: %s", e)
            else:
                warn("the state of peer %s is refused: %s", donor, e, about=donor)
            if isinstance(e, OlderStateError):
                older += 1  # no reason to leave the donor out: it may be between two epochs
            elif donor is not None:
                leave_out(donor, version if isinstance(e, StateRefusedError) else None)
            if donor is None or older >= MOST_OLDER:
                return False
            asked |= {donor}
            del state  # there may not be room for two states in memory
            continue
        return True


def origin_of(state: State) -> tuple[PeerID | None, bytes | None]:
    """The donor of a state, and its version."""
    return (state.donor, state.version) if isinstance(state, GivenState) else (None, None)


@dataclass
class OwnState:
    """The state that a peer had before it took over another one."""

    state: TrainingState
    local_epoch: int
    donor: PeerID | None
    """The peer that gave the other state."""
    version: bytes | None
    """The version of the other state."""
    used_from: int
    """The epoch of the other state."""


class StateHolder(DecentralizedAverager):
    """An averager of a training state that newcomers can download, and that a downloaded state can replace.


    Args:
        contents: parameters, optimizer, and which of their tensors are averaged.
        dht: how averagers find each other.
        shared_buffers: source of tensors that are given to newcomers but not averaged.
        check_state: see :class:`~shoal.optim.state_averager.TrainingStateAverager`.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.
    """

    instead_of_a_copy = "save its make_checkpoint(), which load_checkpoint() takes"

    def __init__(
        self,
        contents: StateTensors,
        dht: DHT,
        shared_buffers: SharedBuffers | None,
        check_state: CheckState | None,
        **averager_kwargs: Any,
    ) -> None:
        self._contents, self._setup = contents, contents.setup
        setup = contents.setup
        self.optimizer, self.scheduler = setup.optimizer, setup.scheduler
        self.main_parameters, self.parameter_names = setup.main_parameters, setup.parameter_names
        self.optimizer_parameters = setup.optimizer_parameters
        """The parameters that the optimizer steps: the main (the user's) parameters, or copies of them."""
        self.reuse_tensors, self.extra_tensors = contents.reuse_tensors, contents.extra_tensors
        self.shared_buffers = shared_buffers
        """The source of tensors that are given to newcomers but not averaged."""
        self.names: dict[str, Sequence[str]] = {"parameters": setup.given_names, "extra": ()}
        """Names of the parameters, and of the last extra tensors, if they have any; for archives."""
        self.lineage_keeper: LineageKeeper | None = None
        self.is_first: Callable[[], bool] = bool
        """Whether nobody else is in the run."""
        self._check_state = check_state
        self._warn_seldom = Seldom(logger.warning)
        # Kept until this peer has made a whole epoch from the state that has replaced it.
        self._own_state: OwnState | None = None
        # Held while the optimizer steps, so that newcomers never get half a step. Acquire it after the tensor lock.
        self._state_lock = threading.RLock()
        self._launched = LaunchedWork([*self.main_parameters, *self.optimizer_parameters])
        self._local_epoch = 0
        self._stepped_epoch = 0
        averager_kwargs.setdefault("tensor_infos", contents.infos())
        super().__init__(contents.averaged, dht, **averager_kwargs)
        contents.averaged = self._tensors

    @property
    def local_epoch(self) -> int:
        """How many global steps this state contains, counting a step under way in the background."""
        return self._local_epoch

    @local_epoch.setter
    def local_epoch(self, epoch: int) -> None:
        with self._state_lock:
            self._local_epoch = self._stepped_epoch = epoch
            if self.scheduler is not None:
                catch_up(self.scheduler, epoch)

    def learning_rates(self) -> tuple[int, list[float]] | None:
        """The epoch of the latest optimizer step, and the learning rate of each group since then.

        ``None`` during a step, because this does not wait, and for rates that are tensors, because reading them may
        have to wait for a device.
        """
        if not self._state_lock.acquire(blocking=False):
            return None
        try:
            rates = [group.get("lr") for group in self.optimizer.param_groups]
            numbers = [float(rate) for rate in rates if isinstance(rate, (int, float))]
            return (self._stepped_epoch, numbers) if len(numbers) == len(rates) else None
        finally:
            self._state_lock.release()

    @contextmanager
    def _state_access(self) -> Iterator[None]:
        """Exclusive access to parameters and optimizer, after all device work that others have launched on them."""
        with self._state_lock:
            self._launched.wait()
            try:
                yield
            finally:
                self._launched.mark()

    def _optimizer_access(self) -> AbstractContextManager[Any]:
        """The tensor lock, if the optimizer's own tensors are averaged: they must not change during a round."""
        return self._lock.hold() if self.reuse_tensors else nullcontext()

    @contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """The averaged tensors, protected: no averaging happens inside this block. Keep it short.

        Inside this block, copies have current values even between two rounds.
        """
        with super().get_tensors() as tensors:
            if self._contents.has_copies:
                yield tensors
                return
            with self._state_access():
                self._contents.load_into_averaged()
            try:
                yield tensors
            finally:
                self._contents.drop_copies()

    def name_parameters(self, model: torch.nn.Module, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Note the names of the parameters in the model, unless they came with names.

        Args:
            parameters: those of the model; default: the main parameters.
        """
        if not self.names["parameters"]:
            self.names["parameters"] = names_in(model, self.main_parameters if parameters is None else parameters)

    # --- for newcomers ------------------------------------------------------------------------------------------------

    def get_current_state(self) -> OwnedState:
        """The state that newcomers download: parameters, extra tensors, optimizer, scheduler and epoch, all of one
        moment."""
        with self._optimizer_access(), self._state_access():
            lineage = None if self.lineage_keeper is None else self.lineage_keeper.lineage
            options = self.node.group_bits, lineage, self.names
            return describe_state(self._setup, self.extra_tensors, self._buffers(), self._stepped_epoch, *options)

    def newcomers(self) -> set[PeerID]:
        """Peers that are downloading this peer's state, or have just finished."""
        return self.node.state_sharing.slots.on_their_way(self._portal.reactor.loop.time())

    def _buffers(self) -> list[torch.Tensor]:
        return [] if self.shared_buffers is None else self.shared_buffers.get_buffers()

    def load_state_from_peers(
        self,
        wait: bool = True,
        timeout: float | None = None,
        *,
        accept_older: bool = False,
        skip: Collection[PeerID] = (),
    ) -> Any:
        """Download the state of another peer and put it into the model, the optimizer and the scheduler.

        Args:
            wait: return the outcome; otherwise a future of it, which cannot be cancelled once the download has begun.
            timeout: the longest time for the download, in seconds.
            accept_older: accept a state of an earlier epoch than this peer's, too.
            skip: donors that are not asked.

        Returns:
            Whether a state was taken over. It is not if no donor has a state that fits and is not older than this one.
        """
        if not wait:
            return in_thread(partial(self.load_state_from_peers, timeout=timeout, accept_older=accept_older, skip=skip))
        download = super().load_state_from_peers
        return first_accepted(
            lambda left, asked: download(timeout=left, skip={*skip, *asked}),
            lambda state: self.take_over(state, accept_older, self.lineage_keeper),
            self.leave_out,
            timeout,
            self._warn_seldom,
            self.is_first,
        )

    def _expected_layout(self) -> Layout | None:
        if not self._gives_the_state_of(StateHolder):
            return None
        with self._state_lock:
            own = [*self.optimizer_parameters, *self.extra_tensors, *self._buffers(), *statistics_of(self.optimizer)]
            return layout_of(own)

    def restore_own_state(self) -> bool:
        """Restore the state that this peer had before it took over another one, and leave out the donor of that one.

        This is possible until the second step after that, between two steps. A peer that had not trained before has
        nothing to go back to.

        Returns:
            Whether there was a state to go back to.
        """
        own, self._own_state = self._own_state, None
        if own is None:
            return False
        with self._lock.hold(), self._state_access():
            self._put_back(own)
            if self.lineage_keeper is not None:
                self.lineage_keeper.adopt_lineage(own.state.lineage, own.local_epoch)
        if own.donor is not None:
            self.leave_out(own.donor, own.version)
        return True

    def _forget_own_state(self) -> None:
        """Forget the own state once this peer has made a whole epoch from the state that has replaced it."""
        if self._own_state is not None and self._local_epoch > self._own_state.used_from + 1:
            self._own_state = None

    def make_checkpoint(self, gradients: Any = None) -> dict[str, Any]:
        """A checkpoint for :meth:`load_checkpoint`: all that is needed to resume except the model. Tensors are not
        copied.

        Args:
            gradients: state of the gradient averager, see :func:`~shoal.optim.setup.training_state.make_checkpoint`.
        """
        return make_checkpoint(self._setup, self._local_epoch, gradients)

    def load_checkpoint(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the optimizer, the scheduler and the epoch; with an offloaded optimizer also the parameters.

        Args:
            state_dict: from :meth:`make_checkpoint`, or of a torch optimizer.

        Raises:
            ValueError: it does not fit.
        """
        with self._lock.hold(), self._state_access():
            self._own_state = None
            epoch = load_checkpoint(self._setup, state_dict)
            self._contents.adopt_statistics()
            if epoch is not None:
                self.local_epoch = epoch

    def take_over(self, downloaded: State, accept_older: bool = True, run: LineageKeeper | None = None) -> None:
        """Put a state of another peer, or from an archive, in place if it is accepted.

        Args:
            accept_older: accept a state of an earlier epoch than this peer's, too.
            run: knows which epoch the run can have reached; ``None``: any epoch is accepted.

        Raises:
            ValueError: it is refused, and this peer's own state is restored. (A peer that has not trained yet and has
                no hook keeps no copy of its state. If a state fits but cannot be put in place, its tensors may stay,
                but its epoch and its schedule do not.)
        """
        metadata, tensors = downloaded
        with refusing_nonsense():
            state = TrainingState.parse(metadata, tensors, self._setup, self.extra_tensors, self._buffers())
        with self._lock.hold(), self._state_access():
            check_epoch(state.epoch, self._local_epoch, accept_older, run)
            with refusing_nonsense():
                groups = state.optimizer_metadata["groups"]
                check_received_schedule(self.scheduler, state.scheduler, groups, state.epoch)
            # The state of a newcomer is worthless: it is copied only if the hook may refuse the downloaded one.
            has_trained = self._local_epoch > 0
            own = self._copy_own_state(downloaded, state.epoch) if has_trained or self._check_state else None
            epochs, schedule = (self._local_epoch, self._stepped_epoch), dump_scheduler_state(self.scheduler)
            try:
                with refusing_nonsense():
                    self._put_in_place(state)
                check(self._check_state)
            except BaseException:
                if own is not None:
                    self._put_back(own)
                else:
                    self._local_epoch, self._stepped_epoch = epochs
                    load_scheduler_state(self.scheduler, schedule)
                raise
            self._own_state = own if has_trained else None
            if self.lineage_keeper is not None:
                self.lineage_keeper.adopt_lineage(state.lineage, state.epoch)

    def _copy_own_state(self, instead: State, used_from: int) -> OwnState:
        buffers = self._buffers()
        lineage = None if self.lineage_keeper is None else self.lineage_keeper.lineage
        copied = describe_state(self._setup, self.extra_tensors, buffers, self._stepped_epoch, "", lineage)
        state = TrainingState.split(copied.metadata, copied.tensors, self._setup, len(self.extra_tensors), len(buffers))
        return OwnState(state, self._local_epoch, *origin_of(instead), used_from)

    def _put_in_place(self, state: TrainingState) -> None:
        if self.shared_buffers is not None:
            self.shared_buffers.set_buffers(state.buffers)
        apply_state(state, self._setup, self.extra_tensors)
        if self._contents.has_copies:
            self._contents.load_into_averaged()
        self._contents.update_main_parameters()
        self.local_epoch = state.epoch

    def _put_back(self, own: OwnState) -> None:
        self._put_in_place(own.state)
        # It is ahead of the state's epoch if a step was under way in the background.
        self._local_epoch = own.local_epoch
