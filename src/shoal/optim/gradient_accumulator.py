"""Accumulates the mean gradient of many batches, weighted by their sizes, and notices batches that have none."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from shoal.compression.base import stand_in, zeros_like_all
from shoal.optim.setup.devices import copy_all, is_dtensor

logger = logging.getLogger(__name__)


class GradientAccumulator:
    """Sums gradients of mean losses so that all samples have equal weight.

    Args:
        parameters: their ``.grad`` is accumulated.
        reuse_grad_buffers: keep the sum in ``.grad`` itself, where ``backward`` adds to it unless gradients are zeroed.
            The gradients that ``backward`` adds are kept until :meth:`add`, which corrects their weight if the size of
            their batch differs from that of the first one; see :meth:`expect_batches_of`.
        device: device of the sums; default: that of each parameter.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        reuse_grad_buffers: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.reuse_grad_buffers, self._device = reuse_grad_buffers, device
        self.samples = 0
        self.batches = 0
        self._first_batch_size = 0
        self._expected_batch_size: int | None = None
        self._warned = False
        self._missing = MissingGradients()
        # Made at the first batch: a peer without gradients needs no memory for them.
        self._sums: list[torch.Tensor] | None = None
        self._latest: LatestGradients | None = None
        # Positions of parameters that no batch has had a gradient of, since the last reset.
        self._untouched = set(range(len(self.parameters)))
        # With reuse_grad_buffers: the address and version of each gradient at the last reset.
        self._left: dict[int, tuple[int, int]] = {}
        if reuse_grad_buffers:
            self._latest = LatestGradients(self.parameters)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The tensors with the sums."""
        return self._grads() if self.reuse_grad_buffers else self._own_sums()

    def _own_sums(self) -> list[torch.Tensor]:
        if self._sums is None:
            likes = [stand_in(p.shape, _wide(p.dtype)) for p in self.parameters]
            if all(map(self._is_summed_here, self.parameters)):
                self._sums = zeros_like_all(likes)
            else:
                self._sums = [
                    torch.zeros_like(p, device=p.device if self._device is None else self._device, dtype=like.dtype)
                    for p, like in zip(map(torch.Tensor.detach, self.parameters), likes, strict=True)
                ]
        return self._sums

    def _is_summed_here(self, parameter: torch.Tensor) -> bool:
        device = parameter.device if self._device is None else torch.device(self._device)
        return device.type == "cpu" and parameter.is_contiguous() and not is_dtensor(parameter)

    def _grads(self) -> list[torch.Tensor]:
        """Every parameter's ``.grad``; missing ones are created with zeros."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def expect_batches_of(self, batch_size: int) -> None:
        """Announce that all batches have this size, so that no gradients need be kept to correct their weight.

        Keeping them takes as much memory as all gradients of a batch, and the time to allocate and clear it.
        """
        if self._latest is not None:
            self._expected_batch_size = batch_size
            self._latest.close()
            self._latest = None

    @torch.no_grad()
    def add(self, batch_size: int, loss_scale: float = 1.0) -> None:
        """Count the gradients in ``.grad`` as those of one more batch with a mean loss.

        Args:
            batch_size: number of samples in the batch.
            loss_scale: divide the gradients by this. Only without ``reuse_grad_buffers``: gradients that accumulate in
                ``.grad`` are unscaled there.
        """
        if batch_size <= 0:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if self._expected_batch_size is not None and self._expected_batch_size != batch_size:
            batch_size = self._take_for_expected(batch_size, self._expected_batch_size)
        _check_gradients([p.grad for p in self.parameters if p.grad is not None])
        if self._untouched:
            self._untouched = {index for index in self._untouched if not self._has_gradient(index)}
        self._missing.look(self.parameters, accumulated=self.samples if self.reuse_grad_buffers else 0)
        if self._first_batch_size == 0:
            self._first_batch_size = batch_size
        self.samples += batch_size
        self.batches += 1
        weight = batch_size / self._first_batch_size
        if self.reuse_grad_buffers:
            self._weigh_latest(weight)
            return
        own = self._own_sums()
        if self._device is None and self.batches == 1:  # the parameters may have moved
            own = self._sums = [s.to(p.device) for s, p in zip(own, self.parameters, strict=True)]
        present = [(s, p.grad) for s, p in zip(own, self.parameters, strict=True) if p.grad is not None]
        if present:
            sums = [s for s, _ in present]
            # Blocking copies: all gradients have arrived when to() returns.
            grads = [grad.to(s.device) for s, grad in present]
            torch._foreach_add_(sums, grads, alpha=weight / loss_scale)

    def _has_gradient(self, index: int) -> bool:
        grad = self.parameters[index].grad
        if grad is None:
            return False
        return not self.reuse_grad_buffers or self._left.get(index) != (grad.data_ptr(), grad._version)

    def marks(self) -> torch.Tensor:
        """A 1 for each parameter; 0 if no batch has had a gradient of it."""
        marks = [0.0 if index in self._untouched else 1.0 for index in range(len(self.parameters))]
        return torch.tensor(marks, device="cpu")

    def take_marks(self, marks: torch.Tensor) -> None:
        """Adopt marks after gradients were added to the sums: parameters with marks above 0 have gradients."""
        self._untouched = set((marks <= 0).nonzero().flatten().tolist())

    def _take_for_expected(self, batch_size: int, expected: int) -> int:
        """Count a batch of unexpected size as one of the expected size: its gradients are in the sum, unweighted."""
        self._expected_batch_size = None
        logger.warning(
            "a batch of %d samples instead of %d: it counts as one of %d, later ones by their size. If batches differ, "
            "do not announce a batch_size_per_step",
            batch_size,
            expected,
            expected,
        )
        self._latest = LatestGradients(self.parameters)
        return expected

    def _weigh_latest(self, weight: float) -> None:
        """Correct the weight of the latest gradients, which ``backward`` has added to ``.grad`` with weight 1."""
        if self._latest is None:
            return  # all batches have the same size
        latest = self._latest.take()
        if weight == 1:
            return
        added = [(p.grad, grad) for p, grad in zip(self.parameters, latest, strict=True) if p.grad is not None]
        for total, grad in added:
            if grad is not None:
                total.add_(grad, alpha=weight - 1)
        if added and all(grad is None for _, grad in added) and not self._warned:
            self._warned = True
            logger.warning(
                "the gradients of a batch of another size than the first were not made by backward(): with "
                "reuse_grad_buffers=True they cannot be weighted by it"
            )

    @property
    def unit(self) -> int:
        """Number of samples in the first batch: sums are in units of a mean gradient over that many samples."""
        return self._first_batch_size or 1

    @torch.no_grad()
    def change_unit(self, unit: int) -> None:
        """Convert sums to units of a mean over ``unit`` samples, so that they can be added to sums of that unit."""
        if unit != self.unit:
            torch._foreach_mul_(self.buffers, self.unit / unit)
        self._first_batch_size = unit

    @torch.no_grad()
    def write_mean(self, targets: Sequence[torch.Tensor]) -> None:
        """Put the mean gradient over all samples since the last reset into ``targets``; zeros if there were none."""
        if self.samples == 0:
            for target in targets:
                target.zero_()
            return
        in_units_of_the_first = self.samples / self.unit
        sources = self.buffers
        if all(s.dtype == t.dtype and s.device == t.device for s, t in zip(sources, targets, strict=True)):
            torch._foreach_copy_(list(targets), sources)
            torch._foreach_div_(list(targets), in_units_of_the_first)
        else:
            for source, target in zip(sources, targets, strict=True):
                if torch.promote_types(source.dtype, target.dtype) == target.dtype:
                    copy_all([target], [source])
                    target.div_(in_units_of_the_first)
                else:  # divide first: the sum may be too large for the narrow type
                    target.copy_(source / in_units_of_the_first)

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from zero."""
        self.samples = self.batches = self._first_batch_size = 0
        present = self._sums
        if self.reuse_grad_buffers:
            present = [p.grad for p in self.parameters if p.grad is not None]
        if present:
            torch._foreach_zero_(present)
        self._untouched = set(range(len(self.parameters)))
        if self.reuse_grad_buffers:
            grads = [(index, p.grad) for index, p in enumerate(self.parameters) if p.grad is not None]
            self._left = {index: (grad.data_ptr(), grad._version) for index, grad in grads}
        if self._latest is not None:
            self._latest.take()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        if self._latest is not None:
            self._latest.close()


class LatestGradients:
    """Keeps the gradients that ``backward`` has added to ``.grad`` since the last :meth:`take`.

    These are the tensors that ``backward`` makes anyway; they just live longer, until :meth:`take`. Only a gradient
    that has itself become ``.grad`` is copied, because the next one will be added to it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        # On their way to ``.grad``, or to a caller of ``torch.autograd.grad``.
        self._arriving: list[torch.Tensor | None] = [None] * len(parameters)
        self._added: list[torch.Tensor | None] = [None] * len(parameters)
        self._handles: list[RemovableHandle] = []
        own = weakref.ref(self)  # parameters may outlive this object
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                before, after = _hooks(own, index)
                self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def arrives(self, index: int, grad: torch.Tensor) -> None:
        self._arriving[index] = grad.detach()

    def is_added(self, index: int, total: torch.Tensor | None) -> None:
        """Note that the gradient that arrived last is now part of ``total``, the parameter's ``.grad``."""
        grad, before = self._arriving[index], self._added[index]
        self._arriving[index] = None
        if grad is not None and total is not None and _share_memory(grad, total):
            grad = grad.clone()
        self._added[index] = grad if before is None or grad is None else before + grad

    def take(self) -> list[torch.Tensor | None]:
        """Return and forget the added gradients, one per parameter; ``None`` where nothing was added."""
        added, count = self._added, len(self._added)
        self._arriving, self._added = [None] * count, [None] * count
        return added

    def close(self) -> None:
        """Remove the hooks, and forget all gradients."""
        for handle in self._handles:
            handle.remove()
        self.take()


def _hooks(
    latest: weakref.ref[LatestGradients], index: int
) -> tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]:
    def before(grad: torch.Tensor) -> None:
        remembering = latest()
        if remembering is not None:
            remembering.arrives(index, grad)

    def after(parameter: torch.Tensor) -> None:
        remembering = latest()
        if remembering is not None:
            remembering.is_added(index, parameter.grad)

    return before, after


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Sparse gradients have no such pointer; _check_gradients refuses them later.
    are_dense = one.layout is other.layout is torch.strided
    return are_dense and one.data_ptr() == other.data_ptr()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type of the sums: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def _check_gradients(gradients: Sequence[torch.Tensor]) -> None:
    """Check that all gradients are dense.

    Raises:
        ValueError: one is sparse.
    """
    for gradient in gradients:
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse, and averages of several peers are dense: make "
                "embeddings with sparse=False"
            )


# Only this many first batches are searched for zero gradients. Chosen: the search has to wait for the device.
BATCHES_READ = 3


class MissingGradients:
    """Notices batches without gradients, and warns once.

    The usual cause is that ``step()`` was called before ``backward()``, or ``zero_grad()`` between the two.

    If no parameter has a gradient, the batch does not count, and the model stays as it is, as after torch's step(). The
    model must not change between forward() and backward(): backward() would fail with an error of torch that does not
    name the cause. One gradient is enough: frozen parameters, and parameters that the batch has not used, have none.

    Gradients that are all zero may be right, so such a batch counts. If they are wrong, the mean of all peers becomes
    smaller, and the model learns slowly or not at all, without any other sign.
    """

    def __init__(self) -> None:
        self._batches, self._has_told = 0, False

    def has_none(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether no trained parameter has a gradient, so that the batch must not count. Warns once.

        False if no parameter is trained.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained or any(parameter.grad is not None for parameter in trained):
            return False
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "step() skips batches: no parameter has a gradient. The order is loss.backward(), opt.step(), "
                "opt.zero_grad()"
            )
        return True

    @torch.no_grad()
    def look(self, parameters: Iterable[torch.Tensor], *, accumulated: int = 0) -> None:
        """Check a batch that is about to be counted.

        Args:
            parameters: those that should have gradients.
            accumulated: samples whose gradients are already in ``.grad``.
        """
        if self._has_told:
            return
        self._batches += 1
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and (self._batches > BATCHES_READ or any(map(_is_not_zero, gradients))):
            return
        self._has_told = True
        if accumulated:
            logger.warning(
                "the gradients of %d samples are gone. With reuse_grad_buffers=True they accumulate in the parameters: "
                "never call zero_grad(), not even that of the model",
                accumulated,
            )
        else:
            logger.warning(
                "step() counts a batch, but %s. The order is loss.backward(), opt.step(), opt.zero_grad()",
                "all of its gradients are zero" if gradients else "no parameter has a gradient",
            )


def _is_not_zero(gradient: torch.Tensor) -> bool:
    # Other kinds of tensors cannot be read without other processes, or without copies.
    return type(gradient) not in (torch.Tensor, torch.nn.Parameter) or gradient.is_sparse or bool(gradient.any())
