"""Codecs that choose a codec for each tensor, by its size, role or name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shoal.compression.base import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    SerializedTensor,
    TensorRole,
    plain_name,
)
from shoal.compression.serialization import deserialize_torch_tensor


class AdaptiveCompressionBase(CompressionBase):
    """Base class: override :meth:`choose_compression`. All peers must choose the same codec for the same tensor.

    The chosen codec compresses the parts of a tensor. If a subclass also overrides :meth:`compress`, that is called for
    every part of every tensor instead.
    """

    @abstractmethod
    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        """The codec for this tensor."""

    def choices(self) -> Iterable[tuple[str, CompressionBase]]:
        """Every codec that may be chosen, each with its condition as text; must be the same on all peers.

        Peers whose choices differ refuse to average with each other. If there are none, only class names are compared.
        """
        return ()

    @property
    def fingerprint(self) -> str:
        choices = ", ".join(f"{condition}: {codec.fingerprint}" for condition, codec in self.choices())
        return f"{type(self).__name__}({choices})"

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        is_lossy = [codec.lossy for _, codec in self.choices()]
        return any(is_lossy) or not is_lossy  # unknown codecs may be lossy

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return any(codec.sparse for _, codec in self.choices())

    @property
    def _has_own_compress(self) -> bool:
        return type(self).compress is not AdaptiveCompressionBase.compress

    def for_tensor(self, info: CompressionInfo) -> CompressionBase:
        return self if self._has_own_compress else self.choose_compression(info).for_tensor(info)

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> SerializedTensor:
        return self.choose_compression(info).compress(tensor, info, allow_inplace)

    def compress_and_decode(
        self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> tuple[SerializedTensor, torch.Tensor]:
        if self._has_own_compress:
            return super().compress_and_decode(tensor, info, allow_inplace)
        return self.choose_compression(info).compress_and_decode(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: SerializedTensor) -> torch.Tensor:
        return deserialize_torch_tensor(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self.choose_compression(info).estimate_compression_ratio(info)

    def compressed_nbytes(self, size: Sequence[int], info: CompressionInfo) -> int | None:
        return None if self._has_own_compress else self.choose_compression(info).compressed_nbytes(size, info)


class SizeAdaptiveCompression(AdaptiveCompressionBase):
    """One codec for small tensors and another for large tensors.

    Args:
        threshold: a tensor with at least this many values is large; the whole tensor counts, not the part.
        less: codec for small tensors.
        greater_equal: codec for large tensors.
    """

    def __init__(self, threshold: int, less: CompressionBase, greater_equal: CompressionBase) -> None:
        self.threshold, self.less, self.greater_equal = threshold, less, greater_equal

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self.greater_equal if info.descriptor.numel() >= self.threshold else self.less

    def choices(self) -> Iterable[tuple[str, CompressionBase]]:
        return [(f"<{self.threshold}", self.less), (f">={self.threshold}", self.greater_equal)]


class RoleAdaptiveCompression(AdaptiveCompressionBase):
    """One codec per tensor role; roles without a codec of their own use ``default``."""

    def __init__(
        self,
        *,
        activation: CompressionBase | None = None,
        parameter: CompressionBase | None = None,
        gradient: CompressionBase | None = None,
        optimizer: CompressionBase | None = None,
        default: CompressionBase | None = None,
    ) -> None:
        self.default = default if default is not None else NoCompression()
        given = {
            TensorRole.ACTIVATION: activation,
            TensorRole.PARAMETER: parameter,
            TensorRole.GRADIENT: gradient,
            TensorRole.OPTIMIZER: optimizer,
        }
        self.by_role = {role: codec if codec is not None else self.default for role, codec in given.items()}

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self.by_role.get(info.role, self.default)

    def choices(self) -> Iterable[tuple[str, CompressionBase]]:
        return [*((role.name, codec) for role, codec in self.by_role.items()), ("else", self.default)]


class PerTensorCompression(AdaptiveCompressionBase):
    """One codec per tensor, looked up by ``info.key``: give a sequence if the keys are indices, otherwise a mapping."""

    def __init__(self, tensor_compressions: Sequence[CompressionBase] | Mapping[Any, CompressionBase]) -> None:
        if isinstance(tensor_compressions, Mapping):
            items = tensor_compressions.items()
            tensor_compressions = {plain_name(key) if isinstance(key, str) else key: codec for key, codec in items}
        self.tensor_compressions = tensor_compressions

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self.tensor_compressions[info.key]

    def choices(self) -> Iterable[tuple[str, CompressionBase]]:
        by_key = self.tensor_compressions
        items = by_key.items() if isinstance(by_key, Mapping) else enumerate(by_key)
        return sorted(((repr(key), codec) for key, codec in items), key=lambda item: item[0])
