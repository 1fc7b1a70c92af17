"""Talk about progress stays cheap: bars in bytes per peer and second, and at the end of an epoch."""

from __future__ import annotations

import pytest

from tests.simulation.talking import talk_in_epochs, talk_without_end


@pytest.mark.parametrize("working", [False, True], ids=["idle", "working"])
@pytest.mark.parametrize(("peers", "bar"), [(4, 1000), (16, 2000)])
def test_while_no_epoch_ends(peers, bar, working):
    talk = talk_without_end(peers, working=working, seconds=60)
    assert 0 < talk.rate <= bar, talk.by_handler


@pytest.mark.parametrize(("peers", "epochs"), [(4, 30), pytest.param(10, 8, marks=pytest.mark.slow_drill)])
def test_the_end_of_an_epoch_costs_a_few_calls_and_comes_on_time(peers, epochs):
    talk = talk_in_epochs(peers, epochs=epochs, slowness=(1.0, 1.4, 2.5))
    assert len(talk.samples) >= epochs - 2
    assert 0 < talk.bytes_per_member <= 300, talk.by_handler
    assert all(0.99 * talk.target <= samples <= 1.01 * talk.target for samples in talk.samples)


def test_the_end_comes_on_time_where_speeds_change_in_the_middle_of_an_epoch():
    talk = talk_in_epochs(4, epochs=10, slowness=(1.0, 1.4, 2.5), unsteadiness=0.5)
    assert all(0.97 * talk.target <= samples <= 1.03 * talk.target for samples in talk.samples)


def test_records_in_the_table_are_not_renewed_for_each_epoch():
    talk = talk_in_epochs(4, seconds=2.0, epochs=30)
    assert len(talk.samples) >= 20
    assert 0 < talk.by_handler["rpc_store"] <= 100, "a record in half a minute"
