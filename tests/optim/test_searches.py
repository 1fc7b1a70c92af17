"""When a search for a group is over before its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from shoal.averaging import StepControl
from shoal.optim.joint_optimizer import watch_search
from shoal.p2p import PeerID
from shoal.peers.identity import Identity

A, B, C, D = (Identity.generate().peer_id for _ in range(4))


class Tracker:
    """Knows which peers can still come."""

    def __init__(self) -> None:
        self.coming, self.tell = {A, B, C, D}, lambda: None
        self.looks_after_others = False

    def expected_members(self) -> set[PeerID]:
        return self.coming

    def still_expected(self, last_epochs: Mapping[PeerID, int]) -> set[PeerID]:
        return self.coming & last_epochs.keys()

    def look_after_others(self) -> None:
        self.looks_after_others = True

    def watch(self, tell: Callable[[], None]) -> None:
        self.tell = tell

    def unwatch(self, tell: Callable[[], None]) -> None:
        assert tell == self.tell


@pytest.mark.parametrize(
    ("last_epochs", "electorate", "left", "goes_on"),
    [
        (None, None, {A}, True),
        (None, None, set(), False),
        ({A: 1}, None, {A}, True),
        ({A: 1}, None, {B}, False),
        (None, {A: 1, B: 1, C: 1, D: 1}, {A, B}, True),
        (None, {A: 1, B: 1, C: 1, D: 1}, {A}, False),  # two of five
        (None, {A: 1}, {A}, True),
    ],
)
def test_a_search_continues_while_enough_can_come(last_epochs, electorate, left, goes_on):
    tracker, control = Tracker(), StepControl(0.0)
    watch_search(control, tracker, last_epochs, electorate)
    assert not control.cancelled()
    tracker.coming = left
    tracker.tell()
    assert control.cancelled() is not goes_on


def test_a_search_waits_for_a_majority():
    """Two halves that were complete with their own members alone would start apart, again and again."""
    tracker, control = Tracker(), StepControl(0.0)
    watch_search(control, tracker, {A: 1}, dict.fromkeys([A, B, C, D], 1))
    assert (control.awaited, control.expected_group_size) == ({A}, 3)


def test_a_peer_that_cannot_be_called_is_not_waited_for_until_the_next_regular_look():
    tracker, control = Tracker(), StepControl(0.0)
    watch_search(control, tracker)
    assert not tracker.looks_after_others
    control.on_loss()
    assert tracker.looks_after_others, "nothing else tells soon that it is dead"
    assert not control.cancelled()
    tracker.coming = set()
    tracker.tell()
    assert control.cancelled()
