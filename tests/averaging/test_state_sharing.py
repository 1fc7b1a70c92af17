"""Downloads of the state: from one donor and from many, with donors that fail, lie, differ, or are busy."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shoal.averaging.groups.settings import Trust
from shoal.averaging.messages import ChunkRequest, DownloadRequest, StateAnswer, StateChunk, StateHeader
from shoal.averaging.state import newcomer as state_downloads
from shoal.averaging.state.donor import MAX_DOWNLOADS, WITHDRAWAL_SECONDS, StateSharing
from shoal.averaging.state.download import (
    MIN_CHUNK_BYTES,
    Chunks,
    Download,
    OwnedState,
    RateMeter,
    Snapshot,
    check_fit,
    chunk_bytes_of,
    hash_of,
    version_of,
)
from shoal.averaging.state.newcomer import WORTH_SHARING_BYTES
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import cancel_and_wait
from shoal.compression import (
    Blockwise4BitQuantization,
    CompressionInfo,
    CompressionType,
    Float16Compression,
    NoCompression,
    TensorMetadata,
    base,
)
from shoal.dht.crypto import tag_of
from shoal.errors import NoAccessTokenError, P2PHandlerError
from shoal.p2p import Identity
from shoal.testing import run
from shoal.testing.averagers import make_averager_config
from tests.averaging.swarm import Swarm, until
from tests.device import on_cpu_only
from tests.drills import mostly_drills

pytestmark = [pytest.mark.devices, pytest.mark.pretend]

LARGE = 3 * WORTH_SHARING_BYTES // 4  # values of float32: three times what is worth sharing


def state_of(seed, sizes=(LARGE, 7, 0, 1000)):
    generator = torch.Generator().manual_seed(seed)
    return {"epoch": seed}, [torch.randn(size, generator=generator) for size in sizes]


async def add_donors(swarm, states, **changes):
    donors = [await swarm.add([torch.zeros(1)], get_state=state, **changes) for state in states]
    for donor in donors:
        donor.state_sharing.set(allowed=True)
        await donor.state_sharing.declare(True)
    return donors


def chunks_sent_by(monkeypatch):
    """Counts the chunks that each donor sends."""
    counts, chunk = {}, Snapshot.chunk

    def counted(self, index):
        counts[self] = counts.get(self, 0) + 1
        return chunk(self, index)

    monkeypatch.setattr(Snapshot, "chunk", counted)
    return counts


def start_together(monkeypatch, number):
    """The first chunk leaves when so many donors have been asked for one."""
    send_chunks, asked, all_asked = StateSharing.send_chunks, set(), asyncio.Event()

    async def patient(self, call, snapshot, place):
        send = call.send

        async def send_together(message, *payload, **options):
            if isinstance(message, StateChunk):
                asked.add(self)
                if len(asked) == number:
                    all_asked.set()
                await all_asked.wait()
            await send(message, *payload, **options)

        monkeypatch.setattr(call, "send", send_together)
        await send_chunks(self, call, snapshot, place)

    monkeypatch.setattr(StateSharing, "send_chunks", patient)


def assert_is_state(found, seed, sizes=(LARGE, 7, 0, 1000)):
    metadata, tensors = state_of(seed, sizes)
    assert found is not None
    assert found.metadata == metadata
    for mine, theirs in zip(tensors, found.tensors, strict=True):
        assert torch.equal(mine.cpu(), theirs)  # a state comes into the host's memory


CHUNK = MIN_CHUNK_BYTES // 4  # values of float32


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (3,), (CHUNK,), (CHUNK + 1, 5), (1,) * 300])
async def test_one_donor_sends_everything(sizes):
    swarm = Swarm()
    await add_donors(swarm, [lambda: state_of(5, sizes)])
    newcomer = await swarm.add([torch.zeros(1)])
    assert_is_state(await newcomer.state_downloads.download(), 5, sizes)
    await swarm.close()


async def test_donors_of_one_version_share_the_work(monkeypatch):
    counts, swarm = chunks_sent_by(monkeypatch), Swarm()
    start_together(monkeypatch, 3)
    await add_donors(swarm, [lambda: state_of(5)] * 3)
    newcomer = await swarm.add([torch.zeros(1)])
    assert_is_state(await newcomer.state_downloads.download(), 5)
    assert len(counts) == 3
    total = math.ceil((LARGE + 1007) * 4 / MIN_CHUNK_BYTES)
    assert max(counts.values()) < total <= sum(counts.values()) < 2 * total  # at the end some are asked for twice
    await swarm.close()


async def test_versions_are_never_mixed(monkeypatch):
    counts, swarm = chunks_sent_by(monkeypatch), Swarm()
    start_together(monkeypatch, 2)
    await add_donors(swarm, [lambda: state_of(5), lambda: state_of(6), lambda: state_of(5), lambda: state_of(6)])
    newcomer = await swarm.add([torch.zeros(1)])
    found = await newcomer.state_downloads.download()
    assert_is_state(found, found.metadata["epoch"])
    assert len(counts) == 2
    await swarm.close()


async def test_metadata_may_differ_between_donors_of_one_version():
    swarm = Swarm()
    await add_donors(swarm, [lambda i=i: ({"bits": str(i)}, state_of(5)[1]) for i in range(3)])
    newcomer = await swarm.add([torch.zeros(1)])
    metadata, tensors = await newcomer.state_downloads.download()
    assert metadata in [{"bits": str(i)} for i in range(3)]
    assert torch.equal(tensors[0], state_of(5)[1][0].cpu())
    await swarm.close()


def spoil(monkeypatch, donors, chunks_before, what):
    """After some chunks, these donors do something wrong instead of sending the next one."""
    send_chunks, sent = StateSharing.send_chunks, dict.fromkeys(map(id, donors), 0)

    async def spoiled(self, call, snapshot, place):
        donor = next(donor for donor in self_donors if donor.state_sharing is self)
        if donor not in donors:
            return await send_chunks(self, call, snapshot, place)
        send = call.send

        async def send_or_fail(message, *payload, **options):
            if isinstance(message, StateChunk):
                sent[id(donor)] += 1
                if sent[id(donor)] > chunks_before:
                    return await what(send, message, *payload)
            return await send(message, *payload, **options)

        monkeypatch.setattr(call, "send", send_or_fail)
        return await send_chunks(self, call, snapshot, place)

    self_donors = donors[0].all_donors
    monkeypatch.setattr(StateSharing, "send_chunks", spoiled)


async def die(send, message, *payload):
    raise ConnectionAbortedError("killed")


async def lie(send, message, *payload):
    await send(message, bytes(sum(map(len, payload))))


async def send_another(send, message, *payload):
    await send(StateChunk(index=message.index + 1), *payload)


async def be_silent(send, message, *payload):
    await asyncio.sleep(math.inf)


@pytest.mark.parametrize("chunks_before", mostly_drills([1, 0, 5]))
@pytest.mark.parametrize("what", [die, lie, send_another, be_silent])
async def test_one_good_donor_of_three_is_enough(monkeypatch, what, chunks_before):
    swarm, patience = Swarm(), {"chunk_timeout": 1.0} if what is be_silent else {}
    donors = await add_donors(swarm, [lambda: state_of(5)] * 3, **patience)
    for donor in donors:
        donor.all_donors = donors
    spoil(monkeypatch, donors[:2], chunks_before, what)
    newcomer = await swarm.add([torch.zeros(1)], **patience)
    assert_is_state(await newcomer.state_downloads.download(), 5)
    await swarm.close()


class Donor:
    """The far side of a download's call; may get stuck in the middle of its first chunk."""

    def __init__(self, snapshot, gets_stuck):
        self._snapshot, self._gets_stuck = snapshot, gets_stuck
        self._asked, self._sending = asyncio.Queue(), 0
        self.is_stuck = asyncio.Event()

    async def send(self, request):
        self._asked.put_nowait(request.index)

    async def receive(self, message_type):
        self._sending = await self._asked.get()
        return message_type(index=self._sending)

    async def read_payload_into(self, *pieces, arrived):
        if self._gets_stuck:
            pieces[0][:100] = bytes(100)
            self.is_stuck.set()
            await asyncio.sleep(math.inf)
        sent = b"".join(self._snapshot.chunk(self._sending))
        for piece in pieces:
            piece[:], sent = sent[: len(piece)], sent[len(piece) :]
            arrived(len(piece))
        assert not sent


async def test_what_one_donor_is_stuck_with_comes_from_another_one_at_once():
    snapshot = await Snapshot.take(lambda: state_of(5), NoCompression())
    header = StateHeader(metadata=snapshot.metadata, tensors=snapshot.tensors, tensor_bytes=snapshot.tensor_bytes)
    download = Download(header, snapshot.hashes, math.inf)
    stuck = Donor(snapshot, gets_stuck=True)
    waiting = asyncio.ensure_future(download.fetch_from(stuck, RateMeter(0.0)))
    await stuck.is_stuck.wait()
    await asyncio.wait_for(download.fetch_from(Donor(snapshot, gets_stuck=False), RateMeter(0.0)), 30)
    await cancel_and_wait(waiting)
    assert_is_state(download.result(), 5)


async def test_a_download_takes_no_more_in_a_second_than_it_may():
    snapshot, loop = await Snapshot.take(lambda: state_of(5), NoCompression()), asyncio.get_running_loop()
    header = StateHeader(metadata=snapshot.metadata, tensors=snapshot.tensors, tensor_bytes=snapshot.tensor_bytes)
    # All of it at once is what comes in a second. The donor is as fast as memory, so the rest takes this long.
    seconds, total = 0.4, snapshot.chunks.total_bytes
    download, began_at = Download(header, snapshot.hashes, math.inf, rate=total / seconds), loop.time()
    await download.fetch_from(Donor(snapshot, gets_stuck=False), RateMeter(began_at))
    assert loop.time() - began_at >= seconds * 0.9
    assert_is_state(download.result(), 5)


async def test_donors_of_a_large_swarm_are_found_whatever_each_believes_about_its_size():
    swarm = Swarm()
    donors = await add_donors(swarm, [lambda: state_of(5, (3,))] * 2)
    newcomer = await swarm.add([torch.zeros(1)])
    newcomer.trust.depth = lambda: 6
    assert_is_state(await newcomer.state_downloads.download(), 5, (3,))
    for donor in donors:
        donor.trust.depth = lambda: 3
        await donor.state_sharing.declare(True)
    found = set()
    for _ in range(20):
        found |= {peer for _, peer in await newcomer.state_downloads.find_donors()}
    assert found == {donor.p2p.peer_id for donor in donors}
    await swarm.close()


async def test_a_download_goes_on_with_a_donor_of_lower_rank(monkeypatch):
    counts, swarm = chunks_sent_by(monkeypatch), Swarm()
    donors = await add_donors(swarm, [lambda: state_of(5)] * 2)
    for donor in donors:
        donor.all_donors = donors
    donors[0].state_sharing.set(priority=3.0)
    await donors[0].state_sharing.declare(True)
    spoil(monkeypatch, donors[:1], 10, die)
    newcomer = await swarm.add([torch.zeros(1)])
    assert_is_state(await newcomer.state_downloads.download(), 5)
    total = math.ceil((LARGE + 1007) * 4 / MIN_CHUNK_BYTES)
    assert sum(counts.values()) <= total + 1  # what the first one has sent is not asked for again
    await swarm.close()


@pytest.mark.parametrize("sizes", [(LARGE,), (LARGE // 4,) * 4])
@pytest.mark.parametrize("is_owned", [True, False])
async def test_either_side_takes_memory_for_one_state(monkeypatch, sizes, is_owned):
    metadata, tensors = state_of(5, sizes)
    swarm = Swarm()
    await add_donors(swarm, [lambda: (OwnedState if is_owned else lambda *fields: fields)(metadata, tensors)])
    newcomer = await swarm.add([torch.zeros(1)])
    nbytes, taken, peak = sum(tensor.nbytes for tensor in tensors), 0, 0

    def map_memory(size):
        nonlocal taken, peak
        memory, taken = real_map(size), taken + size
        peak = max(peak, taken)
        weakref.finalize(memory, give_back, size)
        return memory

    def give_back(size):
        nonlocal taken
        taken -= size

    real_map = base.map_memory
    monkeypatch.setattr(base, "map_memory", map_memory)
    found = await newcomer.state_downloads.download()
    assert_is_state(found, 5, sizes)
    assert peak == (nbytes if is_owned else 2 * nbytes)  # the newcomer's, and the donor's copy
    del found
    gc.collect()
    await until(lambda: not taken)
    await swarm.close()


async def test_nobody_has_a_state():
    swarm = Swarm()
    newcomer = await swarm.add([torch.zeros(1)])
    assert await newcomer.state_downloads.download() is None
    await add_donors(swarm, [lambda: state_of(5, (3,))])
    swarm.nodes[1].state_sharing.set(allowed=False)
    assert await newcomer.state_downloads.download() is None
    await swarm.close()


async def test_newcomers_beyond_the_limit_wait_for_their_turn(monkeypatch):
    monkeypatch.setattr(state_downloads, "BUSY_PAUSE", 0.05)
    swarm, taken = Swarm(), []

    def state():
        taken.append(1)
        return state_of(5, (3 * MIN_CHUNK_BYTES,))

    (donor,) = await add_donors(swarm, [state])
    newcomers = [await swarm.add([torch.zeros(1)]) for _ in range(MAX_DOWNLOADS + 4)]
    most, serve = 0, donor.state_sharing.send_chunks

    async def watched(call, snapshot, place):
        nonlocal most
        most = max(most, sum(not place.has_all for place in donor.state_sharing.slots))
        assert len(donor.state_sharing.slots.sharings) <= 2
        await serve(call, snapshot, place)

    monkeypatch.setattr(donor.state_sharing, "send_chunks", watched)
    for state in await asyncio.gather(*[newcomer.state_downloads.download() for newcomer in newcomers]):
        assert_is_state(state, 5, (3 * MIN_CHUNK_BYTES,))
    assert 1 < most <= MAX_DOWNLOADS
    assert len(taken) < len(newcomers)  # several shared one copy
    await until(lambda: donor.state_sharing.slots.sharings == [])
    await swarm.close()


async def test_a_donor_whose_state_cannot_be_made_is_skipped_and_stays_usable():
    swarm, fails = Swarm(), [True]

    def state():
        if fails[0]:
            raise RuntimeError("out of memory")
        return state_of(5, (3,))

    (donor,) = await add_donors(swarm, [state])
    newcomer = await swarm.add([torch.zeros(1)])
    assert await newcomer.state_downloads.download() is None
    await until(lambda: donor.state_sharing.slots.sharings == [])
    fails[0] = False
    assert_is_state(await newcomer.state_downloads.download(), 5, (3,))
    await swarm.close()


async def test_a_crowd_of_false_donors_does_not_fill_the_log(caplog):
    swarm = Swarm()
    newcomer = await swarm.add([torch.zeros(1)])
    for _ in range(20):
        tag = tag_of(Identity.generate().peer_id)
        await swarm.table.store(newcomer.state_sharing.key, [1.0, []], get_dht_time() + 60, subkey=tag)
    assert await newcomer.state_downloads.download() is None
    assert 0 < caplog.text.count("could not download the state of") <= 5
    await swarm.close()


@pytest.mark.parametrize("index", [1, 2**40])
async def test_chunks_that_do_not_exist_are_refused(index):
    swarm = Swarm()
    (donor,) = await add_donors(swarm, [lambda: state_of(5, (3,))])
    newcomer = await swarm.add([torch.zeros(1)])
    await newcomer.state_downloads.find_donors()  # learns the address
    async with newcomer.stub(donor.p2p.peer_id).rpc_download_state() as call:
        await call.send(DownloadRequest())
        header = await call.receive(StateAnswer)
        assert header is not None
        await call.read_payload(10**6)
        await call.send(ChunkRequest(index=index))
        with pytest.raises(P2PHandlerError, match="chunk"):
            await call.receive(StateChunk)
    await swarm.close()


class Unpacked:
    """A class of the user whose values are in the state. Strangers can send it any bytes."""

    def packb(self) -> bytes:
        return b"nonsense"

    @classmethod
    def unpackb(cls, data: bytes) -> object:
        raise KeyError(f"\x1b[2J\nforged line {data!r}")


def describe_instead(monkeypatch, donor, **changes):
    """This donor describes its state in another way than it is."""
    send_chunks = StateSharing.send_chunks

    async def changed(self, call, snapshot, place):
        if self is donor.state_sharing:
            snapshot = replace(snapshot, **changes)
        await send_chunks(self, call, snapshot, place)

    monkeypatch.setattr(StateSharing, "send_chunks", changed)


@pytest.mark.parametrize("priority", [0.0, 5.0])
@pytest.mark.parametrize("metadata", [b"", b"\xc1", b"\xd9\xff", "ext"])
async def test_a_donor_whose_plain_values_cannot_be_read_has_no_vote(monkeypatch, caplog, metadata, priority):
    """The tensors are right, so without a look at the rest this donor would be as good as the honest one."""
    if metadata == "ext":
        monkeypatch.setitem(MSGPackSerializer._ext_type_codes, 0x7A, Unpacked)
        monkeypatch.setitem(MSGPackSerializer._ext_types, Unpacked, 0x7A)
        metadata = MSGPackSerializer.dumps(Unpacked())
    swarm = Swarm()
    liar, honest = await add_donors(swarm, [lambda: state_of(5, (3,))] * 2)
    liar.state_sharing.set(priority=priority)
    await liar.state_sharing.declare(True)
    describe_instead(monkeypatch, liar, metadata=metadata)
    newcomer = await swarm.add([torch.zeros(1)])
    for _ in range(3):
        found = await newcomer.state_downloads.download()
        assert_is_state(found, 5, (3,))
        assert found.donor == honest.p2p.peer_id
    told = [record.getMessage() for record in caplog.records if str(liar.p2p.peer_id) in record.getMessage()]
    assert len(told) == 1, "once, and then the donor is not asked for a while"
    assert "plain values cannot be read" in told[0]
    assert all(each.isprintable() for each in told[0])
    assert len(told[0]) < 1500
    await swarm.close()


OTHER_TENSORS = {
    "large, in 4 bits": [torch.zeros(2**20)],
    "another number": [torch.zeros(3), torch.zeros(3)],
    "none": [],
    "another shape": [torch.zeros(4)],
    "another type": [torch.zeros(3, dtype=torch.int64)],
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
async def test_no_memory_is_taken_for_tensors_that_do_not_fit(monkeypatch, caplog, case):
    swarm, codec = Swarm(), Blockwise4BitQuantization() if "4 bits" in case else NoCompression()
    liar = (await add_donors(swarm, [lambda: ({"epoch": 9}, OTHER_TENSORS[case])], state_compression=codec))[0]
    liar.state_sharing.set(priority=5.0)
    await liar.state_sharing.declare(True)
    await add_donors(swarm, [lambda: state_of(5, (3,))])
    newcomer, taken = await swarm.add([torch.zeros(1)]), []
    check = partial(check_fit, own=[((3,), torch.float32)])
    make_download = Download.__init__

    def noted(self, header, *rest):
        taken.append(sum(header.tensor_bytes))
        make_download(self, header, *rest)

    monkeypatch.setattr(Download, "__init__", noted)
    assert_is_state(await newcomer.state_downloads.download(check=check), 5, (3,))
    assert taken == [12], "only the honest donor's state was downloaded"
    assert f"the state of peer {liar.p2p.peer_id} is of no use: it" in caplog.text
    await swarm.close()


def test_what_fits():
    own = [((2, 3), torch.float32), ((), torch.float32), ((5,), torch.int64)]
    single = TensorMetadata(0, "float32", ())
    fits = [TensorMetadata(0, "float16", (2, 3)), single, TensorMetadata(0, "int64", (5,))]
    check_fit(fits, own)
    check_fit([single, TensorMetadata(0, "float32", (2, 3)), fits[2]], own)
    with pytest.raises(ValueError, match="tensor 1 has shape"):
        check_fit([fits[0], TensorMetadata(0, "float32", (7,)), fits[2]], own)
    with pytest.raises(ValueError, match="tensor 2 is of type torch"):
        check_fit([*fits[:2], TensorMetadata(0, "float32", (5,))], own)


HOSTILE_HEADERS = {
    "too large": {"tensor_bytes": [2**50]},
    "unknown type": {"tensors": [TensorMetadata(0, "\x1b[2J\n" * 10_000, (3,))]},
    "large when decoded": {
        "tensors": [TensorMetadata(CompressionType.BLOCKWISE_4BIT, "float32", (2**40,))],
        "tensor_bytes": [2**39],
    },
    "many dimensions": {"tensors": [TensorMetadata(0, "float32", (1,) * 10_000)]},
    "negative": {"tensor_bytes": [-4]},
    "counts differ": {"tensor_bytes": [12, 4]},
    "sizes differ": {"tensor_bytes": [16]},
    "few bytes for any amount of memory": {"tensors": [TensorMetadata(8, "float32", (2**46,))]},
}


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
async def test_hostile_headers_are_refused(monkeypatch, caplog, case):
    swarm = Swarm()
    await add_donors(swarm, [lambda: state_of(5, (3,))])

    async def hostile(self, call, snapshot, place):
        fields = {"metadata": snapshot.metadata, "tensors": snapshot.tensors, "tensor_bytes": snapshot.tensor_bytes}
        fields |= HOSTILE_HEADERS[case]
        await call.send(StateHeader(**fields), snapshot.hashes)
        while (request := await call.receive(ChunkRequest)) is not None:
            await call.send(StateChunk(index=request.index), bytes(16))

    monkeypatch.setattr(StateSharing, "send_chunks", hostile)
    newcomer = await swarm.add([torch.zeros(1)])
    assert await newcomer.state_downloads.download() is None
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines
    assert all(line.isprintable() and len(line) < 1500 for line in lines)
    await swarm.close()


# --- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()])
async def test_a_snapshot_does_not_change_with_its_tensors(codec):
    tensors = [torch.randn(100), torch.randn(3, 5)]
    snapshot = await Snapshot.take(lambda: (None, tensors), codec)
    for tensor in tensors:
        tensor.zero_()
    assert hash_of(snapshot.chunk(0)) == snapshot.hashes
    assert any(map(any, snapshot.chunk(0)))


@on_cpu_only  # from a device they are copied in any case
async def test_tensors_that_nobody_changes_are_not_copied():
    tensors = [torch.randn(100)]
    infos = [CompressionInfo.from_tensor(tensors[0])]
    snapshot = await Snapshot.take(lambda: OwnedState(None, tensors, infos), NoCompression())
    tensors[0].zero_()
    assert not any(map(any, snapshot.chunk(0)))


def test_chunks_cover_every_byte_once():
    buffers = [memoryview(bytearray(size)) for size in (0, MIN_CHUNK_BYTES - 3, 7, 0, 2 * MIN_CHUNK_BYTES, 1, 0)]
    chunks = Chunks(buffers)
    assert chunks.count == 4
    for index in range(chunks.count):
        pieces = chunks.pieces(index)
        assert sum(map(len, pieces)) == min(MIN_CHUNK_BYTES, chunks.total_bytes - index * MIN_CHUNK_BYTES)
        for piece in pieces:
            assert not any(piece)
            piece[:] = b"\x01" * len(piece)
    assert all(all(buffer) for buffer in buffers)
    assert Chunks([]).count == Chunks([memoryview(b"")] * 2).count == 0


@pytest.mark.parametrize(
    ("total_bytes", "chunk_bytes"),
    [(0, 2**18), (10**6, 2**18), (40 * 10**6, 2**19), (400 * 10**6, 2**22), (10**12, 2**22)],
)
def test_a_state_has_about_a_hundred_chunks(total_bytes, chunk_bytes):
    assert chunk_bytes_of(total_bytes) == chunk_bytes


async def test_a_version_is_its_shapes_and_values():
    async def version(tensors, codec=None):
        snapshot = await Snapshot.take(lambda: (None, tensors), codec or NoCompression())
        return version_of(snapshot.tensors, snapshot.tensor_bytes, snapshot.hashes)

    values = torch.arange(6.0)
    assert await version([values]) == await version([values.clone()])
    others = [values.reshape(2, 3)], [values[:3], values[3:]], [values + 1], [values.double()], []
    versions = [await version(each) for each in ([values], *others)]
    assert len({*versions, await version([values], Float16Compression())}) == 7


def make_sharing(table: object) -> StateSharing:
    p2p = SimpleNamespace(peer_id=Identity.generate().peer_id, get_addresses=lambda peer: [], is_callable=True)
    return StateSharing(p2p, table, "donors", make_averager_config(), lambda: (None, []), lambda part: None, Trust())


def test_a_donor_whose_authority_was_away_declares_itself_again():
    class Table:
        stored = 0

        async def store(self, *args: object, **kwargs: object) -> None:
            self.stored += 1
            if self.stored < 3:
                raise NoAccessTokenError("the authority is away")

    async def main() -> None:
        table = Table()
        sharing = make_sharing(table)
        sharing.set(allowed=True)
        declaring = asyncio.ensure_future(sharing.declare_forever())
        await asyncio.sleep(100)
        assert table.stored == 4
        declaring.cancel()

    run(main())


def test_a_donor_that_leaves_waits_for_nobody_long():
    """Those that keep its declaration may be frozen."""

    class Table:
        stored = 0

        async def store(self, *args: object, **kwargs: object) -> None:
            self.stored += 1
            if self.stored > 1:
                await asyncio.Event().wait()

    async def main() -> float:
        table = Table()
        sharing = make_sharing(table)
        sharing.set(allowed=True)
        declaring = asyncio.ensure_future(sharing.declare_forever())
        await asyncio.sleep(1)
        declaring.cancel()
        began = asyncio.get_running_loop().time()
        await sharing.withdraw()
        assert table.stored == 2
        return asyncio.get_running_loop().time() - began

    assert run(main()) <= WITHDRAWAL_SECONDS + 0.1
