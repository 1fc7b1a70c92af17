"""An event loop in virtual time: its clock moves only when nothing is left to do, so hours pass in moments.

When no callback is ready, time jumps to the next timer. Callbacks run in the order in which they were scheduled, and
timers in the order of their times; timers with equal times run in the order in which they were set. There are no
sockets and no threads, so a program's behaviour on this loop depends only on its inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import heapq
import itertools
import math
import random
import threading
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shoal.base.clock import SwarmClock
from shoal.errors import SimulationError

# For signatures like those of the base class; not needed at run time.
if TYPE_CHECKING:
    from typing import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")

# Default DHT time at which simulations begin. Chosen: a round number of the year 2023.
START_OF_TIME = 1_700_000_000.0

# A simulation that takes longer in virtual time counts as hanging. Chosen: a week.
DEFAULT_TIME_LIMIT = 7 * 86400.0
# How many references to ended tasks are kept, besides as many as there are running tasks. Chosen.
MOST_ENDED_TASKS = 64
# The most rounds of callbacks in a row without any time passing; more count as an endless loop. Chosen.
MAX_ROUNDS_AT_ONE_MOMENT = 1_000_000

_MAX_LINES = 20

_machine: contextvars.ContextVar[Machine | None] = contextvars.ContextVar("machine", default=None)


class _Tasks:
    """Tasks in the order in which they were started. It keeps none of them alive, so that lost tasks are collected."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[asyncio.Task[Any]]] = []
        self._most = MOST_ENDED_TASKS

    def add(self, task: asyncio.Task[Any]) -> None:
        self._refs.append(weakref.ref(task))
        if len(self._refs) > self._most:
            self._refs = [weakref.ref(task) for task in self.unfinished()]
            self._most = 2 * len(self._refs) + MOST_ENDED_TASKS

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done."""
        return [task for ref in self._refs if (task := ref()) is not None and not task.done()]


class Machine:
    """A machine that tasks can run on, with a clock of its own.

    Tasks started by :meth:`spawn`, and all that they start in turn, belong to the machine.
    """

    clock_offset: float = 0.0
    """Seconds by which the clock of this machine is ahead of the true time."""

    _held: list[_Handle | _Timer] | None = None

    def freeze(self) -> None:
        """Stop everything that runs here, as SIGSTOP does: connections stay open, but nothing answers on them."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        if self._held is None:
            self._held = []
            loop.frozen += 1

    def thaw(self) -> None:
        """Let it continue, with the data that arrived meanwhile and the timers that have expired."""
        loop, held = asyncio.get_running_loop(), self._held
        assert isinstance(loop, VirtualTimeLoop)
        if held is not None:
            self._held = None
            loop.frozen -= 1
            loop.run_soon(held)

    def holds(self, handle: _Handle | _Timer) -> bool:
        """Whether a callback has to wait because this machine is frozen."""
        if self._held is None:
            return False
        self._held.append(handle)
        return True

    @functools.cached_property
    def tasks(self) -> _Tasks:
        """The tasks that run here."""
        return _Tasks()

    def spawn(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on this machine."""
        context = contextvars.copy_context()
        context.run(_machine.set, self)
        return context.run(asyncio.get_running_loop().create_task, coro)

    @functools.cached_property
    def clock(self) -> SwarmClock:
        """This machine's clock for the time of the swarm."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return SwarmClock(lambda: loop.true_time() + self.clock_offset, loop.time)

    def dht_time(self) -> float:
        """The time of the swarm as this machine knows it."""
        return self.clock.time()

    @staticmethod
    def current() -> Machine | None:
        """The machine on which the caller runs, if any."""
        return _machine.get()


class _Handle(asyncio.Handle):
    """A callback that is ready. Large simulations make millions of them, and this is cheaper than the base class."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _Timer(asyncio.TimerHandle):
    """A callback that waits for its time; see :class:`_Handle`."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, True  # cancel() then calls _timer_handle_cancelled of the loop


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """The loop. :func:`run` makes one; construct it yourself to drive it step by step.

    Args:
        seed: seeds :attr:`rng`, which should be the only source of randomness in the simulation.
        start_time: DHT time (Unix seconds) at the beginning.
        time_limit: seconds of virtual time after which the simulation counts as endless.
    """

    def __init__(
        self, *, seed: int = 0, start_time: float = START_OF_TIME, time_limit: float = DEFAULT_TIME_LIMIT
    ) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.start_time = start_time
        self.time_limit = time_limit
        self._now = 0.0
        self._soon: deque[_Handle | _Timer] = deque()
        self.timers: list[tuple[float, int, _Timer]] = []
        """A heap of timers, each with the time when it is due."""
        self._timer_numbers = itertools.count()
        self._tasks = _Tasks()
        self._cancelled_timers = 0
        self._rounds_at_this_moment = 0
        self.frozen = 0
        """The number of frozen machines, see :meth:`Machine.freeze`."""
        self.owner = threading.get_ident()
        """The thread that runs this loop, or that works while the loop is paused."""
        self._clock = SwarmClock(self.true_time, self.time)

    # --- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def swarm_clock(self) -> SwarmClock:
        """The clock of the caller's machine; the source of :func:`shoal.base.clock.get_dht_time`."""
        machine = _machine.get()
        return self._clock if machine is None else machine.clock

    def dht_time(self) -> float:
        """The time of the swarm as the caller's machine knows it."""
        return self.swarm_clock().time()

    def true_time(self) -> float:
        """Unix time that an exact clock would show."""
        return self.start_time + self._now

    # --- scheduling ---------------------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self.owner:
            raise SimulationError("a loop with virtual time has no threads: run heavy work with run_in_executor")
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self.timers, (when, next(self._timer_numbers), timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        when = self._now + delay
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self.timers, (when, next(self._timer_numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1
        # Removing a single timer from a heap is slow, so cancelled ones stay until there are many.
        if self._cancelled_timers > max(1000, len(self.timers) // 2):
            self.timers = [entry for entry in self.timers if not entry[2].cancelled()]
            heapq.heapify(self.timers)
            self._cancelled_timers = 0

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the function at once in this thread; it takes no virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: Any = super().create_task(coro, **options)
        context = options.get("context")
        machine = _machine.get() if context is None else context.get(_machine)
        self._tasks.add(task)
        if machine is not None:
            machine.tasks.add(task)
        return cast("asyncio.Task[Any]", task)

    def unfinished_tasks(self, machine: Machine | None = None) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, in the order in which they were started.

        Args:
            machine: return only the tasks of this machine.
        """
        return (self._tasks if machine is None else machine.tasks).unfinished()

    # --- running ------------------------------------------------------------------------------------------------------

    def run_soon(self, handles: Iterable[_Handle | _Timer]) -> None:
        """Run these callbacks at this moment, in this order."""
        self._soon.extend(handles)

    def _run_once(self) -> None:
        """One iteration of ``run_forever``: run the ready callbacks, or let time pass until some are ready."""
        soon = self._soon
        if not soon and not self._stopping:  # type: ignore[attr-defined]
            self._let_time_pass()
        elif self._rounds_at_this_moment > MAX_ROUNDS_AT_ONE_MOMENT:
            raise SimulationError(self._describe("these callbacks run in an endless loop, and no time passes", soon))
        self._rounds_at_this_moment += 1
        timers, now = self.timers, self._now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            soon.append(timer)
        for _ in range(len(soon)):
            handle = soon.popleft()
            if handle._cancelled:
                continue
            if self.frozen and (machine := handle._context.get(_machine)) is not None and machine.holds(handle):
                continue
            try:  # what handle._run() does, without a call for each callback
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as e:
                text = f"Exception in callback {_whereabouts_of_callback(handle)}"
                self.call_exception_handler({"message": text, "exception": e, "handle": handle})

    def _let_time_pass(self) -> None:
        timers = self.timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not timers:
            raise SimulationError(self._describe("deadlock: nothing is scheduled, and these tasks wait forever"))
        if timers[0][0] > self.time_limit:
            raise SimulationError(self._describe(f"no end within the time limit of {self.time_limit:g} s"))
        if timers[0][0] > self._now:
            self._now = timers[0][0]
            self._rounds_at_this_moment = 0

    def run_until_complete(self, future: Any) -> Any:
        self._rounds_at_this_moment = 0
        return super().run_until_complete(future)

    def _describe(self, trouble: str, handles: Iterable[asyncio.Handle] = ()) -> str:
        """The trouble, and what it concerns: the callbacks that are ready, or else all unfinished tasks."""
        concerned = [_whereabouts_of_callback(handle) for handle in handles if not handle.cancelled()]
        concerned = concerned or [_whereabouts(task) for task in self.unfinished_tasks()]
        lines = [f"{self._now:.3f} s: {trouble}"] + [f"  {line}" for line in concerned[:_MAX_LINES]]
        if len(concerned) > _MAX_LINES:
            lines.append(f"  and {len(concerned) - _MAX_LINES} more")
        return "\n".join(lines)

    # --- left to subclasses by BaseEventLoop --------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self._soon.clear()
        self.timers.clear()

    def _write_to_self(self) -> None:
        """Does nothing: no other thread may wake this loop."""


def _whereabouts(task: asyncio.Task[Any]) -> str:
    """Where a task waits: its outermost coroutine and the innermost line."""
    coroutine: Any = task.get_coro()
    name = f"{task.get_name()}: {getattr(coroutine, '__qualname__', coroutine)}"
    frame = None
    while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
        frame, coroutine = coroutine.cr_frame, coroutine.cr_await
    return name if frame is None else f"{name}, in {frame.f_code.co_filename}:{frame.f_lineno}"


def _whereabouts_of_callback(handle: asyncio.Handle) -> str:
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    return _whereabouts(task) if isinstance(task, asyncio.Task) else repr(callback)


def run(
    main: Coroutine[Any, Any, T],
    *,
    seed: int = 0,
    start_time: float = START_OF_TIME,
    time_limit: float = DEFAULT_TIME_LIMIT,
) -> T:
    """Run a coroutine in virtual time; the counterpart of ``asyncio.run``.

    Tasks that are still running afterwards are cancelled in the order in which they were started.

    Args:
        main: the coroutine to run.
        seed: the same seed gives the same run if all randomness comes from the loop's ``rng``, as it does in
            :class:`~shoal.testing.Network`.
        start_time: DHT time (Unix seconds) at the beginning.
        time_limit: seconds of virtual time that the run may take.

    Returns:
        The result of ``main``.

    Raises:
        SimulationError: ``main`` cannot end, or not within the time limit; the text says where the tasks wait.
        RuntimeError: called from inside an event loop.
    """
    if events._get_running_loop() is not None:
        main.close()
        raise RuntimeError("shoal.testing.run() cannot be called from inside a running event loop")
    loop = VirtualTimeLoop(seed=seed, start_time=start_time, time_limit=time_limit)
    thresholds = gc.get_threshold()
    # Measured: with the usual thresholds, the garbage collector takes up to a third of a large simulation's time.
    gc.set_threshold(2_000_000, 50, 100)
    try:
        result: T = loop.run_until_complete(main)
    except BaseException:
        with contextlib.suppress(SimulationError):  # the first error is the one to report
            _end_everything(loop)
        raise
    else:
        _end_everything(loop)
        return result
    finally:
        _abandon_tasks(loop)
        loop.close()
        gc.set_threshold(*thresholds)


def _end_everything(loop: VirtualTimeLoop) -> None:
    loop.time_limit = math.inf
    ended: set[asyncio.Task[Any]] = set()
    # A task that ends may start others, for example to tell other peers.
    while left := [task for task in loop.unfinished_tasks() if task not in ended]:
        ended.update(left)
        for task in left:
            task.cancel()
        loop.run_until_complete(_finish(left))
    loop.run_until_complete(loop.shutdown_asyncgens())


async def _finish(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until cancelled tasks have ended, but not forever if one refuses to."""
    if tasks:
        await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=60.0)


def _abandon_tasks(loop: VirtualTimeLoop) -> None:
    """Silence asyncio's complaints about tasks that could not even be cancelled."""
    task: Any
    for task in loop.unfinished_tasks():
        task._log_destroy_pending = False
