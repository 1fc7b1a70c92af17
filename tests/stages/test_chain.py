"""Microbatches on their way through stage peers, in virtual time: nothing is lost, computed twice or counted twice."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.errors import MicrobatchError
from shoal.p2p import Call, P2PContext
from shoal.stages.directory import LIFETIME
from shoal.stages.hop import Admission, FailureCause, Request, StageFailure, StageOutcome, StageReply
from shoal.stages.host import call_itself
from shoal.stages.work import Acceptance
from shoal.testing import Link, run
from tests.stages.chains import PASS_SECONDS, PATIENCE, Chain, FakeCompute

STAGES = 3
PASSES = 2 * STAGES - 1
"""Of one microbatch."""


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What goes wrong in the background of a test makes it fail."""
    yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def now() -> float:
    return asyncio.get_running_loop().time()


async def grid(chain: Chain, peers: int) -> list[list[FakeCompute]]:
    """Several peers for each stage."""
    return [[(await chain.add(stage))[0] for _ in range(peers)] for stage in range(STAGES)]


def test_each_microbatch_meets_its_own_step() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        computes = await grid(chain, 2)
        driver = await chain.add_driver()
        assert None not in await chain.drive(driver, range(1, 25))
        chain.check_counts(24)
        chain.check_steps()
        for stage in range(STAGES):
            steps = Counter(task.step for compute in computes[stage] for task, _ in compute.counted)
            assert steps == {0: 8, 1: 8, 2: 8}
        await asyncio.sleep(2)
        for _, host, compute in chain.hosts:
            assert compute.epoch == 3
            assert not len(host.works)
            assert not compute.kept

    run(main())


def test_pipeline_keeps_all_stages_busy() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        await grid(chain, 1)
        driver, began = await chain.add_driver(in_flight=8), now()
        await chain.drive(driver, range(100))
        # Two passes of each microbatch at the first stage, which is the poorest.
        assert now() - began < 1.1 * 100 * 2 * PASS_SECONDS

    run(main())


def test_two_drivers_share_steps() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=12)
        await grid(chain, 2)
        drivers = [await chain.add_driver(in_flight=count) for count in (2, 4)]
        await asyncio.sleep(0.2)
        await asyncio.gather(*(chain.drive(each, range(1, 31)) for each in drivers))
        chain.check_counts(60)
        chain.check_steps()
        assert not chain.metric("microbatches_resent")
        steps = Counter(task.step for _, _, compute in chain.hosts for task, _ in compute.counted)
        # A driver may begin some more before it hears of the other's.
        assert all(12 * STAGES <= count <= 14 * STAGES for step, count in steps.items() if step < max(steps))

    run(main())


def test_driver_that_comes_late_finds_the_step() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=4)
        for stage, epoch in enumerate([57, 58, 57]):
            await chain.add(stage, epoch=epoch)
        driver = await chain.add_driver()
        assert None not in await chain.drive(driver, range(1, 9))
        chain.check_counts(8)
        chain.check_steps()
        assert driver.steps.step >= 60

    run(main())


def test_stale_microbatches_are_dropped_only_if_too_old() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=4, max_staleness=1)
        await grid(chain, 1)
        driver, began = await chain.add_driver(in_flight=6), now()
        assert None not in await chain.drive(driver, range(1, 41))
        chain.check_counts(40)
        staleness = {epoch - task.step for _, _, compute in chain.hosts for task, epoch in compute.counted}
        assert 0 in staleness
        assert now() - began < 1.3 * 40 * 2 * PASS_SECONDS  # nobody waits for steps

    run(main())


@pytest.mark.parametrize("step_seconds", [0.3, 2.5])
def test_no_microbatch_is_older_than_max_staleness_when_it_counts(step_seconds: float) -> None:
    """Even if its stage has stepped since it came in. Slow steps let a stage fall behind, and lose nothing."""

    async def main() -> None:
        chain = Chain(STAGES, target=2, max_staleness=1)
        computes = [each for _ in range(3) for each in await chain.add(0)]
        computes += [each for stage in (1, 2) for each in await chain.add(stage)]
        went: list[int] = []

        async def make_step(compute: FakeCompute) -> int:
            await asyncio.sleep(step_seconds if compute.stage == 1 else 0.1)
            compute.epoch += 1
            return compute.epoch

        async def go_to(compute: FakeCompute, step: int) -> None:
            went.append(step)
            compute.epoch = step

        for compute in computes:
            compute.make_step = functools.partial(make_step, compute)  # type: ignore[method-assign]
            compute.go_to = functools.partial(go_to, compute)  # type: ignore[method-assign]
        driver = await chain.add_driver(in_flight=12)
        assert None not in await chain.drive(driver, range(1, 61))
        staleness = {epoch - task.step for _, _, compute in chain.hosts for task, epoch in compute.counted}
        assert max(staleness) == 1
        assert not went

    run(main())


@pytest.mark.parametrize("how", ["crash", "power_off"])
@pytest.mark.parametrize("stage", range(STAGES))
def test_death_at_any_moment_costs_at_most_one_pass(stage: int, how: str) -> None:
    async def main(moment: float) -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 2)
        driver = await chain.add_driver(in_flight=1)

        async def strike() -> None:
            await asyncio.sleep(moment)
            for compute in computes[stage]:
                if compute.passes or compute.is_at_work:
                    chain.kill(compute, how=how)

        striking, began = asyncio.ensure_future(strike()), now()
        assert None not in await chain.drive(driver, [1])
        assert now() - began < 1.5 + 3 * PATIENCE.request_timeout
        await striking
        chain.check_counts(1)
        assert chain.passes <= PASSES + 1
        assert not chain.metric("microbatches_resent")

    for moment in range(14):
        run(main(0.001 + moment * PASS_SECONDS / 2))


@pytest.mark.parametrize(("peers", "timeouts"), [(2, 1.4), (1, 2.4)])
def test_silent_peer_costs_one_timeout(peers: int, timeouts: float) -> None:
    """A lone one is asked again at once: it may only have been cut off."""

    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        computes = [[(await chain.add(stage))[0] for _ in range(peers if stage == 2 else 1)] for stage in range(STAGES)]
        driver = await chain.add_driver(in_flight=1)
        assert None not in await chain.drive(driver, [1])
        driving, began = asyncio.ensure_future(chain.drive(driver, [2])), now()
        await asyncio.sleep(3 * PASS_SECONDS)
        [silent] = [compute for compute in computes[2] if compute.is_at_work]
        machine = chain.machine_of(silent)
        chain.network.partition([machine], {*chain.network.hosts} - {machine})
        if peers == 1:
            asyncio.get_running_loop().call_later(1.1 * PATIENCE.request_timeout, chain.network.heal)
        assert None not in await driving
        assert now() - began < 1.0 + timeouts * PATIENCE.request_timeout

    run(main())


def test_deaths_in_a_row_are_repaired_on_both_ways() -> None:
    async def main(moment: float) -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 2)
        driver = await chain.add_driver(in_flight=6)

        async def strike() -> None:
            await asyncio.sleep(moment)
            for stage in (0, 1):
                chain.kill(max(computes[stage], key=lambda each: each.passes.total()))

        striking = asyncio.ensure_future(strike())
        assert None not in await chain.drive(driver, range(1, 13))
        await striking
        chain.check_counts(12)
        # Each of the two had at most some forward passes of what was in flight.
        assert chain.passes <= 12 * PASSES + 2 * PASSES
        assert not chain.metric("microbatches_resent")

    for moment in range(4, 20, 3):
        run(main(moment * PASS_SECONDS / 2))


def test_broken_connections_compute_nothing_twice() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8, link=Link(delay=0.01, break_rate=0.3))
        await grid(chain, 2)
        driver = await chain.add_driver(in_flight=4)
        assert None not in await chain.drive(driver, range(1, 61))
        assert chain.metric("hops_repaired")["same peer"] >= 10
        chain.check_counts(60)
        chain.check_steps()
        if not chain.metric("hops_repaired")["another peer"]:
            assert chain.passes == 60 * PASSES

    run(main())


@pytest.mark.parametrize("seed", range(2))
def test_churn_loses_and_repeats_nothing(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        chain = Chain(STAGES, target=8, link=Link(delay=(0.005, 0.05), break_rate=0.02))
        await grid(chain, 3)
        drivers = [await chain.add_driver(in_flight=4) for _ in range(2)]
        await asyncio.sleep(0.2)
        driving = asyncio.gather(*(chain.drive(each, range(1, 101)) for each in drivers))
        while not driving.done():
            await asyncio.sleep(rng.uniform(1.0, 3.0))
            stage = rng.randrange(STAGES)
            living = [(host, c) for machine, host, c in chain.hosts if machine.is_up and host.stage == stage]
            chain.kill(rng.choice(living)[1], how=rng.choice(["crash", "power_off"]))
            await chain.add(stage, epoch=max(compute.epoch for _, compute in living))
        for brought in await driving:
            assert None not in brought
        chain.check_counts(200)
        chain.check_steps()

    run(main(), seed=seed, time_limit=600)


def test_microbatches_wait_for_a_stage_without_peers(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=4)
        computes = await grid(chain, 1)
        driver = await chain.add_driver()
        await chain.drive(driver, range(1, 13))
        chain.kill(computes[1][0])
        driving = asyncio.ensure_future(chain.drive(driver, range(13, 17)))
        await asyncio.sleep(2 * PATIENCE.microbatch_timeout)
        assert not driving.done()
        await chain.add(1)
        assert None not in await driving
        chain.check_counts(16)
        chain.check_steps()

    run(main())
    assert "no peer of stage 1 can be reached" in caplog.text
    assert "STAGE 1 BEGINS ANEW" in caplog.text


def test_peers_that_lag_alarm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """One is slow to make its first step, and one comes when its stage is some steps further."""

    async def main() -> None:
        chain = Chain(STAGES, target=4)
        slow = (await grid(chain, 2))[1][0]
        make_step = slow.make_step

        async def make_first_step() -> int:
            if not slow.epoch:
                await asyncio.sleep(10.0)
            return await make_step()

        slow.make_step = make_first_step  # type: ignore[method-assign]
        driver = await chain.add_driver()
        assert None not in await chain.drive(driver, range(1, 13))
        await chain.add(1)
        assert None not in await chain.drive(driver, range(13, 41))
        await asyncio.sleep(2 * LIFETIME)
        assert {host.epoch for _, host, _ in chain.hosts} == {10}

    run(main())
    assert not caplog.records


def test_only_peers_that_stay_behind_alarm(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=4)
        computes = [(await chain.add(stage, epoch=10 if stage == 1 else 30))[0] for stage in range(STAGES)]
        stuck, is_mended = computes[1], asyncio.Event()

        async def go_nowhere(step: int) -> None:
            await is_mended.wait()
            stuck.epoch = step

        stuck.go_to = go_nowhere  # type: ignore[method-assign]
        driving = asyncio.ensure_future(chain.drive(await chain.add_driver(), range(1, 9)))
        await asyncio.sleep(LIFETIME)
        assert not caplog.records
        await asyncio.sleep(LIFETIME)
        assert [record.getMessage() for record in caplog.records] == [
            "the peers of stage 1 do not get to step 30: restart the one that is behind"
        ]
        is_mended.set()
        assert None not in await driving

    run(main())


def test_full_peers_hold_senders_back() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        for stage in range(STAGES):
            await chain.add(stage)
        driver = await chain.add_driver(in_flight=12)
        assert None not in await chain.drive(driver, range(1, 25))
        chain.check_counts(24)
        assert chain.passes == 24 * PASSES

    run(main())


def test_more_microbatches_than_connections_are_under_way(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 1)
        last = computes[-1][0]
        last.seconds = dict.fromkeys(last.seconds, 0.5)
        driver = await chain.add_driver(in_flight=64)
        assert None not in await chain.drive(driver, range(1, 65))
        assert chain.passes == 64 * PASSES

    caplog.set_level(logging.DEBUG, "shoal.stages")
    run(main())
    assert "has failed" not in caplog.text  # such as because there was no connection in time


def test_fast_peers_are_waited_for_rather_than_slow_ones() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 2)
        slow = computes[1][0]
        slow.seconds = dict.fromkeys(slow.seconds, 10.0)
        driver = await chain.add_driver(in_flight=8)
        await chain.drive(driver, range(1, 9))  # all peers are known then
        taken, began = slow.passes.total(), now()
        assert None not in await chain.drive(driver, range(9, 33))
        assert slow.passes.total() == taken
        assert now() - began < 10.0

    run(main())


def test_slow_stages_are_waited_for() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        for [compute] in await grid(chain, 1):
            compute.seconds = dict.fromkeys(compute.seconds, 2.0)
        driver = await chain.add_driver(in_flight=16)
        assert None not in await chain.drive(driver, range(1, 65))
        assert chain.passes == 64 * PASSES
        assert not chain.metric("hops_repaired")

    run(main())


def test_new_peers_take_few_microbatches_at_first() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 4)
        slow = computes[-1][0]
        slow.seconds = dict.fromkeys(slow.seconds, 10.0)
        driver, began = await chain.add_driver(in_flight=40), now()
        assert None not in await chain.drive(driver, range(1, 41))
        assert slow.passes.total() <= 2
        assert now() - began < 2 * 10.0 + 2.0

    run(main())


def test_a_peer_that_cannot_compute_is_replaced() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 2)
        computes[1][0].error = RuntimeError("out of memory")
        driver = await chain.add_driver()
        assert None not in await chain.drive(driver, range(1, 9))
        chain.check_counts(8)
        for compute in computes[1]:
            compute.error = RuntimeError("nobody can compute that")
        assert await chain.drive(driver, [9]) == [None]
        assert chain.metric("microbatches_dropped") == {"lost": 1}

    run(main())


def test_losses_that_are_not_finite_drop_a_microbatch() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=2)
        await grid(chain, 1)
        driver = await chain.add_driver()
        machine = chain.drivers[0][0]
        with pytest.raises(MicrobatchError, match="the microbatch was dropped: not 1 finite losses"):
            await machine.run(driver.carry(torch.ones(1, 2), torch.tensor([float("nan")])))
        assert chain.metric("microbatches_dropped") == {"not finite": 1}
        assert None not in await chain.drive(driver, range(1, 5))

    run(main())


def test_works_of_a_dead_driver_end() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        computes = await grid(chain, 1)
        driver = await chain.add_driver()
        driving = asyncio.ensure_future(chain.drive(driver, range(1, 5)))
        await asyncio.sleep(3.5 * PASS_SECONDS)
        chain.drivers[0][0].power_off()
        with pytest.raises(Exception, match="died"):
            await driving
        await asyncio.sleep(PATIENCE.microbatch_timeout / 2)
        assert len(chain.hosts[0][1].works)
        await asyncio.sleep(PATIENCE.microbatch_timeout)
        for _, host, _ in chain.hosts:
            assert not len(host.works)
        assert not any(compute.kept for [compute] in computes)

    run(main())


def test_a_peer_may_hold_several_stages_and_drive() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        computes = await chain.add(0, 1, 2)
        driver = await chain.add_driver()
        extras: dict[int, dict[str, Any]] = {1: {"mask": torch.ones(1)}, 2: {"weight": torch.zeros(1)}}
        assert None not in await chain.drive(driver, range(1, 17), extras=extras)
        chain.check_counts(16)
        assert [set(each) for each in chain.extras[0]] == [set()] * 16
        assert [set(each) for each in chain.extras[1]] == [{"mask"}] * 16
        assert [set(each) for each in chain.extras[2]] == [{"weight"}] * 16
        assert chain.hosts[0][1].record().room > 0
        assert len(computes) == STAGES

    run(main())


def test_microbatches_that_come_while_their_step_is_made_go_to_the_next_one() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        await grid(chain, 1)
        driver = await chain.add_driver()
        await chain.drive(driver, range(1, 5))
        for _, host, _ in chain.hosts:  # another driver has said so, and is gone
            host.close_step(0, chain.p2ps[-1].peer_id)
        assert None not in await chain.drive(driver, range(5, 9))
        chain.check_counts(8)
        assert driver.steps.step == 1
        assert chain.metric("microbatches_resent")["late"] <= 4

    run(main())


def test_results_for_a_dead_driver_do_not_fill_a_stage() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=10**6)
        await grid(chain, 1)
        for _, host, _ in chain.hosts:
            host.works.max_bytes = 1
        first, second = await chain.add_driver(), await chain.add_driver()
        driving = asyncio.ensure_future(chain.drive(first, range(1, 5)))
        await asyncio.sleep(3.5 * PASS_SECONDS)
        chain.drivers[0][0].crash()
        with pytest.raises(Exception, match="died"):
            await driving
        began = now()
        assert None not in await chain.drive(second, range(5, 13))
        assert now() - began < PATIENCE.microbatch_timeout / 2

    run(main())


def test_nothing_is_kept_of_a_failure_that_is_asked_for_too_late() -> None:
    async def main() -> None:
        chain = Chain(STAGES)
        await grid(chain, 1)
        host, peer = chain.hosts[0][1], chain.p2ps[0].peer_id
        request = Request(driver=b"driver", sequence=1, step=0, seed=0, samples=1, trains=True)
        _, way = host._admit(request, peer)
        assert way is not None
        host.works.receive(way.work, 1)
        host._leave(way, is_served=False)
        host._fail(way, StageOutcome(FailureCause.FAILED))
        host._closed = 0
        assert host._admit(request, peer) == (Acceptance.LATE, None)
        assert not host._ways

    run(main())


def test_a_peer_that_calls_itself_can_end_a_call_that_was_answered() -> None:
    """Otherwise the answer that it is busy would be taken for a broken connection."""

    async def main() -> None:
        chain = Chain(STAGES)
        await chain.add(0)

        async def refuse(call: Call, context: P2PContext) -> None:
            await call.send(Admission(code=Acceptance.BUSY, epoch=0), end=True)

        async with call_itself(chain.p2ps[0], refuse) as call:
            assert await call.receive(StageReply) == Admission(code=Acceptance.BUSY, epoch=0)
            await asyncio.sleep(1)
            await call.send_end()

    run(main())


def test_evaluation_counts_nothing() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=4)
        await grid(chain, 1)
        driver = await chain.add_driver()
        for trains in (False, True, False):
            assert None not in await chain.drive(driver, range(1, 9), trains=trains)
        chain.check_counts(8)
        assert driver.steps.step == 2

    run(main())


@pytest.mark.parametrize("stage", [0, 2])
def test_evaluation_waits_for_a_step_that_takes_long(stage: int) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=4)
        computes = await grid(chain, 1)
        computes[stage][0].step_seconds = 10 * PATIENCE.microbatch_timeout
        driver, began = await chain.add_driver(), now()
        await chain.drive(driver, range(1, 5))
        await asyncio.sleep(1.0)  # stages have begun to make the step
        assert None not in await chain.drive(driver, range(1, 5), trains=False)
        assert now() - began > 10 * PATIENCE.microbatch_timeout
        assert not chain.metric("microbatches_resent")
        assert not chain.metric("hops_repaired")

    run(main())


def test_failures_name_their_cause() -> None:
    assert StageFailure(FailureCause.LATE, "stage 2 is at step 7", 7).epoch == 7
