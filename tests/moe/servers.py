"""Experts for tests, served by real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal import DHT, BatchTensorDescriptor
from shoal.moe.backend import ModuleBackend
from shoal.moe.server import Server

Row = BatchTensorDescriptor


class Computes(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def expert(module: Callable[..., Any], *args: Any, **options: Any) -> ModuleBackend:
    """An expert that takes inputs like these; it does not learn unless it gets an ``optimizer``."""
    module = module if isinstance(module, nn.Module) else Computes(module)
    return ModuleBackend("tested", module, args_schema=args, **{"max_batch_size": 64, **options})


@contextmanager
def serving(dht: DHT, backends: Mapping[str, ModuleBackend]) -> Iterator[Server]:
    """Serve these experts, and shut down the DHT at the end."""
    server = Server(dht, backends, start=True)
    try:
        yield server
    finally:
        server.shutdown()
        server.join()
