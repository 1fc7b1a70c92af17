"""Exchanges with other peers: averages their messages of fragments, and gives states to peers that lack something."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging import DecentralizedAverager, StepControl
from shoal.averaging.averager import Infos
from shoal.averaging.control import AveragingMode
from shoal.averaging.node import average_once
from shoal.averaging.round.session import GroupSession
from shoal.averaging.state.download import OwnedState, State, check_bytes, check_fit
from shoal.averaging.state.newcomer import MAX_VOTERS, CheckTensors
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import CompressionInfo, TensorMetadata, TensorRole
from shoal.compression.base import copies_of
from shoal.optim.diloco.fragment_updates import FragmentUpdates
from shoal.optim.diloco.fragments import ROLE as EXTRA_ROLE
from shoal.optim.diloco.fragments import ExtraTensors, Fragment
from shoal.optim.diloco.inner import InnerOptimizers
from shoal.optim.diloco.messages import EXTRA, STATISTICS, OuterStatement, answer, parse_request
from shoal.optim.diloco.slots import SlotCounter
from shoal.optim.history.journal import SHARE_FOR_NEWCOMERS, Update
from shoal.optim.setup.optimizer_state import statistics_of

# The most statistics that an inner optimizer keeps of a value. Chosen: those of torch keep up to three.
MOST_STATISTICS = 8
# The roles of the tensors of a fragment: of the first one, and of all others.
ROLES = TensorRole.PARAMETER, TensorRole.OPTIMIZER


@dataclass(frozen=True)
class OuterDonor:
    """What this peer has for others, besides its messages. Called in worker threads."""

    counter: SlotCounter
    fragments: Sequence[FragmentUpdates]
    lock: threading.RLock
    """Held while outer parameters, or statistics of inner optimizers, change."""
    inner: InnerOptimizers
    shares_inner_state: bool
    extra: ExtraTensors
    """The tensors that are averaged as they are, with the first fragment."""

    def _layout_of(self, fragment: Fragment) -> list[list[Any]]:
        """The number of each parameter of a fragment, where it begins and its shape, for archives."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.inner.parameters)}
        places = zip(fragment.parameters, fragment.offsets, strict=True)
        return [[numbers[id(parameter)], offset, list(parameter.shape)] for parameter, offset in places]

    def everything(self) -> OwnedState:
        """The state for newcomers: outer parameters and what belongs to them, all of one moment."""
        with self.lock:
            found = [each.dump() for each in self.fragments]
            tensors = copies_of([tensor for _, own in found for tensor in own])
            layouts = [self._layout_of(each.fragment) for each in self.fragments]
            parts = zip(found, layouts, strict=True)
            described = [{**metadata, "tensors": len(own), "layout": layout} for (metadata, own), layout in parts]
            names = list(self.inner.names)
            infos = [
                CompressionInfo.from_tensor(tensor, key=index, role=ROLES[index > 0])
                for _, own in found
                for index, tensor in enumerate(own)
            ]
            return OwnedState({"slot": self.counter.slot, "fragments": described, "names": names}, tensors, infos)

    def part(self, part: bytes) -> OwnedState | None:
        """A part of the state: statistics of the inner optimizers, extra tensors, or updates that another peer lacks.

        ``None``: there are updates, but this peer does not have them.
        """
        if part == STATISTICS:
            if not self.shares_inner_state:
                return OwnedState(None, [])
            with self.lock:
                described, tensors = self.inner.dump_statistics()
                copies = copies_of(tensors)
                infos = [CompressionInfo.from_tensor(tensor, key=n, role=ROLES[1]) for n, tensor in enumerate(copies)]
                return OwnedState(described, copies, infos)
        if part == EXTRA:
            return OwnedState(None, [self.extra.read()] if self.extra else [])
        found, is_far_behind = dict[int, list[Update]](), False
        wanted = parse_request(part, len(self.fragments))
        with self.lock:
            for number, (version, _) in wanted.items():
                each = self.fragments[number]
                if updates := each.journal.since(version):
                    found[number] = updates
                else:
                    is_far_behind |= version < each.state.version
        if not found and (is_far_behind or any(known is not None for _, known in wanted.values())):
            return None
        return answer(found)

    def check(self, part: bytes, given: Sequence[TensorMetadata]) -> None:
        """Check what another peer offers of a part of the state, before it is downloaded. Called in the event loop.

        Raises:
            ValueError: this peer has no use for such tensors.
        """
        own = [each for fragment in self.fragments for each in fragment.state.layout]
        if not part:
            check_fit(given, own)
        elif part == EXTRA:
            check_fit(given, [((self.extra.length,), torch.float32)] if given else [])
        elif part == STATISTICS:
            # They may not exist here yet, so only their size is checked. The training thread waits for this download.
            known = sum(each.nbytes for optimizer in self.inner.optimizers for each in statistics_of(optimizer))
            usual = MOST_STATISTICS * sum(each.numel() * 8 for each in self.inner.parameters)
            check_bytes(given, max(known, usual) + 2**20)
        else:
            # A donor keeps at most this many bytes of updates, or the latest one.
            vectors = 4 * sum(fragment.fragment.length for fragment in self.fragments)
            check_bytes(given, SHARE_FOR_NEWCOMERS * vectors)


def tag_of(fragment: int) -> str:
    """The tag under which a fragment is averaged."""
    return f"fragment_{fragment}"


class OuterAverager(DecentralizedAverager):
    """Averages one flat vector per fragment, each with a tag of its own, so that fragments do not wait for others.

    Args:
        donor: has the fragments, and gives others what they lack.
        phases: the settings that all peers of the run must share, in words.
        args: of :class:`~shoal.averaging.DecentralizedAverager`, without the tensors.
        options: the same.
    """

    def __init__(self, donor: OuterDonor, phases: str, *args: Any, **options: Any) -> None:
        self.phases, self.donor = phases, donor
        vectors = [each.vector for each in donor.fragments]
        infos = [
            CompressionInfo.from_tensor(vector, key=number, role=TensorRole.GRADIENT)
            for number, vector in enumerate(vectors)
        ]
        tags = {tag_of(number): [number] for number in range(len(vectors))}
        self.extra = torch.zeros(donor.extra.length, dtype=torch.float32, device="cpu")
        """The vector of extra tensors, averaged in the rounds of the first fragment."""
        if donor.extra:
            infos.append(CompressionInfo.from_tensor(self.extra, key=len(infos), role=EXTRA_ROLE))
            tags[tag_of(0)].append(len(vectors))
            vectors.append(self.extra)
        super().__init__(vectors, *args, tensor_infos=infos, tags=tags, **options)

    async def average_in_group(self, session: GroupSession, tensors: Sequence[torch.Tensor], infos: Infos) -> None:
        """Judge by the statements of the members, then average."""
        if session.mode is not AveragingMode.AUX:
            each = next(each for each in self.donor.fragments if each.vector is tensors[0])
            statements = [_read(packed) for packed in session.group.gathered]
            clients = [n for n, mode in enumerate(session.group.modes) if mode == AveragingMode.CLIENT]
            if not each.judge(statements, session.own_index, session.group.group_id, clients):
                session.weight = 0.0
        await average_once(session, tensors, infos)

    def help(self, fragment: int, scheduled_time: float, timeout: float) -> StepControl:
        """As an auxiliary, look for a group that averages a fragment. It waits for a trigger."""
        options: dict[str, Any] = {"require_trigger": True, "wait": False, "tag": tag_of(fragment)}
        control = self.step(scheduled_time=scheduled_time, timeout=timeout, **options)
        assert isinstance(control, StepControl)
        return control

    @property
    def group_size(self) -> int | None:
        """The size of groups that can be drawn beforehand; ``None``: groups are formed as peers come."""
        node = self.node
        is_free = not node.config.initial_group_bits and not node.trust.depth()
        return node.config.target_group_size if is_free else None

    def meet_under(self, fragment: int, bits: str) -> None:
        """In the next round of a fragment, look for a group under these bits."""
        self.node.lanes[tag_of(fragment)].keys.group_bits = bits

    def get_current_state(self) -> OwnedState:
        return self.donor.everything()

    @property
    def is_giving(self) -> bool:
        """Whether peers are downloading the state of this one."""
        return self.node.state_sharing.is_busy

    def get_part(self, part: bytes) -> OwnedState | None:
        return self.donor.part(part)

    def _check_of_downloads(self) -> CheckTensors:
        return functools.partial(self.donor.check, b"")

    def load_part_from_peers(
        self, part: bytes, timeout: float, *, differs: bool = False
    ) -> concurrent.futures.Future[State | None]:
        """Download a part of the state from another peer; ``None`` if nobody gives it.

        Args:
            differs: every peer has another one, so it is useless to ask several peers for their versions.
        """
        return self._portal.submit(self._load_part(part, timeout, 1 if differs else MAX_VOTERS))

    async def _load_part(self, part: bytes, timeout: float, most_voters: int) -> State | None:
        async with asyncio.timeout(timeout):
            check = functools.partial(self.donor.check, part)
            return await self.node.state_downloads.download(part=part, most_voters=most_voters, check=check)


def _read(packed: bytes) -> OuterStatement | None:
    try:
        return OuterStatement.parse(MSGPackSerializer.loads(packed))
    except ValueError:
        return None
