"""Strangers who claim epochs, samples and ends, or withdraw what others declared: training goes on as it was."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from tests.hostile.strangers import ATTACKS, TARGET, claims_samples, withdraw_everything
from tests.optim.conftest import check_identical, in_parallel, meet, wait_until

PEERS, BEFORE, EPOCHS = 3, 3, 6


@pytest.fixture
def trainers(make_trainers):
    """They have made a few epochs together."""
    trainers = make_trainers(PEERS, target=TARGET, matchmaking_time=3.0)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(BEFORE) for t in trainers))
    for trainer in trainers:
        load = trainer.opt.state_averager.load_state_from_peers
        trainer.opt.state_averager.load_state_from_peers = trainer.loads = Mock(side_effect=load)
    return trainers


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_stranger_changes_nothing(trainers, make_dhts, closing, attack, caplog):
    (dht,) = make_dhts(1)
    stranger = closing(attack(dht, BEFORE))
    for trainer in trainers:
        board = trainer.opt.tracker.board
        wait_until(
            lambda b=board: b.time_of_record(dht.peer_id.to_bytes()) is not None, "all have heard of the stranger"
        )
    made = [trainer.samples for trainer in trainers]
    in_parallel(*(lambda t=t: t.train_until(BEFORE + EPOCHS) for t in trainers))
    check_identical(trainers)
    assert stranger.is_alive()
    assert not any(trainer.loads.called for trainer in trainers), "nobody was behind"
    # The batch that the stranger may claim in each epoch, and those that the others stop short of the end: one each on
    # a busy machine, where they overrate what the others have made meanwhile.
    made = [trainer.samples - before for trainer, before in zip(trainers, made, strict=True)]
    assert sum(made) >= EPOCHS * (TARGET - (1 + PEERS) * 8)
    rounds = {trainer.opt.grad_averager.last_round.group_id for trainer in trainers}
    assert len(rounds) == 1
    lines = [record for record in caplog.records if record.name.startswith("shoal")]
    assert len(lines) <= 20, "\n".join(record.getMessage() for record in lines)


def test_when_it_is_gone_nothing_is_left(trainers, make_dhts, caplog):
    """Epochs are full again, everybody is in every round, nobody else is, and nobody is waited for in vain."""
    (dht,) = make_dhts(1)
    stranger = claims_samples(dht, BEFORE)
    in_parallel(*(lambda t=t: t.train_until(BEFORE + 3) for t in trainers))
    stranger.shutdown()
    for trainer in trainers:
        wait_until(lambda t=trainer: t.opt.tracker.global_progress.num_peers == PEERS, "the stranger has left")
    caplog.clear()
    honest = {trainer.opt.dht.peer_id for trainer in trainers}
    made, rounds = [trainer.samples for trainer in trainers], set()
    for epoch in range(BEFORE + 4, BEFORE + 7):
        in_parallel(*(lambda t=t, epoch=epoch: t.train_until(epoch) for t in trainers))
        for trainer in trainers:
            last, tracker = trainer.opt.grad_averager.last_round, trainer.opt.tracker
            assert set(last.peers) == honest
            assert not last.failed_peers
            assert tracker.expected_members(epoch) <= honest
            rounds.add(last.group_id)
    check_identical(trainers)
    assert len(rounds) == 3, "one for each epoch"
    made = [trainer.samples - before for trainer, before in zip(trainers, made, strict=True)]
    assert sum(made) >= 3 * (TARGET - PEERS * 8)
    assert not any(trainer.loads.called for trainer in trainers)
    assert not [record for record in caplog.records if record.name.startswith("shoal")]


@pytest.mark.parametrize("key", ["run_state_averager.all_averagers", "run_progress"])
def test_nobody_can_withdraw_what_others_have_declared(trainers, make_dhts, key):
    (dht,) = make_dhts(1)
    wait_until(lambda: dht.get(key, latest=True) is not None, "they have declared themselves")
    left = withdraw_everything(dht, key)
    assert left
    assert None not in left
