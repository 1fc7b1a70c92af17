"""A fake accelerator for tests: the device ``fake``, with two indices, in host memory.

It has what makes GPUs hard and a machine without one does not show:

- **Work is late.** With ``fake.delay(ms)``, operations and non-blocking copies are done by a thread of their stream, in
  order, that long after their launch. In ``with fake.held()`` nothing is done. Without either (the default) all is done
  at once.
- **Streams and events** order work: ``torch.fake.Stream``, ``Event``, ``stream()``, and the generic ``torch.Stream``,
  ``torch.Event`` and ``torch.accelerator``. Nothing but events orders the work of two streams, be one the default one.
- **Memory is poisoned.** New memory of the device, and new pinned memory of the host, is full of NaN: what is read
  before it has been written is seen.
- **Everything is counted**: ``fake.counts()``.

Launches that need a value on the host wait for their stream: scalars, blocking copies, random numbers, and results
whose shape depends on values. What is copied from or to pageable memory is copied at once.

Three things are not as on a GPU. Memory that late work still uses is not free before that work is done, whatever the
stream. ``model.to("fake")`` makes new parameters, as torch does for devices that are not its own; an optimizer that was
made before has the old ones. There are no convolutions, and no fused attention.

The device stays for the life of the process, and torch takes it for the accelerator of the machine. So only processes
that ask for it have it: see ``make test-devices``.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICES = 2
SOURCE = Path(__file__).with_name("fake_device.cpp")
OLDEST_TORCH = (2, 9)


class FakeDeviceError(RuntimeError):
    """The device cannot be built here."""


class FakeDevice:
    """What tests control and read."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def delay(self, milliseconds: int) -> None:
        """From now on work is done so long after its launch; 0 = at once."""
        self._extension.delay(milliseconds)

    @contextlib.contextmanager
    def late(self, milliseconds: int) -> Iterator[None]:
        """The same inside a ``with`` block, at whose end all work is waited for."""
        self.delay(milliseconds)
        try:
            yield
        finally:
            self.delay(0)
            self.wait()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside the ``with`` block no work is done; all that was launched is waited for at its end.

        Whoever waits for work of the device meanwhile gets a RuntimeError.
        """
        self._extension.hold(True)
        try:
            yield
        finally:
            self._extension.hold(False)
            self.wait()

    def occupy(self, milliseconds: int) -> None:
        """Launch a kernel on the current stream that takes so long, and does nothing."""
        self._extension.occupy(milliseconds)

    def wait(self) -> None:
        """Wait until all work of all streams is done.

        Raises:
            RuntimeError: some of it has failed since somebody last waited.
        """
        self._extension.wait()

    def counts(self) -> dict[str, int]:
        """What has happened since :meth:`reset`.

        Returns:
            ``d2h`` and ``h2d``: copies to the host and to the device; ``late``: those to the host that were late;
            ``scalars``: values that the host has read; ``live`` and ``peak``: bytes on both devices, now and at most.
        """
        counts: dict[str, int] = self._extension.counts()
        return counts

    def reset(self) -> None:
        """Count from 0 again; the peak begins at what is live."""
        self._extension.reset()


@cache
def load() -> FakeDevice:
    """Build the device if it is not built yet, which takes up to a minute, and make it known to torch.

    Raises:
        FakeDeviceError: there is no compiler, no ninja, or torch is too old.
    """
    extension = _build()
    torch.utils.rename_privateuse1_backend("fake")
    extension.install()
    torch._register_device_module("fake", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    atexit.register(_quietly, extension.wait)  # late work must not meet the end of the interpreter
    return FakeDevice(extension)


def load_or_skip() -> FakeDevice:
    """The same for a test: skips it where the device cannot be built."""
    try:
        return load()
    except FakeDeviceError as error:
        pytest.skip(str(error))


def _build() -> Any:
    from torch.utils import cpp_extension

    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise FakeDeviceError(
            f"the fake device needs torch {'.'.join(map(str, OLDEST_TORCH))}, this is {torch.__version__}"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise FakeDeviceError(f"the fake device needs a C++ compiler: there is no {compiler}; install it, or set CXX")
    # ninja may be installed beside this Python, without its environment being activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if not cpp_extension.is_ninja_available():
        raise FakeDeviceError("the fake device needs ninja: pip install ninja")
    identity = hashlib.blake2s(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    try:
        return cpp_extension.load(f"fake_device_{identity}", [str(SOURCE)], extra_cflags=["-O1", "-g0"])
    except (RuntimeError, OSError) as error:
        raise FakeDeviceError(f"the fake device could not be built: {error}") from error


def _device_module() -> types.ModuleType:
    """``torch.fake``, as ``torch.cuda`` is, as far as generic code asks for it."""
    module: Any = types.ModuleType("torch.fake")
    module.Stream, module.Event = Stream, _make_event
    module.is_available = module.is_initialized = lambda: True
    module.is_bf16_supported = lambda *args: True
    module.device_count = lambda: DEVICES
    module.init = module._lazy_init = module.empty_cache = lambda: None
    module._is_in_bad_fork = lambda: False
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.set_stream = torch.accelerator.set_stream
    module.default_stream = _default_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.device = _using_device
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    # random numbers are those of the CPU, whose state is kept and seeded anyway
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device="fake": torch.get_rng_state()
    module.set_rng_state = lambda state, device="fake": None
    return module


class Stream(torch.Stream):
    """A stream of one of the devices; default: of the current one."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=torch.device("fake", _index(device)), priority=priority)


def _make_event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """An event of the fake device; ``torch.Event.elapsed_time`` takes no subclasses."""
    return torch.Event("fake", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(
        stream_id=0, device_index=_index(device), device_type=int(torch._C._autograd.DeviceType.PrivateUse1)
    )


@contextlib.contextmanager
def _using_device(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _quietly(wait: Any) -> None:
    with contextlib.suppress(RuntimeError):
        wait()
