"""Blocking context managers, such as locks of threads and processes, in coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def enter_asynchronously(context: AbstractContextManager[T, Any]) -> AsyncIterator[T]:
    """Enter a context whose ``__enter__`` may block, without blocking the loop; it is left in the loop's thread.

    Any number of coroutines may wait: each has a thread of its own while it does, because the few threads of an
    executor might all wait for locks whose holders are in the queue behind them. A lock that knows its owner, such as
    ``threading.RLock``, does not work: it is taken in another thread than released.
    """
    entered: concurrent.futures.Future[T] = concurrent.futures.Future()
    threading.Thread(target=_enter, args=(context, entered), name="shoal-enter", daemon=True).start()
    try:
        value = await asyncio.wrap_future(entered)
    except asyncio.CancelledError:
        if not entered.cancel() and entered.exception() is None:  # it was entered at the same moment
            context.__exit__(None, None, None)
        raise
    with ExitStack() as stack:
        stack.push(context)
        yield value


def _enter(context: AbstractContextManager[T, Any], entered: concurrent.futures.Future[T]) -> None:
    try:
        value = context.__enter__()
    except BaseException as e:
        if entered.set_running_or_notify_cancel():
            entered.set_exception(e)
        return
    if entered.set_running_or_notify_cancel():
        entered.set_result(value)
    else:  # nobody waits for it any more
        context.__exit__(None, None, None)
