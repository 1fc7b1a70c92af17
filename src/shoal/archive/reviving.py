"""Revives a run whose peers are all gone: a peer that does not train serves the state of an archive.

It publishes a progress record with the epoch of the archive, which marks it as a mere donor: so newcomers begin at that
epoch, and no peer waits for it in rounds. It is needed until another peer serves the state of that epoch or of a later
one. Announcements of killed peers stay in the DHT for a while, so it asks a peer for its state before it trusts an
announcement.

Of a run in stages it serves all stages (:class:`Offer`), all at the epoch of the newest one: no microbatch would pass
stages of different epochs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shoal.archive.contents import PREFIXES, epoch_of, with_epoch
from shoal.archive.keeping import check_role, downloads_of
from shoal.archive.store import DATA, Archive, memory_of_this_machine
from shoal.averaging import DecentralizedAverager
from shoal.averaging.messages import PEER_FAILURES, DownloadRequest, StateHeader
from shoal.averaging.node import AveragerNode
from shoal.averaging.state.download import OwnedState, State, open_state
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
    from shoal.dht import DHT

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0  # chosen


ReadState = Callable[[], State]
"""Reads a state, from memory or from files. Called in a worker thread for each copy that newcomers need."""


class Donor(DecentralizedAverager):
    """Serves a state that was archived, and does not average.

    Args:
        dht: of this peer.
        run_id: of the optimizers.
        kind: of the optimizers.
    """

    def __init__(self, dht: DHT, run_id: str, kind: str, epoch: int, read: ReadState) -> None:
        self._kind = kind
        super().__init__([], dht, start=False, prefix=PREFIXES[kind].format(run_id))
        self.serve(epoch, read)

    def serve(self, epoch: int, read: ReadState) -> None:
        """From now on, serve this state, as one of this epoch."""
        self._offered = epoch, read
        self.state_sharing_priority = epoch

    def _read(self) -> tuple[State, int]:
        """The state, and its number of tensors before the statistics of inner optimizers."""
        epoch, read = self._offered
        state = with_epoch(self._kind, read(), epoch)
        metadata = state.metadata
        outer = sum(each["tensors"] for each in metadata["fragments"]) if "fragments" in metadata else None
        return state, len(state.tensors) if outer is None else outer

    def get_current_state(self) -> OwnedState:
        (metadata, tensors), outer = self._read()
        return OwnedState({name: value for name, value in metadata.items() if name != "inner"}, tensors[:outer])

    def get_part(self, part: bytes) -> OwnedState | None:
        if self._kind != "DiLoCo" or part != STATISTICS:
            return None  # single updates of the past are not kept
        (metadata, tensors), outer = self._read()
        return OwnedState(metadata.get("inner"), tensors[outer:])


class Offer:
    """One state on offer to newcomers of a run, or of one of its stages, without taking part in it.

    Args:
        dht: of this peer.
        run_id: of the optimizers.
        kind: of the optimizers.
        epoch: as which the state is offered.
        read: reads it.
        rounds: those behind it, as its metadata have them.
    """

    def __init__(
        self, dht: DHT, run_id: str, kind: str, epoch: int, read: ReadState, rounds: bytes | None = None
    ) -> None:
        self._dht, self.kind, self.epoch, self.read, self._rounds = dht, kind, epoch, read, rounds
        self._tracker = ProgressTracker(dht, run_id, 1, start=False)
        self._others = downloads_of(dht, run_id, kind)
        self.donor = Donor(dht, run_id, kind, epoch, read)
        self._tell()

    def start(self) -> None:
        """Begin to serve the state."""
        self.donor.run_in_background()
        self._tracker.run_in_background()
        self._tracker.look_after_others()  # which also makes it publish at once

    def _tell(self) -> None:
        self._tracker.board.donate(self.epoch, get_dht_time())
        if self._rounds:
            self._tracker.compare_rounds()
            self._tracker.adopt_lineage(Lineage.unpack(self._rounds), self.epoch)

    def replace(self, epoch: int, read: ReadState, rounds: bytes | None) -> None:
        """Serve another state of the same run from now on."""
        self.read, self._rounds = read, rounds
        self.serve_as_of(epoch)

    def serve_as_of(self, epoch: int) -> None:
        """From now on, serve the state as one of this epoch."""
        self.epoch = epoch
        self.donor.serve(epoch, self.read)
        self._tell()
        self._tracker.look_after_others()

    async def find_other(self) -> PeerID | None:
        """A peer that trains, and serves a state at least as new as this one."""
        records = self._tracker.board.companions_to_call(get_dht_time())
        trains = {PeerID(r.peer_id) for r in records if not r.is_donor and r.epoch >= self.epoch}
        if not trains:
            return None
        for rank, peer in await self._others.find_donors():
            if peer in trains and -rank >= self.epoch and await self._gives(peer):
                return peer
        return None

    async def _gives(self, peer: PeerID) -> bool:
        """Ask a peer for its state, and check its epoch."""
        try:
            stub = AveragerNode.get_stub(self._dht.p2p, peer, namespace=self.donor.prefix)
            async with stub.rpc_download_state() as call:
                await call.send(DownloadRequest(trains=False))
                header, _ = await open_state(call, memory_of_this_machine(), 30.0)
                await call.send_end()
                if not isinstance(header, StateHeader):
                    return False
                return epoch_of(self.kind, MSGPackSerializer.loads(header.metadata)) >= self.epoch
        except (*PEER_FAILURES, ValueError) as e:
            logger.debug("peer %s does not serve its state: %s", peer, e)
            return False

    def shutdown(self) -> None:
        """Stop. Idempotent."""
        self._tracker.shutdown(1.0)
        self.donor.shutdown()


class Revival(Facade):
    """Serves an archive to all newcomers, until other peers do.

    Args:
        dht: of this peer.
        archive: of the run, or of one stage of it.

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
        self._dht, self._run_id = dht, archive.run_id
        self._passed = None if archive.data is None else _passed_in(archive)
        states = list(archive.stages.values()) or [archive]
        self._offers = [_offer_of(dht, each, max(archive.epoch, archive.newest)) for each in states]
        try:
            self._tell_pass()
            for offer in self._offers:
                offer.start()
        except BaseException:
            self.shutdown()
            raise

    def is_alive(self) -> bool:
        """Whether it serves the state."""
        return all(offer.donor.is_alive() for offer in self._offers)

    def run(self, stop: threading.Event) -> PeerID | None:
        """Serve the state until others do, or until ``stop`` is set.

        Returns:
            The other peer, of a run in stages that of the last stage; ``None`` if there is none.
        """
        left, other = list(self._offers), None
        while left and not stop.wait(SECONDS_BETWEEN_LOOKS):
            if time.monotonic() >= self._told_pass_at + RECORD_SECONDS / 2:
                self._tell_pass()
            for offer in list(left):
                found = self._dht.run_coroutine(lambda *_, offer=offer: offer.find_other())
                if found is not None:
                    offer.donor.allow_state_sharing = False
                    left.remove(offer)
                    other = found
        if left:
            return None
        self._let_end(stop)
        return other

    def _tell_pass(self) -> None:
        """Publish which data are done."""
        self._told_pass_at, passed = time.monotonic(), self._passed
        if passed is not None:
            self._dht.run_coroutine(lambda _, node: tell_pass(node, self._run_id, passed))

    def _let_end(self, stop: threading.Event) -> None:
        """Wait for downloads in flight, for ten minutes at most."""
        ends_at = time.monotonic() + 600.0
        for offer in self._offers:
            slots = offer.donor.node.state_sharing.slots
            while slots.sharings and time.monotonic() < ends_at and not stop.wait(0.1):
                pass

    def shutdown(self) -> None:
        """Leave the run. Idempotent."""
        for offer in self._offers:
            offer.shutdown()


def _offer_of(dht: DHT, archive: Archive, epoch: int) -> Offer:
    if epoch > archive.epoch:
        logger.warning(
            "the state of run %r is of epoch %d, and is served as of epoch %d, which other stages have",
            archive.run_id, archive.epoch, epoch,
        )  # fmt: skip
    state = archive.state
    return Offer(dht, archive.run_id, archive.kind, epoch, lambda: state, state.metadata.get("rounds"))


def _passed_in(archive: Archive) -> PassState:
    try:
        return msgspec.convert(archive.data, PassState, builtin_types=(bytes,))
    except msgspec.ValidationError as e:
        raise ArchiveError(f"{archive.path} cannot be read: {DATA}: {one_line(str(e))}") from e
