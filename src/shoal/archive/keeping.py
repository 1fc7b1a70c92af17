"""Keeps archives of a run: from time to time, a peer that does not train downloads the state and stores it.

It listens to the progress of the others and reports none itself, so no peer counts it or waits for it. It takes the
version of the state that most donors have, as newcomers do. Donors know that it only archives the state: a peer that
trains alone does not wait for it, and newcomers are served first.

Of a run in stages it keeps all stages in one archive. It asks the donors of all stages at the same time, and begins the
downloads once all have the same epoch (:class:`Together`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.access.badges import Roles
from shoal.archive.contents import EPOCHS, PREFIXES, CheckedState, epoch_of
from shoal.archive.manifest import Manifest
from shoal.archive.store import Store, memory_of_this_machine, told_of_stages
from shoal.averaging.finite import first_not_finite
from shoal.averaging.groups.settings import Trust
from shoal.averaging.messages import StateHeader
from shoal.averaging.node import AveragerNode
from shoal.averaging.state.download import State
from shoal.averaging.state.newcomer import AcceptState, DownloadOptions, StateDownloads
from shoal.base.logs import counted, one_line
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import first_completed, run_in_worker
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
# Donors of some stages may be at an earlier epoch than those of others. They are asked again after the first number of
# seconds, until the second one has passed. Chosen: stages step within seconds of each other, and a donor waits a minute
# for a newcomer.
SECONDS_TO_ASK_AGAIN, SECONDS_FOR_ONE_EPOCH = 4.0, 20.0
# Up to how many processes of a peer are looked for that share the model. Chosen: larger machines are rare.
MOST_PROCESSES = 16

FindStages = Callable[["DHTNode", str], Awaitable[Mapping[int, str]]]
"""Finds the stages of a run: by number, the run id of the optimizers of each. Empty: it has none that is held."""


class _NobodyGives(ArchiveError):
    """No donor was found, or none delivered a state."""


class StagesMissing(ArchiveError):
    """An archive of a run in stages was written without the present state of all stages."""


class Together:
    """Lets the downloads of all stages begin when their donors have the same epoch. Lives in the event loop.

    Args:
        stages: their numbers.
    """

    def __init__(self, stages: Collection[int]) -> None:
        # By stage: the epoch and the size of the state that its donors offer; ``None``: they have not answered yet.
        self._offers: dict[int, tuple[int, int] | None] = dict.fromkeys(stages)
        self._news = asyncio.Event()
        self._ends_at = asyncio.get_running_loop().time() + SECONDS_FOR_ONE_EPOCH

    def leave_out(self, stage: int) -> None:
        """No donor gives this stage: the others do not wait for it."""
        self._offers.pop(stage, None)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def accepts(self, stage: int, epoch: int, nbytes: int) -> bool:
        """Wait until all stages are at this epoch, or there is no more time for that.

        Returns:
            Whether to download; otherwise other stages are ahead, and the donors of this one should be asked again.

        Raises:
            ArchiveError: all stages together are larger than the memory of this machine.
        """
        now = asyncio.get_running_loop().time
        self._offers[stage] = epoch, nbytes
        self._tell()
        while True:
            known = [offer for offer in self._offers.values() if offer is not None]
            if (total := sum(nbytes for _, nbytes in known)) > memory_of_this_machine():
                raise ArchiveError(
                    f"the stages have {total} bytes together, more than the memory of this machine: archive them on a "
                    "larger one"
                )
            if now() >= self._ends_at:
                return True
            if epoch < max(known)[0]:
                await asyncio.sleep(SECONDS_TO_ASK_AGAIN)
                return False
            if len(known) == len(self._offers) and all(other == epoch for other, _ in known):
                return True
            await first_completed(self._news.wait(), timeout=self._ends_at - now())


class RunSource:
    """The donors of a run, or of one of its stages.

    Args:
        dht: of this peer.
        run_id: of the optimizers.
        trust: ranks the donors.
        rate: the most bytes to download per second.
    """

    def __init__(self, dht: DHT, run_id: str, trust: Trust, rate: float = math.inf) -> None:
        self.run_id = run_id
        self._sources = {kind: downloads_of(dht, run_id, kind, trust, rate) for kind in PREFIXES}

    async def take(self, together: Together | None = None, stage: int = 0) -> CheckedState:
        """Download the state, and check that it can be kept.

        Args:
            together: the downloads of all stages; this one is of ``stage``.

        Raises:
            ArchiveError: no donor gives a good state.
        """
        bad = set[PeerID]()
        while len(bad) < MOST_BAD:
            for kind, source in self._sources.items():
                accepts = None if together is None else partial(_accepts, kind, together, stage)
                found = await self._download(kind, source, bad, accepts)
                if found is None:
                    continue
                try:
                    return await run_in_worker(CheckedState.of, self.run_id, kind, found[0])
                except ValueError as e:
                    self._refuse(source, found[1], f"the state of {found[1]} is not kept: {e}", bad)
                    break
            else:
                break
        if not bad:
            raise _NobodyGives(f"no peer serves the state of run {self.run_id!r}")
        raise ArchiveError(f"{counted(len(bad), 'peer')} gave a state that is no good")

    async def _download(
        self, kind: str, source: StateDownloads, bad: set[PeerID], accepts: AcceptState | None
    ) -> tuple[State, PeerID] | None:
        """The state of a run and its donor; ``None`` if only the bad donors serve it."""
        found = await source.download(skip=bad, accepts=accepts)
        if found is None:
            return None
        metadata, tensors = found
        if kind == "DiLoCo" and isinstance(metadata, dict) and EPOCHS[kind] in metadata:
            inner = await self._download_statistics(source)
            if inner is not None:
                return State({**metadata, "inner": inner.metadata}, [*tensors, *inner.tensors]), found.donor
        return State(metadata, tensors), found.donor

    async def _download_statistics(self, source: StateDownloads) -> State | None:
        """The statistics of inner optimizers differ between peers; those of any peer will do if they are finite."""
        bad = set[PeerID]()
        while len(bad) < MOST_BAD:
            found = await source.download(skip=bad, part=STATISTICS, most_voters=1)
            if found is None or not found.tensors:
                break
            if await run_in_worker(first_not_finite, found.tensors) is None:
                return found
            self._refuse(
                source, found.donor, f"the statistics of {found.donor} are not kept: some are NaN or infinite", bad
            )
        return None

    def _refuse(self, source: StateDownloads, donor: PeerID, why: str, bad: set[PeerID]) -> None:
        """Log why the state of a donor is bad, and do not ask it again for a while."""
        logger.warning("%s", one_line(why))
        bad.add(donor)
        source.leave_out(donor, None)


async def _accepts(kind: str, together: Together, stage: int, header: StateHeader) -> bool:
    epoch = epoch_of(kind, MSGPackSerializer.loads(header.metadata))
    return await together.accepts(stage, epoch, sum(header.tensor_bytes))


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
        find_stages: called if no donor of the run is found, because it may be in stages.

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
        find_stages: FindStages | None = None,
    ) -> None:
        if keep < 1 or not every > 0 or not rate >= LEAST_RATE:
            raise ValueError(
                f"archives need keep >= 1, every > 0 and rate >= {LEAST_RATE:g} bytes per second: got keep={keep}, "
                f"every={every}, rate={rate}"
            )
        check_role(dht)
        store.check_run(run_id)
        self._dht, self._run_id, self._store = dht, run_id, store
        self._every, self._keep, self._rate, self._say = every, keep, rate, say
        self._find_stages = find_stages
        # By stage, and for the run as a whole under ``None``.
        self._trackers: dict[int | None, ProgressTracker] = {}
        self._run = self._follow(None, run_id, rate)
        # By number; empty while it is not known that the run has stages.
        self._stages: dict[int, RunSource] = {}
        self._further: str | None = None
        self.latest: Manifest | None = None
        """The manifest of the latest archive that was written."""

    def close(self) -> None:
        """Leave the run."""
        for tracker in self._trackers.values():
            tracker.shutdown(1.0)

    def _follow(self, stage: int | None, run_id: str, rate: float) -> RunSource:
        """Begin to follow the progress of a run, or of a stage."""
        self._trackers[stage] = tracker = ProgressTracker(self._dht, run_id, 1, client_mode=True, start=True)
        return RunSource(self._dht, run_id, TrackedTrust(tracker), rate)

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
            error = self._try_one()
            if error is not None and str(error) != told:  # while no peer trains, one line is enough
                self._say(f"no archive: {error}")
            told = "" if error is None else str(error)
            # Retry soon only if nothing was downloaded: donors should not have to serve the state over and over.
            is_cheap = isinstance(error, _NobodyGives)
            due = began_at + (min(self._every, 10.0) if is_cheap else self._every)

    def write_last(self) -> None:
        """Before the end, write one more archive if the run may have advanced since the latest one.

        Failures are reported.
        """
        if not self._is_news():
            return
        kept = "nothing is kept yet" if self.latest is None else f"epoch {self.latest.epoch} is the latest that is kept"
        self._say(f"One last archive, because {kept}. To leave without it, interrupt again.")
        if (error := self._try_one()) is not None:
            self._say(f"no archive: {error}")

    def _try_one(self) -> Exception | None:
        """Write one archive, and tell that; returns why there is none."""
        began_at = time.monotonic()
        try:
            archive = self.write_one()
        except StagesMissing as e:
            self._say(str(e))
            return None
        except (ShoalError, OSError) as e:
            return e
        total, seconds = sum(file.bytes for file in archive.files.values()), time.monotonic() - began_at
        stages = f" ({counted(len(archive.stages), 'stage')})" if archive.stages else ""
        self._say(f"archive of epoch {archive.epoch}{stages}: {total / 1e6:.1f} MB in {seconds:.1f} s")
        return None

    def _is_news(self) -> bool:
        """Whether the run may be at another epoch than in the latest archive."""
        latest = self.latest
        if latest is None:
            return True
        if not self._stages:
            return self._trackers[None].global_epoch != latest.epoch
        kept = {stage: each.epoch for stage, each in (latest.stages or {}).items()}
        epochs = {stage: self._trackers[stage].global_epoch for stage in self._stages}
        return any(epoch not in (0, kept.get(stage)) for stage, epoch in epochs.items())  # 0: nobody is there

    def write_one(self) -> Manifest:
        """Download the state and write one archive; older ones are removed if there are too many.

        Raises:
            StagesMissing: the archive was written, but a stage of the run has no donor.
            ArchiveError: no donor serves the state, or it could not be written. Earlier archives are unharmed.
            ShoalError: the download failed.
        """
        self._trackers[None].fetched_global_progress_this_epoch.wait(SECONDS_BETWEEN_LOOKS)
        # Read the pass before the state: chunks that are done by now are in the state, or at most in lost gradients.
        data = self._dht.run_coroutine(lambda _, node: read_pass(node, self._run_id))
        try:
            contents, lost = self._download()
        except ArchiveError as e:
            raise type(e)(f"{e}; {self._store.last_good()}") from e
        epoch = max(each.epoch for each in contents.values())
        for stage in lost:
            if (earlier := self._store.newest_of_stage(stage, epoch)) is not None:
                contents[stage] = earlier
        is_private, count = self._dht.p2p.membership is not None, len(self._stages)
        self.latest = self._store.write_contents(self._run_id, contents, data, count=count, is_private=is_private)
        self._tell_further(self._store.prune(self._keep))
        if lost:
            taken = {
                stage: f"its state of epoch {contents[stage].epoch} is taken from an earlier archive"
                if stage in contents
                else "no archive has its state either: if nothing of it is trained, make it with its own function"
                for stage in lost
            }
            why = "; ".join(f"stage {stage}: {e}, and {taken[stage]}" for stage, e in lost.items())
            raise StagesMissing(f"the archive of epoch {self.latest.epoch} is written, but not all is new: {why}")
        if text := told_of_stages(self.latest):
            self._say(f"the stages were not at the same epoch: {text}")
        return self.latest

    def _download(self) -> tuple[dict[int | None, CheckedState], dict[int, ShoalError]]:
        """The state of the run, or those of its stages; and why stages could not be had."""
        if not self._stages:
            try:
                return {None: self._dht.run_coroutine(lambda *_: self._run.take())}, {}
            except _NobodyGives as e:
                if not self._has_stages():
                    raise _NobodyGives(f"{e}{self._dht.run_coroutine(self._tell_sharded)}") from e
        return self._dht.run_coroutine(self._take_stages)

    def _has_stages(self) -> bool:
        """Look whether the run is in stages, and begin to follow them."""
        find = self._find_stages
        found = {} if find is None else self._dht.run_coroutine(lambda _, node: find(node, self._run_id))
        if found and self._rate / len(found) < LEAST_RATE:
            raise ArchiveError(
                f"{len(found)} stages need a rate of at least {len(found) * LEAST_RATE:g} bytes per second: got "
                f"{self._rate:g}"
            )
        for stage, run_id in found.items():
            self._stages[stage] = self._follow(stage, run_id, self._rate / len(found))
        for tracker in self._trackers.values():
            tracker.fetched_global_progress_this_epoch.wait(SECONDS_BETWEEN_LOOKS)
        return bool(found)

    async def _take_stages(self, *_: Any) -> tuple[dict[int | None, CheckedState], dict[int, ShoalError]]:
        together, lost = Together(self._stages), dict[int, ShoalError]()

        async def take(stage: int, source: RunSource) -> tuple[int, CheckedState] | None:
            try:
                return stage, await source.take(together, stage)
            except ShoalError as e:
                together.leave_out(stage)
                lost[stage] = e
                return None

        taken = await asyncio.gather(*(take(stage, source) for stage, source in self._stages.items()))
        contents: dict[int | None, CheckedState] = dict(filter(None, taken))
        if not contents:
            others = [e for e in lost.values() if not isinstance(e, _NobodyGives)]
            raise next(iter(others), _NobodyGives(f"no peer serves the state of any stage of run {self._run_id!r}"))
        return contents, dict(sorted(lost.items()))

    async def _tell_sharded(self, _: DHT, node: DHTNode) -> str:
        """If the processes of each peer share the model: that such a run cannot be archived, in words."""
        prefix = PREFIXES["DiLoCo"].format(self._run_id)
        keys = {f"{prefix}_0_of_{n}.all_averagers": n for n in range(2, MOST_PROCESSES + 1)}
        found = await node.get_many(list(keys))
        sizes = [keys[key] for key, value in found.items() if value is not None]
        if not sizes:
            return ""
        return (
            f": its peers have {sizes[0]} processes each, which share the model. Such a run cannot be archived yet: "
            "save the model and optimizer.state_dict() in each process of a peer instead"
        )

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
