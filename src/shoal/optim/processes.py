"""Processes that are one peer together: what they tell each other, through a group of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.errors import ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What a process that has failed says about it, at most.
REASON_BYTES = 1000
# Tensors travel in batches of about this size: one by one, small ones would be slow.
BUCKET_BYTES = 64 * 2**20


class Command(enum.IntEnum):
    """What the first process wants from the others."""

    GIVE_GRADIENTS = enum.auto()
    CARRY_ON = enum.auto()
    """With the next batch."""
    GIVE_UP = enum.auto()
    """A process has failed, and says now why."""


@dataclass(frozen=True)
class Word:
    """The first process' word to the others. Numbers only: they travel as one small tensor."""

    command: int
    unit: int = 1
    """Gradients are wanted in units of a mean over so many samples."""
    forgets_gradients: bool = False
    sends_parameters: bool = False
    epoch: int = 0
    """Global steps that this peer has made."""
    global_epoch: int = 0
    num_peers: int = 1
    samples_per_second: float = 0.0
    culprit: int = 0
    """Rank of the process that has failed."""


class Processes:
    """The processes of this peer. The first one decides, the others wait for its word.

    Args:
        group: all of them; default: every process of ``torch.distributed``.
        device: where the model is.

    Raises:
        ValueError: there is no process group.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("this process belongs to no group: call torch.distributed.init_process_group() before")
        self._group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        members = dist.get_process_group_ranks(self._group)
        self._members, self._first = members, members[0]
        by_gloo = dist.get_backend(self._group) == "gloo"
        self._device = torch.device("cpu") if by_gloo else device
        # gloo notices at once when a process dies, and does not make the GPU wait
        # local: other groups may make theirs at the same time, and would meet these processes under the same name
        self._control: Any = (
            self._group if by_gloo else dist.new_group(members, backend="gloo", use_local_synchronization=True)
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            raise ProcessGroupError(
                f"another process of this peer has ended or does not answer; process {self.rank} of {self.size} "
                f"cannot go on without it: {e}"
            ) from e

    # --- words --------------------------------------------------------------------------------------------------------

    def add_up(self, number: int, error: Exception | None = None) -> int:
        """The sum of the numbers of all processes. Only the first one gets to know it.

        Args:
            error: this process has failed; the others learn of it. Of those that are not the first, :meth:`hear` does.

        Raises:
            ProcessGroupError: in the first one, if another one has failed.
            Exception: the error of the first one itself.
        """
        total = torch.zeros(1 + self.size, dtype=torch.int64, device="cpu")
        total[0], total[1 + self.rank] = number, int(error is not None)
        with self._failing_clearly():
            dist.reduce(total, self._first, group=self._control)
        if not self.is_first:
            return number
        culprits = total[1:].nonzero().flatten().tolist()
        if culprits:
            raise self.give_up(culprits[0], error)
        return int(total[0].item())

    def agree_on(self, numbers: Sequence[int]) -> bool:
        """Whether all processes have the same numbers."""
        own = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device="cpu")
        least = own.clone()
        with self._failing_clearly():
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._control)
        return bool((least[: len(numbers)] == -least[len(numbers) :]).all())

    def tell(self, word: Word) -> None:
        """Of the first process, to all others."""
        self._broadcast(torch.tensor([float(value) for value in astuple(word)], dtype=torch.float64, device="cpu"))

    def give_up(self, culprit: int, error: BaseException | None) -> BaseException:
        """Of the first process: all others shall know that a process has failed, and why.

        Args:
            culprit: its rank.
            error: of this process, if it has failed.

        Returns:
            What to raise.
        """
        self.tell(Word(Command.GIVE_UP, culprit=culprit))
        return self._learn_reason(culprit, error)

    def _learn_reason(self, culprit: int, error: BaseException | None) -> BaseException:
        reason = torch.zeros(REASON_BYTES, dtype=torch.uint8, device="cpu")
        if culprit == self.rank and error is not None:
            text = f"{type(error).__name__}: {error}".encode()[:REASON_BYTES]
            reason[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
        self._broadcast(reason, culprit)
        if error is not None:
            return error
        text = bytes(reason.tolist()).rstrip(b"\0")
        who = "the first process" if culprit == 0 else f"process {culprit} of {self.size}"
        return ProcessGroupError(f"{who} of this peer has failed: {text.decode(errors='replace')}")

    def hear(self, error: Exception | None = None) -> Word:
        """Wait for the first process' word.

        Args:
            error: this process has failed, and the first one has been told so.

        Raises:
            ProcessGroupError: another process has failed, or the first one has ended.
            Exception: ``error``.
        """
        numbers = torch.zeros(len(astuple(Word(0))), dtype=torch.float64, device="cpu")
        self._broadcast(numbers)
        command, unit, forgets, sends, epoch, global_epoch, peers, speed, culprit = numbers.tolist()
        if command == Command.GIVE_UP:
            raise self._learn_reason(int(culprit), error)
        return Word(
            int(command), int(unit), bool(forgets), bool(sends), int(epoch), int(global_epoch), int(peers), speed
        )

    def _broadcast(self, numbers: torch.Tensor, sender: int = 0) -> None:
        with self._failing_clearly():
            dist.broadcast(numbers, self._members[sender], group=self._control)

    # --- tensors ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sum_at_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the tensors of all processes up, in place, in the first process. In the others they become undefined."""
        for bucket, flat in self._buckets(tensors):
            with self._failing_clearly():
                dist.reduce(flat, self._first, group=self._group)
            _scatter(flat, bucket)

    @torch.no_grad()
    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give the tensors in all processes the values that they have in the first one."""
        for bucket, flat in self._buckets(tensors):
            with self._failing_clearly():
                dist.broadcast(flat, self._first, group=self._group)
            if not self.is_first:
                _scatter(flat, bucket)

    def _buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Tensors of one type that travel together, and a copy of their values, where the group can reach it."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            left = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            while left:
                bucket, size = [left.pop(0)], 0
                while left and (size := size + left[0].nbytes) <= BUCKET_BYTES:
                    bucket.append(left.pop(0))
                yield bucket, torch.cat([tensor.to(self._device).reshape(-1) for tensor in bucket])


def _scatter(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
