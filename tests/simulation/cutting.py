"""Rounds in which anything breaks at any moment, and whether each result is what it says.

python -m tests.simulation.cutting --seeds 1000
python -m tests.simulation.cutting --kind "many calls" --from-seed 17 --seeds 1

The values are whole numbers that tell the place and the member, so that any value which is lost, counted twice or put
in the wrong place is seen. As soon as a member has its result, its tensors are filled with something else, as its user
may do.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import logging
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.control import RoundResult, StepControl
from shoal.testing import Host, Link
from tests.simulation.breaking import AUX, CLIENT, NODE, SIZE, VALUES, Broken

SPENT = -(2.0**30)
"""What a member puts into its tensors when it has its result."""
MARK = 2**12
"""The multiples of it tell the member; what is left, the place."""
MARKS = (4, 8, 16, 64, 256)

KINDS: dict[str, dict[str, Any]] = {
    "many calls": {},
    "one call": {"link": Link(delay=0.005)},
    "client": {"modes": (NODE, NODE, CLIENT, NODE)},
    "auxiliary": {"modes": (NODE, AUX, NODE, NODE)},
    "far": {"link": Link(delay=0.1, jitter=0.02)},
    "three": {"modes": (NODE, NODE, NODE)},
    "small parts": {"part_size_bytes": 64},
    "large parts": {"part_size_bytes": 2048},
    "half of the way": {"averaging_alpha": 0.5},
    "quorum": {"quorum": 3, "quorum_grace": 0.5},
}


def own_values(index: int, count: int = VALUES) -> torch.Tensor:
    """What a member has before the round."""
    return torch.arange(count, dtype=torch.float32) + MARK * MARKS[index]


@dataclass
class Member:
    """What came of a round for one member. Members are known by their indices.

    Attributes:
        senders: who has values, of its group.
        failed, left_out: who has, as the result says.
        counted: who has a weight, as the result says.
        values: what it had when its step ended.
        alpha: how far its values have moved to the averages.
    """

    index: int
    result: RoundResult
    senders: frozenset[int]
    failed: set[int]
    left_out: set[int]
    counted: set[int]
    values: torch.Tensor
    alpha: float = 1.0

    @property
    def is_whole(self) -> bool:
        """Whether it has averages of everything, as the result says."""
        return self.result.share_averaged == 1

    @property
    def is_content(self) -> bool:
        """Whether nothing has gone wrong, as the result says."""
        return self.is_whole and not (self.failed or self.left_out or self.result.late)

    def contributors(self) -> set[frozenset[int]]:
        """Whose mean the values are: one set for each mean that occurs. Members weigh the same.

        Raises:
            AssertionError: a value is the mean of nobody.
        """
        averages = (self.values - (1 - self.alpha) * own_values(self.index)) / self.alpha
        codes = averages - torch.arange(len(self.values), dtype=torch.float32)
        return {_members_of(code, self.senders) for code in codes.div(MARK).unique().tolist()}

    def check(self) -> None:
        """The values are what the result says."""
        found = self.contributors()
        if not self.is_whole:
            found.discard(frozenset({self.index}))
        elif self.is_content:
            means = sorted(map(sorted, found))
            assert found == {self.senders}, f"{self.index} is content, but has means of {means}"
        surely = self.counted - self.failed - self.left_out
        for each in found:
            assert surely <= each, f"{self.index} counts {sorted(surely)}, but has a mean of {sorted(each)}"


@functools.lru_cache(maxsize=10_000)
def _members_of(code: float, possible: frozenset[int]) -> frozenset[int]:
    for count in range(1, len(possible) + 1):
        for members in itertools.combinations(sorted(possible), count):
            if abs(sum(MARKS[index] for index in members) / count - code) < 1e-3:
                return frozenset(members)
    raise AssertionError(f"a value that is no mean of members: {code}")


Event = Callable[[Broken, random.Random], object]


def _two(broken: Broken, rng: random.Random) -> list[Host]:
    return rng.sample(broken.hosts, 2)


def cut_pair(broken: Broken, rng: random.Random) -> None:
    broken.network.break_connections(*_two(broken, rng))


def cut_one_connection(broken: Broken, rng: random.Random) -> None:
    streams = [*_two(broken, rng)[0].streams]
    if streams:
        stream = rng.choice(streams)
        other = stream.other
        stream.end()
        other.end()


def cut_one_end(broken: Broken, rng: random.Random) -> None:
    """Only one side knows that a connection is over."""
    streams = [*_two(broken, rng)[0].streams]
    if streams:
        rng.choice(streams).vanish()


def cut_host(broken: Broken, rng: random.Random) -> None:
    one = rng.choice(broken.hosts)
    for other in broken.hosts:
        broken.network.break_connections(one, other)


def silence(broken: Broken, rng: random.Random) -> None:
    """Two hosts do not reach each other for a while, and their connections are gone when they do again."""
    one, other = _two(broken, rng)
    seconds = rng.choice([0.2, 1.0, 2.5, 4.0, 8.0])
    broken.network.partition([one], [other])

    def heal() -> None:
        broken.network.break_connections(one, other)
        broken.network.heal()

    asyncio.get_running_loop().call_later(seconds, heal)


def fail_dials(broken: Broken, rng: random.Random) -> None:
    """Half of the handshakes between two hosts fail for some seconds; their connections break now."""
    one, other = _two(broken, rng)
    link = broken.link
    shaky = Link(delay=link.delay, jitter=link.jitter, dial_failure=rng.choice([0.5, 1.0]))
    broken.network.set_link(one, other, shaky)
    broken.network.break_connections(one, other)
    seconds = rng.uniform(0.1, 5.0)
    asyncio.get_running_loop().call_later(seconds, broken.network.set_link, one, other, link)


def crash(broken: Broken, rng: random.Random) -> None:
    rng.choice(broken.hosts).crash()


def power_off(broken: Broken, rng: random.Random) -> None:
    rng.choice(broken.hosts).power_off()


def cancel(broken: Broken, rng: random.Random) -> None:
    rng.choice(broken.steps).cancel()


EVENTS: dict[Event, int] = {
    cut_pair: 8,
    cut_one_connection: 8,
    cut_one_end: 6,
    cut_host: 4,
    silence: 3,
    fail_dials: 3,
}
DEATHS: dict[Event, int] = {crash: 1, power_off: 1, cancel: 1}


@functools.lru_cache
def usual_seconds(kind: str) -> float:
    """How long such a round takes if nothing happens."""
    return Broken(**KINDS[kind]).seconds


def disturbed_round(kind: str, seed: int, *, with_deaths: bool = False) -> list[Member]:
    """A round in which things happen at random moments; who has a result.

    Args:
        with_deaths: members may also die, or leave.
    """
    options = dict(KINDS[kind])
    modes = options.get("modes", (NODE,) * SIZE)
    rng = random.Random(seed)
    events = EVENTS | DEATHS if with_deaths else EVENTS
    usual = usual_seconds(kind)
    ended: dict[int, torch.Tensor] = {}

    def interfere(broken: Broken) -> None:
        def note_end(index: int, step: StepControl) -> None:
            ended[index] = broken.tensors[index].clone()
            if not step.cancelled() and step.exception() is None:
                broken.tensors[index].fill_(SPENT)

        for index, step in enumerate(broken.steps):
            step.add_done_callback(functools.partial(note_end, index))
        loop, moment = asyncio.get_running_loop(), 0.0
        for _ in range(rng.choice([1, 1, 2, 3, 5, 8])):
            moment = rng.choice([rng.uniform(0, 1.3 * usual), moment + rng.uniform(0, 0.3), moment])
            [event] = rng.choices([*events], [*events.values()])
            loop.call_later(moment, event, broken, random.Random(rng.random()))

    tensors = [own_values(index) for index in range(len(modes))]
    broken = Broken(interfere, seed=seed, tensors=tensors, **options)
    index_of = {node.p2p.peer_id: index for index, node in enumerate(broken.nodes)}
    members = []
    for index, (step, mode) in enumerate(zip(broken.steps, modes, strict=True)):
        result = step.round
        if mode is AUX or result is None or not step.done() or step.cancelled() or step.exception() is not None:
            continue
        senders = frozenset(i for i in map(index_of.__getitem__, result.peers) if modes[i] is not AUX)
        failed = {index_of[peer] for peer in result.failed_peers}
        left_out = {index_of[peer] for peer in result.left_out_peers}
        weights = zip(result.peers, result.weights, strict=True)
        counted = {index_of[peer] for peer, weight in weights if weight}
        alpha = options.get("averaging_alpha", 1.0)
        members.append(Member(index, result, senders, failed, left_out, counted, ended[index], alpha))
    return members


def check(kind: str, seed: int, *, with_deaths: bool = False) -> Counter[str]:
    """Run one round and check every result; returns how many members ended in which way."""
    modes = KINDS[kind].get("modes", (NODE,) * SIZE)
    members = disturbed_round(kind, seed, with_deaths=with_deaths)
    for member in members:
        member.check()
    whole: dict[bytes, Member] = {}
    for member in members:
        if member.is_whole and member.alpha == 1:
            first = whole.setdefault(member.result.group_id, member)
            same = torch.equal(member.values, first.values)
            assert same, f"{first.index} and {member.index} hold averages of everything, but not the same"
    ways = Counter({"no result": sum(mode is not AUX for mode in modes) - len(members)})
    for member in members:
        ways["content" if member.is_content else "with losses" if member.is_whole else "in part"] += 1
    return ways


def _try(task: tuple[str, int, bool]) -> Counter[str] | str:
    kind, seed, with_deaths = task
    try:
        return check(kind, seed, with_deaths=with_deaths)
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1].name
        return f"{kind!r}{' with deaths' * with_deaths} seed {seed}: {type(e).__name__} {e} ({where})"[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    parser.add_argument("--deaths", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    tasks = [
        (kind, seed, arguments.deaths)
        for seed in range(arguments.from_seed, arguments.from_seed + arguments.seeds)
        for kind in arguments.kind or KINDS
    ]
    ways: Counter[str] = Counter()
    wrong = 0
    with ProcessPoolExecutor(arguments.processes, initializer=logging.disable) as processes:
        for found in processes.map(_try, tasks):
            if isinstance(found, str):
                wrong += 1
                print(found, flush=True)
            else:
                ways += found
    print(f"{len(tasks)} rounds, {wrong} wrong; members: {dict(ways)}")


if __name__ == "__main__":
    main()
