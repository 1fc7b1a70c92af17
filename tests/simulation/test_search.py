"""What happens to a step while it looks for a group, to the moment: cancelled, changed, triggered, abandoned."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from shoal.averaging.control import AveragingMode, AveragingStage, StepControl
from shoal.base.clock import get_dht_time
from shoal.dht import ValueWithExpiration
from shoal.dht.crypto import tag_of
from shoal.errors import AllreduceException
from shoal.testing import SharedTable
from tests.drills import mostly_drills
from tests.simulation.searches import PROMPTLY, WINDOW, Swarm, at_stage, done, leader_of, now, simulate, size

# --- steps that are changed on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AveragingMode.NODE, AveragingMode.CLIENT])
@pytest.mark.parametrize("when", [0.01, 0.3, 2.0, WINDOW - 0.2])
def test_a_step_that_is_cancelled_leaves_the_others_to_meet(mode, when):
    async def story(swarm: Swarm) -> None:
        await swarm.add(3)
        await swarm.add(1, mode=mode)
        steps = swarm.steps()
        await asyncio.sleep(when)
        steps[3].cancel()
        await done(*steps)
        assert steps[3].cancelled()
        assert {size(step) for step in steps[:3]} == {3}
        assert all(torch.equal(tensor, torch.full((32,), 1.0)) for tensor in swarm.tensors[:3])
        assert swarm.tensors[3].unique().tolist() == [3.0]

    simulate(story)


def test_a_leader_that_is_cancelled_is_replaced():
    async def story(swarm: Swarm) -> None:
        await swarm.add(4)
        steps = swarm.steps()
        await asyncio.sleep(3.0)
        leader = leader_of(swarm)
        steps[leader].cancel()
        ended = await done(*steps)
        assert steps[leader].cancelled()
        assert {size(step) for i, step in enumerate(steps) if i != leader} == {3}
        assert ended < WINDOW + PROMPTLY

    simulate(story)


def test_who_was_cancelled_says_so_in_the_table():
    async def story(swarm: Swarm) -> None:
        await swarm.add(1)
        step = swarm.step(0)
        await asyncio.sleep(1.0)
        own = tag_of(swarm.nodes[0].p2p.peer_id)
        assert (await swarm.records())[own]
        step.cancel()
        await asyncio.sleep(1.0)
        assert (await swarm.records())[own] is None

    simulate(story)


def test_a_newcomer_is_not_kept_by_those_who_have_left():
    async def story(swarm: Swarm) -> None:
        await swarm.add(6)
        early = [swarm.step(i) for i in range(3)]
        await asyncio.sleep(0.5)
        for step in early:
            step.cancel()
        await asyncio.sleep(1.0)
        begun = now()
        late = [swarm.step(i) for i in range(3, 6)]
        for step in late:
            step.expected_group_size = 3
        ended = await done(*late)
        assert {size(step) for step in late} == {3}
        assert ended - begun < PROMPTLY

    simulate(story)


def test_the_next_step_of_one_who_was_cancelled_finds_others():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        first = swarm.step(0, expected_group_size=2)
        await asyncio.sleep(0.5)
        first.cancel()
        steps = swarm.steps(expected_group_size=2)
        ended = await done(*steps)
        assert {size(step) for step in steps} == {2}
        assert ended < 0.5 + PROMPTLY

    simulate(story)


def test_a_scheduled_time_that_is_moved_counts_from_the_next_declaration():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        alone = swarm.step(0)
        await asyncio.sleep(1.0)
        alone.scheduled_time = get_dht_time() + 20.0  # the first promise, for 5 s, is given already
        await asyncio.sleep(WINDOW)
        search = swarm.nodes[0].lanes[""].matchmaking.current.search
        assert search.promise == pytest.approx(alone.scheduled_time)
        other = swarm.step(1, scheduled_time=get_dht_time() + 60.0)
        ended = await done(alone, other)
        assert size(alone) == 2
        assert 21.0 <= ended < 21.0 + PROMPTLY

    simulate(story)


def test_a_group_starts_as_soon_as_its_leader_expects_no_more():
    async def story(swarm: Swarm) -> None:
        await swarm.add(4)
        steps = swarm.steps(expected_group_size=5)
        await asyncio.sleep(2.0)
        assert {step.stage for step in steps} == {AveragingStage.LOOKING_FOR_GROUP}
        begun = now()
        steps[leader_of(swarm)].expected_group_size = 4
        ended = await done(*steps)
        assert {size(step) for step in steps} == {4}
        assert ended - begun < PROMPTLY

    simulate(story)


def test_weights_may_change_until_the_all_reduce_begins():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        steps = [StepControl(get_dht_time() + WINDOW, get_dht_time() + 60) for _ in range(2)]
        for index, step in enumerate(steps):
            swarm.host(index).spawn(swarm.nodes[index].run_step(step))
        await at_stage(AveragingStage.AWAITING_TRIGGER, *steps)
        steps[1].weight = 3.0
        for step in steps:
            step.allow_allreduce()
        await done(*steps)
        assert all(torch.equal(tensor, torch.full((32,), 0.75)) for tensor in swarm.tensors)

    simulate(story)


def test_members_wait_for_triggers_with_the_group_already_made():
    async def story(swarm: Swarm) -> None:
        await swarm.add(4)
        steps = swarm.steps()
        waiting = [StepControl(get_dht_time() + WINDOW, get_dht_time() + 60) for _ in range(2)]
        await swarm.add(2)
        for index, step in enumerate(waiting, start=4):
            swarm.host(index).spawn(swarm.nodes[index].run_step(step))
        await asyncio.sleep(WINDOW + 1.0)
        assert {step.stage for step in steps} == {AveragingStage.RUNNING_ALLREDUCE}
        assert {step.stage for step in waiting} == {AveragingStage.AWAITING_TRIGGER}
        for step in waiting:
            step.allow_allreduce()
        await done(*steps, *waiting)
        assert {size(step) for step in (*steps, *waiting)} == {6}

    simulate(story)


def test_a_step_ends_at_its_deadline():
    async def story(swarm: Swarm) -> None:
        await swarm.add(1)
        step = swarm.step(0, timeout=7.0)
        assert await done(step) == pytest.approx(7.0, abs=0.1)
        with pytest.raises(AllreduceException, match="could not find a group of at least 2 peers"):
            step.result()

    simulate(story)


def test_a_second_step_waits_for_the_first():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        steps = [swarm.step(index, expected_group_size=2) for _ in range(2) for index in range(2)]
        await done(*steps)
        assert {size(step) for step in steps} == {2}
        groups = Counter(step.round.group_id for step in steps if step.round is not None)
        assert sorted(groups.values()) == [2, 2]

    simulate(story)


# --- members that die, and those that cannot be reached ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash", "power_off"])
@pytest.mark.parametrize("before_start", [2.0, 0.5, 0.05])
def test_a_leader_that_dies_before_it_starts_is_replaced(kind, before_start):
    async def story(swarm: Swarm) -> None:
        await swarm.add(5)
        steps = swarm.steps()
        await asyncio.sleep(WINDOW - before_start)
        leader = leader_of(swarm)
        getattr(swarm.host(leader), kind)()
        living = [step for i, step in enumerate(steps) if i != leader]
        ended = await done(*living)
        if kind == "crash":
            assert ended < WINDOW + 3.0  # they notice at once, and give each other time to come
        else:
            assert ended < WINDOW + 2 * WINDOW + 3.0  # they have to wait for its answer, and then for a new window
        assert {size(step) for step in living} == {4}

    simulate(story)


@pytest.mark.parametrize("kind", ["crash", "power_off"])
def test_followers_that_die_are_not_members_or_fail(kind):
    async def story(swarm: Swarm) -> None:
        await swarm.add(5)
        steps = swarm.steps()
        await asyncio.sleep(3.0)
        leader = leader_of(swarm)
        victims = [index for index in range(5) if index != leader][:2]
        for index in victims:
            getattr(swarm.host(index), kind)()
        living = [index for index in range(5) if index not in victims]
        ended = await done(*(steps[index] for index in living))
        for index in living:
            assert size(steps[index]) == (3 if kind == "crash" else 5)
            assert swarm.tensors[index].unique().tolist() == [sum(living) / 3]
        assert ended < WINDOW + (3.0 if kind == "crash" else 20.0)

    simulate(story)


@pytest.mark.parametrize("firewalled", [0, 1, 2])
def test_who_cannot_be_connected_to_leads_those_whom_it_calls(firewalled):
    async def story(swarm: Swarm) -> None:
        await swarm.add(3)
        swarm.host(firewalled).firewalled = True
        first = swarm.step(firewalled)
        await asyncio.sleep(0.2)
        others = [swarm.step(index) for index in range(3) if index != firewalled]
        await asyncio.sleep(WINDOW - 1.0)
        search = swarm.nodes[firewalled].lanes[""].matchmaking.current.search
        assert len(search.followers) == 2
        swarm.host(firewalled).firewalled = False
        await done(first, *others)
        assert {size(step) for step in (first, *others)} == {3}

    simulate(story)


class BlindTable(SharedTable):
    """A table on which some averagers are never seen."""

    def __init__(self, table: SharedTable) -> None:
        super().__init__(table.delay)
        self.records = table.records
        self.hidden: set[bytes] = set()

    async def get(self, key: Any, latest: bool = False, **how: Any) -> Any:
        found = await super().get(key, latest)
        if found is None:
            return None
        visible = {key: entry for key, entry in found.value.items() if key not in self.hidden}
        return ValueWithExpiration(visible, found.expiration_time)


@pytest.mark.parametrize("seed", mostly_drills(range(4), quick=2))
def test_groups_that_do_not_see_each_other_meet_through_who_knows_both(seed):
    async def story(swarm: Swarm) -> None:
        shared = swarm.table
        blind = [BlindTable(shared) for _ in range(2)]
        for table in (*blind, shared):
            swarm.table = table
            await swarm.add()
        first, second, _ = (node.p2p.peer_id.to_bytes() for node in swarm.nodes)
        blind[0].hidden, blind[1].hidden = {second}, {first}
        steps = swarm.steps(expected_group_size=3)
        ended = await done(*steps)
        assert {size(step) for step in steps} == {3}
        assert ended < WINDOW / 2

    simulate(story, seed)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peers", "target"), [(8, 4), (12, 4), (6, 2), (16, 16)])
def test_full_groups_start_at_once_and_the_others_make_the_next_ones(peers, target):
    async def story(swarm: Swarm) -> None:
        await swarm.add(peers, target_group_size=target, min_group_size=target)
        steps = swarm.steps()
        ended = await done(*steps)
        assert {size(step) for step in steps} == {target}
        groups = {step.round.group_id for step in steps if step.round is not None}
        assert len(groups) == peers // target
        assert ended < WINDOW  # nobody had to wait for the end of its window

    for seed in range(3):
        simulate(story, seed)


def test_members_read_what_the_others_of_their_group_gave():
    async def story(swarm: Swarm) -> None:
        await swarm.add(8, target_group_size=4)
        steps = [swarm.step(index, gather={"index": index, "text": "x" * index}) for index in range(8)]
        await done(*steps)
        of_peer = {node.p2p.peer_id: {"index": i, "text": "x" * i} for i, node in enumerate(swarm.nodes)}
        for index, step in enumerate(steps):
            gathered = step.result()
            assert len(gathered) == 4
            assert swarm.nodes[index].p2p.peer_id in gathered
            assert gathered == {peer: of_peer[peer] for peer in gathered}

    simulate(story)


def test_who_finds_no_seat_makes_a_group_with_the_rest():
    async def story(swarm: Swarm) -> None:
        await swarm.add(7, target_group_size=4)
        steps = swarm.steps()
        await done(*steps)
        assert Counter(size(step) for step in steps) == {4: 4, 3: 3}

    for seed in range(3):
        simulate(story, seed)


def test_too_few_make_no_group():
    async def story(swarm: Swarm) -> None:
        await swarm.add(3, min_group_size=4)
        steps = swarm.steps(timeout=12.0)
        assert await done(*steps) < 12.0 + PROMPTLY
        for step in steps:
            with pytest.raises(AllreduceException, match="at least 4 peers"):
                step.result()

    simulate(story)
