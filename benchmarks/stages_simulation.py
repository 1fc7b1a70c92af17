"""Models in stages at scale: many stage peers of different speed that come and die, in virtual time on one core.

    python -m benchmarks.stages_simulation --scenario plain
    python -m benchmarks.stages_simulation --scenario uneven --steps 50 --seed 3

Microbatches pass through the real code: directory, choice of peers, chain, repairs, drivers. Stand-ins compute, share
records (for the DHT), and make the steps of a stage: its living peers make a step together, which takes a second, and a
newcomer takes over the state in three. Scenarios (``--scenario all``): see :data:`SCENARIOS`.

The *poorest stage* bounds the throughput: what each of its peers could do alone, by its device or by its line,
for as long as it was there, over the time of the run. Lines and boundaries are 1/64 of 1 MB and 32 to 1000
Mbit/s, which does not change the times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from shoal.errors import MicrobatchError
from shoal.p2p import P2P
from shoal.stages.choice import Measurements
from shoal.stages.compute import StageTask
from shoal.stages.directory import StageDirectory
from shoal.stages.driver import Driver, Steps
from shoal.stages.hop import Hop, Patience
from shoal.stages.host import StageHost, StageService
from shoal.stages.model import DECLARE_SECONDS
from shoal.stages.work import Works
from shoal.testing import Host, Link, SharedTable, Trace, run
from tests.stages.chains import Chain, FakeCompute

# Of a boundary: values of a sample, and bytes. The real one has 64 times as many, and real lines are 64 times as fast.
VALUES, BYTES = 4096, 16384
# The slowest line, in bytes per second, and the speed of the fastest device, in microbatches per second both ways.
SLOWEST_LINE, FASTEST = 65536.0, 4.0
AVERAGING_SECONDS, DOWNLOAD_SECONDS = 1.0, 3.0
# How long the peers of a stage wait for one that does not come, and until they know that another one makes the step.
MATCHMAKING_SECONDS, NEWS_SECONDS = 5.0, 0.1
PATIENCE = Patience()
# How long other drivers believe that a dead one is there.
DRIVER_SECONDS = 10.0


@dataclass(frozen=True)
class Scenario:
    """What is simulated."""

    steps: int = 40
    microbatches: int = 256
    """Of a step, for all drivers together."""
    stages: int = 8
    peers: int = 16
    """Of a stage."""
    drivers: int = 4
    in_flight: int = 64
    """Of each driver: two for each stage peer, by all drivers together."""
    spread: float = 30.0
    """Between the slowest and the fastest device, and between the slowest and the fastest line."""
    session: float = 1200.0
    """How long a peer stays, on average. Half of the peers that go vanish, the others end their connections."""
    pause: float = 20.0
    """Until another one comes, on average."""
    delay: tuple[float, float] = (0.01, 0.1)
    max_staleness: int | None = None
    """``None`` = synchronous."""
    story: str = ""
    """What else happens, see :data:`STORIES`."""


@dataclass
class Figures:
    """What came of a simulation. Seconds are virtual ones, unless the name says otherwise."""

    scenario: str
    seed: int
    steps: int
    microbatches: int
    """That came back."""
    seconds: float
    throughput: float
    """Microbatches per second."""
    poorest: float
    """The same of the poorest stage, if its peers never waited."""
    share: float
    """Of the throughput of the poorest stage."""
    share_between_steps: float
    """The same without the seconds in which stages averaged, and nothing else was done."""
    median_step: float
    longest_step: float
    deaths: int
    """Of stage peers."""
    dropped: int
    """Microbatches that were given up."""
    resent: dict[str, int]
    repaired: dict[str, int]
    lost_per_death: float
    """Passes that were computed and were not needed, in microbatches with all their passes, for each death."""
    counted_twice: int
    """Microbatches that are twice in the steps of a stage, over all stages."""
    lost_with_peer: int
    """Microbatches that are in no step of a stage, because the peer that had counted them died before the step."""
    missed_steps: int
    """Peers that had gradients and were not in the step of their stage."""
    out_of_step: int
    """Microbatches that met parameters of another step, or of one that is too old."""
    trace: str
    """Hash of everything that reached a host, and when: the same for the same seed."""
    processor_seconds: float
    processor_ms_per_hop: float
    """Of this simulation, for each microbatch and stage; both ends together, and all else that peers do."""


class Holders:
    """The peers of a stage, as far as they make steps together."""

    def __init__(self) -> None:
        self.epoch = 0
        self.over = -1
        """The latest step that a member has begun to make, as the others know it."""
        self.members: list[Peer] = []
        self.credited: Counter[tuple[bytes, int]] = Counter()
        """How often each microbatch is in the steps of this stage."""
        self.missed = 0
        self._waiting: set[Peer] = set()
        self._round: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # Tasks of the simulation itself belong to no machine.
        self._context = contextvars.copy_context()

    def living(self) -> list[Peer]:
        return [each for each in self.members if each.machine.is_up]

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def make_step(self, peer: Peer) -> int:
        if peer.epoch < self.epoch:
            self.missed += bool(peer.uncredited)
            peer.uncredited.clear()
            await asyncio.sleep(DOWNLOAD_SECONDS)
            return self.epoch
        epoch = self.epoch
        self._waiting.add(peer)
        if self._round is None:
            self._round = asyncio.get_running_loop().create_task(self._make(epoch), context=self._context)
        while self.epoch == epoch:
            await self._changed.wait()
        return self.epoch

    async def _make(self, epoch: int) -> None:
        now = asyncio.get_running_loop().time
        until = now() + MATCHMAKING_SECONDS
        await asyncio.sleep(NEWS_SECONDS)
        self.over = epoch
        self._note()
        while now() < until and any(each.epoch == epoch and each not in self._waiting for each in self.living()):
            await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=NEWS_SECONDS)
        group, self._waiting = [each for each in self.living() if each in self._waiting], set()
        for each in group:
            each.in_round = list(each.uncredited)
            each.uncredited.clear()
        await asyncio.sleep(AVERAGING_SECONDS)
        for each in group:
            self.credited.update(each.in_round)
        self.members = self.living()
        self.epoch, self._round = epoch + 1, None
        self._note()

    async def until_over(self, peer: Peer) -> None:
        while max(self.over, self.epoch - 1) < peer.epoch:
            await self._changed.wait()


class Peer(FakeCompute):
    """The arithmetic of one stage peer, with a speed of its own."""

    def __init__(self, swarm: Swarm, stage: int, machine: Host, seconds: float) -> None:
        third = seconds / 3
        super().__init__(swarm, stage, {"forward": third, "losses": seconds, "backward": 2 * third})
        self.machine, self.holders, self.swarm = machine, swarm.groups[stage], swarm
        self.epoch = self.holders.epoch
        self.uncredited: list[tuple[bytes, int]] = []
        """Microbatches that count here, and are in no step yet."""
        self.in_round: list[tuple[bytes, int]] = []
        self.holders.members.append(self)

    def count(self, task: StageTask) -> None:
        self.uncredited.append((task.driver, task.seed))
        most, staleness = self.swarm.max_staleness, self.epoch - task.step
        self.swarm.out_of_step += bool(staleness) if most is None else staleness > most

    async def forward(self, task: StageTask, inputs: Any, extras: Mapping[str, Any]) -> Any:
        await self._pass("forward", task)
        return (inputs * 2).expand(-1, VALUES).contiguous() if self.stage == 0 else inputs * 2

    async def losses(self, task: StageTask, inputs: Any, labels: Any, extras: Mapping[str, Any]) -> Any:
        await self._pass("losses", task)
        return inputs[:, 0] + labels, [inputs.clone()]

    async def backward(self, task: StageTask, output_grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        await self._pass("backward", task)
        return [each[:, :1] if self.stage == 0 else each for each in output_grads if each is not None]

    async def make_step(self) -> int:
        await self.until_idle()  # what is computed now counts in the step
        self.epoch = await self.holders.make_step(self)
        return self.epoch

    async def go_to(self, step: int) -> None:
        self.epoch = self.holders.epoch = max(self.holders.epoch, step)

    async def until_over(self) -> None:
        await self.holders.until_over(self)


class Swarm(Chain):
    """Stage peers that come and go, and drivers that train until enough steps are made."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        what = scenario
        super().__init__(
            what.stages, target=what.microbatches, link=Link(delay=what.delay), max_staleness=what.max_staleness
        )
        self.network.trace, self.rng, self.scenario = trace, self.network.rng, what
        self.now = asyncio.get_running_loop().time
        self.table = SharedTable(0.1)
        self.groups = [Holders() for _ in range(what.stages)]
        self.capacity = [0.0] * what.stages
        """Of each stage: the microbatches that its peers could have done."""
        self.living: list[list[Peer]] = [[] for _ in range(what.stages)]
        self.deaths = self.out_of_step = self.done = 0
        self.begun: dict[int, float] = {}
        """When each step was begun by all drivers."""
        self.is_over = asyncio.Event()
        self.error: BaseException | None = None
        self._watched: set[asyncio.Task[Any]] = set()
        self._since: dict[Peer, float] = {}
        self._rates: dict[Peer, float] = {}

    # --- peers --------------------------------------------------------------------------------------------------------

    async def _connect(self, machine: Host) -> tuple[P2P, StageService, StageDirectory]:
        p2p = await machine.run(P2P.create(transport=machine.transport(), rng=machine.rng))
        self.p2ps.append(p2p)
        directory = StageDirectory(self.table, p2p, "run", self.stages)  # type: ignore[arg-type]
        service = StageService(p2p, "run", directory, PATIENCE)
        await machine.run(service.start())
        return p2p, service, directory

    def _between(self, lowest: float, spread: float) -> float:
        return lowest * spread ** self.rng.random()

    async def add_peer(self, stage: int) -> Peer:
        """A peer comes, takes over the state, and computes."""
        spread, machine = self.scenario.spread, self.network.add_host()
        line = self._between(SLOWEST_LINE * 30 / spread, spread)
        machine.uplink = machine.downlink = line
        p2p, service, directory = await self._connect(machine)
        seconds = self._between(1 / FASTEST, spread)
        peer = Peer(self, stage, machine, seconds)
        hop = None
        if stage + 1 < self.stages:
            shared = directory, Measurements(), service, PATIENCE, p2p.metrics, machine.rng
            hop = Hop(stage + 1, self.stages, *shared)
        works = Works(2**30, PATIENCE.microbatch_timeout)
        host = StageHost(stage, p2p.peer_id, directory, peer, works, hop, PATIENCE, max_staleness=self.max_staleness)
        service.hosts[stage] = host

        async def serve() -> None:
            host.start()
            directory.start()
            directory.watch({stage, min(stage + 1, self.stages - 1)})
            await directory.read_all()
            while True:
                await directory.declare(host.record())
                await asyncio.sleep(DECLARE_SECONDS)

        self.watch(machine.spawn(serve()))
        crossings = 2 if 0 < stage < self.stages - 1 else 1
        self._rates[peer] = min(1 / seconds, line / (crossings * BYTES))
        self._since[peer] = self.now()
        self.living[stage].append(peer)
        self.hosts.append((machine, host, peer))
        return peer

    def account(self, peer: Peer) -> None:
        """What it could have done since the last time."""
        self.capacity[peer.stage] += self._rates[peer] * (self.now() - self._since[peer])
        self._since[peer] = self.now()

    def slow_down(self, peer: Peer, seconds: float) -> None:
        """For so many seconds its device is 100 times slower."""
        usual, rate = peer.seconds, self._rates[peer]
        self.account(peer)
        peer.seconds = {kind: min(100 * each, each + seconds) for kind, each in usual.items()}
        self._rates[peer] = rate / 100

        def recover() -> None:
            peer.seconds = usual
            if peer.machine.is_up:
                self.account(peer)
            self._rates[peer] = rate

        asyncio.get_running_loop().call_later(seconds, recover)

    def end(self, peer: Peer) -> None:
        """It dies without a word."""
        self.account(peer)
        self.living[peer.stage].remove(peer)
        self.deaths += 1
        if self.rng.random() < 0.5:
            peer.machine.power_off()
        else:
            peer.machine.crash()

    async def live(self, stage: int, until: float) -> None:
        """A place of a stage: peers hold it one after the other."""
        while True:
            peer = await self.add_peer(stage)
            await asyncio.sleep(until)
            if peer.machine.is_up:
                self.end(peer)
            await asyncio.sleep(self.rng.expovariate(1 / self.scenario.pause) + DOWNLOAD_SECONDS)
            until = self.rng.expovariate(1 / self.scenario.session)

    # --- drivers ------------------------------------------------------------------------------------------------------

    async def drive(self) -> Host:  # type: ignore[override]
        """A driver comes, and sends microbatches until the simulation is over."""
        machine = self.network.add_host()
        p2p, service, directory = await self._connect(machine)
        seat = self.board.seat()

        async def close(step: int) -> None:
            self.begun.setdefault(step + 1, self.now())
            if step + 1 >= self.scenario.steps:
                self.is_over.set()
            await service.close_step(step, self.stages)

        steps = Steps(seat, self.target, close, is_synchronous=self.max_staleness is None)
        shared = directory, Measurements(), service, PATIENCE, p2p.metrics, machine.rng
        driver = Driver(
            p2p.peer_id.to_bytes(),
            Hop(0, self.stages, *shared),
            steps,
            in_flight=self.scenario.in_flight,
            metrics=p2p.metrics,
            seed=len(self.board.seats) * 2**32,
        )

        async def send() -> None:
            while True:
                number = machine.rng.randrange(1, 100)
                with contextlib.suppress(MicrobatchError):  # the metrics count it
                    brought = await driver.carry(torch.full((1, 1), float(number)), torch.tensor([0.5]))
                    self.done += 1
                    assert brought.losses.tolist() == [number * 2.0 ** (self.stages - 1) + 0.5]

        async def work() -> None:
            directory.start()
            directory.watch(range(self.stages))
            await directory.read_all()
            steps.start()
            await asyncio.gather(*[send() for _ in range(self.scenario.in_flight)])

        self.watch(machine.spawn(work()))
        return machine

    def watch(self, task: asyncio.Task[Any]) -> None:
        """If the task fails, so does the simulation."""
        self._watched.add(task)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[Any]) -> None:
        self._watched.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.error = self.error or task.exception()
            self.is_over.set()

    def end_driver(self, machine: Host, number: int) -> None:
        """A driver dies; the others notice a while later."""
        machine.power_off()
        asyncio.get_running_loop().call_later(DRIVER_SECONDS, self.board.hear, number, None)


# --- what else happens ------------------------------------------------------------------------------------------------


async def bursts(swarm: Swarm, drivers: list[Host]) -> None:
    """Each peer is 100 times slower for a minute, about every ten minutes."""
    slow: dict[Peer, float] = {}
    while True:
        await asyncio.sleep(swarm.rng.expovariate(sum(map(len, swarm.living)) / 600.0))
        peer = swarm.rng.choice([peer for stage in swarm.living for peer in stage])
        if slow.get(peer, 0.0) <= swarm.now():
            slow[peer] = swarm.now() + 60.0
            swarm.slow_down(peer, 60.0)


async def lonely(swarm: Swarm, drivers: list[Host]) -> None:
    """All peers of a stage die, and one comes a minute later."""
    await asyncio.sleep(60.0)
    stage = swarm.stages // 2
    for peer in [*swarm.living[stage]]:
        swarm.end(peer)
    await asyncio.sleep(60.0)
    await swarm.add_peer(stage)
    await asyncio.sleep(60.0)
    for _ in range(swarm.scenario.peers - 1):
        await swarm.add_peer(stage)


async def cut(swarm: Swarm, drivers: list[Host]) -> None:
    """The network is in two halves for 30 s."""
    await asyncio.sleep(60.0)
    hosts = swarm.rng.sample(swarm.network.hosts, len(swarm.network.hosts))
    swarm.network.partition(hosts[::2], hosts[1::2])
    await asyncio.sleep(30.0)
    swarm.network.heal()


async def lost_driver(swarm: Swarm, drivers: list[Host]) -> None:
    """A driver dies, and another one comes."""
    await asyncio.sleep(60.0)
    swarm.end_driver(drivers[0], 0)
    await asyncio.sleep(60.0)
    await swarm.drive()


async def latecomers(swarm: Swarm, drivers: list[Host]) -> None:
    """As many peers again come to each stage, all in the same minute."""
    await asyncio.sleep(60.0)
    for _ in range(swarm.scenario.peers):
        for stage in range(swarm.stages):
            await asyncio.sleep(60.0 / swarm.scenario.peers / swarm.stages)
            await swarm.add_peer(stage)


STORIES: dict[str, Callable[[Swarm, list[Host]], Awaitable[None]]] = {
    each.__name__: each for each in (bursts, lonely, cut, lost_driver, latecomers)
}
SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "stable": Scenario(session=math.inf),
    "asynchronous": Scenario(max_staleness=1),
    "uneven": Scenario(spread=300.0),
    **{name: Scenario(story=name) for name in STORIES},
}
"""``plain``: peers of different speed that come and die. ``stable``: nobody dies. ``asynchronous``: nobody waits for
steps. ``uneven``: speeds and lines 1 : 300. The others have a story on top of ``plain``."""


async def _tell(story: Awaitable[None]) -> None:
    await story


def simulate(name: str, scenario: Scenario, seed: int = 0) -> Figures:
    """Run one scenario."""
    began_processor = time.process_time()

    async def main() -> Figures:
        trace = Trace()
        swarm = Swarm(scenario, trace)
        loop, session = asyncio.get_running_loop(), scenario.session
        for stage in range(scenario.stages):
            for _ in range(scenario.peers):
                left = swarm.rng.expovariate(1 / session) if session < math.inf else 1e9
                swarm.watch(loop.create_task(swarm.live(stage, left)))
        await asyncio.sleep(10.0)
        for peer in swarm.hosts:
            swarm.account(peer[2])
        swarm.capacity = [0.0] * scenario.stages
        began = swarm.begun[0] = swarm.now()
        drivers = [await swarm.drive() for _ in range(scenario.drivers)]
        if scenario.story:
            swarm.watch(loop.create_task(_tell(STORIES[scenario.story](swarm, drivers))))
        await swarm.is_over.wait()
        if swarm.error is not None:
            raise swarm.error
        return figures(swarm, name, seed, began, trace)

    made = run(main(), seed=seed, time_limit=3600.0 + 120.0 * scenario.steps)
    made.processor_seconds = round(time.process_time() - began_processor, 1)
    hops = max(1, made.microbatches * scenario.stages)
    made.processor_ms_per_hop = round(1000 * made.processor_seconds / hops, 2)
    return made


def figures(swarm: Swarm, name: str, seed: int, began: float, trace: Trace) -> Figures:
    """What has come of it until now."""
    seconds, scenario = swarm.now() - began, swarm.scenario
    for stage in swarm.living:
        for peer in stage:
            swarm.account(peer)
    poorest = min(swarm.capacity) / seconds
    moments = sorted(swarm.begun.values())
    lengths = [b - a for a, b in itertools.pairwise(moments)]
    throughput = swarm.done / seconds
    averaging = AVERAGING_SECONDS * len(lengths) if scenario.max_staleness is None else 0.0
    # What is under way at the end is computed in part.
    credited = [holders.credited for holders in swarm.groups]
    everything = set().union(*credited)
    lost = swarm.passes - swarm.done * (2 * scenario.stages - 1)
    return Figures(
        scenario=name,
        seed=seed,
        steps=len(lengths),
        microbatches=swarm.done,
        seconds=round(seconds, 1),
        throughput=round(throughput, 2),
        poorest=round(poorest, 2),
        share=round(throughput / poorest, 3),
        share_between_steps=round(swarm.done / (seconds - averaging) / poorest, 3),
        median_step=round(median(lengths), 1),
        longest_step=round(max(lengths), 1),
        deaths=swarm.deaths,
        dropped=swarm.metric("microbatches_dropped").total(),
        resent=dict(swarm.metric("microbatches_resent")),
        repaired=dict(swarm.metric("hops_repaired")),
        lost_per_death=round(lost / (2 * scenario.stages - 1) / max(1, swarm.deaths), 2),
        counted_twice=sum(count - 1 for each in credited for count in each.values()),
        lost_with_peer=sum(len(everything - each.keys()) for each in credited),
        missed_steps=sum(each.missed for each in swarm.groups),
        out_of_step=swarm.out_of_step,
        trace=trace.digest(),
        processor_seconds=0.0,
        processor_ms_per_hop=0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="plain")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("steps", "microbatches", "stages", "peers", "drivers", "in-flight"):
        parser.add_argument(f"--{name}", type=int, help=f"default: {getattr(Scenario(), name.replace('-', '_'))}")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    names = [*SCENARIOS] if args.scenario == "all" else [args.scenario]
    given = {key: value for key, value in vars(args).items() if key not in ("scenario", "seed") and value is not None}
    for name in names:
        made = simulate(name, replace(SCENARIOS[name], **given), args.seed)
        for key, value in asdict(made).items():
            print(f"{key:>22}  {value}", flush=True)
        print(json.dumps(asdict(made)), flush=True)


if __name__ == "__main__":
    main()
