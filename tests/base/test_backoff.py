"""Pauses after failures, and token buckets."""

from __future__ import annotations

import pytest

from shoal.base.backoff import Backoff, Backoffs, TokenBuckets


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(2.0, 10.0)
    assert [backoff.fail() for _ in range(5)] == [2, 4, 8, 10, 10]
    backoff.failures = 10_000
    assert backoff.fail() == 10


def test_the_first_failures_may_cost_the_same() -> None:
    backoff = Backoff(1.0, 60.0, free=3)
    assert [backoff.fail() for _ in range(5)] == [1, 1, 1, 2, 4]


def test_an_attempt_is_due_after_the_pause() -> None:
    backoff = Backoff(2.0, 10.0)
    assert backoff.is_due(-5.0)
    backoff.fail(100.0)
    assert not backoff.is_due(101.9)
    assert backoff.is_due(102.0)


def test_a_success_ends_the_pause_and_the_count() -> None:
    backoff = Backoff(2.0, 10.0)
    backoff.fail(0.0)
    backoff.fail(0.0)
    backoff.succeed()
    assert backoff.is_due(0.0)
    assert backoff.fail(0.0) == 2


def test_each_key_has_its_own_backoff() -> None:
    now = 0.0
    backoffs = Backoffs(2.0, 10.0, lambda: now, most=2)
    backoffs.fail("a")
    backoffs.fail("a")
    now = 3.9
    assert not backoffs.is_due("a")
    assert backoffs.is_due("b")
    now = 4.0
    assert backoffs.is_due("a")
    backoffs.fail("a")
    backoffs.succeed("a")
    assert backoffs.is_due("a")
    for key in "abc":
        backoffs.fail(key)
    assert [backoffs.is_due(key) for key in "abc"] == [True, False, False]
    backoffs.clear()
    assert backoffs.is_due("c")


@pytest.fixture
def buckets() -> TokenBuckets:
    return TokenBuckets(per_second=10, burst=3, most=2)


def test_a_burst_is_granted_and_then_a_rate(buckets: TokenBuckets) -> None:
    assert [buckets.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert buckets.is_exhausted("a", 0.05)
    assert buckets.take("a", 0.1)
    assert not buckets.take("a", 0.1)
    # A long pause earns no more than a burst.
    assert [buckets.take("a", 100.0) for _ in range(4)] == [True, True, True, False]


def test_each_key_has_its_own_bucket(buckets: TokenBuckets) -> None:
    buckets.spend("a", 0.0, 3)
    assert buckets.is_exhausted("a", 0.0)
    assert buckets.take("b", 0.0)


def test_a_debt_prolongs_the_wait(buckets: TokenBuckets) -> None:
    buckets.spend("a", 0.0, 13)
    assert buckets.is_exhausted("a", 1.0)
    assert not buckets.is_exhausted("a", 1.2)


def test_keys_that_spent_last_are_remembered(buckets: TokenBuckets) -> None:
    for key in "abc":
        buckets.spend(key, 0.0, 3)
    assert len(buckets) == 2
    assert not buckets.is_exhausted("a", 0.0)
    assert buckets.is_exhausted("c", 0.0)
