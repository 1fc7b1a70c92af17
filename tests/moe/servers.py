"""Experts for tests, served by real peers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal import DHT, BatchTensorDescriptor, nested_flatten, nested_pack
from shoal.base.reactor import AwaitableFuture, in_thread
from shoal.moe.handler import ConnectionHandler

Row = BatchTensorDescriptor


class ThreadPool:
    """Runs each request in a thread of its own."""

    def __init__(self, run: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        self._run = run
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.sizes: list[int] = []
        """The rows of each request."""

    def submit_task(self, *args: torch.Tensor) -> AwaitableFuture[tuple[torch.Tensor, ...]]:
        def run() -> tuple[torch.Tensor, ...]:
            self.sizes.append(len(args[0]))
            self.began.set()
            self.may_end.wait(30)
            return self._run(*args)

        return in_thread(run)


class LocalBackend:
    """A module with plain gradient descent."""

    def __init__(self, module: Callable[..., Any], args: Any, kwargs: Any = None, learning_rate: float = 0.0) -> None:
        self.module, self.learning_rate = module, learning_rate
        self.forward_schema = (args, kwargs or {})
        with torch.no_grad():
            zeros = [each.make_zeros(3) for each in nested_flatten(self.forward_schema)]
            outputs = self._call(zeros)
        flat = [Row.from_tensor(each) for each in nested_flatten(outputs)]
        self.outputs_schema = nested_pack(flat, outputs)
        self.grad_inputs_schema, self.grad_outputs_schema = self.forward_schema, self.outputs_schema
        self.forward_pool, self.backward_pool = ThreadPool(self.forward), ThreadPool(self.backward)

    def _call(self, flat: list[torch.Tensor]) -> Any:
        args, kwargs = nested_pack(flat, self.forward_schema)
        return self.module(*args, **kwargs)

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (*nested_flatten(self._call([*flat])),)

    def backward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len([*nested_flatten(self.forward_schema)])
        inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in flat[:count]]
        with torch.enable_grad():
            pairs = zip(nested_flatten(self._call(inputs)), flat[count:], strict=True)
            trained = [(output, grad) for output, grad in pairs if output.requires_grad]
            torch.autograd.backward([output for output, _ in trained], [grad for _, grad in trained])
        if isinstance(self.module, nn.Module):
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.data -= self.learning_rate * parameter.grad
                    parameter.grad = None
        return tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in inputs)

    def get_info(self) -> dict[str, Any]:
        names = tuple(sorted(self.forward_schema[1]))
        return {
            **{"forward_schema": self.forward_schema, "outputs_schema": self.outputs_schema},
            "keyword_names": names,
        }


@contextmanager
def serving(dht: DHT, backends: Mapping[str, Any]) -> Iterator[None]:
    """Let other peers call these experts."""
    with ConnectionHandler(dht, backends, start=True):
        yield
