"""Telling values that are not finite from others."""

from __future__ import annotations

import pytest
import torch

from shoal.averaging.finite import PIECE, all_finite, first_not_finite, name_not_finite, without_overflow
from shoal.compression import CompressionInfo, TensorRole
from shoal.compression.base import DTYPES
from tests.device import on_cpu_only

pytestmark = on_cpu_only  # all values are in host memory here

FLOATING = [dtype for dtype in DTYPES.values() if dtype.is_floating_point or dtype.is_complex]
WHOLE = [dtype for dtype in DTYPES.values() if dtype not in FLOATING]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("size", [(1,), (7, 3), (PIECE + 3,)], ids=str)
def test_one_value_is_found_wherever_it_is(dtype, size):
    for bad in (torch.nan, torch.inf, -torch.inf):
        for position in (0, -1):
            values = torch.ones(size, dtype=dtype)
            assert all_finite(values)
            values.view(-1)[position] = bad
            assert not all_finite(values)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_largest_values_are_finite_although_their_sum_is_not(dtype):
    largest = torch.finfo(dtype).max
    assert all_finite(torch.full((1000,), largest, dtype=dtype))
    signs = torch.tensor([1.0, -1.0]).repeat(5000)
    assert all_finite((signs.to(dtype) * largest).view(100, 100).t())
    values = torch.full((9,), largest, dtype=dtype)
    values[3] = torch.inf
    values[4] = -torch.inf
    assert not all_finite(values)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers_are_finite(dtype):
    assert all_finite(torch.ones(3).to(dtype))
    assert all_finite(torch.full((3,), 2**62).to(dtype))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_no_values_are_finite(dtype):
    assert all_finite(torch.empty(0, dtype=dtype))
    assert all_finite(torch.empty(0, 5, dtype=dtype))


def test_parameters_are_looked_at_without_autograd():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert first_not_finite([parameter, torch.tensor(torch.nan)]) == 1
    assert first_not_finite([parameter, torch.tensor([1, 2])]) is None


def test_what_is_said_names_the_tensor():
    tensor = torch.zeros(2, 3)
    tensor[1, 2], tensor[0, 0] = torch.nan, torch.inf
    info = CompressionInfo.from_tensor(tensor, key="layer.weight", role=TensorRole.PARAMETER)
    expected = "2 of the 6 values of parameter 'layer.weight' (shape (2, 3)) are NaN or infinite"
    assert name_not_finite([tensor], [info]) == expected
    assert name_not_finite([torch.ones(2, 3)], [info]) is None


def test_an_overflow_becomes_the_end_of_the_range():
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan])
    largest = torch.finfo(torch.float32).max
    assert without_overflow(values).tolist() == [1.0, largest, -largest, 0.0]
    sound = torch.ones(3)
    assert without_overflow(sound) is sound
