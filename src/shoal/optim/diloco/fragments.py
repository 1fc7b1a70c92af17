"""The model's parameters as flat vectors of float32 numbers on the CPU.

Parameters are exchanged one *fragment* at a time. A :class:`MergePolicy` brings the result back into the model. Tensors
that are not trained, such as the running means of batch norms, are averaged as they are (:class:`ExtraTensors`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.compression import CompressionBase, NoCompression, RoleAdaptiveCompression, TensorRole
from shoal.compression.one_result import OneResult
from shoal.optim.setup.training_setup import check_parameters

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Fragment:
    """Some of the parameters, and their places in a flat vector."""

    parameters: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    """Where each parameter begins in the vector. What lies between two of them is zero."""
    length: int
    """Of the vector."""

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor], block: int = 1) -> Fragment:
        """Lay parameters out in a vector, in their order.

        Args:
            block: codecs encode this many values together. A parameter with at least that many begins at a multiple of
                it, so that its blocks hold no values of others; smaller ones follow each other.
        """
        parameters, offsets, end = tuple(parameters), [], 0
        for parameter in parameters:
            begin = -(-end // block) * block if parameter.numel() >= block else end
            offsets.append(begin)
            end = begin + parameter.numel()
        return cls(parameters, tuple(offsets), end)

    @property
    def values(self) -> int:
        """How many values the parameters have."""
        return sum(parameter.numel() for parameter in self.parameters)

    def new_vector(self) -> torch.Tensor:
        """A vector of zeros."""
        return torch.zeros(self.length, dtype=torch.float32, device="cpu")

    def views_of(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The part of a vector that belongs to each parameter, in the shape of that parameter."""
        return [
            vector[offset : offset + parameter.numel()].view(parameter.shape)
            for parameter, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    def unchanged(self, mean: torch.Tensor) -> list[slice]:
        """Where in a vector the parameters are that nobody has trained: their part of the mean change is zero."""
        places = [slice(n, n + p.numel()) for n, p in zip(self.offsets, self.parameters, strict=True)]
        return [place for place in places if not mean[place].any()]

    @torch.no_grad()
    def read(self, vector: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the parameters into a vector, by default a new one, and return it."""
        vector = self.new_vector() if vector is None else vector
        for view, parameter in zip(self.views_of(vector), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return vector

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Copy a vector into the parameters, rounded to their types."""
        for view, parameter in zip(self.views_of(vector), self.parameters, strict=True):
            parameter.detach().copy_(view)

    @torch.no_grad()
    def rounded(self, vector: torch.Tensor) -> torch.Tensor:
        """What :meth:`read` would return after :meth:`write`: the values as the parameters' types can hold them."""
        result = vector.clone()
        for view, parameter in zip(self.views_of(result), self.parameters, strict=True):
            if parameter.dtype not in (torch.float32, torch.float64):
                view.copy_(view.to(parameter.dtype))
        return result


class Fragments(Sequence[Fragment]):
    """All trained parameters, each in exactly one fragment.

    Args:
        parameters: those that the inner optimizers train. One that is given twice counts once, and one without
            gradients or values not at all.
        fragments: how many fragments of about the same size; or for each fragment, the parameters that belong to it.
            Parameters that no fragment names go where there is least.
        block: how many values codecs encode together, see :meth:`Fragment.of`.

    Raises:
        TypeError, ValueError: they cannot be divided like that.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        fragments: int | Sequence[Iterable[torch.Tensor]] = 1,
        block: int = 1,
    ) -> None:
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        check_parameters(unique)
        trained = [parameter for parameter in unique if parameter.requires_grad and parameter.numel()]
        if not trained:
            raise ValueError("no parameter requires gradients: there is nothing to train")
        for index, parameter in enumerate(unique):
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(f"parameter {index} is of type {parameter.dtype}: only real numbers can be averaged")
        chosen = divide(unique, trained, fragments)
        position = {id(parameter): index for index, parameter in enumerate(trained)}
        places = [sorted(position[id(parameter)] for parameter in each) for each in chosen]
        self._fragments = [Fragment.of((trained[index] for index in each), block) for each in places]
        self._description = ";".join(
            ",".join(f"{index}:{tuple(trained[index].shape)}" for index in each) for each in places
        )

    def __len__(self) -> int:
        return len(self._fragments)

    def __getitem__(self, index: int) -> Fragment:  # type: ignore[override]
        return self._fragments[index]

    @property
    def fingerprint(self) -> str:
        """Peers whose fragments have other parameters, or the same ones elsewhere, have another one."""
        layout = ";".join(f"{each.offsets}:{each.length}" for each in self._fragments)
        return hashlib.sha256(f"{self._description}|{layout}".encode()).hexdigest()[:16]


def divide(
    all_parameters: Sequence[torch.Tensor],
    trained: Sequence[torch.Tensor],
    fragments: int | Sequence[Iterable[torch.Tensor]],
) -> list[list[torch.Tensor]]:
    """The parameters of each fragment, in any order.

    Args:
        all_parameters: those of the inner optimizers, each once.
        trained: those of them that are exchanged.
        fragments: see :class:`Fragments`.

    Raises:
        ValueError: they cannot be divided like that.
    """
    known, given = {id(p) for p in trained}, {id(p) for p in all_parameters}
    if isinstance(fragments, int):
        if fragments < 1:
            raise ValueError(f"there must be at least 1 fragment, got {fragments}")
        chosen: list[list[torch.Tensor]] = [[] for _ in range(fragments)]
    else:
        chosen = []
        named: set[int] = set()
        for number, each in enumerate(fragments):
            own = list({id(parameter): parameter for parameter in each}.values())
            for parameter in own:
                if id(parameter) in named:
                    raise ValueError(f"a parameter of fragment {number} is in another fragment, too: name it once")
                if id(parameter) not in given and getattr(parameter, "requires_grad", True):
                    raise ValueError(
                        f"fragment {number} names a parameter that no inner optimizer trains: leave it out, or give it "
                        "to the optimizer"
                    )
            named.update(map(id, own))
            chosen.append([parameter for parameter in own if id(parameter) in known])
    placed = {id(parameter) for each in chosen for parameter in each}
    sizes = [sum(parameter.numel() for parameter in each) for each in chosen]
    rest = [parameter for parameter in trained if id(parameter) not in placed]
    for parameter in sorted(rest, key=lambda p: -p.numel()):  # sorting keeps the order of equal ones
        emptiest = min(range(len(sizes)), key=lambda index: sizes[index])
        chosen[emptiest].append(parameter)
        sizes[emptiest] += parameter.numel()
    if not all(chosen):
        raise ValueError(
            f"{len(chosen)} fragments of {len(trained)} parameters: fragment {chosen.index([])} would be empty: use "
            "fewer"
        )
    return chosen


def strided_fragments(modules: Iterable[torch.nn.Module], fragments: int) -> list[list[torch.Tensor]]:
    """Divide the blocks of a model evenly: block i goes to fragment ``i % fragments``.

    Args:
        modules: the blocks, in order. What they do not contain, such as embeddings, goes to the smallest fragment.
        fragments: how many fragments to make.

    Returns:
        For each fragment its parameters, for ``fragments=`` of the optimizer.

    Raises:
        ValueError: there are fewer blocks than fragments.
    """
    blocks = list(modules)
    if not 1 <= fragments <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks can be divided into 1 to {len(blocks)} fragments, not {fragments}")
    chosen: list[list[torch.Tensor]] = [[] for _ in range(fragments)]
    placed: set[int] = set()
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            if id(parameter) not in placed:  # blocks may share parameters
                placed.add(id(parameter))
                chosen[index % fragments].append(parameter)
    return chosen


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


REBASE = "rebase"


@dataclass(frozen=True)
class MergePolicy:
    """The rule.

    Raises:
        ValueError: there is no such rule.
    """

    alpha: float | str
    """The weight of the local values: 0 replaces them, 1 leaves the model alone. ``"rebase"``: the model moves by what
    the exchange has changed, and keeps the progress that it has made meanwhile."""

    def __post_init__(self) -> None:
        if self.alpha == REBASE:
            return
        is_number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        if not is_number or not 0 <= self.alpha <= 1:  # type: ignore[operator]
            raise ValueError(f'fragment_update_alpha must be a number from 0 to 1, or "{REBASE}": got {self.alpha!r}')

    @classmethod
    def choose(cls, alpha: float | str | None, delay: int | None) -> MergePolicy:
        """The user's rule, or by default the one that suits.

        Args:
            alpha: the rule; ``None``: the default.
            delay: the inner steps between sending and applying; ``None``: as many as the exchange takes.
        """
        if alpha is None:
            alpha = 0.0 if delay == 0 else REBASE
        return cls(alpha)

    @property
    def is_rebase(self) -> bool:
        """Whether local progress since sending is kept as it is."""
        return self.alpha == REBASE

    @torch.no_grad()
    def apply(self, fragment: Fragment, outer: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Bring new outer parameters into the model.

        Args:
            outer: the outer parameters.
            sent: the parameters of the model when they were sent; ``None``: they are the same now. Only ``"rebase"``
                needs them.
        """
        if self.alpha == 0 or (self.is_rebase and sent is None):
            fragment.write(outer)
        elif self.is_rebase:
            assert sent is not None
            shift(fragment, fragment.rounded(outer), sent)
        elif self.alpha != 1:
            assert isinstance(self.alpha, (int, float))
            local = fragment.read()
            fragment.write(local.mul_(self.alpha).add_(fragment.rounded(outer).mul_(1 - self.alpha)))


@torch.no_grad()
def shift(fragment: Fragment, to: torch.Tensor, start: torch.Tensor) -> None:
    """Move the model by the difference of two vectors."""
    fragment.write(fragment.read().add_(to - start))
