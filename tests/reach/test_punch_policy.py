"""When a peer is worth another punch."""

from __future__ import annotations

import pytest

from shoal.base.bounded import MOST
from shoal.peers.identity import Identity, PeerID
from shoal.reach.punching import FIRST_PAUSE, LONGEST_PAUSE, PunchPolicy

pytestmark = pytest.mark.once

HOSTS = ("8.8.4.4", "9.9.9.9")
PEER = Identity.generate().peer_id


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> PunchPolicy:
    return PunchPolicy(clock)


def test_a_peer_of_which_nothing_is_known_is_worth_it(policy: PunchPolicy) -> None:
    assert policy.allows(PEER)


def test_two_hard_sides_never_punch_until_one_is_behind_another_router(policy: PunchPolicy, clock: Clock) -> None:
    policy.note_hopeless(PEER, HOSTS)
    clock.now += 1e9
    policy.note_hosts(PEER, HOSTS)
    assert not policy.allows(PEER)
    policy.note_hosts(PEER, ("8.8.8.8", HOSTS[1]))
    assert policy.allows(PEER)


def test_an_address_of_the_other_version_of_ip_says_nothing_about_a_move(policy: PunchPolicy) -> None:
    policy.note_failure(PEER, HOSTS)
    policy.note_hosts(PEER, ("2a00:1450::1", HOSTS[1]))
    assert not policy.allows(PEER)


def test_the_pause_doubles_with_each_failure(policy: PunchPolicy, clock: Clock) -> None:
    pauses = []
    for _ in range(8):
        policy.note_failure(PEER, HOSTS)
        failed_at = clock.now
        while not policy.allows(PEER):
            clock.now += 1
        pauses.append(clock.now - failed_at)
    assert pauses == [120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)


def test_a_success_ends_the_pause_and_begins_the_count_anew(policy: PunchPolicy, clock: Clock) -> None:
    for _ in range(3):
        policy.note_failure(PEER, HOSTS)
    policy.note_success(PEER, HOSTS)
    assert policy.allows(PEER)
    policy.note_failure(PEER, HOSTS)
    clock.now += FIRST_PAUSE
    assert policy.allows(PEER)


@pytest.mark.parametrize("hosts", [("8.8.8.8", HOSTS[1]), (HOSTS[0], "8.8.8.8")])
def test_a_failure_is_forgotten_behind_another_router(policy: PunchPolicy, hosts: tuple[str, str]) -> None:
    policy.note_failure(PEER, HOSTS)
    policy.note_hosts(PEER, HOSTS)
    assert not policy.allows(PEER)
    policy.note_hosts(PEER, hosts)
    assert policy.allows(PEER)


def test_a_failure_is_forgotten_in_another_network(policy: PunchPolicy) -> None:
    policy.note_failure(PEER, HOSTS)
    policy.clear()
    assert policy.allows(PEER)


def test_a_failure_elsewhere_is_the_first_one(policy: PunchPolicy, clock: Clock) -> None:
    for _ in range(5):
        policy.note_failure(PEER, HOSTS)
    policy.note_hosts(PEER, ("8.8.8.8", HOSTS[1]))
    policy.note_failure(PEER, ("8.8.8.8", HOSTS[1]))
    clock.now += FIRST_PAUSE
    assert policy.allows(PEER)


def test_memory_is_bounded(policy: PunchPolicy) -> None:
    policy.note_failure(PEER, HOSTS)
    others = [PeerID.from_public_key(number.to_bytes(32, "big")) for number in range(MOST)]
    for other in others[:-1]:
        policy.note_failure(other, HOSTS)
    assert not policy.allows(PEER)
    policy.note_failure(others[-1], HOSTS)
    assert policy.allows(PEER)  # the oldest is forgotten
    assert not policy.allows(others[0])
    assert len(policy) == MOST
