"""One expert: a module that runs forward for others, and learns with each of their backward passes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.base.extras import nested_flatten, nested_map, nested_pack
from shoal.compression.base import CompressionType
from shoal.compression.serialization import DUMMY_BATCH_SIZE, BatchTensorDescriptor
from shoal.serving.task_pool import FinalError, TaskPool

logger = logging.getLogger(__name__)


class ModuleBackend:
    """Runs a module in batches, and trains it.

    All tensors of a batch have the same number of rows. Methods run in the server's computing thread, one at a time.

    Args:
        name: the uid of the expert.
        module: takes what the schemas say; returns a tensor, or lists, tuples and dictionaries of tensors.
        optimizer: steps after each backward pass; ``None``: the module does not learn. It can also be set later.
        scheduler: steps after the optimizer.
        args_schema: a :class:`BatchTensorDescriptor` for each positional input; they may be nested.
        kwargs_schema: a schema for each keyword input, by name.
        outputs_schema: the structure of the result; ``None``: found out by running the module once with zeros.
        outputs_compression: codec of floating-point outputs; ``None``: as the schema says.
        grad_compression: codec of all gradients; ``None``: those of the inputs and outputs.
        kwargs: settings of the task pools, such as ``max_batch_size``, which is required.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        args_schema: Sequence[Any] | None = None,
        kwargs_schema: Mapping[str, Any] | None = None,
        outputs_schema: Any = None,
        outputs_compression: CompressionType | None = None,
        grad_compression: CompressionType | None = None,
        **kwargs: Any,
    ) -> None:
        assert args_schema or kwargs_schema, "an expert needs inputs: give args_schema or kwargs_schema, or both"
        assert scheduler is None or optimizer is not None, "a scheduler needs an optimizer"
        self.name, self.module, self.optimizer, self.scheduler = name, module, optimizer, scheduler
        self.args_schema, self.kwargs_schema = tuple(args_schema or ()), dict(kwargs_schema or {})
        self.forward_schema = (self.args_schema, self.kwargs_schema)
        self.outputs_schema = self._tried() if outputs_schema is None else outputs_schema
        if outputs_compression is not None:
            self.outputs_schema = with_compression(self.outputs_schema, outputs_compression)
        self.backward_schema = (self.forward_schema, self.outputs_schema)
        if any(each.dtype.is_complex for each in nested_flatten(self.backward_schema)):
            raise ValueError(f"expert {name}: complex tensors get no gradients here; use torch.view_as_real")
        self.grad_inputs_schema, self.grad_outputs_schema = self.forward_schema, self.outputs_schema
        self._grad_compression = grad_compression
        if grad_compression is not None:
            self.grad_inputs_schema = with_compression(self.forward_schema, grad_compression)
            self.grad_outputs_schema = with_compression(self.outputs_schema, grad_compression)
        self.forward_pool = TaskPool(self.forward, name=f"{name}_forward", **kwargs)
        self.backward_pool = TaskPool(self.backward, name=f"{name}_backward", **kwargs)

    def _tried(self) -> Any:
        """The schema of the outputs for inputs of zeros."""
        device = next((each.device for each in self.module.parameters()), None)
        args, kwargs = nested_map(lambda each: each.make_zeros(DUMMY_BATCH_SIZE, device=device), self.forward_schema)
        return nested_map(BatchTensorDescriptor.from_tensor, self.module(*args, **kwargs))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute a batch.

        Args:
            inputs: positional inputs, then keyword ones by sorted name; nested ones one after another.

        Raises:
            RuntimeError: the batch is empty.
        """
        if not inputs or not len(inputs[0]):
            raise RuntimeError(f"expert {self.name} cannot compute a batch without rows")
        args, kwargs = nested_pack(inputs, self.forward_schema)
        with torch.no_grad():
            return tuple(nested_flatten(self.module(*args, **kwargs)))

    def backward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute a batch again, then the gradients of parameters and inputs, and call :meth:`on_backward`.

        Args:
            inputs: those of :meth:`forward`, then a gradient for each output; that of an integer is ignored.

        Returns:
            A gradient for each input, zeros if it has none.

        Raises:
            ValueError: a gradient of a parameter is not finite.
        """
        count = sum(1 for _ in nested_flatten(self.forward_schema))
        given, grads = [each.detach() for each in inputs[:count]], inputs[count:]
        leaves = [each.requires_grad_() if each.is_floating_point() else each for each in given]
        with torch.enable_grad():
            args, kwargs = nested_pack(leaves, self.forward_schema)
            outputs = [*nested_flatten(self.module(*args, **kwargs))]
            pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
            if pairs:
                with self._kept_if_it_fails():
                    torch.autograd.backward([out for out, _ in pairs], [grad.to(out) for out, grad in pairs])
        try:
            self.on_backward(len(inputs[0]))
        except Exception as e:
            raise FinalError(f"learning failed: {type(e).__name__}: {e}") from e
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)

    @contextlib.contextmanager
    def _kept_if_it_fails(self) -> Iterator[None]:
        """Leave no part of the gradients of a failed pass, because the next one would learn from it.

        Raises:
            ValueError: a gradient is not finite. One step with it would end the training of this expert for everybody.
        """
        parameters = [*self.module.parameters()]
        kept = [None if each.grad is None else each.grad.clone() for each in parameters]
        try:
            yield
            grads = [each.grad for each in parameters if each.grad is not None]
            if not all((each.coalesce().values() if each.is_sparse else each).isfinite().all() for each in grads):
                raise ValueError("the gradients are not finite, so the expert does not learn from them")
        except Exception:
            for each, grad in zip(parameters, kept, strict=True):
                each.grad = grad
            raise

    def on_backward(self, batch_size: int) -> None:
        """Learn from the gradients of the parameters. Subclasses may override this."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of the module, and of its optimizer and scheduler if there are any."""
        return {name: part.state_dict() for name, part in self._parts().items() if part is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. A part that is missing keeps its values, with a warning."""
        for name, part in self._parts().items():
            if part is None:
                continue
            if name in state_dict:
                part.load_state_dict(state_dict[name])
            else:
                logger.warning("the state of expert %s has no %s: it starts from scratch", self.name, name)

    def _parts(self) -> dict[str, Any]:
        return {"module": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def get_info(self) -> dict[str, Any]:
        """What callers must know; subclasses may add entries that msgpack can pack."""
        info: dict[str, Any] = {
            "forward_schema": self.forward_schema,
            "outputs_schema": self.outputs_schema,
            "keyword_names": tuple(self.kwargs_schema),
            "max_batch_size": self.forward_pool.max_batch_size,
        }
        if self._grad_compression is not None:
            info |= {"grad_inputs_schema": self.grad_inputs_schema, "grad_outputs_schema": self.grad_outputs_schema}
        return info

    def get_pools(self) -> Sequence[TaskPool]:
        """Where requests wait."""
        return self.forward_pool, self.backward_pool


def with_compression(schema: Any, compression: CompressionType) -> Any:
    """The same schema, where floating-point tensors travel with another codec."""

    def changed(each: BatchTensorDescriptor) -> BatchTensorDescriptor:
        if not each.dtype.is_floating_point:
            return each
        fields = {**vars(each), "compression": compression}
        return BatchTensorDescriptor(*fields.pop("size")[1:], **fields)

    return nested_map(changed, schema)
