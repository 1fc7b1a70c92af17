"""Whether numbers are finite, found out by one quick look at each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression import CompressionInfo, TensorRole

# Values that are looked at together where it takes a copy of them.
PIECE = 2**19


@torch.no_grad()
def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; numbers of types that have neither always are.

    A sum is finite only if all of its terms are, and sums are about thirty times as fast as ``isfinite``, without
    memory of their own. If finite numbers have an infinite sum, a second look tells.
    """
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return True
    # Their own sums end at 65504 (float16), or torch copies them first (bfloat16).
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

    Devices other than the CPU are asked once each, unless there is one.
    """
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu" and tensor.is_floating_point() and tensor.numel():
            elsewhere.setdefault(tensor.device, []).append(tensor)
    largest = {device: torch._foreach_norm(group, torch.inf) for device, group in elsewhere.items()}
    sound = {device for device, norms in largest.items() if all_finite(torch.stack([n.float() for n in norms]))}
    unknown = ((i, tensor) for i, tensor in enumerate(tensors) if tensor.device not in sound)
    return next((index for index, tensor in unknown if not all_finite(tensor)), None)


def name_not_finite(tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]) -> str | None:
    """The same in words, for who has to look for the cause."""
    index = first_not_finite(tensors)
    if index is None:
        return None
    tensor, info = tensors[index], infos[index]
    count = tensor.numel() - int(tensor.isfinite().sum())
    name = "tensor" if info.role is TensorRole.UNSPECIFIED else info.role.name.lower()
    shape = tuple(tensor.shape)
    return f"{count} of the {tensor.numel()} values of {name} {info.key!r} (shape {shape}) are NaN or infinite"


def without_overflow(values: torch.Tensor) -> torch.Tensor:
    """Results of a computation on finite numbers; where it left their range, the end of the range, or 0 for NaN."""
    return values if all_finite(values) else values.nan_to_num(nan=0.0)
