"""Chains of stage peers in virtual time, with a stand-in for the arithmetic that counts what it is asked for."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.errors import MicrobatchError
from shoal.p2p import P2P, PeerID
from shoal.stages.choice import Measurements
from shoal.stages.compute import StageTask
from shoal.stages.directory import StageRecord
from shoal.stages.driver import Driver, DriverProgress, Steps
from shoal.stages.hop import Changes, Hop, Patience
from shoal.stages.host import StageHost, StageService
from shoal.stages.work import Works
from shoal.testing import Host as Machine
from shoal.testing import Link, Network

PATIENCE = Patience(request_timeout=2.0, microbatch_timeout=60.0)
PASS_SECONDS = 0.1
# For how long the record of a dead peer is valid.
RECORD_SECONDS = 10.0


class Device:
    """The computing thread: it does one pass after the other, backward ones first, and ends each that it has begun."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, float, Callable[[], None], asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._thread: asyncio.Task[None] | None = None
        self.is_at_work = False

    async def run(self, work: Callable[[], None], seconds: float, priority: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._numbers), seconds, work, done))
        if self._thread is None or self._thread.done():
            self._thread = asyncio.ensure_future(self._work())  # it dies with its machine
        await done

    async def _work(self) -> None:
        while self._waiting:
            _, _, seconds, work, done = heapq.heappop(self._waiting)
            if done.cancelled():
                continue
            self.is_at_work = True
            await asyncio.sleep(seconds)
            self.is_at_work = False
            try:
                work()
            except Exception as e:
                if not done.done():
                    done.set_exception(e)
            else:
                if not done.done():
                    done.set_result(None)


class FakeCompute:
    """Forward doubles, backward triples. Counts each pass, and the samples of each step."""

    def __init__(self, chain: Chain, stage: int, seconds: Mapping[str, float] | None = None) -> None:
        self.chain, self.stage, self.epoch = chain, stage, 0
        self.seconds = dict.fromkeys(("forward", "losses", "backward"), PASS_SECONDS) | dict(seconds or {})
        self.passes: Counter[str] = Counter()
        self.counted: list[tuple[StageTask, int]] = []
        """Each microbatch whose samples count here, with the epoch in which they do."""
        self.kept: set[tuple[bytes, int]] = set()
        self.error: Exception | None = None
        self.step_seconds = 0.0
        """For which a step keeps the device busy."""
        self._device = Device()

    async def _pass(self, kind: str, task: StageTask) -> None:
        def work() -> None:
            self.passes[kind] += 1
            if self.error is not None:
                raise self.error
            if kind == "forward":
                self.kept.add(task[:2])
            elif task.trains:
                self.count(task)

        await self._device.run(work, self.seconds[kind], 1 if kind == "forward" else 0)

    def count(self, task: StageTask) -> None:
        """The samples of a microbatch count here."""
        self.counted.append((task, self.epoch))

    async def until_idle(self) -> None:
        """Wait until the pass that is computed now is done."""
        await self._device.run(lambda: None, 0.0, -1)

    @property
    def is_at_work(self) -> bool:
        """Whether it computes now."""
        return self._device.is_at_work

    async def forward(self, task: StageTask, inputs: Any, extras: Mapping[str, Any]) -> Any:
        self.chain.extras[self.stage].append(dict(extras))
        await self._pass("forward", task)
        return inputs * 2

    async def losses(self, task: StageTask, inputs: Any, labels: Any, extras: Mapping[str, Any]) -> Any:
        self.chain.extras[self.stage].append(dict(extras))
        await self._pass("losses", task)
        return inputs[:, 0] + labels, [inputs.clone()] if task.trains else []

    async def backward(self, task: StageTask, output_grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        await self._pass("backward", task)
        return [each * 3 for each in output_grads if each is not None]

    def forget(self, task: StageTask) -> None:
        self.kept.discard(task[:2])

    async def make_step(self) -> int:
        await asyncio.sleep(0.3)
        if self.step_seconds:
            await self._device.run(lambda: None, self.step_seconds, -1)
        self.epoch += 1
        return self.epoch

    async def go_to(self, step: int) -> None:
        self.epoch = step

    async def until_over(self) -> None:
        await asyncio.Event().wait()


class Board:
    """What drivers tell each other, a moment later."""

    def __init__(self, delay: float = 0.05) -> None:
        self.delay, self.told = delay, dict[int, DriverProgress]()
        self.seats: list[Seat] = []

    def seat(self) -> Seat:
        self.seats.append(Seat(self, len(self.seats)))
        return self.seats[-1]

    def hear(self, number: int, progress: DriverProgress | None) -> None:
        if progress is None:
            self.told.pop(number, None)
        else:
            self.told[number] = progress
        for each in self.seats:
            each.changes.note()


class Seat:
    """One driver's side of a board."""

    def __init__(self, board: Board, number: int) -> None:
        self.board, self.number, self.changes = board, number, Changes()

    def report(self, progress: DriverProgress) -> None:
        asyncio.get_running_loop().call_later(self.board.delay, self.board.hear, self.number, progress)

    async def ask(self) -> None:
        await asyncio.sleep(2 * self.board.delay)

    def others(self) -> Sequence[DriverProgress]:
        return [each for number, each in self.board.told.items() if number != self.number]


class Chain:
    """Machines with stages and drivers."""

    def __init__(
        self, stages: int, *, target: int = 8, link: Link | None = None, max_staleness: int | None = None
    ) -> None:
        self.network = Network(link or Link(delay=0.01))
        self.stages, self.target, self.max_staleness = stages, target, max_staleness
        self.holders: dict[int, dict[PeerID, StageHost]] = {stage: {} for stage in range(stages)}
        """Whose records are valid."""
        self.hosts: list[tuple[Machine, StageHost, FakeCompute]] = []
        self.drivers: list[tuple[Machine, Driver]] = []
        self.p2ps: list[P2P] = []
        self._started: dict[Machine, tuple[Machine, P2P, StageService]] = {}
        self.board = Board()
        self.extras: dict[int, list[dict[str, Any]]] = {stage: [] for stage in range(stages)}

    def peers_of(self, stage: int) -> Mapping[PeerID, StageRecord]:
        return {peer: host.record() for peer, host in self.holders.get(stage, {}).items()}

    def hasten(self, stage: int) -> None:
        """The records are always fresh."""

    async def start(self) -> tuple[Machine, P2P, StageService]:
        """One more machine, with nothing yet."""
        machine = self.network.add_host()
        p2p = await machine.run(P2P.create(transport=machine.transport(), rng=machine.rng))
        for other in self.p2ps:
            p2p.add_addresses(other.peer_id, other.get_addresses(other.peer_id))
            other.add_addresses(p2p.peer_id, p2p.get_addresses(p2p.peer_id))
        self.p2ps.append(p2p)
        self._started[machine] = machine, p2p, StageService(p2p, "run", self, PATIENCE)
        return self._started[machine]

    def _hop(self, stage: int, p2p: P2P, service: StageService) -> Hop:
        rng = random.Random(len(self.p2ps))
        return Hop(stage, self.stages, self, Measurements(), service, PATIENCE, p2p.metrics, rng)

    async def add(self, *stages: int, epoch: int = 0) -> list[FakeCompute]:
        """One more machine, with these stages."""
        machine, p2p, service = await self.start()
        made = []
        for stage in stages:
            compute = FakeCompute(self, stage)
            compute.epoch = epoch
            next_hop = None if stage + 1 == self.stages else self._hop(stage + 1, p2p, service)
            works = Works(2**30, PATIENCE.microbatch_timeout)
            host = StageHost(
                stage, p2p.peer_id, self, compute, works, next_hop, PATIENCE, max_staleness=self.max_staleness
            )
            service.hosts[stage] = host
            self.hosts.append((machine, host, compute))
            self.holders[stage][p2p.peer_id] = host
            made.append(compute)
        await machine.run(service.start())
        return made

    async def add_driver(self, in_flight: int = 4, *, on: Machine | None = None) -> Driver:
        machine, p2p, service = await self.start() if on is None else self._started[on]
        steps = Steps(
            self.board.seat(),
            self.target,
            lambda step: service.close_step(step, self.stages),
            is_synchronous=self.max_staleness is None,
        )
        driver = Driver(
            p2p.peer_id.to_bytes(),
            self._hop(0, p2p, service),
            steps,
            in_flight=in_flight,
            metrics=p2p.metrics,
        )
        machine.spawn(_start_steps(steps))
        self.drivers.append((machine, driver))
        return driver

    def machine_of(self, compute: FakeCompute) -> Machine:
        return next(machine for machine, _, each in self.hosts if each is compute)

    def kill(self, compute: FakeCompute, *, how: str = "crash") -> None:
        """End a stage peer; its record expires a while later."""
        getattr(self.machine_of(compute), how)()
        holders, machine = self.holders[compute.stage], self.machine_of(compute)
        peer = next(peer for peer in holders if self.network.host_of(peer) is machine)
        asyncio.get_running_loop().call_later(RECORD_SECONDS, holders.pop, peer, None)

    async def drive(self, driver: Driver, numbers: Sequence[int], **how: Any) -> list[Any]:
        """Send microbatches of one sample, each with its number as its value; ``None`` for those that were dropped."""
        machine = next(machine for machine, each in self.drivers if each is driver)

        async def send(number: int) -> Any:
            inputs = torch.full((1, 2), float(number))
            try:
                brought = await driver.carry(inputs, torch.tensor([0.5]), **how)
            except MicrobatchError:
                return None
            expected = number * 2.0 ** (self.stages - 1)
            assert brought.losses.tolist() == [expected + 0.5]
            if how.get("trains", True):
                [grad] = brought.grads
                assert grad is not None
                assert grad.tolist() == [[expected * 3.0 ** (self.stages - 1)] * 2]
            return brought

        return await machine.run(_gather(send, numbers))

    # --- what has been counted ----------------------------------------------------------------------------------------

    def times_counted(self, stage: int, *, with_dead: bool = True) -> Counter[tuple[bytes, int]]:
        """How often each microbatch has counted in a stage, under whatever identity it was sent."""
        found: Counter[tuple[bytes, int]] = Counter()
        for machine, host, compute in self.hosts:
            if host.stage == stage and (with_dead or machine.is_up):
                found.update((task.driver, task.seed) for task, _ in compute.counted)
        return found

    def check_counts(self, expected: int) -> None:
        """Each microbatch has counted in each stage, and only once at the peers that live."""
        for stage in range(self.stages):
            assert len(self.times_counted(stage)) == expected
            assert set(self.times_counted(stage, with_dead=False).values()) <= {1}

    def check_steps(self) -> None:
        """Each microbatch has met the parameters of its own step."""
        assert all(task.step == epoch for _, _, compute in self.hosts for task, epoch in compute.counted)

    @property
    def passes(self) -> int:
        """All passes that were computed, also those whose results were lost."""
        return sum(compute.passes.total() for _, _, compute in self.hosts)

    def metric(self, name: str) -> Counter[str]:
        """A counter of all peers together."""
        return sum((getattr(p2p.metrics, name) for p2p in self.p2ps), Counter())


async def _start_steps(steps: Steps) -> None:
    steps.start()


async def _gather(send: Any, numbers: Sequence[int]) -> list[Any]:
    return list(await asyncio.gather(*map(send, numbers)))
