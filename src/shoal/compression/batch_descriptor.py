"""What a batch of tensors looks like when its length is still open."""

from __future__ import annotations

from typing import Any, cast

import torch

from shoal.compression.base import DTYPES, MAX_DIMENSIONS, dtype_name
from shoal.compression.descriptor import CompressionType, TensorDescriptor
from shoal.serializer import MSGPackSerializer


@MSGPackSerializer.ext_serializable(0x51)
class BatchTensorDescriptor(TensorDescriptor):
    """A tensor whose first dimension, the batch, is not known: it is ``None`` in ``size`` and ``shape``.

    Args:
        instance_size: sizes of one item of the batch.
        kwargs: the other fields of :class:`TensorDescriptor`.
    """

    def __init__(self, *instance_size: int, **kwargs: Any) -> None:
        super().__init__((cast("int", None), *instance_size), **kwargs)

    @classmethod
    def from_tensor(
        cls, tensor: torch.Tensor, compression: CompressionType = CompressionType.NONE
    ) -> BatchTensorDescriptor:
        """Describe batches of which this tensor is one."""
        whole = TensorDescriptor.from_tensor(tensor, compression)
        fields = ("dtype", "layout", "device", "requires_grad", "pin_memory", "compression")
        return cls(*whole.size[1:], **{name: getattr(whole, name) for name in fields})

    @property
    def shape(self) -> Any:
        """As ``size``: ``None`` stands for the length of the batch."""
        return self.size

    def numel(self) -> int:
        raise ValueError("how many values a batch has is not known before its length")

    def make_zeros(self, *batch_size: int, device: torch.device | str | None = None) -> torch.Tensor:
        """A batch of zeros.

        Args:
            batch_size: its length, or several dimensions in its place.
        """
        assert batch_size, "the size of the batch must be given"
        fields = {name: getattr(self, name) for name in ("dtype", "layout", "device", "requires_grad", "pin_memory")}
        return TensorDescriptor((*batch_size, *self.size[1:]), **fields).make_zeros(device=device)

    def packb(self) -> bytes:
        """The wire form.

        Raises:
            ValueError: such tensors cannot be sent.
        """
        if self.layout is not torch.strided:
            raise ValueError(f"only dense tensors can be sent, got {self.layout}")
        device = None if self.device is None else str(self.device)
        instance_size = list(self.size[1:])
        fields = [instance_size, dtype_name(self.dtype), device, self.requires_grad, self.pin_memory]
        return MSGPackSerializer.dumps([*fields, int(self.compression)])

    @classmethod
    def unpackb(cls, data: bytes) -> BatchTensorDescriptor:
        """Read what :meth:`packb` made.

        Raises:
            ValueError: the bytes are not such a description.
        """
        fields = MSGPackSerializer.loads(data)
        if not isinstance(fields, list) or len(fields) != 6:
            raise ValueError("not a description of a batch of tensors")
        size, dtype, device, requires_grad, pin_memory, compression = fields
        is_valid = (
            isinstance(size, list)
            and len(size) < MAX_DIMENSIONS
            and all(isinstance(length, int) and 0 <= length < 2**48 for length in size)
            and isinstance(dtype, str)
            and dtype in DTYPES
            and (device is None or isinstance(device, str))
            and isinstance(requires_grad, bool)
            and isinstance(pin_memory, bool)
        )
        if not is_valid:
            raise ValueError(f"not a description of a batch of tensors: {fields}")
        return cls(
            *size,
            dtype=DTYPES[dtype],
            device=None if device is None else _device(device),
            requires_grad=requires_grad,
            pin_memory=pin_memory,
            compression=CompressionType(compression),
        )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as e:
        raise ValueError(f"not a device: {name!r}: {e}") from None
