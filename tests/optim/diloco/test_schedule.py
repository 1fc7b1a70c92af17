"""Slots: when each fragment is due, what belongs to which slot, and where learning rate schedules stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.diloco.schedule import Schedule, SlotCounter, group_of


def test_slots_are_spread_over_the_steps_between_two_exchanges():
    assert [Schedule(4, sync_every=30).due_at(slot) for slot in range(5)] == [7, 15, 22, 30, 37]
    assert [Schedule(2, sync_every=6).due_at(slot) for slot in range(3)] == [3, 6, 9]
    assert [Schedule(3, sync_every=10).due_at(slot) for slot in range(3)] == [3, 6, 10]
    assert [Schedule(sync_every=50).due_at(slot) for slot in (-1, 0, 1)] == [0, 50, 100]


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 200))
def test_every_fragment_is_due_every_so_many_steps_and_no_slot_is_empty(fragments, more, slot):
    schedule = Schedule(fragments, sync_every=fragments + more)
    assert schedule.due_at(slot + fragments) - schedule.due_at(slot) == fragments + more
    assert schedule.fragment_of(slot + fragments) == schedule.fragment_of(slot)
    assert schedule.steps_of(slot) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either sync_every"),
        ({"sync_every": 5, "target_batch_size": 64}, "got 5 and 64"),
        ({"fragments": 0, "sync_every": 5}, "at least 1 fragment"),
        ({"fragments": 6, "sync_every": 5}, "do not fit"),
    ],
)
def test_schedules_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**options)


def test_a_peer_counts_its_steps_and_goes_where_the_swarm_is():
    counter = SlotCounter(Schedule(2, sync_every=5))
    counter.count(8)
    assert not counter.is_full
    counter.count(8)
    assert counter.is_full
    assert counter.samples == 16
    counter.go_to(1)
    assert (counter.steps, counter.samples, counter.position) == (0, 0, 2)
    counter.count(8)
    counter.go_to(1)
    assert counter.steps == 1
    counter.go_to(4)
    assert (counter.steps, counter.position) == (0, 10)


def test_schedules_stop_at_the_end_of_the_slot_and_wait_for_the_swarm():
    counter = SlotCounter(Schedule(sync_every=3))
    positions = []
    for _ in range(5):
        positions.append(counter.position)
        counter.count(1)
    assert positions == [0, 1, 2, 3, 3]
    counter.go_to(1)
    assert counter.position == 3


def test_with_a_target_of_samples_schedules_count_slots():
    counter = SlotCounter(Schedule(3, target_batch_size=64))
    counter.count(64)
    assert not counter.is_full
    assert counter.position == 0
    counter.go_to(7)
    assert counter.position == 7
    with pytest.raises(AssertionError, match="nobody knows"):
        counter.schedule.due_at(1)


@pytest.mark.parametrize(("peers", "size"), [(4, 2), (7, 3), (100, 2)])
def test_groups_are_drawn_anew_for_each_slot(peers, size):
    everybody = [bytes([number]) * 34 for number in range(peers)]
    met = {peer: set() for peer in everybody}
    for slot in range(40):
        found = {peer: group_of(peer, set(everybody) - {peer}, slot, size) for peer in everybody}
        for peer, (bits, members) in found.items():
            assert all(found[other] == (bits, {peer, *members} - {other}) for other in members)
            met[peer] |= members
        sizes = [1 + len(members) for _, members in found.values()]
        assert sizes.count(size) == peers // size * size
        assert len({bits for bits, _ in found.values()}) == -(-peers // size)
    assert all(len(others) > min(peers - 2, 25) for others in met.values())
