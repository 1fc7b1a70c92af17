"""Checks for NaN and infinity that read each value once: a sum is finite only if all of its terms are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression import CompressionInfo, TensorRole

# If a check needs a copy of the values, it copies this many at a time (chosen).
PIECE = 2**19


@torch.no_grad()
def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. Types without such values, such as integers, always pass.

    A sum is finite only if all of its terms are. Summing is about thirty times as fast as ``isfinite`` and needs no
    memory of its own. The sum of finite values may still overflow, so an infinite sum is followed by an exact check.
    """
    return _is_finite(values)


def _is_finite(values: torch.Tensor) -> bool:
    """:func:`all_finite` inside ``no_grad``, which takes longer to enter for each small tensor than the sum itself."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return True
    # A sum in float16 overflows beyond 65504, and for bfloat16 torch copies all values first.
    if values.dtype in (torch.float16, torch.bfloat16):
        sums = [float(piece.sum(dtype=torch.float32)) for piece in _pieces(values)]
        return math.isfinite(sum(sums)) or _look_closely(values)
    return math.isfinite(float(values.sum())) or _look_closely(values)


def _look_closely(values: torch.Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in _pieces(values))


def _pieces(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(values.reshape(-1), PIECE)


@torch.no_grad()
def first_not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """Position of the first tensor with a value that is not finite; ``None`` if there is none.

    Reading a result from a device is slow. So each device other than the CPU is asked once for all of its tensors. Only
    if one of them has such a value, its tensors are asked one by one.
    """
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu" and tensor.is_floating_point() and tensor.numel():
            elsewhere.setdefault(tensor.device, []).append(tensor)
    largest = {device: torch._foreach_norm(group, torch.inf) for device, group in elsewhere.items()}
    sound = {device for device, norms in largest.items() if all_finite(torch.stack([n.float() for n in norms]))}
    unknown = ((i, tensor) for i, tensor in enumerate(tensors) if tensor.device not in sound)
    return next((index for index, tensor in unknown if not _is_finite(tensor)), None)


def name_not_finite(tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]) -> str | None:
    """Describe the first tensor with a value that is not finite, to help find the cause; ``None`` if there is none."""
    index = first_not_finite(tensors)
    if index is None:
        return None
    tensor, info = tensors[index], infos[index]
    count = tensor.numel() - int(tensor.isfinite().sum())
    name = "tensor" if info.role is TensorRole.UNSPECIFIED else info.role.name.lower()
    shape = tuple(tensor.shape)
    return f"{count} of the {tensor.numel()} values of {name} {info.key!r} (shape {shape}) are NaN or infinite"


def without_overflow(values: torch.Tensor) -> torch.Tensor:
    """Repair results that left the range of their type: infinity becomes the end of the range, and NaN becomes 0.

    For results computed from finite values.
    """
    return values if all_finite(values) else values.nan_to_num(nan=0.0)
