"""Peers of a run of :class:`shoal.DiLoCo` that come and go, and whether they stay one run.

python -m tests.simulation.outer_churn --seeds 100
python -m tests.simulation.outer_churn --kind delayed --from-seed 17 --seeds 1

Six peers with a small model train for some minutes of virtual time. Meanwhile some die or leave, others come, stand
still for a while, lose their connections, or are cut off. Then there is peace for a while. All is real but the time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import shoal
from shoal.testing import Host, Link, Machine, Network, run
from tests.simulation.facades import facades_in_virtual_time, in_virtual_thread, pause

LINK = Link(delay=(0.01, 0.05), jitter=0.005)
SIZE, VALUES = 6, 24
CHURN_SECONDS, PEACE_SECONDS = 90.0, 60.0
STEP_SECONDS = 0.2
SYNC_EVERY = 10
MATCHMAKING_SECONDS = 4.0
# In peace, each peer makes an update at least so often.
LONGEST_PAUSE_SECONDS = 25.0
# A peer that comes too late to a round makes its update when the others make the next one.
MOST_UPDATES_BEHIND = 2

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"fragments": 2, "fragment_sync_delay": 3},
    "open": {"fragments": 2, "fragment_sync_delay": None},
    "4 bits": {"compression": shoal.Blockwise4BitQuantization()},
    "samples": {"sync_every": None, "target_batch_size": SIZE * SYNC_EVERY},
    "clients": {},
}
# In runs with clients, one of so many peers is one.
PEERS_PER_CLIENT = 3


class Peer:
    """One peer, which pulls its model towards a point of its own."""

    def __init__(self, churn: Churn, host: Host, number: int) -> None:
        self.churn, self.host, self.number = churn, host, number
        self.seconds_per_step = STEP_SECONDS * host.rng.uniform(0.8, 1.25)
        self.still_until = 0.0
        """It makes no step before this loop time."""
        self.leaves = False
        self.opt: shoal.DiLoCo | None = None
        self.versions = Counter[int]()
        """Of each fragment the newest version that was seen."""
        self.updated_at = 0.0
        """Loop time of its last new version."""
        self.longest_pause = 0.0

    def live(self) -> None:
        """The program of this peer."""
        loop, host = self.churn.loop, self.host
        is_client = self.churn.kind == "clients" and self.number % PEERS_PER_CLIENT == PEERS_PER_CLIENT - 1
        self.dht = shoal.DHT(
            self.churn.some_addresses(),
            start=True,
            transport=host.transport(),
            rng=host.rng,
            shutdown_timeout=3,
            client_mode=is_client,
        )
        generator = torch.Generator().manual_seed(self.number)
        target = 1 + torch.randn(VALUES, generator=generator)
        # The first peers begin alike; newcomers do not know better.
        model = [torch.nn.Parameter(torch.zeros(VALUES // 4)) for _ in range(4)]
        options = {"sync_every": SYNC_EVERY, "batch_size_per_step": 1, **KINDS[self.churn.kind]}
        self.opt = opt = shoal.DiLoCo(
            dht=self.dht,
            run_id="run",
            optimizer=torch.optim.SGD(model, lr=0.05),
            matchmaking_time=MATCHMAKING_SECONDS,
            averaging_timeout=20.0,
            load_state_timeout=60.0,
            **options,
        )
        if not is_client:
            self.churn.addresses[self] = self.dht.get_visible_maddrs()
        self.updated_at = loop.time()
        while not self.leaves:
            pause(self.seconds_per_step * host.rng.uniform(0.9, 1.1))
            while (still := self.still_until - loop.time()) > 0:
                pause(still)
            opt.zero_grad()
            noise = torch.randn(VALUES, generator=generator)
            (0.5 * (torch.cat(model) - target - 0.3 * noise).square().sum()).backward()
            opt.step()
            self.look()
        opt.shutdown()
        self.dht.shutdown()

    def look(self) -> None:
        """Check what this peer has now."""
        assert self.opt is not None
        now = self.churn.loop.time()
        for fragment, (link, digest) in enumerate(self.opt.outer_versions()):
            known = self.churn.bits.setdefault((fragment, link.version, link.hash), digest)
            assert known == digest, f"{now:.1f} s: {self} has other bits of version {link.version} than others"
            before = self.versions[fragment]
            assert link.version >= before, f"{now:.1f} s: {self} goes back from version {before} to {link.version}"
            if link.version > before:
                self.versions[fragment] = link.version
                who = self.churn.links.setdefault((fragment, link.version), {}).setdefault(link.hash, [])
                who.append((now, self.number))
                if self.churn.verbose:
                    what = f"version {link.version} of fragment {fragment} is {link.hash.hex()[:4]}"
                    print(f"{now:.2f} s, {self.host.index}: {what}, {self.opt.last_round}", flush=True)
                if self.churn.peace_at:
                    self.longest_pause = max(self.longest_pause, now - max(self.updated_at, self.churn.peace_at))
                self.updated_at = now

    def __repr__(self) -> str:
        return f"peer {self.number}"


class Churn:
    """A run of peers that come and go.

    Args:
        kind: one of :data:`KINDS`.
        seconds: of virtual time, for so long there is no peace.
        peace: for so many seconds afterwards there is.
        verbose: print all that happens.
    """

    def __init__(
        self,
        kind: str,
        seed: int,
        *,
        seconds: float = CHURN_SECONDS,
        peace: float = PEACE_SECONDS,
        verbose: bool = False,
    ) -> None:
        self.kind, self.seconds, self.peace, self.verbose = kind, seconds, peace, verbose
        self.rng = random.Random(seed)
        self.peers: list[Peer] = []
        self.addresses: dict[Peer, Any] = {}
        self.bits: dict[tuple[int, int, bytes], bytes] = {}
        """Hashes of all outer parameters that anybody had, by fragment, version and link."""
        self.links: dict[tuple[int, int], dict[bytes, list[tuple[float, int]]]] = {}
        """By fragment and version: the links that anybody had, since when, and who."""
        self.peace_at = 0.0
        self.events: Counter[str] = Counter()
        self.tasks: dict[Peer, asyncio.Task[None]] = {}
        run(self._main(), seed=seed, time_limit=1000)

    @property
    def living(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.host.is_up and not peer.leaves]

    def some_addresses(self) -> list[Any]:
        """Of peers through which another one joins."""
        known = [peer for peer in self.living if peer in self.addresses]
        return [address for peer in known[-3:] for address in self.addresses[peer]]

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.network = Network(LINK)
        with facades_in_virtual_time():
            for _ in range(SIZE):
                self.add()
                await asyncio.sleep(0.5)
            await self._disturb()
            self.peace_at = self.loop.time()
            await asyncio.sleep(self.peace)
            self.check()
            for peer in self.living:
                peer.leaves = True
            left = {task for peer, task in self.tasks.items() if peer.host.is_up}
            _, left = await asyncio.wait(left, timeout=60)
            self._raise_errors()
            assert not left, f"{len(left)} peers do not end"

    def add(self) -> None:
        """One more peer."""
        peer = Peer(self, self.network.add_host(), len(self.peers))
        self.peers.append(peer)
        self.tasks[peer] = peer.host.spawn(in_virtual_thread(peer.live))

    def _raise_errors(self) -> None:
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def _disturb(self) -> None:
        ends = self.loop.time() + self.seconds
        await asyncio.sleep(12)
        while self.loop.time() < ends:
            await asyncio.sleep(self.rng.uniform(1, 8))
            event = self.rng.choice(EVENTS)
            self.events[event.__name__] += 1
            if self.verbose:
                print(f"{self.loop.time():.1f} s: {event.__name__}", flush=True)
            event(self)
            self._raise_errors()

    # --- the end ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After some peace, the living are one run, and go on."""
        self._raise_errors()
        now = self.loop.time()
        for peer in self.living:
            pause = max(peer.longest_pause, now - peer.updated_at)
            assert pause < LONGEST_PAUSE_SECONDS, f"{peer} had no update for {pause:.1f} s although nothing happened"
        quiet = self.peace_at + self.peace / 2
        for (fragment, version), lineages in self.links.items():
            if len(lineages) > 1:
                made_at = max(who[0][0] for who in lineages.values())
                assert made_at < quiet, f"there are several versions {version} of fragment {fragment}: {lineages}"
        for fragment in self.living[0].versions:
            versions = [peer.versions[fragment] for peer in self.living]
            assert max(versions) - min(versions) <= MOST_UPDATES_BEHIND, (
                f"the versions of fragment {fragment} are {versions}"
            )

    @property
    def forks(self) -> int:
        """How many versions had several links."""
        return sum(len(each) > 1 for each in self.links.values())


def die(churn: Churn) -> None:
    churn.rng.choice(churn.living).host.crash()
    churn.add()


def vanish(churn: Churn) -> None:
    churn.rng.choice(churn.living).host.power_off()
    churn.add()


def leave(churn: Churn) -> None:
    churn.rng.choice(churn.living).leaves = True
    churn.add()


def stand_still(churn: Churn) -> None:
    peer = churn.rng.choice(churn.living)
    peer.still_until = churn.loop.time() + churn.rng.uniform(1, 15)


def break_connections(churn: Churn) -> None:
    one = churn.rng.choice(churn.living)
    for other in churn.living:
        if other is not one:
            churn.network.break_connections(one.host, other.host)


def cut_off(churn: Churn) -> None:
    """A peer reaches nobody for a while."""
    one = churn.rng.choice(churn.living)
    churn.network.partition([one.host], [peer.host for peer in churn.living if peer is not one])
    churn.loop.call_later(churn.rng.uniform(0.5, 10), churn.network.heal)


EVENTS: list[Callable[[Churn], object]] = [die, die, vanish, leave, stand_still, break_connections, cut_off]


class _Lines(logging.Formatter):
    """Each line begins with the virtual time, and the number of the host."""

    def format(self, record: logging.LogRecord) -> str:
        host = Machine.current()
        return f"{time.monotonic():.2f} s, {host.index if isinstance(host, Host) else '-'}: {super().format(record)}"


def _try(task: tuple[str, int, float, float, bool]) -> tuple[Counter[str], int, int, float] | str:
    kind, seed, seconds, peace, verbose = task
    torch.set_num_threads(1)
    began = time.process_time()
    try:
        churn = Churn(kind, seed, seconds=seconds, peace=peace, verbose=verbose)
    except Exception as e:
        if verbose:
            traceback.print_exc()
        where = traceback.extract_tb(e.__traceback__)[-1].name
        return f"{kind!r} seed {seed}: {type(e).__name__} {e} ({where})"[:600]
    return churn.events, churn.forks, max(version for _, version in churn.links), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    parser.add_argument("--seconds", type=float, default=CHURN_SECONDS, help="of churn, in virtual time")
    parser.add_argument("--peace", type=float, default=PEACE_SECONDS, help="seconds of peace afterwards")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    seeds = range(arguments.from_seed, arguments.from_seed + arguments.seeds)
    rest = (arguments.seconds, arguments.peace, arguments.verbose)
    tasks = [(kind, seed, *rest) for seed in seeds for kind in arguments.kind or KINDS]
    events: Counter[str] = Counter()
    wrong, forks, versions, used = 0, 0, 0, 0.0
    if arguments.verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(_Lines())
        logging.basicConfig(handlers=[handler])
        logging.getLogger("shoal.optim").setLevel(logging.DEBUG)
    prepare = None if arguments.verbose else logging.disable
    with ProcessPoolExecutor(arguments.processes, initializer=prepare) as processes:
        for found in processes.map(_try, tasks):
            if isinstance(found, str):
                wrong += 1
                print(found, flush=True)
            else:
                events, forks, versions, used = (
                    a + b for a, b in zip((events, forks, versions, used), found, strict=True)
                )
    print(f"{len(tasks)} runs, {wrong} wrong; {used / max(1, len(tasks) - wrong):.1f} s of a core for each")
    print(f"events: {dict(events)}; {versions} versions, {forks} of them twice")


if __name__ == "__main__":
    main()
