"""What counts of what other peers claim."""

from __future__ import annotations

import math

import pytest

from shoal.optim.evidence import Evidence
from shoal.optim.progress import Companion, LocalTrainingProgress
from shoal.p2p.addresses import host_of
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr

NOW, OWN, BATCH = 1e9, b"own", 8
PEERS = [Identity.generate().peer_id.to_bytes() for _ in range(6)]
FRIEND, LIAR = PEERS[0], PEERS[-1]


def claim(peer: bytes, epoch: int = 0, samples: int = 0, speed: float = 0.0, client: bool = False) -> Companion:
    record = LocalTrainingProgress(peer, epoch, samples, speed, NOW, client)
    return Companion(record, math.inf)


def claims(*epochs: int) -> dict[bytes, Companion]:
    return {peer: claim(peer, epoch) for peer, epoch in zip(PEERS, epochs, strict=False)}


def newcomer(host_of=bytes) -> Evidence:
    return Evidence(OWN, host_of, NOW)


def veteran(*friends: bytes, seconds: float = 10.0) -> Evidence:
    """It has been in three rounds with its friends, to each of which they have brought a hundred samples."""
    evidence = newcomer()
    for epoch in range(3):
        now = NOW + epoch * seconds + seconds
        evidence.begin_to_wait(friends, now - 1, 5.0)
        evidence.note_round({OWN: 100.0, **dict.fromkeys(friends, 100.0)}, now)
        evidence.note_epoch(epoch, epoch + 1, now, with_others=True)
    return evidence


def believed(
    evidence: Evidence, companions: dict[bytes, Companion], own: int, now: float, end: float = math.inf
) -> set:
    """The epochs that are, by peer."""
    return set(evidence.credible(companions, own, now, lambda rest: end))


def test_before_the_first_round_claims_count_as_they_are():
    evidence = newcomer()
    record = claim(LIAR, samples=10**9, speed=1e9).record
    assert evidence.limited(record, NOW, BATCH) is record
    assert evidence.is_proven(LIAR)
    assert evidence.whom_to_wait_for({LIAR}, NOW) == {LIAR}
    assert believed(evidence, claims(2), 0, NOW) == {FRIEND}
    caller = claim(LIAR)
    caller.end = NOW + 1
    assert evidence.called_end({LIAR: caller}, 0, NOW + 100, NOW) == NOW + 1


def test_samples_count_up_to_twice_what_was_delivered_and_a_batch():
    evidence = veteran(FRIEND)
    now = NOW + 30
    honest = claim(FRIEND, samples=90, speed=11.0).record
    assert evidence.limited(honest, now, BATCH) is honest
    limited = evidence.limited(claim(FRIEND, samples=10**9, speed=1e9).record, now, BATCH)
    assert (limited.samples_accumulated, limited.samples_per_second) == (208, pytest.approx(20))
    later = evidence.limited(claim(FRIEND, samples=10**9).record, now + 100, BATCH)
    assert later.samples_accumulated == 2008, "the epoch may have become longer"
    limited = evidence.limited(claim(LIAR, samples=10**9, speed=1e9).record, now, BATCH)
    assert (limited.samples_accumulated, limited.samples_per_second) == (BATCH, 0.0)


def test_where_weights_are_no_samples_they_are_not_limited():
    evidence = newcomer()
    evidence.note_round({OWN: math.inf, FRIEND: math.inf}, NOW + 10)
    record = claim(FRIEND, samples=10**9, speed=1e9).record
    assert evidence.limited(record, NOW + 10, BATCH) is record


def test_a_round_in_which_nothing_counted_proves_nothing():
    evidence = newcomer()
    evidence.note_round({OWN: 0.0, FRIEND: 0.0}, NOW + 10)
    assert not evidence.knows_rounds


def test_the_run_is_where_most_are():
    friends = PEERS[:3]
    evidence, now = veteran(*friends), NOW + 31
    assert believed(evidence, claims(3, 3, 10**6), 3, now) == set(PEERS[:2])
    assert believed(evidence, claims(9, 9, 10**6), 3, now) == set(PEERS[:2]), "the line was away for a moment"
    assert believed(evidence, claims(9, 9, 9), 3, now) == set(friends)


def test_a_newcomer_follows_one_donor_and_not_one_of_many_liars_on_one_host():
    assert believed(newcomer(), claims(50), 0, NOW) == {FRIEND}
    assert believed(newcomer(), claims(50, 50, 10**6), 0, NOW) == set(PEERS[:2])
    together = newcomer(host_of=lambda peer: b"one host" if peer in PEERS[2:] else peer)
    assert believed(together, claims(50, 50, 10**6, 10**6, 10**6), 0, NOW) == set(PEERS[:2])


def test_who_was_deceived_once_counts_itself_for_a_while():
    evidence = newcomer()
    assert believed(evidence, claims(10**6), 0, NOW) == {FRIEND}
    evidence.note_vain_attempt(NOW, 2.0)
    assert believed(evidence, claims(10**6), 0, NOW + 39) == set()
    assert believed(evidence, claims(10**6), 0, NOW + 41) == {FRIEND}, "it may have been the line"


def test_who_was_away_believes_what_the_run_can_have_reached():
    evidence = veteran(FRIEND)
    assert believed(evidence, claims(9), 3, NOW + 40) == set(), "an epoch takes ten seconds"
    assert believed(evidence, claims(9), 3, NOW + 70) == {FRIEND}
    assert believed(evidence, claims(10**6), 3, NOW + 70) == set()


def test_an_epoch_is_over_for_all_when_one_says_so_after_half_of_it():
    evidence, end = veteran(FRIEND), NOW + 40
    assert believed(evidence, claims(4), 3, NOW + 34, end) == set()
    assert believed(evidence, claims(4), 3, NOW + 35, end) == {FRIEND}
    assert believed(evidence, {LIAR: claim(LIAR, 4)}, 3, NOW + 35, end) == set(), "it has been in no round"
    for peer, expected in ((FRIEND, NOW + 35), (LIAR, math.inf)):
        caller = claim(peer, 3)
        caller.end = NOW + 31
        assert evidence.called_end({peer: caller}, 3, end, NOW + 31) == expected
        assert evidence.called_end({peer: caller}, 2, end, NOW + 31) == math.inf


def test_clients_lead_nobody():
    assert believed(veteran(FRIEND), {LIAR: claim(LIAR, 10**6, client=True)}, 3, NOW + 31) == {LIAR}


def test_who_never_comes_is_waited_for_seldom(caplog):
    evidence, now = veteran(FRIEND), NOW + 40
    assert evidence.whom_to_wait_for({FRIEND, LIAR}, now) == {FRIEND, LIAR}, "it may be a newcomer"
    evidence.begin_to_wait({FRIEND, LIAR}, now, 3.0)
    evidence.note_round({OWN: 1.0, FRIEND: 1.0}, now + 60)
    assert evidence.whom_to_wait_for({FRIEND, LIAR}, now + 61) == {FRIEND}
    assert evidence.whom_to_wait_for({LIAR}, now + 61) == {LIAR}, "better than nobody"
    assert evidence.whom_to_wait_for({FRIEND, LIAR}, now + 119) == {FRIEND}
    assert evidence.whom_to_wait_for({FRIEND, LIAR}, now + 121) == {FRIEND, LIAR}, "twenty times the three seconds"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("waited in vain for peer")


def test_who_comes_no_more_loses_trust_and_wins_it_back(caplog):
    friends = PEERS[:3]
    evidence = veteran(*friends)
    for missed in range(3):
        assert evidence.is_proven(FRIEND), "a line may fail once or twice"
        evidence.begin_to_wait(friends, NOW + 40 + missed, 3.0)
        evidence.note_round(dict.fromkeys([OWN, *friends[1:]], 1.0), NOW + 41 + missed)
    assert not evidence.is_proven(FRIEND)
    assert len(caplog.records) == 1
    evidence.note_round(dict.fromkeys([OWN, *friends], 1.0), NOW + 50)
    assert evidence.is_proven(FRIEND)


def test_if_nobody_came_it_may_be_the_own_line():
    evidence = veteran(FRIEND)
    for _ in range(5):
        evidence.begin_to_wait({FRIEND}, NOW + 40, 3.0)
        evidence.note_round({}, NOW + 43)
    assert evidence.is_proven(FRIEND)


def test_a_crowd_of_liars_does_not_fill_the_log(caplog):
    evidence = veteran(FRIEND)
    for number in range(5000):
        liar = b"liar %d" % number
        assert believed(evidence, {FRIEND: claim(FRIEND, 3), liar: claim(liar, 10**6)}, 3, NOW + 31) == {FRIEND}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("one", "other", "is_one_host"),
    [
        ("/ip4/8.8.8.8/tcp/1", "/ip4/8.8.8.200/tcp/2", True),
        ("/ip4/8.8.8.8/tcp/1", "/ip4/8.8.9.8/tcp/1", False),
        ("/ip6/2a00:1450:4001::1/tcp/1", "/ip6/2a00:1450:4001:ffff::9/tcp/1", True),
        ("/ip6/2a00:1450:4001::1/tcp/1", "/ip6/2a00:1450:4002::1/tcp/1", False),
        ("/ip4/192.168.1.2/tcp/1", "/ip4/192.168.1.2/tcp/2", False),
        ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2", False),
        ("/dns4/example.com/tcp/1", "/dns4/example.com/tcp/1", False),
    ],
)
def test_a_host_is_a_network_of_public_addresses(one, other, is_one_host):
    first, second = (Identity.generate().peer_id for _ in range(2))
    same = host_of(first, [Multiaddr(one)]) == host_of(second, [Multiaddr(other)])
    assert same is is_one_host
