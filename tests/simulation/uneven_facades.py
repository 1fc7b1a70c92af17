"""Real optimizers of honest peers whose speeds differ, in virtual time: :class:`shoal.Optimizer` and DiLoCo."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import shoal
from shoal.dht import DHT
from shoal.testing import Host, Link, Network, run
from tests.hostile.simulated import Log
from tests.simulation.facades import facades_in_virtual_time, in_virtual_thread, pause

LINK = Link(delay=(0.01, 0.05), jitter=0.005)
MATCHMAKING_SECONDS = 3.0
VALUES = 16


@dataclass
class Program:
    """What one peer does: batches of this many samples, each of which takes a while.

    Args:
        joins_at: seconds after the start.
    """

    batch_size: int
    batch_seconds: float
    joins_at: float = 0.0
    epochs: list[tuple[float, int]] = field(default_factory=list)
    """Loop times at which it was at a new epoch."""
    longest_step: float = 0.0
    """The longest call of ``step()``, in seconds, after its first epoch."""

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.batch_size / self.batch_seconds

    @property
    def epoch(self) -> int:
        return self.epochs[-1][1] if self.epochs else 0


MakeOptimizer = Callable[..., Any]


def synchronous(dht: DHT, parameters: list[torch.nn.Parameter], target: int, **options: Any) -> shoal.Optimizer:
    return shoal.Optimizer(
        dht=dht,
        run_id="run",
        target_batch_size=target,
        optimizer=torch.optim.SGD(parameters, lr=0.05),
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=20.0,
        delay_state_averaging=False,  # it would need a thread in the background
        **options,
    )


def low_communication(dht: DHT, parameters: list[torch.nn.Parameter], target: int, **options: Any) -> shoal.DiLoCo:
    return shoal.DiLoCo(
        dht=dht,
        run_id="run",
        target_batch_size=target,
        optimizer=torch.optim.SGD(parameters, lr=0.05),
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=20.0,
        **options,
    )


def train(
    programs: Sequence[Program], make: MakeOptimizer, target: int, seconds: float, *, seed: int = 0, **options: Any
) -> tuple[str, ...]:
    """Let these programs train for this long in virtual time. Returns the warnings of all of them."""

    async def main() -> tuple[str, ...]:
        loop, network, addresses = asyncio.get_running_loop(), Network(LINK), list[Any]()
        is_over = False

        def live(host: Host, program: Program) -> None:
            dht = shoal.DHT(list(addresses), start=True, transport=host.transport(), rng=host.rng, name="")
            addresses.extend(dht.get_visible_maddrs())
            parameters = [torch.nn.Parameter(torch.zeros(VALUES))]
            opt = make(dht, parameters, target, **options)
            generator = torch.Generator().manual_seed(host.index)
            program.epochs.append((loop.time(), opt.local_epoch))
            while not is_over:
                pause(program.batch_seconds * host.rng.uniform(0.9, 1.1))
                opt.zero_grad()
                noise = torch.randn(VALUES, generator=generator)
                (0.5 * (parameters[0] - 1 - 0.1 * noise).square().sum()).backward()
                began = loop.time()
                opt.step(batch_size=program.batch_size)
                if program.epoch > 0:
                    program.longest_step = max(program.longest_step, loop.time() - began)
                if opt.local_epoch != program.epoch and not is_over:  # as others leave, one may make a step alone
                    program.epochs.append((loop.time(), opt.local_epoch))
            opt.shutdown()
            dht.shutdown()

        with facades_in_virtual_time(), Log() as log:
            tasks, began = [], loop.time()
            for program in sorted(programs, key=lambda each: each.joins_at):
                await asyncio.sleep(max(0.3, began + program.joins_at - loop.time()))
                host = network.add_host()
                tasks.append(host.spawn(in_virtual_thread(functools.partial(live, host, program))))
            await asyncio.sleep(began + seconds - loop.time())
            warnings = tuple(record.getMessage() for record in log.records)
            is_over = True
            _, left = await asyncio.wait(tasks, timeout=120)
            for task in set(tasks) - left:
                task.result()
            assert not left, f"{len(left)} peers do not end"
            return warnings

    return run(main(), seed=seed, time_limit=10_000)
