"""Futures, under the import path that users know."""

from shoal.futures import CancelledError, InvalidStateError, MPFuture, TimeoutError

__all__ = ["CancelledError", "InvalidStateError", "MPFuture", "TimeoutError"]
