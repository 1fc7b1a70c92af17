"""Resolves the options of :class:`~shoal.optim.Optimizer`: fills in defaults and refuses contradictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.averaging.aggregation import check_aggregation
from shoal.averaging.groups.settings import FROZEN_BASE
from shoal.base.closeable import options_from
from shoal.compression.base import check_codec
from shoal.compression.serialization import check_state_codec
from shoal.optim.grad_averager import GradientAverager, GradientAveragerFactory
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.peer_momentum import check_has_no_momentum, check_peer_momentum
from shoal.optim.progress.records import count_of_samples
from shoal.optim.setup.schedules import LRSchedulerBase
from shoal.optim.setup.training_setup import TorchOptimizer

if TYPE_CHECKING:
    from shoal.optim.state_averager import TrainingStateAverager

# Averages gradients, exactly, unless the user chooses another averager. What one of low rank leaves out depends on the
# rank by the width of a layer: any fixed rank would ruin wide models.
DEFAULT_GRAD_AVERAGER: GradientAveragerFactory = GradientAverager.get_factory()


@dataclass(frozen=True)
class OptimizerSettings:
    """The resolved options: how training, averaging and stepping overlap."""

    matchmaking_time: float
    """Seconds by which rounds are scheduled in advance."""
    averaging_timeout: float
    """Seconds after which a round is given up."""
    average_state_every: int
    """Parameters are averaged once in this many epochs."""
    batch_size_per_step: int | None
    grad_averager_factory: GradientAveragerFactory | None
    """``None`` with local updates."""
    use_local_updates: bool
    """Step at once with local gradients; only parameters are averaged."""
    offload_optimizer: bool
    reuse_grad_buffers: bool
    delay_optimizer_step: bool
    delay_grad_averaging: bool
    delay_state_averaging: bool
    """Also true if the step before the averaging is made in the background."""
    use_ext_grad_buffer: bool
    auxiliary: bool
    """Only help others, without batches of its own."""
    peer_momentum: float = 0.0
    """Peers send momentum with this factor instead of gradients; 0: they do not."""

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> OptimizerSettings:
        """Resolve the user's options.

        Args:
            given: the arguments of the :class:`~shoal.optim.Optimizer`.

        Raises:
            ValueError, AssertionError: options contradict each other.
        """
        use_local_updates, factory = _resolve_grad_averager(
            given["grad_averager"], given["grad_averager_factory"], given["use_local_updates"]
        )
        if use_local_updates:
            assert not given["reuse_grad_buffers"], (
                "local updates zero the gradients: they exclude reuse_grad_buffers=True"
            )
            assert not given["delay_grad_averaging"], (
                "with local updates no gradients are averaged: delay_grad_averaging is void"
            )
            assert not given["use_ext_grad_buffer"], (
                "with local updates there is no gradient averager: use_ext_grad_buffer is void"
            )
            for name in ("aggregation", "peer_momentum"):
                if given.get(name):
                    raise ValueError(
                        f"with local updates no gradients are averaged: {name} is void. For parameters there is "
                        "state_aggregation"
                    )
        offload, delays_step = given["offload_optimizer"], given["delay_optimizer_step"]
        has_buffer = given["use_ext_grad_buffer"]
        if offload is None:
            has_factory = given["params"] is not None and not isinstance(given["optimizer"], TorchOptimizer)
            offload = has_factory and not use_local_updates
        delays_step = given["delay_grad_averaging"] if delays_step is None else delays_step
        assert not given["delay_grad_averaging"] or delays_step, (
            "delay_grad_averaging=True requires delay_optimizer_step=True: the step needs the averaged gradients"
        )
        auxiliary, batch_size = given["auxiliary"], given["batch_size_per_step"]
        assert not (given["client_mode"] and auxiliary), (
            "an auxiliary peer must accept connections: client_mode excludes it"
        )
        assert not (auxiliary and batch_size), "an auxiliary peer has no batches: leave batch_size_per_step out"
        if given["average_state_every"] < 1:
            raise ValueError(f"average_state_every must be at least 1, got {given['average_state_every']}")
        _check_optimizer(given["optimizer"], given["params"], given["scheduler"], offload, delays_step)
        return options_from(
            cls,
            given,
            batch_size_per_step=None if batch_size is None else count_of_samples("batch_size_per_step", batch_size),
            grad_averager_factory=factory,
            use_local_updates=use_local_updates,
            offload_optimizer=offload,
            delay_optimizer_step=delays_step,
            # Parameters are averaged after the step. With local updates the step is done by then.
            delay_state_averaging=given["delay_state_averaging"] or (delays_step and not use_local_updates),
            peer_momentum=check_peer_momentum(given.get("peer_momentum", 0.0)),
            use_ext_grad_buffer=not use_local_updates if has_buffer is None else has_buffer,
        )

    @property
    def overlaps(self) -> bool:
        """Whether peers go on to the next epoch while the first round of the global step is still running."""
        return self.delay_state_averaging if self.use_local_updates else self.delay_grad_averaging

    def check_step(self, closure: object, batch_size: int | None, grad_scaler: object) -> int:
        """Check the arguments of a step, and return the number of samples in its batch; 0 without a batch.

        Raises:
            TypeError, ValueError: an argument of :meth:`shoal.optim.Optimizer.step` is invalid.
        """
        if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
            raise ValueError(f"grad_scaler must be a shoal.GradScaler, got {type(grad_scaler).__name__}")
        if self.auxiliary:
            if closure is not None or batch_size is not None or grad_scaler is not None:
                raise ValueError("an auxiliary peer has no batches: call step() without arguments")
            return 0
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("give batch_size to step(), or batch_size_per_step to the constructor")
        if isinstance(batch_size, int) and batch_size < 0:
            raise ValueError(f"batch_size must not be negative, got {batch_size}")
        return batch_size if batch_size == 0 else count_of_samples("batch_size", batch_size)

    def connect_gradients(self, averager: GradientAverager, state_averager: TrainingStateAverager) -> None:
        """Let gradients be averaged right where the optimizer reads them, if they are not the user's.

        Args:
            averager: averages the gradients of the user's parameters.
            state_averager: has the optimizer that reads the averages.

        Raises:
            ValueError: the optimizer has momentum of its own beside that of the peers.
        """
        try:
            if averager.peer_momentum:
                check_has_no_momentum(state_averager.optimizer)
        except ValueError:
            averager.shutdown()
            raise
        if self.batch_size_per_step is not None:
            averager.accumulator.expect_batches_of(self.batch_size_per_step)
        if self.use_ext_grad_buffer:
            state_averager.shared_buffers = averager
        if self.offload_optimizer:
            trained = state_averager.stepped_by(averager.parameters)
            for parameter, grad in zip(trained, averager.averaged_grads, strict=True):
                parameter.grad = grad


def averager_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options for the averagers of gradients and of parameters, from the arguments of an Optimizer.

    Without those that an Optimizer keeps as attributes.

    Raises:
        TypeError: an option for a codec is not a codec, or one for a rule of averaging not a rule.
    """
    for name in ("grad_compression", "state_averaging_compression"):
        check_codec(name, given[name])
    check_state_codec("load_state_compression", given["load_state_compression"])
    for name in ("aggregation", "state_aggregation"):
        check_aggregation(name, given[name])
    own = dict(given["averager_opts"] or {})
    if given["frozen_base"] is not None:
        own["agreement"] = {**(own.get("agreement") or {}), FROZEN_BASE: given["frozen_base"]}
    # A factory may have its own.
    wanted = {"compression": given["grad_compression"], "aggregation": given["aggregation"]}
    gradients = {name: value for name, value in wanted.items() if value is not None}
    if given["peer_momentum"]:
        gradients["peer_momentum"] = given["peer_momentum"]
    state = {
        "aggregation": given["state_aggregation"],
        "compression": given["state_averaging_compression"],
        "state_compression": given["load_state_compression"],
    }
    return {**gradients, **own}, {**state, **own}


def _resolve_grad_averager(
    grad_averager: Any, grad_averager_factory: Any, use_local_updates: bool
) -> tuple[bool, Callable[..., GradientAverager] | None]:
    if grad_averager is not DEFAULT_GRAD_AVERAGER and grad_averager_factory is not None:
        raise ValueError("grad_averager and grad_averager_factory are two names of the same option: give one")
    factory = grad_averager if grad_averager_factory is None else grad_averager_factory
    assert not use_local_updates or factory in (None, DEFAULT_GRAD_AVERAGER), (
        "use_local_updates=True averages no gradients: leave grad_averager out"
    )
    return (True, None) if use_local_updates else (factory is None, factory)


def _check_optimizer(optimizer: Any, params: Any, scheduler: Any, offload: bool, delayed: bool) -> None:
    if isinstance(optimizer, TorchOptimizer):
        if offload or delayed:
            raise ValueError(
                "offload_optimizer, delay_optimizer_step and delay_grad_averaging need a function that makes the "
                "optimizer from parameter groups, and params="
            )
    elif not callable(optimizer) or params is None:
        raise ValueError("give an optimizer instance, or a function that makes one together with params=")
    elif scheduler is not None and isinstance(scheduler, LRSchedulerBase):
        raise ValueError("a function that makes the optimizer needs a function that makes the scheduler, too")
    elif delayed and not offload:
        raise ValueError("delay_optimizer_step=True requires offload_optimizer=True")
