"""Aggregation rules: how the values of several members become one.

The default is the weighted mean, with which a single member that sends its gradient times -100 decides the result. The
rules here bound the influence of a minority. All members of a group must use the same rule.

=========================  ===========================================================================================
:class:`ClipToMedianNorm`  clips every vector to the norm of the median member's vector; try this one first
:class:`CenteredClip`      lets no member pull the average further than a given radius
:class:`TrimmedMean`       for each value, leaves out the largest and the smallest members
=========================  ===========================================================================================

To write your own rule, subclass :class:`Aggregation` and define ``combine``.
:mod:`shoal.averaging.round.combining` applies a rule at a reducer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

__all__ = ["Aggregation", "CenteredClip", "ClipToMedianNorm", "TrimmedMean"]

# Derived: the lower median of two norms is the smaller one, so one of two members could choose it alone.
FEWEST_TO_CLIP = 3
# CenteredClip stops when a step is not longer than this (chosen).
SMALLEST_STEP = 1e-6
# CenteredClip clips values to this (chosen): the sum of their squares is finite, and τ clips such vectors anyway.
LARGEST_OFFSET = 1e140


def weighted_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float], factors: Sequence[float] | None = None
) -> torch.Tensor | None:
    """The weighted mean of equally shaped tensors, in their own type; ``None`` if all weights are 0.

    The sum is in float32 or wider. Values with weight 0 are left out, even if they are NaN. Weights may be of any size.

    Args:
        values: one tensor per member.
        weights: one per member, each 0 or more.
        factors: one per member, applied to its values but not to its weight; ``None``: 1 for all.
    """
    largest = max(weights, default=0.0)
    if largest == 0:
        return None
    factors = [1.0] * len(values) if factors is None else factors
    kept = [each for each in zip(values, weights, factors, strict=True) if each[1] > 0]
    # Huge or tiny weights could overflow or vanish in the sum. Scaling by a power of two is exact.
    exponent = math.frexp(largest)[1]
    scaled = [math.ldexp(weight, -exponent) for _, weight, _ in kept]
    total, dtype = sum(scaled), kept[0][0].dtype
    wide = wide_type(dtype)
    mean = kept[0][0].to(wide) * (scaled[0] / total * kept[0][2])
    for (value, _, factor), weight in zip(kept[1:], scaled[1:], strict=True):
        mean.add_(value, alpha=weight / total * factor)
    return as_type(mean, dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of the given type are added up."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.float64
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


def as_type(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A result converted back to the type of its inputs; for integer types it is rounded, not truncated."""
    if not (dtype.is_floating_point or dtype.is_complex):
        result = result.round_()
    return result.to(dtype)


class Aggregation:
    """Base class of the rules.

    A rule must give the same result for the same arguments, and depend on nothing else: another member may average a
    part again. For large parts it runs in a thread beside the event loop, one part of a round after another.
    """

    needs_norms: ClassVar[bool] = False
    """Whether members announce the norms of their vectors before they send them, because :meth:`factors` needs them."""
    ignores_weights: ClassVar[bool] = False
    """Whether every member counts the same, however many samples it has. A member with weight 0 is still left out."""

    def combine(self, values: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
        """The average of one part of the vector.

        Args:
            values: shape (members, length of the part), float32 or float64. One row for each member whose weight is
                above 0. This is a copy; the rule may change it.
            weights: shape (members,), of the same type; their sum is 1.
            share: the part's fraction of the whole vector, from 0 to 1.

        Returns:
            The average, shape (length of the part,).
        """
        raise NotImplementedError(f"{type(self).__name__} has no method combine(values, weights, share)")

    def factors(self, norms: Sequence[float], weights: Sequence[float]) -> Sequence[float]:
        """The factor for each member's vector, applied before :meth:`combine`. Called only if ``needs_norms`` is set.

        Args:
            norms: the norm of each member's whole vector, for all members with a weight above 0.
            weights: the weights of these members.
        """
        return [1.0] * len(norms)

    def aggregate(
        self, values: Sequence[torch.Tensor], weights: Sequence[float], factors: Sequence[float], share: float
    ) -> torch.Tensor | None:
        """Apply :meth:`combine` to tensors of any type; returns ``None`` if all weights are 0.

        Args:
            values: one tensor per member, all of the same shape.
            weights: one per member.
            factors: the result of :meth:`factors` for these members.
            share: as in :meth:`combine`.

        Raises:
            ValueError: ``combine`` returned a tensor of the wrong shape.
        """
        kept = [each for each in zip(values, weights, factors, strict=True) if each[1] > 0]
        if not kept:
            return None
        dtype = kept[0][0].dtype
        rows = torch.stack([value.to(wide_type(dtype)) for value, _, _ in kept])
        if any(factor != 1 for _, _, factor in kept):
            rows *= torch.tensor([factor for _, _, factor in kept], dtype=torch.float64, device="cpu").to(rows.dtype)[
                :, None
            ]
        if dtype.is_complex:
            # Rules see real numbers only. Real and imaginary parts count as separate values.
            rows = torch.view_as_real(rows).flatten(1)
        counts = torch.tensor([weight for _, weight, _ in kept], dtype=torch.float64, device="cpu")
        counts /= counts.max()  # otherwise their sum may overflow
        expected = rows.shape[1:]
        result = self.combine(rows, (counts / counts.sum()).to(rows.dtype), share)
        if result.shape != expected:
            name, shape = type(self).__name__, tuple(result.shape)
            raise ValueError(f"{name}.combine returned the shape {shape} for a part of the shape {tuple(expected)}")
        if dtype.is_complex:
            result = torch.view_as_complex(result.reshape(-1, 2).contiguous())
        return as_type(result, dtype)

    @property
    def fingerprint(self) -> str:
        """The name of the rule and its settings, which must be the same in all members of a group."""
        settings = ", ".join(f"{name.lstrip('_')}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    def __repr__(self) -> str:
        return self.fingerprint


def check_aggregation(name: str, rule: object) -> None:
    """Check that an option is a rule, or ``None`` for the mean.

    Raises:
        TypeError: it is something else.
    """
    if rule is not None and not isinstance(rule, Aggregation):
        made = " (make one: with brackets)" if isinstance(rule, type) and issubclass(rule, Aggregation) else ""
        raise TypeError(f"{name} must be a rule such as ClipToMedianNorm(), or None for the mean, got {rule!r}{made}")


class ClipToMedianNorm(Aggregation):
    """The weighted mean after every vector has been clipped to the norm of the median member's vector.

    Each vector counts as x_i · min(1, median_k ‖x_k‖ / ‖x_i‖). The norms are those of whole vectors, so the result does
    not depend on how vectors are cut into parts. There is nothing to tune. The median is weighted; if it falls between
    two members, the lower norm is used. With fewer than three members nothing is clipped.
    """

    needs_norms = True

    def factors(self, norms: Sequence[float], weights: Sequence[float]) -> Sequence[float]:
        if len(norms) < FEWEST_TO_CLIP:
            return [1.0] * len(norms)
        median = lower_median(norms, weights)
        return [1.0 if norm <= median else median / norm for norm in norms]

    def aggregate(
        self, values: Sequence[torch.Tensor], weights: Sequence[float], factors: Sequence[float], share: float
    ) -> torch.Tensor | None:
        # The mean adds one tensor after another, so it needs no stacked copy of all of them.
        return weighted_mean(values, weights, factors)


def lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted lower median. Weights are above 0.

    It is the smallest value such that it and all smaller ones together have at least half of the total weight.
    """
    half = math.fsum(weights) / 2
    ordered = sorted(zip(values, weights, strict=True))
    below = 0.0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    return ordered[-1][0]


class TrimmedMean(Aggregation):
    """For each value, the mean of the members without the largest and the smallest ones.

    It ignores weights, so a member with one sample counts as much as one with a thousand; otherwise liars would give
    themselves large weights. Yin et al., 2018, https://arxiv.org/abs/1803.01498

    Args:
        fraction: the fraction of the members to leave out at each end, from 0 to below 0.5. The number of members is
            rounded down.

    Raises:
        ValueError: ``fraction`` is out of range.
    """

    ignores_weights = True

    def __init__(self, fraction: float) -> None:
        if not 0 <= fraction < 0.5:
            raise ValueError(f"TrimmedMean leaves out a fraction from 0 to below 0.5 at either end, got {fraction!r}")
        self.fraction = float(fraction)

    def combine(self, values: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
        members = len(values)
        # In floating point, 0.29 · 100 is slightly below 29 and would be rounded down to 28.
        trimmed = math.floor(self.fraction * members + 1e-9)
        return in_order(values)[trimmed : members - trimmed].mean(0)


class CenteredClip(Aggregation):
    """Starts at the median of each value and moves towards the members; no member pulls further than a radius.

    It repeats ::

        v ← v + Σ w_i (x_i - v) · min(1, τ / ‖x_i - v‖) / Σ w_i

    until a step is not longer than 1e-6. Karimireddy et al., 2021, https://arxiv.org/abs/2012.10333. Each reducer
    applies it to its own parts, as in Gorbunov et al., 2022, https://arxiv.org/abs/2106.11257

    Args:
        tau: the radius τ for the whole vector. For a part the radius is τ · √(the part's share of the vector). If
            honest vectors are further apart than τ, they are clipped, too. Liars move the average by at most τ times
            their share of the weight in each step.
        iterations: the largest number of steps.

    Raises:
        ValueError: ``tau`` or ``iterations`` is not above 0.
    """

    def __init__(self, tau: float, iterations: int = 20) -> None:
        if not 0 < tau < math.inf:
            raise ValueError(f"tau is the norm of a vector and must be above 0, got {tau!r}")
        if iterations < 1:
            raise ValueError(f"CenteredClip needs at least one iteration, got {iterations!r}")
        self.tau, self.iterations = float(tau), int(iterations)

    def combine(self, values: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
        ordered, members = in_order(values.clone()), len(values)
        # Halve before adding, because the sum of two huge values may overflow.
        start = ordered[(members - 1) // 2] * 0.5 + ordered[members // 2] * 0.5
        del ordered
        offsets = values.sub_(start)
        if offsets.dtype == torch.float64:
            offsets.clamp_(-LARGEST_OFFSET, LARGEST_OFFSET)
        weighed = self._weigh(_gram(offsets), weights.double(), self.tau * math.sqrt(share))
        return start + weighed.to(offsets.dtype) @ offsets

    def _weigh(self, gram: torch.Tensor, weights: torch.Tensor, tau: float) -> torch.Tensor:
        """The point v that the steps reach, as one coefficient for each member's offset from the start.

        Every vector here is a linear combination of the offsets. So its norm follows from the inner products of the
        offsets (``gram``), and no step has to read the values again.
        """
        moved, members = torch.zeros_like(weights), torch.eye(len(weights), dtype=weights.dtype, device="cpu")
        for _ in range(self.iterations):
            apart = members - moved  # x_i - v, one in each row
            distances = ((apart @ gram) * apart).sum(1).clamp_(min=0).sqrt_()
            clipped = weights * torch.where(distances > tau, tau / distances, 1.0)
            step = clipped @ apart
            moved = moved + step
            if float(step @ gram @ step) <= SMALLEST_STEP**2:
                break
        return moved


# Rows are sorted and multiplied in pieces of this many values (chosen), which stay in the processor's cache.
PIECE = 2**14


def in_order(values: torch.Tensor) -> torch.Tensor:
    """Sort each column in place; shape (members, any number of columns).

    A sorting network compares whole rows (Batcher's odd-even mergesort). That is many times faster than sorting many
    short columns one by one.
    """
    comparisons = list(sorting_network(len(values)))
    for piece in torch.split(values, PIECE, dim=1):
        rows, smaller = piece.unbind(0), torch.empty_like(piece[0])
        for low, high in comparisons:
            torch.minimum(rows[low], rows[high], out=smaller)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low].copy_(smaller)
    return values


def sorting_network(count: int) -> Iterator[tuple[int, int]]:
    """The pairs of positions to compare, in order: after all of them, ``count`` values are in ascending order."""
    width = 1
    while width < count:
        gap = width
        while gap:
            for start in range(gap % width, count - gap, 2 * gap):
                for low in range(start, min(start + gap, count - gap)):
                    if low // (2 * width) == (low + gap) // (2 * width):
                        yield low, low + gap
            gap //= 2
        width *= 2


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """The inner products of all rows with each other, in float64."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    for piece in torch.split(rows, PIECE, dim=1):
        wide = piece.double()
        gram += wide @ wide.t()
    return gram
