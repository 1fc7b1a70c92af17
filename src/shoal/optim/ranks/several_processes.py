"""What all peers that consist of several processes have in common: the first process decides, the others follow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import ProcessGroupError, ReactorError
from shoal.optim.consistency import OtherTensors
from shoal.optim.grad_scaler import GradScaler, SwarmOptimizer
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.joint_optimizer import uncompiled
from shoal.optim.progress.records import count_of_samples
from shoal.optim.ranks.processes import Command, Processes, ProcessMessage
from shoal.optim.ranks.shards import Shards, check_sharded
from shoal.optim.setup.devices import is_dtensor
from shoal.optim.setup.schedules import catch_up
from shoal.optim.setup.training_setup import (
    Parameters,
    ParamGroups,
    SchedulerFactory,
    listed,
    main_groups,
    with_parameters,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shoal.dht import DHT


logger = logging.getLogger(__name__)


class SeveralProcesses(SwarmOptimizer):
    """Base of the optimizers that make one peer of several processes, each with its own batches.

    The first process has an optimizer of the swarm, which decides everything; the others follow it.
    """

    instead_of_a_copy = "save its state_dict(), in the first process"

    def __init__(
        self,
        *,
        dht: DHT | None,
        optimizer: Any,
        params: Parameters | ParamGroups | None = None,
        scheduler: Any | SchedulerFactory | None = None,
        batch_size_per_step: int | None = None,
        reuse_grad_buffers: bool = False,
        extra_tensors: Sequence[torch.Tensor] = (),
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if options.get("auxiliary"):
            raise ValueError("an auxiliary peer has no batches: one process is enough for it")
        params = listed(params)
        main = self._parameters = self._main_parameters(optimizer, params)
        self._processes = Processes(process_group, main[0].device)
        model = options.get("model")
        remainder = OtherTensors() if model is None else OtherTensors.find(model, main, extra_tensors)
        is_sharded = any(map(is_dtensor, main))
        self._processes.check_same_sizes(main)
        self._shards: Shards | None = None
        """The parameters, if the processes share some of them."""
        if is_sharded:
            changing = [tensor for _, tensor in [*remainder.trained, *remainder.buffers]]
            check_sharded(optimizer, [*extra_tensors, *changing], reuse_grad_buffers, options)
            self._shards = Shards(self._processes, main)
            self._shards.gather_values()
        self.batch_size_per_step, self.reuse_grad_buffers = batch_size_per_step, reuse_grad_buffers
        # Tensors that the first process sends to the others when they have changed.
        self._followed = [*extra_tensors, *(tensor for _, tensor in remainder.trained)]
        if self._shards is None:
            self._followed += main
        # Identifies the version of these tensors that the others have.
        self._known: object = None
        self._has_told_of_sizes = False
        self.news = ProcessMessage(Command.CARRY_ON)
        """The last message of the first process; the same in all processes."""
        self._is_shut_down = False
        self.swarm: Any = None
        """The optimizer of the first process; ``None`` in the others."""
        if self._processes.is_first:
            with self._deciding():
                if dht is None:
                    raise ValueError("the first process of a peer needs a DHT")
                self._join(
                    dht=dht,
                    optimizer=optimizer,
                    params=params if self._shards is None else with_parameters(params or [], self._shards.whole),
                    scheduler=scheduler,
                    reuse_grad_buffers=reuse_grad_buffers,
                    extra_tensors=extra_tensors,
                    **options,
                )
        else:
            self._prepare_to_follow(optimizer, params, scheduler)
            if self._shards is None:
                self._accumulator = GradientAccumulator([p for p in main if p.requires_grad], reuse_grad_buffers)
            else:
                self._accumulator = self._shards.accumulator
            self._follow()
        self._become_torch_optimizer(has_others=self._shards is not None)

    def _become_torch_optimizer(self, *, has_others: bool) -> None:
        """Called at the end of a constructor.

        Args:
            has_others: :attr:`opt` has other tensors than the user's parameters, which are sharded.
        """
        self._main_groups = main_groups(self.opt, self._parameters) if has_others else None
        self._groups_under_construction: list[dict[str, Any]] | None = []
        super().__init__([{**group} for group in self._own_groups()], dict(self.opt.defaults))
        self._groups_under_construction = None

    @staticmethod
    def _main_parameters(optimizer: Any, params: Any) -> Sequence[torch.Tensor]:
        """The user's parameters."""
        raise NotImplementedError

    def _prepare_to_follow(self, optimizer: Any, params: Any, scheduler: Any) -> None:
        """Called in all processes but the first one."""
        raise NotImplementedError

    def _join(self, **options: Any) -> None:
        """Called in the first process: make the optimizer of the swarm, and the accumulator."""
        raise NotImplementedError

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Let archives of the run know the parameters by their names in this model."""
        if self.swarm is not None:
            self.swarm.name_parameters(model)

    # --- training -----------------------------------------------------------------------------------------------------

    @uncompiled
    def step(
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: Any = None
    ) -> Any:
        """Accumulate the current gradients of this process, then follow the decisions of the first process.

        Args:
            closure: computes the loss and its gradients, if they have not been computed before.
            batch_size: samples of this process; see :meth:`shoal.Optimizer.step`.
            grad_scaler: the scaler of the loss; a batch whose gradients overflow is dropped in this process only.

        Returns:
            What the closure returned.

        Raises:
            ValueError: an argument is invalid.
            ProcessGroupError: another process has ended.
        """
        if self._is_shut_down:
            raise ReactorError("this optimizer is shut down and trains with nobody any more: make a new one")
        error, loss, scaler, samples = None, None, None, 0
        try:
            batch_size, scaler = self._check_step(batch_size, grad_scaler)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            samples = batch_size if self._shards is not None else self._accumulate(batch_size, scaler)
        except Exception as e:
            # The others wait for this process, so tell them first; the error is raised below.
            error = e
        if self._shards is not None:
            samples, error = self._accumulate_together(self._shards, samples, scaler, error)
        total = sum(self._processes.share(samples, error))
        if self.swarm is None:
            self._follow(scaler)
            return loss
        with self._deciding():
            # The swarm's optimizer has not counted yet what this process has accumulated in parts.
            self._accumulator.samples += total - (samples if self._shards is None else 0)
            self._accumulator.batches += self._shards is not None and total > 0
            self._step_swarm(total, scaler)
        return loss

    def _step_swarm(self, total: int, scaler: GradScaler | None) -> None:
        """Called in the first process: step with a batch of this many samples, those of all processes together."""
        raise NotImplementedError

    def _check_step(self, batch_size: int | None, grad_scaler: Any) -> tuple[int, GradScaler | None]:
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None or (isinstance(batch_size, int) and batch_size < 0):
            raise ValueError(f"batch_size must be the number of samples, got {batch_size}")
        if batch_size != 0:
            batch_size = count_of_samples("batch_size", batch_size)
        if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
            raise ValueError(f"grad_scaler must be a shoal.GradScaler, got {type(grad_scaler).__name__}")
        scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        if scaler is not None and self.reuse_grad_buffers:
            raise ValueError("with several processes, scaled gradients cannot accumulate in place")
        return batch_size, scaler

    def _accumulate(self, batch_size: int, scaler: GradScaler | None) -> int:
        """Accumulate the gradients; returns the number of samples used."""
        if batch_size == 0 or (scaler is not None and not scaler.are_grads_finite(self)):
            return 0
        self._accumulator.add(batch_size, 1.0 if scaler is None else scaler.get_scale())
        return batch_size

    def _accumulate_together(
        self, shards: Shards, samples: int, scaler: GradScaler | None, error: Exception | None
    ) -> tuple[int, Exception | None]:
        """Accumulate the gradients of sharded parameters in all processes, or in none.

        Args:
            samples: of this process.
            error: the error of this process, if it has failed.

        Returns:
            The samples of this process that are used, and its error if it has failed now.
        """
        is_finite = True
        try:
            is_finite = error is not None or scaler is None or scaler.are_grads_finite(self)
        except Exception as e:
            error = e
        told = self._processes.share((samples, is_finite), error)
        counts = [count for count, _ in told]
        if not any(counts):
            return 0, None
        if not all(finite for _, finite in told):
            if scaler is not None:
                scaler.note_overflow(self)
            return 0, None
        self._warn_of_sizes(counts)
        try:
            shards.accumulate(sum(counts), 1.0 if scaler is None else scaler.get_scale())
        except Exception as e:
            return 0, e
        return samples, None

    def _warn_of_sizes(self, counts: Sequence[int]) -> None:
        """Warn once, in the first process, if batches whose gradients weigh the same differ in size."""
        if len(set(counts) - {0}) > 1 and not self._has_told_of_sizes and self._processes.is_first:
            self._has_told_of_sizes = True
            logger.warning(
                "batches of this peer's processes differ in size (%s), and each counts the same for sharded "
                "parameters. Give all processes batches of one size",
                counts,
            )

    def _fetch_gradients(self) -> None:
        """Called in the first process: sum the gradients of all processes here."""
        self._processes.tell(ProcessMessage(Command.GIVE_GRADIENTS, unit=self._accumulator.unit))
        if self._shards is None:
            marks = self._accumulator.marks()
            self._processes.sum_at_first([*self._accumulator.buffers, marks])
        else:
            marks = self._shards.accumulator.marks()
            self._processes.sum_at_first([marks])
            self._shards.gather_gradients(self._accumulator.buffers)
        self._accumulator.take_marks(marks)

    def _use_mean_gradients(self) -> None:
        """Prepare the next step, which the first process makes alone, to use the gradients of all processes."""
        parameters = self._accumulator.parameters
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        without = [parameters[index] for index in (self._accumulator.marks() <= 0).nonzero().flatten().tolist()]
        self._accumulator.write_mean([p.grad for p in parameters if p.grad is not None])
        for parameter in without:
            parameter.grad = None
        self._accumulator.reset()

    # --- decisions ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Context in which the first process acts while all others wait. At its end they get the result."""
        try:
            yield
        except ProcessGroupError:
            raise
        except BaseException as e:
            with contextlib.suppress(ProcessGroupError):  # ``e`` says more
                self._processes.give_up(e)
            raise
        tracker = self.swarm.tracker
        self.news = ProcessMessage(
            Command.CARRY_ON,
            *self._what_changed(),
            epoch=self.swarm.local_epoch,
            position=self.position,
            global_epoch=max(tracker.global_epoch, self.swarm.local_epoch),
            num_peers=max(1, tracker.global_progress.num_peers),
            samples_per_second=self._speed,
        )
        self._processes.tell(self.news)
        self._use_news()

    def _together(self, act: Callable[[Any], Any]) -> Any:
        """Called in all processes: the first one does something with its optimizer, and the others follow it."""
        if self.swarm is None:
            self._follow()
            return None
        with self._deciding():
            return act(self.swarm)

    def _what_changed(self) -> tuple[bool, bool]:
        """In the first process: whether the others must forget their gradients, and whether they get parameters."""
        followed = [*self._followed, *([] if self._shards is None else self._shards.whole)]
        before, self._known = self._known, (self.swarm.local_epoch, [tensor._version for tensor in followed])
        return self._accumulator.samples == 0, before != self._known

    def _use_news(self) -> None:
        """Called in all processes, when the first one has decided."""
        if self.news.forgets_gradients:
            if self._shards is not None:
                self._shards.accumulator.reset()
            elif self.swarm is None:
                self._accumulator.reset()
        if self.news.sends_parameters:
            self._spread_parameters()

    def _spread_parameters(self) -> None:
        """Called in all processes: the first one sends what has changed."""
        self._processes.copy_from_first(self._followed)
        if self._shards is not None:
            self._shards.spread_values()

    @property
    def _speed(self) -> float:
        """Samples per second of this peer. Only in the first process."""
        return float(self.swarm.tracker.local_progress.samples_per_second)

    def _follow(self, scaler: GradScaler | None = None) -> None:
        """Follow the first process' commands until the next batch may come."""
        while (word := self._processes.hear()).command is not Command.CARRY_ON:
            self._obey(word, scaler)
        self.news = word
        self._use_news()
        for scheduler in self._followed_schedules():
            catch_up(scheduler, word.position)

    def _obey(self, word: ProcessMessage, scaler: GradScaler | None) -> None:
        """Called in all processes but the first one: send the gradients to the first one."""
        if self._shards is None:
            self._accumulator.change_unit(word.unit)
            self._processes.sum_at_first([*self._accumulator.buffers, self._accumulator.marks()])
            self._accumulator.reset()
        else:
            self._processes.sum_at_first([self._shards.accumulator.marks()])
            self._shards.gather_gradients()
        if scaler is not None:
            scaler.note_global_step()

    def _followed_schedules(self) -> Sequence[Any]:
        """Called in all processes but the first one: the schedules that follow those of the first one."""
        raise NotImplementedError

    @property
    def position(self) -> int:
        """The position of learning rate schedules."""
        return self.news.position if self.swarm is None else int(self.swarm.local_epoch)

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download the state of another peer; all processes get it.

        Args:
            kwargs: see :meth:`shoal.Optimizer.load_state_from_peers`.

        Returns:
            Whether there was a donor whose state fits and is not older than this one.
        """
        loaded = self._together(lambda swarm: swarm.load_state_from_peers(**kwargs))
        return self.news.sends_parameters if self.swarm is None else bool(loaded)

    def finish_background_work(self) -> None:
        """Wait for what is under way in the background; afterwards all processes have the results."""
        raise NotImplementedError

    # --- as a torch optimizer -----------------------------------------------------------------------------------------

    @property
    def _inner(self) -> Any:
        """The optimizer with the parameter groups: that of the swarm, or one that never steps."""
        raise NotImplementedError

    @property
    def opt(self) -> torch.optim.Optimizer:
        """In the first process, the optimizer that makes the steps; in the others, one that never does."""
        raise NotImplementedError

    @property
    def local_epoch(self) -> int:
        """Number of global steps that this peer has made."""
        return self.news.epoch

    @property
    def state(self) -> Any:
        """Statistics of :attr:`opt`."""
        return self.opt.state

    @state.setter
    def state(self, _: Any) -> None:
        """Ignored: the base class sets an empty state, but the state is that of ``opt``."""

    @property
    def param_groups(self) -> Any:
        """The parameter groups with the user's parameters."""
        if self._groups_under_construction is not None:
            return self._groups_under_construction
        return self._own_groups()

    @param_groups.setter
    def param_groups(self, _: Any) -> None:
        """Ignored: the base class sets an empty list, but the groups are those of ``opt``."""

    def _own_groups(self) -> Any:
        return self._inner.param_groups if self._main_groups is None else self._main_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the last batch.

        Raises:
            ValueError: with ``reuse_grad_buffers=True``, where gradients accumulate and must not be zeroed.
        """
        if self.reuse_grad_buffers:
            raise ValueError("with reuse_grad_buffers=True gradients accumulate in place: never zero them yourself")
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of the first process' optimizer, see :meth:`shoal.Optimizer.state_dict`; save it only there."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    # --- reports to monitors ------------------------------------------------------------------------------------------

    def report(self, **metrics: Any) -> None:
        """Like :meth:`shoal.Optimizer.report`. Only the figures of the first process count."""
        if self.swarm is not None:
            self.swarm.report(**metrics)

    @property
    def report_is_due(self) -> bool:
        """Like :attr:`shoal.Optimizer.report_is_due`; false in all processes but the first one."""
        return self.swarm is not None and bool(self.swarm.report_is_due)

    # --- the end ------------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Whether this peer takes part in the run, as far as this process knows."""
        return not self._is_shut_down and (self.swarm is None or self.swarm.is_alive())

    def shutdown(self) -> None:
        """Leave the run. Idempotent; processes need not call it at the same time."""
        self._is_shut_down = True
        if self.swarm is None:
            self._accumulator.close()
        else:
            self.swarm.shutdown()
