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
    for wanted_hard in (_higher(hard, new_hard), hard):  # only the superuser may raise the hard limit
        wanted_soft = _higher(soft, new_soft)
        if wanted_hard != resource.RLIM_INFINITY:
            wanted_soft = wanted_hard if wanted_soft == resource.RLIM_INFINITY else min(wanted_soft, wanted_hard)
        if (wanted_soft, wanted_hard) == (soft, hard):
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted_soft, wanted_hard))
        except (ValueError, OSError) as e:
            logger.debug("cannot allow %d open files (at most %d): %s", wanted_soft, wanted_hard, e)
        else:
            return
    logger.warning("at most %d files and sockets can be open in this process, not the wanted %d", soft, new_soft)


def _higher(present: int, wanted: int) -> int:
    """The higher of two limits, of which the present one may be none at all."""
    import resource

    return present if present == resource.RLIM_INFINITY else max(present, wanted)
