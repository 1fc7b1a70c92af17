"""Accelerators: copies to and from them, waits for work that was launched there, and tensors sharded over several.

A device works asynchronously, and each of its streams runs independently. A thread that launches work which another
thread depends on marks it; the other thread waits for the mark before it reads.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.compression.base import copies_of, room_for

# A device may still have this many unfinished batches when the next one is counted. Chosen so that it never idles.
BATCHES_AHEAD = 2
# Size of each of two buffers in pinned memory, which a device fills while the host empties the other one. Chosen.
STAGING_BYTES = 16 * 2**20
# Classes of tensors and modules that are sharded over processes. If their Python module is not loaded, none exist.
_DTENSOR = {"torch.distributed.tensor": "DTensor", "torch.distributed._tensor": "DTensor"}
_FLAT = {"torch.distributed.fsdp._flat_param": "FlatParameter"}
# The class that fully_shard gives to modules.
_SHARDED_MODULE = {"torch.distributed.fsdp": "FSDPModule", "torch.distributed._composable.fsdp": "FSDPModule"}


def accelerators_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of these tensors, without the CPU and devices that work synchronously."""
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if device.type not in ("cpu", "meta") and _event_class(device) is not None]


def _event_class(device: torch.device) -> Any:
    return getattr(getattr(torch, device.type, None), "Event", None)


def _mark(devices: Iterable[torch.device]) -> list[Any]:
    """An event per device, which fires when this thread's stream has done everything launched so far."""
    events = []
    for device in devices:
        module = getattr(torch, device.type)
        event = module.Event()
        if hasattr(module, "current_stream"):
            event.record(module.current_stream(device))
        else:  # MPS has only one stream
            event.record()
        events.append(event)
    return events


def _wait(events: Iterable[Any]) -> None:
    for event in events:
        event.synchronize()


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the devices of these tensors have done everything launched there, on any stream."""
    for device in accelerators_of(tensors):
        module = getattr(torch, device.type)
        if device.type == "mps":  # there is only one such device, and synchronize() takes no argument
            module.synchronize()
        else:
            module.synchronize(device)


class LaunchedWork:
    """Tracks work launched on the devices of some tensors. Without such devices it never waits.

    Args:
        tensors: the tensors that the work is on, such as parameters. They may move to another device later.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._latest: list[Any] = []
        self._thread = 0

    def mark(self) -> None:
        """Mark all that this thread has launched so far: other threads will wait for it in :meth:`wait`."""
        self._latest, self._thread = _mark(accelerators_of(self._tensors)), threading.get_ident()

    def wait(self) -> None:
        """Wait for the work that another thread launched before the latest :meth:`mark`.

        A thread need not wait for its own work, which its stream keeps in order.
        """
        if self._thread != threading.get_ident():
            _wait(self._latest)


class BatchesAhead:
    """Keeps the count of samples close to the finished work: a device may be minutes behind the launched work.

    Args:
        tensors: parameters of the model.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._launched: deque[list[Any]] = deque()

    def launched_one(self) -> None:
        """Note that a batch has been launched; waits until at most :data:`BATCHES_AHEAD` are unfinished."""
        events = _mark(accelerators_of(self._tensors))
        if events:
            self._launched.append(events)
        while len(self._launched) > BATCHES_AHEAD:
            _wait(self._launched.popleft())

    def finish(self) -> None:
        """Wait until all batches are done."""
        while self._launched:
            _wait(self._launched.popleft())


def copy_to_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor to a new contiguous one on the CPU; types are converted there, to save the device's memory."""
    is_here = tensor.device.type == "cpu"
    host = tensor.detach().to("cpu")
    return host.to(dtype, copy=is_here, memory_format=torch.contiguous_format)


def copies_beside_training(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU, on a separate stream of each device, so that the copies do not wait for its other work.

    The tensors must not change before this returns.
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
    """Copy piece by piece: while the device fills one half of the pinned memory, the host empties the other half."""
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
    """Copy many tensors, even between types and devices."""
    pairs = [(target.detach(), source.detach()) for target, source in zip(targets, sources, strict=True)]
    alike = [(target, source) for target, source in pairs if not _is_widened_on_host(target, source)]
    if alike:
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
    for target, source in pairs:
        if _is_widened_on_host(target, source):
            target.copy_(source.to("cpu"))


def _is_widened_on_host(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether to convert the type on the CPU: torch would do it on the device, which may be short of memory."""
    return target.device.type == "cpu" and source.device.type != "cpu" and target.dtype != source.dtype


def is_dtensor(tensor: object) -> bool:
    """Whether this is a tensor that several processes share."""
    return _is_one_of(_DTENSOR, tensor)


def is_flat_parameter(tensor: object) -> bool:
    """Whether this is a parameter that ``FullyShardedDataParallel`` has made of others."""
    return _is_one_of(_FLAT, tensor)


def is_sharded_module(module: object) -> bool:
    """Whether ``fully_shard`` has been called with this module."""
    return _is_one_of(_SHARDED_MODULE, module)


def _is_one_of(kinds: Mapping[str, str], thing: object) -> bool:
    modules = ((sys.modules.get(module), name) for module, name in kinds.items())
    classes = tuple(getattr(module, name) for module, name in modules if hasattr(module, name))
    return isinstance(thing, classes)


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is in this process, without a copy; the tensor itself if it is whole."""
    spread: Any = tensor
    part: torch.Tensor = spread.to_local() if is_dtensor(tensor) else tensor
    return part.detach()
