"""How long the members of a round wait for one of them, and what they agree on."""

from __future__ import annotations

import pytest

from shoal.averaging.round.waits import Missing, Waits

OWN, SLOW, FAST, CLIENT = range(4)
REDUCERS = [OWN, SLOW, FAST]


class Watch:
    """The waits of a member whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = Waits(lambda: self.now)


def test_only_a_member_that_is_missing_alone_is_waited_for() -> None:
    watch = Watch()
    watch.waits.miss([SLOW, FAST], Missing.PARTS)
    watch.now = 5.0
    watch.waits.miss([SLOW], Missing.PARTS)
    watch.now = 7.0
    watch.waits.miss([SLOW], Missing.AVERAGES)
    watch.now = 8.0
    watch.waits.miss([], Missing.PARTS)
    watch.now = 8.5
    watch.waits.miss([], Missing.AVERAGES)
    assert watch.waits.seconds == {SLOW: pytest.approx(3.5)}, "both at once count once"
    assert watch.waits.notable == watch.waits.seconds


@pytest.mark.parametrize(
    ("own", "reports", "agreed"),
    [
        ({SLOW: 9.0}, {FAST: {SLOW: 7.0}}, {SLOW: 7.0}),  # both say at least this
        ({}, {FAST: {SLOW: 7.0}}, {}),
        ({SLOW: 9.0}, {FAST: {}}, {}),
        ({SLOW: 9.0}, {FAST: {SLOW: 7.0}, CLIENT: {FAST: 100.0}}, {SLOW: 7.0}),  # a client does not know why
        ({SLOW: 9.0}, {FAST: {SLOW: 7.0}, SLOW: {FAST: 100.0}}, {SLOW: 7.0}),
        ({SLOW: 9.0}, {FAST: {SLOW: 7.0}, SLOW: {OWN: 100.0}}, {SLOW: 7.0}),
        ({SLOW: 9.0}, {}, {SLOW: 9.0}),  # the others have died
        ({SLOW: 0.9}, {FAST: {SLOW: 7.0}}, {}),  # not worth telling
    ],
)
def test_more_than_half_of_the_other_reducers_must_have_waited(own, reports, agreed) -> None:
    watch = Watch()
    watch.waits.seconds = own
    for reporter, seconds in reports.items():
        watch.waits.hear(reporter, seconds)
    watch.waits.agree(OWN, REDUCERS)
    assert watch.waits.agreed == agreed


def test_a_coordinator_that_reduces_nothing_leaves_it_to_the_others() -> None:
    watch = Watch()
    watch.waits.hear(FAST, {SLOW: 7.0})
    watch.waits.agree(CLIENT, REDUCERS)
    assert watch.waits.agreed == {SLOW: 7.0}


def test_only_the_coordinator_waits_for_the_last_report() -> None:
    watch = Watch()
    watch.waits.seconds = {SLOW: 2.0}
    watch.waits.hear(FAST, {SLOW: 2.0})
    watch.waits.miss([SLOW], Missing.REPORT)
    watch.now = 4.0
    watch.waits.agree(OWN, REDUCERS)
    assert watch.waits.agreed == {SLOW: 6.0}
