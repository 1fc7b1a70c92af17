"""Averages what peers tell about fragments. Each fragment has a tag of its own, so fragments do not wait for others."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.averaging import DecentralizedAverager
from shoal.averaging.allreduce.session import GroupSession
from shoal.averaging.averager import Infos
from shoal.averaging.node import average_once
from shoal.averaging.state.download import OwnedState, State
from shoal.averaging.state.gathering import MAX_VOTERS
from shoal.compression import CompressionInfo, TensorRole
from shoal.optim.outer.chain import Statement
from shoal.serializer import MSGPackSerializer

Judge = Callable[[Sequence[Statement | None], int, bytes], tuple[bool, float]]
"""Looks at what all members of a group have said, this peer's own position among them, and the group's id. Decides
whether its message counts and by which factor it is made smaller. Called in the event loop. May raise
``AllreduceException``: there is no round then."""


def tag_of(fragment: int) -> str:
    """The tag under which a fragment is averaged."""
    return f"fragment_{fragment}"


class OuterAverager(DecentralizedAverager):
    """Averages one flat vector per fragment.

    Args:
        lengths: of these vectors.
        agreement: what all peers must have in common, in words. Others do not form groups with this one.
        judges: one for each fragment.
        get_state: the state that newcomers download. Called in a worker thread.
        get_part: a part of the state by its name, likewise.
        options: of :class:`~shoal.averaging.DecentralizedAverager`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        agreement: str,
        judges: Sequence[Judge],
        get_state: Callable[[], OwnedState],
        get_part: Callable[[bytes], OwnedState],
        *args: Any,
        **options: Any,
    ) -> None:
        self.phases = agreement
        self.vectors = tuple(torch.zeros(length, dtype=torch.float32, device="cpu") for length in lengths)
        """What is averaged. Between two rounds of a fragment its vector belongs to the training thread."""
        self._judges, self._get_state, self._get_part = tuple(judges), get_state, get_part
        infos = [
            CompressionInfo.from_tensor(vector, key=number, role=TensorRole.GRADIENT)
            for number, vector in enumerate(self.vectors)
        ]
        tags = {tag_of(number): [number] for number in range(len(self.vectors))}
        super().__init__(self.vectors, *args, tensor_infos=infos, tags=tags, **options)

    async def average_in_group(self, session: GroupSession, tensors: Sequence[torch.Tensor], infos: Infos) -> None:
        """Weigh this peer's message by what the members have said, then average."""
        (vector,) = tensors
        number = next(number for number, each in enumerate(self.vectors) if each is vector)
        statements = [_read(packed) for packed in session.group.gathered]
        counts, factor = self._judges[number](statements, session.own_index, session.group.group_id)
        if not counts:
            session.weight = 0.0
        elif factor != 1:
            vector.mul_(factor)
        await average_once(session, tensors, infos)

    @property
    def group_size(self) -> int | None:
        """How many peers meet, if groups can be drawn beforehand; ``None``: who comes first makes a group."""
        node = self.node
        is_free = not node.config.initial_group_bits and not node.trust.depth()
        return node.config.target_group_size if is_free else None

    def meet_under(self, fragment: int, bits: str) -> None:
        """In the next round of a fragment, look for a group under these bits."""
        self.node.lanes[tag_of(fragment)].keys.group_bits = bits

    def get_current_state(self) -> OwnedState:
        return self._get_state()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        super().run_in_background(await_ready=True, timeout=timeout)
        self.node.state_sharing.get_part = self._get_part

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
            return await self.node.state_sharing.download(part=part, most_voters=most_voters)


def _read(packed: bytes) -> Statement | None:
    try:
        return Statement.parse(MSGPackSerializer.loads(packed))
    except ValueError:
        return None
