"""Rules of averaging: against numbers worked out by hand, on all types, and what a user's own rule needs."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from shoal.averaging import Aggregation, CenteredClip, ClipToMedianNorm, TrimmedMean
from shoal.averaging.aggregation import (
    PIECE,
    check_aggregation,
    in_order,
    lower_median,
    sorting_network,
    weighted_mean,
)
from tests.device import on_cpu_only

pytestmark = on_cpu_only  # all values are in host memory here


def apply(rule, vectors, weights=None, share=1.0):
    """A vector as one part."""
    rows = [torch.as_tensor(vector, dtype=torch.float32) for vector in vectors]
    weights = [1.0] * len(rows) if weights is None else weights
    counted = [(float(row.norm()), weight) for row, weight in zip(rows, weights, strict=True) if weight > 0]
    factors = iter(rule.factors([norm for norm, _ in counted], [weight for _, weight in counted]))
    return rule.aggregate(rows, weights, [next(factors) if weight > 0 else 1.0 for weight in weights], share)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_clip_to_median_norm_by_hand():
    # Norms 5, 1 and 10: the last one counts half.
    assert apply(ClipToMedianNorm(), [[3, 4], [0, 1], [6, 8]]).tolist() == pytest.approx([2, 3])
    # Norms 1, 2, 10 and 20; between 2 and 10 the lower one: factors 1, 1, 1/5, 1/10.
    assert apply(ClipToMedianNorm(), [[1], [-2], [10], [20]]).item() == pytest.approx((1 - 2 + 2 + 2) / 4)
    # By weights 1, 1 and 3 the median is 10.
    assert apply(ClipToMedianNorm(), [[1], [5], [10]], [1, 1, 3]).item() == pytest.approx((1 + 5 + 30) / 5)
    assert apply(ClipToMedianNorm(), [[1], [5], [10]], [1, 3, 1]).item() == pytest.approx((1 + 15 + 5) / 5)


def test_clip_to_median_norm_counts_norms_of_zero_and_leaves_out_weights_of_zero():
    assert apply(ClipToMedianNorm(), [[0, 0], [0, 0], [6, 8]]).tolist() == [0, 0]
    # The one of weight 0 has no voice: of 1, 4 and 8 the median is 4.
    expected = pytest.approx((1 + 4 + 4) / 3)
    assert apply(ClipToMedianNorm(), [[1], [4], [8], [1000]], [1, 1, 1, 0]).item() == expected


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 1.0, 0.0]])
def test_among_two_nothing_is_clipped(weights):
    vectors = [torch.randn(100), 50 * torch.randn(100), torch.randn(100)][: len(weights)]
    assert torch.equal(apply(ClipToMedianNorm(), vectors, weights), weighted_mean(vectors, weights))


def test_the_lower_median_of_weights():
    assert lower_median([3.0, 1.0, 2.0], [1, 1, 1]) == 2
    assert lower_median([4.0, 1.0, 3.0, 2.0], [1, 1, 1, 1]) == 2
    assert lower_median([1.0, 2.0, 3.0], [0.1, 0.1, 0.3]) == 3
    assert lower_median([1.0, 2.0], [2**53, 1]) == 1


def test_trimmed_mean_by_hand():
    # One of four at either end: the means of 2 and 3, of 20 and 30, and of -1 and 0.
    vectors = [[1, 30, -900], [2, -1e9, 0], [3, 20, -1], [100, 40, 7]]
    assert apply(TrimmedMean(0.25), vectors).tolist() == pytest.approx([2.5, 25, -0.5])
    assert apply(TrimmedMean(0.25), vectors, [1e6, 1, 1, 1]).tolist() == pytest.approx([2.5, 25, -0.5]), "no weights"
    assert apply(TrimmedMean(0.24), vectors).tolist()[0] == pytest.approx(26.5), "less than one is none"
    assert apply(TrimmedMean(0.4), [[1], [2], [9], [4], [1e30]]).item() == 4
    assert apply(TrimmedMean(0.29), [[i] for i in range(100)]).item() == pytest.approx(49.5)
    assert TrimmedMean.ignores_weights


@pytest.mark.parametrize(
    ("iterations", "expected"), [(1, 1 / 3), (2, 1 / 3 + 1 / 9), (3, 1 / 3 + 1 / 9 + 1 / 27), (20, 0.5)]
)
def test_centered_clip_by_hand(iterations, expected):
    # From the median 0: two members pull back by v, the third one pulls by 1 at most.
    assert apply(CenteredClip(1.0, iterations), [[0], [0], [9]]).item() == pytest.approx(expected, abs=1e-6)
    # The same along the direction (3, 4) / 5.
    along = apply(CenteredClip(1.0, iterations), [[0, 0], [0, 0], [30, 40]])
    assert along.tolist() == pytest.approx([0.6 * expected, 0.8 * expected], abs=1e-6)


def test_centered_clip_of_weights_and_of_parts_by_hand():
    # Of weight 1/2, and 1 of radius: v = 1/2, then 1/2 + 1/2 · 1 - 1/2 · 1/2 = 3/4.
    assert apply(CenteredClip(1.0, 2), [[0], [0], [9]], [1, 1, 2]).item() == pytest.approx(0.75)
    # A quarter of the vector has half the radius.
    assert apply(CenteredClip(1.0, 1), [[0], [0], [9]], share=0.25).item() == pytest.approx(0.5 / 3)
    # The median of two is between them, where nobody is further than the radius: it stays.
    assert apply(CenteredClip(5.0), [[2], [4]]).item() == pytest.approx(3)
    assert apply(CenteredClip(1e-3), [[7, 7]] * 4).tolist() == [7, 7]
    # Wide enough, it is the mean.
    assert apply(CenteredClip(1e6), [[1], [2], [6]]).item() == pytest.approx(3)


def test_centered_clip_is_that_of_its_formula():
    """Its weights are found without looking at the values at each step."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, 3 * PIECE + 17, generator=generator, dtype=torch.float64)
    values[:2] *= 1e6
    weights = torch.rand(9, generator=generator, dtype=torch.float64)
    center, tau = values.quantile(0.5, dim=0), 40.0
    for _ in range(20):
        offsets = values - center
        scale = (tau * 0.5**0.5 / offsets.norm(dim=1)).clamp(max=1)
        center += ((weights * scale)[:, None] * offsets).sum(0) / weights.sum()
    result = CenteredClip(tau).aggregate(list(values), weights.tolist(), [1.0] * 9, 0.5)
    torch.testing.assert_close(result, center, rtol=1e-7, atol=1e-7)
    single = CenteredClip(tau).aggregate(list(values.float()), weights.tolist(), [1.0] * 9, 0.5)
    torch.testing.assert_close(single.double(), center, rtol=1e-4, atol=1e-4)


# --- all types --------------------------------------------------------------------------------------------------------

RULES = [ClipToMedianNorm(), TrimmedMean(0.3), CenteredClip(2.0)]


@pytest.mark.parametrize("huge", [1e150, 1e200, 1.7e308, -1.7e308])
@pytest.mark.parametrize("rule", [CenteredClip(0.5), TrimmedMean(0.25)], ids=repr)
def test_the_largest_lie_counts_no_more_than_a_large_one(rule, huge):
    """Its square is more than the largest number."""
    honest = [torch.full((10,), value, dtype=torch.float64) for value in (0.9, 1.0, 1.1)]

    def average_with(lie):
        return rule.aggregate([*honest, torch.full((10,), lie, dtype=torch.float64)], [1.0] * 4, [1.0] * 4, 1.0)

    torch.testing.assert_close(average_with(huge), average_with(math.copysign(1e6, huge)))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.complex64]
)
def test_every_type_comes_back_as_it_was(rule, dtype):
    values = [torch.tensor([8, 16, 3]).to(dtype)] * 5
    result = rule.aggregate(values, [1.0, 2.0, 3.0, 0.0, 4.0], [1.0] * 5, 0.1)
    assert result.dtype == dtype
    torch.testing.assert_close(result, values[0])
    assert rule.aggregate(values, [0.0] * 5, [1.0] * 5, 0.1) is None


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_what_members_sent_is_not_changed(rule):
    values = [torch.randn(50) for _ in range(4)]
    before = [value.clone() for value in values]
    rule.aggregate(values, [1.0] * 4, [0.5] * 4, 1.0)
    assert all(map(torch.equal, values, before))


@pytest.mark.parametrize("rule", [TrimmedMean(0.3), CenteredClip(2.0)], ids=repr)
def test_complex_numbers_are_pairs(rule):
    values = [torch.randn(6, dtype=torch.complex64) for _ in range(5)]
    pairs = [torch.view_as_real(value).flatten() for value in values]
    result = rule.aggregate(values, [1.0] * 5, [1.0] * 5, 1.0)
    assert torch.equal(torch.view_as_real(result).flatten(), rule.aggregate(pairs, [1.0] * 5, [1.0] * 5, 1.0))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_weights_of_any_size(rule):
    values = [torch.randn(20) for _ in range(5)]
    usual = rule.aggregate(values, [1.0, 2.0, 1.0, 1.0, 3.0], [1.0] * 5, 1.0)
    for factor in (1e-300, 1e300, 2.0**52):
        weights = [factor, 2 * factor, factor, factor, 3 * factor]
        torch.testing.assert_close(rule.aggregate(values, weights, [1.0] * 5, 1.0), usual)


@pytest.mark.parametrize("count", range(1, 11))
def test_networks_sort_all_zeros_and_ones_and_so_everything(count):
    """Knuth's 0-1 principle."""
    values = torch.tensor(list(itertools.product([0.0, 1.0], repeat=count))).t().contiguous()
    assert torch.equal(in_order(values.clone()), values.sort(0).values)


@pytest.mark.parametrize("count", [11, 16, 33, 100])
def test_larger_networks_sort(count):
    values = torch.randn(count, PIECE + 100, generator=torch.Generator().manual_seed(count))
    assert torch.equal(in_order(values.clone()), values.sort(0).values)
    assert len(list(sorting_network(count))) < count * math.log2(count) ** 2


# --- rules of one's own -----------------------------------------------------------------------------------------------

GUIDE = (Path(__file__).parents[2] / "docs" / "robust-averages.md").read_text(encoding="utf-8")


def test_the_rule_in_the_guide_works():
    [code] = [block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "def combine" in block]
    names = {}
    exec(compile(code, "docs/robust-averages.md", "exec"), names)
    assert len(code.strip().splitlines()) <= 14
    rule = names["GeometricMedian"](steps=50)
    assert rule.fingerprint == "GeometricMedian(steps=50)"
    # It stays in the corner in which most of the weight is.
    assert apply(rule, [[0, 0], [0, 0], [0, 0], [9, 9], [-5, 70]]).tolist() == pytest.approx([0, 0], abs=1e-3)


class Halved(Aggregation):
    def combine(self, values, weights, share):
        return values[0] / 2


class OfTheWrongShape(Aggregation):
    def combine(self, values, weights, share):
        return values


def test_a_rule_of_ones_own():
    assert Halved().fingerprint == "Halved()"
    assert apply(Halved(), [[4, 2], [1, 1]]).tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"OfTheWrongShape.combine returned the shape \(2, 2\).*\(2,\)"):
        apply(OfTheWrongShape(), [[4, 2], [1, 1]])
    with pytest.raises(NotImplementedError, match="Aggregation has no method combine"):
        apply(Aggregation(), [[1]])


def test_settings_are_part_of_the_fingerprint():
    assert TrimmedMean(0.2).fingerprint == "TrimmedMean(fraction=0.2)"
    assert repr(CenteredClip(3, iterations=5)) == "CenteredClip(iterations=5, tau=3.0)"


@pytest.mark.parametrize("make", [lambda: TrimmedMean(0.5), lambda: TrimmedMean(-0.1), lambda: TrimmedMean(math.nan)])
def test_fractions_that_leave_nothing_are_refused(make):
    with pytest.raises(ValueError, match=r"from 0 to below 0\.5"):
        make()


@pytest.mark.parametrize("tau", [0, -1, math.inf, math.nan])
def test_radii_that_are_none_are_refused(tau):
    with pytest.raises(ValueError, match="tau is the norm of a vector and must be above 0"):
        CenteredClip(tau)
    with pytest.raises(ValueError, match="at least one iteration"):
        CenteredClip(1.0, 0)


def test_what_is_no_rule_is_refused_with_the_fix():
    check_aggregation("aggregation", None)
    check_aggregation("aggregation", Halved())
    with pytest.raises(TypeError, match=r"state_aggregation must be a rule such as .*ClipToMedianNorm.*with brackets"):
        check_aggregation("state_aggregation", ClipToMedianNorm)
    with pytest.raises(TypeError, match="got 'median'"):
        check_aggregation("aggregation", "median")
