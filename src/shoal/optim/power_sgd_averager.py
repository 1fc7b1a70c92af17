"""Averages gradients as matrices of low rank, and sends the remainder later (PowerSGD, arXiv:1905.13727).

A matrix D of (rows, columns) is sent as two slim ones. First all members average P = D·Q, where Q is the same for all,
and make the columns of the average orthonormal. Then they average R = Dᵀ·P. The average of all D is about P·Rᵀ, and R
is the next Q: from round to round it turns towards the directions in which gradients are large (power iteration).
:class:`LowRankAverager` does this. PowerSGD and PowerEF differ in what D is, and in how they use the average.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging import StepControl
from shoal.averaging.control import AveragingMode, RoundResult
from shoal.averaging.finite import without_overflow
from shoal.averaging.round.session import GroupSession
from shoal.averaging.state.download import Layout, OwnedState, State, layout_of
from shoal.averaging.state.newcomer import CheckTensors
from shoal.base.logs import Seldom, quoted
from shoal.base.tasks import run_in_worker
from shoal.compression import CompressionInfo, TensorRole
from shoal.errors import AllreduceException, ShoalError
from shoal.optim.grad_averager import GradientAverager, logger
from shoal.optim.low_rank import (
    MAX_ROUNDS,
    Agreement,
    LowRankState,
    LowRankStatement,
    after_round,
    agree,
    first_basis,
    get_flatten_greedy_dims,
    orthogonalize_,
)
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT


__all__ = ["PowerSGDGradientAverager"]

_warn_seldom = Seldom(logger.error)


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
    round, each member states which rounds have made its state. If these differ, because a member is new or has missed
    a round, the round begins with a phase in which all get the state of most members.

    With a lossy codec the shared state differs between members by as much as the codec loses.

    Args:
        parameters: their gradients are averaged.
        averager_rank: rank of the matrices; a higher one costs more bytes and is more exact.
        min_compression_ratio: tensors that would be compressed less are sent as they are.
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
        # The last one is the marks of parameters that have gradients.
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
        """Whether no round is in progress; during one, this peer's statement would be outdated when the next begins.

        If a step is scheduled anyway, all members first get the same state, which costs as much as a repair.
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
            # Restore a lost direction from the first basis: it would never come back by itself.
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


class PowerSGDGradientAverager(LowRankAverager):
    """Averages gradients by PowerSGD (Vogels et al., 2019, https://arxiv.org/abs/1905.13727).

    Each large tensor of (rows, columns) costs rank · (rows + columns) values instead of rows · columns. The part of a
    peer's gradients that the approximation leaves out stays with this peer and is added to its next gradients (error
    feedback), weighted by the samples that it came from. This memory is lost when the peer leaves.

    Args:
        parameters: their gradients are averaged.
        averager_rank: usually 1 to 4; a higher rank costs more bytes and is more exact. The same in all peers.
        dht: lets averagers find each other.
        prefix: name of the run.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; then never zero gradients.
        accumulate_grads_on: device of the accumulators.
        client_mode: only connect to others; default: as the DHT.
        warn: warn when results are not used, or accumulators are not reset.
        min_compression_ratio: a tensor is averaged as it is if compression would save less than this share. The same
            in all peers.
        averaged_grads: CPU tensors that receive the averages; default: new ones.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.
    """

    method = "PowerSGD"

    # For each compressed tensor, the part left out so far, summed over samples; ``None`` = nothing.
    _errors: list[torch.Tensor] | None = None

    def _difference(self, position: int, gradient: torch.Tensor, state: LowRankState, weight: float) -> torch.Tensor:
        if self._errors is None or weight == 0:
            return gradient.clone()
        return torch.add(gradient, self._errors[position], alpha=min(1 / weight, torch.finfo(gradient.dtype).max))

    @torch.no_grad()
    def _project(self, work: LowRankRound) -> None:
        super()._project(work)
        for difference, left, right in zip(work.differences, work.left, work.right, strict=True):
            difference.addmm_(left, right.t(), alpha=-1)  # D becomes the part that is left out

    def _results(self, work: LowRankRound) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        return [without_overflow(left @ right.t()) for left, right in zip(work.left, work.right, strict=True)], ()

    def _contributed(self, work: LowRankRound) -> None:
        if work.differences:
            torch._foreach_mul_(work.differences, min(work.weight, torch.finfo(torch.float32).max))
        self._errors = [without_overflow(difference) for difference in work.differences]

    def get_memory(self) -> list[torch.Tensor]:
        return [*super().get_memory(), *(self._errors or ())]

    def set_memory(self, tensors: Sequence[torch.Tensor]) -> None:
        split = len(super().get_memory())
        errors = [tensor.detach().clone() for tensor in tensors[split:]]
        shapes, own_shapes = [tuple(e.shape) for e in errors], [(m.rows, m.columns) for m in self._matrices]
        if errors and shapes != own_shapes:
            raise ValueError(f"what was left out has shapes {quoted(shapes)}, expected {quoted(own_shapes)}")
        super().set_memory(tensors[:split])
        self._errors = errors or None
