"""A training swarm of internet size, simulated in virtual time on one core: what does each peer pay, and what is lost?

    python -m benchmarks.swarm_simulation --peers 1250 --minutes 20
    python -m benchmarks.swarm_simulation --peers 300 --minutes 1440
    python -m benchmarks.swarm_simulation --keys 60 300 1250 2500 5000 10000

Everything is real but the training itself: each peer has a node of the table, a tracker, an averager that finds groups
of 16 and reduces a small vector in them, and offers its state; newcomers download it. Only batches are made by waiting
(``tests/simulation/training.py``).

- Lines: uplinks and downlinks are log-normal around 3 and 25 Mbit/s, which from 2015 to 2024 was the least that the FCC
  called broadband, so that half of all homes have less. That they spread by a factor of e is an assumption. Measured
  homes had 212 and 900 kbit/s in 2003, with half that ratio (Lakshminarayanan and Padmanabhan, Some findings on the
  network performance of broadband hosts, IMC). Round trips lie evenly between 20 and 300 ms: their median is that of
  the King data set, 159 ms (Dabek et al., Vivaldi: a decentralized network coordinate system, SIGCOMM 2004).
- Churn: sessions are exponential with a median of an hour. Who goes, half of them without a word, is replaced at once.
- 5 % of the peers are faulty: they freeze, send NaN, or have a clock that is five minutes off. 5 % lie: about their
  samples, their epoch, or the end of the epoch.

Goodput is the share of the samples that honest peers could have made which was averaged with others. It is counted from
the moment when all peers are there and have made an epoch.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

import psutil
import torch

from shoal.dht.key_sharding import KeySharding
from shoal.testing import Host, Link, Network, run
from tests.simulation.liars import Boaster, Hasty, Prophet
from tests.simulation.training import Course, Swarm, Trainer

MEDIAN_UPLINK, MEDIAN_DOWNLINK = 3e6 / 8, 25e6 / 8
SPREAD_OF_LINES = 1.0
LINES = Link(delay=(0.01, 0.15), jitter=0.005, dial_failure=0.01)
MEDIAN_SESSION = 3600.0
SHARE_FAULTY, SHARE_LYING = 0.05, 0.05
CLOCK_ERROR = 300.0
GROUP_SIZE = 16
EPOCH_SECONDS, BATCH_SECONDS, BATCH = 60.0, 15.0, 16
SPREAD_OF_SPEEDS = 0.5
ARRIVALS_AT_ONCE = 32
TABLE = ("rpc_find", "rpc_store", "rpc_ping")
MINUTES_LATELY = 5


class Spoilt(Trainer):
    """Its gradients are NaN."""

    def gradient(self) -> torch.Tensor:
        return torch.full((self.course.values,), math.nan)


class Freezing(Trainer):
    """Its machine stands still after a while, for ever."""

    async def live(self) -> None:
        asyncio.get_running_loop().call_later(
            self.host.rng.uniform(60, 600), self.swarm.remove_frozen, self
        )  # others see only silence
        await super().live()


FAULTY, LYING = (Spoilt, Freezing, Trainer), (Boaster, Prophet, Hasty)
"""The third kind of faulty peer is an ordinary one whose clock is wrong."""


class LargeSwarm(Swarm):
    """Peers that come and go."""

    def __init__(self, network: Network, course: Course, rng: random.Random, faulty: float, lying: float) -> None:
        super().__init__(network, course)
        self.rng, self.faulty, self.lying = rng, faulty, lying
        self.honest: list[Trainer] = []
        self.arrivals_failed = 0
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def arrive(self) -> None:
        """One more peer, honest or not."""
        rng, roll = self.rng, self.rng.random()
        kind: type[Trainer] = Trainer
        clock_offset = 0.0
        if roll < self.faulty:
            kind = rng.choice(FAULTY)
            clock_offset = CLOCK_ERROR if kind is Trainer else 0.0
        elif roll < self.faulty + self.lying:
            kind = rng.choice(LYING)

        def prepare(host: Host) -> None:
            host.uplink = MEDIAN_UPLINK * math.exp(rng.gauss(0, SPREAD_OF_LINES))
            host.downlink = MEDIAN_DOWNLINK * math.exp(rng.gauss(0, SPREAD_OF_LINES))
            host.clock_offset = clock_offset

        speed = BATCH / BATCH_SECONDS * math.exp(rng.gauss(0, SPREAD_OF_SPEEDS))
        try:
            trainer = await self.add(speed, make=kind, prepare=prepare, strict=False)
        except Exception as e:  # a newcomer on a bad line may fail to join, which is counted
            self.arrivals_failed += 1
            print(f"a newcomer could not join: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
            return
        if kind is Trainer and not clock_offset:
            self.honest.append(trainer)
        session = rng.expovariate(math.log(2) / MEDIAN_SESSION)
        asyncio.get_running_loop().call_later(session, self._end_session, trainer)

    def bytes_sent(self) -> dict[Trainer, Counter[str]]:
        """By each peer that is there, since it came, and for what."""
        return {trainer: bytes_of(trainer) for trainer in self.living}

    def remove_frozen(self, trainer: Trainer) -> None:
        if trainer.host.is_up:
            self.remove(trainer, silently=True)

    def _end_session(self, trainer: Trainer) -> None:
        if trainer.host.is_up:
            if self.rng.random() < 0.5:
                self._in_background(self.dismiss(trainer))
            else:
                self.remove(trainer, silently=self.rng.random() < 0.5)
        self._in_background(self.arrive())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)


@dataclass
class Figures:
    """What came of it. Traffic is what a peer sends."""

    peers: int
    virtual_minutes: float
    goodput: float
    epochs: float
    epochs_lost: float
    """Per honest peer and hour: skipped because others were ahead, or made alone."""
    rounds_failed: float
    """Part of all rounds of honest peers."""
    median_group: float
    small_groups: float
    """Part of the members of all groups that were in one of less than half the size."""
    table_kB_per_hour: float
    progress_kB_per_hour: float
    all_kB_per_hour: float
    busiest_kB_per_hour: float
    """Of the peer that sent most, all together."""
    table_lately_kB_per_hour: float
    """In the last five minutes, or since all are there if that is later."""
    all_lately_kB_per_hour: float
    companions: float
    depths: dict[int, int]
    arrivals_failed: int
    spread_of_models: float
    """Largest distance of an honest peer's loss from the median one."""
    memory_kB_per_peer: float
    processor_seconds: float


def bytes_of(trainer: Trainer) -> Counter[str]:
    handlers = trainer.node.p2p.metrics.bytes_sent_by_handler
    sent: Counter[str] = Counter()
    for name, size in handlers.items():
        sent[name.rpartition(".")[2]] += size
    return sent


async def simulate(peers: int, minutes: float, faulty: float, lying: float, matchmaking_time: float) -> Figures:
    loop, began = asyncio.get_running_loop(), time.process_time()
    memory = psutil.Process().memory_info().rss
    target = round(peers * BATCH / BATCH_SECONDS * math.exp(SPREAD_OF_SPEEDS**2 / 2) * EPOCH_SECONDS)
    course = Course(
        target_batch_size=target, batch_size=BATCH, matchmaking_time=matchmaking_time, group_size=GROUP_SIZE
    )
    swarm = LargeSwarm(Network(LINES), course, random.Random(loop.rng.getrandbits(64)), faulty, lying)
    await swarm.arrive()
    while len(swarm.living) < peers:
        await asyncio.gather(*[swarm.arrive() for _ in range(min(ARRIVALS_AT_ONCE, peers - len(swarm.living)))])
    say(f"{peers} peers are there after {loop.time():.0f} virtual and {time.process_time() - began:.0f} real seconds")
    await asyncio.sleep(1.5 * EPOCH_SECONDS)
    since, sent = swarm.forget(), [swarm.bytes_sent()]
    first_epochs = {trainer: trainer.epoch for trainer in swarm.trainers}
    for minute in range(max(1, math.ceil(minutes))):
        await asyncio.sleep(60.0)
        sent.append(swarm.bytes_sent())
        gc.collect()  # simulations collect so rarely that garbage would be most of the memory
        figures = figures_of(swarm, since, sent, first_epochs, memory, time.process_time() - began)
        say(f"minute {minute + 1}: {json.dumps(vars(figures))}")
    return figures


def figures_of(
    swarm: LargeSwarm,
    since: float,
    sent_by_minute: list[dict[Trainer, Counter[str]]],
    first_epochs: dict[Trainer, int],
    memory: int,
    seconds: float,
) -> Figures:
    hours = (asyncio.get_running_loop().time() - since) / 3600
    stayed = [trainer for trainer in swarm.living if trainer in sent_by_minute[0]]
    sent = [sent_by_minute[-1][trainer] - sent_by_minute[0][trainer] for trainer in stayed]
    lately = sent_by_minute[-1 - MINUTES_LATELY :]
    sent_lately = [lately[-1][trainer] - lately[0][trainer] for trainer in stayed]
    hours_lately = (len(lately) - 1) / 60
    honest = swarm.honest
    sizes: Counter[int] = Counter()
    for trainer in honest:
        sizes += trainer.record.group_sizes
    members = sorted(sizes.elements())
    losses = [trainer.loss for trainer in honest if trainer.host.is_up and trainer.epoch]
    lost = sum(trainer.record.lost_epochs + trainer.record.alone + trainer.record.failed for trainer in honest)
    rounds = sum(trainer.record.rounds + trainer.record.failed for trainer in honest)
    living_honest = [trainer for trainer in stayed if trainer in set(honest)]
    return Figures(
        peers=len(swarm.living),
        virtual_minutes=60 * hours,
        goodput=swarm.goodput(honest, since=since),
        epochs=fmean(trainer.epoch - first_epochs[trainer] for trainer in living_honest),
        epochs_lost=lost / len(honest) / hours,
        rounds_failed=sum(trainer.record.failed for trainer in honest) / max(1, rounds),
        median_group=median(members) if members else 0,
        small_groups=sum(size < GROUP_SIZE / 2 for size in members) / max(1, len(members)),
        table_kB_per_hour=fmean(sum(each[name] for name in TABLE) for each in sent) / hours / 1e3,
        progress_kB_per_hour=fmean(each["training_progress"] for each in sent) / hours / 1e3,
        all_kB_per_hour=fmean(each.total() for each in sent) / hours / 1e3,
        busiest_kB_per_hour=max(each.total() for each in sent) / hours / 1e3,
        table_lately_kB_per_hour=fmean(sum(each[name] for name in TABLE) for each in sent_lately) / hours_lately / 1e3,
        all_lately_kB_per_hour=fmean(each.total() for each in sent_lately) / hours_lately / 1e3,
        companions=median(len(trainer.tracker.board._companions) for trainer in living_honest),
        depths=dict(Counter(trainer.tracker._depth() for trainer in stayed)),
        arrivals_failed=swarm.arrivals_failed,
        spread_of_models=max(abs(loss - median(losses)) for loss in losses),
        memory_kB_per_peer=(psutil.Process().memory_info().rss - memory) / len(swarm.living) / 1e3,
        processor_seconds=seconds,
    )


def divide_keys(peers: int, seed: int, periods: int = 12) -> None:
    """Let peers that come within one period read and write keys, without any network, until they agree about them."""
    rng = random.Random(seed)
    spreads = [KeySharding(rng.randbytes(32)) for _ in range(peers)]
    keys: dict[str, list[int]] = {}
    moves = 0
    for period in range(periods):
        rng.shuffle(spreads)
        moves = 0
        for number, spread in enumerate(spreads):
            if number % max(1, peers // 8) == 0:  # what stands there is an eighth of a period old
                keys = {}
                for each in spreads if period else spreads[:number]:
                    for place in each.places_to_write():
                        keys.setdefault(place, []).append(each.depth)
            for place in (spread.place, spread.place_beside(rng)):
                if place is not None:
                    moves += spread.learn(place, keys.get(place, []))
    read = [len(keys.get(spread.place, [])) + len(keys.get(spread.place_beside(rng) or "-", [])) for spread in spreads]
    sizes = [spread.size for spread in spreads]
    depths = dict(Counter(spread.depth for spread in spreads))
    print(
        f"{peers:7} peers: depths {depths}, {moves} changes in the last period, {len(keys)} keys of up to "
        f"{max(map(len, keys.values()))} records, {fmean(len(each.places_to_write()) for each in spreads):.2f} written "
        f"and {fmean(read):.0f} read by each peer, estimates {fmean(size or 0 for size in sizes):.0f} "
        f"(standard deviation {pstdev(size or 0 for size in sizes):.0f})",
        flush=True,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=1250)
    parser.add_argument("--minutes", type=float, default=20.0, help="virtual ones, after all have come")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faulty", type=float, default=SHARE_FAULTY, help="share of faulty peers")
    parser.add_argument("--lying", type=float, default=SHARE_LYING, help="share of liars")
    parser.add_argument(
        "--matchmaking-time",
        type=float,
        default=Course.matchmaking_time,
        help="seconds for which others wait in a round",
    )
    parser.add_argument("--keys", type=int, nargs="*", help="only divide the keys among so many peers")
    arguments = parser.parse_args()
    if arguments.keys:
        for peers in arguments.keys:
            divide_keys(peers, arguments.seed)
        return

    async def simulate_and_stop() -> None:
        figures = await simulate(
            arguments.peers, arguments.minutes, arguments.faulty, arguments.lying, arguments.matchmaking_time
        )
        for name, value in vars(figures).items():
            print(f"{name.replace('_', ' '):28}{value:.4g}" if isinstance(value, float) else f"{name:28}{value}")
        print(json.dumps(vars(figures)), flush=True)
        os._exit(0)  # to end thousands of peers in good order would take as long again

    run(simulate_and_stop(), seed=arguments.seed, time_limit=math.inf)


if __name__ == "__main__":
    main()
