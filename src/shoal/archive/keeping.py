"""Keeps archives of a run: from time to time, a peer that does not train downloads the state and stores it.

It listens to the progress of the others and reports none itself, so no peer counts it or waits for it. It takes the
version of the state that most donors have, as newcomers do. Donors know that it only archives the state: a peer that
trains alone does not wait for it, and newcomers are served first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.access.badges import Roles
from shoal.archive.contents import EPOCHS, PREFIXES
from shoal.archive.manifest import Manifest
from shoal.archive.store import Store, memory_of_this_machine
from shoal.averaging.finite import first_not_finite
from shoal.averaging.groups.settings import Trust
from shoal.averaging.node import AveragerNode
from shoal.averaging.state.download import GivenState, State
from shoal.averaging.state.newcomer import DownloadOptions, StateDownloads
from shoal.base.logs import counted, one_line
from shoal.data.kept import read_pass
from shoal.errors import ArchiveError, ShoalError
from shoal.optim.diloco.messages import STATISTICS
from shoal.optim.progress_tracker import ProgressTracker, TrackedTrust
from shoal.p2p import PeerID, StubBase

if TYPE_CHECKING:
    from shoal.dht import DHT, DHTNode

logger = logging.getLogger(__name__)

# How often an archiver checks whether the run has begun, and for a new epoch once an archive is due. Chosen.
SECONDS_BETWEEN_LOOKS = 2.0
# How many donors may give a bad state in one attempt. Chosen.
MOST_BAD = 3
LEAST_RATE = 1e5
"""Bytes per second. Donors take an archiver for dead that needs a minute for a chunk, of 4 MiB in a large state."""


class _NobodyGives(ArchiveError):
    """No donor was found, or none delivered a state."""


class Archiver:
    """Writes the state of a run to a store at intervals.

    Args:
        dht: of this peer.
        run_id: name of the run.
        store: where archives go.
        every: least seconds from the start of one archive to the start of the next.
        keep: the number of newest archives to keep. The one of the highest epoch stays, too.
        rate: the most bytes to download per second.
        say: called with a line for everything that happens.

    Raises:
        ArchiveError: there are archives of another run.
        NotAMemberError: the run is private, and this peer's token does not allow to download its state.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        store: Store,
        *,
        every: float = 600.0,
        keep: int = 5,
        rate: float = math.inf,
        say: Callable[[str], object] = logger.info,
    ) -> None:
        if keep < 1 or not every > 0 or not rate >= LEAST_RATE:
            raise ValueError(
                f"archives need keep >= 1, every > 0 and rate >= {LEAST_RATE:g} bytes per second: got keep={keep}, "
                f"every={every}, rate={rate}"
            )
        check_role(dht)
        store.check_run(run_id)
        self._dht, self._run_id, self._store = dht, run_id, store
        self._every, self._keep, self._say = every, keep, say
        self._tracker = ProgressTracker(dht, run_id, 1, client_mode=True, start=True)
        trust = TrackedTrust(self._tracker)
        self._sources = {kind: downloads_of(dht, run_id, kind, trust, rate) for kind in PREFIXES}
        self._further: str | None = None
        self.latest: Manifest | None = None
        """The manifest of the latest archive that was written."""

    def close(self) -> None:
        """Leave the run."""
        self._tracker.shutdown(1.0)

    def run(self, stop: threading.Event) -> None:
        """Write archives until ``stop`` is set. Failures are reported, and it tries again when the next one is due."""
        due, told = -math.inf, ""
        pause = min(SECONDS_BETWEEN_LOOKS, self._every)
        while not stop.is_set():
            left = due - time.monotonic()
            if left > 0 or not self._is_news():
                stop.wait(min(left, pause) if left > 0 else pause)
                continue
            began_at = time.monotonic()
            try:
                latest = self.write_one()
            except (ShoalError, OSError) as e:
                if str(e) != told:  # while no peer trains, one line is enough
                    self._say(f"no archive: {e}")
                # Retry soon only if nothing was downloaded: donors should not have to serve the state over and over.
                is_cheap = isinstance(e, _NobodyGives)
                told, due = str(e), began_at + (min(self._every, 10.0) if is_cheap else self._every)
                continue
            self._tell_written(latest, time.monotonic() - began_at)
            told, due = "", began_at + self._every

    def write_last(self) -> None:
        """Before the end, write one more archive if the run may have advanced since the latest one.

        Failures are reported.
        """
        if not self._is_news():
            return
        kept = "nothing is kept yet" if self.latest is None else f"epoch {self.latest.epoch} is the latest that is kept"
        self._say(f"One last archive, because {kept}. To leave without it, interrupt again.")
        began_at = time.monotonic()
        try:
            latest = self.write_one()
        except (ShoalError, OSError) as e:
            self._say(f"no archive: {e}")
        else:
            self._tell_written(latest, time.monotonic() - began_at)

    def _tell_written(self, archive: Manifest, seconds: float) -> None:
        total = sum(file.bytes for file in archive.files.values())
        self._say(f"archive of epoch {archive.epoch}: {total / 1e6:.1f} MB in {seconds:.1f} s")

    def _is_news(self) -> bool:
        """Whether the run may be at another epoch than in the latest archive."""
        return self.latest is None or self._tracker.global_epoch != self.latest.epoch

    def write_one(self) -> Manifest:
        """Download the state and write one archive; older ones are removed if there are too many.

        Raises:
            ArchiveError: no donor serves the state, or it could not be written. Earlier archives are unharmed.
            ShoalError: the download failed.
        """
        self._tracker.fetched_global_progress_this_epoch.wait(SECONDS_BETWEEN_LOOKS)
        # Read the pass before the state: chunks that are done by now are in the state, or at most in lost gradients.
        data = self._dht.run_coroutine(partial(_read_pass, run_id=self._run_id))
        bad = set[PeerID]()
        while len(bad) < MOST_BAD:
            for kind, source in self._sources.items():
                found = self._download(kind, source, bad)
                if found is None:
                    continue
                try:
                    is_private = self._dht.p2p.membership is not None
                    self.latest = self._store.write(self._run_id, kind, found[0], data, is_private=is_private)
                except ValueError as e:
                    self._refuse(source, found[1], f"the state of {found[1]} is not kept: {e}", bad)
                    break
                self._tell_further(self._store.prune(self._keep))
                return self.latest
            else:
                break
        if not bad:
            raise _NobodyGives(f"no peer serves the state of run {self._run_id!r}; {self._store.last_good()}")
        raise ArchiveError(f"{counted(len(bad), 'peer')} gave a state that is no good; {self._store.last_good()}")

    def _download(self, kind: str, source: StateDownloads, bad: set[PeerID]) -> tuple[State, PeerID] | None:
        """The state of a run and its donor; ``None`` if only the bad donors serve it."""
        found = self._dht.run_coroutine(partial(_download, source, skip=bad))
        if found is None:
            return None
        metadata, tensors = found
        if kind == "DiLoCo" and isinstance(metadata, dict) and EPOCHS[kind] in metadata:
            inner = self._download_statistics(source)
            if inner is not None:
                return State({**metadata, "inner": inner.metadata}, [*tensors, *inner.tensors]), found.donor
        return State(metadata, tensors), found.donor

    def _download_statistics(self, source: StateDownloads) -> State | None:
        """The statistics of inner optimizers differ between peers; those of any peer will do if they are finite."""
        bad = set[PeerID]()
        while len(bad) < MOST_BAD:
            found = self._dht.run_coroutine(partial(_download, source, skip=bad, part=STATISTICS, most_voters=1))
            if found is None or not found.tensors:
                break
            if first_not_finite(found.tensors) is None:
                return found
            self._refuse(
                source, found.donor, f"the statistics of {found.donor} are not kept: some are NaN or infinite", bad
            )
        return None

    def _refuse(self, source: StateDownloads, donor: PeerID, why: str, bad: set[PeerID]) -> None:
        """Log why the state of a donor is bad, and do not ask it again for a while."""
        logger.warning("%s", one_line(why))
        bad.add(donor)
        self._dht.run_coroutine(partial(_leave_out, source, donor))

    def _tell_further(self, archive: str | None) -> None:
        if archive is not None and archive != self._further:
            self._say(
                f"the run is behind {archive}, which stays. If it was restarted by mistake: stop its peers, and bring "
                f"it back with `shoal revive {self._store.url}/{archive}`"
            )
        self._further = archive


def check_role(dht: DHT) -> None:
    """Check that this peer may download states.

    Raises:
        NotAMemberError: the run is private, and its token does not allow that.
    """
    if dht.p2p.membership is not None:
        dht.p2p.membership.check_own(Roles.TRAIN)


def downloads_of(
    dht: DHT, run_id: str, kind: str, trust: Trust | None = None, rate: float = math.inf
) -> StateDownloads:
    """Make the downloader that finds and asks the donors of a run; it serves nothing itself.

    Args:
        kind: of the optimizers of the run.
        trust: ranks the donors.
        rate: the most bytes to download per second.
    """
    prefix = PREFIXES[kind].format(run_id)
    options = DownloadOptions(
        max_bytes=memory_of_this_machine(),
        chunk_timeout=30.0,  # chosen: seconds of silence before it gives up on a donor
        is_one_state=False,  # this peer does not know how the run averages
        trains=False,
        rate=rate,
    )

    def get_stub(peer: PeerID) -> StubBase:
        return AveragerNode.get_stub(dht.p2p, peer, namespace=prefix)

    return StateDownloads(dht.p2p, dht.node, f"{prefix}.all_averagers", get_stub, options, trust)


async def _download(source: StateDownloads, *_: Any, **options: Any) -> GivenState | None:
    return await source.download(**options)


async def _read_pass(_: DHT, node: DHTNode, *, run_id: str) -> dict[str, Any] | None:
    return await read_pass(node, run_id)


async def _leave_out(source: StateDownloads, donor: PeerID, *_: Any) -> None:
    source.leave_out(donor, None)
