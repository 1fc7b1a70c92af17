"""A run in stages: one archive of all of them, what happens if one is lost, and how the run continues from it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shoal import load_archive
from shoal.archive.contents import CheckedState
from shoal.archive.keeping import SECONDS_FOR_ONE_EPOCH, Archiver, StagesMissing, Together
from shoal.archive.reviving import Revival
from shoal.archive.store import Store
from shoal.averaging.messages import StateChunk
from shoal.averaging.state.donor import StateSharing
from shoal.errors import ArchiveError
from shoal.stages.directory import name_of_stage, stages_of
from shoal.testing import run
from tests.archive.stage_peers import STAGES, StagePeer, make_stage
from tests.archive.states import RUN, small_state
from tests.optim.conftest import in_parallel, values, wait_until


@pytest.fixture
def make_stages(make_dhts, closing):
    """Peers of all stages that have come to an epoch: ``make_stages({0: 2, 1: 2, 2: 2}, 3)``."""

    def make(peers_of: dict[int, int], epoch: int) -> dict[int, list[StagePeer]]:
        made = {n: [closing(StagePeer(dht, n)) for dht in make_dhts(count)] for n, count in peers_of.items()}
        in_parallel(*[lambda p=peer: p.train_until(epoch) for peers in made.values() for peer in peers])
        return made

    return make


@pytest.fixture
def archiver(make_dhts, tmp_path):
    made = []

    def make() -> Archiver:
        made.append(Archiver(make_dhts(1, clients=1)[0], RUN, Store(tmp_path), find_stages=stages_of, say=print))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_all_stages_are_one_archive_from_which_the_run_continues(
    make_stages, make_dhts, archiver, closing, tmp_path: Path
) -> None:
    stages = make_stages({0: 2, 1: 2, 2: 2}, 3)
    keeping = archiver()
    manifest = keeping.write_one()
    assert (manifest.epoch, manifest.count, {each.epoch for each in manifest.stages.values()}) == (3, 3, {3})
    assert not keeping._is_news()
    trained = {n: values(peer.module) for n, [peer, _] in stages.items()}
    in_parallel(*[lambda p=peer: p.train_until(4) for peer in stages[2]])
    wait_until(keeping._is_news, "it hears that a stage has made a step")
    whole = torch.nn.Sequential(*(make_stage(n, seed=7) for n in range(STAGES)))
    found = load_archive(tmp_path, whole)
    for number, expected in trained.items():
        assert torch.equal(values(whole[number]), expected)
    assert torch.equal(whole[1][1].running_mean, found.stages[1].tensors["1.running_mean"])
    whole.load_state_dict(found.state_dict)
    inner = torch.optim.Adam((one := make_stage(2, seed=7)).parameters())
    assert load_archive(tmp_path, one, inner, stage=2).run_id == name_of_stage(RUN, 2)
    assert torch.equal(values(one), trained[2])
    assert len(inner.state) == 2

    for peers in stages.values():
        for peer in peers:
            peer.shutdown()
    revival, stop = closing(Revival(make_dhts(1)[0], Store.open(tmp_path))), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(revival.run, stop)
        try:
            newcomers = [closing(StagePeer(dht, n, seed=9)) for n, dht in enumerate(make_dhts(STAGES))]
            in_parallel(*[lambda p=peer: p.train_until(4) for peer in newcomers])
            assert all(peer.opt.local_epoch == 4 for peer in newcomers)
            assert running.result(60) in {peer.dht.peer_id for peer in newcomers}
        finally:
            stop.set()


def test_a_dead_donor_of_a_stage_is_replaced(make_stages, archiver, monkeypatch) -> None:
    make_stages({0: 1, 1: 2, 2: 1}, 2)
    send_chunks, dead = StateSharing.send_chunks, list[StateSharing]()

    async def die_at_first_chunk(sharing: StateSharing, call, *rest) -> None:
        send = call.send

        async def send_or_die(message, *payload, **options) -> None:
            if isinstance(message, StateChunk) and name_of_stage(RUN, 1) in sharing.key and dead in ([], [sharing]):
                dead[:] = [sharing]
                call.connection.abort()
                raise ConnectionAbortedError("killed")
            await send(message, *payload, **options)

        monkeypatch.setattr(call, "send", send_or_die)
        await send_chunks(sharing, call, *rest)

    monkeypatch.setattr(StateSharing, "send_chunks", die_at_first_chunk)
    manifest = archiver().write_one()
    assert {n: each.epoch for n, each in manifest.stages.items()} == {0: 2, 1: 2, 2: 2}
    assert len(dead) == 1


def test_a_stage_without_donor_is_named_and_others_are_kept(make_stages, archiver, tmp_path: Path, caplog) -> None:
    make_stages({0: 1, 2: 1}, 2)
    keeping = archiver()
    with pytest.raises(
        StagesMissing, match=r"stage 1: no peer serves .* 'run_stage_1', and no archive has its state either"
    ):
        keeping.write_one()
    assert Store.open(tmp_path).stages.keys() == {0, 2}
    assert "it lacks stage 1" in caplog.text
    with pytest.raises(ArchiveError, match=r"has no stage 1: it has 0, 2"):
        Store.open(tmp_path / "000001-epoch-2", stage=1)

    earlier = {n: CheckedState.of(name_of_stage(RUN, n), "Optimizer", small_state(1)) for n in range(STAGES)}
    Store(tmp_path).write_contents(RUN, earlier, count=STAGES)
    with pytest.raises(StagesMissing, match="its state of epoch 1 is taken from an earlier archive"):
        keeping.write_one()
    newest = Store.open(tmp_path)
    assert {n: each.epoch for n, each in newest.stages.items()} == {0: 2, 1: 1, 2: 2}
    assert torch.equal(newest.stages[1].state.tensors[0], small_state(1).tensors[0])


def test_older_stages_are_served_at_the_newest_epoch(make_dhts, closing, tmp_path: Path) -> None:
    states = {n: CheckedState.of(name_of_stage(RUN, n), "Optimizer", small_state(5 + n)) for n in range(2)}
    Store(tmp_path).write_contents(RUN, states, count=2)
    revival = closing(Revival(make_dhts(1)[0], Store.open(tmp_path, stage=0)))
    [offer] = revival._offers
    state = offer.donor.get_current_state()
    assert (offer.epoch, state.metadata["epoch"]) == (6, 6)
    assert torch.equal(state.tensors[0], small_state(5).tensors[0])


def test_stages_wait_for_one_epoch() -> None:
    async def main() -> None:
        together = Together([0, 1, 2])
        first = asyncio.ensure_future(together.accepts(0, 5, 10))
        await asyncio.sleep(0)
        assert not await together.accepts(1, 4, 10)  # it is behind, and asked again
        second = asyncio.ensure_future(together.accepts(1, 5, 10))
        await asyncio.sleep(1)
        assert not first.done()
        together.leave_out(2)
        assert await first
        assert await second

        together, began_at = Together([0, 1]), asyncio.get_running_loop().time()
        assert await together.accepts(0, 5, 10)  # the other one never comes
        assert asyncio.get_running_loop().time() - began_at == SECONDS_FOR_ONE_EPOCH
        assert await together.accepts(1, 4, 10)
        with pytest.raises(ArchiveError, match="more than the memory of this machine"):
            await together.accepts(1, 5, 2**60)

    run(main())
