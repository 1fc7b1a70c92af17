"""What a peer believes in a run that trusts its members: what they say, as long as they come."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import pytest

from shoal.guard.budget import SHARE_WASTED
from shoal.guard.open import OpenGuard
from shoal.guard.policy import Members, epoch_of_most, seconds_worth
from shoal.optim.progress.records import Companion, LocalTrainingProgress
from shoal.p2p import PeerID

NOW = 1000.0
OWN, FRIEND, THIRD, STRANGER, OTHER = b"own", b"friend", b"third", b"stranger", b"other"
PATIENCE = 5.0


def record(peer: bytes, epoch: int = 3, samples: int = 0, speed: float = 0.0) -> LocalTrainingProgress:
    return LocalTrainingProgress(peer, epoch, samples, speed, NOW, False)


def companions(epochs: dict[bytes, int]) -> dict[bytes, Companion]:
    return {peer: Companion(record(peer, epoch), NOW + 10_000) for peer, epoch in epochs.items()}


def veteran(*friends: bytes) -> Members:
    """A peer after a round with these others."""
    members = Members(OWN, bytes, NOW)
    members.note_round(dict.fromkeys([OWN, *friends], 100.0), NOW)
    return members


def wait_in_vain(members: Members, awaited: Iterable[bytes], came: Iterable[bytes], now: float = NOW) -> None:
    """Be in a round with some of those that this peer waited for."""
    members.begin_to_wait(set(awaited), now, PATIENCE)
    members.note_round(dict.fromkeys([OWN, *came], 1.0), now + PATIENCE)


def test_the_run_is_at_the_lower_median_of_hosts() -> None:
    assert epoch_of_most([], 3) == 3
    assert epoch_of_most([5], 3) == 5
    assert epoch_of_most([4, 9], 3) == 4
    assert epoch_of_most([4, 9, 10**6], 3) == 9
    assert epoch_of_most([1, 2, 2], 3) == 3, "this peer does not go back"


def test_a_wait_is_worth_what_the_others_would_train_longer() -> None:
    assert seconds_worth(60.0, 1 / 8) == pytest.approx(60 / 7)
    assert seconds_worth(60.0, 0.5) == pytest.approx(60.0)
    assert seconds_worth(60.0, 0.0) == 0.0
    assert seconds_worth(60.0, 1.0) == math.inf


def take_rounds(members: Members, waits: dict[bytes, float], rounds: int, began: float = NOW) -> float:
    """Be in rounds of equals after a minute of training each, and wait for some members; returns the time."""
    for number in range(1, rounds + 1):
        now = began + 60.0 * number
        members.begin_to_wait(waits, now, PATIENCE)
        members.note_round(dict.fromkeys([OWN, *waits], 50.0), now, seconds=1.0, waits=waits)
        members.note_epoch(now, is_next=True)
    return began + 60.0 * rounds


def test_a_member_that_costs_more_than_it_brings_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    members, waits = Members(OWN, bytes, NOW), {FRIEND: 0.1, THIRD: 40.0}
    with caplog.at_level(logging.INFO):
        now = take_rounds(members, waits, 2)
        assert members.counts(THIRD, now), "twice may be chance"
        now = take_rounds(members, waits, 1, now)
    assert not members.counts(THIRD, now)
    assert not members.has_time_for(THIRD, now)
    assert members.counts(FRIEND, now)
    [line] = caplog.records
    assert str(PeerID(THIRD)) in line.getMessage()
    assert "DiLoCo" in line.getMessage(), "what to do"
    pause = 3 * 40.0 / SHARE_WASTED
    for _ in range(3):  # the pause never grows
        assert not members.has_time_for(THIRD, now + pause - 1)
        assert members.has_time_for(THIRD, now + pause + 1), "it is tried again"
        members.note_epoch(now := now + pause - 59.0, is_next=True)
        now = take_rounds(members, waits, 1, now)
    assert len(caplog.records) == 1, "nothing has changed"


def test_a_member_that_is_fast_again_takes_part_at_once_and_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """The slow member draws the same conclusions as the others."""
    members = Members(OWN, bytes, NOW)
    with caplog.at_level(logging.INFO):
        now = NOW
        for _ in range(2):
            now = take_rounds(members, {OWN: 40.0, FRIEND: 0.0, THIRD: 0.0}, 4, now)
            assert not members.has_time_for(FRIEND, now), "newcomers may not know"
            assert members.counts(FRIEND, now), "it makes no step alone"
            now = take_rounds(members, {OWN: 1.0, FRIEND: 0.0, THIRD: 0.0}, 2, now)
    first, second, *rest = [record.getMessage() for record in caplog.records]
    assert "this peer makes rounds 40.0 s longer" in first
    assert "DiLoCo" in first, "what to do"
    assert "takes part again" in second
    assert rest == [first, second]


def test_a_member_that_fails_after_long_waits_is_left_out() -> None:
    members = Members(OWN, bytes, NOW)
    for number in range(1, 4):
        now = NOW + 60.0 * number
        members.begin_to_wait({FRIEND, OTHER, THIRD}, now, PATIENCE)
        members.note_round(dict.fromkeys([OWN, FRIEND, OTHER], 50.0), now, seconds=41.0, waits={THIRD: 40.0})
    assert not members.has_time_for(THIRD, now)


def test_a_member_is_waited_for_as_long_as_its_samples_are_worth_it() -> None:
    members = Members(OWN, bytes, NOW)
    now = take_rounds(members, {FRIEND: 0.1, THIRD: 29.0}, 5)
    assert members.counts(THIRD, now), "without it, the others need half a minute longer"


def test_one_round_in_time_clears_a_slow_member() -> None:
    members, slow = Members(OWN, bytes, NOW), {FRIEND: 0.1, THIRD: 40.0}
    now = NOW
    for _ in range(3):
        now = take_rounds(members, slow, 2, now)
        now = take_rounds(members, {FRIEND: 0.1, THIRD: 1.0}, 1, now)
    assert members.counts(THIRD, now)


def test_two_peers_need_each_other_however_slow_one_is() -> None:
    members = Members(OWN, bytes, NOW)
    now = take_rounds(members, {FRIEND: 1000.0}, 5)
    assert members.counts(FRIEND, now)


@pytest.mark.parametrize("times", [2, 20, 100, 10**6])
def test_members_are_believed_whatever_they_brought_before(times: int) -> None:
    members = veteran(FRIEND)
    claim = record(FRIEND, samples=100 * times, speed=10.0 * times)
    assert members.limited([claim], NOW + 1) == [claim]


def test_a_newcomer_is_believed_and_waited_for_at_once() -> None:
    members = veteran(FRIEND)
    claim = record(STRANGER, samples=10**6, speed=1e5)
    assert members.limited([claim], NOW) == [claim]
    assert members.whom_to_wait_for({FRIEND, STRANGER}, NOW) == {FRIEND, STRANGER}
    assert members.has_time_for(STRANGER, NOW)


def test_a_stranger_that_does_not_come_counts_for_nothing_until_it_has_paid_for_it() -> None:
    members = veteran(FRIEND)
    wait_in_vain(members, {FRIEND, STRANGER}, {FRIEND})
    now = NOW + PATIENCE
    for _ in range(2):  # its first time may be chance
        assert members.whom_to_wait_for({FRIEND, STRANGER}, now) == {FRIEND}
        assert [r.samples_accumulated for r in members.limited([record(STRANGER, samples=9)], now)] == [0]
        now += PATIENCE
    assert members.whom_to_wait_for({FRIEND, STRANGER}, NOW + PATIENCE / SHARE_WASTED + 2 * PATIENCE) == {
        FRIEND,
        STRANGER,
    }
    assert members.whom_to_wait_for({FRIEND, OTHER}, now) == {FRIEND, OTHER}, "another newcomer has cost nothing"
    members.note_round(dict.fromkeys([OWN, FRIEND, STRANGER], 1.0), now)
    assert members.whom_to_wait_for({FRIEND, STRANGER}, now) == {FRIEND, STRANGER}, "it came"


@pytest.mark.parametrize(("after", "counts"), [(0.5, False), (PATIENCE - 0.5, True)])
def test_a_stranger_that_appears_during_the_wait_pays_for_it(after: float, counts: bool) -> None:
    """Others have waited for it from the start. It is not to blame for what had passed when it came."""
    members = veteran(FRIEND)
    members.begin_to_wait({FRIEND}, NOW, PATIENCE)
    present = companions({FRIEND: 0, STRANGER: 0})
    present[STRANGER].known_since = NOW + after
    members.note_round(dict.fromkeys([OWN, FRIEND], 1.0), NOW + PATIENCE, present)
    assert members.counts(STRANGER, NOW + PATIENCE) == counts


def test_a_member_that_misses_three_rounds_is_no_longer_waited_for_until_it_comes(caplog) -> None:
    members, now = veteran(FRIEND, THIRD), NOW
    with caplog.at_level(logging.INFO):
        for missed in range(3):
            assert members.is_proven(THIRD), missed
            wait_in_vain(members, {FRIEND, THIRD}, {FRIEND}, now)
            now += 2 * PATIENCE
    assert not members.is_proven(THIRD)
    assert members.whom_to_wait_for({FRIEND, THIRD}, now) == {FRIEND}
    [line] = caplog.records
    assert line.levelno == logging.INFO, "its batches may just be long: that is no accusation"
    assert "did not come to 3 rounds in a row" in line.getMessage()
    members.note_round(dict.fromkeys([OWN, FRIEND, THIRD], 1.0), now)
    assert members.whom_to_wait_for({FRIEND, THIRD}, now) == {FRIEND, THIRD}


def test_a_group_that_did_not_wait_for_a_peer_blames_it_for_nothing() -> None:
    members = veteran(FRIEND)
    members.begin_to_wait({FRIEND, STRANGER}, NOW, PATIENCE)
    members.note_round(dict.fromkeys([OWN, FRIEND], 1.0), NOW + 0.1)
    assert members.whom_to_wait_for({FRIEND, STRANGER}, NOW + 1) == {FRIEND, STRANGER}
    members.begin_to_wait({FRIEND, STRANGER}, NOW + 1, PATIENCE)
    members.note_round(dict.fromkeys([OWN, FRIEND], 1.0), NOW + 61, seconds=60.0)  # a long round, not a long wait
    assert members.whom_to_wait_for({FRIEND, STRANGER}, NOW + 62) == {FRIEND, STRANGER}


def test_every_member_that_has_waited_charges_a_stranger_whoever_waited_longest() -> None:
    """The patience of the leader ends the wait. A member that was ready a little later has lost time, too."""
    members = veteran(FRIEND)
    members.begin_to_wait({FRIEND, STRANGER}, NOW + 0.2, PATIENCE)
    members.note_round(dict.fromkeys([OWN, FRIEND], 1.0), NOW + PATIENCE)
    over = NOW + PATIENCE + (PATIENCE - 0.2) / SHARE_WASTED
    assert not members.counts(STRANGER, over - 0.1)
    assert members.counts(STRANGER, over + 0.1)


def test_peers_that_went_on_without_this_one_are_not_to_blame() -> None:
    members = veteran(FRIEND)
    for attempt in range(4):
        members.begin_to_wait({FRIEND}, NOW + 10 * attempt, PATIENCE)
        members.note_round({}, NOW + 10 * attempt + PATIENCE, companions({FRIEND: 4}), own=3)
    assert members.is_proven(FRIEND)


def test_a_peer_that_never_comes_is_not_waited_for_for_ever_even_if_there_is_no_other() -> None:
    members, now = Members(OWN, bytes, NOW), NOW
    for _ in range(3):
        assert members.whom_to_wait_for({STRANGER}, now) == {STRANGER}
        members.begin_to_wait({STRANGER}, now, PATIENCE)
        now += 60.0
        members.note_round({}, now, companions({STRANGER: 0}))
    assert members.whom_to_wait_for({STRANGER}, now) == set()
    assert members.whom_to_wait_for({STRANGER}, now + 60.0 / SHARE_WASTED) == {STRANGER}, "it is tried again"


def test_an_end_that_a_member_calls_counts_at_once() -> None:
    members, present = veteran(FRIEND), companions({FRIEND: 3, STRANGER: 3})
    assert members.called_end(present, 3, NOW + 100, NOW) == math.inf
    present[FRIEND].end = NOW + 2
    assert members.called_end(present, 3, NOW + 100, NOW) == NOW + 2
    assert members.called_end(present, 2, NOW + 100, NOW) == math.inf, "of another epoch"


def test_the_run_is_at_the_epoch_that_most_hosts_have_reached() -> None:
    members = veteran(FRIEND)
    epochs = {FRIEND: 3, THIRD: 3, OTHER: 10**6, STRANGER: 10**6}
    assert set(members.credible(companions(epochs), 3, NOW, lambda _: math.inf)) == {FRIEND, THIRD}
    epochs = {FRIEND: 9, THIRD: 9, OTHER: 3}
    assert set(members.credible(companions(epochs), 3, NOW, lambda _: math.inf)) == set(epochs), "it was away"


def test_a_donor_of_an_old_state_does_not_hide_the_only_peer_that_trains() -> None:
    newcomer, others = Members(OWN, lambda peer: "one host", NOW), companions({THIRD: 9})
    others[FRIEND] = Companion(LocalTrainingProgress(FRIEND, 6, 0, 0.0, NOW, False, is_donor=True), NOW + 10_000)
    assert THIRD in newcomer.credible(others, 0, NOW, lambda _: math.inf)
    assert FRIEND in newcomer.credible({FRIEND: others[FRIEND]}, 0, NOW, lambda _: math.inf)


def test_one_member_at_the_next_epoch_ends_this_one() -> None:
    """It has counted samples that this peer may not know of. But it leads nobody further."""
    members = veteran(FRIEND)
    epochs = {FRIEND: 4, THIRD: 3, OTHER: 3}
    assert FRIEND in members.credible(companions(epochs), 3, NOW, lambda _: math.inf)
    epochs[FRIEND] = 5
    assert FRIEND not in members.credible(companions(epochs), 3, NOW, lambda _: math.inf)
    epochs = {STRANGER: 4, THIRD: 3, OTHER: 3}
    assert STRANGER not in members.credible(companions(epochs), 3, NOW, lambda _: math.inf)


def test_one_peer_that_is_ahead_has_left_nobody_behind() -> None:
    """Else all others would give up their round, and take over the state of a single peer."""
    members = veteran(FRIEND)
    assert not members.are_most_beyond(companions({FRIEND: 4, THIRD: 3, OTHER: 3}), 3, NOW)
    assert members.are_most_beyond(companions({FRIEND: 4, THIRD: 4, OTHER: 3}), 3, NOW)
    assert members.are_most_beyond(companions({FRIEND: 4}), 3, NOW), "there is no other"


def test_a_peer_that_got_no_state_from_those_ahead_votes_itself_for_a_while() -> None:
    members = veteran(FRIEND)
    ahead = companions({STRANGER: 10**6})
    assert set(members.credible(ahead, 3, NOW, lambda _: math.inf)) == {STRANGER}
    members.note_vain_attempt(NOW, 2.0)
    assert not members.credible(ahead, 3, NOW + 1, lambda _: math.inf)
    assert members.credible(ahead, 3, NOW + 2.0 / SHARE_WASTED + 1, lambda _: math.inf)


def test_members_pay_nothing_for_a_round_that_they_held_up() -> None:
    members = veteran(FRIEND)
    members.note_failures([FRIEND], 60.0, NOW)
    assert members.has_time_for(FRIEND, NOW)
    assert members.has_time_for(STRANGER, NOW)
    members = veteran(FRIEND)
    members.note_failures([STRANGER], 60.0, NOW)
    assert not members.has_time_for(STRANGER, NOW + 1)
    assert members.has_time_for(OTHER, NOW + 1)


@pytest.mark.parametrize("is_heard", [True, False], ids=["heard", "a record alone"])
@pytest.mark.parametrize("kind", [Members, OpenGuard])
def test_the_user_is_warned_only_of_peers_that_this_one_has_heard(
    caplog: pytest.LogCaptureFixture, kind: type[Members], is_heard: bool
) -> None:
    """A record in the table may be that of a peer that died, or of a run that has begun again since."""
    heard_at = NOW if is_heard else -math.inf
    members, now = kind(OWN, bytes, NOW), NOW
    others = {STRANGER: Companion(record(STRANGER), math.inf, heard_at=heard_at)}
    claims = {
        STRANGER: Companion(record(STRANGER, 38), math.inf, heard_at=heard_at),
        **companions(dict.fromkeys([b"a", b"b", b"c"], 0)),
    }
    with caplog.at_level(logging.INFO):
        members.credible(claims, 0, now, lambda rest: math.inf)
        members.note_round({OWN: 1.0, FRIEND: 1.0}, now)
        members.credible(claims, 0, now, lambda rest: math.inf)
        members.begin_to_wait({FRIEND, STRANGER}, now, PATIENCE)
        members.note_round({OWN: 1.0, FRIEND: 1.0}, now + PATIENCE, others, 3)
        for number in range(10):
            members.begin_to_wait({STRANGER}, now + 20 * number, PATIENCE)
            members.note_round({}, now + 20 * number + 20, others, 3)
    said = str(PeerID(STRANGER))
    told = [line for line in caplog.messages if said in line]
    assert (len({line.partition(said)[2][:12] for line in told}) == 3) == is_heard, told
    assert is_heard or not told
