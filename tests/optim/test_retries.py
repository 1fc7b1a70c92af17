"""Downloads that fail: tried again at once, and then more and more rarely."""

from __future__ import annotations

import itertools
import threading
from unittest.mock import MagicMock, Mock

import pytest

from shoal.optim.recovery.when import LONGEST_PAUSE, LONGEST_WAIT, Retries, Synchronization


class Waiting(threading.Event):
    """An event for which time passes only while somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout <= LONGEST_WAIT
        self.now += timeout
        return self.is_set()


def attempts_in(retries: Retries, closing: Waiting, seconds: float) -> list[float]:
    """When a caller that asks again and again may try, if all attempts fail; seconds from the beginning."""
    began, attempts = closing.now, []
    while closing.now < began + seconds:
        if retries.is_time():
            attempts.append(closing.now - began)
            retries.note(succeeded=False)
    return attempts


def test_later_retries_pause_longer() -> None:
    closing = Waiting()
    retries = Retries(closing, lambda: closing.now)
    attempts = attempts_in(retries, closing, 600.0)
    assert attempts[:4] == [0.0, 0.0, 0.0, 0.0]
    pauses = [after - before for before, after in itertools.pairwise(attempts[3:])]
    assert pauses[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert set(pauses[5:]) == {LONGEST_PAUSE}


def test_a_success_makes_retries_quick_again() -> None:
    closing = Waiting()
    retries = Retries(closing, lambda: closing.now)
    assert len(attempts_in(retries, closing, 100.0)) < 12
    retries.note(succeeded=True)
    assert attempts_in(retries, closing, 1.0) == [0.0] * 4


def synchronization_of(averager: Mock, closing: Waiting) -> Synchronization:
    tracker = MagicMock(gives_way_to=None, global_epoch=5, knows_others=False, board=Mock(batch_time=3.0))
    step = Mock(options=Mock(mode=Mock(overlaps=False)))
    synchronization = Synchronization(averager, None, tracker, step, 1.0, 1.0, closing)
    synchronization.retries = Retries(closing, lambda: closing.now)
    return synchronization


def test_failed_downloads_become_rare() -> None:
    closing, averager = Waiting(), Mock(local_epoch=0, client_mode=False)
    averager.load_state_from_peers.return_value = False
    synchronization = synchronization_of(averager, closing)
    began, steps = closing.now, 0
    while closing.now < began + 300.0:
        steps += 1
        assert synchronization.is_needed()
        if synchronization.is_time():
            assert not synchronization.download()
            synchronization.note_attempt(loaded=False)
    assert averager.load_state_from_peers.call_count == 12
    assert steps > 300, "each step of the optimizer takes a moment, so that it notices when the need is over"


def test_nobody_gives_way_to_a_side_that_has_died(caplog: pytest.LogCaptureFixture) -> None:
    averager = Mock(local_epoch=5, client_mode=False)
    synchronization = synchronization_of(averager, Waiting())
    tracker = synchronization._tracker
    tracker.gives_way_to = Mock(winners=[b"peer"], epoch=6)
    tracker.ask_others.side_effect = lambda seconds: setattr(tracker, "gives_way_to", None)
    assert not synchronization.download()
    averager.load_state_from_peers.assert_not_called()
    assert not caplog.records, "nothing is lost"
