"""How many files and sockets this process may have open."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def increase_file_limit(new_soft: int = 2**15, new_hard: int = 2**15) -> None:
    """Allow this process more open files and sockets. Never lowers a limit and never raises.

    Args:
        new_soft: the limit that counts.
        new_hard: up to which it may be raised without further rights.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for allowed in (_higher(hard, new_hard), hard):  # only the superuser may raise the hard limit
        wanted = _higher(soft, new_soft)
        if allowed != resource.RLIM_INFINITY:
            wanted = allowed if wanted == resource.RLIM_INFINITY else min(wanted, allowed)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))
            break
        except (ValueError, OSError) as e:
            logger.debug("cannot allow %d open files (at most %d): %s", wanted, allowed, e)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _higher(soft, new_soft) != soft:
        logger.info("at most %d files and sockets can be open in this process, not the wanted %d", soft, new_soft)


def _higher(present: int, wanted: int) -> int:
    """The higher of two limits, of which the present one may be none at all."""
    import resource

    return present if present == resource.RLIM_INFINITY else max(present, wanted)
