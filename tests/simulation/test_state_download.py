"""Downloads on slow, long links: all donors work until the end, and nobody who is slow or lies holds others up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

import pytest
import torch

from shoal.averaging.groups.settings import Trust
from shoal.averaging.messages import ChunkRequest, DownloadRequest, StateChunk, StateHeader
from shoal.averaging.node import AveragerNode
from shoal.averaging.state.donor import MAX_DOWNLOADS, MAX_SNAPSHOTS, SNAPSHOT_AGE, UploadSlot, UploadSlots
from shoal.averaging.state.download import MIN_CHUNK_BYTES, Snapshot, open_state
from shoal.base.tasks import cancel_and_wait
from shoal.errors import StreamClosedError
from shoal.net.tcp.handshake import HANDSHAKE_TIMEOUT
from shoal.net.transport import Buffer
from shoal.p2p import Call, Header, PeerID
from shoal.testing import Link, Network, SharedTable, run, start_averager
from tests.drills import mostly_drills

RATE = 2.5e6
VALUES = 10**7
LIMIT = VALUES * 4 / RATE
"""Seconds that one donor needs for all of it."""


def seconds_from(*rates: float, limit: float = math.inf, time_limit: float = 100) -> float:
    """How long a newcomer downloads from donors that send so many bytes per second.

    Args:
        limit: the most bytes per second that the newcomer takes.
    """

    async def main() -> float:
        network, table = Network(Link(delay=0.03)), SharedTable()
        for rate in rates:
            donor = await start_averager(network.add_host(), [torch.arange(float(VALUES))], table)
            network.host_of(donor.p2p.peer_id).uplink = rate
            donor.state_sharing.set(allowed=True)
            await donor.state_sharing.declare(True)
        newcomer = await start_averager(network.add_host(), [torch.zeros(1)], table, state_download_rate=limit)
        began = asyncio.get_running_loop().time()
        state = await network.host_of(newcomer.p2p.peer_id).run(newcomer.state_downloads.download())
        assert state is not None
        assert torch.equal(state.tensors[0], torch.arange(float(VALUES)))
        assert not newcomer.state_downloads.left
        return asyncio.get_running_loop().time() - began

    return run(main(), time_limit=time_limit)


def test_three_donors_are_nearly_three_times_as_fast_as_one() -> None:
    alone = seconds_from(RATE)
    assert alone < LIMIT * 1.05
    assert seconds_from(RATE, RATE, RATE) < alone / 2.7


@pytest.mark.parametrize("slow", [RATE / 5, RATE / 20])
def test_a_slow_donor_holds_nobody_up(slow: float) -> None:
    assert seconds_from(RATE, RATE, slow) < LIMIT * RATE / (2 * RATE + slow) * 1.15


@pytest.mark.parametrize("limit", [RATE / 5, 2e4])
def test_a_limited_download_takes_its_time_and_loses_no_donor(limit: float) -> None:
    """At the lower rate four donors that take turns would not hear from the newcomer for longer than they wait."""
    seconds = seconds_from(RATE, RATE, RATE, RATE, limit=limit, time_limit=3000)
    assert VALUES * 4 / limit <= seconds < VALUES * 4 / limit * 1.05


# --- donors and newcomers that hold others up -------------------------------------------------------------------------

SMALL = 3 * 2**19
"""Values of a state of 24 chunks."""
DAWDLING_SECONDS = 8.0


class Ranking(Trust):
    """Ranks all donors.

    Args:
        rank: of a donor.
    """

    def __init__(self, rank: Callable[[PeerID], float]) -> None:
        self._rank = rank

    def rank_donors(self, donors: Mapping[PeerID, float]) -> Mapping[PeerID, float]:
        return {donor: self._rank(donor) for donor in donors}


class Swarm:
    """Donors, of which some dawdle, and newcomers."""

    def __init__(self, **settings: float | None) -> None:
        self.network, self.table, self.settings = (
            Network(Link(delay=0.03)),
            SharedTable(),
            {"chunk_timeout": 30.0, **settings},
        )

    async def add(self, values: torch.Tensor, rate: float | None = RATE) -> AveragerNode:
        node = await start_averager(self.network.add_host(), [values], self.table, **self.settings)
        self.network.host_of(node.p2p.peer_id).uplink = rate
        # All are at the same epoch, whatever they say about themselves.
        node.believe(Ranking(lambda _: 7.0))
        return node

    async def add_donor(
        self, fill: float = 1.0, rate: float | None = RATE, priority: float = 0.0, dawdles: bool = False
    ) -> AveragerNode:
        donor = await self.add(torch.full((SMALL,), fill), rate)
        donor.state_sharing.set(allowed=True, priority=priority)
        if dawdles:
            dawdle(donor)
        await donor.state_sharing.declare(True)
        return donor

    async def download(self, newcomer: AveragerNode) -> tuple[float | None, float]:
        """The value in the state that it gets, if any, and how many seconds that takes."""
        began = asyncio.get_running_loop().time()
        state = await self.network.host_of(newcomer.p2p.peer_id).run(newcomer.state_downloads.download())
        if state is not None:
            assert torch.equal(state.tensors[0], torch.full((SMALL,), float(state.tensors[0][0])))
        value = None if state is None else float(state.tensors[0][0])
        return value, asyncio.get_running_loop().time() - began


def dawdle(donor: AveragerNode) -> None:
    """From now on it waits before each chunk."""
    send_chunks = donor.state_sharing.send_chunks

    async def send_slowly(call: Call, snapshot: Snapshot, place: UploadSlot) -> None:
        send = call.send

        async def send_later(message: Header, *payload: Buffer, end: bool = False) -> None:
            if isinstance(message, StateChunk):
                await asyncio.sleep(DAWDLING_SECONDS)
            await send(message, *payload, end=end)

        call.send = send_later  # type: ignore[method-assign]
        await send_chunks(call, snapshot, place)

    donor.state_sharing.send_chunks = send_slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_slow_donor_of_the_highest_priority_is_helped_or_replaced(is_same: bool) -> None:
    """Without a tracker anybody can give itself any priority."""

    async def main() -> tuple[float | None, float]:
        swarm = Swarm()
        await swarm.add_donor(1.0 if is_same else 2.0, priority=1000.0, dawdles=True)
        for _ in range(2):
            await swarm.add_donor(1.0)
        newcomer = await swarm.add(torch.zeros(SMALL))
        newcomer.believe(Trust())
        return await swarm.download(newcomer)

    value, seconds = run(main(), time_limit=400)
    assert value == 1.0
    assert seconds < 45


def test_a_donor_of_the_highest_priority_that_does_not_even_describe_its_state_holds_nobody_up() -> None:
    async def main() -> tuple[float | None, float]:
        swarm = Swarm()
        silent = await swarm.add_donor(2.0, priority=1000.0)
        never = asyncio.Event()

        async def say_nothing(call: Call, snapshot: Snapshot, place: UploadSlot) -> None:
            await never.wait()

        silent.state_sharing.send_chunks = say_nothing  # type: ignore[method-assign]
        await swarm.add_donor(1.0)
        newcomer = await swarm.add(torch.zeros(SMALL))
        newcomer.believe(Trust())
        return await swarm.download(newcomer)

    value, seconds = run(main(), time_limit=400)
    assert value == 1.0
    assert seconds < 20


async def ask_slowly(
    stranger: AveragerNode, donor: AveragerNode, chunks: int, pause: float = DAWDLING_SECONDS, last_pause: float = 0.0
) -> None:
    """Take a place at a donor, some chunks at once, then another one every now and then, and hang up after a while."""
    async with stranger.stub(donor.p2p.peer_id).rpc_download_state() as call:
        await call.send(DownloadRequest())
        header, _ = await open_state(call, 2**30, 60.0)
        assert isinstance(header, StateHeader)
        for index in range(sum(header.tensor_bytes) // MIN_CHUNK_BYTES):
            if index >= chunks:
                await asyncio.sleep(pause)
            await call.send(ChunkRequest(index=index))
            if await call.receive(StateChunk) is None:
                return
            await call.read_payload(MIN_CHUNK_BYTES)
        await asyncio.sleep(last_pause)


@pytest.mark.parametrize("size", [None, 2])
def test_who_has_another_state_is_named_unless_each_group_has_its_own(
    size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        swarm = Swarm(target_group_size=size)
        other, *_ = [await swarm.add_donor(fill, rate) for fill, rate in [(2.0, None), *[(1.0, RATE)] * 3]]
        value, _ = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        named = [str(other.p2p.peer_id) in record.getMessage() for record in caplog.records]
        assert any(named) == (size is None)

    run(main(), time_limit=100)


def test_dead_donors_of_several_epochs_cost_no_more_time_than_one() -> None:
    async def main() -> None:
        swarm = Swarm()
        dead = [await swarm.add_donor() for _ in range(5)]
        alive, newcomer = await swarm.add_donor(), await swarm.add(torch.zeros(1))
        epochs = {node.p2p.peer_id: epoch for epoch, node in enumerate([alive, *dead])}
        newcomer.believe(Ranking(lambda peer: float(epochs[peer])))
        for node in dead:
            swarm.network.host_of(node.p2p.peer_id).power_off()
        value, seconds = await swarm.download(newcomer)
        assert value == 1.0
        assert seconds < HANDSHAKE_TIMEOUT + SMALL * 4 / RATE + 1.0

    run(main(), time_limit=100)


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_the_state_that_most_donors_show_is_taken(seed: int) -> None:
    async def main() -> None:
        swarm = Swarm()
        for _ in range(2):
            await swarm.add_donor(fill=666.0, rate=None, priority=1e12)
        for _ in range(3):
            await swarm.add_donor()
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds < 5

    run(main(), seed=seed)


@pytest.mark.parametrize("seed", mostly_drills(range(3)))
def test_so_are_the_plain_values_in_it(seed: int) -> None:
    """Epoch, schedule and the like are not part of the version."""

    async def main() -> None:
        swarm = Swarm()
        for number in range(4):
            donor = await swarm.add_donor(rate=RATE if number else None)
            epoch = 5 if number else 10**9
            donor.state_sharing.get_state = lambda epoch=epoch: ({"epoch": epoch}, [torch.ones(SMALL)])
        newcomer = await swarm.add(torch.zeros(1))
        state = await newcomer.state_downloads.download()
        assert state is not None
        assert state.metadata == {"epoch": 5}

    run(main(), seed=seed)


def test_a_few_who_agree_do_not_outvote_many_who_differ() -> None:
    """Where all donors differ a bit, as with buffers that each has for itself, two liars count no more than one."""

    async def main() -> None:
        swarm, taken = Swarm(), []
        for fill in range(1, 6):
            await swarm.add_donor(fill=float(fill))
        for _ in range(2):
            await swarm.add_donor(fill=666.0, rate=None)
        for _ in range(6):
            value, _ = await swarm.download(await swarm.add(torch.zeros(1)))
            taken.append(value)
        assert taken.count(666.0) <= 4
        assert len(set(taken)) > 1

    run(main())


def test_many_peers_of_one_host_have_one_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = Swarm()
        liars = {(await swarm.add_donor(fill=666.0, rate=None)).p2p.peer_id for _ in range(4)}
        for _ in range(2):
            await swarm.add_donor()
        newcomer = await swarm.add(torch.zeros(1))
        monkeypatch.setattr(newcomer.p2p, "host_of", lambda peer: "one" if peer in liars else peer)
        assert (await swarm.download(newcomer))[0] == 1.0

    run(main())


def test_many_peers_of_one_host_have_one_vote_about_plain_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the right state, so that its version is that of the others, and another schedule with it."""

    async def main() -> None:
        swarm, liars = Swarm(), set()
        for number in range(6):
            donor = await swarm.add_donor(rate=RATE if number < 2 else None)
            metadata = {"scheduler": {"step_size": 5}} if number < 2 else {"scheduler": {"step_size": 0}}
            donor.state_sharing.get_state = lambda metadata=metadata: (metadata, [torch.ones(SMALL)])
            liars |= {donor.p2p.peer_id} if number >= 2 else set()
        newcomer = await swarm.add(torch.zeros(1))
        monkeypatch.setattr(newcomer.p2p, "host_of", lambda peer: "one" if peer in liars else peer)
        state = await newcomer.state_downloads.download()
        assert state is not None
        assert state.metadata == {"scheduler": {"step_size": 5}}

    run(main())


def test_one_peer_has_one_place() -> None:
    async def main() -> None:
        swarm = Swarm()
        donor = await swarm.add_donor()
        stranger = await swarm.add(torch.zeros(1))
        await stranger.state_downloads.find_donors()
        asking = [asyncio.ensure_future(ask_slowly(stranger, donor, chunks=3)) for _ in range(2 * MAX_DOWNLOADS)]
        await asyncio.sleep(5)
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds < 10, "no place was taken from anybody for it"
        assert sum(not task.done() for task in asking) == 1
        assert donor.p2p.metrics.newcomers_dropped == 0
        await cancel_and_wait(*asking)

    run(main())


def test_a_network_gives_one_of_its_places_to_another_one() -> None:
    async def main() -> None:
        places = UploadSlots(lambda: asyncio.get_running_loop().create_future(), lambda peer: str(peer.to_bytes()[:3]))
        mine = [places.find(PeerID(b"one%d" % number), 0.0) for number in range(MAX_DOWNLOADS)]
        for place in filter(None, mine):
            place.begin(10, 0.0)
            for chunk in range(4):
                place.note_request(chunk)
            place.note_sent(10**9, 1.0, 1.0)
        assert places.find(PeerID(b"one more"), 2.0) is None, "they have as many as there are"
        assert places.find(PeerID(b"two"), 2.0) is not None
        assert places.find(PeerID(b"two too"), 2.0) is None, "it has got one"
        lost = [place for place in mine if place is not None and place.lost.is_set()]
        assert [place.reason for place in lost] == ["its network has several"]
        for place in filter(None, mine):
            place.note_request(5)
        assert places.find(PeerID(b"six"), 2.0) is None, "who has half of it keeps its place"

    run(main())


def test_a_network_does_not_lose_all_its_places_for_a_snapshot() -> None:
    """Both copies of the state are in use. Taking one of two places of a network would free neither."""

    async def main() -> None:
        places = UploadSlots(lambda: asyncio.get_running_loop().create_future(), lambda peer: str(peer.to_bytes()[:3]))
        mine = [places.find(PeerID(name), 0.0) for name in (b"one1", b"one2")]
        others = [places.find(PeerID(b"two"), 2 * SNAPSHOT_AGE)]
        for place in filter(None, [*mine, *others]):
            place.begin(10, 2 * SNAPSHOT_AGE)
        assert len(places.sharings) == MAX_SNAPSHOTS
        assert places.find(PeerID(b"six"), 4 * SNAPSHOT_AGE) is None
        assert not any(place is None or place.lost.is_set() for place in [*mine, *others])

    run(main())


def test_a_frozen_donor_holds_up_the_vote_for_a_moment_only() -> None:
    async def main() -> None:
        swarm = Swarm()
        frozen, _ = [await swarm.add_donor() for _ in range(2)]
        swarm.network.host_of(frozen.p2p.peer_id).power_off()
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds < 6

    run(main())


@pytest.mark.parametrize("seed", mostly_drills(range(4), quick=2))
@pytest.mark.parametrize("same", [True, False])
def test_a_donor_that_dawdles_locks_nobody_out(same: bool, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whether or not others have the same state. With another one, the newcomer may have luck at the first attempt."""

    async def main() -> float:
        swarm = Swarm()
        slow = [await swarm.add_donor(fill=1.0 if same else 2.0, dawdles=True) for _ in range(2)]
        if not same:
            slow[1].state_sharing.set(allowed=False)
            await slow[1].state_sharing.declare(False)
        await swarm.add_donor(fill=1.0)
        newcomer = await swarm.add(torch.zeros(1))
        value, seconds = await swarm.download(newcomer)
        assert value == 1.0
        assert seconds < 30
        if seconds > 10 and not same:
            assert newcomer.p2p.metrics.donors_left["slow"] == 1
            assert f"donor {slow[0].p2p.peer_id} is left for" in caplog.text
        # The next time it knows.
        value, again = await swarm.download(newcomer)
        assert value == 1.0
        return again if seconds > 10 else 0.0

    assert run(main(), seed=seed) < 10


def test_the_last_donor_may_take_its_time() -> None:
    """A chunk takes it longer than it may be silent."""

    async def main() -> None:
        swarm = Swarm(chunk_timeout=5.0)
        await swarm.add_donor(rate=MIN_CHUNK_BYTES / 20)
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds > 400

    run(main())


def test_a_donor_with_another_state_is_not_preferred_because_it_is_quick() -> None:
    async def main() -> None:
        swarm = Swarm()
        for _ in range(3):
            await swarm.add_donor(rate=RATE / 100)
        await swarm.add_donor(fill=666.0, rate=None)
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds > 20

    run(main())


@pytest.mark.parametrize("chunks", [0, 3])
def test_strangers_that_dawdle_do_not_occupy_all_places(chunks: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = Swarm()
        donor = await swarm.add_donor()
        strangers = [await swarm.add(torch.zeros(1)) for _ in range(2 * MAX_DOWNLOADS)]
        for stranger in strangers:
            await stranger.state_downloads.find_donors()
        asking = [asyncio.ensure_future(ask_slowly(stranger, donor, chunks)) for stranger in strangers[:MAX_DOWNLOADS]]
        await asyncio.sleep(5)
        newcomers = [await swarm.add(torch.zeros(1)) for _ in range(2)]
        outcomes = await asyncio.gather(*map(swarm.download, newcomers))
        assert [value for value, _ in outcomes] == [1.0, 1.0]
        assert max(seconds for _, seconds in outcomes) < 45
        metrics = donor.p2p.metrics
        assert metrics.newcomers_dropped == 2
        assert metrics.newcomers_turned_away >= 2
        assert newcomers[0].p2p.metrics.donors_left["busy"] >= 1
        assert caplog.text.count("was given to another one") == 1  # seldom
        assert caplog.text.count(f"donor {donor.p2p.peer_id} serves as many others as it can") == 2
        # Nobody wants the places of the others.
        await asyncio.sleep(60)
        assert sum(task.done() for task in asking) == 2
        assert all(isinstance(task.exception(), StreamClosedError) for task in asking if task.done())
        await cancel_and_wait(*asking)

    run(main())


def test_who_has_half_of_the_state_keeps_its_place() -> None:
    async def main() -> None:
        swarm = Swarm()
        donor = await swarm.add_donor()
        strangers = [await swarm.add(torch.zeros(1)) for _ in range(MAX_DOWNLOADS)]
        for stranger in strangers:
            await stranger.state_downloads.find_donors()
        asking = [asyncio.ensure_future(ask_slowly(stranger, donor, chunks=14)) for stranger in strangers]
        await asyncio.sleep(40)
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds > 30
        assert donor.p2p.metrics.newcomers_dropped == 0
        await asyncio.gather(*asking)

    run(main())


def test_who_has_all_of_the_state_is_not_blamed_for_being_slow_to_hang_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        swarm = Swarm()
        donor = await swarm.add_donor()
        strangers = [await swarm.add(torch.zeros(1)) for _ in range(MAX_SNAPSHOTS)]
        asking = []
        for stranger in strangers:
            await stranger.state_downloads.find_donors()
            asking.append(asyncio.ensure_future(ask_slowly(stranger, donor, chunks=2**20, last_pause=60.0)))
            await asyncio.sleep(20)
        value, seconds = await swarm.download(await swarm.add(torch.zeros(1)))
        assert value == 1.0
        assert seconds < 20
        assert donor.p2p.metrics.newcomers_dropped == 0
        assert "was given to another one" not in caplog.text
        await cancel_and_wait(*asking)

    run(main())


def test_newcomers_on_slow_lines_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them use what they are given, however little that is."""
    monkeypatch.setattr("shoal.net.memory.WINDOW_BYTES", 2**16)  # as TCP, which waits until the line has taken it

    async def main() -> None:
        swarm = Swarm()
        donor = await swarm.add_donor(rate=8 * 40e3)
        newcomers = [await swarm.add(torch.zeros(1)) for _ in range(MAX_DOWNLOADS)]
        downloads = [asyncio.ensure_future(swarm.download(newcomer)) for newcomer in newcomers]
        await asyncio.sleep(45)
        late = await swarm.add(torch.zeros(1))
        assert (await swarm.download(late))[0] is None
        assert [value for value, _ in await asyncio.gather(*downloads)] == [1.0] * MAX_DOWNLOADS
        assert donor.p2p.metrics.newcomers_dropped == 0

    run(main())


def test_a_state_that_was_refused_is_not_downloaded_again() -> None:
    async def main() -> None:
        swarm = Swarm()
        await swarm.add_donor(fill=666.0)
        newcomer = await swarm.add(torch.zeros(1))
        downloads = newcomer.state_downloads
        state = await downloads.download()
        assert state is not None
        downloads.leave_out(state.donor, state.version)
        assert await downloads.download() is None
        await swarm.add_donor(fill=666.0)
        assert await downloads.download() is None
        await swarm.add_donor(fill=1.0)
        assert (await swarm.download(newcomer))[0] == 1.0
        assert newcomer.p2p.metrics.states_refused == 1

    run(main())


def test_a_donor_whose_state_did_not_fit_is_the_last_hope() -> None:
    async def main() -> None:
        swarm = Swarm()
        bad = await swarm.add_donor(fill=2.0)
        newcomer = await swarm.add(torch.zeros(1))
        newcomer.state_downloads.leave_out(bad.p2p.peer_id, None)
        assert (await swarm.download(newcomer))[0] == 2.0
        for _ in range(3):
            await swarm.add_donor(fill=2.0)
        good = await swarm.add_donor(fill=1.0)
        for _, peer in await newcomer.state_downloads.find_donors():
            if peer != good.p2p.peer_id:
                newcomer.state_downloads.leave_out(peer, None)
        assert (await swarm.download(newcomer))[0] == 1.0

    run(main())
