"""Downloads a state and tries it, from one donor after another, until one can be taken over.

Used by both optimizers. The caller puts the state in place, and refuses it with a ``ValueError``; a user's hook can
refuse it as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.averaging.state.download import GivenState, State
from shoal.base.logs import Seldom, one_line
from shoal.errors import StateRefusedError
from shoal.optim.setup.training_state import OlderStateError
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

CheckState = Callable[[], object]
"""The user's hook. It looks at a downloaded state that is in place. It refuses by returning something false other than
``None``, or by raising :class:`~shoal.errors.StateRefusedError`."""

Download = Callable[["float | None", frozenset[PeerID]], "State | None"]


# After this many states older than its own, a peer stops instead of asking the next donor at once.
MOST_OLDER = 2


class _CheckFailed(Exception):
    """Wraps a ``ValueError`` of the user's hook, which would otherwise be taken for the error of a bad state."""

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


def check(check_state: CheckState | None) -> None:
    """Call the user's hook, if there is one.

    Raises:
        StateRefusedError: the hook refuses the state.
    """
    try:
        verdict = None if check_state is None else check_state()
    except StateRefusedError:
        raise
    except ValueError as e:
        raise _CheckFailed(e) from e
    if verdict is not None and not verdict:
        raise StateRefusedError(f"check_state returned {verdict!r}")


@contextmanager
def refusing_nonsense() -> Iterator[None]:
    """Inside this context, what another peer has sent is taken apart. Errors that only nonsense can cause refuse it.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(f"it makes no sense: {type(e).__name__}: {one_line(str(e))}") from e


def first_accepted(
    download: Download,
    take_over: Callable[[State], object],
    leave_out: Callable[[PeerID, bytes | None], None],
    timeout: float | None,
    warn: Seldom,
    is_first: Callable[[], bool],
) -> bool:
    """Download states, one after another, until one can be taken over.

    Args:
        download: downloads a state within some seconds, without asking certain peers.
        take_over: puts a state in place; raises ``ValueError`` if it is refused.
        leave_out: is told the donor of a refused state, and the state's version if the user's hook refused it.
        timeout: the longest time for all downloads, in seconds.
        warn: of donors whose state is refused.
        is_first: whether nobody else is in the run, so that nobody can share a state.

    Returns:
        Whether a state was taken over.
    """
    older = 0
    ends_at = None if timeout is None else time.monotonic() + timeout
    asked: frozenset[PeerID] = frozenset()
    while True:
        left = None if ends_at is None else ends_at - time.monotonic()
        if asked and left is not None and left <= 0:
            return False
        state = download(left, asked)
        if state is None:
            if not asked and is_first():
                logger.info("this peer is the first of its run: it begins with its own state")
            elif not asked:
                logger.warning("nobody shares a training state: this peer keeps its own")
            return False
        try:
            take_over(state)
        except _CheckFailed as e:
            raise e.error from None
        except ValueError as e:
            donor, version = origin_of(state)
            if donor is None:
                warn("a downloaded state is refused: %s", e)
            else:
                warn("the state of peer %s is refused: %s", donor, e, about=donor)
            if isinstance(e, OlderStateError):
                older += 1  # no reason to leave the donor out: it may be between two epochs
            elif donor is not None:
                leave_out(donor, version if isinstance(e, StateRefusedError) else None)
            if donor is None or older >= MOST_OLDER:
                return False
            asked |= {donor}
            del state  # there may not be room for two states in memory
            continue
        return True


def origin_of(state: State) -> tuple[PeerID | None, bytes | None]:
    """The donor of a state, and its version."""
    return (state.donor, state.version) if isinstance(state, GivenState) else (None, None)
