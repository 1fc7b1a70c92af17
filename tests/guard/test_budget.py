"""The one budget for the time that others may cost, on a clock that the test moves."""

from __future__ import annotations

import pytest

from shoal.guard.budget import LEAST_HOLD, LONGEST_HOLD, SHARE_WASTED, Budget, check_share

NOW = 1000.0


def budget(share: float = SHARE_WASTED) -> Budget:
    return Budget(lambda peer: peer[:1], NOW, share)


def waits_for(account: Budget, peer: bytes, now: float) -> bool:
    return account.allows(peer, now, is_stranger=True)


def test_only_the_host_that_has_cost_time_pauses_unless_there_are_several() -> None:
    account = budget()
    account.charge([b"a1"], 3.0, NOW, bars=True)
    assert not waits_for(account, b"a2", NOW + 3.0 / SHARE_WASTED - 1), "the same host"
    assert waits_for(account, b"b1", NOW)
    assert waits_for(account, b"a1", NOW + 3.0 / SHARE_WASTED + 1)
    account.charge([b"b1"], 1.0, NOW, bars=True)
    assert not waits_for(account, b"c1", NOW + 1), "somebody may have many hosts"
    assert waits_for(account, b"c1", NOW + 1.0 / SHARE_WASTED + 1)


def test_a_peer_that_did_not_come_may_still_join() -> None:
    account = budget()
    account.charge([b"a1"], 3.0, NOW, bars=False)
    assert not waits_for(account, b"a1", NOW + 1)
    assert account.allows(b"a1", NOW + 1, is_stranger=True, joins=True)
    account.charge([b"a1"], 3.0, NOW, bars=True)
    assert not account.allows(b"a1", NOW + 1, is_stranger=True, joins=True)


def test_a_member_pays_for_itself_alone() -> None:
    account = budget()
    account.charge_member(b"a1", 3.0, NOW)
    assert not account.allows(b"a1", NOW + 1, is_stranger=False)
    assert account.allows(b"a2", NOW + 1, is_stranger=False)
    assert account.allows(b"a2", NOW + 1, is_stranger=True)
    account.charge([b"b1"], 3.0, NOW, bars=True)
    assert account.allows(b"b2", NOW + 1, is_stranger=False), "a member does not pay for strangers of its host"


def test_a_larger_share_makes_pauses_shorter() -> None:
    account = budget(0.5)
    account.charge([b"a1"], 3.0, NOW, bars=True)
    assert not waits_for(account, b"a1", NOW + 5)
    assert waits_for(account, b"a1", NOW + 7)


@pytest.mark.parametrize("share", [0, 1, -0.1, 2.0])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match=f"waiting_share .* got {share}"):
        check_share(share)


def hold(account: Budget, now: float, *, until: float) -> float:
    """Wait from one moment until another one, or for as long as the peer may; returns the seconds."""
    began = now
    while account.holds(now, has_reason=now < until):
        now += 0.05
    return now - began


def test_a_lone_peer_does_not_wait_without_a_reason() -> None:
    assert hold(budget(), NOW + 100.0, until=NOW + 100.0) == 0.0


def test_a_lone_peer_stops_waiting_with_its_reason() -> None:
    account = budget()
    assert hold(account, NOW + 10.0, until=NOW + 12.0) == pytest.approx(2.0, abs=0.1)
    assert hold(account, NOW + 20.0, until=NOW + 22.0) == pytest.approx(2.0, abs=0.1), "there is time left for another"


def test_all_waits_of_a_lone_peer_take_the_share() -> None:
    account, now, waited = budget(), NOW, 0.0
    assert hold(account, now, until=1e9) == pytest.approx(LONGEST_HOLD, abs=0.1)
    now += LONGEST_HOLD
    while now < NOW + 10_000.0:
        seconds = hold(account, now, until=1e9)
        assert seconds == 0.0 or seconds > LEAST_HOLD - 0.1, "shorter ones would be of no use"
        waited += seconds
        now += seconds + 0.08
    assert 0.04 < waited / (now - NOW) < 0.05


def test_what_a_lone_peer_saves_up_is_limited() -> None:
    assert hold(budget(), 1e6, until=1e9) == pytest.approx(LONGEST_HOLD, abs=0.1)
