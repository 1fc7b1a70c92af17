"""Matrices in which large tensors are looked at when a few directions stand for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

MIN_RELATIVE_RESIDUAL = 32.0
"""In units of the rounding error: a column that sticks out less from the ones before it is nothing but noise."""


@torch.no_grad()
def orthogonalize_(matrix: torch.Tensor, eps: float = 1e-8) -> None:
    """Make the columns of a matrix orthonormal, in place, from left to right.

    A column that is zero, or a combination of the ones before it up to rounding, becomes zero: there is no direction in
    it, and what is left of it would be noise that differs from machine to machine. With more columns than rows that
    holds for the surplus ones. Any scale of the values will do; half precision is computed in single precision.

    Args:
        matrix: (rows, columns), changed in place. What it spans stays the same.
        eps: relative length below which a column counts as a combination of the ones before it; rounding sets a lower
            bound.

    Raises:
        ValueError: not a matrix of real floating point numbers.
    """
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise ValueError(
            f"expected a matrix of floating point numbers, got {matrix.dtype} of size {tuple(matrix.shape)}"
        )
    if matrix.numel() == 0:
        return
    wide = matrix.dtype if matrix.dtype in (torch.float32, torch.float64) else torch.float32
    scale = torch.linalg.vector_norm(matrix, ord=torch.inf, dim=0).to(wide)
    scaled = matrix.to(wide) / torch.where(scale > 0, scale, 1)  # the squares of tiny values would be zero
    shortest = torch.linalg.vector_norm(scaled, dim=0) * max(eps, MIN_RELATIVE_RESIDUAL * torch.finfo(wide).eps)
    directions, products = torch.linalg.qr(scaled)
    residuals = products.diagonal()
    if len(residuals) == len(scale) and bool((residuals.abs() > shortest).all()):
        matrix.copy_(directions * residuals.sign())
    else:  # where a column adds nothing, the factorization makes up a direction, which changes the ones after it
        matrix.copy_(_orthogonal_columns(scaled, shortest))


def _orthogonal_columns(matrix: torch.Tensor, shortest: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt; columns of which no more than the ``shortest`` length is new become zero."""
    columns = matrix.t().contiguous()  # each column in one piece of memory
    for index in range(len(columns)):
        column, before = columns[index], columns[:index]
        for _ in range(2):  # the second time removes what rounding has left of the first
            column -= before.t() @ (before @ column)
        length = torch.linalg.vector_norm(column)
        column *= torch.where(length > shortest[index], 1 / length, 0)
    return columns.t()


def get_flatten_greedy_dims(tensor: torch.Tensor, max_ndim: int = 2) -> Sequence[int]:
    """Sizes of a tensor with at most ``max_ndim`` dimensions that has the same values in the same order.

    Of all neighbors the pair with the smallest product is merged, the left one of equals, until few enough are left:
    (16, 3, 5, 5) gives (16, 75).

    Raises:
        ValueError: ``max_ndim`` is less than 1.
    """
    if max_ndim < 1:
        raise ValueError(f"max_ndim must be at least 1, got {max_ndim}")
    sizes = list(tensor.shape)
    while len(sizes) > max_ndim:
        products = [left * right for left, right in itertools.pairwise(sizes)]
        position = products.index(min(products))
        sizes[position : position + 2] = [products[position]]
    return sizes
