"""Lets the other optimizers of a waiting thread take part in rounds.

A program may step two optimizers in turn, as a GAN does, or draw its data from a shared pass. While it waits in one of
them, it would miss the rounds of the others. Two peers could then deadlock, each waiting in another optimizer.

- :func:`standing_by` is for a thread that waits inside ``step()``. A helper thread gives the rounds of the other
  optimizers the gradients that they have accumulated. Models do not change, because the program may hold a graph of one
  model while it steps the other one: each optimizer makes its step when it is next called.
- :func:`wait_between_batches` is for a thread that waits between two batches. There an optimizer may make its step.

An optimizer belongs to the thread that last called its ``step()``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 0.05
"""How often a wait checks whether other peers wait for this one. Chosen."""


class Trained(Protocol):
    """An optimizer whose steps other peers wait for."""

    thread: threading.Thread | None
    """The thread that last called its ``step()``."""

    def begin_round_if_awaited(self, thread: threading.Thread) -> None:
        """If others wait for this peer, give their round the accumulated gradients.

        Called by a helper thread while ``thread`` waits elsewhere. Does nothing if the optimizer no longer belongs to
        ``thread``.
        """
        ...

    def step_if_awaited(self) -> None:
        """If others wait for this peer, take part in their round. Called in :attr:`thread`, between two batches."""
        ...


_lock = threading.Lock()
_trained: weakref.WeakSet[Trained] = weakref.WeakSet()


def add(optimizer: Trained) -> None:
    """From now on, look after this optimizer while its thread waits elsewhere."""
    with _lock:
        _trained.add(optimizer)


def _of_this_thread() -> list[Trained]:
    with _lock:
        return [each for each in _trained if each.thread is threading.current_thread()]


@contextlib.contextmanager
def standing_by(waiting: Trained) -> Iterator[None]:
    """Context in which an optimizer waits; the other optimizers of this thread stand by.

    Raises:
        Exception: another optimizer has raised it meanwhile.
    """
    others = [each for each in _of_this_thread() if each is not waiting]
    if not others:
        yield
        return
    thread, is_over, failures = threading.current_thread(), threading.Event(), list[Exception]()

    def stand_by() -> None:
        try:
            while not is_over.wait(SECONDS_BETWEEN_LOOKS):
                for each in others:
                    each.begin_round_if_awaited(thread)
        except Exception as e:
            failures.append(e)

    helper = threading.Thread(target=stand_by, name="shoal-standby", daemon=True)
    helper.start()
    try:
        yield
    finally:
        is_over.set()
        helper.join()
    if failures:
        raise failures[0]


def wait_between_batches(future: concurrent.futures.Future[T], cancel: Callable[[], object]) -> T:
    """Wait for a result between two batches. Meanwhile, let the optimizers of this thread make steps that others await.

    Args:
        cancel: called if the wait is interrupted.
    """
    try:
        while True:
            others = _of_this_thread()
            done, _ = concurrent.futures.wait([future], SECONDS_BETWEEN_LOOKS if others else None)
            if done:
                return future.result()
            for each in others:
                each.step_if_awaited()
    except BaseException:
        cancel()
        raise
