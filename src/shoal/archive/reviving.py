"""Revives a run whose peers are all gone: a peer that does not train serves the state of an archive.

It publishes a progress record with the epoch of the archive, which marks it as a mere donor: so newcomers begin at that
epoch, and no peer waits for it in rounds. It is needed until another peer serves the state of that epoch or of a later
one. Announcements of killed peers stay in the DHT for a while, so it asks a peer for its state before it trusts an
announcement.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.archive.contents import PREFIXES, epoch_of
from shoal.archive.keeping import check_role, downloads_of
from shoal.archive.store import DATA, Archive, memory_of_this_machine
from shoal.averaging import DecentralizedAverager
from shoal.averaging.messages import PEER_FAILURES, DownloadRequest, StateHeader
from shoal.averaging.node import AveragerNode
from shoal.averaging.state.download import OwnedState, open_state
from shoal.base.clock import get_dht_time
from shoal.base.closeable import Facade
from shoal.base.logs import one_line
from shoal.base.serializer import MSGPackSerializer
from shoal.data.chunks import PassState
from shoal.data.kept import tell_pass
from shoal.data.leases import RECORD_SECONDS
from shoal.errors import ArchiveError
from shoal.optim.diloco.messages import STATISTICS
from shoal.optim.history.journal import Lineage
from shoal.optim.progress_tracker import ProgressTracker
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht import DHT, DHTNode

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0  # chosen


class Donor(DecentralizedAverager):
    """Serves the state of an archive, and does not average.

    Args:
        dht: of this peer.
        archive: what to serve.
    """

    def __init__(self, dht: DHT, archive: Archive) -> None:
        self._archive = archive
        super().__init__([], dht, start=False, prefix=PREFIXES[archive.kind].format(archive.run_id))
        self.state_sharing_priority = archive.epoch

    @property
    def _outer_tensors(self) -> int:
        """The number of tensors before the statistics of inner optimizers."""
        metadata, tensors = self._archive.state
        return sum(each["tensors"] for each in metadata["fragments"]) if "fragments" in metadata else len(tensors)

    def get_current_state(self) -> OwnedState:
        metadata, tensors = self._archive.state
        return OwnedState(
            {name: value for name, value in metadata.items() if name != "inner"}, tensors[: self._outer_tensors]
        )

    def get_part(self, part: bytes) -> OwnedState | None:
        metadata, tensors = self._archive.state
        if self._archive.kind == "DiLoCo" and part == STATISTICS:
            return OwnedState(metadata.get("inner"), tensors[self._outer_tensors :])
        return None  # single updates of the past are not kept


class Revival(Facade):
    """Serves an archive to all newcomers, until another peer does.

    Args:
        dht: of this peer.
        archive: of the run.

    Raises:
        ArchiveError: the archive's record of a shared pass over data is invalid.
        ValueError: others cannot call this peer, or the run was private and this peer has no token.
        NotAMemberError: the run is private, and this peer's token does not allow to give its state.
    """

    instead_of_a_copy = "read the archive again"

    def __init__(self, dht: DHT, archive: Archive) -> None:
        check_role(dht)
        if archive.is_private and dht.p2p.membership is None:
            raise ValueError(
                f"{archive.path} is of a private run, and without a token anyone could get its model: give the "
                "token of the run, or of a new one"
            )
        if dht.client_mode:
            raise ValueError("a peer that others cannot call cannot serve a state: leave out client_mode")
        self._dht, self._kind, self._epoch = dht, archive.kind, archive.epoch
        self._run_id = archive.run_id
        self._passed = None if archive.data is None else _passed_in(archive)
        self._tracker = ProgressTracker(dht, archive.run_id, 1, start=False)
        self._tracker.board.donate(archive.epoch, get_dht_time())
        if rounds := archive.state.metadata.get("rounds"):
            self._tracker.compare_rounds()
            self._tracker.adopt_lineage(Lineage.unpack(rounds), archive.epoch)
        self._others = downloads_of(dht, archive.run_id, archive.kind)
        self._donor = Donor(dht, archive)
        try:
            self._tell_pass()
            self._donor.run_in_background()
            self._tracker.run_in_background()
            self._tracker.look_after_others()  # which also makes it publish at once
        except BaseException:
            self.shutdown()
            raise

    def is_alive(self) -> bool:
        """Whether it serves the state."""
        return self._donor.is_alive()

    def run(self, stop: threading.Event) -> PeerID | None:
        """Serve the state until another peer does, or until ``stop`` is set.

        Returns:
            The other peer; ``None`` if there is none.
        """
        while not stop.wait(SECONDS_BETWEEN_LOOKS):
            if time.monotonic() >= self._told_pass_at + RECORD_SECONDS / 2:
                self._tell_pass()
            other = self._dht.run_coroutine(self._find_other)
            if other is not None:
                self._donor.allow_state_sharing = False
                self._let_end(stop)
                return other
        return None

    def _tell_pass(self) -> None:
        """Publish which data are done."""
        self._told_pass_at = time.monotonic()
        if self._passed is not None:
            self._dht.run_coroutine(self._tell)

    async def _tell(self, _: DHT, node: DHTNode) -> None:
        assert self._passed is not None
        await tell_pass(node, self._run_id, self._passed)

    async def _find_other(self, *_: Any) -> PeerID | None:
        """A peer that trains, and serves a state at least as new as this one."""
        records = self._tracker.board.companions_to_call(get_dht_time())
        trains = {PeerID(r.peer_id) for r in records if not r.is_donor and r.epoch >= self._epoch}
        if not trains:
            return None
        for rank, peer in await self._others.find_donors():
            if peer in trains and -rank >= self._epoch and await self._gives(peer):
                return peer
        return None

    async def _gives(self, peer: PeerID) -> bool:
        """Ask a peer for its state, and check its epoch."""
        try:
            stub = AveragerNode.get_stub(self._dht.p2p, peer, namespace=self._donor.prefix)
            async with stub.rpc_download_state() as call:
                await call.send(DownloadRequest(trains=False))
                header, _ = await open_state(call, memory_of_this_machine(), 30.0)
                await call.send_end()
                if not isinstance(header, StateHeader):
                    return False
                return epoch_of(self._kind, MSGPackSerializer.loads(header.metadata)) >= self._epoch
        except (*PEER_FAILURES, ValueError) as e:
            logger.debug("peer %s does not serve its state: %s", peer, e)
            return False

    def _let_end(self, stop: threading.Event) -> None:
        """Wait for downloads in flight, for ten minutes at most."""
        slots, ends_at = self._donor.node.state_sharing.slots, time.monotonic() + 600.0
        while slots.sharings and time.monotonic() < ends_at and not stop.wait(0.1):
            pass

    def shutdown(self) -> None:
        """Leave the run. Idempotent."""
        self._tracker.shutdown(1.0)
        self._donor.shutdown()


def _passed_in(archive: Archive) -> PassState:
    try:
        return msgspec.convert(archive.data, PassState, builtin_types=(bytes,))
    except msgspec.ValidationError as e:
        raise ArchiveError(f"{archive.path} cannot be read: {DATA}: {one_line(str(e))}") from e
