"""The estimate of samples per second, on a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from shoal.optim.progress.records import PerformanceEMA


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_constant_speed_is_exact_from_the_first_update_on(clock):
    ema = PerformanceEMA(alpha=0.1, clock=clock)
    for _ in range(5):
        clock.now += 2.0
        assert ema.update(8) == pytest.approx(4.0)
    assert ema.num_updates == 5
    assert ema.ema_seconds_per_sample == pytest.approx(0.25 * (1 - 0.9**5))


def test_new_measurements_count_alpha(clock):
    ema = PerformanceEMA(alpha=0.5, clock=clock)
    ema.update(1, interval=1.0)
    ema.update(1, interval=3.0)
    assert ema.seconds_per_sample == pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)


def test_pauses_do_not_count(clock):
    ema = PerformanceEMA(clock=clock)
    clock.now += 1.0
    with ema.pause():
        clock.now += 50.0
        with pytest.raises(AssertionError, match="paused"):
            ema.update(1)
        ema.update(1, interval=2.0)
    clock.now += 1.0
    assert ema.update(4) < 4
    assert PerformanceEMA(paused=True, clock=clock).paused


def test_the_timer_can_be_reset(clock):
    ema = PerformanceEMA(clock=clock)
    clock.now += 50.0
    ema.reset_timer()
    clock.now += 1.0
    assert ema.update(3) == pytest.approx(3.0)


def test_the_first_batch_is_a_guess_that_the_second_one_replaces(clock):
    """The time of the first one is that since the program began: with it, it has loaded its model and data."""
    ema = PerformanceEMA(clock=clock)
    clock.now += 30.0
    ema.count(4)
    assert ema.samples_per_second == pytest.approx(4 / 30)
    assert ema.is_first_guess
    clock.now += 2.0
    ema.count(4)
    assert ema.samples_per_second == pytest.approx(2.0)
    assert not ema.is_first_guess
    clock.now += 4.0
    ema.count(4)
    assert 1.0 < ema.samples_per_second < 2.0, "from now on, all count"


def test_nothing_processed_is_an_error():
    with pytest.raises(AssertionError, match="positive"):
        PerformanceEMA().update(0)


def test_no_update_means_no_speed():
    assert PerformanceEMA().samples_per_second < 1e-9


def test_overlapping_tasks_count_once(clock):
    ema = PerformanceEMA(alpha=1.0, clock=clock)
    inside, leave = threading.Event(), threading.Event()

    def other_task() -> None:
        with ema.update_threadsafe(1):
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=other_task)
    thread.start()
    assert inside.wait(5)
    with ema.update_threadsafe(1):
        clock.now += 10.0
    assert ema.seconds_per_sample == pytest.approx(10.0)
    clock.now += 2.0
    leave.set()
    thread.join()
    assert ema.seconds_per_sample == pytest.approx(2.0)
