"""Leases of chunks in virtual time: peers that come, die, and are cut off from each other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from shoal.base.clock import get_dht_time
from shoal.data import leases as module
from shoal.data.chunks import LEASE_SECONDS, MOST_CHUNKS, PassName, PassRecord, PassState, numbers_in, unpack_bits
from shoal.data.kept import read_pass, tell_pass
from shoal.data.leases import PATIENCE_SECONDS, WAITING, Leases
from shoal.dht import DHTNode
from shoal.dht.crypto import tag_of
from shoal.errors import DHTError
from shoal.testing import run
from shoal.testing.swarm import DHTSwarm
from tests.drills import mostly_drills

pytestmark = pytest.mark.once


def named(samples: int | None, number: int = 0, run_id: str = "run") -> PassName:
    return PassName(run_id, number, samples, 1, "")


class Crowd:
    """Peers that pass over chunks together, each in so many seconds."""

    def __init__(self, samples: int | None, seconds: float = 0.5) -> None:
        self.swarm = DHTSwarm(seed=1, delay=0.03)
        self.samples, self.seconds = samples, seconds
        self.seen: Counter[int] = Counter()
        self.peers: dict[DHTNode, tuple[Leases, asyncio.Task[None]]] = {}

    async def join(self, number: int = 0) -> Leases:
        node = await self.swarm.node()
        leases = Leases(node, named(self.samples, number), random.Random(len(self.swarm.nodes)))
        self.peers[node] = leases, asyncio.ensure_future(self._pass_over(leases))
        return leases

    async def _pass_over(self, leases: Leases) -> None:
        while (chunk := await leases.next(wait=True)) is not None:
            assert chunk != WAITING
            self.seen[chunk] += 1
            await asyncio.sleep(self.seconds)
            leases.finish(chunk)

    async def kill(self, node: DHTNode) -> None:
        """Without a goodbye: nothing is let go."""
        leases, work = self.peers.pop(node)
        work.cancel()
        leases.keeping.cancel()
        await asyncio.gather(work, leases.keeping, return_exceptions=True)
        await self.swarm.kill(node)

    async def finish(self) -> None:
        await asyncio.gather(*(work for _, work in self.peers.values()))

    async def close(self) -> None:
        for leases, work in self.peers.values():
            work.cancel()
            await leases.close()
        for node in self.peers:
            await self.swarm.kill(node)


def test_peers_share_a_pass_evenly() -> None:
    async def main() -> None:
        crowd = Crowd(samples=400)
        begun = get_dht_time()
        for _ in range(4):
            await crowd.join()
        await crowd.finish()
        assert crowd.seen == Counter(range(400))
        assert get_dht_time() - begun < 1.2 * 400 * crowd.seconds / 4
        await crowd.close()

    run(main(), seed=1)


@pytest.mark.parametrize("samples", mostly_drills([200, 800]))
def test_pass_survives_a_death_every_five_seconds(samples: int) -> None:
    async def main() -> None:
        rng = random.Random(1)
        crowd = Crowd(samples=samples)
        for _ in range(8):
            await crowd.join()
        deaths = 0
        while not any(leases.is_over for leases, _ in crowd.peers.values()):
            await asyncio.sleep(5)
            await crowd.kill(rng.choice(list(crowd.peers)))
            deaths += 1
            await crowd.join()
        await crowd.finish()
        assert set(crowd.seen) == set(range(samples))
        again = sum(count - 1 for count in crowd.seen.values())
        # What one was at, and what it had done in the half second since it last published.
        assert again <= 3 * deaths, (again, deaths)
        assert not any(len(node.protocol.cache) for node in crowd.peers), "copies would be fetched again and again"
        await crowd.close()

    run(main(), seed=1)


def test_leaving_peer_frees_its_chunks() -> None:
    async def main() -> None:
        crowd = Crowd(samples=40, seconds=2.0)
        first = await crowd.join()
        await asyncio.sleep(11)
        second = await crowd.join()
        (node, (leases, work)) = next(iter(crowd.peers.items()))
        assert leases is first
        work.cancel()
        begun = get_dht_time()
        await first.close()
        del crowd.peers[node]
        await crowd.finish()
        assert second.is_over
        assert get_dht_time() - begun < LEASE_SECONDS + 40 * crowd.seconds
        assert sum(crowd.seen.values()) <= 41, "only what it was at comes twice"
        await crowd.close()
        await crowd.swarm.kill(node)

    run(main(), seed=3)


def test_a_newcomer_learns_that_a_pass_is_over() -> None:
    async def main() -> None:
        crowd = Crowd(samples=20)
        await crowd.join()
        await crowd.finish()
        late = await crowd.join()
        await crowd.finish()
        assert late.is_over
        assert crowd.seen == Counter(range(20))
        late_again = await crowd.join(number=1)
        await crowd.finish()
        assert late_again.is_over
        assert crowd.seen == Counter([*range(20), *range(20)])
        await crowd.close()

    run(main(), seed=4)


def test_idle_peer_reports_waiting() -> None:
    async def main() -> None:
        crowd = Crowd(samples=1, seconds=20.0)
        await crowd.join()
        await asyncio.sleep(5)
        node = await crowd.swarm.node()
        idle = Leases(node, named(1), random.Random(0))
        assert await idle.next(wait=False) == WAITING
        assert await idle.next(wait=True) is None
        await idle.close()
        await crowd.close()
        await crowd.swarm.kill(node)

    run(main(), seed=5)


def test_several_blocks_and_what_is_saved_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        crowd = Crowd(samples=10_000, seconds=0.001)
        node = await crowd.swarm.node()
        first = Leases(node, named(10_000), random.Random(0))
        seen = set()
        while len(seen) < 6_000:
            chunk = await first.next(wait=True)
            assert chunk is not None
            seen.add(chunk)
            first.finish(chunk)
        assert first.done.bit_count() == 6_000
        done = first.done
        await first.close()
        other = Leases(node, named(10_000, run_id="other run"), random.Random(0))
        other.add_done(done)
        while (chunk := await other.next(wait=True)) is not None:
            assert chunk not in seen
            seen.add(chunk)
            other.finish(chunk)
        assert seen == set(range(10_000))
        await other.close()
        await crowd.swarm.kill(node)

    monkeypatch.setattr(module, "PUBLISH_SECONDS", 0.01)
    run(main(), seed=6)


def test_nonsense_of_strangers_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        crowd = Crowd(samples=10)
        stranger = await crowd.swarm.node()
        now = get_dht_time()
        values = [
            [b"\xff" * 10_000, [], now], [b"", [4096], now], [b"", [-1], now], [b"", list(range(10)), float("nan")],
            [b"", list(range(10)), now + 1e9], "text", None, [b"", "x", now], {}, [b""],
        ]  # fmt: skip
        crowd_leases = await crowd.join()
        for value in values:
            await stranger.store("run_data.0.10.1.0", value, get_dht_time() + 60, subkey=tag_of(stranger.peer_id))
            await stranger.store("run_data", value, get_dht_time() + 60, subkey=tag_of(stranger.peer_id))
            await asyncio.sleep(0.3)
        await crowd.finish()
        assert crowd_leases.is_over
        assert crowd.seen == Counter(range(10))
        await crowd.close()
        await crowd.swarm.kill(stranger)

    run(main(), seed=7)
    assert "skipped a malformed record under run_data" in caplog.text


def test_another_data_set_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        crowd = Crowd(samples=10)
        await crowd.join()
        crowd.samples = 12
        await crowd.join()
        await crowd.finish()
        await crowd.close()

    run(main(), seed=8)
    assert "passes over 10 samples in chunks of 1, this peer over 12 in chunks of 1" in caplog.text


def test_pass_survives_a_dht_outage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    get, fails = DHTNode.get, iter([True] * 5)

    async def get_if_it_works(node: DHTNode, *arguments: Any, **options: Any) -> Any:
        if next(fails, False):
            raise DHTError("the cable is out")
        return await get(node, *arguments, **options)

    async def main() -> None:
        crowd = Crowd(samples=10)
        await crowd.join()
        await crowd.finish()
        assert crowd.seen == Counter(range(10))
        await crowd.close()

    monkeypatch.setattr(DHTNode, "get", get_if_it_works)
    run(main(), seed=9)
    assert "no more data are leased for now: the cable is out" in caplog.text


def test_leases_are_renewed_at_half_their_life() -> None:
    """A peer that was woken just before must not sleep until they have expired."""

    async def main() -> None:
        crowd = Crowd(samples=None)
        node, watcher = await crowd.swarm.node(), await crowd.swarm.node()
        leases = Leases(node, named(3), random.Random(0))
        await leases.next(wait=True)
        key, ends, gaps = "run_data.0.3.1..0", set[float](), list[float]()
        for _ in range(600):
            await asyncio.sleep(0.25)
            found = await watcher.get(key, latest=True)
            assert found is not None
            (record,) = [entry.value for entry in found.value.values()]
            if record[2] not in ends:
                ends.add(record[2])
                leases.add_done(0)  # wakes it, as a batch does
            gaps.append(record[2] - get_dht_time())
            if 14.4 < LEASE_SECONDS - gaps[-1] < 14.9:
                leases.add_done(0)
        assert min(gaps) > LEASE_SECONDS / 2 - 2, min(gaps)
        await leases.close()
        for each in (node, watcher):
            await crowd.swarm.kill(each)

    run(main(), seed=11)


def test_slow_peer_holds_few_chunks() -> None:
    async def main() -> None:
        crowd = Crowd(samples=None)
        node, watcher = await crowd.swarm.node(), await crowd.swarm.node()
        leases = Leases(node, named(4000), random.Random(0))
        for _ in range(12):
            batch = [chunk for _ in range(4) if (chunk := await leases.next(wait=True)) is not None]
            await asyncio.sleep(10)
            leases.finish(*batch)
        await asyncio.sleep(5)
        found = await watcher.get("run_data.0.4000.1..0", latest=True)
        assert found is not None
        (record,) = [entry.value for entry in found.value.values()]
        assert 0 < len(record[1]) <= 4, "at its pace that is 10 seconds"
        await leases.close()
        for each in (node, watcher):
            await crowd.swarm.kill(each)

    run(main(), seed=12)


def test_failed_publication_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise others pass over it once more, because this peer holds nothing any more that makes it write."""
    store = DHTNode.store

    async def main() -> None:
        crowd = Crowd(samples=None)
        nodes = [await crowd.swarm.node() for _ in range(2)]
        first, other = (Leases(node, named(2), random.Random(i)) for i, node in enumerate(nodes))
        mine, theirs = await first.next(wait=True), await other.next(wait=True)
        assert {mine, theirs} == {0, 1}
        fails = iter([True])

        async def store_if_it_works(node: DHTNode, *arguments: Any, **options: Any) -> Any:
            if node is nodes[0] and next(fails, False):
                raise DHTError("the cable is out")
            return await store(node, *arguments, **options)

        monkeypatch.setattr(DHTNode, "store", store_if_it_works)
        assert mine is not None
        await asyncio.sleep(1)
        first.finish(mine)
        await asyncio.sleep(5)
        reader = await crowd.swarm.node()
        found = await reader.get("run_data.0.2.1..0", latest=True)
        assert found is not None
        assert bytes([1 << mine]) in [entry.value[0] for entry in found.value.values()]
        for leases in (first, other):
            await leases.close()
        for node in (*nodes, reader):
            await crowd.swarm.kill(node)

    run(main(), seed=13)


@pytest.mark.parametrize("samples", [5000, None], ids=["map-style", "stream"])
def test_saved_progress_can_be_restored(samples: int | None) -> None:
    """All peers are lost; others go on with what is left, and were told nothing themselves."""

    async def main() -> None:
        crowd, seen, more = Crowd(samples=None), set[int](), set[int]()
        node, reader = await crowd.swarm.node(), await crowd.swarm.node()
        assert await read_pass(reader, "run") is None
        first = Leases(node, named(samples, 3), random.Random(0))
        while len(seen) < 4200:
            chunk = await first.next(wait=True)
            assert chunk is not None
            seen.add(chunk)
            first.finish(chunk)
        await asyncio.sleep(5)
        state = await read_pass(reader, "run")
        assert state is not None
        assert (state["number"], state["samples"], set(numbers_in(unpack_bits(state["done"])))) == (3, samples, seen)
        first.keeping.cancel()
        await crowd.swarm.kill(node)
        await crowd.swarm.kill(reader)
        crowd = Crowd(samples=None)
        donor, node = await crowd.swarm.node(), await crowd.swarm.node()
        await tell_pass(donor, "run", msgspec.convert(state, PassState, builtin_types=(bytes,)))
        early = Leases(node, named(samples, 0), random.Random(1))
        assert await early.next(wait=True) is None, "the run is further"
        await early.close()
        again = Leases(node, named(samples, 3), random.Random(1))
        if samples is None:
            again.end_at(5000)
        while (chunk := await again.next(wait=True)) is not None:
            more.add(chunk)
            again.finish(chunk)
        assert not seen & more
        assert seen | more == set(range(5000))
        await again.close()
        await crowd.swarm.kill(node)
        await crowd.swarm.kill(donor)

    run(main(), seed=14)


def test_liar_cannot_cause_endless_reads() -> None:
    async def main() -> None:
        crowd = Crowd(samples=None)
        liar, reader = await crowd.swarm.node(), await crowd.swarm.node()
        gets, get = [], reader.get

        async def counted(key: str, **options: Any) -> Any:
            gets.append(key)
            return await get(key, **options)

        reader.get = counted  # type: ignore[method-assign, assignment]
        for finished in (b"\0" * 8191 + b"\x80", b"\xff" * 8192):
            record = msgspec.to_builtins(PassRecord(0, 2**40, 4096, finished), builtin_types=(bytes,))
            expiration = get_dht_time() + 60 + len(gets)
            assert await liar.store("run_data", record, expiration, subkey=tag_of(liar.peer_id))
            assert await read_pass(reader, "run") is not None
        assert len(gets) < 100
        for node in (liar, reader):
            await crowd.swarm.kill(node)

    run(main(), seed=15)


@pytest.mark.parametrize("is_stream", [False, True])
def test_liar_cannot_claim_too_many_samples(caplog: pytest.LogCaptureFixture, is_stream: bool) -> None:
    """A peer keeps a bit for each chunk: of 2**52 chunks they would be 512 terabytes."""

    async def main() -> None:
        crowd = Crowd(samples=None)
        liar, reader = await crowd.swarm.node(), await crowd.swarm.node()
        record = [0, 2**52, 1, b"", "", is_stream]
        assert await liar.store("run_data", record, get_dht_time() + 60, subkey=tag_of(liar.peer_id))
        assert await read_pass(reader, "run") is None
        if is_stream:
            leases = Leases(reader, named(None), random.Random(0))
            assert await leases.next(wait=True) == 0
            assert leases.samples is None
            await leases.close()
        for node in (liar, reader):
            await crowd.swarm.kill(node)

    run(main(), seed=16)
    assert f"are more than {MOST_CHUNKS} chunks" in caplog.text


def test_stalled_loop_loses_its_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """Its program has left the loop without a goodbye, or hangs; its background goes on renewing leases."""

    async def main() -> None:
        crowd = Crowd(samples=6)
        node = await crowd.swarm.node()
        still = Leases(node, named(6), random.Random(0))
        mine = await still.next(wait=True)
        assert mine is not None
        begun = get_dht_time()
        await crowd.join()
        await crowd.finish()
        assert PATIENCE_SECONDS - 60 < get_dht_time() - begun < PATIENCE_SECONDS + 2 * LEASE_SECONDS
        assert crowd.seen == Counter(range(6))
        still.finish(mine)
        assert await still.next(wait=True) is None
        await still.close()
        await crowd.close()
        await crowd.swarm.kill(node)

    run(main(), seed=16)
    assert "has asked for no batch for 10 minutes" in caplog.text


def test_slow_or_waiting_loop_keeps_its_chunk() -> None:
    """Each batch is a sign of life, however many of them a chunk has; and so is it to wait for others."""

    async def main() -> None:
        crowd = Crowd(samples=1, seconds=3 * PATIENCE_SECONDS)
        node = await crowd.swarm.node()
        slow = Leases(node, named(1), random.Random(0))
        assert await slow.next(wait=True) == 0
        await crowd.join()
        for _ in range(8):
            await asyncio.sleep(PATIENCE_SECONDS / 2)
            slow.note_life()
        assert crowd.seen == Counter()
        await slow.close()  # and now the other one, which has waited, has it
        await asyncio.sleep(PATIENCE_SECONDS / 2)
        assert crowd.seen == Counter([0])
        late = await crowd.join()
        await asyncio.sleep(PATIENCE_SECONDS / 3)
        assert crowd.seen == Counter([0]), "its chunk is its own"
        await crowd.finish()
        assert late.is_over
        await crowd.close()
        await crowd.swarm.kill(node)

    run(main(), seed=17)
