"""How a newcomer gets the state of the swarm: who offers it, asking, sending, receiving."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shoal.averaging.allreduce import PEER_FAILURES
from shoal.averaging.protocol import DownloadRequest, StateChunk, StateHeader
from shoal.clock import get_dht_time, timeout
from shoal.compression import CompressionBase, CompressionInfo, deserialize_torch_tensor
from shoal.compression.base import SerializedTensor
from shoal.errors import ProtocolError
from shoal.p2p import P2P, Call, PeerID, StubBase
from shoal.reactor import run_in_worker
from shoal.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
MAX_TENSORS = 2**20
DECLARATION_LIFETIME = 1.5
"""Declarations live for this many periods, so that a slow renewal leaves no gap."""


class State(NamedTuple):
    """What an averager gives to a newcomer."""

    metadata: Any
    """Plain values."""
    tensors: list[torch.Tensor]


GetState = Callable[
    [], "tuple[Any, Sequence[torch.Tensor]] | tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo]]"
]


class StateSharing:
    """Offers this averager's state to others and fetches theirs.

    Args:
        key: DHT key under which donors declare themselves.
        get_state: gives the state to send; called in a worker thread, once for each download.
        chunk_timeout: seconds without the next piece after which a donor is given up.
        max_bytes: larger states are refused before any memory is taken.
    """

    def __init__(
        self,
        p2p: P2P,
        node: Any,
        key: str,
        get_state: GetState,
        codec: CompressionBase,
        *,
        declare_period: float,
        chunk_timeout: float,
        max_bytes: int,
        get_stub: Callable[[PeerID], StubBase],
    ) -> None:
        self.allowed = False
        self.priority = 0.0
        self._p2p, self._node, self._key = p2p, node, key
        self._get_state, self._codec = get_state, codec
        self._declare_period, self._chunk_timeout, self._max_bytes = declare_period, chunk_timeout, max_bytes
        self._get_stub = get_stub
        self._changed = asyncio.Event()
        self._is_declared = False

    def set(self, *, allowed: bool | None = None, priority: float | None = None) -> None:
        """Change what is offered; others see it as soon as the DHT has it."""
        self.allowed = self.allowed if allowed is None else allowed
        self.priority = self.priority if priority is None else priority
        self._changed.set()

    # --- offering -----------------------------------------------------------------------------------------------------

    async def declare_forever(self) -> None:
        """Keep the declaration alive; runs until cancelled."""
        while True:
            self._changed.clear()
            if self.allowed or self._is_declared:
                await self._declare(self.allowed)
            try:
                async with timeout(self._declare_period):
                    await self._changed.wait()
            except (asyncio.TimeoutError, TimeoutError):
                continue

    async def _declare(self, allowed: bool) -> None:
        addresses = [str(address) for address in self._p2p.get_addresses(self._p2p.peer_id)]
        value = [self.priority, addresses] if allowed else None
        expiration = get_dht_time() + DECLARATION_LIFETIME * self._declare_period
        self._is_declared = allowed
        await self._node.store(self._key, value, expiration, subkey=self._p2p.peer_id.to_bytes())

    async def withdraw(self) -> None:
        """Tell others not to ask any more."""
        if self._is_declared:
            await self._declare(allowed=False)

    async def serve(self, call: Call) -> None:
        """Send the state to a peer that asks for it, or refuse."""
        if not self.allowed:
            await call.send(StateHeader(allowed=False), end=True)
            return
        metadata, tensors = await run_in_worker(self._snapshot)
        header = StateHeader(
            allowed=True,
            metadata=metadata,
            tensors=[tensor.metadata for tensor in tensors],
            tensor_bytes=[len(tensor.buffer) for tensor in tensors],
        )
        await call.send(header)
        for index, tensor in enumerate(tensors):
            view = memoryview(tensor.buffer)
            for start in range(0, len(view), CHUNK_BYTES):
                await call.send(StateChunk(tensor=index), view[start : start + CHUNK_BYTES])

    def _snapshot(self) -> tuple[bytes, list[SerializedTensor]]:
        metadata, tensors, *rest = self._get_state()
        infos: Sequence[CompressionInfo] = rest[0] if rest else [CompressionInfo.from_tensor(t) for t in tensors]
        # copies: the originals go on changing while they are sent
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        encoded = [self._codec.compress(copy, info) for copy, info in zip(copies, infos, strict=True)]
        return MSGPackSerializer.dumps(metadata), encoded

    # --- fetching -----------------------------------------------------------------------------------------------------

    async def download(self) -> State | None:
        """The state of the best donor that delivers one, or ``None``."""
        for donor in await self._find_donors():
            try:
                state = await self._download_from(donor)
            except PEER_FAILURES as e:
                logger.warning("could not download the state of %s: %s", donor, str(e) or type(e).__name__)
                continue
            if state is not None:
                return state
            logger.debug("%s does not share its state", donor)
        return None

    async def _find_donors(self) -> list[PeerID]:
        """Donors by descending priority; those of the same priority in random order, to spread the load."""
        found = await self._node.get(self._key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return []
        rng: random.Random = self._p2p.rng
        donors: list[tuple[float, float, PeerID]] = []
        for key, entry in found.value.items():
            if entry.value is None:
                continue
            try:
                priority, addresses = entry.value
                peer = PeerID(key)
                if peer != self._p2p.peer_id:
                    self._p2p.add_addresses(peer, addresses[:8])
                    donors.append((-float(priority), rng.random(), peer))
            except (TypeError, ValueError) as e:
                logger.warning("skipped a malformed record of a donor under %s: %s", self._key, e)
        return [peer for _, _, peer in sorted(donors)]

    async def _download_from(self, donor: PeerID) -> State | None:
        async with self._get_stub(donor).rpc_download_state() as call:
            await call.send(DownloadRequest(), end=True)
            async with timeout(self._chunk_timeout):
                header = await call.receive(StateHeader)
            if header is None:
                raise ProtocolError("ended without an answer")
            if not header.allowed:
                return None
            sizes = header.tensor_bytes
            if len(sizes) != len(header.tensors) or len(sizes) > MAX_TENSORS or any(size < 0 for size in sizes):
                raise ProtocolError("the list of tensors is malformed")
            if sum(sizes) > self._max_bytes:
                raise ProtocolError(f"a state of {sum(sizes)} bytes is over the limit of {self._max_bytes}")
            tensors = []
            for index, (metadata, size) in enumerate(zip(header.tensors, sizes, strict=True)):
                buffer = await self._receive_tensor(call, index, size)
                tensors.append(deserialize_torch_tensor(SerializedTensor(metadata, buffer)))
            return State(MSGPackSerializer.loads(header.metadata), tensors)

    async def _receive_tensor(self, call: Call, index: int, size: int) -> bytearray:
        buffer = bytearray(size)
        view, filled = memoryview(buffer), 0
        while filled < size:
            async with timeout(self._chunk_timeout):
                chunk = await call.receive(StateChunk)
                if chunk is None or chunk.tensor != index or not 0 < call.payload_size <= size - filled:
                    raise ProtocolError(f"tensor {index} ends early or has more bytes than announced")
                end = filled + call.payload_size
                await call.read_payload_into(view[filled:end])
                filled = end
        return buffer
