"""How many files and sockets this process may have open."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

logger = logging.getLogger(__name__)

_LESS = 0.9
"""What is tried next after a limit that is too high, as a share of it."""


def increase_file_limit(new_soft: int = 2**15, new_hard: int = 2**15) -> None:
    """Allow this process more open files and sockets. Never lowers a limit and never raises.

    Args:
        new_soft: the limit that counts.
        new_hard: up to which it may be raised without further rights.
    """
    try:
        resource: Any = importlib.import_module("resource")
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for allowed in (_higher(hard, new_hard), hard):  # only the superuser may raise the hard limit
        wanted = _higher(soft, new_soft)
        if allowed != resource.RLIM_INFINITY:
            wanted = allowed if wanted == resource.RLIM_INFINITY else min(wanted, allowed)
        if _set_limits(wanted, allowed):
            break
    else:
        while (wanted := int(wanted * _LESS)) > soft > 0 and not _set_limits(wanted, hard):
            pass  # macOS has one more limit, kern.maxfilesperproc, which these do not tell
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _higher(soft, new_soft) != soft:
        logger.info("at most %d files and sockets can be open in this process, not the wanted %d", soft, new_soft)


def _set_limits(soft: int, hard: int) -> bool:
    resource: Any = importlib.import_module("resource")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (ValueError, OSError) as e:
        logger.debug("cannot allow %d open files (at most %d): %s", soft, hard, e)
        return False
    return True


@functools.cache
def have_enough_files() -> None:
    """The same, once in a process, for every peer: each connection is an open file, and macOS allows 256 by default."""
    increase_file_limit()


def _higher(present: int, wanted: int) -> int:
    """The higher of two limits, of which the present one may be none at all."""
    resource: Any = importlib.import_module("resource")
    return present if present == resource.RLIM_INFINITY else max(present, wanted)
