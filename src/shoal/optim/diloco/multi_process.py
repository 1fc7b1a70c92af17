"""A peer of several processes, with :class:`~shoal.optim.diloco.diloco.DiLoCo`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.inner import InnerOptimizers, without_statistics
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.ranks.several_processes import SeveralProcesses
from shoal.optim.setup.training_setup import main_parameters
from shoal.optim.setup.training_state import OWN


class MultiProcessDiLoCo(SeveralProcesses):
    """Makes one peer of several processes that train the same model, each with its own batches.

    The processes belong to one group of ``torch.distributed`` and call the same methods in the same order. In each step
    the first one gets the gradients of all, weighted by samples, makes the inner step, and sends the parameters to the
    others. Only it has a :class:`~shoal.DiLoCo`, with outer parameters and statistics, and talks to the swarm. To the
    swarm this is one peer with the samples of all processes.

    Gradients need not be averaged among the processes before, so the model needs no ``DistributedDataParallel`` around
    it. With one, call ``backward`` in its ``no_sync()``. Clip gradients with a hook of ``opt``, because only there they
    are those of all processes: ``optimizer.opt.register_step_pre_hook(clip)``.

    Each process holds the whole model; sharded ones are refused.

    A step in which the gradients of one process overflow is made with those of the others.

    Args:
        dht: DHT of the first process; ``None`` in the others.
        optimizer, params, scheduler, batch_size_per_step, extra_tensors: as for :class:`~shoal.DiLoCo`, the same in all
            processes. ``batch_size_per_step`` counts samples of one process.
        process_group: default: all processes.
        options: further options of :class:`~shoal.DiLoCo`.

    Raises:
        ValueError: there is no process group, models differ, or options contradict each other.
        ProcessGroupError: another process has ended.
    """

    def __init__(self, **options: Any) -> None:
        if options.get("reuse_grad_buffers"):
            raise ValueError("DiLoCo steps with each batch, so nothing accumulates: leave reuse_grad_buffers=True out")
        super().__init__(**options)

    # In all processes together.
    _samples_of_step = 0
    # The model holds the outer parameters until the outermost context ends.
    _is_in_context = False

    @staticmethod
    def _main_parameters(optimizer: Any, params: Any) -> Sequence[torch.Tensor]:
        given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        return [parameter for each in given for parameter in main_parameters(each, params)]

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
        return self._own if self.swarm is None else self.swarm

    @property
    def _inner_optimizers(self) -> InnerOptimizers:
        return self._own if self.swarm is None else self.swarm.inner

    @property
    def opt(self) -> torch.optim.Optimizer:
        """In the first process, the optimizer that makes the inner steps; in the others, one that never does.

        Of several ones the first one.
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
        """Where schedules of the inner learning rate stand."""
        return self.news.position if self.swarm is None else int(self.swarm.position)

    @property
    def state(self) -> Any:
        """Statistics of the inner optimizers; only the first process has any."""
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
        if self.swarm is None:
            self._follow()
            return
        with self._deciding():
            self.swarm.show_outer_parameters()

    def show_own_parameters(self) -> None:
        """Put this peer's own parameters back into the model, in all processes."""
        if self.swarm is None:
            self._follow()
            return
        with self._deciding():
            self.swarm.show_own_parameters()

    def finish_background_work(self) -> None:
        """Training has ended: the model gets the outer parameters, in all processes."""
        self.show_outer_parameters()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the first process' :meth:`state_dict`; all processes must call this with the same state."""
        if self.swarm is None:
            schedules = (state_dict.get(OWN) or {}).get("schedulers")
            self._own.load_state_dict(without_statistics(state_dict), schedules)
            self._follow()
            return
        with self._deciding():
            self.swarm.load_state_dict(state_dict)
