"""The processes of one peer, and the messages between them through a group of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.errors import ProcessGroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Most bytes of the error message of a process that has failed.
REASON_BYTES = 1000
# Tensors travel in buckets of about this size, because small ones would be slow one by one.
BUCKET_BYTES = 64 * 2**20


class Command(enum.IntEnum):
    """Commands of the first process to the others."""

    GIVE_GRADIENTS = enum.auto()
    CARRY_ON = enum.auto()
    """Continue with the next batch."""
    OBEY = enum.auto()
    """A call of the first process follows, which the others carry out."""
    GIVE_UP = enum.auto()
    """A process has failed; its error message follows."""


@dataclass(frozen=True)
class ProcessMessage:
    """A message of the first process to the others. It holds only numbers, so it can travel as one small tensor."""

    command: int
    forgets_gradients: bool = False
    sends_parameters: bool = False
    unit: int = 1
    """Gradients must be given in units of a mean over this many samples."""
    epoch: int = 0
    """Number of global steps that this peer has made."""
    position: int = 0
    """Where learning rate schedules stand."""
    global_epoch: int = 0
    num_peers: int = 1
    samples_per_second: float = 0.0
    culprit: int = 0
    """Rank of the process that has failed, with ``GIVE_UP``."""


class Processes:
    """The processes of this peer. The first one decides, the others wait for its word.

    Args:
        group: their process group; default: all processes of ``torch.distributed``.
        device: device of the model.

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
        self.device = torch.device("cpu") if by_gloo else device
        """Where tensors must be that the group exchanges."""
        # gloo notices at once when a process dies, and does not make the GPU wait.
        # Synchronized locally, because other groups may be made at the same time, under the same name otherwise.
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
        """Sum the numbers of all processes. Only the first process gets the sum; the others get their own number.

        Args:
            error: the error of this process, if it has failed; the others learn of it.

        Raises:
            ProcessGroupError: another process has failed; raised in the first process. In the others :meth:`hear`
                raises it.
            Exception: the first process' own error; raised there.
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

    def hear_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each process has told, by rank; all tell equally many numbers."""
        own = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        told = [torch.empty_like(own) for _ in range(self.size)]
        with self._failing_clearly():
            dist.all_gather(told, own, group=self._control)
        return [each.tolist() for each in told]

    def tell_all(self, value: Any) -> list[Any]:
        """What each process tells, by rank."""
        told: list[Any] = [None] * self.size
        with self._failing_clearly():
            dist.all_gather_object(told, value, group=self._control)
        return told

    def tell(self, word: ProcessMessage) -> None:
        """Send a word from the first process to all others."""
        self._broadcast(torch.tensor([float(value) for value in astuple(word)], dtype=torch.float64, device="cpu"))

    def give_up(self, culprit: int, error: BaseException | None) -> BaseException:
        """Called in the first process: tell all others that a process has failed, and why.

        Args:
            culprit: rank of the process that has failed.
            error: the error of this process, if it has failed.

        Returns:
            The error to raise.
        """
        self.tell(ProcessMessage(Command.GIVE_UP, culprit=culprit))
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

    def hear(self, error: Exception | None = None) -> ProcessMessage:
        """Wait for the first process' word.

        Args:
            error: the error of this process if it has failed; the first process has been told so.

        Raises:
            ProcessGroupError: another process has failed, or the first one has ended.
            Exception: ``error``, if it is given.
        """
        numbers = torch.zeros(len(astuple(ProcessMessage(0))), dtype=torch.float64, device="cpu")
        self._broadcast(numbers)
        command, forgets, sends, unit, epoch, position, global_epoch, peers, speed, culprit = numbers.tolist()
        if command == Command.GIVE_UP:
            raise self._learn_reason(int(culprit), error)
        return ProcessMessage(
            *(int(command), bool(forgets), bool(sends), int(unit)),
            *(int(epoch), int(position), int(global_epoch), int(peers), speed),
        )

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin_call(self, name: str, *arguments: Any) -> None:
        """Called in the first process: let all others do something. :meth:`end_call` must follow."""
        self.tell(ProcessMessage(Command.OBEY))
        with self._failing_clearly():
            dist.broadcast_object_list([(name, arguments)], self._first, group=self._control)

    def end_call(self) -> list[Any]:
        """Wait until all others have done that, and return what came of it.

        Raises:
            ProcessGroupError: another process has failed.
        """
        return self._exchange_answers(None, None)[1:]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Let all others do something, and return what came of it, by rank."""
        self.begin_call(name, *arguments)
        return self.end_call()

    def obey(self, handle: Callable[..., Any]) -> None:
        """Carry out a call of the first process, after :attr:`Command.OBEY`.

        Args:
            handle: takes the name of the call and its arguments.

        Raises:
            ProcessGroupError: another process has failed.
            Exception: what ``handle`` raises.
        """
        called: list[Any] = [None]
        with self._failing_clearly():
            dist.broadcast_object_list(called, self._first, group=self._control)
        name, arguments = called[0]
        answer, error = None, None
        try:
            answer = handle(name, *arguments)
        except Exception as e:
            error = e
        self._exchange_answers(answer, error)

    def _exchange_answers(self, answer: Any, error: Exception | None) -> list[Any]:
        told = self.tell_all((answer, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, reason) in enumerate(told):
            if reason is not None:
                raise ProcessGroupError(f"process {rank} of {self.size} of this peer has failed: {reason}")
        return [each for each, _ in told]

    def _broadcast(self, numbers: torch.Tensor, sender: int = 0) -> None:
        with self._failing_clearly():
            dist.broadcast(numbers, self._members[sender], group=self._control)

    # --- tensors ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sum_at_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum the tensors of all processes, in place in the first process; those of the others become undefined."""
        for bucket, flat in self._buckets(tensors):
            self.reduce_to_first(flat)
            _scatter(flat, bucket)

    @torch.no_grad()
    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors' values from the first process to all others."""
        for bucket, flat in self._buckets(tensors):
            self.broadcast_from_first(flat)
            if not self.is_first:
                _scatter(flat, bucket)

    def reduce_to_first(self, flat: torch.Tensor) -> None:
        """Sum a flat tensor on :attr:`device` over all processes, in the first one; elsewhere it becomes undefined."""
        with self._failing_clearly():
            dist.reduce(flat, self._first, group=self._group)

    def broadcast_from_first(self, flat: torch.Tensor) -> None:
        """Send a flat tensor on :attr:`device` from the first process to all others."""
        with self._failing_clearly():
            dist.broadcast(flat, self._first, group=self._group)

    def _buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Buckets of tensors of one type, each with a flat copy of their values on a device that the group can use."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            left = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            while left:
                bucket = [left.pop(0)]
                size = bucket[0].nbytes
                while left and (size := size + left[0].nbytes) <= BUCKET_BYTES:
                    bucket.append(left.pop(0))
                yield bucket, torch.cat([tensor.to(self.device).reshape(-1) for tensor in bucket])


def _scatter(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
