"""Targets that turn bytes into tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.compression import CompressionType, SerializedTensor, deserialize_torch_tensor, serialize_torch_tensor
from tests.fuzz.fuzzing import Target
from tests.fuzz.mutation import Mutator

VALUES = 5000
"""A full block of every codec, and one that is not full."""
_TENSORS = [torch.linspace(-1, 3, VALUES), torch.zeros(VALUES).index_fill_(0, torch.tensor([7, 4095, 4990]), 0.5)]


def _feed(code: int) -> Callable[[bytes], str]:
    metadata = serialize_torch_tensor(_TENSORS[0], code).metadata

    def feed(hostile: bytes) -> str:
        try:
            tensor = deserialize_torch_tensor(SerializedTensor(metadata, hostile))
        except RuntimeError:
            return "refused"
        assert tensor.shape == (VALUES,)
        return "read"

    return feed


def _hostile(code: int) -> Callable[[Mutator], bytes]:
    seeds = [bytes(serialize_torch_tensor(tensor, code).buffer) for tensor in _TENSORS]
    return lambda mutator: mutator.bytes(mutator.one_of(seeds), seeds)


def targets() -> list[Target]:
    return [Target(f"tensor, {code.name}", _hostile(code), _feed(code)) for code in CompressionType]
