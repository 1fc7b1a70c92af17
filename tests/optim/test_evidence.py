"""What counts of what other peers claim."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from shoal.base.logs import MOST_LINES_OF_A_KIND
from shoal.net.addresses import host_of
from shoal.net.transport import MOST
from shoal.optim.evidence import OpenGuard
from shoal.optim.progress.records import Companion, LocalTrainingProgress
from shoal.peers.identity import Identity, PeerID
from shoal.peers.multiaddr import Multiaddr

pytestmark = pytest.mark.once

NOW, OWN, BATCH = 1e9, b"own", 8
PEERS = [Identity.generate().peer_id.to_bytes() for _ in range(6)]
FRIEND, LIAR = PEERS[0], PEERS[-1]


def claim(peer: bytes, epoch: int = 0, samples: int = 0, speed: float = 0.0, client: bool = False) -> Companion:
    record = LocalTrainingProgress(peer, epoch, samples, speed, NOW, client)
    return Companion(record, math.inf, heard_at=NOW)


def claims(*epochs: int) -> dict[bytes, Companion]:
    return {peer: claim(peer, epoch) for peer, epoch in zip(PEERS, epochs, strict=False)}


def newcomer(host_of=bytes) -> OpenGuard:
    return OpenGuard(OWN, host_of, NOW)


def veteran(*friends: bytes, seconds: float = 10.0) -> OpenGuard:
    """It has been in three rounds with its friends, to each of which they have brought a hundred samples."""
    evidence = newcomer()
    for epoch in range(3):
        now = NOW + epoch * seconds + seconds
        evidence.begin_to_wait(friends, now - 1, 5.0)
        evidence.note_round({OWN: 100.0, **dict.fromkeys(friends, 100.0)}, now)
        evidence.pace.note_epoch(epoch, epoch + 1, now, with_others=True)
    return evidence


def count(evidence: OpenGuard, record: LocalTrainingProgress, now: float) -> LocalTrainingProgress:
    """What counts of the progress of one peer."""
    [limited] = evidence.limited([record], now, BATCH)
    return limited


def believed(
    evidence: OpenGuard, companions: dict[bytes, Companion], own: int, now: float, end: float = math.inf
) -> set:
    """The epochs that are, by peer."""
    return set(evidence.credible(companions, own, now, lambda rest: end))


def test_before_the_first_round_claims_count_as_they_are():
    evidence = newcomer()
    record = claim(LIAR, samples=10**9, speed=1e9).record
    assert count(evidence, record, NOW) is record
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
    assert count(evidence, honest, now) is honest
    limited = count(evidence, claim(FRIEND, samples=10**9, speed=1e9).record, now)
    assert (limited.samples_accumulated, limited.samples_per_second) == (208, pytest.approx(200 / 9))
    later = count(evidence, claim(FRIEND, samples=10**9).record, now + 100)
    assert later.samples_accumulated == BATCH + 2 * 100 * 100 // 9, "the epoch may have become longer"
    limited = count(evidence, claim(LIAR, samples=10**9, speed=1e9).record, now)
    assert (limited.samples_accumulated, limited.samples_per_second) == (BATCH, 0.0)


def test_where_weights_are_no_samples_they_are_not_limited():
    evidence = newcomer()
    evidence.note_round({OWN: math.inf, FRIEND: math.inf}, NOW + 10)
    record = claim(FRIEND, samples=10**9, speed=1e9).record
    assert count(evidence, record, NOW + 10) is record


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


def test_one_epoch_that_ended_at_once_does_not_make_all_epochs_possible():
    evidence = veteran(FRIEND)
    evidence.pace.trained_until = NOW + 30
    evidence.pace.note_epoch(3, 4, NOW + 30.1, with_others=True)
    assert evidence.pace.reach(4, NOW + 90) <= 4 + 2 * 60 / (9 / 4) + 1


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


def test_who_is_beyond_this_epoch_counts_in_the_estimate_of_its_end_with_its_speed():
    evidence = veteran(FRIEND)
    seen = []

    def estimate(companions: dict[bytes, Companion]) -> float:
        seen.append(companions[FRIEND].record)
        return math.inf

    evidence.credible({FRIEND: claim(FRIEND, 4, samples=5, speed=9.0)}, 3, NOW + 35, estimate)
    [record] = seen
    assert (record.epoch, record.samples_accumulated, record.samples_per_second) == (3, 0, 9.0)
    assert record.time == NOW + 30, "when this epoch began"


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
    assert line.startswith(f"waited in vain for peer {PeerID(LIAR)} in 1 round running")
    assert evidence.troubles == Counter({"waited in vain": 1})


def test_who_comes_no_more_loses_trust_and_wins_it_back(caplog):
    friends = PEERS[:3]
    evidence = veteran(*friends)
    for missed in range(3):
        assert evidence.is_proven(FRIEND), "a line may fail once or twice"
        evidence.begin_to_wait(friends, NOW + 40 + missed, 3.0)
        evidence.note_round(dict.fromkeys([OWN, *friends[1:]], 1.0), NOW + 41 + missed)
    assert not evidence.is_proven(FRIEND)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"waited in vain for peer {PeerID(FRIEND)} in 3 rounds running")
    assert evidence.troubles == Counter({"waited in vain": 3})
    evidence.note_round(dict.fromkeys([OWN, *friends], 1.0), NOW + 50)
    assert evidence.is_proven(FRIEND)


def test_if_nobody_came_it_may_be_the_own_line():
    evidence = veteran(FRIEND)
    for _ in range(5):
        evidence.begin_to_wait({FRIEND}, NOW + 40, 3.0)
        evidence.note_round({}, NOW + 43)
    assert evidence.is_proven(FRIEND)


def test_who_is_alone_although_others_are_there_is_told_once(caplog):
    evidence = veteran(FRIEND)
    evidence.note_round({}, NOW + 40, {FRIEND: claim(FRIEND, 3)}, 3)
    evidence.note_round({}, NOW + 50, {FRIEND: claim(FRIEND, 4)}, 3)
    evidence.note_round({}, NOW + 60, {FRIEND: claim(FRIEND, 3)}, 3)
    assert not caplog.records, "one step may fail, and nobody else may be there"
    for number in range(3):
        evidence.note_round({}, NOW + 70 + number, {FRIEND: claim(FRIEND, 3)}, 3)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("this peer has made 2 steps alone, although 1 other peer could have come")
    assert str(PeerID(FRIEND)) in line
    assert evidence.troubles == Counter({"alone": 5})
    evidence.note_round({OWN: 1.0, FRIEND: 1.0}, NOW + 80, {FRIEND: claim(FRIEND, 3)}, 3)
    for number in range(2):
        evidence.note_round({}, NOW + 90 + number, {FRIEND: claim(FRIEND, 3)}, 3)
    assert len(caplog.records) == 2


def test_who_was_always_alone_no_longer_waits_for_those_who_never_come():
    """A stranger that says it takes part would hold up somebody who trains alone in each epoch, for ever."""
    evidence, others = newcomer(), {peer: claim(peer, epoch=0, samples=10**9, speed=1e6) for peer in PEERS[:2]}
    records = [other.record for other in others.values()]
    for epoch in range(3):
        now = NOW + 60 * epoch
        assert evidence.whom_to_wait_for({*others}, now) == {*others}
        evidence.begin_to_wait(others, now, 5.0)
        evidence.note_round({}, now + 60, others)
    assert evidence.whom_to_wait_for({*others}, NOW + 180) == set()
    assert max(record.samples_accumulated for record in evidence.limited(records, NOW + 180, BATCH)) == BATCH
    assert evidence.whom_to_wait_for({*others}, NOW + 180 + 20 * 60) == {*others}, "for a twentieth of the time"
    evidence.note_round({OWN: 100.0, PEERS[0]: 100.0}, NOW + 190, others)
    assert evidence.whom_to_wait_for({PEERS[0]}, NOW + 190) == {PEERS[0]}


def test_a_second_liar_is_named_too(caplog):
    evidence = veteran(FRIEND)
    companions = {FRIEND: claim(FRIEND, 3), **{liar: claim(liar, 10**6) for liar in PEERS[4:]}}
    assert believed(evidence, companions, 3, NOW + 31) == {FRIEND}
    assert all(str(PeerID(liar)) in caplog.text for liar in PEERS[4:])
    assert evidence.troubles == Counter({"epochs that cannot be": 2})


def test_who_only_watches_a_run_is_told_where_the_run_is(caplog):
    """An archiver is at epoch 0 for ever, which says nothing of what others claim."""
    companions = {**claims(40, 40, 40), LIAR: claim(LIAR, 10**6)}
    assert believed(newcomer(), companions, 0, NOW) == set(PEERS[:3])
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"peer {PeerID(LIAR)} says that it is at epoch 1000000, and the run is at epoch 40:")


@pytest.mark.parametrize("watches", [newcomer, lambda: newcomer(lambda peer: "the same house")])
def test_peers_that_have_died_are_no_liars(caplog, watches):
    companions = claims(41, 40, 40)
    for peer in companions:
        evidence = watches()
        believed(evidence, companions, 0, NOW)
        companions[peer].unreachable_since = NOW
    believed(evidence, companions, 0, NOW)
    assert not caplog.records
    assert not evidence.troubles


def test_of_the_peers_of_one_house_one_that_is_first_at_the_next_epoch_is_no_liar(caplog):
    evidence = newcomer(lambda peer: "the same house")
    for epochs in [(40, 41), (42, 41), (42, 40)]:
        believed(evidence, claims(*epochs), 0, NOW)
    assert not caplog.records


def test_a_crowd_of_liars_does_not_fill_the_log(caplog):
    evidence = veteran(FRIEND)
    for number in range(5000):
        liar = b"liar %d" % number
        assert believed(evidence, {FRIEND: claim(FRIEND, 3), liar: claim(liar, 10**6)}, 3, NOW + 31) == {FRIEND}
    assert len(caplog.records) == MOST_LINES_OF_A_KIND


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


def test_strangers_who_hold_up_rounds_have_no_more_time_than_those_who_do_not_come(caplog):
    evidence, now = veteran(FRIEND), NOW + 40
    evidence.note_failures([], 2.0, now)
    assert evidence.has_time_for(LIAR, now)
    evidence.note_failures([LIAR], 12.0, now)
    assert not evidence.has_time_for(LIAR, now + 199)
    assert not evidence.has_time_for(PEERS[1], now + 199), "another name costs nothing"
    assert evidence.has_time_for(FRIEND, now)
    assert evidence.whom_to_wait_for({FRIEND, LIAR}, now + 199) == {FRIEND}
    assert evidence.has_time_for(LIAR, now + 201), "twenty times the ten seconds more than usual"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("waited in vain")


def test_who_has_missed_rounds_may_come_back_although_newcomers_may_not():
    """Else two halves of a run, each of which has missed the other, would stay apart as long as newcomers cost time."""
    evidence, now = veteran(FRIEND, PEERS[1]), NOW + 40
    for _ in range(3):
        evidence.begin_to_wait({FRIEND}, now, 3.0)
        evidence.note_round({OWN: 1.0, PEERS[1]: 1.0}, now)
    evidence.note_waste([LIAR], 10.0, now)
    assert not evidence.is_proven(FRIEND)
    assert evidence.has_time_for(FRIEND, now)
    assert not evidence.has_time_for(LIAR, now)
    evidence.note_waste([FRIEND], 10.0, now)
    assert not evidence.has_time_for(FRIEND, now), "it has had its chance"
    evidence.note_round({OWN: 1.0, PEERS[1]: 1.0, FRIEND: 1.0}, now)
    assert evidence.has_time_for(FRIEND, now)


def test_one_of_the_known_that_fails_costs_newcomers_nothing():
    evidence, now = veteran(FRIEND), NOW + 40
    evidence.note_failures([FRIEND], 12.0, now)
    assert evidence.has_time_for(LIAR, now)
    evidence.note_failures([FRIEND, LIAR], 12.0, now)
    assert evidence.has_time_for(PEERS[1], now), "perhaps the known one alone has cost the time"


def test_a_leader_must_know_what_was_brought_to_its_last_round():
    evidence = veteran(FRIEND, PEERS[1])
    assert evidence.least_limit(FRIEND, OWN) == evidence.least_limit(FRIEND, PEERS[1]) == 100
    assert evidence.least_limit(FRIEND, LIAR) == 0, "it was not there"
    assert evidence.least_limit(LIAR, FRIEND) == 0, "nobody knows what this leader has seen"
    honest = veteran(OWN, PEERS[1])
    assert honest.largest_weight(PEERS[1], NOW + 30, BATCH) >= evidence.least_limit(FRIEND, PEERS[1])
    evidence.note_round({OWN: math.inf, FRIEND: math.inf}, NOW + 40)
    assert evidence.least_limit(FRIEND, OWN) == 0


# --- where a fifth of all may lie -------------------------------------------------------------------------------------

CROWD = [Identity.generate().peer_id.to_bytes() for _ in range(10)]


def crowd(epoch: int, samples: int = 50, speed: float = 5.0) -> dict[bytes, Companion]:
    return {peer: claim(peer, epoch, samples, speed) for peer in CROWD}


def test_a_fifth_of_all_ends_no_epoch():
    evidence, end, now = veteran(*CROWD), NOW + 40, NOW + 36
    for callers, expected in ((2, math.inf), (3, now)):
        companions = crowd(3)
        for peer in CROWD[:callers]:
            companions[peer].end = now
        assert evidence.called_end(companions, 3, end, now) == expected
        ahead = crowd(3) | {peer: claim(peer, 4) for peer in CROWD[:callers]}
        assert (set(CROWD[:callers]) <= believed(evidence, ahead, 3, now, end)) is (expected == now)


def test_names_on_one_host_are_one_voice():
    evidence = OpenGuard(OWN, lambda peer: b"one host" if peer in CROWD[:4] else peer, NOW)
    evidence.note_round(dict.fromkeys([OWN, *CROWD], 100.0), NOW + 10)
    companions = crowd(0)
    for peer in CROWD[:4]:
        companions[peer].end = NOW + 16
    assert evidence.called_end(companions, 0, NOW + 20, NOW + 16) == math.inf


def test_in_a_long_epoch_a_fifth_of_all_do_not_seem_to_have_gone_on():
    evidence, now = veteran(*CROWD), NOW + 300
    ahead = crowd(3) | {peer: claim(peer, 9) for peer in CROWD[:2]}
    assert believed(evidence, ahead, 3, now) == set(CROWD[2:])
    ahead = crowd(3) | {peer: claim(peer, 9) for peer in CROWD[:3]}
    assert believed(evidence, ahead, 3, now) == set(CROWD), "an epoch takes ten seconds: it may have been away"


def test_who_comes_to_a_run_under_way_is_not_deceived_by_a_fifth():
    companions = crowd(7) | {peer: claim(peer, 7, 10**9, 1e9) for peer in CROWD[:2]}
    records = [companion.record for companion in companions.values()]
    evidence = newcomer()
    assert evidence.limited(records, NOW, BATCH) == records, "in the first epoch of a run nobody knows better"
    evidence.pace.note_epoch(0, 7, NOW, with_others=True)
    limited = evidence.limited(records, NOW, BATCH)
    assert max(record.samples_accumulated for record in limited) == 2 * 50 + BATCH
    assert max(record.samples_per_second for record in limited) == 2 * 5.0


def test_who_was_deceived_in_the_first_epoch_is_not_again():
    records = [claim(peer, 0, 10**9 if peer is CROWD[0] else 50).record for peer in CROWD]
    evidence = newcomer()
    evidence.note_round({}, NOW + 5, crowd(0))
    assert max(record.samples_accumulated for record in evidence.limited(records, NOW, BATCH)) == 2 * 50 + BATCH


def test_what_was_claimed_in_the_first_epoch_does_not_count_for_ever():
    """Weights are claims, too."""
    evidence, now = newcomer(), NOW + 10
    evidence.begin_to_wait(CROWD, now - 1, 5.0)
    assert evidence.largest_weight(LIAR, now - 1, BATCH) == MOST
    evidence.note_round({OWN: 100.0, **dict.fromkeys(CROWD, 100.0), LIAR: float(MOST)}, now)
    limit = 2 * 8 * 100 + BATCH
    assert evidence.largest_weight(LIAR, now + 9, BATCH) == limit
    assert count(evidence, claim(LIAR, samples=MOST, speed=1e20).record, now).samples_accumulated <= limit


def test_a_machine_that_is_much_faster_than_all_others_soon_counts_in_full():
    evidence, made = newcomer(), 100.0 * 1000
    for epoch in range(8):
        now = NOW + 10 * epoch
        evidence.begin_to_wait(CROWD, now + 9, 5.0)
        brought = min(made, evidence.largest_weight(FRIEND, now + 9, BATCH))
        evidence.note_round({OWN: 100.0, **dict.fromkeys(CROWD, 100.0), FRIEND: brought}, now + 10)
    honest = claim(FRIEND, samples=made, speed=made / 10).record
    assert brought == made
    assert count(evidence, honest, now + 19) is honest


def test_in_a_small_swarm_a_fast_machine_counts_in_full():
    evidence = newcomer()
    evidence.begin_to_wait(PEERS[:3], NOW + 9, 5.0)
    evidence.note_round({OWN: 10.0, **dict.fromkeys(PEERS[:2], 10.0), PEERS[2]: 10**6}, NOW + 10)
    honest = claim(PEERS[2], samples=10**6, speed=10**5).record
    assert count(evidence, honest, NOW + 19) is honest


def test_what_a_leader_may_weigh_is_bounded():
    assert newcomer().most_limit(FRIEND, NOW, BATCH) == MOST, "in the first epoch nobody knows better"
    evidence, now = veteran(FRIEND, PEERS[1]), NOW + 30
    for leader in (FRIEND, LIAR):
        assert evidence.most_limit(leader, now, BATCH) <= 4 * 100 + 2 * BATCH
        assert evidence.most_limit(leader, now + 90, BATCH) >= 10 * 100, "the epoch may have become longer"
    # What honest leaders find is within that, also before their own first round.
    assert veteran(OWN, FRIEND).largest_weight(OWN, now, BATCH) <= evidence.most_limit(FRIEND, now, BATCH)
    late = newcomer()
    late.pace.note_epoch(0, 3, now, with_others=True)
    late.limited([claim(peer, 3, 100).record for peer in PEERS[:3]], now, BATCH)
    assert 100 <= late.largest_weight(OWN, now, BATCH) <= evidence.most_limit(LIAR, now, BATCH)
    assert newcomer().largest_weight(OWN, now, BATCH) == MOST


@pytest.mark.parametrize("epoch", [1, 5], ids=["the second", "a later one"])
def test_who_comes_in_the_second_epoch_is_followed_like_who_comes_later(epoch):
    """It has taken over a state, or made the first step alone, because the others had theirs already."""
    evidence, others, late, now = veteran(FRIEND, PEERS[1]), PEERS[:5], newcomer(), NOW + 30
    late.pace.note_epoch(0, epoch, now, with_others=False)
    late.limited([claim(peer, epoch, 100).record for peer in others], now, BATCH)
    assert late.largest_weight(OWN, now, BATCH, 100) <= evidence.most_limit(LIAR, now, BATCH)
    assert late.largest_weight(OWN, now, BATCH, 1000) >= 1000, "it knows how many it has made, though nobody is as fast"
    late.pace.begin_anew()
    assert late.largest_weight(OWN, now, BATCH) == MOST, "all others may have loaded the same checkpoint"


def test_who_waits_for_others_does_not_seem_slower():
    """An epoch that lasts ten seconds, and a round for which one waits for as long."""
    evidence = newcomer()
    evidence.begin_to_wait(PEERS, NOW + 10, 10.0)
    evidence.note_round(dict.fromkeys([OWN, *PEERS], 100.0), NOW + 20)
    honest = claim(FRIEND, 1, 100, 15.0).record
    assert count(evidence, honest, NOW + 30) is honest


# --- runs of several groups -------------------------------------------------------------------------------------------


def member_of_one_group_among_several() -> OpenGuard:
    evidence = newcomer()
    evidence.full_group = 3
    for epoch in range(3):
        now = NOW + 10 * epoch + 10
        evidence.begin_to_wait(PEERS, now - 1, 5.0)
        evidence.note_round({OWN: 100.0, PEERS[0]: 100.0, PEERS[1]: 100.0}, now)
        evidence.pace.note_epoch(epoch, epoch + 1, now, with_others=True)
    return evidence


def test_of_whom_it_cannot_have_met_a_peer_believes_what_others_do():
    evidence = member_of_one_group_among_several()
    honest, liar = claim(PEERS[3], 3, 90, 9.0).record, claim(LIAR, 3, 10**9, 1e9).record
    assert count(evidence, honest, NOW + 35) == honest
    most = count(evidence, liar, NOW + 35)
    assert most.samples_accumulated <= 2 * 100 + BATCH
    assert most.samples_per_second <= 2 * 100 / 9


def test_a_fast_leader_is_not_refused_by_those_who_have_not_met_it():
    """They have seen nobody in their groups bring so much. Where all meet, all know it."""
    fast, other = member_of_one_group_among_several(), member_of_one_group_among_several()
    fast.note_round({OWN: 260.0, PEERS[0]: 100.0, PEERS[1]: 100.0}, NOW + 40, claims(3, 3, 3, 3))
    other.note_round({OWN: 100.0, PEERS[2]: 100.0, PEERS[3]: 100.0}, NOW + 40, claims(3, 3, 3, 3))
    limit = fast.largest_weight(OWN, NOW + 50, BATCH, own_samples=260.0)
    assert 260 < limit <= other.most_limit(PEERS[4], NOW + 50, BATCH)
    fast.note_round({OWN: 260.0, PEERS[0]: 0.0, PEERS[1]: 0.0}, NOW + 45, claims(3, 3, 3, 3))
    assert fast.largest_weight(OWN, NOW + 50, BATCH, own_samples=260.0) > 260, "the others had nothing yet"
    fast.full_group = None
    fast.note_round({OWN: 260.0, PEERS[0]: 100.0}, NOW + 50)
    assert fast.largest_weight(OWN, NOW + 60, BATCH, own_samples=260.0) == 2 * 260 + BATCH


def test_nobody_is_missed_who_may_be_in_another_group(caplog):
    evidence = member_of_one_group_among_several()
    assert evidence.whom_to_wait_for(set(PEERS), NOW + 35) == set(PEERS)
    assert "waited in vain" not in caplog.text
    assert not evidence.is_proven(LIAR), "nor does it end epochs for others"


def test_whoever_is_known_counts_for_the_number_of_groups():
    """Who met only two others in its first round, because most came later, knows the others no less."""
    evidence = newcomer()
    evidence.full_group = 8
    evidence.note_round(dict.fromkeys([OWN, *CROWD[:2]], 100.0), NOW + 10, crowd(0))
    late = claim(CROWD[5], 1, 90, 9.0).record
    assert count(evidence, late, NOW + 20) is late


def test_where_all_fit_into_one_group_each_is_known_by_its_deeds():
    evidence = newcomer()
    evidence.full_group = 16
    evidence.begin_to_wait([FRIEND], NOW + 9, 5.0)
    evidence.note_round({OWN: 100.0, FRIEND: 100.0}, NOW + 10)
    assert count(evidence, claim(LIAR, 0, 1000, 100.0).record, NOW + 15).samples_accumulated == BATCH


def pair_among(others: dict[bytes, Companion], friend: bytes = FRIEND, own: int = 3) -> OpenGuard:
    """A newcomer that has made its first round with another one, while these went their way."""
    evidence = newcomer()
    evidence.begin_to_wait([friend, *others], NOW + 5, 5.0)
    evidence.note_round({OWN: 100.0, friend: 100.0}, NOW + 10, others, own)
    return evidence


def test_who_was_left_behind_by_most_takes_them_for_the_run():
    others = {peer: claim(peer, epoch=4) for peer in PEERS[1:]}
    evidence = pair_among(others)
    assert evidence.whom_to_wait_for({FRIEND, *others}, NOW + 10) == {FRIEND, *others}
    assert all(evidence.is_proven(peer) for peer in others)
    record = claim(PEERS[1], samples=90, speed=11.0).record
    assert count(evidence, record, NOW + 15) is record, "otherwise its epoch would always end too late"
    limited = count(evidence, claim(PEERS[1], samples=10**9).record, NOW + 15)
    assert limited.samples_accumulated == 208, "as much as if it had been in the round"


def test_who_was_left_behind_does_not_take_others_for_as_slow_as_in_one_short_round():
    """Else the end of an epoch always seems far away to those who came last: they look for a group when it is over."""
    others = {peer: claim(peer, epoch=4) for peer in PEERS[1:]}
    evidence = newcomer()
    evidence.note_round({OWN: 1.0, FRIEND: 1.0} | dict.fromkeys(others, 1.0), NOW + 10)
    evidence.note_round({OWN: 100.0, FRIEND: 100.0}, NOW + 20, others, 3)
    record = claim(PEERS[1], samples=90, speed=11.0).record
    assert count(evidence, record, NOW + 25) is record


@pytest.mark.parametrize(
    "others",
    [
        {peer: claim(peer, epoch=4) for peer in PEERS[1:3]},
        {peer: claim(peer, epoch=3) for peer in PEERS[1:]},
        {peer: claim(peer, epoch=10**6) for peer in PEERS[1:]},
        {peer: claim(peer, epoch=4, client=True) for peer in PEERS[1:]},
    ],
    ids=["no more than were in the round", "at the same epoch", "at one that cannot be", "that cannot be called"],
)
def test_others_do_not_prove_themselves_by_saying_that_they_went_on(others):
    evidence = pair_among(others)
    assert evidence.is_proven(FRIEND)
    assert not any(evidence.is_proven(peer) for peer in others)


def test_a_stranger_gains_nothing_by_saying_that_it_went_on_with_those_that_this_peer_knows():
    """Who leads each into a group of two leaves nearly all behind, and whoever claims to be there was waited for."""
    friends, others = PEERS[:5], {peer: claim(peer, epoch=4) for peer in PEERS[1:]}
    evidence = veteran(*friends)
    evidence.begin_to_wait([FRIEND, *others], NOW + 35, 5.0)
    evidence.note_round({OWN: 100.0, FRIEND: 100.0}, NOW + 40, others, 3)
    assert all(map(evidence.is_proven, friends))
    assert not evidence.is_proven(LIAR)
    assert evidence.whom_to_wait_for({FRIEND, *others}, NOW + 41) == set(friends)


def test_those_that_left_one_behind_have_a_vote_per_host():
    evidence = newcomer(lambda peer: "one host" if peer in PEERS[1:] else peer)
    evidence.note_round({OWN: 100.0, FRIEND: 100.0}, NOW + 10, {peer: claim(peer, epoch=4) for peer in PEERS[1:]}, 3)
    assert not any(evidence.is_proven(peer) for peer in PEERS[1:])


@pytest.mark.parametrize("epoch", [2, 3])
def test_those_that_make_a_step_for_each_of_this_peers_without_it_are_the_run(epoch):
    """One of two halves is always first at the end of an epoch: it would never see that the other one goes on."""
    others = PEERS[1:]
    evidence = pair_among({peer: claim(peer, epoch - 1) for peer in others})
    assert not any(map(evidence.is_proven, others))
    evidence.note_round({OWN: 1.0, FRIEND: 1.0}, NOW + 20, {peer: claim(peer, epoch) for peer in others}, 4)
    assert all(map(evidence.is_proven, others))


def test_others_that_stand_still_far_away_are_not_the_run():
    others = PEERS[1:]
    evidence = pair_among({peer: claim(peer, 1) for peer in others})
    for epoch in (1, 2):
        evidence.note_round({OWN: 1.0, FRIEND: 1.0}, NOW + 20, {peer: claim(peer, epoch) for peer in others}, 5)
    assert not any(map(evidence.is_proven, others))


def test_clients_that_are_with_this_peer_do_not_make_its_side_the_run():
    friends, others = PEERS[:3], {peer: claim(peer, epoch=4) for peer in PEERS[3:5]}
    clients = {peer: claim(peer, epoch=3, client=True) for peer in friends}
    evidence = newcomer()
    evidence.note_round(dict.fromkeys([OWN, *friends], 1.0), NOW + 10, {**clients, **others}, 3)
    assert all(map(evidence.is_proven, others))


def test_who_hurries_takes_nobody_along():
    """Nine have gone on from this epoch, and two of them twice: the run is at the next one."""
    names = [bytes([number]) for number in range(20)]
    evidence, now = veteran(*names), NOW + 60
    epochs = [3] * 11 + [4] * 7 + [5] * 2
    companions = {peer: claim(peer, epoch) for peer, epoch in zip(names, epochs, strict=True)}
    assert believed(evidence, companions, 3, now, end=now) == set(names[:18])


def test_in_a_large_swarm_old_records_do_not_hold_the_run_back():
    """Of a hundred, most have last been heard of an epoch ago. So it is the run that has gone on, not its liars."""
    names = [bytes([number]) for number in range(100)]
    evidence = veteran(*names, seconds=10.0)
    now = NOW + 42
    new = {peer: claim(peer, 4) for peer in names[80:]}
    for age, expected in ((11, set(names)), (9, set(names[:80]))):
        record = LocalTrainingProgress(b"", 3, 0, 0.0, now - age, False)
        old = {peer: Companion(msgspec.structs.replace(record, peer_id=peer), math.inf) for peer in names[:80]}
        assert believed(evidence, {**old, **new}, 3, now) == expected
