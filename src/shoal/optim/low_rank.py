"""Averages gradients as matrices of low rank: PowerSGD and PowerEF build on :class:`LowRankAverager`.

A matrix D of (rows, columns) is sent as two thin ones. First all members average P = D·Q, where Q is the same for all,
and make the columns of the average orthonormal. Then they average R = Dᵀ·P. The average of all D is about P·Rᵀ, and R
is the next Q: from round to round it turns towards the directions in which gradients are large (power iteration).
PowerSGD and PowerEF differ in what D is, and in how they use the average.

Before a round, each member states which rounds have made its state. From these statements all members derive the same
:class:`Agreement`: which state counts, and whether some members lack it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shoal.averaging import StepControl
from shoal.averaging.control import GROUP_ID_BYTES, AveragingMode, RoundResult
from shoal.averaging.finite import without_overflow
from shoal.averaging.round.session import GroupSession
from shoal.averaging.state.download import Layout, OwnedState, State, hash_of, layout_of
from shoal.averaging.state.newcomer import CheckTensors
from shoal.base.logs import Seldom, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import run_in_worker
from shoal.compression import CompressionInfo, TensorRole
from shoal.errors import AllreduceException, ShoalError
from shoal.optim.grad_averager import GradientAverager, logger
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT

_warn_seldom = Seldom(logger.error)

# In units of the rounding error. A column counts as noise if its part orthogonal to the columns before it is shorter.
# Chosen: well above the error that rounding leaves.
MIN_RELATIVE_RESIDUAL = 32.0


@torch.no_grad()
def orthogonalize_(matrix: torch.Tensor, eps: float = 1e-8) -> None:
    """Make the columns of a matrix orthonormal, in place, from left to right.

    A column becomes zero if it is zero, or a combination of the ones before it up to rounding: it has no new direction,
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
        # For a column without a new direction, the factorization invents one, which changes the columns after it.
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

# Upper limit for the rounds that a statement, a checkpoint or a donor may claim: floats (IEEE 754 doubles) count in
# ones up to here.
MAX_ROUNDS = 2**53
# A member may be ahead by this many rounds: one that the others have missed, and one that it is about to finish.
MOST_ROUNDS_AHEAD = 2
# Sizes in a statement: of the number of rounds, and of the start of a hash.
_COUNT_BYTES = 8
_DIGEST_BYTES = 8
_ORIGIN_BYTES = GROUP_ID_BYTES + _COUNT_BYTES + _DIGEST_BYTES


class LowRankState(NamedTuple):
    """The state that all members share. It is immutable and replaced as a whole, so a failed round changes nothing."""

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
        """Another peer's state, from its :meth:`tensors`. If a codec has changed bits, it counts as another state.

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
        # Otherwise the codec has changed the values, so this is not the donor's state.
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
    """A member's statement, before a round, about its state."""

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
        """Read another member's statement. A malformed one counts as that of a member without a state."""
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
    """Choose the state of most members; in a tie, the one with the most rounds behind it.

    Numbers of rounds are only claims, so a member that claims the most must not replace the state that the others
    share. A state before any round counts only if there is no other one.
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


# --- the averager -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A tensor that is compressed, seen as a matrix."""

    index: int
    """Index of the tensor."""
    rows: int
    columns: int
    dtype: torch.dtype
    """Type for the computation."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as (rows, columns); a view if shape and type allow it, else a copy."""
        return tensor.detach().reshape(self.rows, self.columns).to(self.dtype)


@dataclass
class LowRankRound:
    """The working data of a round; the results replace the state only if the round succeeds."""

    state: LowRankState
    weight: float
    differences: list[torch.Tensor]
    """D, one for each compressed tensor"""
    left: list[torch.Tensor]
    """P"""
    right: list[torch.Tensor]
    """R"""
    uncompressed: list[torch.Tensor]


class LowRankAverager(GradientAverager):
    """Base class: averages large tensors as matrices of low rank, the others as they are.

    A tensor is compressed if that saves at least the share ``min_compression_ratio`` of its values.

    All members of a group must begin with the same state: the matrices Q, and anything that a subclass adds. Before a
    round, each member states which rounds have made its state. If the statements differ, because a member is new or has
    missed a round, the round begins with a phase in which all get the state of most members.

    With a lossy codec the shared state differs between members by as much as the codec loses.

    Args:
        parameters: their gradients are averaged.
        averager_rank: rank of the matrices; a higher one costs more bytes and is more exact.
        min_compression_ratio: tensors on which compression would save less than this share are sent as they are.
        averaged_grads: as in :class:`~shoal.optim.grad_averager.GradientAverager`, like all other arguments.

    Raises:
        ValueError: the arguments contradict each other.
    """

    method: str
    synchronize_every: int | None = None
    """Once in this many rounds all members check that they have the same state, bit by bit; ``None`` = never."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        dht: DHT,
        prefix: str,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        min_compression_ratio: float = 0.5,
        averaged_grads: Sequence[torch.Tensor] | None = None,
        **averager_kwargs: Any,
    ) -> None:
        if averager_rank < 1:
            raise ValueError(f"averager_rank must be at least 1, got {averager_rank}")
        if averager_kwargs.get("averaging_alpha", 1) != 1 or averager_kwargs.get("tags"):
            raise ValueError(f"{type(self).__name__} takes neither averaging_alpha nor tags")
        parameters = tuple(parameters)
        self.rank, self.min_compression_ratio = averager_rank, min_compression_ratio
        self._matrices = [m for i, p in enumerate(parameters) if (m := self._as_matrix(i, p)) is not None]
        compressed = {matrix.index for matrix in self._matrices}
        # The last tensor has the marks of parameters with gradients.
        self._uncompressed = [i for i in range(len(parameters) + bool(parameters)) if i not in compressed]
        self._first_bases = tuple(
            first_basis(f"{prefix}/{m.index}", m.columns, averager_rank, m.dtype) for m in self._matrices
        )
        self._state = self._first_state()
        self._running: StepControl | None = None
        self.phases = f"{self.method} of rank {averager_rank}, saving {min_compression_ratio:g} or more"
        if self.synchronize_every is not None:
            self.phases += f", repaired every {self.synchronize_every} rounds"
        super().__init__(
            parameters,
            dht=dht,
            prefix=prefix,
            reuse_grad_buffers=reuse_grad_buffers,
            accumulate_grads_on=accumulate_grads_on,
            client_mode=client_mode,
            warn=warn,
            averaged_grads=averaged_grads or (),
            **averager_kwargs,
        )

    def _as_matrix(self, index: int, tensor: torch.Tensor) -> Matrix | None:
        """The tensor as a matrix; ``None`` if it is not worth compressing."""
        if tensor.ndim < 2 or tensor.numel() == 0:
            return None
        rows, columns = get_flatten_greedy_dims(tensor)
        saved = 1 - self.rank * (rows + columns) / tensor.numel()
        if saved < self.min_compression_ratio:
            return None
        return Matrix(index, rows, columns, torch.promote_types(tensor.dtype, torch.float32))

    # --- hooks for subclasses -----------------------------------------------------------------------------------------

    def _first_state(self) -> LowRankState:
        return LowRankState(self._first_bases, ())

    def _difference(self, position: int, gradient: torch.Tensor, state: LowRankState, weight: float) -> torch.Tensor:
        """D, the part of a gradient that is sent: a new matrix of the same size."""
        raise NotImplementedError

    def _results(self, work: LowRankRound) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """The averaged gradients, and the estimates of the next state."""
        raise NotImplementedError

    def _contributed(self, work: LowRankRound) -> None:
        """Called when a round has succeeded and this member's gradients are in its average."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        for_user = self.serializer.dumps(kwargs.pop("gather", None))
        state = self._state
        statement = LowRankStatement(for_user, state.made_by, state.rounds, state.digest)
        if self.mode is AveragingMode.AUX:
            statement = LowRankStatement(for_user, None, 0, b"")
        elif not self.is_ready_to_schedule:
            statement = LowRankStatement(for_user, None, state.rounds + 1, b"")
        return super().schedule_step(scheduled_time, gather=statement.packed(), **kwargs)

    schedule_step.__doc__ = GradientAverager.schedule_step.__doc__

    @property
    def is_ready_to_schedule(self) -> bool:
        """Whether no round is in progress. During one, this peer's statement would be outdated when the next begins.

        If a step is scheduled anyway, all members first get the same state, at the cost of a repair.
        """
        return self._running is None or self._running.done()

    def _trigger(self, control: StepControl) -> None:
        self._running = control
        super()._trigger(control)

    async def average_in_group(
        self, session: GroupSession, tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]
    ) -> None:
        """Average in two phases; if the members' states differ, a phase that makes them equal comes first."""
        state = self._state
        statements = [LowRankStatement.parse(blob) for blob in session.group.gathered]
        session.show_gathered([statement.for_user for statement in statements])
        await session.check_values(tensors, infos)
        agreement = agree(statements)
        if agreement.differs or (self._is_checked(agreement.rounds) and not agreement.same_bits):
            state = await self._synchronize(session, state, agreement)
        work = await run_in_worker(self._begin, state, tensors, session.weight)
        if self._matrices:
            await self._reduce(session, work.left)
            await run_in_worker(self._project, work)
        result = await self._reduce(session, [*work.right, *work.uncompressed], with_marks=bool(work.uncompressed))
        if session.mode is AveragingMode.AUX:
            return
        made_by = after_round(state.made_by, session.group.group_id)
        rounds = min(max(agreement.rounds, state.rounds) + 1, MAX_ROUNDS - 1)
        contributed = result.weights[session.own_index] > 0
        await _to_the_end(run_in_worker(self._finish, work, tensors, made_by, rounds, contributed))

    def _is_checked(self, rounds: int) -> bool:
        """Whether states must be equal, bit by bit, after this number of rounds."""
        return self.synchronize_every is not None and rounds > 0 and rounds % self.synchronize_every == 0

    async def _synchronize(self, session: GroupSession, state: LowRankState, agreement: Agreement) -> LowRankState:
        has_it = agreement.made_by is None or state.made_by == agreement.made_by
        weight = 1.0 if has_it and session.mode is not AveragingMode.AUX else 0.0
        copies = await run_in_worker(_copies, [*state.bases, *state.estimates])
        if copies:
            await self._reduce(session, copies, weight)
        split = len(state.bases)
        made_by = session.group.group_id if agreement.made_by is None else agreement.made_by
        return LowRankState(tuple(copies[:split]), tuple(copies[split:]), made_by, agreement.rounds)

    async def _reduce(
        self,
        session: GroupSession,
        tensors: Sequence[torch.Tensor],
        weight: float | None = None,
        *,
        with_marks: bool = False,
    ) -> RoundResult:
        """Average everything or fail: a mix of averages and peers' own values is of no use.

        Args:
            with_marks: the last tensor tells which parameters have gradients.
        """
        roles = [TensorRole.GRADIENT] * len(tensors)
        if with_marks:
            roles[-1] = TensorRole.COUNTER
        numbered = enumerate(zip(tensors, roles, strict=True))
        infos = [CompressionInfo.from_tensor(tensor, key=n, role=role) for n, (tensor, role) in numbered]
        result = await session.all_reduce(tensors, infos, weight=weight)
        # Not an AveragingError, so the round is not retried: another attempt would have the same gradients.
        if weight is None and not any(result.weights):
            raise ShoalError("no member of the group has gradients that count: they are not finite, or have weight 0")
        if result.share_averaged < 1:
            share = 100 * result.share_averaged
            raise AllreduceException(f"only {share:.1f} % of a phase was averaged, which is no use by itself")
        return result

    # --- heavy work, in a worker --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self, state: LowRankState, tensors: Sequence[torch.Tensor], weight: float) -> LowRankRound:
        differences = [
            without_overflow(self._difference(position, matrix.of(tensors[matrix.index]), state, weight))
            for position, matrix in enumerate(self._matrices)
        ]
        pairs = zip(differences, state.bases, strict=True)
        left = [without_overflow(difference @ basis) for difference, basis in pairs]
        uncompressed = _copies([tensors[index] for index in self._uncompressed])
        return LowRankRound(state, weight, differences, left, [], uncompressed)

    @torch.no_grad()
    def _project(self, work: LowRankRound) -> None:
        for left, difference in zip(work.left, work.differences, strict=True):
            orthogonalize_(left)
            work.right.append(without_overflow(difference.t() @ left))

    @torch.no_grad()
    def _finish(
        self, work: LowRankRound, tensors: Sequence[torch.Tensor], made_by: bytes, rounds: int, contributed: bool
    ) -> None:
        results, estimates = self._results(work)
        bases = tuple(
            # Restore a lost direction from the first basis, because it would never recover by itself.
            torch.where((right == 0).all(0), first, right)
            for right, first in zip(work.right, self._first_bases, strict=True)
        )
        for matrix, result in zip(self._matrices, results, strict=True):
            tensor = tensors[matrix.index]
            if tensor.dtype != result.dtype:  # its range may be smaller
                result = result.clamp(-torch.finfo(tensor.dtype).max, torch.finfo(tensor.dtype).max)
            tensor.copy_(result.reshape(tensor.shape))
        for index, average in zip(self._uncompressed, work.uncompressed, strict=True):
            tensors[index].copy_(average)
        state = LowRankState(bases, estimates, made_by, rounds)
        self._state = state.with_digest() if self._is_checked(rounds) else state
        if contributed:
            self._contributed(work)

    # --- for newcomers ------------------------------------------------------------------------------------------------

    def get_buffers(self) -> list[torch.Tensor]:
        return self._state.tensors()

    def set_buffers(self, tensors: Sequence[torch.Tensor]) -> None:
        self._state = self._state.replaced_by(tensors)

    def get_current_state(self) -> OwnedState:
        """The state that all members share, for newcomers to download."""
        tensors = self.get_buffers()
        infos = [CompressionInfo.from_tensor(t, key=i, role=TensorRole.GRADIENT) for i, t in enumerate(tensors)]
        return OwnedState({"group_bits": self.node.group_bits}, tensors, infos)

    def _expected_layout(self) -> Layout | None:
        return layout_of(self.get_buffers()) if self._gives_the_state_of(LowRankAverager) else None

    async def _download_state(self, skip: Collection[PeerID], check: CheckTensors | None) -> State | None:
        state = await super()._download_state(skip, check)
        if state is not None:
            try:
                await run_in_worker(self.set_buffers, state.tensors)
            except ValueError as e:
                _warn_seldom("a downloaded state was refused: %s", e)
                return None
        return state


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run work to its end, even if the step is cancelled or times out: results must not be half written."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
    task.result()
