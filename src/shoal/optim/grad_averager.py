"""Gradients: accumulate them locally, then average them with other peers, each weighted by its number of samples.

Batches add their gradients to accumulators, on the device of the model. A round writes their mean to tensors on the
CPU, averages those in place, and the optimizer reads the result from them. Between two rounds these tensors need no
memory, see :meth:`GradientAverager.free_averages`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shoal.averaging import DecentralizedAverager, StepControl
from shoal.averaging.control import Gathered
from shoal.averaging.finite import first_not_finite
from shoal.averaging.state.download import Layout, OwnedState, layout_of
from shoal.base.logs import quoted
from shoal.compression import CompressionInfo, TensorRole
from shoal.compression.base import copies_of, room_for, stand_in, zeros_like_all
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.setup.devices import copy_all

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)
GradientAveragerT = TypeVar("GradientAveragerT", bound="GradientAverager")

# Seconds to wait beyond the timeout of a round, so that it can still report why it failed. Chosen.
REPORT_SECONDS = 0.5

GradientAveragerFactory = Callable[..., "GradientAverager"]
"""A function that makes a gradient averager; it is called with keywords."""


def _average_type(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def make_averaged_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros on the CPU for averages, in single precision at least: means over many samples are too small for half."""
    return [torch.zeros(p.shape, dtype=_average_type(p), device="cpu") for p in parameters]


class PeerMomentum:
    """The momentum of one peer: m ← β · m + (1 - β) · gradient, once in each step; the first m is the gradient.

    A peer can send it instead of its gradient. An averaging rule that looks at one round alone cannot tell a small,
    patient lie from the noise of honest batches. A peer's momentum is the mean of its last gradients. It has less
    noise, so the same lie stands out (Karimireddy et al., 2021, https://arxiv.org/abs/2012.10333).

    Args:
        beta: β, from 0 to below 1.
        like: tensors with the shapes and types of the gradients.
    """

    def __init__(self, beta: float, like: Sequence[torch.Tensor]) -> None:
        self._beta = beta
        self._momentum = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
        self._has_begun = False
        # How many batches the last counted gradient was the mean of; 0: none was counted in this step.
        self._batches = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The momentum; zeros before the first step. Do not change it."""
        return self._momentum

    @torch.no_grad()
    def replace(self, gradients: Sequence[torch.Tensor], batches: int) -> None:
        """Update the momentum with mean gradients, and overwrite them with it. If any is not finite, change nothing.

        Args:
            gradients: this peer's mean gradients of the present step.
            batches: how many batches they are the mean of. The same number as in the last call means the same
                gradients, which count only once.
        """
        if batches == 0 or first_not_finite(gradients) is not None:
            return
        if batches != self._batches:
            self._batches = batches
            if self._has_begun:
                torch._foreach_lerp_(self._momentum, list(gradients), 1 - self._beta)
            else:
                copy_all(self._momentum, gradients)
                self._has_begun = True
        copy_all(gradients, self._momentum)

    def next_step(self) -> None:
        """Begin a new step: the next gradients are new ones, even with the same number of batches."""
        self._batches = 0

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Continue from the momentum of a checkpoint.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        shapes, own = [tuple(t.shape) for t in tensors], [tuple(t.shape) for t in self._momentum]
        if shapes != own:
            raise ValueError(f"the momentum has shapes {quoted(shapes)}, expected {quoted(own)}")
        copy_all(self._momentum, tensors)
        self._has_begun = any(bool(tensor.any()) for tensor in self._momentum)


def check_peer_momentum(beta: float) -> float:
    """Check the option ``peer_momentum`` and return it as a float.

    Raises:
        ValueError: it is not a number from 0 to below 1.
    """
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
        raise ValueError(f"peer_momentum must be a number from 0 (off) to below 1, such as 0.9, got {beta!r}")
    return float(beta)


def check_has_no_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer has no momentum of its own: with peer momentum, its gradients are momentum already.

    Raises:
        ValueError: it has momentum.
    """
    for group in optimizer.param_groups:
        for name, value in _own_momentum(group).items():
            if float(value) != 0:
                raise ValueError(
                    f"with peer_momentum peers send momentum instead of gradients, so {type(optimizer).__name__} must "
                    f"have none of its own, but its {name} is {float(value):g}: set it to 0. As the momentum is a "
                    "mean, and not a sum, SGD takes about 1 / (1 - momentum) times the learning rate then"
                )


def _own_momentum(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: group[name] for name in ("momentum", "beta1") if group.get(name) is not None}
    betas = group.get("betas")
    return {**found, "betas[0]": betas[0]} if betas else found


class GradientAverager(DecentralizedAverager):
    """Averages gradients with other peers so that all samples of the swarm count the same.

    The result of a round is Σ samples · mean gradient / Σ samples, summed over the members of the group.

    Args:
        parameters: the parameters whose gradients are averaged.
        dht: how averagers find each other.
        prefix: name of the run; averagers with different prefixes never meet.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; then never zero gradients.
        accumulate_grads_on: device of the accumulators; default: the device of each parameter.
        client_mode: connect to others, but accept no connections; default: as in the DHT.
        warn: log a warning when results are not used, or accumulators are not reset.
        averaged_grads: CPU tensors that receive the averages, with the shapes of the parameters; default: new ones.
        peer_momentum: average the momentum of each peer instead of its gradient: m ← β · m + (1 - β) · gradient, where
            this is β. It makes robust averages more robust, see ``aggregation``. The optimizer must have no momentum of
            its own. Must be the same in all peers.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.

    Raises:
        ValueError: ``averaged_grads`` do not fit the parameters, or ``peer_momentum`` is not from 0 to below 1.
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
        peer_momentum: float = 0.0,
        **averager_kwargs: Any,
    ) -> None:
        self.peer_momentum = check_peer_momentum(peer_momentum)
        if reuse_grad_buffers and accumulate_grads_on is not None:
            raise ValueError("accumulate_grads_on has no meaning with reuse_grad_buffers=True: leave one of them out")
        self.parameters = tuple(parameters)
        self.warn = warn
        self.reuse_grad_buffers = reuse_grad_buffers
        self.accumulator = GradientAccumulator(self.parameters, reuse_grad_buffers, accumulate_grads_on)
        self._new_averaged_grads = False
        self._accumulators_used = False
        # Averages that are this object's own take memory only from the beginning of a round until they are used.
        self._may_free, self._has_room = not averaged_grads, bool(averaged_grads)
        averaged = (
            self._check_averaged_grads(averaged_grads)
            if averaged_grads
            else [stand_in(parameter.shape, _average_type(parameter)) for parameter in self.parameters]
        )
        # As in torch, a parameter without a gradient at any member is left alone. So the members mark the parameters
        # that they have gradients of: the mean of the marks is above 0 if any member has one.
        self._marks = torch.ones(len(averaged), device="cpu")
        self._tells_marks = bool(averaged) and not averager_kwargs.get("tags")
        self._momentum = PeerMomentum(self.peer_momentum, averaged) if peer_momentum else None
        if peer_momentum:
            self.phases += f", peer_momentum {self.peer_momentum:g}"
        infos = averager_kwargs.pop("tensor_infos", None) or [
            CompressionInfo.from_tensor(grad, key=index, role=TensorRole.GRADIENT)
            for index, grad in enumerate(averaged)
        ]
        if self._tells_marks:
            infos = [*infos, CompressionInfo.from_tensor(self._marks, key="marks", role=TensorRole.COUNTER)]
            averaged = [*averaged, self._marks]
        averager_kwargs["tensor_infos"] = infos
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
        """The tensors with the averages, one for each parameter; use them inside ``get_tensors()``."""
        return self._tensors[: len(self.parameters)]

    @contextmanager
    def get_tensors(self) -> Iterator[Sequence[torch.Tensor]]:
        """Inside this context the averaged gradients do not change by themselves, and may be changed."""
        with super().get_tensors():
            self._make_room()
            yield self.averaged_grads

    def _make_room(self) -> None:
        """Give the averages memory, if they have none; the caller holds the lock."""
        if not self._has_room:
            self._tensors[: len(self.parameters)] = zeros_like_all(self.averaged_grads)
            self._has_room = True

    def free_averages(self) -> None:
        """Free the memory of the averages until the next round, because they have been used. Tensors that came from the
        caller are kept."""
        if self._may_free:
            with super().get_tensors():
                self._tensors[: len(self.parameters)] = [stand_in(t.shape, t.dtype) for t in self.averaged_grads]
                self._has_room = False

    def without_gradient(self) -> list[int]:
        """Positions of the parameters that no member of the last round had a gradient of.

        After a round that failed, those that this peer has no gradient of.
        """
        with super().get_tensors():
            return (self._marks <= 0).nonzero().flatten().tolist()

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
        """Add the present gradients, which are those of one more batch.

        Args:
            batch_size: number of samples over which the loss of this batch is the mean.
            loss_scale: factor by which the loss, and so the gradients, were scaled; see :class:`~shoal.GradScaler`.
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
        if self._momentum is not None:
            self._momentum.next_step()
        self.accumulator.reset()

    def load_accumulators_into_averager_(self) -> None:
        """Put this peer's own mean gradient, or its momentum, where the averages go."""
        with super().get_tensors() as averaged:
            self._make_room()
            self._write_own(averaged)

    def own_mean(self) -> list[torch.Tensor]:
        """A copy of this peer's own mean gradient, or its momentum, in case a round fails after the accumulators are
        reset."""
        targets = room_for(self._tensors)
        self._write_own(targets)
        return targets

    @torch.no_grad()
    def use_own_mean(self, own_mean: Sequence[torch.Tensor]) -> None:
        """Put the result of :meth:`own_mean` where the averages go. A round that failed late may have changed some of
        them."""
        with super().get_tensors() as averaged:
            self._make_room()
            copy_all(averaged, own_mean)

    def _write_own(self, tensors: Sequence[torch.Tensor]) -> None:
        targets = tensors[: len(self.parameters)]
        if self._tells_marks:
            tensors[-1].copy_(self.accumulator.marks())
        self.accumulator.write_mean(targets)
        if self._momentum is not None:
            self._momentum.replace(targets, self.accumulator.batches)

    # --- averaging ----------------------------------------------------------------------------------------------------

    @property
    def is_ready_to_schedule(self) -> bool:
        """Whether a step can be scheduled now without extra cost. Subclasses may need time between two rounds."""
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
            weight: weight of this peer's mean gradient; default: its number of samples.
            reset_accumulators: start accumulating from zero at once. If you need the input again after a failed round,
                reset later instead.
            control: from :meth:`schedule_step`; default: a new one, made with ``kwargs``.
            timeout: seconds until a group must be found; with ``wait``, also until the result.
            wait: return the result; otherwise return the control at once.

        Raises:
            AssertionError: the control was used before.
            RuntimeError: options of a new control were given together with a control.
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

    def get_current_state(self) -> OwnedState:
        with self.get_tensors() as tensors:
            copies = copies_of(tensors)
        return OwnedState({"group_key": self.node.group_bits}, copies, self.tensor_infos[: len(copies)])

    def _expected_layout(self) -> Layout | None:
        return layout_of(self.averaged_grads) if self._gives_the_state_of(GradientAverager) else None

    def get_buffers(self) -> list[torch.Tensor]:
        """Tensors of earlier rounds that a newcomer needs. Do not change them. This averager has none."""
        return []

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take over the buffers of another peer, from its :meth:`get_buffers`.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        if tensors:
            raise ValueError(f"{type(self).__name__} has no buffers, got {len(tensors)}")

    # --- for a restart ------------------------------------------------------------------------------------------------

    def get_memory(self) -> list[torch.Tensor]:
        """Tensors of earlier rounds that this peer needs to continue after a restart. Do not change them."""
        return [*self.get_buffers(), *(self._momentum.tensors if self._momentum else ())]

    def set_memory(self, tensors: Sequence[torch.Tensor]) -> None:
        """Continue from the tensors that :meth:`get_memory` gave.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        if self._momentum is None:
            self.set_buffers(tensors)
            return
        split = max(0, len(tensors) - len(self._momentum.tensors))
        self._momentum.load(tensors[split:])
        self.set_buffers(tensors[:split])

    # --- using the result ---------------------------------------------------------------------------------------------

    @contextmanager
    def use_averaged_gradients(self) -> Iterator[None]:
        """Inside this context every ``parameter.grad`` is the average; afterwards it is what it was before.

        It is a copy where the parameter is on another device or of another type than the average, and ``None`` where no
        member of the group had a gradient.
        """
        self.notify_used_averaged_gradients()
        without = self.without_gradient()
        with self.get_tensors() as averaged:
            before = [parameter.grad for parameter in self.parameters]
            try:
                for parameter, grad in zip(self.parameters, averaged, strict=True):
                    parameter.grad = grad.to(parameter.device, parameter.dtype)
                for index in without:
                    self.parameters[index].grad = None
                yield
            finally:
                for parameter, own_grad in zip(self.parameters, before, strict=True):
                    parameter.grad = own_grad

    def notify_used_averaged_gradients(self) -> None:
        """Note that the results of the last round were used without :meth:`use_averaged_gradients`, to avoid a
        warning."""
        self._new_averaged_grads = False

    def shutdown(self) -> None:
        """Leave, and remove the hooks from the parameters. Idempotent."""
        self.accumulator.close()
        super().shutdown()
