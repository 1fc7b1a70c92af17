"""Tools for coroutines and asynchronous iterators, under the import path that users know."""

from shoal.async_iterators import (
    achain,
    aenumerate,
    aiter_with_timeout,
    amap_in_executor,
    anext,
    as_aiter,
    asingle,
    attach_event_on_finished,
    azip,
    iter_as_aiter,
)
from shoal.entering import enter_asynchronously
from shoal.reactor import await_cancelled, cancel_and_wait, switch_to_uvloop

__all__ = [
    "achain",
    "aenumerate",
    "aiter_with_timeout",
    "amap_in_executor",
    "anext",
    "as_aiter",
    "asingle",
    "attach_event_on_finished",
    "await_cancelled",
    "azip",
    "cancel_and_wait",
    "enter_asynchronously",
    "iter_as_aiter",
    "switch_to_uvloop",
]
