"""Whom a stage believes that a step is over, in virtual time: strangers and liars change nothing, and honest peers wait
for a few seconds at most."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import MicrobatchNotFiniteError
from shoal.p2p import P2P, PeerID
from shoal.stages.channel import ChannelStart
from shoal.stages.directory import LIFETIME, StageRecord
from shoal.stages.hop import CALL_FAILURES, Request, StageReply
from shoal.stages.host import CloseStep, NormRequest, StageService
from shoal.testing import Host as Machine
from shoal.testing import run
from tests.stages.chains import PATIENCE, Chain, FakeCompute

STAGES = 3
FAR = 10**15


class Liar:
    """A peer that says what it wants to the stages of a chain."""

    def __init__(self, chain: Chain, machine: Machine, p2p: P2P) -> None:
        self.chain, self.machine, self.p2p = chain, machine, p2p

    @classmethod
    async def join(cls, chain: Chain) -> Liar:
        machine, p2p, _ = await chain.start()
        return cls(chain, machine, p2p)

    def _stub(self, peer: PeerID) -> Any:
        return StageService.get_stub(self.p2p, peer, namespace="run")

    async def close(self, stage: int, step: int) -> None:
        for peer in [*self.chain.holders[stage]]:
            request = CloseStep(stage=stage, step=step, spreads=True)
            await self.machine.run(self._stub(peer).rpc_close(request, timeout=5.0))

    async def ask_norm(self, stage: int, step: int) -> None:
        async def ask(peer: PeerID) -> None:
            with contextlib.suppress(*CALL_FAILURES):
                await self._stub(peer).rpc_norm(NormRequest(stage=stage, step=step), timeout=0.5)

        for peer in [*self.chain.holders[stage]]:
            await self.machine.run(ask(peer))

    async def carry(self, stage: int, step: int) -> None:
        """Ask for a place for a microbatch, and send none."""

        async def ask(peer: PeerID) -> None:
            async with self._stub(peer).rpc_channel() as channel, self._stub(peer).rpc_carry() as call:
                await channel.send(ChannelStart(number=1))
                me = self.p2p.peer_id.to_bytes()
                await call.send(Request(me, 1, step, 0, 1, True, stage=stage, channel=1))
                assert await call.receive(StageReply) is not None
                await call.send_end()

        for peer in [*self.chain.holders[stage]]:
            await self.machine.run(ask(peer))

    async def lie(self, step: int) -> None:
        """In all ways to all stages."""
        for stage in range(self.chain.stages):
            await self.close(stage, step)
            await self.carry(stage, step + 1)
            await self.ask_norm(stage, step)


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def now() -> float:
    return asyncio.get_running_loop().time()


async def trained(chain: Chain, count: int, peers: int = 1) -> list[FakeCompute]:
    """A chain that has done microbatches."""
    computes = [(await chain.add(stage))[0] for stage in range(chain.stages) for _ in range(peers)]
    driver = await chain.add_driver()
    assert None not in await chain.drive(driver, range(1, 1 + count))
    await asyncio.sleep(2.0)
    return computes


def epochs(chain: Chain) -> list[int]:
    return [host.epoch for _, host, _ in chain.hosts]


@pytest.mark.parametrize("step", [2, 3, 10, FAR])
def test_strangers_end_no_step(step: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        await trained(chain, 20)
        assert epochs(chain) == [2] * STAGES
        liar = await Liar.join(chain)
        await liar.lie(step)
        await asyncio.sleep(2 * LIFETIME)
        assert epochs(chain) == [2] * STAGES
        for _ in range(10):
            await liar.lie(step)
        assert None not in await chain.drive(chain.drivers[0][1], range(21, 41))
        chain.check_counts(40)
        chain.check_steps()
        counted = Counter(task.step for _, _, compute in chain.hosts for task, _ in compute.counted)
        assert counted == dict.fromkeys(range(5), 8 * STAGES)
        told = [record.getMessage() for record in caplog.records if "says that step" in record.getMessage()]
        assert len(told) == STAGES
        expected = f"peer {liar.p2p.peer_id} is not believed: it says that step {step} is over"
        assert all(expected in each for each in told)

    run(main(), time_limit=600)


def test_liar_that_drives_moves_a_stage_by_one_step() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        await trained(chain, 8)
        liar = await Liar.join(chain)
        host = chain.hosts[1][1]
        host.note_brought(liar.p2p.peer_id)  # as if it had
        for step in [1, 1, 2, 3, FAR, FAR] * 3:
            await liar.close(1, step)
            await asyncio.sleep(1.0)
        await asyncio.sleep(2 * LIFETIME)
        assert epochs(chain) == [1, 2, 1]
        assert None not in await chain.drive(chain.drivers[0][1], range(21, 41))
        chain.check_counts(28)
        chain.check_steps()

    run(main(), time_limit=600)


def test_records_of_a_liar_do_not_count_among_those_of_others() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        liar = await Liar.join(chain)
        record = StageRecord(stage=1, epoch=FAR, rate=0.0, is_leaving=True)
        chain.holders[1][liar.p2p.peer_id] = SimpleNamespace(record=lambda: record)  # type: ignore[assignment]
        await trained(chain, 20)
        assert epochs(chain) == [2] * STAGES
        chain.holders[1].pop(liar.p2p.peer_id)
        for step in (2, FAR):
            await liar.lie(step)
        await asyncio.sleep(2 * LIFETIME)
        assert epochs(chain) == [2] * STAGES

    run(main(), time_limit=600)


def test_stage_peer_that_says_that_all_are_late_is_not_followed() -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        [liar] = await chain.add(1, epoch=FAR)
        await trained(chain, 40, peers=2)
        assert chain.metric("microbatches_resent")["late"]
        assert chain.drivers[0][1].steps.step < 60
        assert not liar.counted

    run(main(), time_limit=600)


# --- honest peers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_steps_without_samples_are_made(stages: int) -> None:
    """All microbatches of the first steps are dropped, so only the drivers know that these are over."""

    async def main() -> None:
        chain = Chain(stages, target=1)
        for stage in range(stages):
            [last] = await chain.add(stage)
        driver, began = await chain.add_driver(in_flight=1), now()
        last.error = MicrobatchNotFiniteError("infinite")
        assert await chain.drive(driver, range(1, 6)) == [None] * 5
        last.error = None
        assert None not in await chain.drive(driver, range(1, 4))
        assert now() - began < 30.0
        chain.check_counts(3)
        chain.check_steps()

    run(main(), time_limit=600)


@pytest.mark.parametrize("lagging", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_stages_that_lag_catch_up(lagging: tuple[int, ...]) -> None:
    """Such as after a restart from an archive, whose stages are not of the same step."""

    async def main() -> None:
        chain = Chain(4, target=4)
        for stage in range(4):
            await chain.add(stage, epoch=60 if stage in lagging else 90)
        driver, began = await chain.add_driver(), now()
        assert None not in await chain.drive(driver, range(1, 9))
        assert now() - began < 120.0
        chain.check_counts(8)
        chain.check_steps()
        assert min(epochs(chain)) >= 91

    run(main(), time_limit=600)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("epoch", [0, 30])
def test_drivers_go_on_when_all_stages_are_restarted(stages: int, epoch: int) -> None:
    async def main() -> None:
        chain = Chain(stages, target=4)
        driver, began = await chain.add_driver(), now()
        driver.steps.catch_up(40)
        for stage in range(stages):
            await chain.add(stage, epoch=epoch)
        assert None not in await chain.drive(driver, range(1, 9))
        assert now() - began < 120.0
        chain.check_counts(8)
        chain.check_steps()

    run(main(), time_limit=600)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("drivers", [1, 2])
def test_lost_stages_go_on(stages: int, drivers: int) -> None:
    async def main() -> None:
        chain = Chain(stages, target=4)
        computes = await trained(chain, 40)
        for _ in range(drivers - 1):
            await chain.add_driver()
        await asyncio.sleep(1.0)
        for compute in computes[:1]:
            chain.kill(compute)
        await asyncio.sleep(15.0)
        for compute in computes[:1]:
            await chain.add(compute.stage)
        began = now()
        for _, driver in chain.drivers:
            assert None not in await chain.drive(driver, range(41, 61))
        assert now() - began < 60.0
        chain.check_steps()

    run(main(), time_limit=600)


def test_two_peers_that_hold_and_drive_go_on_when_one_is_replaced() -> None:
    async def main() -> None:
        chain = Chain(2, target=4)
        for stage in range(2):
            await chain.add(stage)
            await chain.add_driver(on=chain.hosts[-1][0])
        await asyncio.sleep(0.5)
        await asyncio.gather(*(chain.drive(driver, range(1, 21)) for _, driver in chain.drivers))
        _, host, compute = chain.hosts[1]
        chain.kill(compute)
        chain.board.hear(1, None)
        await chain.add(1, epoch=host.epoch - 5)
        began = now()
        assert None not in await chain.drive(chain.drivers[0][1], range(21, 31))
        assert now() - began < 30.0
        chain.check_steps()

    run(main(), time_limit=600)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_one_peer_apart_from_all_others_does_not_stop_them(is_ahead: bool) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        for stage in range(STAGES):
            for number in range(3):
                await chain.add(stage, epoch=21 if (stage, number, is_ahead) == (1, 0, True) else 20)
        if not is_ahead:
            chain.hosts[4][2].epoch = chain.hosts[4][1].epoch = 10
        driver, began = await chain.add_driver(), now()
        assert None not in await chain.drive(driver, range(1, 41))
        assert now() - began < 40.0
        await asyncio.sleep(5.0)
        chain.check_counts(40)
        chain.check_steps()
        assert set(epochs(chain)) == {driver.steps.step}

    run(main(), time_limit=600)


def test_stage_that_takes_long_for_its_steps_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Drivers that do not wait for steps say that the next ones are over before it has made its own."""

    async def main() -> None:
        chain = Chain(STAGES, target=4, max_staleness=4)
        computes = [(await chain.add(stage))[0] for stage in range(STAGES)]
        slow, make_step = computes[1], computes[1].make_step

        async def make_slowly() -> int:
            await asyncio.sleep(5.0)
            return await make_step()

        slow.make_step = make_slowly  # type: ignore[method-assign]
        driver, began = await chain.add_driver(), now()
        assert None not in await chain.drive(driver, range(1, 201))
        assert now() - began > 1.5 * LIFETIME
        await asyncio.sleep(2 * LIFETIME)
        assert set(epochs(chain)) == {50}

    run(main(), time_limit=600)
    assert not caplog.records


def test_late_stage_peers_take_part(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        chain = Chain(STAGES, target=8)
        await trained(chain, 24, peers=2)
        driving = asyncio.ensure_future(chain.drive(chain.drivers[0][1], range(25, 65)))
        await asyncio.sleep(1.0)
        for stage in range(STAGES):
            await chain.add(stage, epoch=chain.hosts[0][1].epoch)
        assert None not in await driving
        await asyncio.sleep(5.0)
        assert set(epochs(chain)) == {8}
        chain.check_counts(64)
        chain.check_steps()
        await asyncio.sleep(2 * LIFETIME)

    run(main(), time_limit=600)
    assert not caplog.records
    assert PATIENCE.request_timeout < LIFETIME
