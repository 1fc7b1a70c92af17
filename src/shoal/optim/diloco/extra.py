"""Tensors that are not trained, such as the running means of batch norms. They are averaged as they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shoal.compression import CompressionBase, NoCompression, RoleAdaptiveCompression, TensorRole
from shoal.compression.one_result import OneResult
from shoal.optim.diloco.fragments import Fragment

ROLE = TensorRole.UNSPECIFIED
"""Of their vector. That of a fragment is for gradients."""


class ExtraTensors:
    """Some tensors, which go with the rounds of the first fragment as one flat vector of float32 numbers.

    Args:
        tensors: in the same order at all peers.
        trained: the parameters that are exchanged anyhow.

    Raises:
        TypeError, ValueError: they cannot be averaged.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], trained: Iterable[torch.Tensor] = ()) -> None:
        given, known = tuple(tensors), {id(parameter) for parameter in trained}
        for index, tensor in enumerate(given):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"extra_tensors must be tensors, but number {index} is a {type(tensor).__name__}")
            if id(tensor) in known:
                raise ValueError(
                    f"extra tensor {index} is a parameter that the inner optimizer has, too, so that it is exchanged "
                    "anyhow: leave it out"
                )
            if tensor.is_complex() or tensor.dtype == torch.bool:
                raise ValueError(f"extra tensor {index} is of type {tensor.dtype}: only real numbers can be averaged")
            if tensor.grad_fn is not None:
                raise ValueError(f"extra tensor {index} is a result of a computation: give .detach() of it")
        self._fragment = Fragment.of(given)

    def __bool__(self) -> bool:
        return self.length > 0

    @property
    def length(self) -> int:
        """Of the vector."""
        return self._fragment.length

    def read(self, vector: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the tensors into a vector, by default a new one, and return it."""
        return self._fragment.read(vector)

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Copy a vector into the tensors, rounded to their types."""
        for view, tensor in zip(self._fragment.views_of(vector), self._fragment.parameters, strict=True):
            tensor.copy_(view if tensor.is_floating_point() else view.round())

    def load(self, tensors: list[torch.Tensor]) -> None:
        """Take over the vector of another peer.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        match tensors:
            case [vector] if vector.shape == (self.length,) and bool(torch.isfinite(vector).all()):
                self.write(vector)
            case _:
                raise ValueError(f"the extra tensors are not {self.length} finite numbers")

    def codec(self, of_fragments: CompressionBase) -> CompressionBase:
        """The codec of all vectors, if fragments have this one. These values lose nothing: nobody keeps the rest."""
        return RoleAdaptiveCompression(gradient=of_fragments, default=OneResult(NoCompression()))
