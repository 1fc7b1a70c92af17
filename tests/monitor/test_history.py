"""Figures over time: recent ones in detail, old ones as means, all in little memory."""

from __future__ import annotations

import math

import pytest

from shoal.monitor.history import MAX_NAMES, History
from shoal.monitor.run import SERIES


def test_points_are_means_of_their_periods():
    history = History(["speed", "loss"], [(1.0, 4), (2.0, 3)])
    for second in range(9):
        history.add(100 + second, {"speed": float(second), "loss": 1.0 if second % 2 else math.nan})
    assert history.spans == [4.0, 6.0]
    assert history.columns(0) == {
        "time": [104.0, 105.0, 106.0, 107.0, 108.0],
        "speed": [4.0, 5.0, 6.0, 7.0, 8.0],
        "loss": [None, 1.0, None, 1.0, None],
    }
    assert history.columns(1) == {
        "time": [102.0, 104.0, 106.0, 108.0],
        "speed": [2.5, 4.5, 6.5, 8.0],
        "loss": [1.0, 1.0, 1.0, None],
    }


def test_gaps_in_time_stay_gaps():
    history = History(["peers"], [(10.0, 5)])
    history.add(0.0, {"peers": 2.0})
    history.add(55.0, {})
    history.add(57.0, {"peers": 4.0})
    assert history.columns() == {"time": [0.0, 50.0], "peers": [2.0, 4.0]}
    assert History(["peers"]).columns() == {"time": [], "peers": []}


def test_a_day_takes_little_memory():
    history = History(SERIES)
    for minute in range(0, 2 * 86_400, 60):
        history.add(float(minute), {"throughput": 1.0})
    assert history.nbytes < 1e6
    times = history.columns(2)["time"]
    assert times[-1] - times[0] == pytest.approx(86_400, abs=60)


def test_figures_may_come_later():
    history = History(("loss",), levels=((1.0, 3), (10.0, 3)))
    for now in range(3):
        history.add(float(now), {"loss": 1.0})
    history.add(3.0, {"loss": 2.0, "late": 5.0})
    assert history.columns()["late"] == [None, None, None, 5.0]
    assert history.columns(1)["late"] == [5.0]
    for number in range(2 * MAX_NAMES):
        history.add(4.0, {f"made up {number}": 1.0})
    assert len(history.names) == MAX_NAMES
