"""A peer of several processes, with :class:`~shoal.optim.diloco.diloco.DiLoCo`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import ReactorError
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.inner import InnerOptimizers, without_statistics
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.joint_optimizer import uncompiled
from shoal.optim.ranks.processes import Command, Processes, ProcessMessage
from shoal.optim.ranks.several_processes import SeveralProcesses
from shoal.optim.ranks.sharded_diloco import (
    FollowingDiLoCo,
    LeadingDiLoCo,
    ProcessDiLoCo,
    check_elementwise,
    check_options,
    describe_sharding,
)
from shoal.optim.setup.devices import is_dtensor
from shoal.optim.setup.training_setup import listed, main_parameters
from shoal.optim.setup.training_state import OWN

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shoal.dht import DHT


class MultiProcessDiLoCo(SeveralProcesses):
    """Makes one peer of several processes that train the same model, each with its own batches.

    The processes belong to one group of ``torch.distributed`` and call the same methods in the same order. In each step
    the first one gets the gradients of all, weighted by samples, makes the inner step, and sends the parameters to the
    others. Only it has a :class:`~shoal.DiLoCo`, with outer parameters and statistics, and talks to the swarm. To the
    swarm this is one peer with the samples of all processes.

    Gradients need not be averaged among the processes before, so the model needs no ``DistributedDataParallel`` around
    it. With one, call ``backward`` in its ``no_sync()``. Clip gradients with a hook of ``opt``, because only there they
    are those of all processes: ``optimizer.opt.register_step_pre_hook(clip)``.

    A step in which the gradients of one process overflow is made with those of the others.

    The processes may also share the model, with ``fully_shard`` (FSDP2). Then each process makes inner steps with its
    part, has outer parameters of it, and exchanges it with the process of the same rank in other peers. So all peers
    must have the same number of processes, each process needs a DHT of its own, and ``optimizer`` must be a function,
    given with ``params``. No process ever holds the whole model. ``docs/sharded.md`` has an example and the
    requirements.

    Args:
        dht: DHT of the first process; ``None`` in the others. If they share the model, each has one.
        optimizer, params, scheduler, batch_size_per_step, extra_tensors: as for :class:`~shoal.DiLoCo`, the same in all
            processes. ``batch_size_per_step`` counts samples of one process.
        process_group: default: all processes.
        options: further options of :class:`~shoal.DiLoCo`.

    Raises:
        ValueError: there is no process group, models differ, or options contradict each other or do not fit sharded
            parameters.
        ProcessGroupError: another process has ended.
    """

    def __init__(self, *, optimizer: Any, params: Any = None, **options: Any) -> None:
        if options.get("reuse_grad_buffers"):
            raise ValueError("DiLoCo steps with each batch, so nothing accumulates: leave reuse_grad_buffers=True out")
        params = listed(params)
        main = self._main_parameters(optimizer, params)
        if any(map(is_dtensor, main)):
            self._share(main, optimizer, params or [], **options)
        else:
            super().__init__(optimizer=optimizer, params=params, **options)

    _part: ProcessDiLoCo | None = None
    """This process's part of the model, if the processes share it."""
    # Of all processes together.
    _samples_of_step = 0
    # The model holds the outer parameters until the outermost context ends.
    _is_in_context = False

    @staticmethod
    def _main_parameters(optimizer: Any, params: Any) -> Sequence[torch.Tensor]:
        given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        return [parameter for each in given for parameter in main_parameters(each, params, may_be_sharded=True)]

    def _prepare_to_follow(self, optimizer: Any, params: Any, scheduler: Any) -> None:
        self._own = InnerOptimizers(optimizer, params, scheduler)

    def _join(self, **options: Any) -> None:
        del options["reuse_grad_buffers"]
        self.swarm = DiLoCo(**options)
        trained = [p for group in self.swarm.param_groups for p in group["params"] if p.requires_grad]
        self._accumulator = GradientAccumulator(trained)

    def _step_swarm(self, total: int, scaler: GradScaler | None) -> None:
        if total > 0:
            self._samples_of_step = total
            self._fetch_gradients()
            self._use_mean_gradients()
            if scaler is not None:
                scaler.note_global_step()
        self.swarm.step(batch_size=total)

    @property
    def _speed(self) -> float:
        counts_steps = self.swarm.schedule.sync_every is not None
        return super()._speed * (self._samples_of_step if counts_steps else 1)

    # --- the same in all processes ------------------------------------------------------------------------------------

    @property
    def _inner(self) -> Any:
        return self._part or self.swarm or self._own

    @property
    def _inner_optimizers(self) -> InnerOptimizers:
        training = self._part or self.swarm
        return self._own if training is None else training.inner

    @property
    def opt(self) -> torch.optim.Optimizer:
        """In the first process, the optimizer that makes the inner steps; in the others, one that never does. If they
        share the model, each has one that steps its part.

        If there are several optimizers, this is the first one.
        """
        return self._inner_optimizers.optimizers[0]

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedule of each inner optimizer; empty if there are none."""
        return self._inner_optimizers.schedulers

    @property
    def scheduler(self) -> Any | None:
        """The first of them; ``None`` if there is none."""
        return self.schedulers[0] if self.schedulers else None

    def _followed_schedules(self) -> Sequence[Any]:
        return self.schedulers

    @property
    def position(self) -> int:
        """The position of schedules of the inner learning rate."""
        return self.news.position if self.swarm is None else int(self.swarm.position)

    @property
    def state(self) -> Any:
        """Statistics of the inner optimizers; only the first process has any, unless they share the model."""
        return {key: value for each in self._inner_optimizers.optimizers for key, value in each.state.items()}

    @state.setter
    def state(self, _: Any) -> None:
        """Ignored: the base class sets an empty state, but the state is that of the inner optimizers."""

    # --- outer parameters ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use_outer_parameters(self) -> Iterator[None]:
        """Inside this context the model holds the outer parameters, in all processes."""
        if self._is_in_context:
            yield
            return
        self.show_outer_parameters()
        self._is_in_context = True
        try:
            yield
        finally:
            self._is_in_context = False
            self.show_own_parameters()

    def show_outer_parameters(self) -> None:
        """Put the outer parameters into the model, in all processes, until :meth:`show_own_parameters`."""
        self._together(lambda swarm: swarm.show_outer_parameters())

    def show_own_parameters(self) -> None:
        """Put this peer's own parameters back into the model, in all processes."""
        self._together(lambda swarm: swarm.show_own_parameters())

    def finish_background_work(self) -> None:
        """Training has ended: the model gets the outer parameters, in all processes."""
        self.show_outer_parameters()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of the first process, see :meth:`shoal.DiLoCo.state_dict`; save it only there. If the processes share
        the model, all must call this, and each saves the state of its own part."""
        if self._part is None:
            return super().state_dict()
        state: dict[str, Any] = self._together(lambda swarm: swarm.state_dict()) or self._part.state_dict()
        state[OWN]["part"] = self._part.place
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the first process' :meth:`state_dict`; all processes must call this with the same state.

        If they share the model, each must call it with its own state.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        if self._part is not None:
            self._load_part(self._part, state_dict)
            return
        if self.swarm is None:
            schedules = (state_dict.get(OWN) or {}).get("schedulers")
            self._own.load_state_dict(without_statistics(state_dict), schedules)
        self._together(lambda swarm: swarm.load_state_dict(state_dict))

    def _load_part(self, part: ProcessDiLoCo, state_dict: Mapping[str, Any]) -> None:
        error, version = None, None
        try:
            version = part.version_of(state_dict)
        except Exception as e:
            # The others wait for this process, so tell them first.
            error = e
        if any(other != version for other in self._processes.share(version, error)):
            raise ValueError(
                "the checkpoints of the processes of this peer are of different moments: load those that were saved "
                "together"
            )
        failure = None
        try:
            part.load_state_dict(state_dict)
        except Exception as e:
            failure = e
        self._processes.share(error=failure)
        self._together(lambda _: None)

    # --- processes that share the model -------------------------------------------------------------------------------

    def _share(
        self,
        main: Sequence[torch.Tensor],
        optimizer: Any,
        params: list[Any],
        *,
        dht: DHT | None,
        batch_size_per_step: int | None = None,
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        """The rest of the constructor, if the processes share the model."""
        check_options(optimizer, options)
        processes, self._parameters = Processes(process_group, main[0].device), main
        self._processes, self.batch_size_per_step = processes, batch_size_per_step
        self._has_told_of_sizes, self._is_shut_down, self.reuse_grad_buffers = False, False, False
        self.steps_each_batch = True  # a scaler unscales its gradients before they are clipped
        self.news = ProcessMessage(Command.CARRY_ON)
        self.swarm = None
        processes.check_same_sizes(main)
        sharding = describe_sharding(processes, main)
        if without := [rank for rank, has_dht in enumerate(processes.share(dht is not None)) if not has_dht]:
            raise ValueError(
                "the processes of this peer share the model, so each of them exchanges its own part: give each one a "
                f"DHT of its own, also process {without[0]}"
            )
        error = None
        options = {**options, "dht": dht, "optimizer": optimizer, "params": params}
        try:
            if processes.is_first:
                self._part = self.swarm = LeadingDiLoCo(processes, sharding, main, **options)
            else:
                self._part = FollowingDiLoCo(processes, sharding, main, **options)
            check_elementwise(self.opt)
        except Exception as e:
            error = e
        try:
            processes.share(error=error)
            self._together(lambda swarm: swarm.agree())
        except BaseException:
            if self._part is not None:
                self._part.shutdown()
            raise
        self._become_torch_optimizer(has_others=True)

    @uncompiled
    def step(
        self, closure: Callable[[], Any] | None = None, batch_size: int | None = None, grad_scaler: Any = None
    ) -> Any:
        """Make an inner step with the gradients of all processes, then follow the decisions of the first process.

        See :meth:`shoal.DiLoCo.step`. All processes must call it.
        """
        if self._part is None:
            return super().step(closure, batch_size, grad_scaler)
        if self._is_shut_down:
            raise ReactorError("this optimizer is shut down and trains with nobody any more: make a new one")
        error, loss, scaler, samples, is_finite = None, None, None, 0, True
        try:
            samples, scaler = self._check_step(batch_size, grad_scaler)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if samples and scaler is not None:
                is_finite = scaler.unscale_batch(self, ends=True)
        except Exception as e:
            # The others wait for this process, so tell them first; the error is raised below.
            error = e
        told = self._processes.share((samples, is_finite), error)
        counts, before = [count for count, _ in told], self._part.inner_steps
        total = sum(counts) if all(finite for _, finite in told) else 0
        if total:
            self._warn_of_sizes(counts)
        elif any(counts) and scaler is not None:
            scaler.note_overflow(self)
        try:
            if total:
                try:
                    self._part.take_gradients()
                except Exception as e:
                    error = e
                self._processes.share(error=error)
            if self.swarm is None:
                self._follow(scaler)
            else:
                with self._deciding():
                    self._samples_of_step = total or self._samples_of_step
                    self.swarm.step(batch_size=total)
        finally:
            self._part.drop_gradients()
        if scaler is not None and self._part.inner_steps > before:
            scaler.note_global_step()
        return loss

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Download the state of another peer; all processes get it.

        Args:
            kwargs: see :meth:`shoal.DiLoCo.load_state_from_peers`.

        Returns:
            Whether there was a donor whose state fits and is not older than this one.
        """
        if isinstance(self._part, FollowingDiLoCo):
            self._part.has_taken_over = False
        loaded = super().load_state_from_peers(**kwargs)
        return self._part.has_taken_over if isinstance(self._part, FollowingDiLoCo) else loaded

    def _what_changed(self) -> tuple[bool, bool]:
        return super()._what_changed() if self._part is None else (False, False)

    def _obey(self, word: ProcessMessage, scaler: GradScaler | None) -> None:
        if isinstance(self._part, FollowingDiLoCo):
            self._processes.obey(word, self._part.obey)
        else:
            super()._obey(word, scaler)

    def _use_news(self) -> None:
        super()._use_news()
        if isinstance(self._part, FollowingDiLoCo):
            self._part.follow(self.news.epoch)
        if self._part is not None:
            self._part.reshard()

    def shutdown(self) -> None:
        """Leave the run. Idempotent; processes need not call it at the same time."""
        if self._part is None:
            super().shutdown()
        else:
            self._is_shut_down = True
            self._part.shutdown()
