"""Optimizers of a run that came apart: both sides have trained, and one of them gives way."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from shoal.errors import P2PDaemonError
from tests.optim.conftest import Trainer, check_identical, in_parallel, meet, values, wait_until

pytestmark = pytest.mark.slow

OPTIONS = {"delay_state_averaging": False, "matchmaking_time": 5.0}


class Cut:
    """Keeps peers of different groups from calling each other."""

    def __init__(self, trainers: list[Trainer]) -> None:
        self._dhts = [trainer.opt.dht for trainer in trainers]
        self._group: dict[object, int] = {}
        for dht in self._dhts:
            self._guard(dht.p2p)

    def _guard(self, p2p) -> None:
        acquire = p2p.pool.acquire

        async def acquire_on_this_side(peer):
            if self._group.get(peer) != self._group.get(p2p.peer_id):
                raise P2PDaemonError(f"{peer} is on the other side of the cut")
            return await acquire(peer)

        p2p.pool.acquire = acquire_on_this_side

    def between(self, *groups: list[Trainer]) -> None:
        self._group = {trainer.opt.dht.peer_id: index for index, group in enumerate(groups) for trainer in group}
        for dht in self._dhts:
            dht.run_coroutine(self._hang_up)

    async def _hang_up(self, dht, node) -> None:
        for peer, group in self._group.items():
            if group != self._group[node.peer_id]:
                for connection in dht.p2p.server.connections_of(peer):
                    connection.abort()

    def heal(self) -> None:
        """From now on all can call each other; tables are filled again as by the first pings after an outage."""
        self._group = {}
        for dht in self._dhts:
            dht.run_coroutine(self._ping_others)

    async def _ping_others(self, _, node) -> None:
        node.blacklist.clear()
        others = [dht.peer_id for dht in self._dhts if dht.peer_id != node.peer_id]
        await asyncio.gather(*(node.protocol.call_ping(peer) for peer in others))


@pytest.fixture
def come_apart(make_trainers) -> Callable[..., tuple[list[Trainer], Cut]]:
    """Peers that train together to epoch 3, and then on different sides to the epochs that are given for each.

    They are ordered by their weight in the last common round, the greatest first.
    """

    def make(*sides: tuple[int, int], batch_sizes: list[int] | None = None, **options) -> tuple[list[Trainer], Cut]:
        trainers = make_trainers(sum(count for count, _ in sides), **{**OPTIONS, **options})
        for trainer, batch_size in zip(trainers, batch_sizes or [8] * len(trainers), strict=True):
            trainer.batch_size = batch_size
        meet(*trainers)
        in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
        check_identical(trainers)
        trainers.sort(key=weight_in_last_round, reverse=True)
        cut, groups, rest = Cut(trainers), [], list(trainers)
        for count, _ in sides:
            groups.append([rest.pop(0) for _ in range(count)])
        cut.between(*groups)
        ends = [epoch for (_, epoch), group in zip(sides, groups, strict=True) for _ in group]
        in_parallel(*(lambda t=t, end=end: t.train_until(end) for t, end in zip(trainers, ends, strict=True)))
        for trainer in trainers:
            load = functools.partial(check_apart_and_load, trainer, trainers)
            load.original = trainer.opt.state_averager.load_state_from_peers
            trainer.opt.state_averager.load_state_from_peers = trainer.loads = Mock(side_effect=load)
        return trainers, cut

    return make


def weight_in_last_round(trainer: Trainer) -> float:
    latest = (trainer.opt.grad_averager or trainer.opt.state_averager).last_round
    return latest.weights[latest.peers.index(trainer.opt.dht.peer_id)]


def check_apart_and_load(trainer: Trainer, trainers: list[Trainer], **options) -> bool:
    """Nobody of another side has averaged anything with a peer that is about to give way."""
    load = trainer.loads.side_effect.original
    other_side = trainer.opt.tracker.gives_way_to
    if other_side is not None:
        for other in trainers:
            if other.opt.dht.peer_id.to_bytes() in other_side.winners:
                own, theirs = trainer.opt.tracker.lineage.rounds, other.opt.tracker.lineage.rounds
                assert own[-1] not in theirs
                assert theirs[-1] not in own
    return load(**options)


def losses_told(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "had come apart" in r.getMessage()]


ATTEMPTS = 10
"""A round may fail on a busy machine, and one peer may miss what the other one has made: then they go on."""


def train_until_together(trainers: list[Trainer]) -> None:
    """Train epoch by epoch until parameters have been averaged with everybody again, and all are at the same epoch."""
    earlier = {id(trainer.opt.state_averager.last_round) for trainer in trainers}

    def are_together() -> bool:
        latest = [trainer.opt.state_averager.last_round for trainer in trainers]
        if any(one is None or id(one) in earlier or len(one.peers) < len(trainers) for one in latest):
            return False
        return len({one.group_id for one in latest}) == len({trainer.opt.local_epoch for trainer in trainers}) == 1

    for _ in range(ATTEMPTS):
        epoch = 1 + max(trainer.opt.local_epoch for trainer in trainers)
        in_parallel(*(functools.partial(trainer.train_until, epoch) for trainer in trainers))
        if are_together():
            return
    pytest.fail(f"not together after {ATTEMPTS} epochs")


def gave_way(trainers: list[Trainer]) -> list[bool]:
    return [any(call.kwargs.get("accept_older") for call in trainer.loads.call_args_list) for trainer in trainers]


def test_three_peers_prevail_over_one_that_is_further(come_apart, caplog):
    (*three, one), cut = come_apart((3, 6), (1, 15))
    assert one.opt.local_epoch == 15
    cut.heal()
    train_until_together([*three, one])
    check_identical([*three, one])
    assert gave_way([*three, one]) == [False, False, False, True]
    (told,) = losses_told(caplog)
    epochs = int(re.search(r"in (\d+) epochs", told)[1])
    assert epochs >= 12
    assert f"{epochs * 64} samples" in told


@pytest.mark.slow_drill
def test_one_of_two_equal_halves_gives_way(come_apart, caplog):
    trainers, cut = come_apart((2, 12), (2, 12))
    assert not torch.equal(values(trainers[0].model), values(trainers[2].model))
    cut.heal()
    train_until_together(trainers)
    check_identical(trainers)
    gave = gave_way(trainers)
    assert sorted([gave[:2], gave[2:]]) == [[False, False], [True, True]]
    assert len(losses_told(caplog)) == 2, "whoever gives way says so, once"


def test_more_samples_in_the_common_round_win(come_apart, caplog):
    trainers, cut = come_apart((1, 12), (1, 16), batch_sizes=[25, 8])
    cut.heal()
    train_until_together(trainers)
    check_identical(trainers)
    assert gave_way(trainers) == [False, True]
    assert len(losses_told(caplog)) == 1


def test_one_lone_step_each_is_no_fork(come_apart, caplog):
    """What follows from it, parameter averaging repairs."""
    trainers, cut = come_apart((1, 4), (1, 4))
    assert not torch.equal(values(trainers[0].model), values(trainers[1].model))
    cut.heal()
    for trainer in trainers:
        trainer.opt.tracker.look_after_others()
        wait_until(lambda t=trainer: t.opt.tracker.expected_group_size == 2, "both see each other again")
    train_until_together(trainers)
    check_identical(trainers)
    assert [trainer.loads.called for trainer in trainers] == [False, False]
    assert not losses_told(caplog)


@pytest.mark.slow_drill
def test_an_idle_absent_peer_is_simply_behind(come_apart, caplog):
    (*three, one), cut = come_apart((3, 14), (1, 3))
    cut.heal()
    train_until_together([*three, one])
    check_identical([*three, one])
    assert [trainer.loads.called for trainer in (*three, one)] == [False, False, False, True]
    assert not losses_told(caplog)


@pytest.mark.slow_drill
def test_three_idle_peers_prevail_over_one_that_is_further(come_apart, caplog):
    """The run is at the epoch of most peers, and the first steps of these part them from the one."""
    (*three, one), cut = come_apart((3, 3), (1, 14))
    cut.heal()
    train_until_together([*three, one])
    check_identical([*three, one])
    assert gave_way([*three, one]) == [False, False, False, True]
    assert len(losses_told(caplog)) == 1


@pytest.mark.slow_drill
def test_a_newcomer_joins_the_side_that_goes_on(come_apart, make_trainers):
    (*three, one), cut = come_apart((3, 6), (1, 15))
    cut.heal()
    (newcomer,) = make_trainers(1, **OPTIONS)
    for trainer in (*three, one):
        newcomer.opt.dht.run_coroutine(functools.partial(ping, peer=trainer.opt.dht.peer_id))
    newcomer.step()
    assert newcomer.opt.local_epoch == 6
    train_until_together([*three, one, newcomer])
    check_identical([*three, one, newcomer])


async def ping(_, node, peer) -> None:
    await node.protocol.call_ping(peer)


@pytest.mark.slow_drill
def test_with_local_updates_too(come_apart, caplog):
    options = {"use_local_updates": True}
    (*three, one), cut = come_apart((3, 6), (1, 15), **options)
    cut.heal()
    train_until_together([*three, one])
    check_identical([*three, one])
    assert gave_way([*three, one]) == [False, False, False, True]


def test_small_groups_make_no_branches(come_apart, caplog):
    """No two peers need to have a round in common there."""
    trainers, cut = come_apart((1, 12), (1, 12), averager_opts={"target_group_size": 2})
    cut.heal()
    train_until_together(trainers)
    assert gave_way(trainers) == [False, False]
    assert not trainers[0].opt.tracker.lineage.rounds
    assert not losses_told(caplog)
