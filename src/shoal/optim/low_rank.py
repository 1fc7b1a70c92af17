"""Low-rank approximation of large tensors: their matrices, orthonormal bases, and the state that all peers share.

Before a round, each member states which rounds have made its state. From these statements all members derive the same
:class:`Agreement`: which state counts, and whether some members lack it.
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
from shoal.base.logs import quoted
from shoal.base.serializer import MSGPackSerializer

# In units of the rounding error. A column is mere noise if its part orthogonal to the columns before it is shorter.
MIN_RELATIVE_RESIDUAL = 32.0


@torch.no_grad()
def orthogonalize_(matrix: torch.Tensor, eps: float = 1e-8) -> None:
    """Make the columns of a matrix orthonormal, in place, from left to right.

    A column that is zero, or up to rounding a combination of the ones before it, becomes zero: it has no new direction,
    and its remainder would be noise that differs between machines. If there are more columns than rows, this applies to
    the surplus ones. The values may have any scale; half precision is computed in single precision.

    Args:
        matrix: (rows, columns), changed in place. The space that it spans stays the same.
        eps: relative length below which a column counts as a combination of the ones before it; rounding sets a lower
            bound.

    Raises:
        ValueError: it is not a matrix of real floating point numbers.
    """
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise ValueError(
            f"expected a matrix of floating point numbers, got {matrix.dtype} of size {tuple(matrix.shape)}"
        )
    if matrix.numel() == 0:
        return
    wide = matrix.dtype if matrix.dtype in (torch.float32, torch.float64) else torch.float32
    scale = torch.linalg.vector_norm(matrix, ord=torch.inf, dim=0).to(wide)
    # Scale first: the squares of tiny values would be zero.
    scaled = matrix.to(wide) / torch.where(scale > 0, scale, 1)
    shortest = torch.linalg.vector_norm(scaled, dim=0) * max(eps, MIN_RELATIVE_RESIDUAL * torch.finfo(wide).eps)
    directions, products = torch.linalg.qr(scaled)
    residuals = products.diagonal()
    if len(residuals) == len(scale) and bool((residuals.abs() > shortest).all()):
        matrix.copy_(directions * residuals.sign())
    else:
        # If a column adds nothing, the factorization makes up a direction, which changes the columns after it.
        matrix.copy_(_orthogonal_columns(scaled, shortest))


def _orthogonal_columns(matrix: torch.Tensor, shortest: torch.Tensor) -> torch.Tensor:
    """Gram-Schmidt; a column becomes zero if its new part is not longer than ``shortest``."""
    columns = matrix.t().contiguous()  # makes each column contiguous
    for index in range(len(columns)):
        column, before = columns[index], columns[:index]
        # The second pass removes the rounding errors of the first one.
        for _ in range(2):
            column -= before.t() @ (before @ column)
        length = torch.linalg.vector_norm(column)
        column *= torch.where(length > shortest[index], 1 / length, 0)
    return columns.t()


def get_flatten_greedy_dims(tensor: torch.Tensor, max_ndim: int = 2) -> Sequence[int]:
    """Sizes of a tensor with at most ``max_ndim`` dimensions that has the same values in the same order.

    The two neighboring dimensions with the smallest product are merged, the leftmost of equal pairs, until there are
    few enough: (16, 3, 5, 5) gives (16, 75).

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


# The ``made_by`` of a state before any round.
NEVER = bytes(GROUP_ID_BYTES)

# Upper limit for the rounds that a statement, a checkpoint or a donor may claim: floats count in ones up to here.
MAX_ROUNDS = 2**53
# A member may be ahead by this many rounds: one that the others have missed, and one that it is about to end.
MOST_ROUNDS_AHEAD = 2
# Of a statement: the number of rounds, and the start of a hash.
_COUNT_BYTES = 8
_DIGEST_BYTES = 8
_ORIGIN_BYTES = GROUP_ID_BYTES + _COUNT_BYTES + _DIGEST_BYTES


class LowRankState(NamedTuple):
    """The state that all members share. Immutable, and replaced as a whole: a failed round leaves nothing behind."""

    bases: tuple[torch.Tensor, ...]
    """For each compressed tensor of (rows, columns): the directions that the next round starts from, (columns, rank)"""
    estimates: tuple[torch.Tensor, ...]
    """For each compressed tensor, the common estimate of the average: (rows, columns). Empty without estimates."""
    made_by: bytes = NEVER
    """Identifies the rounds that led here: equal in two peers that took part in the same ones."""
    rounds: int = 0
    """Number of these rounds."""
    digest: bytes = b""
    """Hash of the values: equal in two peers if all bits are equal. Empty if it has not been computed."""

    def with_digest(self) -> LowRankState:
        """The same state, with its digest computed."""
        return self._replace(digest=_digest([*self.bases, *self.estimates]))

    def tensors(self) -> list[torch.Tensor]:
        """The whole state as floating point tensors, for :meth:`replaced_by`."""
        matrices = [*self.bases, *self.estimates]
        origin = self.made_by + self.rounds.to_bytes(_COUNT_BYTES, "big") + _digest(matrices)
        return [*matrices, torch.tensor(list(origin), dtype=torch.float32, device="cpu")]

    def replaced_by(self, tensors: Sequence[torch.Tensor]) -> LowRankState:
        """Another peer's state, from its :meth:`tensors`. If bits were lost on the way, it does not count as the same.

        Raises:
            ValueError: the shapes differ from those of this state, or values are not finite.
        """
        own = [*self.bases, *self.estimates]
        shapes = [tuple(t.shape) for t in tensors]
        own_shapes = [*(tuple(t.shape) for t in own), (_ORIGIN_BYTES,)]
        if shapes != own_shapes:
            raise ValueError(
                f"buffers for low-rank averaging have shapes {quoted(shapes)}, expected {quoted(own_shapes)}"
            )
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise ValueError("buffers for low-rank averaging are not finite")
        copies = tuple(t.detach().to(mine.dtype, copy=True) for t, mine in zip(tensors[:-1], own, strict=True))
        origin, split = bytes(tensors[-1].round().clamp(0, 255).to(torch.uint8).tolist()), len(self.bases)
        made_by, rounds, digest = NEVER, 0, _digest(copies)
        # Otherwise the codec has changed the values, so they are not the state that the donor stated.
        if origin[-_DIGEST_BYTES:] == digest:
            made_by = origin[:GROUP_ID_BYTES]
            rounds = min(int.from_bytes(origin[GROUP_ID_BYTES:-_DIGEST_BYTES], "big"), MAX_ROUNDS - 1)
        return LowRankState(copies[:split], copies[split:], made_by, rounds, digest)


def _digest(matrices: Sequence[torch.Tensor]) -> bytes:
    return hash_of([memoryview(m.contiguous().numpy()).cast("B") for m in matrices])[:_DIGEST_BYTES]


def after_round(made_by: bytes, round_id: bytes) -> bytes:
    """The ``made_by`` of the same rounds and one more."""
    return hashlib.sha256(made_by + round_id).digest()[:GROUP_ID_BYTES]


def first_basis(name: str, columns: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The first basis: (columns, rank), uniform in [-1, 1], with the same bits on every machine.

    Args:
        name: different names give different directions.
    """
    digest = hashlib.shake_256(name.encode()).digest(2 * columns * rank)
    values = np.frombuffer(digest, dtype="<i2").astype(np.float32)
    return torch.from_numpy((values + 0.5) / 2**15).reshape(columns, rank).to(dtype)


# --- statements before a round ----------------------------------------------------------------------------------------


class LowRankStatement(NamedTuple):
    """A member's statement about its state before a round."""

    for_user: bytes
    """Data from its user for the other users."""
    made_by: bytes | None
    """Identifies the rounds that made its state; ``None`` if it has no state, or one that is about to change."""
    rounds: int
    """Number of these rounds, including one that is about to change it; 0 if it has no state."""
    digest: bytes
    """Hash of its state; empty if it has not been computed."""

    @classmethod
    def parse(cls, blob: bytes) -> LowRankStatement:
        """Read another member's statement; one that makes no sense counts as that of a member without a state."""
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
        """The statement as a plain value."""
        return list(self)


class Agreement(NamedTuple):
    """The conclusion from all statements. It is the same for all members, because all have the same statements."""

    made_by: bytes | None
    """Identifies the state that counts; ``None`` if no member could name its state."""
    differs: bool
    """Whether some members lack that state, as far as they could tell."""
    rounds: int
    """Number of rounds before this one."""
    same_bits: bool
    """Whether the digests prove that all members have it, bit by bit."""


def agree(statements: Sequence[LowRankStatement]) -> Agreement:
    """Choose the state of most members, and among several the one with the most rounds behind it.

    Rounds are only claimed: the member that claims most must not replace what the others have in common. A state before
    any round counts only if there is no other one.
    """
    present = [s for s in statements if s.made_by is not None or s.rounds > 0]
    rounds = max((s.rounds for s in present), default=0)
    known = Counter((s.made_by, s.rounds) for s in present if s.made_by is not None)
    if not known:
        return Agreement(None, bool(present), rounds, False)
    differs = len({s.made_by for s in present}) > 1
    same_bits = not differs and len({s.digest for s in present}) == 1 and present[0].digest != b""
    chosen, _ = max(known.items(), key=lambda item: (item[0][0] != NEVER, item[1], item[0][1], item[0][0]))
    made_by, of_chosen = chosen
    return Agreement(made_by, differs, min(rounds, of_chosen + MOST_ROUNDS_AHEAD), same_bits)
