"""What three liars of ten can do to an average, by each rule; ``benchmarks/robust_averages.py`` trains for longer."""

from __future__ import annotations

import asyncio

import pytest
import torch

from benchmarks.robust_averages import LIARS, MEMBERS, attacked, reduce, train_with_averagers, train_without_network
from shoal.averaging import CenteredClip, ClipToMedianNorm, TrimmedMean
from shoal.optim.grad_averager import PeerMomentum
from tests.device import on_cpu_only

pytestmark = [pytest.mark.once, on_cpu_only]  # all values are in host memory here

SHORT = {"batch": 64, "steps": 50, "rate": 0.5, "momentum": 0.0, "seed": 0}
NOISE, VALUES = 1.0, 1500


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(180)  # scikit-learn takes a while to import on a busy machine
def test_a_model_learns_in_spite_of_them_but_not_by_the_mean():
    honest = train_without_network(None, "none", **SHORT)
    assert honest > 80
    assert train_without_network(None, "100x", **SHORT) < 50
    assert train_without_network(ClipToMedianNorm(), "100x", **SHORT) > honest - 3
    assert train_without_network(CenteredClip(0.1), "100x", **SHORT) > honest - 5


@pytest.mark.timeout(180)
def test_whole_averagers_make_of_it_what_the_reduction_makes():
    options = {**SHORT, "steps": 2}
    alone = train_without_network(ClipToMedianNorm(), "100x", **options)
    assert train_with_averagers(ClipToMedianNorm(), "100x", **options) == pytest.approx(alone, abs=1.0)


def error_after(rule, attack, momentum, steps=30):
    """How far from the true gradient the average is in the end, as a share of its length."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(VALUES, generator=generator)
    kept = PeerMomentum(momentum, [torch.zeros(MEMBERS, VALUES)])
    vectors = torch.empty(0)
    for step in range(steps):
        vectors = truth + NOISE * torch.randn(MEMBERS, VALUES, generator=generator)
        kept.replace([vectors], batches=step + 1)
    average = asyncio.run(reduce(rule, list(attacked(vectors, attack))))
    return float((average - truth).norm() / truth.norm())


RULES = [ClipToMedianNorm(), CenteredClip(10.0), TrimmedMean(LIARS / MEMBERS)]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_large_lies_have_a_bound(rule):
    assert error_after(None, "100x", 0.0) > 10
    assert error_after(rule, "100x", 0.0) < error_after(rule, "none", 0.0) + 0.5


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_small_lies_are_as_small_as_the_noise_which_momentum_takes_away(rule):
    assert error_after(rule, "little", 0.9) < 0.5 * error_after(rule, "little", 0.0)
