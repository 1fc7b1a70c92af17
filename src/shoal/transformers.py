"""For users of Hugging Face's ``Trainer``: :class:`SwarmTrainer` trains with peers over the internet.

The ``Trainer`` makes a *local step* after each batch, or after ``gradient_accumulation_steps`` of them. With peers, a
local step only adds the gradients of these batches; a *swarm step* comes when all peers together have
``target_batch_size`` samples. So ``max_steps``, ``logging_steps`` and ``save_steps`` count local steps of this peer, but
the learning rate, clipping and ``swarm_steps`` go by swarm steps.

Of the ``Trainer``, only methods are used that its documentation offers for subclasses: ``create_optimizer``,
``create_scheduler``, ``training_step``, ``log``, and a callback.

Adapters of peft are trained together while the frozen model beneath them stays at home; see :func:`fingerprint`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import torch

import shoal
from shoal.optim.schedules import HiveMindScheduler, forget_schedule

try:
    from transformers import SchedulerType, Trainer, TrainerCallback, TrainingArguments, get_scheduler
except ImportError as e:
    raise ModuleNotFoundError(
        f"shoal.transformers needs the packages transformers and accelerate ({e}): pip install 'shoal[transformers]'"
    ) from e

if TYPE_CHECKING:
    from shoal.dht import DHT

__all__ = ["SwarmTrainer", "fingerprint"]

logger = logging.getLogger(__name__)

# Options of shoal.Optimizer that the trainer fills in itself.
_FILLED_IN = frozenset(
    {"self", "dht", "run_id", "target_batch_size", "batch_size_per_step", "optimizer", "params", "model", "frozen_base"}
)
# Options that cannot work here, and why.
_EXCLUDED = {
    "reuse_grad_buffers": "the Trainer zeroes gradients after each local step: leave it out",
    "auxiliary": "a peer without data needs no Trainer: make a shoal.Optimizer(auxiliary=True) without one",
    **dict.fromkeys(
        ("offload_optimizer", "delay_optimizer_step", "delay_grad_averaging"),
        "the optimizer of the Trainer steps the model's own parameters: leave it out",
    ),
}
# Schedules that end need to know when.
_ENDLESS = frozenset({SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.INVERSE_SQRT})
# Characters of a fingerprint: enough that no two are equal by chance, and short enough to be compared by eye.
_DIGITS = 16


class SwarmTrainer(Trainer):  # type: ignore[misc]  # its package is not checked
    """A ``transformers.Trainer`` whose steps all peers of a run make together.

    Every peer is a whole trainer with its own data, its own order of them, its own logs and checkpoints. Peers may come
    and go at any time; see :class:`shoal.Optimizer` for how a step is made. The peer joins the run when :meth:`train`
    begins, and leaves it when :meth:`train` ends. The DHT stays open.

    - Learning rates follow swarm steps, by ``lr_scheduler_type`` and ``warmup_steps`` of the arguments.
    - ``max_grad_norm`` limits the averaged gradients of a swarm step, not those of a batch.
    - Logs also have ``swarm_epoch`` (swarm steps so far), ``swarm_peers``, ``swarm_samples_per_second`` (of this peer)
      and ``swarm_grad_norm`` (of the last swarm step, before clipping). The loss is shown to ``shoal monitor``.
    - ``train(resume_from_checkpoint=...)`` goes on from a checkpoint; where the swarm is ahead, from its state.
    - With peft adapters, the frozen base stays at home. Peers with another base are refused.

    Args:
        model, args, further, options: as for ``Trainer``. ``optimizers`` may have an optimizer, but no scheduler.
            Without a ``data_seed``, each peer goes through its data in an order of its own.
        dht: connected DHT of this peer.
        run_id: name of the run; peers with the same name train together.
        target_batch_size: samples that all peers together gather for a swarm step. A sample is a row of a batch.
        swarm_steps: length of the learning rate schedule, in swarm steps. Training ends after the last one, if ``args``
            do not end it before. Needed unless the schedule is endless, such as ``"constant"``.
        swarm_options: further options of :class:`shoal.Optimizer` by name, such as ``matchmaking_time``.
        base: name of the frozen model beneath adapters, for those who know that it is the same although its files are
            not. Default: :func:`fingerprint`, if the model has adapters.
        grad_scaler: a :class:`shoal.GradScaler`; needed with ``fp16=True``.

    Raises:
        ValueError: something in the arguments cannot work with peers; the text names it, and what to do.
        TypeError: ``swarm_options`` has an option that does not exist.
    """

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
        given = {"delay_state_averaging": False, **(swarm_options or {})}
        _check_arguments(args, grad_scaler)
        _check_options(given)
        _check_schedule(args, swarm_steps, given)
        self.swarm: shoal.Optimizer | None = None
        """The optimizer of the run while :meth:`train` is running."""
        self.swarm_steps, self._base = swarm_steps, base
        self._swarm_options = {"dht": dht, "run_id": run_id, "target_batch_size": target_batch_size, **given}
        # A copy, because the caller's arguments are theirs. The Trainer would clip each batch: here it must not.
        args, self._max_grad_norm = copy.copy(args), float(args.max_grad_norm or 0.0)
        args.max_grad_norm = 0.0
        if args.data_seed is None:
            args.data_seed = int.from_bytes(dht.peer_id.to_bytes()[-4:], "big")
        self._grad_norm: torch.Tensor | None = None
        super().__init__(model, args, *further, **options)
        _check_launch(self.accelerator)
        _check_optimizers(self.optimizer, self.lr_scheduler)
        if grad_scaler is not None:
            self.accelerator.scaler = grad_scaler
        self.add_callback(_FollowSwarm(self))

    # --- the run ------------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Join the run, train as ``Trainer.train`` does, and leave the run, also after an error."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._leave()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the torch optimizer as the ``Trainer`` does, and join the run with it."""
        if self.swarm is not None:
            return self.optimizer
        inner, model = super().create_optimizer(*args, **kwargs), self.model
        has_adapters = bool(getattr(model, "peft_config", None))
        base = fingerprint(model) if self._base is None and has_adapters else self._base
        self.swarm = _CountingOptimizer(
            optimizer=inner,
            # Buffers beneath adapters belong to the base, too.
            model=None if has_adapters else model,
            frozen_base=base,
            **{"scheduler": self._make_schedule, **self._swarm_options},
        )
        self.swarm.name_parameters(model)
        inner.register_step_pre_hook(self._clip)
        self.optimizer = self.swarm
        return self.swarm

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the swarm, which the steps of the ``Trainer`` do not move."""
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
        swarm.shutdown()
        forget_schedule(swarm.opt)

    # --- batches ------------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the gradients of a batch, and count its samples."""
        samples = _samples_in(inputs, getattr(self.model, "main_input_name", "input_ids"))
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        if isinstance(self.swarm, _CountingOptimizer):
            self.swarm.samples += samples
            # To read a loss means to wait for the device, so only those are read that are published.
            if self.swarm.report_is_due:
                # The Trainer has divided it by the number of batches whose gradients are added up.
                self.swarm.report(loss=loss.detach() * self.args.gradient_accumulation_steps)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the figures of the swarm, too, while it trains."""
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
        """By now a checkpoint is loaded: what the swarm has is taken if it is not older."""
        swarm = self._trainer.swarm
        assert swarm is not None
        swarm.load_state_from_peers()
        _check_admission(swarm)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        assert trainer.swarm is not None
        if trainer.swarm_steps is not None and trainer.swarm.local_epoch >= trainer.swarm_steps:
            control.should_training_stop = True


def _check_admission(swarm: shoal.Optimizer) -> None:
    """Check that this peer was not turned away by all others.

    Raises:
        ValueError: it was, and this is its first step: it would train alone, under the name of a run.
    """
    refusals = swarm.state_averager.node.state_sharing.contradictions
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


# --- what cannot work -------------------------------------------------------------------------------------------------


def _check_arguments(args: TrainingArguments, grad_scaler: Any) -> None:
    """Check the arguments of a trainer.

    Raises:
        ValueError: something cannot work with peers.
    """
    if args.fp16 and not isinstance(grad_scaler, shoal.GradScaler):
        raise ValueError(
            f"fp16=True with grad_scaler={grad_scaler!r}: the usual scaler knows nothing of steps that many batches make "
            "together. Use bf16=True, or give grad_scaler=shoal.GradScaler()"
        )
    if grad_scaler is not None and not args.fp16:
        raise ValueError("grad_scaler is for fp16=True: leave it out")
    whole = "each peer holds the whole model: leave it out, and train adapters if the model is too large (docs: LoRA)"
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if value := getattr(args, name, None):
            raise ValueError(f"{name}={value!r} splits a model over several devices, but {whole}")
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu={args.n_gpu}: the Trainer would use DataParallel. A peer has one device: set CUDA_VISIBLE_DEVICES=0, "
            "and start one peer for each GPU"
        )
    if args.world_size > 1:
        raise ValueError(
            f"world_size={args.world_size}: this process is one of several of a launcher such as torchrun. Start each "
            "as a peer of its own, without the launcher"
        )
    if getattr(args, "auto_find_batch_size", False):
        raise ValueError("auto_find_batch_size=True begins anew with each size: set per_device_train_batch_size")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("layerwise") or "lomo" in optimizer:
        raise ValueError(
            f"optim={optimizer!r} steps during backward, when there are only gradients of one batch of this peer: use "
            "optim='adamw_torch'"
        )


def _check_schedule(args: TrainingArguments, swarm_steps: int | None, options: Mapping[str, Any]) -> None:
    """Check that the learning rate can follow the swarm.

    Raises:
        ValueError: it cannot.
    """
    if swarm_steps is not None and swarm_steps < 1:
        raise ValueError(f"swarm_steps={swarm_steps}: give the number of swarm steps, at least 1")
    kind = SchedulerType(args.lr_scheduler_type)
    if options.get("scheduler") is not None:
        return
    if kind in (SchedulerType.REDUCE_ON_PLATEAU, getattr(SchedulerType, "GREEDY", None)):
        raise ValueError(
            f"lr_scheduler_type={kind.value!r} depends on a metric that differs between peers: use one that depends on "
            "steps alone, such as 'cosine'"
        )
    if swarm_steps is None and (kind not in _ENDLESS or 0 < args.warmup_steps < 1):
        raise ValueError(
            f"lr_scheduler_type={kind.value!r} with warmup_steps={args.warmup_steps} needs the length of the run: give "
            "swarm_steps=…, the number of steps that all peers make together, or use lr_scheduler_type='constant'"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Check the names of further options of the swarm's optimizer.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option cannot work here.
    """
    known = inspect.signature(shoal.Optimizer.__init__).parameters.keys() - _FILLED_IN
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"swarm_options has {unknown}; it takes these of shoal.Optimizer: {', '.join(sorted(known))}")
    for name in options.keys() & _EXCLUDED.keys():
        if options[name]:
            raise ValueError(f"swarm_options={{{name!r}: {options[name]!r}}}: {_EXCLUDED[name]}")


def _check_launch(accelerator: Any) -> None:
    """Check what the environment has made of the arguments, such as the file of ``accelerate config``.

    Raises:
        ValueError: there is more than one process or device.
    """
    kind = accelerator.distributed_type
    if kind != "NO":
        raise ValueError(
            f"accelerate is configured for {getattr(kind, 'value', kind)}, but a peer is one process that holds the whole "
            "model: start it with python instead of accelerate launch, once for each device"
        )


def _check_optimizers(optimizer: Any, scheduler: Any) -> None:
    """Check the user's ``optimizers``.

    Raises:
        ValueError: there is a scheduler, or the optimizer is shoal's already.
    """
    if scheduler is not None:
        raise ValueError(
            "optimizers=(…, scheduler): it would count the batches of this peer. Give the arguments a lr_scheduler_type, "
            "or swarm_options={'scheduler': lambda opt: …}"
        )
    if isinstance(optimizer, shoal.Optimizer):
        raise ValueError("optimizers has a shoal.Optimizer, but SwarmTrainer makes one: give it the torch optimizer")


# --- the base of adapters ---------------------------------------------------------------------------------------------


def fingerprint(model: torch.nn.Module) -> str:
    """Tell which frozen model adapters belong to, in a short text that is the same in all peers with this model.

    It is the revision on the hub, or a hash of the files of the checkpoint, wherever they are. One peer may hold the
    model in bf16 and another in 4 bits: what was loaded counts, not what it became. A model that came from neither is
    known by the names and shapes of its frozen parameters alone, which a warning says.

    Args:
        model: as ``from_pretrained`` returns it, or with adapters of peft.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    revision = getattr(getattr(base, "config", None), "_commit_hash", None)
    if revision:
        return f"revision {revision[:_DIGITS]}"
    folder = getattr(base, "name_or_path", "")
    if folder and (files := _weights_in(Path(folder))):
        digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
        for file in files:
            digest.update(f"{file.name}:{file.stat().st_size};".encode())
            digest.update_mmap(file)
        return f"files {digest.hexdigest()[:_DIGITS]}"
    logger.warning(
        "the base model was loaded neither from the hub nor from files: peers compare only names and shapes of its "
        "parameters, so one with other weights would go unnoticed. If you know what it is, say so: base='…'"
    )
    frozen = sorted(f"{name}:{_shape_of(p)}" for name, p in base.named_parameters() if not p.requires_grad)
    return f"names and shapes {blake3.blake3(';'.join(frozen).encode()).hexdigest()[:_DIGITS]}"


def _weights_in(folder: Path) -> list[Path]:
    """The files with the weights of a checkpoint, in order; the adapters beside them are no part of it."""
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return [file for file in found if not file.name.startswith("adapter_")]


def _shape_of(parameter: Any) -> tuple[int, ...]:
    """The shape that a parameter has as long as it is not packed into 4 bits."""
    packed = getattr(parameter, "quant_state", None)
    return tuple(parameter.shape if packed is None else packed.shape)
