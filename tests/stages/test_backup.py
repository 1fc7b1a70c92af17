"""Backups of lonely stages: who keeps what, and that one death loses a few steps."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from shoal.p2p import Identity
from shoal.stages import directory
from shoal.stages.backup import Duty, StageBackups, duty_of, epoch_to_offer, holders_of, keeper_of
from shoal.stages.directory import StageRecord
from tests.archive.stage_peers import StagePeer
from tests.archive.states import RUN
from tests.optim.conftest import closing, make_dhts, network, values, wait_until

__all__ = ["closing", "make_dhts", "network"]

A, B, C, D = (Identity.generate().peer_id for _ in range(4))
EVERY = 5


def record(stage: int, epoch: int = 10, **options) -> StageRecord:
    return StageRecord(stage=stage, epoch=epoch, rate=1.0, **options)


def stages_of(*holders: dict, epoch: int = 10) -> dict:
    """The peers of each stage: a set, or records by peer."""
    return {
        n: each if isinstance(each, dict) else {peer: record(n, epoch) for peer in each}
        for n, each in enumerate(holders)
    }


@pytest.mark.parametrize(
    ("stages", "keepers"),
    [
        (stages_of({A}, {B}, {C, D}), {B}),  # the only neighbour
        (stages_of({A}, {B, C}, {D}), {B, C}),
        (stages_of({A, D}, {B}, {C}), {None}),  # it is not lonely
        (stages_of({A}, {A}, {B}), {B}),  # its neighbour is itself
        (stages_of(set(), {B}, {C}), {B}),  # nobody is left
        (stages_of({A}, {A}), {None}),
        (stages_of({A}), {None}),
        (stages_of({A}, {B: record(1, is_joining=True)}, {C}), {C}),
        (stages_of({A: record(0), D: record(0, is_leaving=True)}, {B}), {B}),
    ],
)
def test_keeper_of_the_first_stage(stages: dict, keepers: set) -> None:
    assert keeper_of(0, stages) in keepers


def test_keepers_are_spread_over_neighbours() -> None:
    many = [Identity.generate().peer_id for _ in range(6)]
    stages = stages_of({A}, set(many), {B})
    assert {keeper_of(0, stages), keeper_of(2, stages)} <= set(many)
    keepers = {keeper_of(n, {n: {A: record(n)}, n + 1: stages[1]}) for n in range(40)}
    assert keepers == set(many)


@pytest.mark.parametrize(
    ("own", "stages", "kept", "duty"),
    [
        (B, stages_of({A}, {B}), None, Duty(True, A)),
        (B, stages_of({A}, {B}), 6, Duty(True)),  # its copy is new enough
        (B, stages_of({A}, {B}), 5, Duty(True, A)),
        (B, stages_of({A: record(0, 1)}, {B}), 10, Duty(True)),  # the stage has begun anew: the copy is better
        (C, stages_of({A}, {B}, {C}), 6, Duty(True)),  # no keeper any more, but the new one may have no copy yet
        (C, stages_of({A}, {B}, {C}), 5, Duty(False)),
        (B, stages_of({A, C}, {B}), 5, Duty(False)),
        (B, stages_of({A: record(0), C: record(0, 9)}, {B}), 5, Duty(True)),  # A may be dead
        (B, stages_of(set(), {B}), 3, Duty(True)),
        (B, stages_of({B: record(0, is_joining=True)}, {B}), 3, Duty(False)),  # it takes the stage itself
    ],
)
def test_duty_of_a_peer(own, stages: dict, kept: int | None, duty: Duty) -> None:
    assert duty_of(0, own, stages, kept, EVERY) == duty


def test_copy_is_offered_at_the_epoch_of_the_run() -> None:
    def at(epoch: int, time: float) -> dict:
        return {A: record(0, epoch, time=time)}

    assert epoch_to_offer(5, 10, {}, at(9, 1.0)) == 10  # the stage is lost
    assert epoch_to_offer(5, 10, at(5, 20.0), at(5, 10.0)) == 10  # a newcomer cannot continue with it
    assert epoch_to_offer(5, 10, at(5, 10.0), at(5, 10.0)) == 5  # no news since the last look
    assert epoch_to_offer(5, 10, at(7, 20.0), at(5, 10.0)) == 5  # it makes progress
    assert epoch_to_offer(5, 10, at(9, 20.0), at(9, 10.0)) == 5  # it is about to step
    assert epoch_to_offer(5, 10, at(5, 20.0), {}) == 5
    assert epoch_to_offer(12, 10, {}, {}) == 12


@pytest.mark.parametrize(("is_on_disk", "comes_at_once"), [(False, True), (True, False)])
def test_lonely_stage_survives_its_peer(
    make_dhts, closing, tmp_path, monkeypatch, is_on_disk: bool, comes_at_once: bool
) -> None:
    monkeypatch.setattr(directory, "LIFETIME", 3.0)
    dhts = make_dhts(3)
    stages = [StagePeer(dht, n) for n, dht in enumerate(dhts)]
    lonely, neighbours = stages[1], [closing(stages[0]), closing(stages[2])]
    folder = tmp_path if is_on_disk else None
    backups = [
        StageBackups(peer.dht, RUN, peer.directory, backup_every=2, folder=folder, period=3600.0) for peer in neighbours
    ]
    for each in backups:
        closing(SimpleNamespace(shutdown=each.stop))
    kept_values: dict[int, torch.Tensor] = {}

    def kept_after(epoch: int) -> list[int]:
        lonely.train_until(epoch)
        kept_values[epoch] = values(lonely.module)
        for each in backups:
            each.look()
        return [epoch for each in backups for stage, epoch in each.kept().items() if stage == 1]

    assert [kept_after(epoch) for epoch in (2, 3, 4, 5)] == [[2], [2], [4], [4]]
    for peer in neighbours:
        peer.train_until(6)
    lonely.kill()
    [keeper] = [each for each in backups if 1 in each.kept()]
    if comes_at_once:
        newcomer = closing(StagePeer(make_dhts(1)[0], 1, seed=9))
        newcomer.train_until(1)
        assert newcomer.opt.local_epoch == 4  # no microbatch would pass it
        wait_until(lambda: newcomer.declare() or keeper.look() or keeper.kept()[1] == 6, "the keeper helps it on")
        newcomer.train_until(5)
    else:
        read = keeper._directory.read_all
        wait_until(lambda: not holders_of(keeper._dht.run_coroutine(lambda *_: read()), 1), "its record is gone")
        keeper.look()
        assert keeper.kept()[1] == 4, "the run has gone on since the last look, so the stage may have a peer"
        wait_until(lambda: keeper.look() or keeper.kept()[1] == 6, "the keeper notices that the stage is lost")
        newcomer = closing(StagePeer(make_dhts(1)[0], 1, seed=9))
        newcomer.train_until(1)
    assert newcomer.opt.local_epoch == 6
    assert torch.equal(values(newcomer.module), kept_values[4])
    newcomer.train_until(8)
    state = keeper.release(1)
    assert (state.metadata["epoch"], 1 in keeper.kept()) == (6, False)


def test_backups_work_by_themselves_and_stop(make_dhts, closing) -> None:
    stages = [closing(StagePeer(dht, n)) for n, dht in enumerate(make_dhts(2))]
    stages[0].train_until(1)
    backups = StageBackups(stages[1].dht, RUN, stages[1].directory, period=0.05)
    backups.start()
    wait_until(lambda: backups.kept() == {0: 1}, "the state is kept")
    backups.stop()
    assert backups.kept() == {}


def test_bad_options_are_named(make_dhts) -> None:
    dht, client = make_dhts(2, clients=1)
    with pytest.raises(ValueError, match="backup_every is a number of steps, at least 1: got 0"):
        StageBackups(dht, RUN, functools.partial, backup_every=0)
    with pytest.raises(ValueError, match="others cannot call"):
        StageBackups(client, RUN, functools.partial)
