"""Orthonormal columns, and matrices that large tensors are looked at as."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.low_rank import get_flatten_greedy_dims, orthogonalize_

pytestmark = pytest.mark.devices

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    """The textbook, in double precision."""
    result: list[torch.Tensor] = []
    for column in matrix.double().t():
        for before in result * 2:
            column = column - before * (before @ column)
        result.append(column / column.norm())
    return torch.stack(result, dim=1)


def assert_orthonormal_or_zero(matrix: torch.Tensor, tolerance: float) -> None:
    products = matrix.double().t() @ matrix.double()
    lengths = products.diagonal()
    assert ((lengths - 1).abs().minimum(lengths) < tolerance).all(), lengths
    assert (products - products.diagonal().diag()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 1), (5, 5), (64, 4), (1000, 32)])
def test_columns_are_those_of_the_textbook(dtype: torch.dtype, rows: int, columns: int) -> None:
    matrix = (random_matrix(rows, columns) + 0.1 * torch.eye(rows, columns)).to(dtype)
    expected = gram_schmidt(matrix)
    orthogonalize_(matrix)
    assert matrix.dtype == dtype
    torch.testing.assert_close(matrix.double(), expected, rtol=0, atol=TOLERANCE[dtype] * 5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_the_scale_does_not_matter(scale: float) -> None:
    matrix = random_matrix(50, 4).float()
    expected = gram_schmidt(matrix)
    matrix *= scale
    matrix[:, 2] *= 1e-7
    orthogonalize_(matrix)
    torch.testing.assert_close(matrix.double(), expected, rtol=0, atol=1e-5)


def test_nearly_parallel_columns_end_orthogonal() -> None:
    """Where the textbook in single precision loses all its digits."""
    epsilon = 1e-4
    matrix = torch.zeros(4, 3)
    matrix[0] = 1.0
    matrix[1:].fill_diagonal_(epsilon)
    orthogonalize_(matrix)
    assert_orthonormal_or_zero(matrix, 1e-6)
    assert (matrix.norm(dim=0) > 0.5).all()


def test_dependent_columns_become_zero() -> None:
    first, second, third = random_matrix(20, 3).float().t()
    columns = [first, torch.zeros(20), 3 * first, second, first - 1e-3 * second, third]
    matrix = torch.stack(columns, dim=1)
    orthogonalize_(matrix)
    assert [bool(column.any()) for column in matrix.t()] == [True, False, False, True, False, True]
    assert_orthonormal_or_zero(matrix, 1e-5)
    for column in columns:  # all that they span is still spanned
        assert (matrix @ (matrix.t() @ column) - column).norm() < 1e-4 * (1 + column.norm())


def test_nothing_to_orthogonalize() -> None:
    matrix = torch.zeros(6, 3)
    orthogonalize_(matrix)
    assert not matrix.any()
    orthogonalize_(torch.empty(0, 3))
    orthogonalize_(torch.empty(3, 0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """So that whoever looks for it still finds it."""
    matrix = random_matrix(8, 3).float()
    matrix[2, 1] = value
    orthogonalize_(matrix)
    assert not matrix.isfinite().all()


def test_more_columns_than_rows() -> None:
    matrix = random_matrix(3, 7).float()
    orthogonalize_(matrix)
    torch.testing.assert_close(matrix[:, :3] @ matrix[:, :3].t(), torch.eye(3), rtol=0, atol=1e-5)
    assert not matrix[:, 3:].any()


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 8), st.integers(0, 2**32), st.sampled_from([1e-20, 1.0]))
def test_any_rank(rows: int, columns: int, rank: int, seed: int, scale: float) -> None:
    matrix = (random_matrix(rows, rank, seed) @ random_matrix(rank, columns, seed + 1) * scale).float()
    original = matrix.double() / scale
    orthogonalize_(matrix)
    assert_orthonormal_or_zero(matrix, 1e-5)
    spanned = matrix.double() @ (matrix.double().t() @ original)
    torch.testing.assert_close(spanned, original, rtol=0, atol=1e-3)


def test_a_view_is_changed_in_place() -> None:
    buffer = torch.zeros(10, 6)
    buffer[:, ::2] = random_matrix(10, 3).float()
    view = buffer[:, ::2]
    parameter = torch.nn.Parameter(random_matrix(4, 2).float())
    orthogonalize_(view)
    orthogonalize_(parameter)
    assert_orthonormal_or_zero(buffer[:, ::2], 1e-5)
    assert not buffer[:, 1::2].any()
    assert_orthonormal_or_zero(parameter.detach(), 1e-5)


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.int64)])
def test_what_is_no_matrix_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a matrix of floating point numbers"):
        orthogonalize_(wrong)


@pytest.mark.parametrize(
    ("sizes", "max_ndim", "expected"),
    [
        ((16, 3, 5, 5), 2, [16, 75]),
        ((2, 3, 4, 5, 6), 2, [120, 6]),
        ((2, 3, 4, 5, 6), 3, [6, 20, 6]),
        ((2, 3, 4), 1, [24]),
        ((7, 8), 2, [7, 8]),
        ((7,), 2, [7]),
        ((), 2, []),
        ((0, 5, 3), 2, [0, 3]),
    ],
)
def test_small_neighbors_are_merged_first(sizes: tuple[int, ...], max_ndim: int, expected: list[int]) -> None:
    assert list(get_flatten_greedy_dims(torch.empty(sizes), max_ndim)) == expected
    with pytest.raises(ValueError, match="max_ndim"):
        get_flatten_greedy_dims(torch.empty(sizes), 0)
