"""Newcomers find a run and its state, whatever others do in the table, and whatever donors offer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest

from shoal.dht import protocol
from shoal.dht.local_records import LocalRecords, Room
from shoal.testing import Network, run
from tests.hostile.attacks.members import LIES
from tests.hostile.simulated import Log, begin, next_epoch
from tests.simulation.training import LINK, Course, Swarm, Trainer

PEERS, NEWCOMERS = 6, 3
COURSE = Course(target_batch_size=PEERS * 500, learning_rate=0.02)
PATIENCE = 45.0


def newcomers_of(seed: int, attack: Callable[[Swarm, list[Trainer]], object]) -> tuple[list[Trainer], list[Trainer]]:
    """Old and new members of a swarm that is attacked: what has become of them a while after the new ones came."""

    async def main() -> tuple[list[Trainer], list[Trainer]]:
        swarm = Swarm(Network(LINK), COURSE)
        old = [await swarm.add() for _ in range(PEERS)]
        await next_epoch(old[0], 3)
        made = attack(swarm, old)
        if asyncio.iscoroutine(made):
            await made
        new = [await swarm.add() for _ in range(NEWCOMERS)]
        await asyncio.sleep(PATIENCE)
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)
        return old, new

    return run(main(), seed=seed, time_limit=1000)


async def _strike(swarm: Swarm, name: str) -> None:
    me = await begin(swarm, name)
    await asyncio.wait_for(me.has_struck.wait(), 60)
    await asyncio.sleep(5.0)


def check(old: list[Trainer], new: list[Trainer]) -> None:
    """They all are in one group, with one model."""
    for trainer in new:
        assert trainer.record.downloads >= 1
        assert trainer.record.rounds >= 2
    sizes = [max(trainer.record.group_sizes) for trainer in [*old, *new]]
    assert sizes == [PEERS + NEWCOMERS] * (PEERS + NEWCOMERS)
    assert [trainer.loss for trainer in [*old, *new]] == pytest.approx([old[0].loss] * (PEERS + NEWCOMERS), rel=0.1)


@pytest.mark.slow_drill
def test_newcomers_find_the_run_although_others_withdraw_it() -> None:
    check(*newcomers_of(1, lambda swarm, _: _strike(swarm, "withdraws_what_others_declared")))


@pytest.mark.slow_drill
def test_newcomers_find_the_run_in_a_crowd() -> None:
    check(*newcomers_of(1, lambda swarm, _: _strike(swarm, "crowds_the_keys_of_a_run")))


@pytest.mark.slow_drill
def test_newcomers_find_the_run_although_donors_are_busy() -> None:
    check(*newcomers_of(1, lambda swarm, _: _strike(swarm, "asks_for_a_chunk_now_and_then")))


@pytest.mark.slow_drill
def test_newcomers_find_the_run_where_nodes_hide_it() -> None:
    check(*newcomers_of(1, lambda swarm, _: _strike(swarm, "hides_what_is_stored")))


@pytest.mark.slow_drill
def test_a_full_table_has_room_for_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much smaller than usual as is the time in which a stranger fills it."""
    room = Room(nbytes=2**20, bytes_per_peer=2**16, bytes_per_host=2**17)
    monkeypatch.setattr(protocol, "LocalRecords", functools.partial(LocalRecords, room=room))
    check(*newcomers_of(1, lambda swarm, _: _strike(swarm, "fills_the_table")))


def test_newcomers_take_the_state_that_most_donors_have() -> None:
    with Log() as log:
        old, new = newcomers_of(1, lambda _, old: LIES["offers_a_state_of_constants"](old[-1].averager))
    check(old, new)
    kind = "the state of donor"
    assert log.names(old[-1].node.peer_id, kind=kind), "the users are told whose state is another one"
    assert not log.names(*(trainer.node.peer_id for trainer in [*old[:-1], *new]), kind=kind)
