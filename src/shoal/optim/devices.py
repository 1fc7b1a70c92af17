"""Accelerators: copies to and from them, and work that was launched there and may not be done yet.

A device does its work later than it is told to, and each of its streams for itself. Who launches work that another
thread builds on marks it; that thread waits for the mark before it reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

BATCHES_AHEAD = 2
"""A device may still be busy with so many batches when the next one is counted, so that it never idles."""


def accelerators_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices on which tensors are, but for the CPU and those that work at once."""
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if device.type not in ("cpu", "meta") and _event_class(device) is not None]


def _event_class(device: torch.device) -> Any:
    return getattr(getattr(torch, device.type, None), "Event", None)


def _mark(devices: Iterable[torch.device]) -> list[Any]:
    """An event for each device, which comes when all is done that this thread's stream has to do now."""
    events = []
    for device in devices:
        module = getattr(torch, device.type)
        event = module.Event()
        if hasattr(module, "current_stream"):
            event.record(module.current_stream(device))
        else:  # Apple's has one stream
            event.record()
        events.append(event)
    return events


def _wait(events: Iterable[Any]) -> None:
    for event in events:
        event.synchronize()


class LaunchedWork:
    """What has been launched on the devices of some tensors. Without devices, nothing is ever waited for.

    Args:
        tensors: parameters, or whatever else is worked on. They may move to another device later.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._latest: list[Any] = []
        self._thread = 0

    def mark(self) -> None:
        """Other threads that call :meth:`wait` from now on wait for all that this one has launched until now."""
        self._latest, self._thread = _mark(accelerators_of(self._tensors)), threading.get_ident()

    def wait(self) -> None:
        """Return when all is done that another thread had launched before its :meth:`mark`, the latest one.

        What this thread has launched itself, its stream keeps in order.
        """
        if self._thread != threading.get_ident():
            _wait(self._latest)


class BatchesAhead:
    """Keeps the count of samples near to what is done: of what is launched, a device may be minutes behind.

    Args:
        tensors: parameters of the model.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._launched: deque[list[Any]] = deque()

    def launched_one(self) -> None:
        """A batch has been launched; returns when no more than :data:`BATCHES_AHEAD` are not done."""
        events = _mark(accelerators_of(self._tensors))
        if events:
            self._launched.append(events)
        while len(self._launched) > BATCHES_AHEAD:
            _wait(self._launched.popleft())

    def finish(self) -> None:
        """Return when all of them are done."""
        while self._launched:
            _wait(self._launched.popleft())


def copy_to_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous tensor on the CPU; another type is made there, not as a temporary on the device."""
    is_here = tensor.device.type == "cpu"
    host = tensor.detach().to("cpu")
    return host.to(dtype, copy=is_here, memory_format=torch.contiguous_format)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy many tensors, between types and devices if need be."""
    pairs = [(target.detach(), source.detach()) for target, source in zip(targets, sources, strict=True)]
    alike = [(target, source) for target, source in pairs if not _is_widened_on_host(target, source)]
    if alike:
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
    for target, source in pairs:
        if _is_widened_on_host(target, source):
            target.copy_(source.to("cpu"))


def _is_widened_on_host(target: torch.Tensor, source: torch.Tensor) -> bool:
    """torch would make the other type on the device, which may be short of memory."""
    return target.device.type == "cpu" and source.device.type != "cpu" and target.dtype != source.dtype
