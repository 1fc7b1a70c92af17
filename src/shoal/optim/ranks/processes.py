"""The processes of one peer, and the messages between them through a group of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from shoal.errors import ProcessGroupError
from shoal.optim.setup.devices import is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Tensors are sent in buckets of about this size. Chosen: sending small ones one by one would be slow.
BUCKET_BYTES = 64 * 2**20


class Command(enum.Enum):
    """Commands of the first process to the others."""

    GIVE_GRADIENTS = enum.auto()
    CARRY_ON = enum.auto()
    """Continue with the next batch."""
    OBEY = enum.auto()
    """Do what :attr:`ProcessMessage.call` says."""
    GIVE_UP = enum.auto()
    """The first process has failed."""


@dataclass(frozen=True)
class ProcessMessage:
    """A message of the first process to the others."""

    command: Command
    forgets_gradients: bool = False
    sends_parameters: bool = False
    unit: int = 1
    """Gradients must be sent in units of a mean over this many samples."""
    epoch: int = 0
    """Number of global steps that this peer has made."""
    position: int = 0
    """The position of learning rate schedules."""
    global_epoch: int = 0
    num_peers: int = 1
    samples_per_second: float = 0.0
    call: tuple[str, tuple[Any, ...]] = ("", ())
    """What is called, and its arguments."""
    reason: str = ""
    """Why the first process has failed."""


class Processes:
    """The processes of this peer. The first one decides, and the others wait for its commands.

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
        self._first = members[0]
        by_gloo = dist.get_backend(self._group) == "gloo"
        self.device = torch.device("cpu") if by_gloo else device
        """The device on which the group exchanges tensors."""
        # gloo notices at once when a process dies, and does not make the GPU wait. It is synchronized locally, because
        # other groups, which may be made at the same time, would otherwise have the same name.
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
                f"cannot continue without it: {e}"
            ) from e

    # --- messages -----------------------------------------------------------------------------------------------------

    def share(self, value: Any = None, error: Exception | None = None) -> list[Any]:
        """Share a value with all processes, and return those of all, by rank. If one has failed, this raises in all.

        Args:
            value: of this process; a plain value.
            error: the error of this process, if it has failed.

        Raises:
            ProcessGroupError: another process has failed.
            Exception: ``error``, if it is given.
        """
        told: list[Any] = [None] * self.size
        with self._failing_clearly():
            dist.all_gather_object(told, (value, None if error is None else _text_of(error)), group=self._control)
        if error is not None:
            raise error
        for rank, (_, reason) in enumerate(told):
            if reason is not None:
                who = "the first process" if rank == 0 else f"process {rank} of {self.size}"
                raise ProcessGroupError(f"{who} of this peer has failed: {reason}")
        return [each for each, _ in told]

    def check_same_sizes(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check that all processes train models of one size.

        Raises:
            ValueError: they do not.
        """
        told = self.share([(tuple(parameter.shape), is_dtensor(parameter)) for parameter in parameters])
        if any(each != told[0] for each in told):
            raise ValueError("the processes of this peer train models of different sizes")

    def tell(self, word: ProcessMessage) -> None:
        """Send a message from the first process to all others."""
        self._broadcast(word)

    def give_up(self, error: BaseException) -> None:
        """Called in the first process: tell all others that it has failed."""
        self.tell(ProcessMessage(Command.GIVE_UP, reason=_text_of(error)))

    def hear(self) -> ProcessMessage:
        """Wait for a message of the first process.

        Raises:
            ProcessGroupError: the first process has failed, or has ended.
        """
        word = self._broadcast(None)
        if word.command is Command.GIVE_UP:
            raise ProcessGroupError(f"the first process of this peer has failed: {word.reason}")
        return word

    def _broadcast(self, word: ProcessMessage | None) -> ProcessMessage:
        words: list[Any] = [word]
        with self._failing_clearly():
            dist.broadcast_object_list(words, self._first, group=self._control)
        return cast(ProcessMessage, words[0])

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin_call(self, name: str, *arguments: Any) -> None:
        """Called in the first process: call a function in all others. :meth:`end_call` must follow."""
        self.tell(ProcessMessage(Command.OBEY, call=(name, arguments)))

    def end_call(self) -> list[Any]:
        """Wait until all others are done, and return their results, by rank.

        Raises:
            ProcessGroupError: another process has failed.
        """
        return self.share()[1:]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a function in all others, and return their results."""
        self.begin_call(name, *arguments)
        return self.end_call()

    def obey(self, word: ProcessMessage, handle: Callable[..., Any]) -> None:
        """Carry out a call of the first process.

        Args:
            handle: takes the name of the call and its arguments.

        Raises:
            ProcessGroupError: another process has failed.
            Exception: what ``handle`` raises.
        """
        (name, arguments), answer, error = word.call, None, None
        try:
            answer = handle(name, *arguments)
        except Exception as e:
            error = e
        self.share(answer, error)

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


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _scatter(flat: torch.Tensor, bucket: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
