"""A ``Trainer`` of Hugging Face that trains with peers over the internet.

The ``Trainer`` makes a *local step* after each batch, or after ``gradient_accumulation_steps`` of them. With peers, a
local step only adds the gradients of these batches; a *swarm step* follows when all peers together have
``target_batch_size`` samples. So ``max_steps``, ``logging_steps`` and ``save_steps`` count local steps of this peer,
but the learning rate, clipping and ``swarm_steps`` follow swarm steps.

This module uses only methods that the documentation of ``Trainer`` offers to subclasses: ``create_optimizer``,
``create_scheduler``, ``training_step``, ``log``, and a callback.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

import shoal
from shoal.dht.dht import check_dht
from shoal.optim.setup.schedules import HiveMindScheduler, forget_schedule, position_of, take_back
from shoal.transformers.fingerprint import fingerprint
from shoal.transformers.options import (
    check_arguments,
    check_launch,
    check_optimizers,
    check_options,
    check_parameters,
    check_schedule,
)

if TYPE_CHECKING:
    from shoal.dht import DHT


logger = logging.getLogger(__name__)


class SwarmTrainer(Trainer):  # type: ignore[misc]  # its package is not checked
    """A ``transformers.Trainer`` whose steps all peers of a run make together.

    Every peer is a whole trainer with its own data and data order, and its own logs and checkpoints. Peers may join and
    leave at any time; see :class:`shoal.Optimizer` for how a step is made. The peer joins the run when :meth:`train`
    begins, and leaves it when :meth:`train` ends. The DHT stays open.

    - Learning rates follow swarm steps, by ``lr_scheduler_type`` and ``warmup_steps`` of the arguments.
    - ``max_grad_norm`` limits the averaged gradients of a swarm step, not those of a batch.
    - Logs also have ``swarm_epoch`` (swarm steps so far), ``swarm_peers``, ``swarm_samples_per_second`` (of this peer)
      and ``swarm_grad_norm`` (of the last swarm step, before clipping). The loss is reported to ``shoal monitor``.
    - ``train(resume_from_checkpoint=...)`` continues from a checkpoint, or from the swarm's state if that is ahead.
    - With peft adapters, the frozen base is not sent. Peers with another base are refused.

    Args:
        model, args, further, options: as for ``Trainer``. ``optimizers`` may have an optimizer, but no scheduler.
            Without a ``data_seed``, each peer uses its data in an order of its own.
        dht: connected DHT of this peer.
        run_id: name of the run; peers with the same name train together.
        target_batch_size: samples of all peers together that make a swarm step. A sample is a row of a batch.
        swarm_steps: length of the learning rate schedule, in swarm steps. Training ends after the last one, if ``args``
            do not end it before. Needed unless the schedule is endless, such as ``"constant"``.
        swarm_options: further options of :class:`shoal.Optimizer` by name, such as ``matchmaking_time``.
        base: name of the frozen model beneath adapters, if you know that it is the same although its files differ.
            Default: :func:`fingerprint`, if the model has adapters.
        grad_scaler: a :class:`shoal.GradScaler`; needed with ``fp16=True``.

    Raises:
        ValueError: something in the arguments cannot work with peers; the text names it, and what to do.
        TypeError: ``swarm_options`` has an option that does not exist, or an argument is of a wrong type.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *further: Any,
        dht: DHT,
        run_id: str,
        target_batch_size: int,
        swarm_steps: int | None = None,
        swarm_options: Mapping[str, Any] | None = None,
        base: str | None = None,
        grad_scaler: shoal.GradScaler | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments() if args is None else args
        check_dht(dht)
        given = {"delay_state_averaging": False, **(swarm_options or {})}
        check_arguments(args, grad_scaler)
        check_options(given)
        check_schedule(args, swarm_steps, given)
        self.swarm: _CountingOptimizer | None = None
        """The optimizer of the run while :meth:`train` is running."""
        self.swarm_steps, self._base = swarm_steps, base
        self._swarm_options = {"dht": dht, "run_id": run_id, "target_batch_size": target_batch_size, **given}
        # A copy, because the arguments belong to the caller. The Trainer must not clip each batch.
        args, self._max_grad_norm = copy.copy(args), float(args.max_grad_norm or 0.0)
        args.max_grad_norm = 0.0
        if args.data_seed is None:
            args.data_seed = int.from_bytes(dht.peer_id.to_bytes()[-4:], "big")
        self._grad_norm: torch.Tensor | None = None
        super().__init__(model, args, *further, **options)
        check_launch(self.accelerator)
        check_optimizers(self.optimizer, self.lr_scheduler)
        if grad_scaler is not None:
            self.accelerator.scaler = grad_scaler
        self.add_callback(_FollowSwarm(self))

    # --- the run ------------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Join the run, train as ``Trainer.train`` does, and leave the run, even after an error."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._leave()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the torch optimizer as the ``Trainer`` does, and join the run with it."""
        if self.swarm is not None:
            return self.optimizer
        inner, model = super().create_optimizer(*args, **kwargs), self.model
        check_parameters(inner, model)
        has_adapters = bool(getattr(model, "peft_config", None))
        base = fingerprint(model) if self._base is None and has_adapters else self._base
        self.swarm = _CountingOptimizer(
            optimizer=inner,
            # Buffers beneath adapters belong to the base, too.
            model=None if has_adapters else model,
            frozen_base=base,
            **{**self._swarm_options, "scheduler": self._swarm_options.get("scheduler") or self._make_schedule},
        )
        self.swarm.name_parameters(model)
        self._clipping = inner.register_step_pre_hook(self._clip)
        self.optimizer = self.swarm
        return self.swarm

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the swarm, which does not advance with the steps of the ``Trainer``."""
        assert self.swarm is not None
        self.lr_scheduler = HiveMindScheduler(self.swarm, self.swarm.scheduler)
        return self.lr_scheduler

    def _make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        steps = self.swarm_steps
        warmup = self.args.get_warmup_steps(steps if steps is not None else 0)
        return get_scheduler(
            self.args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )

    def _clip(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called before each step that the optimizer really makes."""
        if self._max_grad_norm > 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)

    def _leave(self) -> None:
        if self.swarm is None:
            return
        swarm, self.swarm = self.swarm, None
        # Another train() begins with the plain optimizer.
        self.optimizer, self.lr_scheduler = swarm.opt, None
        self._clipping.remove()
        swarm.shutdown()
        forget_schedule(swarm.opt)

    # --- batches ------------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the gradients of a batch, and count its samples."""
        samples = _samples_in(inputs, getattr(self.model, "main_input_name", "input_ids"))
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self.swarm is not None:
            self.swarm.samples += samples
            # Reading a loss waits for the device, so only those that are published are read.
            if self.swarm.report_is_due:
                # The Trainer has divided it by the number of batches whose gradients are added up.
                self.swarm.report(loss=loss.detach() * self.args.gradient_accumulation_steps)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the figures of the swarm to the logs while it trains."""
        super().log({**logs, **self.swarm_figures()}, *args, **kwargs)

    def swarm_figures(self) -> dict[str, float]:
        """What is added to the logs; empty if this peer is in no run."""
        if self.swarm is None:
            return {}
        tracker = self.swarm.tracker
        figures = {
            "swarm_epoch": float(self.swarm.local_epoch),
            "swarm_peers": float(max(1, tracker.global_progress.num_peers)),
            "swarm_samples_per_second": float(tracker.local_progress.samples_per_second),
        }
        if self._grad_norm is not None:
            figures["swarm_grad_norm"] = float(self._grad_norm)
        return figures


class _CountingOptimizer(shoal.Optimizer):
    """The ``Trainer`` calls ``step()`` without a number of samples, so they are counted here between two steps."""

    samples = 0

    def step(self, closure: Any = None, batch_size: int | None = None, grad_scaler: Any = None) -> Any:
        if batch_size is None:
            batch_size, self.samples = self.samples, 0
        return super().step(closure, batch_size, grad_scaler)


class _FollowSwarm(TrainerCallback):  # type: ignore[misc]  # its package is not checked
    """Begins with the state of the swarm, and ends with the last swarm step."""

    def __init__(self, trainer: SwarmTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the swarm's state if it is not older than the checkpoint, which has been loaded by now."""
        swarm = self._trainer.swarm
        assert swarm is not None
        if (position := position_of(swarm.scheduler)) > swarm.local_epoch:
            logger.warning(
                "the checkpoint is of a Trainer without peers, whose schedule was at step %d: what it has learnt is "
                "taken, but the schedule begins at step %d of the swarm", position, swarm.local_epoch,
            )  # fmt: skip
            take_back(swarm.scheduler, swarm.local_epoch)
        if not swarm.load_state_from_peers():  # with a state it is admitted, whatever other peers claim
            _check_admission(swarm)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        assert trainer.swarm is not None
        if trainer.swarm_steps is not None and trainer.swarm.local_epoch >= trainer.swarm_steps:
            control.should_training_stop = True


def _check_admission(swarm: shoal.Optimizer) -> None:
    """Check that nobody has turned this peer away, if it got no state.

    Raises:
        ValueError: one has, and this is the first step: it would train alone, under the name of a run.
    """
    refusals = swarm.state_averager.node.state_downloads.contradictions
    if refusals and swarm.local_epoch == 0:
        told = "".join(f"\n  {peer}: {reason}" for peer, reason in refusals.items())
        raise ValueError(f"the peers of the run {swarm.run_id!r} do not train with this one:{told}")


def _samples_in(inputs: Any, main_input: str) -> int:
    """The number of samples in a batch.

    Raises:
        ValueError: it has no tensor.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
    if not tensors:
        raise ValueError(
            f"a batch with {sorted(inputs)} has no tensor, so its samples cannot be counted: let the data_collator "
            "return tensors whose first dimension is the batch"
        )
    return len(tensors.get(main_input, next(iter(tensors.values()))))
