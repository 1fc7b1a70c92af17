"""Peers that move to another stage while others train: real modules and real peers."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim import progress_tracker
from shoal.stages import directory, model, moving, placement
from shoal.stages.compute import StageCompute
from shoal.stages.host import Pace
from tests.drills import mostly_drills
from tests.optim.conftest import over_sockets, wait_until
from tests.stages.test_compute import SAMPLES, SGD, WORDS
from tests.stages.test_model import Last, data

WIDTH = 16
FACTORIES = [functools.partial(nn.Embedding, WORDS, WIDTH), functools.partial(Last, WIDTH)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (directory, "LOOK_SECONDS", 0.5),
        (directory, "RENEWAL_SECONDS", 0.5),
        (directory, "LIFETIME", 3.0),
        (model, "DECLARE_SECONDS", 0.2),
        (moving, "PAUSE_OF_NEWCOMER", 0.1),
        (moving, "PAUSE_OF_MOVER", 0.5),
        (progress_tracker, "FIRST_LOOK_SECONDS", 1.0),
    ):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(Pace, "rate", 1.0)


@pytest.fixture
def make_peer(closing: Any) -> Any:
    def make(dht: Any, stage: Any, factories: Any = FACTORIES, **options: Any) -> shoal.StagedModel:
        defaults = {"optimizer": SGD, "target_batch_size": 8 * SAMPLES, "backup_every": 2, "rebalance_every": 4.0}
        more: Any = {
            **defaults,
            "optimizer_opts": {"matchmaking_time": 2.0},
            "request_timeout": 2.0,
            "microbatch_timeout": 20.0,
            **options,
        }
        return closing(shoal.StagedModel(dht=dht, run_id="run", stages=factories, stage=stage, **more))

    return make


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counter[int]]:
    """By stage: how often each microbatch has counted."""
    found, count = [Counter[int](), Counter[int]()], StageCompute._count

    def note(self: StageCompute, task: Any) -> None:
        count(self, task)
        found[self.number][task.seed] += 1

    monkeypatch.setattr(StageCompute, "_count", note)
    return found


@over_sockets
@pytest.mark.parametrize("inner", mostly_drills([{}, {"inner_batch_size": 2 * SAMPLES}]), ids=["Optimizer", "DiLoCo"])
def test_four_and_one_become_three_and_two_while_one_drives(make_dhts, make_peer, counted, caplog, inner):
    dhts = make_dhts(5)
    mover = make_peer(dhts[0], "auto", **inner)
    [rich] = mover.held
    peers = [mover, *(make_peer(dht, rich, **inner) for dht in dhts[1:4]), make_peer(dhts[4], 1 - rich, **inner)]
    losses: list[torch.Tensor] = []
    moved = 0  # it may have moved before the first loss is here
    for found in mover.train(itertools.cycle(data(20))):
        losses.append(found.mean())
        if mover.held != [1 - rich]:
            moved = len(losses)
        elif len(losses) > 60 + moved:
            break
    assert [peer.held for peer in peers] == [[1 - rich], *[[rich]] * 3, [1 - rich]]
    assert list(mover.modules) == [1 - rich]
    assert torch.stack(losses[-20:]).mean() < 0.9 * torch.stack(losses[:20]).mean()
    assert all(set(each.values()) == {1} and len(each) >= len(losses) for each in counted)
    assert "moves from stage" in caplog.text
    assert "are lost" not in caplog.text
    assert "cannot compute a microbatch" not in caplog.text


@pytest.mark.parametrize("has_copy", [True, False], ids=["keeper-moves", "other-moves"])
def test_a_lost_stage_gets_another_peer_with_its_state(make_dhts, make_peer, monkeypatch, caplog, has_copy):
    dhts = make_dhts(4)
    options = {"optimizer": functools.partial(torch.optim.SGD, lr=1e-4)}
    lonely, driver = make_peer(dhts[3], 1, **options), make_peer(dhts[0], None, **options)
    monkeypatch.setattr(moving, "stage_for_newcomer", lambda *_: 0)
    peers = [make_peer(dht, "auto", **options) for dht in dhts[1:3]]
    training = driver.train(itertools.cycle(data(20)))

    def kept() -> list[bool]:
        next(training)
        return [1 in peer._backups.kept() for peer in peers]

    wait_until(lambda: any(kept()), "the state of the lonely stage is kept")
    mover, stays = sorted(peers, key=lambda peer: (1 in peer._backups.kept()) != has_copy)
    ranks = {mover.dht.peer_id: b"0", stays.dht.peer_id: b"1"}
    monkeypatch.setattr(placement, "rank_of", lambda peer, step: ranks.get(peer, b"2"))
    dhts[3].shutdown()  # nobody is told
    before = lonely.modules[1].layer.weight.detach().clone()
    for _ in range(60):  # some of them may have been under way
        next(training)
    assert [mover.held, stays.held] == [[1], [0]]
    torch.testing.assert_close(mover.modules[1].layer.weight, before, atol=1e-2, rtol=0)
    assert "BEGINS ANEW" not in caplog.text


def test_a_peer_that_cannot_hold_the_new_stage_returns(make_dhts, make_peer, caplog):
    dhts = make_dhts(2)
    first = make_peer(dhts[0], "auto")
    [rich] = first.held
    make_peer(dhts[1], rich)

    def fail() -> nn.Module:
        raise MemoryError("no room for it")

    first.stages[1 - rich] = fail
    wait_until(lambda: "no room for it" in caplog.text and first.held == [rich], "it is back")
    assert f"cannot hold stage {1 - rich}, so it returns to stage {rich} and stays there" in caplog.text
