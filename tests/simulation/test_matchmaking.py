"""Peers that begin in the same window meet in one group, over slow links and failing connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median

import pytest

from shoal.averaging.groups import matchmaking
from shoal.base.clock import get_dht_time
from shoal.testing import START_OF_TIME, Link, Network
from tests.drills import mostly_drills
from tests.simulation.meetings import meet, meet_one_after_the_other
from tests.simulation.rounds import (
    STAGGER,
    WIDE_AREA,
    WINDOW,
    Interfere,
    Member,
    assert_same_bytes,
    left_out,
    run_round,
)

ALLREDUCE_SECONDS = 3.0


@pytest.mark.parametrize(("size", "rounds"), [(4, 7), (8, 7), pytest.param(16, 3, marks=pytest.mark.slow_drill)])
def test_all_meet_in_one_group_and_average_exactly(size, rounds):
    for seed in range(rounds):
        members = run_round(seed, size)
        assert {member.group_size for member in members} == {size}, f"seed {seed}"
        assert all(member.result.share_averaged == 1 for member in members)
        assert all(not member.result.failed_peers for member in members)
        assert_same_bytes(members)
        assert left_out(members[0], size, ()) == {frozenset()}
        assert max(member.ended for member in members) < WINDOW + STAGGER + ALLREDUCE_SECONDS


@pytest.mark.parametrize("distributed", mostly_drills([False, True]))
def test_many_meet_whatever_the_table(distributed):
    size = 32
    for seed in range(2):
        meeting = meet(seed, size, distributed=distributed)
        assert meeting.group_sizes == {size: size}, f"seed {seed}"
        assert meeting.seconds < WINDOW + STAGGER + 1


@pytest.mark.slow_drill
def test_many_meet_on_very_bad_links():
    link = Link(delay=(0.02, 0.3), jitter=0.05, dial_failure=0.05)
    size = 64
    for seed in range(4):
        assert meet(seed, size, distributed=False, link=link).group_sizes == {size: size}, f"seed {seed}"


def test_all_meet_in_one_group_although_connections_break():
    link = Link(delay=WIDE_AREA.delay, jitter=0.01, dial_failure=0.02, break_rate=0.02)  # one in ten breaks
    size = 12
    for seed in range(5):
        members = run_round(seed, size, link=link)
        assert {member.group_size for member in members} == {size}, f"seed {seed}"
        assert_same_bytes(members)
        left_out(members[0], size, range(size), at_most=2)


def leader_and_followers(members: list[Member]) -> tuple[Member, list[Member]]:
    """While a group is open: who leads it, and who follows by now."""
    for member in members:
        current = member.node.lanes[""].matchmaking.current
        if current is not None and current.search.followers:  # one that follows another has none
            return member, [each for each in members if each.node.p2p.peer_id in current.search.followers]
    raise AssertionError("nobody leads")


def at(time: float, action: Callable[[Network, list[Member]], None]) -> Interfere:
    """Do something to the network at a loop time."""

    def interfere(network: Network, members: list[Member]) -> None:
        asyncio.get_running_loop().call_at(time, action, network, members)

    return interfere


def start_time(members: list[Member]) -> float:
    """When the leader starts the group, unless something keeps it, in loop time."""
    leader, _ = leader_and_followers(members)
    current = leader.node.lanes[""].matchmaking.current
    assert current is not None
    return current.search.promise - START_OF_TIME


@pytest.mark.parametrize("before_start", mostly_drills([0.01, -0.01, 1.0, 0.3, -0.1], quick=2))
def test_follower_whose_connection_breaks_around_the_start_is_a_member(before_start):
    broken = []

    def break_one(network: Network, leader: Member, follower: Member) -> None:
        broken.append(follower)
        network.break_connections(leader.host, follower.host)

    def choose(network: Network, members: list[Member]) -> None:
        leader, followers = leader_and_followers(members)
        when = start_time(members) - before_start
        asyncio.get_running_loop().call_at(when, break_one, network, leader, followers[0])

    for seed in range(3):
        members = run_round(seed, 5, link=Link(delay=0.15), interfere=at(3.0, choose))
        assert {member.group_size for member in members} == {5}
        assert_same_bytes(members)
        assert max(member.ended for member in members) < WINDOW + STAGGER + ALLREDUCE_SECONDS
    assert len(broken) == 3


def test_follower_whose_connection_breaks_while_the_leader_waits_for_another_is_a_member():
    def break_two(network: Network, members: list[Member]) -> None:
        leader, followers = leader_and_followers(members)
        begin = start_time(members)
        for follower, when in zip(followers, (begin - 0.2, begin + 0.6), strict=False):
            asyncio.get_running_loop().call_at(when, network.break_connections, leader.host, follower.host)

    for seed in range(3):
        members = run_round(seed, 6, link=Link(delay=0.15), interfere=at(3.0, break_two))
        assert {member.group_size for member in members} == {6}
        assert_same_bytes(members)


def test_a_leader_that_could_not_be_reached_is_asked_again_when_others_follow_it():
    def find_out(network: Network, members: list[Member]) -> None:
        """The first peer that begins is going to lead; one other cannot connect to it at first."""
        first = next(member for member in members if member.step is not None)
        other = next(member for member in members if member.step is None)
        reachable = Link(delay=0.02)
        network.set_link(first.host, other.host, Link(delay=0.02, dial_failure=1.0))
        asyncio.get_running_loop().call_later(2.0, network.set_link, first.host, other.host, reachable)

    def when_one_has_begun(network: Network, members: list[Member]) -> None:
        if any(member.step is not None for member in members):
            find_out(network, members)
        else:
            asyncio.get_running_loop().call_later(0.001, when_one_has_begun, network, members)

    for seed in range(4):
        members = run_round(seed, 8, link=Link(delay=0.02), interfere=when_one_has_begun)
        assert {member.group_size for member in members} == {8}, f"seed {seed}"


@pytest.mark.parametrize("size", [2, 5])
def test_no_group_is_lost_because_time_passes_between_two_looks_at_the_clock(monkeypatch, size):
    """A leader whose time comes in just this moment starts; it does not send its followers away."""
    calls = 0

    def clock() -> float:
        """As on a real machine, each look is a little later than the one before."""
        nonlocal calls
        calls += 1
        return get_dht_time() + 1e-3 * (calls % 2) - 0.5e-3

    monkeypatch.setattr(matchmaking, "get_dht_time", clock)
    for seed in range(20):
        calls = seed
        members = run_round(seed, size, link=Link(delay=(1e-4, 5e-4)))
        assert {member.group_size for member in members} == {size}, f"seed {seed}"
        assert max(member.ended for member in members) < WINDOW + STAGGER + ALLREDUCE_SECONDS, f"seed {seed}"


def test_who_comes_one_after_the_other_finds_full_groups():
    """Most of the peers that the table shows are in groups that have started: they must not be asked one by one."""
    sizes = meet_one_after_the_other(1, 100, 16, seconds=20.0)
    assert median(sizes) >= 14, sorted(sizes)
    assert sum(size < 8 for size in sizes) < len(sizes) / 5, sorted(sizes)
