"""Averages what peers tell about fragments. Each fragment has a tag of its own, so fragments do not wait for others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from shoal.averaging import DecentralizedAverager, StepControl
from shoal.averaging.averager import Infos
from shoal.averaging.control import AveragingMode
from shoal.averaging.node import average_once
from shoal.averaging.round.session import GroupSession
from shoal.averaging.state.download import OwnedState, State
from shoal.averaging.state.newcomer import MAX_VOTERS, CheckTensors
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import run_in_worker
from shoal.compression import CompressionInfo, TensorMetadata, TensorRole
from shoal.optim.diloco.fragments import ROLE as EXTRA_ROLE
from shoal.optim.diloco.messages import OuterStatement


class Contributor(Protocol):
    """What a fragment contributes to a round, as the averager sees it."""

    def judge(
        self, statements: Sequence[OuterStatement | None], own: int, group_id: bytes, clients: Collection[int]
    ) -> tuple[bool, float]:
        """Look at what all members of a group have said. Called in the event loop.

        Args:
            own: this peer's position.
            clients: positions of members from which nobody can download anything.

        Returns:
            Whether its message counts, and by which factor it is made smaller now.

        Raises:
            AllreduceException: there is no round.
        """
        ...

    def reduce_message(self, vector: torch.Tensor, factor: float) -> None:
        """Make the message smaller. Called in a worker thread."""
        ...


def tag_of(fragment: int) -> str:
    """The tag under which a fragment is averaged."""
    return f"fragment_{fragment}"


class OuterAverager(DecentralizedAverager):
    """Averages one flat vector per fragment.

    Args:
        lengths: of these vectors.
        extra_length: of one more vector, which is averaged with the first one; 0: there is none.
        phases: what all peers must have in common, in words. Others do not form groups with this one.
        contributors: one for each fragment.
        get_state: the state that newcomers download. Called in a worker thread.
        get_part: a part of the state by its name, or ``None`` to refuse it, likewise.
        check: refuses the tensors of a part, by its name, before they are downloaded. All of the state has no name.
        options: of :class:`~shoal.averaging.DecentralizedAverager`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        extra_length: int,
        phases: str,
        contributors: Sequence[Contributor],
        get_state: Callable[[], OwnedState],
        get_part: Callable[[bytes], OwnedState | None],
        check: Callable[[bytes, Sequence[TensorMetadata]], object],
        *args: Any,
        **options: Any,
    ) -> None:
        self.phases = phases
        self.vectors = tuple(torch.zeros(length, dtype=torch.float32, device="cpu") for length in lengths)
        """What is averaged. Between two rounds of a fragment its vector belongs to the training thread."""
        self._contributors, self._get_state, self._get_part = tuple(contributors), get_state, get_part
        self._check = check
        infos = [
            CompressionInfo.from_tensor(vector, key=number, role=TensorRole.GRADIENT)
            for number, vector in enumerate(self.vectors)
        ]
        tags = {tag_of(number): [number] for number in range(len(self.vectors))}
        self.extra = torch.zeros(extra_length, dtype=torch.float32, device="cpu")
        """What is averaged as it is, in the rounds of the first fragment."""
        if extra_length:
            infos.append(CompressionInfo.from_tensor(self.extra, key=len(infos), role=EXTRA_ROLE))
            tags[tag_of(0)].append(len(self.vectors))
        vectors = [*self.vectors, self.extra] if extra_length else self.vectors
        super().__init__(vectors, *args, tensor_infos=infos, tags=tags, **options)

    async def average_in_group(self, session: GroupSession, tensors: Sequence[torch.Tensor], infos: Infos) -> None:
        """Weigh this peer's message by what the members have said, then average."""
        if session.mode is AveragingMode.AUX:
            await average_once(session, tensors, infos)
            return
        vector = tensors[0]
        number = next(number for number, each in enumerate(self.vectors) if each is vector)
        statements = [_read(packed) for packed in session.group.gathered]
        own = self._contributors[number]
        clients = [n for n, mode in enumerate(session.group.modes) if mode == AveragingMode.CLIENT]
        counts, factor = own.judge(statements, session.own_index, session.group.group_id, clients)
        if not counts:
            session.weight = 0.0
        elif factor != 1:
            await run_in_worker(own.reduce_message, vector, factor)
        await average_once(session, tensors, infos)

    def help(self, fragment: int, scheduled_time: float, timeout: float) -> StepControl:
        """As an auxiliary, look for a group that averages a fragment. It waits for a trigger."""
        options: dict[str, Any] = {"require_trigger": True, "wait": False, "tag": tag_of(fragment)}
        control = self.step(scheduled_time=scheduled_time, timeout=timeout, **options)
        assert isinstance(control, StepControl)
        return control

    @property
    def group_size(self) -> int | None:
        """How many peers meet, if groups can be drawn beforehand; ``None``: the first to come make a group."""
        node = self.node
        is_free = not node.config.initial_group_bits and not node.trust.depth()
        return node.config.target_group_size if is_free else None

    def meet_under(self, fragment: int, bits: str) -> None:
        """In the next round of a fragment, look for a group under these bits."""
        self.node.lanes[tag_of(fragment)].keys.group_bits = bits

    def get_current_state(self) -> OwnedState:
        return self._get_state()

    def get_part(self, part: bytes) -> OwnedState | None:
        return self._get_part(part)

    def _check_of_downloads(self) -> CheckTensors:
        return functools.partial(self._check, b"")

    def load_part_from_peers(
        self, part: bytes, timeout: float, *, differs: bool = False
    ) -> concurrent.futures.Future[State | None]:
        """Download a part of the state from another peer; ``None`` if nobody gives it.

        Args:
            differs: every peer has another one, so that it makes no sense to ask several which one they have.
        """
        return self._portal.submit(self._load_part(part, timeout, 1 if differs else MAX_VOTERS))

    async def _load_part(self, part: bytes, timeout: float, most_voters: int) -> State | None:
        async with asyncio.timeout(timeout):
            check = functools.partial(self._check, part)
            return await self.node.state_downloads.download(part=part, most_voters=most_voters, check=check)


def _read(packed: bytes) -> OuterStatement | None:
    try:
        return OuterStatement.parse(MSGPackSerializer.loads(packed))
    except ValueError:
        return None
