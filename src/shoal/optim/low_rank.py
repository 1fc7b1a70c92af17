"""Matrices in which large tensors are looked at when a few directions stand for all of them.

Also what all peers know of them in common, and how they make sure of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.averaging.control import GROUP_ID_BYTES
from shoal.averaging.state.download import hash_of
from shoal.serializer import MSGPackSerializer

# The unit is the rounding error: a column that sticks out less from the ones before it is nothing but noise.
MIN_RELATIVE_RESIDUAL = 32.0


@torch.no_grad()
def orthogonalize_(matrix: torch.Tensor, eps: float = 1e-8) -> None:
    """Make the columns of a matrix orthonormal, in place, from left to right.

    A column that is zero, or a combination of the ones before it up to rounding, becomes zero: there is no direction in
    it, and what is left of it would be noise that differs from machine to machine. With more columns than rows that
    holds for the surplus ones. Any scale of the values will do; half precision is computed in single precision.

    Args:
        matrix: (rows, columns), changed in place. What it spans stays the same.
        eps: relative length below which a column counts as a combination of the ones before it; rounding sets a lower
            bound.

    Raises:
        ValueError: not a matrix of real floating point numbers.
    """
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise ValueError(
            f"expected a matrix of floating point numbers, got {matrix.dtype} of size {tuple(matrix.shape)}"
        )
    if matrix.numel() == 0:
        return
    wide = matrix.dtype if matrix.dtype in (torch.float32, torch.float64) else torch.float32
    scale = torch.linalg.vector_norm(matrix, ord=torch.inf, dim=0).to(wide)
    # The squares of tiny values would be zero.
    scaled = matrix.to(wide) / torch.where(scale > 0, scale, 1)
    shortest = torch.linalg.vector_norm(scaled, dim=0) * max(eps, MIN_RELATIVE_RESIDUAL * torch.finfo(wide).eps)
    directions, products = torch.linalg.qr(scaled)
    residuals = products.diagonal()
    if len(residuals) == len(scale) and bool((residuals.abs() > shortest).all()):
        matrix.copy_(directions * residuals.sign())
    else:
        # Where a column adds nothing, the factorization makes up a direction, which changes the ones after it.
        matrix.copy_(_orthogonal_columns(scaled, shortest))


def _orthogonal_columns(matrix: torch.Tensor, shortest: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt; columns of which no more than the ``shortest`` length is new become zero."""
    columns = matrix.t().contiguous()  # each column in one piece of memory
    for index in range(len(columns)):
        column, before = columns[index], columns[:index]
        # The second time removes what rounding has left of the first.
        for _ in range(2):
            column -= before.t() @ (before @ column)
        length = torch.linalg.vector_norm(column)
        column *= torch.where(length > shortest[index], 1 / length, 0)
    return columns.t()


def get_flatten_greedy_dims(tensor: torch.Tensor, max_ndim: int = 2) -> Sequence[int]:
    """Sizes of a tensor with at most ``max_ndim`` dimensions that has the same values in the same order.

    Of all neighbors the pair with the smallest product is merged, the left one of equals, until few enough are left:
    (16, 3, 5, 5) gives (16, 75).

    Raises:
        ValueError: ``max_ndim`` is less than 1.
    """
    if max_ndim < 1:
        raise ValueError(f"max_ndim must be at least 1, got {max_ndim}")
    sizes = list(tensor.shape)
    while len(sizes) > max_ndim:
        products = [left * right for left, right in itertools.pairwise(sizes)]
        position = products.index(min(products))
        sizes[position : position + 2] = [products[position]]
    return sizes


# Stands for no rounds at all.
NEVER = bytes(GROUP_ID_BYTES)

# Whoever claims more rounds, in a checkpoint or as a donor, is not believed.
MAX_ROUNDS = 2**53
_COUNT_BYTES = 8
_DIGEST_BYTES = 8
_ORIGIN_BYTES = GROUP_ID_BYTES + _COUNT_BYTES + _DIGEST_BYTES


class LowRankState(NamedTuple):
    """Never changed, only replaced as a whole: a round that fails leaves nothing behind."""

    bases: tuple[torch.Tensor, ...]
    """For each compressed tensor, a matrix of (rows, columns): (columns, rank), the directions to begin with."""
    estimates: tuple[torch.Tensor, ...]
    """For each compressed tensor, if there are any: (rows, columns), what all peers take for the average."""
    made_by: bytes = NEVER
    """Stands for the rounds that led here: equal in two peers if these were the same ones."""
    rounds: int = 0
    """How many there have been."""
    digest: bytes = b""
    """Equal in two peers if they have the very same bits; empty if nobody has computed it."""

    def with_digest(self) -> LowRankState:
        """The same state, with its digest."""
        return self._replace(digest=_digest([*self.bases, *self.estimates]))

    def tensors(self) -> list[torch.Tensor]:
        """All of it as tensors of floating point numbers; :meth:`replaced_by` understands them."""
        matrices = [*self.bases, *self.estimates]
        origin = self.made_by + self.rounds.to_bytes(_COUNT_BYTES, "big") + _digest(matrices)
        return [*matrices, torch.tensor(list(origin), dtype=torch.float32, device="cpu")]

    def replaced_by(self, tensors: Sequence[torch.Tensor]) -> LowRankState:
        """Another peer's state. If it has lost some bits on its way, it does not count as the same.

        Raises:
            ValueError: it does not fit into the place of this one.
        """
        own = [*self.bases, *self.estimates]
        shapes = [tuple(t.shape) for t in tensors]
        own_shapes = [*(tuple(t.shape) for t in own), (_ORIGIN_BYTES,)]
        if shapes != own_shapes:
            raise ValueError(f"buffers for low-rank averaging have shapes {shapes}, expected {own_shapes}")
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise ValueError("buffers for low-rank averaging are not finite")
        copies = tuple(t.detach().to(mine.dtype, copy=True) for t, mine in zip(tensors[:-1], own, strict=True))
        origin, split = bytes(tensors[-1].round().clamp(0, 255).to(torch.uint8).tolist()), len(self.bases)
        made_by, rounds, digest = NEVER, 0, _digest(copies)
        if origin[-_DIGEST_BYTES:] == digest:
            made_by = origin[:GROUP_ID_BYTES]
            rounds = min(int.from_bytes(origin[GROUP_ID_BYTES:-_DIGEST_BYTES], "big"), MAX_ROUNDS - 1)
        return LowRankState(copies[:split], copies[split:], made_by, rounds, digest)


def _digest(matrices: Sequence[torch.Tensor]) -> bytes:
    return hash_of([memoryview(m.contiguous().numpy()).cast("B") for m in matrices])[:_DIGEST_BYTES]


def after_round(made_by: bytes, round_id: bytes) -> bytes:
    """What stands for the same rounds and one more."""
    return hashlib.sha256(made_by + round_id).digest()[:GROUP_ID_BYTES]


def first_basis(name: str, columns: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Directions to begin with: (columns, rank), spread evenly over [-1, 1], the same bits on every machine.

    Args:
        name: other names give other directions.
    """
    digest = hashlib.shake_256(name.encode()).digest(2 * columns * rank)
    values = np.frombuffer(digest, dtype="<i2").astype(np.float32)
    return torch.from_numpy((values + 0.5) / 2**15).reshape(columns, rank).to(dtype)


# --- what members tell each other before a round ----------------------------------------------------------------------


class Statement(NamedTuple):
    """What a member says before a round."""

    for_user: bytes
    """What its user gave for the other users."""
    made_by: bytes | None
    """The rounds that made its state; ``None`` if it has none, or one that is about to change."""
    rounds: int
    """How many these are, with the one that is about to change it; 0 if it has none."""
    digest: bytes
    """Of its state; empty if it has not been computed."""

    @classmethod
    def parse(cls, blob: bytes) -> Statement:
        """Read what another member says; from whoever says nothing that makes sense nothing follows."""
        try:
            value = MSGPackSerializer.loads(blob)
        except ValueError:
            value = None
        if not isinstance(value, (list, tuple)) or len(value) != 4:
            return cls(b"", None, 0, b"")
        for_user, made_by, rounds, digest = value
        for_user = for_user if isinstance(for_user, bytes) else b""
        is_count = isinstance(rounds, int) and not isinstance(rounds, bool) and 0 <= rounds < MAX_ROUNDS
        if not is_count or not isinstance(digest, bytes):
            return cls(for_user, None, 0, b"")
        is_origin = isinstance(made_by, bytes) and len(made_by) == GROUP_ID_BYTES
        return cls(for_user, made_by if is_origin else None, rounds, digest)

    def packed(self) -> list[Any]:
        """As a plain value."""
        return list(self)


class Agreement(NamedTuple):
    """What follows from all statements; the same for all members, because all have the same statements."""

    made_by: bytes | None
    """Of the state that counts; ``None`` if nobody could tell."""
    differs: bool
    """Not all members have it, as far as they could tell."""
    rounds: int
    """How many there have been before this one."""
    same_bits: bool
    """All members have shown that they have it, bit by bit."""


def agree(statements: Sequence[Statement]) -> Agreement:
    """The state with most rounds behind it counts, of several that of most members."""
    present = [s for s in statements if s.made_by is not None or s.rounds > 0]
    rounds = max((s.rounds for s in present), default=0)
    known = Counter((s.rounds, s.made_by) for s in present if s.made_by is not None)
    if not known:
        return Agreement(None, bool(present), rounds, False)
    differs = len({s.made_by for s in present}) > 1
    same_bits = not differs and len({s.digest for s in present}) == 1 and present[0].digest != b""
    (_, made_by), _ = max(known.items(), key=lambda item: (item[0][0], item[1], item[0][1]))
    return Agreement(made_by, differs, rounds, same_bits)
