"""A peer that consists of several processes, such as one per GPU of a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.optim.consistency import OtherTensors
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.optimizer import Optimizer
from shoal.optim.ranks.several_processes import SeveralProcesses
from shoal.optim.setup.optimizer_state import TorchOptimizer
from shoal.optim.setup.training_setup import main_parameters, prepare_training
from shoal.optim.setup.training_state import EPOCH, epoch_in, load_checkpoint


class MultiProcessOptimizer(SeveralProcesses):
    """Makes one peer of several processes that train the same model, each with its own batches.

    The processes belong to one group of ``torch.distributed`` and call the same methods in the same order. The first
    one has an :class:`~shoal.Optimizer`, talks to the swarm and makes all decisions. The others accumulate their
    gradients, send them before each global step, and get the parameters when they have changed. To the swarm this is
    one peer with the samples of all processes.

    Gradients are sent once per global step, weighted by samples. So they need not be averaged among the processes
    before, and the model needs no ``DistributedDataParallel`` around it. With one, call ``backward`` in its
    ``no_sync()``. Otherwise it averages after each batch, with the same result if batches have equal sizes. Each
    process keeps its own buffers of the model, such as those of batch normalization.

    The processes may also share the model, with ``fully_shard`` (FSDP2), tensor parallelism, or both. Then parameters
    are DTensors, and ``optimizer`` must be a function, given with ``params``. The first process trains whole copies of
    the sharded parameters in the memory of its host. Gradients are collected there, and values sent back, in buckets of
    64 MiB; a device holds only these beside its parts. As in FSDP2, gradients of all processes have the same weight, so
    batches must have equal sizes. ``docs/sharded.md`` has an example and the requirements.

    If a call fails in one process, it raises the error there, and :class:`~shoal.errors.ProcessGroupError` with its
    text in the others. If a process ends, the next call of the others raises that too; if it hangs, their next call
    does so after the timeout of the group.

    Args:
        dht: DHT of the first process; ``None`` in the others.
        optimizer, params, scheduler, batch_size_per_step, reuse_grad_buffers, extra_tensors: as for
            :class:`~shoal.Optimizer`, the same in all processes. ``batch_size_per_step`` counts samples of one process.
        process_group: default: all processes. Those that share parameters must be in it.
        options: further options of :class:`~shoal.Optimizer`.

    Raises:
        ValueError: there is no process group, models differ, or options contradict each other or do not fit sharded
            parameters.
        ProcessGroupError: another process has ended.
    """

    @staticmethod
    def _main_parameters(optimizer: Any, params: Any) -> Sequence[torch.Tensor]:
        return main_parameters(optimizer, params, may_be_sharded=True)

    def _prepare_to_follow(self, optimizer: Any, params: Any, scheduler: Any) -> None:
        self._setup = prepare_training(optimizer, params, scheduler, None, offload_optimizer=False, may_be_sharded=True)

    def _join(self, **options: Any) -> None:
        self.swarm = _FirstProcess(self._fetch_gradients, self._parameters, **options)
        if self.swarm.grad_averager is not None:
            self._accumulator = self.swarm.grad_averager.accumulator
        else:
            trained = [p for p in self.swarm.state_averager.main_parameters if p.requires_grad]
            self._accumulator = GradientAccumulator(trained)

    def _step_swarm(self, total: int, scaler: GradScaler | None) -> None:
        if self.swarm.grad_averager is not None:
            # The samples have already been counted.
            self.swarm.note_samples(total)
            self.swarm.step(batch_size=0, grad_scaler=scaler)
        elif total > 0:
            self._fetch_gradients()
            self._use_mean_gradients()
            self.swarm.step(batch_size=total)

    def _followed_schedules(self) -> Sequence[Any]:
        return [] if self._setup.scheduler is None else [self._setup.scheduler]

    def finish_background_work(self) -> None:
        """Wait for background steps and averaging; afterwards all processes have the results."""
        self._together(lambda swarm: swarm.state_averager.finish_jobs(swarm.averaging_timeout))

    @property
    def _inner(self) -> TorchOptimizer:
        return self._setup.optimizer if self.swarm is None else self.swarm

    @property
    def opt(self) -> TorchOptimizer:
        """In the first process, the optimizer that makes the steps; in the others, one that never does."""
        return self._setup.optimizer if self.swarm is None else self.swarm.opt

    @property
    def scheduler(self) -> Any | None:
        """The learning rate scheduler; it is at the same epoch in all processes."""
        return self._setup.scheduler if self.swarm is None else self.swarm.scheduler

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the first process' :meth:`state_dict`; all processes must call this with the same state.

        Load the model before: its parameters stay as they are, unless the optimizer is offloaded.
        """
        if self._shards is not None:
            self._shards.gather_values()
        if self.swarm is None:
            epoch = epoch_in(state_dict)
            load_checkpoint(self._setup, {**state_dict, "state": {} if epoch is None else {EPOCH: epoch}})
        self._together(lambda swarm: swarm.load_state_dict(state_dict))


class _FirstProcess(Optimizer):
    """An optimizer that fetches the gradients of all processes before each global step."""

    def __init__(self, fetch_gradients: Callable[[], None], parameters: Sequence[torch.Tensor], **options: Any) -> None:
        self._fetch_gradients, self._users_parameters = fetch_gradients, parameters
        super().__init__(**options)

    def _find_remainder(
        self, model: torch.nn.Module | None, parameters: Sequence[torch.Tensor], extra: Sequence[torch.Tensor]
    ) -> OtherTensors:
        # Modules do not know the tensors that stand in for parameters that are sharded.
        return super()._find_remainder(model, self._users_parameters, extra)

    def _take_names(self, model: torch.nn.Module) -> None:
        self.state_averager.name_parameters(model, self._users_parameters)

    def note_samples(self, samples: int) -> None:
        """Count samples that all processes have accumulated, because :meth:`step` is called without them."""
        self._reporting.count(samples)

    def _note_thread(self) -> None:
        """Do not stand by: it can take part in a round only together with the other processes."""

    def _update_global_epoch(self, grad_scaler: GradScaler | None = None) -> None:
        if self.grad_averager is not None:
            self._fetch_gradients()
        super()._update_global_epoch(grad_scaler)
