"""Gradients: accumulate them locally, then average them with other peers, each weighted by its number of samples."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shoal.averaging import DecentralizedAverager, StepControl
from shoal.averaging.control import Gathered
from shoal.compression import CompressionInfo, TensorRole
from shoal.optim.gradient_accumulator import GradientAccumulator

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)
GradientAveragerT = TypeVar("GradientAveragerT", bound="GradientAverager")

# A round that runs out of time says why, a moment later.
REPORT_SECONDS = 0.5

GradientAveragerFactory = Callable[..., "GradientAverager"]
"""Makes a gradient averager; called with keywords."""


def make_averaged_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Room for averages on the CPU, in single precision at least: means over many samples are too small for half."""
    return [torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device="cpu") for p in parameters]


class GradientAverager(DecentralizedAverager):
    """Averages gradients with other peers so that every sample of the swarm counts the same.

    The result of a round is Σ samples · mean gradient / Σ samples over the members of the group.

    Args:
        parameters: whose gradients are averaged.
        dht: how averagers find each other.
        prefix: name of the run; averagers with other prefixes never meet.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; never zero gradients then.
        accumulate_grads_on: device of the accumulators; default: that of each parameter.
        client_mode: only connect to others; default: as the DHT.
        warn: tell when results are not used, or accumulators are not reset.
        averaged_grads: CPU tensors that receive the averages; default: new ones.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.

    Raises:
        ValueError: ``averaged_grads`` do not fit the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        dht: DHT,
        prefix: str,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        averaged_grads: Sequence[torch.Tensor] = (),
        **averager_kwargs: Any,
    ) -> None:
        if reuse_grad_buffers and accumulate_grads_on is not None:
            raise ValueError("accumulate_grads_on has no meaning with reuse_grad_buffers=True: leave one of them out")
        self.parameters = tuple(parameters)
        self.warn = warn
        self.reuse_grad_buffers = reuse_grad_buffers
        self.accumulator = GradientAccumulator(self.parameters, reuse_grad_buffers, accumulate_grads_on)
        self._new_averaged_grads = False
        self._accumulators_used = False
        averaged = (
            self._check_averaged_grads(averaged_grads) if averaged_grads else make_averaged_grads(self.parameters)
        )
        averager_kwargs.setdefault(
            "tensor_infos",
            [
                CompressionInfo.from_tensor(grad, key=index, role=TensorRole.GRADIENT)
                for index, grad in enumerate(averaged)
            ],
        )
        super().__init__(averaged, dht, prefix=prefix, client_mode=client_mode, **averager_kwargs)

    @classmethod
    def get_factory(cls: type[GradientAveragerT], **preset: Any) -> Callable[..., GradientAveragerT]:
        """A factory with some parameters set in advance."""
        return functools.partial(cls, **preset)

    def _check_averaged_grads(self, averaged_grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(averaged_grads) != len(self.parameters):
            raise ValueError(f"{len(averaged_grads)} averaged_grads for {len(self.parameters)} parameters")
        for index, (grad, parameter) in enumerate(zip(averaged_grads, self.parameters, strict=True)):
            if grad.shape != parameter.shape:
                raise ValueError(
                    f"averaged_grads[{index}] has shape {tuple(grad.shape)}, its parameter {tuple(parameter.shape)}"
                )
        return list(averaged_grads)

    @property
    def averaged_grads(self) -> Sequence[torch.Tensor]:
        """Where the averages are, one for each parameter; use them inside ``get_tensors()``."""
        return self._tensors

    # --- accumulating -------------------------------------------------------------------------------------------------

    @property
    def local_samples_accumulated(self) -> int:
        """Samples since the last reset."""
        return self.accumulator.samples

    @property
    def local_times_accumulated(self) -> int:
        """Batches since the last reset."""
        return self.accumulator.batches

    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        yield from self.accumulator.buffers

    def accumulate_grads_(self, batch_size: int, loss_scale: float = 1.0) -> None:
        """Count the present gradients as those of one more batch.

        Args:
            batch_size: samples over which the loss of this batch is the mean.
            loss_scale: the gradients are so many times too large; see :class:`~shoal.GradScaler`.
        """
        if self._accumulators_used and self.warn:
            logger.warning(
                "gradients are accumulated on top of ones that were averaged before: "
                "call reset_accumulated_grads_() after a step"
            )
            self._accumulators_used = False  # once for each round
        self.accumulator.add(batch_size, loss_scale)

    def reset_accumulated_grads_(self) -> None:
        """Forget what was accumulated."""
        self._accumulators_used = False
        self.accumulator.reset()

    def load_accumulators_into_averager_(self) -> None:
        """Put this peer's own mean gradient where the averages go."""
        with self.get_tensors() as averaged:
            self.accumulator.write_mean(averaged)

    def own_mean(self) -> list[torch.Tensor]:
        """A copy of this peer's own mean gradient, for the case that a round fails after the accumulators are reset."""
        targets = [torch.empty_like(grad) for grad in self._tensors]
        self.accumulator.write_mean(targets)
        return targets

    # --- averaging ----------------------------------------------------------------------------------------------------

    @property
    def is_ready_to_schedule(self) -> bool:
        """Whether a step can be scheduled now without extra cost."""
        return True

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Begin to look for a group, in advance.

        Args:
            scheduled_time: DHT time at which the round is expected to begin.

        Returns:
            A control for :meth:`step`. It must be used or cancelled: other peers wait for it.

        Raises:
            AssertionError: a weight was given; it is known only when the round begins.
        """
        assert kwargs.get("weight") is None, "the weight is set in step(): it is the number of samples"
        control = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **kwargs)
        assert isinstance(control, StepControl)
        return control

    def step(  # type: ignore[override]
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> Gathered | StepControl:
        """Average the accumulated gradients with other peers.

        Args:
            weight: of this peer's mean gradient; default: its number of samples.
            reset_accumulators: begin to accumulate anew. If the round may fail and its input is needed then, reset
                later.
            control: from :meth:`schedule_step`; default: a new one, with ``kwargs``.
            timeout: seconds until a group must be found; with ``wait``, also until the result.
            wait: return the result; otherwise the control at once.

        Raises:
            AssertionError: the control was used before.
            RuntimeError: a control together with options of a new one.
            AllreduceException: no group was found, or the round failed.
            TimeoutError: no result in time; the round is cancelled.
        """
        if control is None:
            control = self.schedule_step(timeout=timeout, **kwargs)
        elif kwargs:
            raise RuntimeError(
                f"a control that exists already cannot take {', '.join(kwargs)}: give them when it is made"
            )
        assert not control.triggered, "this control was used before: schedule another step"
        if self._new_averaged_grads and self.warn:
            logger.warning("the results of the previous round were not used: call use_averaged_gradients()")
        self.load_accumulators_into_averager_()
        self._accumulators_used = True
        self._new_averaged_grads = True
        control.weight = self.local_samples_accumulated if weight is None else weight
        if reset_accumulators:
            self.reset_accumulated_grads_()
        self._trigger(control)
        if not wait:
            return control
        try:
            return control.result(None if timeout is None else timeout + REPORT_SECONDS)
        except BaseException:
            control.cancel()
            raise

    def _trigger(self, control: StepControl) -> None:
        control.allow_allreduce()

    # --- for newcomers ------------------------------------------------------------------------------------------------

    def get_buffers(self) -> list[torch.Tensor]:
        """What a newcomer must know of earlier rounds; not to be changed. This averager needs nothing."""
        return []

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over what another peer's :meth:`get_buffers` gave.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        if tensors:
            raise ValueError(f"{type(self).__name__} has no buffers, got {len(tensors)}")

    # --- for a restart ------------------------------------------------------------------------------------------------

    def get_memory(self) -> list[torch.Tensor]:
        """What this peer itself must know of earlier rounds to go on after a restart; not to be changed."""
        return self.get_buffers()

    def set_memory(self, tensors: Sequence[torch.Tensor]) -> None:
        """Go on from what :meth:`get_memory` gave.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        self.set_buffers(tensors)

    # --- using the result ---------------------------------------------------------------------------------------------

    @contextmanager
    def use_averaged_gradients(self) -> Iterator[None]:
        """Inside this context every ``parameter.grad`` is the average; afterwards it is what it was, also ``None``.

        It is a copy where the parameter is on another device than the average, or of another type.
        """
        self.notify_used_averaged_gradients()
        with self.get_tensors() as averaged:
            before = [parameter.grad for parameter in self.parameters]
            try:
                for parameter, grad in zip(self.parameters, averaged, strict=True):
                    parameter.grad = grad.to(parameter.device, parameter.dtype)
                yield
            finally:
                for parameter, own_grad in zip(self.parameters, before, strict=True):
                    parameter.grad = own_grad

    def notify_used_averaged_gradients(self) -> None:
        """The results of the last round have been read in another way than :meth:`use_averaged_gradients`."""
        self._new_averaged_grads = False

    def shutdown(self) -> None:
        """Leave, and let go of the parameters. Idempotent."""
        self.accumulator.close()
        super().shutdown()
