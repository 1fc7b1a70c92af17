"""Accelerators: copies to and from them, and work that was launched there and may not be done yet.

A device does its work later than it is told to, and each of its streams for itself. Who launches work that another
thread builds on marks it; that thread waits for the mark before it reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from shoal.compression.base import copies_of, room_for

# A device may still be busy with so many batches when the next one is counted, so that it never idles.
BATCHES_AHEAD = 2
# Pinned memory that a device writes to while the host does other things; there are two of these.
STAGING_BYTES = 16 * 2**20


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


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Return when the devices of these tensors have done all that anybody has launched there, on whatever stream."""
    for device in accelerators_of(tensors):
        module = getattr(torch, device.type)
        if device.type == "mps":  # there is one, and it is not named
            module.synchronize()
        else:
            module.synchronize(device)


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


def copies_beside_training(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU. A device makes them on a stream of their own, so that they wait for none of its other work.

    Nobody may change the tensors before this returns.
    """
    devices = [device for device in accelerators_of(tensors) if hasattr(getattr(torch, device.type), "Stream")]
    if not devices:
        return copies_of(tensors)
    copies = room_for(tensors)
    pairs = [(copy, tensor.detach()) for copy, tensor in zip(copies, tensors, strict=True)]
    for device in devices:
        module = getattr(torch, device.type)
        with module.device(device), module.stream(module.Stream(device)):
            _copy_staged([(copy, tensor) for copy, tensor in pairs if tensor.device == device], module)
    for copy, tensor in pairs:
        if tensor.device not in devices:
            copy.copy_(tensor)
    return copies


def _copy_staged(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], module: Any) -> None:
    """While one piece comes from the device into one half of the pinned memory, the host empties the other half."""
    halves = [torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    coming: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
    for number, (target, source) in enumerate(_pieces(pairs)):
        if len(coming) == len(halves):
            _take(*coming.popleft())
        half = halves[number % 2][: source.nbytes].view(source.dtype)
        event = module.Event()
        half.copy_(source, non_blocking=True)
        event.record(module.current_stream())
        coming.append((event, target, half))
    while coming:
        _take(*coming.popleft())


def _pieces(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for target, source in pairs:
        count = STAGING_BYTES // source.element_size()
        flat_target, flat_source = target.view(-1), source.reshape(-1)
        for start in range(0, source.numel(), count):
            yield flat_target[start : start + count], flat_source[start : start + count]


def _take(event: Any, target: torch.Tensor, staged: torch.Tensor) -> None:
    event.synchronize()
    target.copy_(staged)


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
