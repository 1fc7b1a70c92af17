"""What a tensor looks like, without its values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class CompressionType(IntEnum):
    """Which codec made some bytes. The numbers go over the wire: they never change."""

    NONE = 0
    MEANSTD_16BIT = 1
    FLOAT16 = 2
    QUANTILE_8BIT = 3
    UNIFORM_8BIT = 4
    BLOCKWISE_8BIT = 5
    BFLOAT16 = 6
    BLOCKWISE_4BIT = 7

    @classmethod
    def values(cls) -> list[int]:
        """All codes."""
        return [int(code) for code in cls]

    @classmethod
    def Name(cls, code: int) -> str:
        """Name of a code."""
        return cls(code).name


@dataclass(frozen=True)
class TensorDescriptor:
    """Shape, type and whereabouts of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided
    device: torch.device | None = None
    requires_grad: bool = False
    pin_memory: bool = False
    compression: CompressionType = CompressionType.NONE

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, compression: CompressionType = CompressionType.NONE) -> TensorDescriptor:
        """Describe an existing tensor."""
        pinned = tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad, pinned, compression
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size)

    def numel(self) -> int:
        """Number of values."""
        return self.shape.numel()

    def make_zeros(self, *, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor of zeros that fits this description, on the described device unless told otherwise."""
        return torch.zeros(
            self.size,
            dtype=self.dtype,
            layout=self.layout,
            device=self.device if device is None else device,
            requires_grad=self.requires_grad,
            pin_memory=self.pin_memory,
        )
